// The sampler: candidates worked out by hand, extreme and senseless settings, frequencies of many draws.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <servelite/sampler.hpp>
#include <set>
#include <string>
#include <vector>

using namespace servelite;

namespace {

SamplingParams params(float temperature, int top_k = 0, float top_p = 1.0f, float min_p = 0.0f,
                      uint64_t seed = 1) {
  return {temperature, top_k, top_p, min_p, seed};
}

/// Logits of the probabilities 0.1, 0.4, 0.2, 0.3 at temperature 1.
std::vector<float> four() {
  std::vector<float> logits;
  for (const double p : {0.1, 0.4, 0.2, 0.3}) logits.push_back(static_cast<float>(std::log(p)) + 5.0f);
  return logits;
}

/// The candidates are these ids with these probabilities.
void check_candidates(const std::vector<Candidate>& found, const std::vector<Candidate>& expected) {
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK(found[i].id == expected[i].id);
    CHECK(found[i].probability == doctest::Approx(expected[i].probability).epsilon(1e-6));
  }
}

}  // namespace

TEST_CASE("sampler: candidates by hand: top-k, top-p, min-p and their order") {
  const std::vector<float> logits = four();
  check_candidates(candidates(logits, params(1)), {{1, 0.4}, {3, 0.3}, {2, 0.2}, {0, 0.1}});
  check_candidates(candidates(logits, params(1, 2)), {{1, 4.0 / 7}, {3, 3.0 / 7}});
  check_candidates(candidates(logits, params(1, 0, 0.35f)), {{1, 1.0}});
  check_candidates(candidates(logits, params(1, 0, 0.6f)), {{1, 4.0 / 7}, {3, 3.0 / 7}});
  check_candidates(candidates(logits, params(1, 0, 0.75f)), {{1, 4.0 / 9}, {3, 3.0 / 9}, {2, 2.0 / 9}});
  check_candidates(candidates(logits, params(1, 0, 1, 0.45f)), {{1, 4.0 / 9}, {3, 3.0 / 9}, {2, 2.0 / 9}});
  check_candidates(candidates(logits, params(1, 0, 1, 0.6f)), {{1, 4.0 / 7}, {3, 3.0 / 7}});
  check_candidates(candidates(logits, params(1, 0, 1, 1)), {{1, 1.0}});
  // Top-p counts what top-k left: of 4/9, 3/9, 2/9 the first two reach 0.75. Without top-k it takes three.
  check_candidates(candidates(logits, params(1, 3, 0.75f)), {{1, 4.0 / 7}, {3, 3.0 / 7}});
  // Temperature comes first: at 1/2 the probabilities are 1, 16, 4, 9 of 30, so 0.5 is reached by one.
  check_candidates(candidates(logits, params(0.5f)),
                   {{1, 16.0 / 30}, {3, 9.0 / 30}, {2, 4.0 / 30}, {0, 1.0 / 30}});
  check_candidates(candidates(logits, params(0.5f, 0, 0.5f)), {{1, 1.0}});
  check_candidates(candidates(logits, params(1, 0, 0.5f)), {{1, 4.0 / 7}, {3, 3.0 / 7}});
  // Min-p is measured against the likeliest after temperature: 4/16 is 0.25.
  check_candidates(candidates(logits, params(0.5f, 0, 1, 0.3f)), {{1, 0.64}, {3, 0.36}});
}

TEST_CASE("sampler: extreme settings over a spread of 1000") {
  std::vector<float> logits;
  for (int i = 0; i < 101; ++i) logits.push_back(static_cast<float>((i * 37) % 101) * 10.0f - 500.0f);
  const int V = static_cast<int>(logits.size()), best = 30;  // 30 * 37 = 10 * 101 + 100
  REQUIRE(argmax(logits) == best);
  for (const float temperature : {0.0f, 1e-7f, 1e-4f, 1e-3f, 0.5f, 1.0f, 1e4f, 1e6f})
    for (const int top_k : {0, 1, V, V + 1, 1000000, std::numeric_limits<int>::max()})
      for (const float top_p : {0.0f, 1e-4f, 1.0f})
        for (const float min_p : {0.0f, 1e-4f, 1.0f}) {
          CAPTURE(temperature);
          CAPTURE(top_k);
          CAPTURE(top_p);
          const SamplingParams p = params(temperature, top_k, top_p, min_p);
          CHECK_NOTHROW(check_sampling(p));
          const std::vector<Candidate> from = candidates(logits, p);
          REQUIRE(!from.empty());
          double total = 0;
          bool sound = true;
          std::set<int> ids;
          for (const Candidate& c : from) {
            total += c.probability;
            sound = sound && std::isfinite(c.probability) && c.probability >= 0 && c.id >= 0 && c.id < V;
            sound = sound && ids.insert(c.id).second;
          }
          CHECK(sound);
          CHECK(total == doctest::Approx(1.0).epsilon(1e-12));
          CHECK(from[0].id == best);
          if (temperature <= 1e-3f || top_k == 1 || top_p <= 1e-4f || min_p == 1.0f) {
            CHECK(from.size() == 1);
            for (int n = 0; n < 20; ++n) CHECK(sample(logits, p, n) == best);
          }
          if (temperature >= 1e4f && top_k != 1 && top_p == 1.0f && min_p < 1.0f)
            CHECK(from.size() == logits.size());  // oversize top-k means all
        }
  // At 1e4 the spread is e^0.1: the likeliest is 1.105 times as likely as the unlikeliest.
  const std::vector<Candidate> flat = candidates(logits, params(1e4f));
  CHECK(flat.front().probability / flat.back().probability == doctest::Approx(std::exp(0.1)).epsilon(1e-5));
}

TEST_CASE("sampler: ties: the lowest id comes first, and is the greedy choice") {
  const std::vector<float> logits = {1, 3, 2, 3, -0.0f, 3, 0.0f};
  for (const float temperature : {0.0f, 1e-7f, 1e-3f}) CHECK(sample(logits, params(temperature), 5) == 1);
  const std::vector<Candidate> all = candidates(logits, params(1));
  const std::vector<int> order = {1, 3, 5, 2, 0, 4, 6};
  REQUIRE(all.size() == order.size());
  for (size_t i = 0; i < order.size(); ++i) CHECK(all[i].id == order[i]);
  check_candidates(candidates(logits, params(1, 2)), {{1, 0.5}, {3, 0.5}});
  check_candidates(candidates(logits, params(1, 0, 1, 1)), {{1, 1.0 / 3}, {3, 1.0 / 3}, {5, 1.0 / 3}});
  const std::vector<float> equal(9, -7.5f);
  CHECK(argmax(equal) == 0);
  CHECK(candidates(equal, params(1, 0, 0.0f)).front().id == 0);
}

TEST_CASE("sampler: one token to choose from, and logits of minus infinity") {
  const std::vector<float> one = {-3.0f};
  for (const float temperature : {0.0f, 1.0f}) CHECK(sample(one, params(temperature, 5, 0.5f), 0) == 0);
  const float never = -std::numeric_limits<float>::infinity();
  const std::vector<float> masked = {never, 2.0f, never, 1.0f, never};
  for (int n = 0; n < 1000; ++n) CHECK(sample(masked, params(1.0f), n) % 2 == 1);
}

TEST_CASE("sampler: nonsense is refused, and the message names the setting") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const auto refused = [](const SamplingParams& p, const std::string& name) {
    try {
      check_sampling(p);
    } catch (const Error& e) {
      return std::string(e.what()).rfind(name + ": expected", 0) == 0;
    }
    return false;
  };
  for (const float t : {nan, -1.0f, -1e-7f, inf, -inf, 2e6f}) CHECK(refused(params(t), "temperature"));
  for (const int k : {-1, std::numeric_limits<int>::min()}) CHECK(refused(params(1, k), "top_k"));
  for (const float x : {nan, -0.1f, 1.0001f, inf}) {
    CHECK(refused(params(1, 0, x), "top_p"));
    CHECK(refused(params(1, 0, 1, x), "min_p"));
  }
  CHECK_NOTHROW(check_sampling({}));
  CHECK_NOTHROW(check_sampling(params(1e6f, 0, 0, 1)));
  CHECK_NOTHROW(check_sampling(params(-0.0f)));
}

TEST_CASE("sampler: 20000 draws come in the candidates' proportions, whatever the seed") {
  const std::vector<float> logits = four();
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{42}, ~uint64_t{0}})
    for (const SamplingParams& p : {params(1, 0, 1, 0, seed), params(0.7f, 3, 0.95f, 0, seed)}) {
      int counts[4] = {};
      for (int n = 0; n < 20000; ++n) ++counts[sample(logits, p, n)];
      double chi = 0;  // Pearson: 3 degrees of freedom at most, above 27.9 once in 250 000 tests
      int expected_ids = 0;
      for (const Candidate& c : candidates(logits, p)) {
        const double expected = 20000 * c.probability;
        chi += (counts[c.id] - expected) * (counts[c.id] - expected) / expected;
        expected_ids += counts[c.id];
      }
      CHECK(chi < 27.9);
      CHECK(expected_ids == 20000);  // nothing that was cut off is ever drawn
    }
}

TEST_CASE("sampler: the draw of token n depends on (seed, n) and on nothing before it") {
  const std::vector<float> logits = four(), other(50, 0.25f);
  std::vector<int> forward, backward(200);
  for (int n = 0; n < 200; ++n) forward.push_back(sample(logits, params(1, 0, 1, 0, 42), n));
  for (int n = 199; n >= 0; --n) {
    sample(other, params(1, 0, 1, 0, 42), n);  // a neighbour in the batch, even with the same seed
    backward[static_cast<size_t>(n)] = sample(logits, params(1, 0, 1, 0, 42), n);
  }
  CHECK(forward == backward);
  std::vector<int> reseeded;
  for (int n = 0; n < 200; ++n) reseeded.push_back(sample(logits, params(1, 0, 1, 0, 43), n));
  CHECK(forward != reseeded);
}

TEST_CASE("sampler: uniform_of is uniform in [0, 1), and neighbouring seeds and numbers are unrelated") {
  // Known answer: splitmix64 with state 0 gives 0xe220a8397b1dcdaf first.
  // uniform_of(seed, n) mixes mix(seed) ^ n, so n = mix(0) makes it mix(0) again.
  CHECK(uniform_of(0, 0xe220a8397b1dcdafull) == static_cast<double>(0xe220a8397b1dcdafull >> 11) * 0x1p-53);
  double sum = 0, with_next_n = 0, with_next_seed = 0;
  std::set<double> seen;
  constexpr int kSeeds = 100, kNumbers = 200;
  for (uint64_t seed = 0; seed < kSeeds; ++seed)
    for (uint64_t n = 0; n < kNumbers; ++n) {
      const double u = uniform_of(seed, n);
      CHECK_FALSE((u < 0 || u >= 1));
      seen.insert(u);
      sum += u;
      with_next_n += (u - 0.5) * (uniform_of(seed, n + 1) - 0.5);
      with_next_seed += (u - 0.5) * (uniform_of(seed + 1, n) - 0.5);
    }
  constexpr double count = kSeeds * kNumbers;
  CHECK(seen.size() == static_cast<size_t>(count));                        // no draw twice
  CHECK(std::abs(sum / count - 0.5) < 5 * std::sqrt(1.0 / 12 / count));    // five standard deviations
  CHECK(std::abs(with_next_n / count) < 5 * 1.0 / 12 / std::sqrt(count));  // uncorrelated
  CHECK(std::abs(with_next_seed / count) < 5 * 1.0 / 12 / std::sqrt(count));
}
