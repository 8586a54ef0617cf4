// The shuttle: small scenes worked out by hand, cases from the field, then random workloads with every
// combination of switches against answers computed without a batcher.
#include <doctest/doctest.h>

#include <servelite/continuous_batcher.hpp>
#include <servelite/static_batcher.hpp>

#include "scripted.hpp"

using namespace servelite;
using namespace servelite::test;

namespace {

using Ints = std::vector<int>;

struct Served {
  RunReport report;
  long rows = 0;
  int preemptions = 0;  // as seen from outside
  long long evictions = 0;
};

/// Serves with a pool of `blocks` blocks of P in a context of 112, and checks what must hold for any run: the
/// books after every call, first come first scheduled, and nobody left in the memory at the end.
Served serve_continuous(const std::vector<Request>& requests, int blocks, int P, ContinuousOptions options) {
  BlockPool pool(blocks, P);
  ManualClock clock;
  ScriptedExecutor executor(blocks, P, &clock);
  ContinuousBatcher batcher(pool, {112, kVocabulary, kEos}, options);
  Watched watched(batcher, [&] {
    batcher.cache().check();  // checks the pool too
    const KvUse kv = batcher.kv_use();
    if (!(0 <= kv.used && kv.used <= kv.reserved && kv.reserved <= kv.capacity))
      throw std::logic_error("used, reserved and capacity are out of order");
  });
  Served served;
  served.report = serve("continuous", watched, executor, requests, {nullptr, &clock});
  served.rows = executor.rows, served.preemptions = watched.preemptions;
  CHECK(summarize(served.report).preemptions == watched.preemptions);
  served.evictions = batcher.cache().counters().evictions;
  CHECK(pool.referenced_blocks() == 0);
  CHECK(batcher.waiting().empty());
  CHECK(std::is_sorted(watched.first_scheduled.begin(), watched.first_scheduled.end()));
  return served;
}

Request request(Ints prompt, int max_tokens, double arrival = 0) {
  Request r;
  r.prompt = std::move(prompt), r.max_tokens = max_tokens, r.arrival = arrival;
  return r;
}

Ints joined(Ints a, const Ints& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

TEST_CASE("continuous batcher: joining and leaving, every step worked out by hand") {
  //           step 1    step 2    step 3    step 4
  //   seat 0  A 0..2    A 3       A 4       A 5, its last
  //   seat 1            B 0..1    B 2, last C 0..4, done
  BlockPool pool(8, 4);
  ContinuousBatcher batcher(pool, {16, kVocabulary, kEos}, {2});
  Hand hand{batcher};
  Sequence& a = hand.submit({11, 12, 13}, 4);
  StepBatch step = hand.step(30);
  REQUIRE(step.spans.size() == 1);
  CHECK(step.spans[0].phase == Phase::prefill);
  CHECK(step.spans[0].tokens == Ints{11, 12, 13});
  CHECK(step.spans[0].logits_of == 2);
  CHECK(step.spans[0].block_table == Ints{0});

  Sequence& b = hand.submit({21, 22}, 2);
  step = hand.step(31);
  REQUIRE(step.spans.size() == 2);
  CHECK(step.rows() == 3);
  CHECK(step.spans[0].phase == Phase::decode);
  CHECK(step.spans[0].tokens == Ints{30});
  CHECK(step.spans[0].first_position == 3);
  CHECK(step.spans[0].block_table == Ints{0});  // position 3 is the block's last slot
  CHECK(step.spans[1].request == 1);
  CHECK(step.spans[1].seat == 1);
  CHECK(step.spans[1].block_table == Ints{1});

  Sequence& c = hand.submit(ids(5, 40), 1);
  step = hand.step(32);
  REQUIRE(step.spans.size() == 2);  // both seats are taken: C waits
  CHECK(batcher.waiting().size() == 1);
  CHECK(step.spans[0].first_position == 4);
  CHECK(step.spans[0].block_table == Ints{0, 2});  // one block more
  CHECK(step.spans[1].tokens == Ints{31});
  CHECK(b.finish == Finish::length);
  CHECK(b.left);
  CHECK(b.seat == -1);
  CHECK(pool.references(1) == 0);

  step = hand.step(33);
  REQUIRE(step.spans.size() == 2);
  CHECK(step.spans[1].request == 2);
  CHECK(step.spans[1].seat == 1);
  CHECK(step.spans[1].tokens == ids(5, 40));
  CHECK(a.tokens == Ints{11, 12, 13, 30, 31, 32, 33});
  CHECK(b.tokens == Ints{21, 22, 31, 32});
  CHECK(c.tokens == joined(ids(5, 40), {33}));
  CHECK(pool.referenced_blocks() == 0);
  CHECK(batcher.schedule(0).empty());
}

TEST_CASE("continuous batcher: three that arrive together share what the first of them computes") {
  // P = 4.  A 3 4 5 6 | 7 8 9 10 | 11 12      B 3 4 5 6 | 7 8 40 41      C like A
  BlockPool pool(8, 4);
  ContinuousBatcher batcher(pool, {16, kVocabulary, kEos}, {3});
  Hand hand{batcher};
  hand.submit(ids(10), 2), hand.submit(joined(ids(6), {40, 41}), 2), hand.submit(ids(10), 2);
  const StepBatch step = batcher.schedule(0);
  REQUIRE(step.spans.size() == 3);
  CHECK(step.spans[0].tokens == ids(10));
  CHECK(step.spans[0].block_table == Ints{0, 1, 2});
  CHECK(step.spans[1].tokens == Ints{40, 41});
  CHECK(step.spans[1].first_position == 6);
  CHECK(step.spans[1].block_table == Ints{0, 3});  // the full block by reference, the rest by copy
  CHECK(step.spans[2].tokens == Ints{12});         // entirely cached: its last position is computed
  CHECK(step.spans[2].first_position == 9);
  CHECK(step.spans[2].logits_of == 0);
  CHECK(step.spans[2].block_table == Ints{0, 1, 4});
  REQUIRE(step.copies.size() == 2);
  CHECK(step.copies[0].from == 1);
  CHECK(step.copies[0].to == 3);
  CHECK(step.copies[0].tokens == 2);
  CHECK(step.copies[1].from == 2);
  CHECK(step.copies[1].to == 4);
  CHECK(step.copies[1].tokens == 1);
  CHECK(hand.sequences[0].shared_tokens == 0);
  CHECK(hand.sequences[1].shared_tokens == 6);
  CHECK(hand.sequences[2].shared_tokens == 9);
  CHECK(pool.references(0) == 3);
  CHECK(pool.references(1) == 3);  // A, C, and the copy to be made
  CHECK(batcher.kv_use().used == 10 + 4 + 2);
  CHECK(batcher.kv_use().reserved == 5 * 4);

  batcher.complete(step, {30, 31, 32}, 0);
  CHECK(pool.references(1) == 2);
  CHECK(pool.references(2) == 1);
  batcher.cache().check();
  hand.step(30);
  CHECK(pool.referenced_blocks() == 0);
}

TEST_CASE("continuous batcher: each switch takes away its own gain") {
  SUBCASE("without sharing every prompt is computed whole") {
    BlockPool pool(12, 4);
    ContinuousBatcher batcher(pool, {16, kVocabulary, kEos}, {3, true, false, true});
    Hand hand{batcher};
    for (int i = 0; i < 3; ++i) hand.submit(ids(10), 2);
    const StepBatch step = hand.step(30);
    CHECK(step.rows() == 30);
    CHECK(step.copies.empty());
    CHECK(pool.referenced_blocks() == 9);
    hand.step(30);
    CHECK(pool.free_blocks() == 12);
  }
  SUBCASE("without paging everyone reserves a full context, so fewer get on") {
    BlockPool pool(11, 4);
    ContinuousBatcher batcher(pool, {16, kVocabulary, kEos}, {3, false, false, true});
    Hand hand{batcher};
    for (int i = 0; i < 3; ++i) hand.submit(ids(2, 10 * i + 3), 2);
    CHECK(hand.step(30).spans.size() == 2);
    CHECK(pool.referenced_blocks() == 8);
    CHECK(batcher.kv_use().used == 3 + 3);  // two of prompt, one sampled, each
    CHECK(batcher.kv_use().reserved == 32);
    CHECK(hand.step(30).spans.size() == 2);
    CHECK(hand.step(30).spans.size() == 1);
  }
  SUBCASE("without joining nobody gets on before all have left, and dead seats cost nothing") {
    BlockPool pool(11, 4);
    ContinuousBatcher batcher(pool, {16, kVocabulary, kEos}, {2, true, true, false});
    Hand hand{batcher};
    hand.submit(ids(2, 3), 3), hand.submit(ids(2, 13), 1), hand.submit(ids(2, 23), 1);
    CHECK(hand.step(30).spans.size() == 2);
    CHECK(hand.step(30).spans.size() == 1);
    CHECK(hand.step(30).spans.size() == 1);
    const StepBatch step = hand.step(30);
    REQUIRE(step.spans.size() == 1);
    CHECK(step.spans[0].request == 2);
  }
}

TEST_CASE("continuous batcher: the youngest gives way, the others advance, it comes back first") {
  // 4 blocks of 4. A and B have prompts of 7, two blocks each; at position 8 both want a third.
  BlockPool pool(4, 4);
  ContinuousBatcher batcher(pool, {16, kVocabulary, kEos}, {2, true, true, true});
  Hand hand{batcher};
  Sequence &a = hand.submit(ids(7, 3), 4), &b = hand.submit(ids(7, 23), 4);
  hand.submit(ids(1, 40), 1);
  CHECK(hand.step(30).rows() == 14);
  CHECK(hand.step(31).rows() == 2);  // position 7, the last slot of the second block
  StepBatch step = hand.step(32);
  REQUIRE(step.spans.size() == 1);  // the free block would do for the third, but nobody passes B
  CHECK(step.spans[0].request == 0);
  CHECK(step.spans[0].first_position == 8);
  CHECK(b.computed == 0);
  CHECK(b.computed_before == 8);
  CHECK(b.known() == 9);
  CHECK(b.blocks.empty());
  REQUIRE(batcher.waiting().size() == 2);
  CHECK(batcher.waiting()[0] == &b);
  CHECK(hand.step(33).spans.size() == 1);
  CHECK(a.finish == Finish::length);

  step = hand.step(34);
  REQUIRE(step.spans.size() == 2);
  CHECK(step.spans[0].request == 1);
  CHECK(step.spans[0].phase == Phase::prefill);
  // Its first block survived in the cache; the second made room for A.
  CHECK(step.spans[0].first_position == 4);
  CHECK(step.spans[0].tokens == Ints{27, 28, 29, 30, 31});
  CHECK(step.spans[0].logits_of == 4);
  CHECK(step.spans[1].request == 2);
  hand.step(35);
  CHECK(b.tokens == joined(ids(7, 23), {30, 31, 34, 35}));
  CHECK(b.shared_tokens == 0);  // of the first admission
  CHECK(pool.referenced_blocks() == 0);
}

TEST_CASE("continuous batcher: a prompt that is entirely cached still computes one token (vLLM 3193)") {
  for (const int n : {1, 3, 4, 5, 7, 8, 9, 11, 12, 13}) {
    CAPTURE(n);
    BlockPool pool(20, 4);
    ContinuousBatcher batcher(pool, {64, kVocabulary, kEos}, {4});
    ScriptedExecutor executor(20, 4);
    const auto run = [&](int copies) {
      const std::vector<Request> same(static_cast<size_t>(copies), request(ids(n), 6));
      const RunReport report = serve("warm", batcher, executor, same);
      for (const RequestRecord& r : report.requests) CHECK(r.output == answer_of(same[0]));
      CHECK(report.steps.size() == answer_of(same[0]).size());
      return report;
    };
    CHECK(run(1).steps[0].spans[0].rows == n);
    for (const RunReport& warm : {run(1), run(2)})
      for (size_t i = 0; i < warm.requests.size(); ++i) {
        CHECK(warm.steps[0].spans[i].rows == 1);
        CHECK(warm.steps[0].spans[i].recomputed == (i == 0 ? 0 : 1));  // the books are per run
        CHECK(warm.requests[i].shared_tokens == n - 1);
      }
    batcher.cache().check();
  }
}

TEST_CASE("continuous batcher: two equal prompts in one cold step, lengths around the block size") {
  for (const int P : {1, 4, 16})
    for (int n = 1; n <= 2 * P + 2; ++n) {
      CAPTURE(P);
      CAPTURE(n);
      const std::vector<Request> same(2, request(ids(n), 20));
      const Served served = serve_continuous(same, 200 / P, P, {4});
      CHECK(outputs_of(served.report) == answers_of(same));
      CHECK(served.report.steps[0].spans[0].rows == n);
      CHECK(served.report.steps[0].spans[1].rows == 1);
    }
}

TEST_CASE("continuous batcher: the partly shared block is a copy, both go on writing their own") {
  // Common 6 tokens in blocks of 4; then each its own way, for several blocks, side by side.
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(request(joined(ids(6), {20 + i}), 30));
  const Served served = serve_continuous(requests, 60, 4, {4});
  CHECK(outputs_of(served.report) == answers_of(requests));
  CHECK(summarize(served.report).prefill_computed == 7 + 1 + 1 + 1);
}

TEST_CASE("continuous batcher: unique tokens are computed once") {
  for (unsigned seed = 0; seed < 20; ++seed)
    for (const int P : {1, 4, 16, 64}) {
      CAPTURE(seed);
      CAPTURE(P);
      std::vector<Request> requests = random_requests(12, seed, seed % 2 == 0 ? 0 : 0.01);
      std::vector<Ints> prompts;
      for (size_t i = 0; i < requests.size(); ++i) {
        requests[i].prompt.push_back(static_cast<int>(i));  // so that none is a prefix of another
        prompts.push_back(requests[i].prompt);
      }
      const Served served =
          serve_continuous(requests, 12 * ((112 + P - 1) / P), P, {1 + static_cast<int>(seed % 8)});
      const Summary s = summarize(served.report);
      CHECK(s.prefill_computed == unique_prefix_tokens(prompts));
      CHECK(s.rows_recomputed == 0);
      CHECK(s.rows_padding + s.rows_dead == 0);
      CHECK(served.evictions == 0);
      CHECK(outputs_of(served.report) == answers_of(requests));
    }
}

TEST_CASE("continuous batcher: strict order: the head of the queue lets nobody pass (vLLM 31731)") {
  BlockPool pool(8, 4);
  ContinuousBatcher batcher(pool, {32, kVocabulary, kEos}, {8});
  Hand hand{batcher};
  Sequence& a = hand.submit(ids(13, 3), 4);  // 16 positions: 4 blocks to its end
  hand.step(30);
  Sequence& b = hand.submit(ids(24, 20), 2);  // 6 blocks, 4 are left
  for (int i = 0; i < 3; ++i) hand.submit(ids(2, 44 + i), 1);
  for (int i = 0; i < 3; ++i) {
    const StepBatch step = hand.step(31);
    REQUIRE(step.spans.size() == 1);  // C waits behind B, A advances
    CHECK(step.spans[0].request == 0);
    CHECK(batcher.waiting().front() == &b);
    hand.submit(ids(1, 47), 1);
  }
  CHECK(a.finish == Finish::length);
  const StepBatch step = hand.step(32);  // B starts as soon as A has ended, and those behind it too
  REQUIRE(step.spans.size() >= 2);
  CHECK(step.spans[0].request == 1);
  CHECK(step.spans[1].request == 2);
}

TEST_CASE("continuous batcher: what exceeds the whole memory is refused, not waited for (vLLM 39734)") {
  const auto serve_two = [](int prompt, int max_tokens) {
    BlockPool pool(100, 16);
    ManualClock clock;
    ScriptedExecutor executor(100, 16, &clock);
    ContinuousBatcher batcher(pool, {4096, kVocabulary, kEos}, {4});
    const std::vector<Request> requests = {request(Ints(static_cast<size_t>(prompt), 5), max_tokens),
                                           request(ids(3), 4)};
    const RunReport run = serve("39734", batcher, executor, requests, {nullptr, &clock});
    CHECK(run.requests[1].output == answer_of(requests[1]));  // the small one behind it is served in any case
    if (run.requests[0].finish != Finish::refused) CHECK(run.requests[0].output == answer_of(requests[0]));
    return run.requests[0].refusal;
  };
  CHECK(serve_two(1599, 2).empty());
  CHECK(serve_two(1600, 1).empty());
  CHECK(serve_two(1601, 1).find("needs KV for 1601 tokens, the whole KV memory holds 1600") !=
        std::string::npos);
  CHECK(serve_two(1600, 2).find("1601") != std::string::npos);
  CHECK(serve_two(2000, 1).find("2000") != std::string::npos);
  CHECK(serve_two(1500, 200).find("1699") != std::string::npos);
  CHECK(serve_two(4000, 98).find("4097 positions") != std::string::npos);
}

TEST_CASE(
    "continuous batcher: refused requests disturb nobody (vLLM 7632: one empty prompt kills the engine)") {
  std::vector<Request> good = {request(ids(9), 30), request(ids(5, 30), 30), request(ids(9), 10, 0.004)};
  const auto expected = answers_of(good);
  Request empty = request({}, 5, 0.002), nothing = request(ids(3), 0, 0.002),
          stray = request({3, -7}, 5, 0.002), hot = request(ids(3), 5, 0.002),
          large = request(Ints(100, 5), 14, 0.002);
  hot.sampling.top_p = 2;
  for (const Request& bad : {empty, nothing, stray, hot, large}) {
    std::vector<Request> requests = good;
    requests.insert(requests.begin() + 2, bad);  // arrives while the first two decode
    const RunReport run = serve_continuous(requests, 60, 4, {4}).report;
    CHECK(run.requests[2].finish == Finish::refused);
    CHECK_FALSE(run.requests[2].refusal.empty());
    CHECK(run.requests[2].output.empty());
    CHECK(run.requests[0].output == expected[0]);
    CHECK(run.requests[1].output == expected[1]);
    CHECK(run.requests[3].output == expected[2]);
  }
  const RunReport alone = serve_continuous({}, 60, 4, {4}).report;
  CHECK(alone.requests.empty());
  BlockPool pool(60, 4);
  ScriptedExecutor executor(60, 4);
  ContinuousBatcher batcher(pool, {112, kVocabulary, kEos}, {4});
  CHECK(serve("alone", batcher, executor, {empty}).requests[0].finish == Finish::refused);
  CHECK(executor.steps == 0);
  CHECK(serve("next", batcher, executor, {good[0]}).requests[0].output == expected[0]);  // the engine lives
}

TEST_CASE("continuous batcher: a seeded answer depends on nobody else (vLLM 51226)") {
  // Seeds belong to requests; there is no unseeded request. (Who wants variety passes different seeds.)
  Request a = request(ids(8), 16), b = request(ids(8), 16), c = request(ids(8), 16);
  a.sampling.temperature = b.sampling.temperature = c.sampling.temperature = 0.8f;
  a.sampling.seed = c.sampling.seed = 42, b.sampling.seed = 43;
  Request late = a;
  late.arrival = 0.003;
  const Ints expected = answer_of(a);
  CHECK(answer_of(b) != expected);
  const std::vector<std::pair<std::vector<Request>, size_t>> scenes = {
      {{a}, 0}, {{a, b}, 0}, {{b, a}, 1}, {{a, c}, 1}, {{b, late}, 1}, {{b, b, b, a}, 3}};
  for (const auto& [requests, at] : scenes)
    for (const int seats : {1, 2, 4})
      for (const int blocks : {6, 60}) {  // 6 blocks of 4: just one whole answer, so others give way
        CHECK(serve_continuous(requests, blocks, 4, {seats}).report.requests[at].output == expected);
        BlockPool pool(seats * 28, 4);
        ManualClock clock;
        ScriptedExecutor executor(pool.size(), 4, &clock);
        StaticBatcher bus(pool, {112, kVocabulary, kEos}, {seats});
        CHECK(serve("static", bus, executor, requests, {nullptr, &clock}).requests[at].output == expected);
      }
}

TEST_CASE(
    "continuous batcher: answers are those of a direct loop, with all switches, seats, blocks and pools") {
  int preemptions[8] = {}, runs = 0;
  long long evictions = 0;
  for (int seats = 1; seats <= 8; ++seats)
    for (const int P : {1, 4, 16, 64})
      for (int switches = 0; switches < 8; ++switches) {
        const ContinuousOptions options{seats, (switches & 1) != 0, (switches & 2) != 0, (switches & 4) != 0};
        const auto requests = random_requests(14, static_cast<unsigned>(runs), runs % 3 == 0 ? 0 : 0.004);
        int largest = options.paging ? 0 : 112;
        for (const Request& r : requests)
          largest = std::max(largest, static_cast<int>(r.prompt.size()) + r.max_tokens - 1);
        const int least = (largest + P - 1) / P;
        const int blocks = runs % 3 == 0 ? least : runs % 3 == 1 ? least * 3 / 2 : least * (seats + 1);
        CAPTURE(seats);
        CAPTURE(P);
        CAPTURE(switches);
        CAPTURE(blocks);
        const Served served = serve_continuous(requests, blocks, P, options);
        CHECK(outputs_of(served.report) == answers_of(requests));
        for (const RequestRecord& r : served.report.requests)
          CHECK(r.finish == (r.output.back() == kEos ? Finish::eos : Finish::length));
        preemptions[switches] += served.preemptions, evictions += served.evictions, ++runs;
      }
  for (int switches = 0; switches < 8; ++switches) {
    CAPTURE(switches);
    if (switches & 1)
      CHECK(preemptions[switches] > 10);
    else
      CHECK(preemptions[switches] == 0);  // who reserves a full context never asks for more
  }
  CHECK(evictions > 1000);
}

TEST_CASE("continuous batcher: rows thrown away by a preemption are counted as recomputed") {
  // 6 blocks of 4, two prompts of 8 with answers to position 24: the second must give way at least once.
  const std::vector<Request> requests = {request(ids(8), 17), request(ids(8, 30), 17)};
  const Served tight = serve_continuous(requests, 6, 4, {2, true, false, true});
  const Served roomy = serve_continuous(requests, 60, 4, {2, true, false, true});
  CHECK(outputs_of(tight.report) == answers_of(requests));
  CHECK(tight.preemptions > 0);
  CHECK(roomy.preemptions == 0);
  CHECK(summarize(roomy.report).rows_recomputed == 0);
  CHECK(summarize(tight.report).rows_recomputed == tight.rows - roomy.rows);
  CHECK(summarize(tight.report).rows_useful == roomy.rows);
}

TEST_CASE("continuous batcher: what cannot work is said at once") {
  BlockPool pool(5, 4);
  CHECK_THROWS_WITH_AS(ContinuousBatcher(pool, {21, 50, 2}, {1, false, true, true}),
                       doctest::Contains("one full context of 21 tokens, found 20 tokens"), Error);
  CHECK_THROWS_WITH_AS(ContinuousBatcher(pool, {20, 50, 2}, {0}), doctest::Contains("found 0"), Error);
}

TEST_CASE("continuous batcher: a next turn finds of the answer before it only what was computed") {
  for (int length = 1; length <= 40; ++length) {
    Request turn = request({}, 9);
    for (int i = 0; i < length; ++i) turn.prompt.push_back(3 + (i * 7 + length) % 40);
    const Ints answer = answer_of(turn);
    Request next = request(joined(joined(turn.prompt, answer), {5, 6, 7}), 12, 10.0);  // long after the first
    const Served s = serve_continuous({turn, next}, 40, 4, {});
    CHECK(s.report.requests[0].output == answer);
    CHECK(s.report.requests[1].output == answer_of(next));
    const int computed = length + static_cast<int>(answer.size()) - 1;  // the last sampled token never was
    CHECK(s.report.requests[1].shared_tokens <= computed);
  }
}
