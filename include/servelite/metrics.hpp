// metrics.hpp: what happened, and what it is worth.
//
// serve() writes down every step and every token in a RunReport; summarize() turns it into the numbers
// that operators use. Definitions (times in seconds; all latencies count from the request's arrival):
//
//   TTFT   first token - arrival                     ITL   gap between two consecutive tokens
//   E2E    last token - arrival                      TPOT  (last - first token) / (tokens - 1)
//   queue  first scheduled - arrival                 makespan  first arrival to last token
//   percentiles by nearest rank: over requests, for ITL over gaps
//
// A token counts as *out* when the user can have it. The bus delivers all tokens of a batch when it is
// back, so its TTFT equals its E2E and its gaps are 0; with --stream tokens are out when sampled.
//
// Chapter: docs/10_side_by_side.md
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "request.hpp"

namespace servelite {

struct SpanRecord {
  int request, seat;
  Phase phase;
  int rows, padding, recomputed;
  bool dead;
};

struct StepRecord {
  double begin = 0, end = 0;  ///< of the forward pass, seconds after the run's start
  double schedule = 0;        ///< seconds spent deciding and keeping the books for it
  double sample = 0;          ///< seconds spent sampling from its logits
  std::vector<SpanRecord> spans;
  KvUse kv;           ///< in tokens, once the step is planned
  int waiting = 0;    ///< requests in the queue
  int would_fit = 0;  ///< how many of these would have fitted into KV memory that no token used
};

struct RequestRecord {
  int index = 0;
  double arrival = 0, first_scheduled = -1;
  double prepare = 0;                 ///< seconds for tokenising and submitting: the per-request overhead
  std::vector<double> sampled_at;     ///< when each token was sampled
  std::vector<double> out_at;         ///< when each token could leave
  std::vector<uint64_t> logits_hash;  ///< FNV-1a of the logits each token was sampled from
  std::vector<int> prompt, output;    ///< ids; output with the end-of-turn token, where there is one
  int shared_tokens = 0, preemptions = 0;
  std::string user, text, refusal;  ///< question and answer
  Finish finish = Finish::none;
};

struct RunReport {
  std::string name;
  bool streamed = true;
  int seats = 0, kv_capacity_tokens = 0;
  std::vector<RequestRecord> requests;
  std::vector<StepRecord> steps;
};

// ---- summary ----------------------------------------------------------------------------------------

struct Percentiles {  // NaN where nothing was measured
  double p50 = 0, p95 = 0, p99 = 0, mean = 0;
};

/// Nearest rank: the smallest value that at least q of all values do not exceed. Of no values: NaN.
inline double percentile(std::vector<double> values, double q) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(q * static_cast<double>(values.size()));
  return values[static_cast<size_t>(std::clamp(rank, 1.0, static_cast<double>(values.size()))) - 1];
}
inline Percentiles percentiles(const std::vector<double>& values) {
  double total = 0;
  for (const double v : values) total += v;
  return {percentile(values, 0.50), percentile(values, 0.95), percentile(values, 0.99),
          total / static_cast<double>(values.size())};
}

struct Summary {
  double makespan = 0, output_tok_s = 0, requests_s = 0;
  Percentiles ttft, itl, tpot, e2e, queue;
  int requests = 0, refused = 0, preemptions = 0;
  int64_t output_tokens = 0, prompt_tokens = 0;
  /// Rows of prefill spans, padding not counted. A preempted request's re-admission is included: its prompt
  /// and what it had sampled, but for what the prefix cache still held.
  int64_t prefill_computed = 0;
  int64_t prefill_unique = 0;  ///< distinct prompt prefixes: what had to be computed at least once
  int64_t rows_useful = 0, rows_padding = 0, rows_dead = 0, rows_recomputed = 0;
  int kv_peak_used = 0, kv_peak_reserved = 0, would_fit_most = 0;
  double schedule_s = 0, sample_s = 0, forward_s = 0, prepare_s = 0;
};

/// Number of distinct prefixes among all prompts: nodes of their trie. Sorted prompts share with their
/// neighbour what they share with anyone before them.
inline int64_t unique_prefix_tokens(std::vector<std::vector<int>> prompts) {
  std::sort(prompts.begin(), prompts.end());
  int64_t unique = 0;
  const std::vector<int>* before = nullptr;
  for (const std::vector<int>& p : prompts) {
    size_t same = 0;
    while (before && same < p.size() && same < before->size() && p[same] == (*before)[same]) ++same;
    unique += static_cast<int64_t>(p.size() - same);
    before = &p;
  }
  return unique;
}

inline Summary summarize(const RunReport& run) {
  Summary s;
  std::vector<double> ttft, itl, tpot, e2e, queue;
  std::vector<std::vector<int>> prompts;
  double first = std::numeric_limits<double>::infinity(), last = 0;
  for (const RequestRecord& r : run.requests) {
    ++s.requests;
    s.prepare_s += r.prepare;
    if (r.finish == Finish::refused) ++s.refused;
    s.preemptions += r.preemptions;
    first = std::min(first, r.arrival);
    if (r.out_at.empty()) continue;
    prompts.push_back(r.prompt);
    s.prompt_tokens += static_cast<int64_t>(r.prompt.size());
    s.output_tokens += static_cast<int64_t>(r.out_at.size());
    last = std::max(last, r.out_at.back());
    ttft.push_back(r.out_at.front() - r.arrival);
    e2e.push_back(r.out_at.back() - r.arrival);
    queue.push_back(r.first_scheduled - r.arrival);
    for (size_t i = 1; i < r.out_at.size(); ++i) itl.push_back(r.out_at[i] - r.out_at[i - 1]);
    if (r.out_at.size() > 1)
      tpot.push_back((r.out_at.back() - r.out_at.front()) / static_cast<double>(r.out_at.size() - 1));
  }
  s.ttft = percentiles(ttft), s.itl = percentiles(itl), s.tpot = percentiles(tpot);
  s.e2e = percentiles(e2e), s.queue = percentiles(queue);
  s.prefill_unique = unique_prefix_tokens(prompts);
  for (const StepRecord& step : run.steps) {
    s.schedule_s += step.schedule;
    s.sample_s += step.sample;
    s.forward_s += step.end - step.begin;
    s.kv_peak_used = std::max(s.kv_peak_used, step.kv.used);
    s.kv_peak_reserved = std::max(s.kv_peak_reserved, step.kv.reserved);
    s.would_fit_most = std::max(s.would_fit_most, step.would_fit);
    for (const SpanRecord& span : step.spans) {
      if (span.dead) {
        s.rows_dead += span.rows;
        continue;
      }
      s.rows_padding += span.padding;
      s.rows_recomputed += span.recomputed;
      s.rows_useful += span.rows - span.padding - span.recomputed;
      if (span.phase == Phase::prefill) s.prefill_computed += span.rows - span.padding;
    }
  }
  if (!e2e.empty()) {
    s.makespan = last - first;
    if (s.makespan > 0) {
      s.output_tok_s = static_cast<double>(s.output_tokens) / s.makespan;
      s.requests_s = static_cast<double>(e2e.size()) / s.makespan;
    }
  }
  return s;
}

}  // namespace servelite
