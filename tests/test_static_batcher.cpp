// The bus: small scenes worked out by hand, then random workloads against answers computed without a batcher.
#include <doctest/doctest.h>

#include <servelite/static_batcher.hpp>

#include "scripted.hpp"

using namespace servelite;
using namespace servelite::test;

namespace {

using Ints = std::vector<int>;

/// Serves with `seats` seats of a full context of 100 and blocks of P; nothing may leak.
RunReport serve_static(const std::vector<Request>& requests, int seats, int P, StaticOptions options = {}) {
  options.seats = seats;
  BlockPool pool(seats * ((100 + P - 1) / P), P);
  ManualClock clock;
  ScriptedExecutor executor(pool.size(), P, &clock);
  RunReport report;
  {
    StaticBatcher batcher(pool, {100, kVocabulary, kEos}, options);
    Watched watched(batcher, [&] { pool.check(); });
    report = serve("static", watched, executor, requests, {nullptr, &clock});
    CHECK(watched.first_scheduled.size() == requests.size());
    CHECK(std::is_sorted(watched.first_scheduled.begin(), watched.first_scheduled.end()));
    CHECK(watched.preemptions == 0);
  }
  CHECK(pool.free_blocks() == pool.size());
  return report;
}

}  // namespace

TEST_CASE("static batcher: two requests, every row worked out by hand") {
  // Context 12, blocks of 4: a seat owns 3 blocks. A: 3 of prompt, 3 of answer. B: 5 of prompt, 1 of answer.
  //   step 1   A  a a a . .     prefill, two rows of padding     B  b b b b b   prefill, answers at once
  //   step 2   A  position 3    decode                           B  position 5  dead
  //   step 3   A  position 4    decode, its last                 B  position 6  dead
  BlockPool pool(7, 4);  // the seventh block is too little for a third seat
  StaticBatcher batcher(pool, {12, kVocabulary, kEos}, {3, 0.02, false});
  CHECK(batcher.seats() == 2);
  CHECK(pool.free_blocks() == 1);
  Hand hand{batcher};
  Sequence &a = hand.submit({11, 12, 13}, 3), &b = hand.submit({21, 22, 23, 24, 25}, 1);

  StepBatch step = hand.step(30);
  REQUIRE(step.spans.size() == 2);
  CHECK(step.copies.empty());
  CHECK(step.rows() == 10);
  CHECK(step.spans[0].tokens == Ints{11, 12, 13, kEos, kEos});
  CHECK(step.spans[0].padding == 2);
  CHECK(step.spans[0].logits_of == 2);
  CHECK(step.spans[0].block_table == Ints{0, 1, 2});
  CHECK(step.spans[0].phase == Phase::prefill);
  CHECK(step.spans[1].tokens == Ints{21, 22, 23, 24, 25});
  CHECK(step.spans[1].padding == 0);
  CHECK(step.spans[1].logits_of == 4);
  CHECK(step.spans[1].block_table == Ints{3, 4, 5});
  CHECK(b.finish == Finish::length);
  CHECK_FALSE(b.left);  // the bus is not back yet
  CHECK(batcher.kv_use().used == 4);
  CHECK(batcher.kv_use().reserved == 24);
  CHECK(batcher.kv_use().capacity == 28);

  for (int n = 0; n < 2; ++n) {
    CAPTURE(n);
    CHECK_FALSE(a.left);
    step = hand.step(31 + n);
    REQUIRE(step.spans.size() == 2);
    CHECK(step.spans[0].tokens == Ints{30 + n});
    CHECK(step.spans[0].first_position == 3 + n);
    CHECK(step.spans[0].logits_of == 0);
    CHECK_FALSE(step.spans[0].dead);
    CHECK(step.spans[1].tokens == Ints{30});
    CHECK(step.spans[1].first_position == 5 + n);
    CHECK(step.spans[1].logits_of == -1);
    CHECK(step.spans[1].dead);
  }
  CHECK(a.tokens == Ints{11, 12, 13, 30, 31, 32});
  CHECK(a.left);
  CHECK(b.left);
  CHECK(b.tokens == Ints{21, 22, 23, 24, 25, 30});
  CHECK(batcher.schedule(0).empty());
}

TEST_CASE("static batcher: a dead seat stays within its slab") {
  BlockPool pool(4, 4);
  StaticBatcher batcher(pool, {8, kVocabulary, kEos}, {2, 0.02, false});
  Hand hand{batcher};
  hand.submit(ids(1), 8), hand.submit(ids(8), 1);
  Ints dead_at;
  for (int i = 0; i < 8; ++i) {
    const StepBatch step = hand.step(30);
    REQUIRE(step.spans.size() == 2);
    if (step.spans[1].dead) dead_at.push_back(step.spans[1].first_position);
  }
  CHECK(dead_at == Ints(7, 7));  // seven times the context's last position
  CHECK(batcher.schedule(0).empty());
}

TEST_CASE("static batcher: patience") {
  BlockPool pool(9, 4);
  StaticBatcher batcher(pool, {12, kVocabulary, kEos}, {3, 0.02, false});
  Hand hand{batcher};
  CHECK(batcher.wake_at() == std::numeric_limits<double>::infinity());
  hand.submit(ids(2), 1, 1.0);
  CHECK(batcher.wake_at() == 1.0 + 0.02);
  CHECK(hand.step(30, 1.0).empty());
  hand.submit(ids(2), 2, 1.01);
  CHECK(batcher.wake_at() == 1.0 + 0.02);  // the first passenger's patience counts
  CHECK(hand.step(30, 1.0199).empty());
  CHECK(batcher.waiting().size() == 2);
  CHECK(hand.step(30, 1.02).spans.size() == 2);  // half empty

  // On the road: nobody gets on. Back home after the next one's patience: it leaves at once.
  hand.submit(ids(2), 1, 1.03);
  CHECK(batcher.wake_at() == std::numeric_limits<double>::infinity());
  StepBatch step = hand.step(30, 2.0);
  REQUIRE(step.spans.size() == 2);
  CHECK(step.spans[0].phase == Phase::decode);
  CHECK(hand.step(30, 2.0).spans.size() == 1);

  // Full: it leaves at once, the fourth waits for the next one.
  for (int i = 0; i < 4; ++i) hand.submit(ids(2), 1, 3.0);
  step = hand.step(30, 3.0);
  REQUIRE(step.spans.size() == 3);
  CHECK(step.spans[0].request == 3);
  CHECK(step.spans[2].request == 5);
  CHECK(hand.step(30, 3.0).empty());
  CHECK(hand.step(30, 3.02).spans.size() == 1);
}

TEST_CASE("static batcher: streaming lets a finished answer leave before the bus is back") {
  BlockPool pool(6, 4);
  StaticBatcher batcher(pool, {12, kVocabulary, kEos}, {2, 0.02, true});
  CHECK(batcher.streams());
  Hand hand{batcher};
  Sequence &a = hand.submit(ids(3), 1), &b = hand.submit(ids(3), 2);
  hand.step(30);
  CHECK(a.left);
  CHECK_FALSE(b.left);
  CHECK(hand.step(30).spans[0].dead);  // it left, its seat did not
  CHECK(b.left);
}

TEST_CASE("static batcher: waste and times of a whole bus, counted from the lengths alone") {
  std::vector<Request> requests = random_requests(6, 3);
  for (Request& r : requests) r.arrival = 0, r.sampling = {};
  size_t longest_prompt = 0, longest_answer = 0, prompts = 0, answers = 0;
  for (const Request& r : requests) {
    longest_prompt = std::max(longest_prompt, r.prompt.size()), prompts += r.prompt.size();
    longest_answer = std::max(longest_answer, answer_of(r).size()), answers += answer_of(r).size();
  }
  for (const bool stream : {false, true}) {
    const RunReport run = serve_static(requests, 6, 16, {6, 0.02, stream});
    const Summary s = summarize(run);
    CHECK(run.steps.size() == longest_answer);
    CHECK(s.rows_padding == static_cast<int64_t>(6 * longest_prompt - prompts));
    CHECK(s.rows_dead == static_cast<int64_t>(6 * longest_answer - answers));
    CHECK(s.prefill_computed == static_cast<int64_t>(prompts));
    CHECK(s.rows_useful + s.rows_recomputed == static_cast<int64_t>(prompts + answers - 6));
    CHECK(s.kv_peak_reserved == 600);
    for (const RequestRecord& r : run.requests) {
      CHECK(r.out_at.size() == r.output.size());
      if (!stream) CHECK(r.out_at.front() == run.steps.back().end);  // all at once, all together
      if (!stream) CHECK(r.out_at.back() == run.steps.back().end);
      if (stream) CHECK(r.out_at.front() == run.steps.front().end);
      if (stream) CHECK(r.out_at.back() == run.steps[r.output.size() - 1].end);
    }
  }
}

TEST_CASE("static batcher: answers are those of a direct loop, whatever seats, blocks and arrivals") {
  for (int seats = 1; seats <= 8; ++seats)
    for (const int P : {1, 4, 16, 64})
      for (const double gap : {0.0, 0.004, 0.1}) {
        CAPTURE(seats);
        CAPTURE(P);
        CAPTURE(gap);
        const auto requests = random_requests(15, static_cast<unsigned>(seats * 100 + P), gap);
        CHECK(outputs_of(serve_static(requests, seats, P, {1, 0.005, seats % 2 == 0})) ==
              answers_of(requests));
      }
}

TEST_CASE("static batcher: refused requests disturb nobody (vLLM 7632: one empty prompt kills the engine)") {
  std::vector<Request> requests = random_requests(9, 5, 0);
  const auto expected = answers_of(requests);
  requests[4].prompt.clear();  // in the middle of a batch
  requests[2].max_tokens = 0;
  requests[6].prompt = {kVocabulary};
  requests[7].prompt.assign(90, 3), requests[7].max_tokens = 12;  // 101 positions
  requests[8].sampling.temperature = -1;
  for (const int seats : {1, 3, 8}) {
    BlockPool pool(seats * 25, 4);
    ManualClock clock;
    ScriptedExecutor executor(pool.size(), 4, &clock);
    StaticBatcher batcher(pool, {100, kVocabulary, kEos}, {seats, 0.02, false});
    const RunReport run = serve("static", batcher, executor, requests, {nullptr, &clock});
    for (size_t i = 0; i < requests.size(); ++i) {
      CAPTURE(i);
      const bool refused = i == 2 || i == 4 || i >= 6;
      CHECK((run.requests[i].finish == Finish::refused) == refused);
      CHECK(run.requests[i].output == (refused ? Ints{} : expected[i]));
      CHECK(run.requests[i].refusal.empty() == !refused);
    }
    CHECK(run.requests[7].refusal.find("101 positions") != std::string::npos);
    CHECK(summarize(run).refused == 5);
  }
}

TEST_CASE("static batcher: what cannot work is said at once") {
  BlockPool pool(5, 4);
  CHECK_THROWS_WITH_AS(StaticBatcher(pool, {21, 50, 2}, {1, 0.02, false}),
                       doctest::Contains("one full context of 21 tokens, found 20 tokens"), Error);
  CHECK_THROWS_WITH_AS(StaticBatcher(pool, {20, 50, 2}, {0, 0.02, false}), doctest::Contains("found 0"),
                       Error);
  CHECK(pool.free_blocks() == 5);
}
