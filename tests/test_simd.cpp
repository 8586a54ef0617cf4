// f32x16: each operation against scalar IEEE arithmetic, bit for bit; exp, sincos64, log64 and exp64 against
// libm within their stated bounds; and one hash that every instruction set must give.
// CMake builds this file twice, the second time with SERVELITE_PLAIN.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <servelite/simd.hpp>
#include <string>
#include <vector>

using namespace servelite;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
bool same(float a, float b) { return bits(a) == bits(b) || (std::isnan(a) && std::isnan(b)); }

/// Values at the edges of the format, then floats of random bits (NaNs excepted).
std::vector<float> samples(size_t n, unsigned seed) {
  std::vector<float> x = {0.0f,   -0.0f,     1.0f,  -1.0f,   kInf,  -kInf, 1e-45f, -1e-45f, 1.17549435e-38f,
                          3e38f,  -3e38f,    0.1f,  1e-30f,  1e30f, 0.5f,  3.0f,   -7.25f,  16777216.0f,
                          1e-20f, 8388609.f, -0.3f, 2.5e-8f, 1.5f,  -1e20f};
  std::mt19937 random(seed);
  while (x.size() < n) {
    const float f = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isnan(f)) x.push_back(f);
  }
  x.resize(n / 16 * 16);
  return x;
}

/// How many of the lanes of `vector` over all triples differ from `scalar`.
template <class Vector, class Scalar>
int mismatches(Vector vector, Scalar scalar) {
  const std::vector<float> x = samples(2048, 1);
  int wrong = 0;
  for (size_t shift = 0; shift < 48; ++shift)  // all edge values meet each other
    for (size_t i = 0; i < x.size(); i += 16) {
      float a[16], b[16], c[16], y[16];
      for (size_t l = 0; l < 16; ++l) {
        a[l] = x[i + l];
        b[l] = x[(i + l * 3 + shift) % x.size()];
        c[l] = x[(i + l * 5 + shift * 7) % x.size()];
      }
      store(y, vector(load(a), load(b), load(c)));
      for (size_t l = 0; l < 16; ++l) wrong += !same(y[l], scalar(a[l], b[l], c[l]));
    }
  return wrong;
}

uint64_t mixed(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x100000001b3ull; }  // FNV-1a

}  // namespace

TEST_CASE("simd: sixteen lanes on every machine, and the variant that was asked for") {
  CHECK(lanes::kRegs * lanes::kCount == 16);
  CHECK(sizeof(f32x16) == 64);
  MESSAGE("lanes: " << std::string(lanes::kName));
#ifdef SERVELITE_PLAIN
  CHECK(lanes::kCount == 1);
#endif
}

TEST_CASE("simd: load and store keep every lane in its place, at any alignment") {
  float from[32], to[32];
  for (int i = 0; i < 32; ++i) from[i] = static_cast<float>(i + 1), to[i] = -1.0f;
  for (int at = 0; at <= 16; ++at) {
    for (float& t : to) t = -1.0f;
    store(to + at, load(from + 16 - at));
    for (int i = 0; i < 32; ++i)
      CHECK(to[i] == (i >= at && i < at + 16 ? static_cast<float>(16 - at + i - at + 1) : -1.0f));
  }
  float y[16];
  store(y, splat(2.5f));
  for (const float lane : y) CHECK(lane == 2.5f);
  f32x16 kept = load(from);
  kept = keep(kept);
  store(y, kept);
  for (int i = 0; i < 16; ++i) CHECK(y[i] == from[i]);
}

TEST_CASE("simd: each operation is scalar IEEE arithmetic, bit for bit") {
  using V = f32x16;
  CHECK(mismatches([](V a, V b, V) { return add(a, b); }, [](float a, float b, float) { return a + b; }) ==
        0);
  CHECK(mismatches([](V a, V b, V) { return sub(a, b); }, [](float a, float b, float) { return a - b; }) ==
        0);
  CHECK(mismatches([](V a, V b, V) { return mul(a, b); }, [](float a, float b, float) { return a * b; }) ==
        0);
  CHECK(mismatches([](V a, V b, V) { return div(a, b); }, [](float a, float b, float) { return a / b; }) ==
        0);
  CHECK(mismatches([](V a, V b, V c) { return fma(a, b, c); },
                   [](float a, float b, float c) { return std::fma(a, b, c); }) == 0);
  CHECK(mismatches([](V a, V b, V) { return max(a, b); },
                   [](float a, float b, float) { return a > b ? a : b; }) == 0);
  CHECK(mismatches([](V a, V b, V) { return min(a, b); },
                   [](float a, float b, float) { return a < b ? a : b; }) == 0);
}

TEST_CASE("simd: fma rounds once") {
  // (1 + 2^-12)^2 - (1 + 2^-11) = 2^-24. With a rounded product it would be 0.
  float y[16];
  store(y, fma(splat(1.0f + 0x1p-12f), splat(1.0f + 0x1p-12f), splat(-1.0f - 0x1p-11f)));
  for (const float lane : y) CHECK(lane == 0x1p-24f);
}

TEST_CASE("simd: max and min take the second where neither is greater: equal zeros and NaN") {
  float y[16];
  store(y, max(splat(0.0f), splat(-0.0f)));
  CHECK(std::signbit(y[0]));
  store(y, max(splat(-0.0f), splat(0.0f)));
  CHECK_FALSE(std::signbit(y[15]));
  store(y, min(splat(0.0f), splat(-0.0f)));
  CHECK(std::signbit(y[7]));
  for (const bool nan_first : {false, true}) {
    const f32x16 a = splat(nan_first ? kNan : 3.0f), b = splat(nan_first ? 3.0f : kNan);
    store(y, max(a, b));
    for (const float lane : y) CHECK(std::isnan(lane) == !nan_first);
    store(y, min(a, b));
    for (const float lane : y) CHECK(std::isnan(lane) == !nan_first);
  }
}

TEST_CASE("simd: sum is the tree ((l, l+8), (l, l+4), (l, l+2), (l, l+1))") {
  // 2^24 + 1 is no float (it rounds to 2^24), so these sums tell one order from another.
  const float big = 16777216.0f;
  float x[16] = {};
  x[0] = big, x[8] = 1.0f, x[4] = 1.0f;  // (2^24 + 1) + 1: each 1 is lost
  CHECK(sum(load(x)) == big);
  x[4] = 0.0f, x[9] = 1.0f;  // 2^24 + 1 is lost at once, lane 9's 1 in the last addition
  CHECK(sum(load(x)) == big);
  x[8] = 0.0f, x[1] = 1.0f;  // lanes 1 and 9 meet first: 2^24 + 2
  CHECK(sum(load(x)) == big + 2);
  x[1] = x[9] = 0.0f, x[4] = x[12] = 1.0f;  // so do 4 and 12
  CHECK(sum(load(x)) == big + 2);

  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    for (float& v : x) v = std::ldexp(static_cast<float>(random()), static_cast<int>(random() % 40) - 40);
    const auto a = [&](int l) { return x[l] + x[l + 8]; };
    const auto b = [&](int l) { return a(l) + a(l + 4); };
    const auto c = [&](int l) { return b(l) + b(l + 2); };
    CHECK(sum(load(x)) == c(0) + c(1));
  }
}

TEST_CASE("simd: exp is within 2e-7 of e^x from -87 to 88") {
  double worst = 0;
  float at = 0, x[16], y[16];
  for (int i = -87 * 1024; i <= 88 * 1024; i += 16) {
    for (int l = 0; l < 16; ++l) x[l] = std::min(static_cast<float>(i + l) * 0x1p-10f, 88.0f);
    store(y, exp(load(x)));
    for (int l = 0; l < 16; ++l) {
      const double right = std::exp(static_cast<double>(x[l]));
      const double error = std::abs(static_cast<double>(y[l]) - right) / right;
      if (error > worst) worst = error, at = x[l];
    }
  }
  // Near the half-way points of n = round(x / ln 2), where r is largest.
  for (int n = -125; n <= 126; ++n)
    for (int ulp = -8; ulp <= 8; ++ulp) {
      const float near =
          static_cast<float>((n + 0.5) * 0.69314718055994531) * (1 + static_cast<float>(ulp) * 0x1p-23f);
      const double right = std::exp(static_cast<double>(near));
      const double error = std::abs(static_cast<double>(exp1(near)) - right) / right;
      if (error > worst) worst = error, at = near;
    }
  MESSAGE("worst relative error " << worst << " at " << at);
  CHECK(worst < 2e-7);
}

TEST_CASE("simd: exp at the edges: exact at 0, clamped outside, tiny arguments") {
  CHECK(exp1(0.0f) == 1.0f);
  CHECK(exp1(-0.0f) == 1.0f);
  CHECK(exp1(1e-30f) == 1.0f);
  CHECK(exp1(-1e-45f) == 1.0f);
  CHECK(exp1(-88.0f) == exp1(-87.0f));
  CHECK(exp1(-1e30f) == exp1(-87.0f));
  CHECK(exp1(-kInf) == exp1(-87.0f));
  CHECK(exp1(89.0f) == exp1(88.0f));
  CHECK(exp1(kInf) == exp1(88.0f));
  CHECK(exp1(-87.0f) > 0.0f);
  CHECK(std::isnormal(exp1(-87.0f)));
  CHECK(std::isfinite(exp1(88.0f)));
  CHECK(exp1(-87.0f) == doctest::Approx(std::exp(-87.0)).epsilon(2e-7));
  CHECK(exp1(88.0f) == doctest::Approx(std::exp(88.0)).epsilon(2e-7));
}

TEST_CASE("simd: exp of a lane does not depend on its neighbours, and exp1 is the same function") {
  std::mt19937 random(4);
  for (int round = 0; round < 500; ++round) {
    float x[16], y[16];
    for (float& v : x) v = (static_cast<float>(random()) * 0x1p-32f - 0.5f) * 190.0f;
    store(y, exp(load(x)));
    for (int l = 0; l < 16; ++l) CHECK(bits(y[l]) == bits(exp1(x[l])));
  }
}

TEST_CASE("simd: sincos64 against libm, error below 1e-12 for |x| < 1e5") {
  double worst = 0;
  const auto look = [&](double x) {
    const SinCos a = sincos64(x);
    worst = std::max({worst, std::abs(a.sin - std::sin(x)), std::abs(a.cos - std::cos(x))});
  };
  for (int i = -40000; i <= 40000; ++i) look(i * 2.499937), look(i * 0.001);
  for (int k = -1000; k <= 1000; ++k)  // the borders between the quadrants
    for (const double d : {-1e-9, 0.0, 1e-9}) look(k * 0.78539816339744831 + d);
  MESSAGE("worst error " << worst);
  CHECK(worst < 1e-12);
  CHECK(sincos64(0.0).sin == 0.0);
  CHECK(sincos64(0.0).cos == 1.0);
}

TEST_CASE("simd: log64 against libm, error below 1e-14 relative to max(1, |log x|)") {
  double worst = 0;
  const auto look = [&](double x) {
    worst = std::max(worst, std::abs(log64(x) - std::log(x)) / std::max(1.0, std::abs(std::log(x))));
  };
  for (int e = -1021; e <= 1023; ++e)
    for (int i = 0; i < 16; ++i) look(std::ldexp(1.0 + i / 16.0, e));
  for (int i = 1; i <= 20000; ++i) look(i * 1e-4);
  look(std::numeric_limits<double>::min()), look(std::numeric_limits<double>::max());
  look(0.70710678118654746), look(0.70710678118654757), look(std::nextafter(1.0, 0.0));
  MESSAGE("worst error " << worst);
  CHECK(worst < 1e-14);
  CHECK(log64(1.0) == 0.0);
  CHECK(log64(2.0) == 0.69314718055994531);
  CHECK(log64(10000.0) == doctest::Approx(9.210340371976184).epsilon(1e-15));
}

TEST_CASE("simd: exp64 against libm, relative error below 1e-14 for |x| < 700") {
  double worst = 0;
  for (int i = -34999; i <= 34999; ++i) {
    const double x = i * 0.02, right = std::exp(x);
    worst = std::max(worst, std::abs(exp64(x) - right) / right);
  }
  MESSAGE("worst relative error " << worst);
  CHECK(worst < 1e-14);
  CHECK(exp64(0.0) == 1.0);
  CHECK(exp64(1.0) == doctest::Approx(2.718281828459045).epsilon(1e-15));
}

TEST_CASE("simd: halves and bfloat16 are widened to the floats that they are, all 65536 of them") {
  int wrong = 0;
  for (uint32_t first = 0; first < 65536; first += 16) {
    Half halves[16];
    Bf16 bfs[16];
    for (uint32_t i = 0; i < 16; ++i) halves[i].bits = bfs[i].bits = static_cast<uint16_t>(first + i);
    float h[16], b[16];
    store(h, load(halves)), store(b, load(bfs));
    for (int i = 0; i < 16; ++i)
      wrong += !same(h[i], half_to_float(halves[i].bits)) + !same(b[i], bf16_to_float(bfs[i].bits));
  }
  CHECK(wrong == 0);
}

TEST_CASE("simd: dot4 sums four products of an unsigned and a signed byte, exactly") {
  std::mt19937 random(9);
  int wrong = 0;
  for (int round = 0; round < 3000; ++round) {
    uint8_t w[64];
    int8_t x[64];
    int32_t before[16], after[16];
    for (int i = 0; i < 64; ++i) {
      const bool edge =
          round < 1000;  // 0, 1, 254, 255 with -128, -127, -1, 0, 1, 127 in all kinds of mixtures
      w[i] = static_cast<uint8_t>(edge ? std::array{0, 1, 254, 255}[random() % 4]
                                       : static_cast<int>(random() % 256));
      x[i] = static_cast<int8_t>(edge ? std::array{-128, -127, -1, 0, 1, 127}[random() % 6]
                                      : static_cast<int>(random() % 256) - 128);
    }
    for (int32_t& b : before) b = static_cast<int32_t>(random() % 2000000) - 1000000;
    const i32x16 sum = dot4(load_bytes(before), load_bytes(w), load_bytes(x));
    std::memcpy(after, &sum, sizeof after);
    float floats[16];
    store(floats, to_float(sum));
    for (int l = 0; l < 16; ++l) {
      int32_t right = before[l];
      for (int i = 4 * l; i < 4 * l + 4; ++i) right += w[i] * x[i];
      wrong += after[l] != right || floats[l] != static_cast<float>(right);
    }
  }
  CHECK(wrong == 0);
  int32_t four[16];
  const i32x16 same_four = splat_int(-77);
  std::memcpy(four, &same_four, sizeof four);
  for (const int32_t i : four) CHECK(i == -77);
}

TEST_CASE("simd: every instruction set gives these very bits") {
  // The golden values are those of the plain lanes; a machine whose bits differ breaks the promise.
  uint64_t vectors = 0xcbf29ce484222325ull, scalars = vectors;
  for (int i = -2000; i < 2000; i += 16) {
    float x[16], y[16];
    for (int l = 0; l < 16; ++l) x[l] = static_cast<float>(i + l) * 0.0437f;
    f32x16 v = exp(load(x));
    v = div(v, add(splat(1.0f), fma(load(x), load(x), v)));
    v = min(max(v, sub(splat(0.1f), load(x))), mul(load(x), splat(0.7f)));
    store(y, v);
    for (const float lane : y) vectors = mixed(vectors, bits(lane));
    vectors = mixed(vectors, bits(sum(v)));
  }
  for (int i = 1; i < 4000; ++i) {
    const SinCos a = sincos64(i * 3.7);
    for (const double d : {a.sin, a.cos, log64(i * 0.11), exp64(i * 0.17 - 340)})
      scalars = mixed(scalars, std::bit_cast<uint64_t>(d));
  }
  CHECK(vectors == 0x2c439c8f2a2c1d03ull);
  CHECK(scalars == 0xe5dd0077eb450edaull);
}
