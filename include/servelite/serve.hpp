// serve.hpp: the loop that drives a batcher and an executor over a workload.
//
//   arrivals -> submit() -> schedule() -> executor.run() -> sample() -> complete() -> answers
//                              ^                                            |
//                              +--------------------------------------------+
//
// Every batcher and every executor goes through this one loop, so that what differs between two runs is
// the order of the work and nothing else. Times come from a Clock: the real one, or one that a test (or a
// simulated executor) moves by hand.
//
// Chapter: docs/10_side_by_side.md
#pragma once

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "metrics.hpp"
#include "request.hpp"
#include "sampler.hpp"
#include "tokenizer.hpp"

namespace servelite {

/// Seconds since the run's start.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual double now() = 0;
  virtual void wait_until(double time) = 0;
};

class RealClock final : public Clock {
 public:
  double now() override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  void wait_until(double time) override {
    std::this_thread::sleep_for(std::chrono::duration<double>(time - now()));
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Stands still until it is moved.
class ManualClock final : public Clock {
 public:
  double now() override { return time_; }
  void wait_until(double time) override { time_ = std::max(time_, time); }
  void advance(double seconds) { time_ += seconds; }

 private:
  double time_ = 0;
};

/// FNV-1a over 32-bit words: a fingerprint, not a secret.
inline uint64_t fnv1a(const void* data, size_t bytes, uint64_t hash = 0xcbf29ce484222325ull) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i + 4 <= bytes; i += 4) {
    uint32_t word;
    std::memcpy(&word, p + i, 4);
    hash = (hash ^ word) * 0x100000001b3ull;
  }
  return hash;
}

/// Counts rows whose K/V some step has computed before. For the books only: a hash of the prefix will do.
class ComputedBefore {
 public:
  int count(const Span& span, const Sequence& s) {
    int before = 0;
    uint64_t hash = fnv1a(nullptr, 0);
    const int end = span.first_position + static_cast<int>(span.tokens.size()) - span.padding;
    for (int p = 0; p < end; ++p) {
      if (p < s.prompt_tokens) hash = fnv1a(&s.tokens[static_cast<size_t>(p)], sizeof(int), hash);
      if (p < span.first_position) continue;
      const bool own = p < s.computed_before;  // thrown away by a preemption
      const bool shared = p < s.prompt_tokens && !prefixes_.insert(hash).second;
      before += own || shared;
    }
    return before;
  }

 private:
  std::unordered_set<uint64_t> prefixes_;
};

struct ServeOptions {
  const Tokenizer* tokenizer = nullptr;  ///< needed where requests come as text
  Clock* clock = nullptr;                ///< default: a RealClock
};

namespace serve_detail {

/// How many waiting requests, in their order, would fit into KV memory that holds no token.
inline int would_fit(const std::deque<Sequence*>& waiting, const KvUse& kv) {
  int idle = kv.capacity - kv.used, n = 0;
  for (const Sequence* s : waiting) {
    idle -= s->prompt_tokens + s->request.max_tokens - 1;
    if (idle < 0) break;
    ++n;
  }
  return n;
}

/// Turns text into ids where a request has no ids yet, and hands the request to the batcher.
inline void arrive(Sequence& s, Batcher& batcher, const Tokenizer* tokenizer, double now) {
  if (s.request.prompt.empty() && tokenizer && !s.request.user.empty())
    s.request.prompt = chat_prompt(*tokenizer, s.request.system, s.request.user);
  s.tokens = s.request.prompt;
  s.prompt_tokens = static_cast<int>(s.tokens.size());
  batcher.submit(s, now);
}

inline StepRecord record_of(const StepBatch& step, const std::vector<std::unique_ptr<Sequence>>& sequences,
                            ComputedBefore& books) {
  StepRecord r;
  for (const Span& span : step.spans) {
    const Sequence& s = *sequences[static_cast<size_t>(span.request)];
    const int recomputed = span.dead || span.phase == Phase::decode ? 0 : books.count(span, s);
    r.spans.push_back({span.request, span.seat, span.phase, static_cast<int>(span.tokens.size()),
                       span.padding, recomputed, span.dead});
  }
  return r;
}

}  // namespace serve_detail

/// Serves all requests (in order of arrival) and reports. Every request ends up finished or refused.
/// Throws Error if the batcher has work but schedules none for ever: a fault of the batcher.
inline RunReport serve(const std::string& name, Batcher& batcher, Executor& executor,
                       std::vector<Request> requests, ServeOptions options = {}) {
  RealClock real;
  Clock& clock = options.clock ? *options.clock : real;
  RunReport report;
  report.name = name, report.streamed = batcher.streams(), report.seats = batcher.seats();
  report.kv_capacity_tokens = batcher.kv_use().capacity;

  std::vector<std::unique_ptr<Sequence>> sequences;
  for (Request& r : requests) {
    if (!(r.arrival >= 0 && r.arrival < std::numeric_limits<double>::infinity()))
      fail(name, ": request ", sequences.size(), ": arrival: expected a time of 0 or later, found ",
           r.arrival);
    sequences.push_back(std::make_unique<Sequence>());
    sequences.back()->index = static_cast<int>(sequences.size()) - 1;
    sequences.back()->request = std::move(r);
    report.requests.emplace_back();
    report.requests.back().index = sequences.back()->index;
    report.requests.back().arrival = sequences.back()->request.arrival;
  }
  std::vector<Sequence*> arrivals;
  for (const auto& s : sequences) arrivals.push_back(s.get());
  std::stable_sort(arrivals.begin(), arrivals.end(), [](const Sequence* a, const Sequence* b) {
    return a->request.arrival < b->request.arrival;
  });

  ComputedBefore books;
  std::vector<float> logits;
  std::vector<int> tokens;
  const size_t vocabulary = static_cast<size_t>(executor.vocabulary());
  for (size_t arrived = 0, open = sequences.size(); open > 0;) {
    while (arrived < arrivals.size() && arrivals[arrived]->request.arrival <= clock.now()) {
      Sequence& s = *arrivals[arrived++];
      const double begin = clock.now();
      serve_detail::arrive(s, batcher, options.tokenizer, begin);
      report.requests[static_cast<size_t>(s.index)].prepare = clock.now() - begin;
      if (s.finish == Finish::refused) --open;
    }
    if (open == 0) break;

    const double decide = clock.now();
    const StepBatch step = batcher.schedule(decide);
    const double decided = clock.now();
    if (step.empty()) {
      double next = batcher.wake_at();
      if (arrived < arrivals.size()) next = std::min(next, arrivals[arrived]->request.arrival);
      if (!(next < std::numeric_limits<double>::infinity()))
        fail(name, ": ", open, " requests left and none scheduled");
      clock.wait_until(next);
      continue;
    }
    StepRecord record = serve_detail::record_of(step, sequences, books);
    record.kv = batcher.kv_use();
    record.waiting = static_cast<int>(batcher.waiting().size());
    record.would_fit = serve_detail::would_fit(batcher.waiting(), record.kv);

    record.begin = clock.now();
    executor.run(step, logits);
    record.end = clock.now();

    tokens.clear();
    for (const Span& span : step.spans) {
      RequestRecord& r = report.requests[static_cast<size_t>(span.request)];
      if (r.first_scheduled < 0) r.first_scheduled = record.begin;
      if (span.logits_of < 0) continue;
      const Sequence& s = *sequences[static_cast<size_t>(span.request)];
      const std::span<const float> row(logits.data() + tokens.size() * vocabulary, vocabulary);
      tokens.push_back(sample(row, s.request.sampling, s.sampled()));
      r.logits_hash.push_back(fnv1a(row.data(), row.size_bytes()));
    }
    const double sampled = clock.now();
    batcher.complete(step, tokens, sampled);
    const double completed = clock.now();
    record.schedule = (decided - decide) + (completed - sampled);
    record.sample = sampled - record.end;
    report.steps.push_back(std::move(record));

    for (const Span& span : step.spans) {
      RequestRecord& r = report.requests[static_cast<size_t>(span.request)];
      const Sequence& s = *sequences[static_cast<size_t>(span.request)];
      if (span.logits_of >= 0) r.sampled_at.push_back(sampled);
      if (!s.left || !r.out_at.empty()) continue;
      r.out_at = report.streamed ? r.sampled_at : std::vector<double>(r.sampled_at.size(), sampled);
      --open;
    }
  }

  for (const auto& s : sequences) {
    RequestRecord& r = report.requests[static_cast<size_t>(s->index)];
    r.prompt = s->request.prompt, r.user = s->request.user;
    r.output.assign(s->tokens.begin() + s->prompt_tokens, s->tokens.end());
    r.shared_tokens = s->shared_tokens, r.preemptions = s->preemptions;
    r.finish = s->finish, r.refusal = s->refusal;
    if (options.tokenizer) r.text = options.tokenizer->decode(r.output);
  }
  return report;
}

}  // namespace servelite
