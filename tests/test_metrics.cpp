// The numbers of a run: percentiles, unique prefixes and summaries worked out by hand.
#include <cmath>
#include <doctest/doctest.h>

#include <random>
#include <servelite/continuous_batcher.hpp>
#include <servelite/metrics.hpp>
#include <servelite/static_batcher.hpp>
#include <set>
#include <vector>

#include "scripted.hpp"

using namespace servelite;
using namespace servelite::test;

namespace {

using Ints = std::vector<int>;

/// The trie spelled out: the set of all prefixes.
int64_t naive_unique(const std::vector<Ints>& prompts) {
  std::set<Ints> prefixes;
  for (const Ints& p : prompts)
    for (size_t n = 1; n <= p.size(); ++n)
      prefixes.insert(Ints(p.begin(), p.begin() + static_cast<ptrdiff_t>(n)));
  return static_cast<int64_t>(prefixes.size());
}

}  // namespace

TEST_CASE("metrics: percentiles by nearest rank") {
  CHECK(std::isnan(percentile({}, 0.5)));
  CHECK(percentile({7}, 0.5) == 7);
  CHECK(percentile({7}, 0.99) == 7);
  CHECK(percentile({2, 1}, 0.5) == 1);  // one of two values does not exceed 1: a half
  CHECK(percentile({3, 1, 2}, 0.5) == 2);
  CHECK(percentile({50, 15, 35, 20, 40}, 0.30) == 20);  // rank ceil(1.5) = 2
  CHECK(percentile({50, 15, 35, 20, 40}, 0.0) == 15);
  CHECK(percentile({50, 15, 35, 20, 40}, 1.0) == 50);

  std::vector<double> values;
  for (int n = 1; n <= 400; ++n) {
    values.insert(values.begin(), n);  // n ... 3 2 1: the value is its rank
    for (const int percent : {50, 95, 99})
      CHECK(percentile(values, percent / 100.0) == (n * percent + 99) / 100);  // ceil in whole numbers
  }
  const Percentiles p = percentiles({1, 2, 3, 4});
  CHECK(p.p50 == 2);
  CHECK(p.p95 == 4);
  CHECK(p.p99 == 4);
  CHECK(p.mean == 2.5);
  CHECK(std::isnan(percentiles({}).mean));
}

TEST_CASE("metrics: unique prefix tokens") {
  CHECK(unique_prefix_tokens({}) == 0);
  CHECK(unique_prefix_tokens({{}}) == 0);
  CHECK(unique_prefix_tokens({{1, 2, 3}}) == 3);
  CHECK(unique_prefix_tokens({{1, 2, 3}, {1, 2, 3}}) == 3);
  CHECK(unique_prefix_tokens({{1, 2, 3}, {1, 2}, {1, 2, 4, 5}}) == 5);
  CHECK(unique_prefix_tokens({{1, 2}, {2, 2}, {1, 3}}) == 5);  // 1, 12, 13, 2, 22
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::vector<Ints> prompts(random() % 12);
    for (Ints& p : prompts)
      for (size_t n = random() % 8; n > 0; --n) p.push_back(static_cast<int>(random() % 3));
    CHECK(unique_prefix_tokens(prompts) == naive_unique(prompts));
  }
}

TEST_CASE("metrics: a report written by hand") {
  RunReport run;
  run.requests.resize(3);
  RequestRecord &a = run.requests[0], &b = run.requests[1], &refused = run.requests[2];
  a.arrival = 1.0, a.first_scheduled = 1.5, a.prompt = {1, 2, 3}, a.out_at = {2.0, 2.25, 2.75, 3.0};
  a.finish = Finish::length, a.prepare = 0.25;
  b.arrival = 2.0, b.first_scheduled = 2.0, b.prompt = {1, 2},
  b.out_at = {5.0};  // one token: no TPOT, no gap
  b.finish = Finish::eos, b.prepare = 0.5;
  refused.arrival = 2.5, refused.finish = Finish::refused;

  run.steps.resize(2);
  run.steps[0].begin = 1.5, run.steps[0].end = 2.0, run.steps[0].schedule = 0.125, run.steps[0].sample = 0.25;
  run.steps[0].kv = {7, 30, 40}, run.steps[0].would_fit = 2;
  run.steps[0].spans = {{0, 0, Phase::prefill, 5, 2, 1, false}, {1, 1, Phase::prefill, 2, 0, 0, false}};
  run.steps[1].begin = 3.0, run.steps[1].end = 4.0, run.steps[1].schedule = 0.125, run.steps[1].sample = 0.25;
  run.steps[1].kv = {9, 20, 40}, run.steps[1].would_fit = 1;
  run.steps[1].spans = {{0, 0, Phase::decode, 1, 0, 0, false}, {1, 1, Phase::decode, 1, 0, 0, true}};

  const Summary s = summarize(run);
  CHECK(s.requests == 3);
  CHECK(s.refused == 1);
  CHECK(s.makespan == 4.0);  // 1.0 to 5.0
  CHECK(s.output_tokens == 5);
  CHECK(s.output_tok_s == 1.25);
  CHECK(s.requests_s == 0.5);
  CHECK(s.ttft.p50 == 1.0);  // 1.0 and 3.0
  CHECK(s.ttft.p95 == 3.0);
  CHECK(s.ttft.mean == 2.0);
  CHECK(s.e2e.p50 == 2.0);  // 2.0 and 3.0
  CHECK(s.e2e.p95 == 3.0);
  CHECK(s.queue.p50 == 0.0);  // 0.5 and 0
  CHECK(s.queue.p95 == 0.5);
  CHECK(s.itl.p50 == 0.25);  // 0.25, 0.5, 0.25
  CHECK(s.itl.p95 == 0.5);
  CHECK(s.tpot.p50 == 1.0 / 3);
  CHECK(s.tpot.mean == 1.0 / 3);
  CHECK(s.prompt_tokens == 5);
  CHECK(s.prefill_unique == 3);
  CHECK(s.prefill_computed == 5);  // 7 rows, 2 of padding
  CHECK(s.rows_padding == 2);
  CHECK(s.rows_recomputed == 1);
  CHECK(s.rows_dead == 1);
  CHECK(s.rows_useful == 9 - 2 - 1 - 1);
  CHECK(s.kv_peak_used == 9);
  CHECK(s.kv_peak_reserved == 30);
  CHECK(s.would_fit_most == 2);
  CHECK(s.schedule_s == 0.25);
  CHECK(s.sample_s == 0.5);
  CHECK(s.forward_s == 1.5);
  CHECK(s.prepare_s == 0.75);

  const Summary nothing = summarize(RunReport{});
  CHECK(nothing.makespan == 0);
  CHECK(nothing.output_tok_s == 0);
  CHECK(std::isnan(nothing.ttft.p99));
}

TEST_CASE("metrics: latency counts from arrival, not from when the server got round to it (vLLM 54101)") {
  // 8 arrivals at 10 per second, 500 ms each, one at a time: request i ends at 0.5 (i + 1), arrived at 0.1 i.
  // Latency 0.5 + 0.4 i: mean 1.9 s, worst 3.3 s. From its start each takes 0.5 s.
  std::vector<Request> requests(8);
  for (int i = 0; i < 8; ++i) {
    Request& r = requests[static_cast<size_t>(i)];
    r.arrival = 0.1 * i, r.prompt = {3 + i}, r.max_tokens = 1;
  }
  for (const bool bus : {true, false}) {
    BlockPool pool(1, 4);
    ManualClock clock;
    ScriptedExecutor executor(1, 4, &clock, 0.5, 0.0);
    const ModelLimits limits{4, kVocabulary, kEos};
    StaticBatcher one_seat(pool, limits, {1, 0.02, false});
    BlockPool pages(1, 4);
    ContinuousBatcher shuttle(pages, limits, {1});
    Batcher& batcher = bus ? static_cast<Batcher&>(one_seat) : shuttle;
    const RunReport run = serve("54101", batcher, executor, requests, {nullptr, &clock});
    const Summary s = summarize(run);
    CHECK(s.e2e.mean == doctest::Approx(1.9));
    CHECK(s.e2e.p99 == doctest::Approx(3.3));
    CHECK(s.ttft.mean == doctest::Approx(1.9));
    CHECK(s.queue.mean == doctest::Approx(1.4));
    CHECK(s.makespan == doctest::Approx(4.0));
    CHECK(s.requests_s == doctest::Approx(2.0));
    for (const RequestRecord& r : run.requests)
      CHECK(r.out_at.back() - r.first_scheduled == doctest::Approx(0.5));
  }
}
