// scripted.hpp: an executor without floats, for tests of the batchers.
//
// In place of K and V its blocks hold the token ids themselves: [blocks][P] ints, garbage at first. A span
// writes its tokens where its block table says, copies are made, and a row that wants logits reads positions
// 0..p back through the table. The next token comes from a hash of what was read, so any mistake in the
// bookkeeping (a wrong block, a block given away too early, a missing copy) changes an answer.
//
// What the answer must be is known without any batcher: answer_of() computes it with a direct loop.
//
// Fair play is checked too: nobody may write into a slot that another sequence of the step still reads.
// A breach throws std::logic_error, which fails the test.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <servelite/serve.hpp>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace servelite::test {

inline constexpr int kVocabulary = 50, kEos = 2;

/// The token that follows these: about one time in 24 the end, else anything but the end.
inline int next_token(std::span<const int> tokens) {
  uint64_t h = 12345;
  for (const int t : tokens)
    h = (h + static_cast<uint64_t>(t) + 1) * 6364136223846793005ull + 1442695040888963407ull;
  h ^= h >> 33;
  return h % 24 == 0 ? kEos : 3 + static_cast<int>(h / 24 % (kVocabulary - 3));
}

/// One-hot. The height lets a sampler at temperature 0.8 pick another token about every other time.
inline void logits_after(std::span<const int> tokens, float* row) {
  std::fill_n(row, kVocabulary, 0.0f);
  row[next_token(tokens)] = 3.0f;
}

/// What a request must be answered, whoever serves it.
inline std::vector<int> answer_of(const Request& r) {
  std::vector<int> tokens = r.prompt, answer;
  std::vector<float> row(kVocabulary);
  while (static_cast<int>(answer.size()) < r.max_tokens && (answer.empty() || answer.back() != kEos)) {
    logits_after(tokens, row.data());
    answer.push_back(sample(row, r.sampling, static_cast<int>(answer.size())));
    tokens.push_back(answer.back());
  }
  return answer;
}

class ScriptedExecutor final : public Executor {
 public:
  /// With a clock, a step takes step_s plus row_s for each of its rows.
  ScriptedExecutor(int blocks, int block_size, ManualClock* clock = nullptr, double step_s = 0.001,
                   double row_s = 0.0001)
      : blocks_(blocks),
        block_size_(block_size),
        clock_(clock),
        step_s_(step_s),
        row_s_(row_s),
        slots_(static_cast<size_t>(blocks) * static_cast<size_t>(block_size)) {
    std::mt19937 random(7);
    for (int& token : slots_) token = -1 - static_cast<int>(random() % 1000);
  }

  int vocabulary() const override { return kVocabulary; }

  void run(const StepBatch& step, std::vector<float>& logits) override {
    check(step);
    ++steps;
    rows += step.rows();
    for (const Span& s : step.spans)
      for (size_t i = 0; i < s.tokens.size(); ++i)
        slots_[slot(s, s.first_position + static_cast<int>(i))] = s.tokens[i];
    for (const BlockCopy& c : step.copies)
      for (int i = 0; i < c.tokens; ++i) slots_[slot(c.to, i)] = slots_[slot(c.from, i)];
    logits.clear();
    for (const Span& s : step.spans) {
      if (s.logits_of < 0) continue;
      std::vector<int> read;
      for (int p = 0; p <= s.first_position + s.logits_of; ++p) read.push_back(slots_[slot(s, p)]);
      logits.resize(logits.size() + kVocabulary);
      logits_after(read, logits.data() + logits.size() - kVocabulary);
    }
    if (clock_) clock_->advance(step_s_ + row_s_ * step.rows());
  }

  long steps = 0, rows = 0;

 private:
  size_t slot(int block, int i) const {
    if (block < 0 || block >= blocks_ || i < 0 || i >= block_size_)
      throw std::logic_error("no slot " + std::to_string(i) + " of block " + std::to_string(block));
    return static_cast<size_t>(block) * static_cast<size_t>(block_size_) + static_cast<size_t>(i);
  }
  size_t slot(const Span& s, int position) const {
    return slot(s.block_table.at(static_cast<size_t>(position / block_size_)), position % block_size_);
  }

  void check(const StepBatch& step) const {
    std::set<int> seats;
    std::set<size_t> live, written;  // live: K/V that a running sequence computed earlier and still reads
    for (const Span& s : step.spans) {
      if (s.tokens.empty()) throw std::logic_error("a span without tokens");
      if (!seats.insert(s.seat).second) throw std::logic_error("two spans in one seat");
      if (s.phase == Phase::decode)
        for (int p = 0; p < s.first_position; ++p) live.insert(slot(s, p));
    }
    const auto write = [&](size_t at) {
      if (live.count(at)) throw std::logic_error("a write into K/V that a running sequence reads");
      if (!written.insert(at).second) throw std::logic_error("two writes into one slot");
    };
    for (const Span& s : step.spans)
      for (size_t i = 0; i < s.tokens.size(); ++i) write(slot(s, s.first_position + static_cast<int>(i)));
    for (const BlockCopy& c : step.copies)
      for (int i = 0; i < c.tokens; ++i) write(slot(c.to, i));
  }

  int blocks_, block_size_;
  ManualClock* clock_;
  double step_s_, row_s_;
  std::vector<int> slots_;
};

/// Stands between serve() and a batcher, calls `look` after every decision and every completion, and notes
/// in which order requests were first scheduled and how often one had to start again.
template <class Look>
class Watched final : public Batcher {
 public:
  Watched(Batcher& batcher, Look look) : batcher_(batcher), look_(look) {}

  void submit(Sequence& s, double now) override { batcher_.submit(s, now), look_(); }
  StepBatch schedule(double now) override {
    StepBatch step = batcher_.schedule(now);
    look_();
    for (const Span& s : step.spans) {
      if (s.phase != Phase::prefill) continue;
      if (std::find(first_scheduled.begin(), first_scheduled.end(), s.request) == first_scheduled.end())
        first_scheduled.push_back(s.request);
      else
        ++preemptions;
    }
    return step;
  }
  void complete(const StepBatch& step, const std::vector<int>& tokens, double now) override {
    batcher_.complete(step, tokens, now);
    look_();
  }
  double wake_at() const override { return batcher_.wake_at(); }
  bool streams() const override { return batcher_.streams(); }
  int seats() const override { return batcher_.seats(); }
  KvUse kv_use() const override { return batcher_.kv_use(); }
  const std::deque<Sequence*>& waiting() const override { return batcher_.waiting(); }

  std::vector<int> first_scheduled;
  int preemptions = 0;

 private:
  Batcher& batcher_;
  Look look_;
};

/// Requests made by hand and a batcher driven by hand: submit, schedule, and tokens of the test's choice.
struct Hand {
  Batcher& batcher;
  std::deque<Sequence> sequences = {};

  Sequence& submit(std::vector<int> prompt, int max_tokens, double arrival = 0) {
    Request r;
    r.arrival = arrival, r.prompt = std::move(prompt), r.max_tokens = max_tokens;
    return submit(r);
  }
  Sequence& submit(const Request& r) {
    sequences.emplace_back();
    Sequence& s = sequences.back();
    s.index = static_cast<int>(sequences.size()) - 1;
    s.request = r, s.tokens = r.prompt, s.prompt_tokens = static_cast<int>(r.prompt.size());
    batcher.submit(s, r.arrival);
    return s;
  }
  /// One step at time `now`; every row that wants logits gets this token.
  StepBatch step(int token, double now = 0) {
    const StepBatch step = batcher.schedule(now);
    std::vector<int> tokens;
    for (const Span& s : step.spans)
      if (s.logits_of >= 0) tokens.push_back(token);
    if (!step.empty()) batcher.complete(step, tokens, now);
    return step;
  }
};

/// n ids, counting up from `from`; below the vocabulary as long as from + n is.
inline std::vector<int> ids(int n, int from = 3) {
  std::vector<int> t;
  for (int i = 0; i < n; ++i) t.push_back(from + i);
  return t;
}

/// n requests with prompts of 1 to 60 tokens and answers of at most 1 to 40. Two of three begin like one of
/// three common texts, so that prefixes are shared, in whole blocks and in parts, and some prompts are equal.
/// Every third request samples.
inline std::vector<Request> random_requests(int n, unsigned seed, double mean_gap = 0.004) {
  std::mt19937 random(seed);
  const auto below = [&](int m) { return static_cast<int>(random() % static_cast<unsigned>(m)); };
  std::vector<int> common[3];
  for (std::vector<int>& c : common)
    while (c.size() < 60) c.push_back(below(kVocabulary));
  std::vector<Request> requests;
  double now = 0;
  for (int i = 0; i < n; ++i) {
    Request r;
    const int length = 1 + below(60);
    if (below(3) > 0) {
      const std::vector<int>& c = common[below(3)];
      r.prompt.assign(c.begin(), c.begin() + (below(4) == 0 ? length : below(length + 1)));
    }
    while (static_cast<int>(r.prompt.size()) < length) r.prompt.push_back(below(kVocabulary));
    r.max_tokens = 1 + below(40);
    if (below(3) == 0) r.sampling.temperature = 0.8f, r.sampling.seed = random();
    r.arrival = now;
    if (below(3) > 0) now += mean_gap * below(5) / 2;  // some come together
    requests.push_back(r);
  }
  return requests;
}

inline std::vector<std::vector<int>> outputs_of(const RunReport& run) {
  std::vector<std::vector<int>> outputs;
  for (const RequestRecord& r : run.requests) outputs.push_back(r.output);
  return outputs;
}
inline std::vector<std::vector<int>> answers_of(const std::vector<Request>& requests) {
  std::vector<std::vector<int>> answers;
  for (const Request& r : requests) answers.push_back(answer_of(r));
  return answers;
}

}  // namespace servelite::test
