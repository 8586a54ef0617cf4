// End to end, on a small random model: serial, static and continuous give the same logits bit for bit, with
// every number of seats, block size, thread and switch; and those logits are what the reference computes.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <servelite/continuous_batcher.hpp>
#include <servelite/static_batcher.hpp>
#include <servelite/transformer.hpp>
#include <servelite/workload.hpp>

#include "reference.hpp"
#include "scripted.hpp"

using namespace servelite;
using namespace servelite::test;

namespace {

using Ints = std::vector<int>;

/// A model whose answers end by themselves now and then: the end of turn has a loud row of weights.
struct SmallModel {
  Gguf file;
  Model model;
  Tokenizer tokenizer;
};
SmallModel small_model(int context) {
  Parts parts = random_model({.heads = 4, .kv_heads = 2, .context = context, .seed = 21});
  std::vector<float>& output = parts.tensor("output.weight").values;
  for (size_t i = 6 * 32; i < 7 * 32; ++i) output[i] *= 2.2f;
  Gguf file = file_of(parts);
  return {file, read_model(file), Tokenizer(read_vocabulary(file))};
}

/// Runs on another executor, moves the clock, and keeps the logits of every token of every request.
class Observed final : public Executor {
 public:
  Observed(Executor& inner, ManualClock& clock) : inner_(inner), clock_(clock) {}
  int vocabulary() const override { return inner_.vocabulary(); }
  void run(const StepBatch& step, std::vector<float>& logits) override {
    inner_.run(step, logits);
    clock_.advance(0.001 + 0.0001 * step.rows());
    auto at = logits.begin();
    for (const Span& s : step.spans) {
      if (s.logits_of < 0) continue;
      if (rows.size() <= static_cast<size_t>(s.request)) rows.resize(static_cast<size_t>(s.request) + 1);
      rows[static_cast<size_t>(s.request)].emplace_back(at, at + vocabulary());
      at += vocabulary();
    }
  }
  std::vector<std::vector<std::vector<float>>> rows;  // [requests][tokens][V]

 private:
  Executor& inner_;
  ManualClock& clock_;
};

struct Setting {
  int seats = 8, block_size = 16, threads = 1, blocks = 0;
};

RunReport run_static(const SmallModel& m, const std::vector<Request>& requests, const Setting& s) {
  BlockPool pool(s.seats * ((m.model.config.context + s.block_size - 1) / s.block_size), s.block_size);
  ManualClock clock;
  Transformer transformer(m.model, pool.size(), s.block_size, s.threads);
  Observed executor(transformer, clock);
  StaticBatcher batcher(pool, {m.model.config.context, m.model.config.vocabulary, m.tokenizer.eos()},
                        {s.seats, 0.01, false});
  return serve("static", batcher, executor, requests, {&m.tokenizer, &clock});
}

RunReport run_continuous(const SmallModel& m, const std::vector<Request>& requests, const Setting& s,
                         ContinuousOptions options = {}) {
  options.seats = s.seats;
  BlockPool pool(s.blocks, s.block_size);
  ManualClock clock;
  Transformer transformer(m.model, pool.size(), s.block_size, s.threads);
  Observed executor(transformer, clock);
  ContinuousBatcher batcher(pool, {m.model.config.context, m.model.config.vocabulary, m.tokenizer.eos()},
                            options);
  RunReport run = serve("continuous", batcher, executor, requests, {&m.tokenizer, &clock});
  batcher.cache().check();
  CHECK(pool.referenced_blocks() == 0);
  return run;
}

/// Same tokens, same logits, same reasons.
bool same_answers(const RunReport& a, const RunReport& b) {
  if (a.requests.size() != b.requests.size()) return false;
  for (size_t i = 0; i < a.requests.size(); ++i) {
    const RequestRecord &x = a.requests[i], &y = b.requests[i];
    if (x.output != y.output || x.logits_hash != y.logits_hash || x.finish != y.finish || x.text != y.text)
      return false;
    if (x.logits_hash.size() != x.output.size() || x.output.empty()) return false;
  }
  return true;
}

}  // namespace

TEST_CASE(
    "serve: serial, static and continuous agree bit for bit, whatever seats, blocks, threads and switches") {
  const SmallModel m = small_model(76);
  std::mt19937 mix(1);
  int n = 0, sampled = 0, ended = 0, preempted = 0;
  for (unsigned seed = 0; seed < 4; ++seed) {
    std::vector<Request> requests = random_requests(7, 50 + seed);
    for (Request& r : requests) {
      r.max_tokens = 1 + r.max_tokens % 12;
      if (r.sampling.temperature > 0) ++sampled;
    }
    const RunReport serial = run_static(m, requests, {1, 16, 1, 0});
    for (const RequestRecord& r : serial.requests)
      if (r.finish == Finish::eos) ++ended;
    for (int seats = 1; seats <= 8; ++seats)
      for (const int P : {1, 4, 16, 64}) {
        if (mix() % 2) continue;  // each combination with about two of the four workloads
        const int threads = mix() % 6 ? 1 : 2;
        const unsigned switches = static_cast<unsigned>(mix() % 8);
        const ContinuousOptions options{seats, (switches & 1) != 0, (switches & 2) != 0, (switches & 4) != 0};
        const int least = (76 + P - 1) / P, blocks = mix() % 3 == 0 ? least * seats : least + least / 4;
        CAPTURE(seats);
        CAPTURE(P);
        CAPTURE(threads);
        CAPTURE(switches);
        CAPTURE(blocks);
        CHECK(same_answers(serial, run_static(m, requests, {seats, P, threads, 0})));
        const RunReport continuous = run_continuous(m, requests, {seats, P, threads, blocks}, options);
        CHECK(same_answers(serial, continuous));
        preempted += summarize(continuous).rows_recomputed > 0;
        ++n;
      }
  }
  CHECK(n >= 56);
  CHECK(sampled >= 4);
  CHECK(ended >= 4);  // both ways to end occur
  CHECK(ended < 24);
  CHECK(preempted >= 4);
}

TEST_CASE(
    "serve: the six requests, through text and chat template, sharing computes the unique tokens exactly") {
  const SmallModel m = small_model(500);
  std::vector<Request> requests = six_requests();
  for (Request& r : requests)
    r.system.resize(240), r.max_tokens = 8;  // bytes are tokens here: a part will do
  requests[2].sampling = {0.8f, 0, 1.0f, 0.0f, 5}, requests[4].sampling = {0.8f, 40, 0.9f, 0.0f, 6};
  const RunReport serial = run_static(m, requests, {1, 16, 1, 0});
  std::vector<Ints> prompts;
  for (size_t i = 0; i < 6; ++i) {
    prompts.push_back(chat_prompt(m.tokenizer, requests[i].system, requests[i].user));
    CHECK(serial.requests[i].prompt == prompts[i]);
    CHECK(serial.requests[i].user == requests[i].user);
    CHECK(serial.requests[i].text == m.tokenizer.decode(serial.requests[i].output));
  }
  CHECK(summarize(serial).prefill_unique == unique_prefix_tokens(prompts));
  CHECK(summarize(serial).rows_recomputed ==
        summarize(serial).prefill_computed - unique_prefix_tokens(prompts));
  CHECK(same_answers(serial, run_static(m, requests, {6, 64, 2, 0})));
  for (const Setting s :
       {Setting{6, 16, 2, 160}, Setting{3, 1, 1, 2400}, Setting{8, 4, 1, 600}, Setting{2, 64, 2, 40}}) {
    const RunReport continuous = run_continuous(m, requests, s);
    CHECK(same_answers(serial, continuous));
    CHECK(summarize(continuous).prefill_computed == unique_prefix_tokens(prompts));
    CHECK(summarize(continuous).rows_recomputed == 0);
  }
  CHECK(
      same_answers(serial, run_continuous(m, requests, {6, 16, 1, 32})));  // memory for just over one of them
}

TEST_CASE("serve: the logits that answers were sampled from are the reference's") {
  const SmallModel m = small_model(112);
  const ReferenceLlama reference = reference_from(m.file);
  const std::vector<Request> requests = random_requests(10, 77);
  BlockPool pool(9, 16);  // tight: prefixes are shared, evicted, requests preempted
  ManualClock clock;
  Transformer transformer(m.model, 9, 16, 2);
  Observed executor(transformer, clock);
  ContinuousBatcher batcher(pool, {112, 263, 6}, {6});
  const RunReport run = serve("continuous", batcher, executor, requests, {&m.tokenizer, &clock});
  double worst = 0;
  int compared = 0;
  for (const RequestRecord& r : run.requests) {
    Ints tokens = r.prompt;
    tokens.insert(tokens.end(), r.output.begin(), r.output.end() - 1);
    const Rows exact = reference_logits(reference, tokens);
    const auto& rows = executor.rows[static_cast<size_t>(r.index)];
    REQUIRE(rows.size() == r.output.size());
    for (size_t i = 0; i < rows.size(); ++i, ++compared) {
      const Row& e = exact[r.prompt.size() - 1 + i];
      double error = 0, largest = 0;
      for (size_t v = 0; v < e.size(); ++v) {
        error = std::max(error, std::abs(e[v] - static_cast<double>(rows[i][v])));
        largest = std::max(largest, std::abs(e[v]));
      }
      worst = std::max(worst, error / largest);
      CHECK(r.logits_hash[i] == fnv1a(rows[i].data(), rows[i].size() * sizeof(float)));
    }
  }
  CHECK(compared > 50);
  CHECK(worst < 1e-4);
}

TEST_CASE("serve: times are in order, arrivals may come in any order, the clock waits for them") {
  std::vector<Request> requests = random_requests(10, 4, 0.05);
  std::reverse(requests.begin(), requests.end());
  requests[3].arrival = 100;  // long after all others are done
  BlockPool pool(100, 4);
  ManualClock clock;
  ScriptedExecutor executor(100, 4, &clock);
  ContinuousBatcher batcher(pool, {112, kVocabulary, kEos}, {2});
  const RunReport run = serve("name", batcher, executor, requests, {nullptr, &clock});
  CHECK(run.name == "name");
  CHECK(run.streamed);
  CHECK(run.seats == 2);
  CHECK(run.kv_capacity_tokens == 400);
  CHECK(outputs_of(run) == answers_of(requests));  // in the caller's order
  for (size_t i = 0; i < requests.size(); ++i) {
    const RequestRecord& r = run.requests[i];
    CHECK(r.index == static_cast<int>(i));
    CHECK(r.arrival == requests[i].arrival);
    CHECK(r.first_scheduled >= r.arrival);
    CHECK(r.out_at.front() > r.first_scheduled);
    CHECK(std::is_sorted(r.out_at.begin(), r.out_at.end()));
    CHECK(r.out_at == r.sampled_at);
    CHECK(r.out_at.size() == r.output.size());
    CHECK(r.logits_hash.size() == r.output.size());
  }
  CHECK(run.requests[3].first_scheduled == 100);
  for (size_t i = 0; i < run.steps.size(); ++i) {
    CHECK(run.steps[i].end > run.steps[i].begin);
    if (i > 0) CHECK(run.steps[i].begin >= run.steps[i - 1].end);
  }
}

TEST_CASE("serve: on a real clock, with text and without a tokenizer") {
  std::vector<Request> requests = random_requests(5, 6, 0.005);
  BlockPool pool(112, 4);
  ScriptedExecutor executor(112, 4);
  StaticBatcher batcher(pool, {112, kVocabulary, kEos}, {4, 0.005, false});
  Request text;
  text.user = "who turns this into ids?";
  requests.push_back(text);
  const RunReport run = serve("static", batcher, executor, requests);
  for (size_t i = 0; i < 5; ++i) {
    CHECK(run.requests[i].output == answer_of(requests[i]));
    CHECK(run.requests[i].first_scheduled >= requests[i].arrival);
    CHECK(run.requests[i].prepare >= 0);
  }
  CHECK(run.requests[5].finish == Finish::refused);
  CHECK(run.requests[5].refusal.find("empty prompt") != std::string::npos);
}

TEST_CASE("serve: prefixes that a bus computes again are counted, each once per time") {
  // 3 4 5 6 7, the same again, and 3 4 5 then other ids: 5 + 3 rows are not new; padding is not counted here.
  std::vector<Request> requests(3);
  requests[0].prompt = requests[1].prompt = ids(5);
  requests[2].prompt = {3, 4, 5, 30, 31, 32, 33};
  for (Request& r : requests) r.max_tokens = 1;
  BlockPool pool(12, 4);
  ManualClock clock;
  ScriptedExecutor executor(12, 4, &clock);
  StaticBatcher batcher(pool, {16, kVocabulary, kEos}, {3, 0.02, false});
  const RunReport run = serve("static", batcher, executor, requests, {nullptr, &clock});
  REQUIRE(run.steps.size() == 1);
  CHECK(run.steps[0].spans[0].recomputed == 0);
  CHECK(run.steps[0].spans[1].recomputed == 5);
  CHECK(run.steps[0].spans[2].recomputed == 3);
  CHECK(run.steps[0].spans[0].padding == 2);
}

TEST_CASE("serve: how many more would have fitted into memory that holds no token") {
  Sequence a, b, c;
  a.prompt_tokens = 10, a.request.max_tokens = 21;  // 30 positions
  b.prompt_tokens = 30, b.request.max_tokens = 2;   // 31
  c.prompt_tokens = 1, c.request.max_tokens = 1;    // 1, but nobody passes b
  CHECK(serve_detail::would_fit({&a, &b, &c}, {40, 100, 100}) == 1);
  CHECK(serve_detail::would_fit({&a, &b, &c}, {39, 100, 100}) == 2);
  CHECK(serve_detail::would_fit({&a, &b, &c}, {38, 100, 100}) == 3);
  CHECK(serve_detail::would_fit({&a}, {71, 100, 100}) == 0);
  CHECK(serve_detail::would_fit({}, {0, 100, 100}) == 0);
}

TEST_CASE("serve: arrivals that are no time, and a batcher that never schedules") {
  BlockPool pool(28, 4);
  ScriptedExecutor executor(28, 4);
  ContinuousBatcher batcher(pool, {112, kVocabulary, kEos}, {2});
  for (const double bad : {-1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    std::vector<Request> requests = random_requests(3, 1);
    requests[1].arrival = bad;
    CHECK_THROWS_WITH_AS(serve("run", batcher, executor, requests),
                         doctest::Contains("run: request 1: arrival"), Error);
  }
  struct Idle final : Batcher {
    void submit(Sequence& s, double) override { queue.push_back(&s); }
    StepBatch schedule(double) override { return {}; }
    void complete(const StepBatch&, const Ints&, double) override {}
    int seats() const override { return 1; }
    KvUse kv_use() const override { return {}; }
    const std::deque<Sequence*>& waiting() const override { return queue; }
    std::deque<Sequence*> queue;
  } idle;
  ManualClock clock;
  CHECK_THROWS_WITH_AS(serve("idle", idle, executor, random_requests(3, 1), {nullptr, &clock}),
                       doctest::Contains("idle: 3 requests left and none scheduled"), Error);
}
