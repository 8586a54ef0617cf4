// trace.hpp: runs as a Chrome trace, to be opened at ui.perfetto.dev or chrome://tracing.
//
//   process "static"                    one per run
//     thread "scheduler"                [schedule][ forward ][sample] of every step
//     thread "seat 0"                   [ r0 prefill ][ r0 decode ][ r0 dead ]...
//     thread "request 0: Who are you?"  [ queued ][ prefill ][ decode ][ held ]   and: first token out
//     counters "KV tokens", "waiting"   at the beginning of every step
//
// A slice is a complete event (ph X) with its begin and length in microseconds, here in whole nanoseconds;
// slices of one thread never overlap. The format: "Trace Event Format", Google, 2016.
//
// Outer circle. Chapter: docs/10_side_by_side.md
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "json.hpp"
#include "metrics.hpp"

namespace servelite {

namespace trace_detail {

inline int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }
inline double microseconds(int64_t ns) { return static_cast<double>(ns) / 1e3; }

/// One event; the caller adds to it and ends the object.
inline Json& event(Json& json, const char* kind, const std::string& name, size_t process, int thread,
                   double at) {
  return json.begin_object()
      .field("ph", kind)
      .field("name", name)
      .field("pid", process)
      .field("tid", thread)
      .field("ts", microseconds(nanoseconds(at)));
}

inline Json& slice(Json& json, const std::string& name, size_t process, int thread, double begin,
                   double end) {
  const int64_t length = std::max<int64_t>(nanoseconds(end) - nanoseconds(begin), 0);
  return event(json, "X", name, process, thread, begin).field("dur", microseconds(length));
}

/// Names a process or thread and says where it stands in the list.
inline void label(Json& json, const std::string& what, const std::string& name, size_t process, int thread) {
  event(json, "M", what + "_name", process, thread, 0).key("args").begin_object().field("name", name);
  json.end_object().end_object();
  event(json, "M", what + "_sort_index", process, thread, 0).key("args").begin_object();
  json.field("sort_index", what == "process" ? static_cast<int>(process) : thread);
  json.end_object().end_object();
}

inline void write_step(Json& json, const StepRecord& step, double free_from, size_t process) {
  // step.schedule also counts the books kept after this step, so the slice may have to be cut short.
  const double decide = std::max(step.begin - step.schedule, free_from);
  slice(json, "schedule", process, 0, std::min(decide, step.begin), step.begin).key("args").begin_object();
  json.field("schedule_us", step.schedule * 1e6).field("would_fit", step.would_fit);
  json.end_object().end_object();
  slice(json, "forward", process, 0, step.begin, step.end).end_object();
  slice(json, "sample", process, 0, step.end, step.end + step.sample).end_object();

  for (const SpanRecord& span : step.spans) {
    const char* what = span.dead ? " dead" : span.phase == Phase::prefill ? " prefill" : " decode";
    slice(json, "r" + std::to_string(span.request) + what, process, 1 + span.seat, step.begin, step.end);
    json.key("args").begin_object().field("request", span.request).field("rows", span.rows);
    json.field("padding", span.padding).field("recomputed", span.recomputed).end_object().end_object();
  }

  event(json, "C", "KV tokens", process, 0, step.begin).key("args").begin_object();
  json.field("used", step.kv.used).field("reserved", step.kv.reserved).end_object().end_object();
  event(json, "C", "waiting", process, 0, step.begin).key("args").begin_object();
  json.field("requests", step.waiting).end_object().end_object();
}

inline void write_request(Json& json, const RequestRecord& r, size_t process, int thread) {
  label(json, "thread", "request " + std::to_string(r.index) + ": " + r.user, process, thread);
  if (r.first_scheduled < 0) {
    event(json, "i", std::string("not served: ") + name_of(r.finish), process, thread, r.arrival);
    json.field("s", "t").end_object();
    return;
  }
  slice(json, "queued", process, thread, r.arrival, r.first_scheduled).end_object();
  if (r.sampled_at.empty()) return;
  slice(json, "prefill", process, thread, r.first_scheduled, r.sampled_at.front()).end_object();
  slice(json, "decode", process, thread, r.sampled_at.front(), r.sampled_at.back()).end_object();
  if (r.out_at.empty()) return;
  if (r.out_at.back() > r.sampled_at.back())  // the bus was not back yet
    slice(json, "held", process, thread, r.sampled_at.back(), r.out_at.back()).end_object();
  event(json, "i", "first token out", process, thread, r.out_at.front()).field("s", "t").end_object();
}

}  // namespace trace_detail

/// All runs as one JSON text. Threads: 0 the scheduler, then the seats, then the requests.
inline std::string chrome_trace(const std::vector<RunReport>& runs) {
  using namespace trace_detail;
  Json json;
  json.begin_object().field("displayTimeUnit", "ms").key("traceEvents").begin_array();
  for (size_t i = 0; i < runs.size(); ++i) {
    const RunReport& run = runs[i];
    const size_t process = i + 1;
    label(json, "process", run.name, process, 0);
    label(json, "thread", "scheduler", process, 0);
    for (int seat = 0; seat < run.seats; ++seat)
      label(json, "thread", "seat " + std::to_string(seat), process, 1 + seat);
    double free_from = 0;
    for (const StepRecord& step : run.steps) {
      write_step(json, step, free_from, process);
      free_from = step.end + step.sample;
    }
    for (const RequestRecord& r : run.requests) write_request(json, r, process, 1 + run.seats + r.index);
  }
  return json.end_array().end_object().str() + '\n';
}

}  // namespace servelite
