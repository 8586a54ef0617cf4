// sampler.hpp: from logits to the next token.
//
// sample() is a pure function: the random number for token n of a request comes from (seed, n) and
// nothing else. So a request's answer cannot depend on its neighbours in the batch, on preemption or
// on the order of service, and there is no generator state to save or to lose.
//
// Chapter: docs/01_one_token.md
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "error.hpp"
#include "simd.hpp"

namespace servelite {

struct SamplingParams {
  float temperature = 0.0f;  ///< at most 0.001: greedy, the highest logit (of equals the lowest id)
  int top_k = 0;             ///< keep the k likeliest; 0, or more than there are: all
  float top_p = 1.0f;        ///< keep the likeliest that together reach p (Holtzman et al., 2020)
  float min_p = 0.0f;        ///< keep those at least min_p times as likely as the likeliest
  uint64_t seed = 0;
};

/// Throws Error for settings that mean nothing. NaN fails every comparison, so it is refused too.
inline void check_sampling(const SamplingParams& p) {
  if (!(p.temperature >= 0 && p.temperature <= 1e6f))
    fail("temperature: expected a number from 0 to 1e6, found ", p.temperature);
  if (p.top_k < 0) fail("top_k: expected 0 (all) or more, found ", p.top_k);
  if (!(p.top_p >= 0 && p.top_p <= 1)) fail("top_p: expected a number from 0 to 1, found ", p.top_p);
  if (!(p.min_p >= 0 && p.min_p <= 1)) fail("min_p: expected a number from 0 to 1, found ", p.min_p);
}

/// Number n of the stream `seed`, uniform in [0, 1): two rounds of splitmix64 (Steele et al., 2014).
inline double uniform_of(uint64_t seed, uint64_t n) {
  const auto mix = [](uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  };
  return static_cast<double>(mix(mix(seed) ^ n) >> 11) * 0x1p-53;
}

inline int argmax(std::span<const float> logits) {
  return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

struct Candidate {
  int id;
  double probability;
};

/// What is left to choose from, likeliest first (of equals the lowest id first); probabilities sum to 1.
/// Order: temperature, top-k, top-p, min-p. At least one candidate always remains.
inline std::vector<Candidate> candidates(std::span<const float> logits, const SamplingParams& p) {
  if (p.temperature <= 1e-3f) return {{argmax(logits), 1.0}};
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int a, int b) {
    return logits[static_cast<size_t>(a)] != logits[static_cast<size_t>(b)]
               ? logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]
               : a < b;
  };
  const size_t k = p.top_k == 0 ? order.size() : std::min(order.size(), static_cast<size_t>(p.top_k));
  std::partial_sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(k), order.end(), likelier);
  order.resize(k);

  std::vector<Candidate> kept;
  const float highest = logits[static_cast<size_t>(order[0])];
  double total = 0;
  for (const int id : order) {
    kept.push_back({id, exp1((logits[static_cast<size_t>(id)] - highest) / p.temperature)});
    total += kept.back().probability;
  }
  double reached = 0;
  size_t n = 0;
  while (n < kept.size() &&
         (n == 0 || (reached < p.top_p * total && kept[n].probability >= p.min_p * kept[0].probability)))
    reached += kept[n++].probability;
  kept.resize(n);
  for (Candidate& c : kept) c.probability /= reached;
  return kept;
}

/// Token number n (0, 1, ...) of a request's answer. logits: [V].
inline int sample(std::span<const float> logits, const SamplingParams& p, int n) {
  const std::vector<Candidate> from = candidates(logits, p);
  double left = uniform_of(p.seed, static_cast<uint64_t>(n));
  for (const Candidate& c : from)
    if ((left -= c.probability) < 0) return c.id;
  return from.back().id;  // rounding left a crumb
}

}  // namespace servelite
