// The kernels against plain loops: bit for bit where rule 1 fixes the chain of fused multiply-adds, and
// within a stated bound of double precision everywhere. CMake builds this file twice, the second time with
// SERVELITE_PLAIN.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <servelite/kernels.hpp>
#include <vector>

using namespace servelite;

namespace {

using Floats = std::vector<float>;

Floats random_floats(size_t n, unsigned seed, float size = 1.0f) {
  std::mt19937 random(seed);
  Floats x(n);
  for (float& v : x) v = size * (static_cast<float>(random()) * 0x1p-31f - 1.0f);
  return x;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

size_t z(int i) { return static_cast<size_t>(i); }

/// What matmul promises: one chain of fused multiply-adds per output, k ascending. y is [rows x y_stride].
void plain_matmul(Floats& y, int y_stride, const Floats& x, int x_stride, int rows, const Floats& w, int n_in,
                  int n_out, bool add) {
  for (int r = 0; r < rows; ++r)
    for (int o = 0; o < n_out; ++o) {
      float acc = add ? y[z(r * y_stride + o)] : 0.0f;
      for (int k = 0; k < n_in; ++k) acc = std::fma(x[z(r * x_stride + k)], w[z(o * n_in + k)], acc);
      y[z(r * y_stride + o)] = acc;
    }
}

Floats packed(const Floats& w, int n_out, int n_in) {
  Floats p(packed_size(n_out, n_in), -1.0f);
  pack_panels(p.data(), w.data(), n_out, n_in);
  return p;
}

/// True if matmul gives the plain chain's bits on 1, 2 and 3 threads (run one after the other: they share
/// nothing), with and without add, and leaves the space between the rows alone.
bool matmul_agrees(int rows, int n_in, int n_out, unsigned seed) {
  const int x_stride = n_in + 3, y_stride = n_out + 5;
  const Floats x = random_floats(z(rows * x_stride), seed), w = random_floats(z(n_out * n_in), seed + 1);
  const Floats before = random_floats(z(rows * y_stride), seed + 2), p = packed(w, n_out, n_in);
  bool agrees = true;
  for (const bool add : {false, true}) {
    Floats right = before;
    plain_matmul(right, y_stride, x, x_stride, rows, w, n_in, n_out, add);
    for (int threads = 1; threads <= 3; ++threads) {
      Floats y = before;
      for (int t = threads - 1; t >= 0; --t)
        matmul(y.data(), y_stride, x.data(), x_stride, rows, p.data(), n_in, n_out, t, threads, add);
      agrees = agrees && same_bits(y, right);
    }
  }
  return agrees;
}

}  // namespace

// ---- matmul -------------------------------------------------------------------------------------------

TEST_CASE("kernels: panels are laid out as the picture says, and filled up with zeros") {
  CHECK(panels_of(1) == 1);
  CHECK(panels_of(32) == 1);
  CHECK(panels_of(33) == 2);
  CHECK(packed_size(33, 2) == 128);
  Floats w(35 * 2);
  for (int o = 0; o < 35; ++o)
    w[z(2 * o)] = static_cast<float>(o + 1), w[z(2 * o + 1)] = static_cast<float>(100 + o);
  const Floats p = packed(w, 35, 2);
  for (int o = 0; o < 64; ++o) {
    const int at = o / 32 * 64 + o % 32;
    CHECK(p[z(at)] == (o < 35 ? static_cast<float>(o + 1) : 0.0f));         // k = 0
    CHECK(p[z(at + 32)] == (o < 35 ? static_cast<float>(100 + o) : 0.0f));  // k = 1
  }
}

TEST_CASE("kernels: a transposed matrix packs to the same panels, and threads pack panel by panel") {
  const int N = 70, K = 9;
  const Floats w = random_floats(z(N * K), 1);
  Floats turned(w.size()), p(packed_size(N, K), -1.0f);
  for (int o = 0; o < N; ++o)
    for (int k = 0; k < K; ++k) turned[z(k * N + o)] = w[z(o * K + k)];
  pack_panels(p.data(), turned.data(), N, K, 1, N, 2, 3);
  CHECK(p[0] == -1.0f);  // panels 0 and 1 are another thread's
  CHECK(p[z(2 * 32 * K - 1)] == -1.0f);
  pack_panels(p.data(), turned.data(), N, K, 1, N, 0, 2);
  CHECK(same_bits(p, packed(w, N, K)));
}

TEST_CASE("kernels: matmul by hand") {
  // [1 2 3; 4 5 6] * [1 0 -1; 2 1 0]^T = [-2 4; -2 13]
  const Floats x = {1, 2, 3, 4, 5, 6}, p = packed({1, 0, -1, 2, 1, 0}, 2, 3);
  Floats y = {100, 100, 100, 100};
  matmul(y.data(), 2, x.data(), 3, 2, p.data(), 3, 2);
  CHECK(y == Floats{-2, 4, -2, 13});
  matmul(y.data(), 2, x.data(), 3, 2, p.data(), 3, 2, 0, 1, true);
  CHECK(y == Floats{-4, 8, -4, 26});
}

TEST_CASE("kernels: matmul is the plain chain, bit for bit: all rows 1..40") {
  for (int rows = 1; rows <= 40; ++rows) {
    CAPTURE(rows);
    CHECK(matmul_agrees(rows, 7, 130, 10));
    CHECK(matmul_agrees(rows, 33, 45, 20));
  }
}

TEST_CASE("kernels: matmul is the plain chain, bit for bit: all K 1..70 and all N 1..130") {
  for (int k = 1; k <= 70; ++k) {
    CAPTURE(k);
    CHECK(matmul_agrees(1, k, 67, 30));
    CHECK(matmul_agrees(5, k, 33, 40));
  }
  for (int n = 1; n <= 130; ++n) {
    CAPTURE(n);
    for (const int rows : {1, 2, 3, 6, 7, 13}) CHECK(matmul_agrees(rows, 5, n, 50));
  }
}

TEST_CASE("kernels: matmul is the plain chain, bit for bit: random shapes, and rows enough to be sliced") {
  std::mt19937 random(5);
  const auto up_to = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)) + 1; };
  for (int round = 0; round < 40; ++round) {
    const int rows = up_to(40), k = up_to(70), n = up_to(130);
    CAPTURE(rows);
    CAPTURE(k);
    CAPTURE(n);
    CHECK(matmul_agrees(rows, k, n, static_cast<unsigned>(round)));
  }
  for (const int rows : {2 * kTileRows - 1, 2 * kTileRows, 4 * kTileRows + 1, 6 * kTileRows, 101})
    CHECK(matmul_agrees(rows, 4, 70, 60));
}

TEST_CASE("kernels: a row of a batch has the bits of the row alone") {
  const int K = 50, N = 100, rows = 23;
  const Floats x = random_floats(z(rows * K), 7), p = packed(random_floats(z(N * K), 8), N, K);
  Floats all(z(rows * N)), alone(z(N));
  matmul(all.data(), N, x.data(), K, rows, p.data(), K, N);
  for (int r = 0; r < rows; ++r) {
    matmul(alone.data(), N, x.data() + r * K, K, 1, p.data(), K, N);
    CHECK(std::memcmp(alone.data(), all.data() + r * N, sizeof(float) * z(N)) == 0);
  }
}

TEST_CASE("kernels: matmul is close to double precision") {
  const int K = 64, N = 40, rows = 3;
  const Floats x = random_floats(z(rows * K), 9), w = random_floats(z(N * K), 10), p = packed(w, N, K);
  Floats y(z(rows * N));
  matmul(y.data(), N, x.data(), K, rows, p.data(), K, N);
  double worst = 0;
  for (int r = 0; r < rows; ++r)
    for (int o = 0; o < N; ++o) {
      double right = 0;
      for (int k = 0; k < K; ++k) right += double{x[z(r * K + k)]} * double{w[z(o * K + k)]};
      worst = std::max(worst, std::abs(double{y[z(r * N + o)]} - right));
    }
  CHECK(worst < 64 * 64 * 0x1p-25);  // K roundings of sums below K, half an ulp each: far above what is seen
  CHECK(worst < 1e-5);
}

// ---- matmul of other types ------------------------------------------------------------------------------

namespace {

/// True if matmul over 16-bit weights has the bits of matmul over the floats that they stand for.
template <class Weight>
bool widened_agrees(float (*value)(uint16_t), int rows, int n_in, int n_out, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Weight> p(packed_size(n_out, n_in));
  Floats as_floats;
  for (Weight& w : p) {
    do w.bits = static_cast<uint16_t>(random());
    while (!(std::abs(value(w.bits)) < 100.0f));
    as_floats.push_back(value(w.bits));
  }
  const Floats x = random_floats(z(rows * n_in), seed + 1);
  Floats right(z(rows * n_out)), y = right;
  matmul(right.data(), n_out, x.data(), n_in, rows, as_floats.data(), n_in, n_out);
  for (int t = 0; t < 2; ++t) matmul(y.data(), n_out, x.data(), n_in, rows, p.data(), n_in, n_out, t, 2);
  return same_bits(y, right);
}

/// A Q8_0 matrix as its numbers: q [N x K], d [N x K/32]; and packed as kernels.hpp draws it.
struct Q8Matrix {
  std::vector<int> q;
  std::vector<uint16_t> d;
  std::vector<std::byte> packed;
};

Q8Matrix random_q8(int n_out, int n_in, unsigned seed) {
  std::mt19937 random(seed);
  Q8Matrix m;
  const int blocks = n_in / 32;
  for (int i = 0; i < n_out * n_in; ++i) m.q.push_back(static_cast<int>(random() % 256) - 128);
  for (int i = 0; i < n_out * blocks; ++i) m.d.push_back(static_cast<uint16_t>(0x1c00 + random() % 0x800));
  m.packed.resize(z(panels_of(n_out) * blocks) * 1088);
  for (int o = 0; o < n_out; ++o)
    for (int b = 0; b < blocks; ++b) {
      std::byte* block = m.packed.data() + (o / 32 * blocks + b) * 1088;
      std::memcpy(block + o % 32 * 2, &m.d[z(o * blocks + b)], 2);
      for (int k = 0; k < 32; ++k)
        block[64 + k / 4 * 128 + o % 32 * 4 + k % 4] =
            static_cast<std::byte>(m.q[z(o * n_in + b * 32 + k)] + 128);
    }
  return m;
}

/// What the comment over matmul_q8 promises, as plain loops.
Floats plain_q8(const Floats& x, int rows, const Q8Matrix& m, int n_in, int n_out) {
  const int blocks = n_in / 32;
  Floats y;
  for (int r = 0; r < rows; ++r)
    for (int o = 0; o < n_out; ++o) {
      float acc = 0.0f;
      for (int b = 0; b < blocks; ++b) {
        const float* from = x.data() + r * n_in + b * 32;
        float top = 0.0f;
        for (int k = 0; k < 32; ++k) top = std::max(top, std::abs(from[k]));
        const float inverse = top > 0 ? 127.0f / top : 0.0f;
        int dot = 0;
        for (int k = 0; k < 32; ++k)  // rounded once: in double precision the product is exact
          dot += m.q[z(o * n_in + b * 32 + k)] *
                 static_cast<int>(std::nearbyint(double{from[k]} * double{inverse}));
        acc = std::fma(static_cast<float>(dot), half_to_float(m.d[z(o * blocks + b)]) * (top / 127.0f), acc);
      }
      y.push_back(acc);
    }
  return y;
}

}  // namespace

TEST_CASE(
    "kernels: matmul over F16 and BF16 weights has the bits of matmul over the same numbers as floats") {
  unsigned seed = 50;
  for (const int rows : {1, 2, 3, 5, 6, 7, 12, 13, 25, 50})
    for (const int n_out : {1, 31, 32, 33, 64, 100, 130, 200}) {
      CAPTURE(rows);
      CAPTURE(n_out);
      CHECK(widened_agrees<Half>(half_to_float, rows, 37, n_out, seed++));
      CHECK(widened_agrees<Bf16>(bf16_to_float, rows, 37, n_out, seed++));
    }
}

TEST_CASE(
    "kernels: matmul in 8 bits is the plain loop, bit for bit, on any threads, and touches nothing else") {
  unsigned seed = 70;
  for (const int rows : {1, 2, 3, 4, 6, 7, 12, 13, 50})
    for (const int n_out : {1, 31, 32, 33, 64, 65, 96, 130, 200})
      for (const int n_in : {32, 96}) {
        CAPTURE(rows);
        CAPTURE(n_out);
        CAPTURE(n_in);
        Floats x = random_floats(z(rows * n_in), seed++);
        std::fill_n(x.begin(), 32, 0.0f);  // a block of nothing
        const Q8Matrix m = random_q8(n_out, n_in, seed++);
        const Floats right = plain_q8(x, rows, m, n_in, n_out);
        Q8Rows q;
        q.make_room(rows, n_in);
        for (int r = 0; r < rows; ++r) quantize_row(q, r, x.data() + r * n_in, n_in);
        for (int threads = 1; threads <= 3; ++threads) {
          const int stride = n_out + 3;
          Floats y(z(rows * stride), 7.0f), expected = y;
          for (int r = 0; r < rows; ++r)
            std::copy_n(right.begin() + r * n_out, n_out, expected.begin() + r * stride);
          for (int t = 0; t < threads; ++t)
            matmul_q8(y.data(), stride, q, rows, m.packed.data(), n_in, n_out, t, threads);
          CHECK(same_bits(y, expected));
        }
      }
}

TEST_CASE("kernels: a row in 8 bits by hand") {
  Floats x(32, 0.0f);
  x[0] = -2.54f, x[1] = 1.27f, x[2] = 0.02f, x[3] = 0.0099f, x[4] = 0.0101f, x[31] = 2.54f;  // a unit is 0.02
  Q8Rows q;
  q.make_room(2, 32);
  quantize_row(q, 1, x.data(), 32);
  const int8_t* row = q.q.data() + 32;
  CHECK(int{row[0]} == -127);
  CHECK((row[1] == 63 || row[1] == 64));  // 63.5, or a bit's breadth beside it
  CHECK(int{row[2]} == 1);
  CHECK(int{row[3]} == 0);
  CHECK(int{row[4]} == 1);
  CHECK(int{row[31]} == 127);
  CHECK(q.scale[1] == 2.54f / 127.0f);
  CHECK(q.start[1] == -128 * (row[1] + 2));
}

TEST_CASE("kernels: the queries of a tile have the bits each has alone, whatever blocks hold the positions") {
  for (const int E : {16, 32, 64, 128})
    for (const int P : {4, 16, 64})
      for (const int count : {1, 2, 3, 4, 5, 8, 11}) {
        CAPTURE(E);
        CAPTURE(P);
        CAPTURE(count);
        const int tokens = 150, blocks = (tokens + P - 1) / P;
        const KvShape s{1, E, P};
        Floats kv(z(blocks) * 2 * s.half(), std::numeric_limits<float>::quiet_NaN());
        std::vector<int> table(z(blocks));
        std::iota(table.rbegin(), table.rend(), 0);
        const Floats q = random_floats(z(count * E), 91, 0.5f), k = random_floats(z(tokens * E), 92, 2.0f),
                     v = random_floats(z(tokens * E), 93);
        for (int p = 0; p < tokens; ++p)
          write_kv(kv.data() + z(table[z(p / P)]) * 2 * s.half(), k.data() + p * E, v.data() + p * E, p % P,
                   s);
        Floats together(z(count * E)), alone = together, scratch(z(count * 192));
        std::vector<Query> tile;
        for (int i = 0; i < count; ++i) {
          const int n =
              std::min(tokens, 1 + i * (count > 5 ? 14 : 33) + i / 2);  // over several chunks of positions
          tile.push_back({q.data() + i * E, together.data() + i * E, n});
          Query one{q.data() + i * E, alone.data() + i * E, n};
          paged_attention(&one, 1, 0, kv.data(), table.data(), s, scratch.data());
        }
        paged_attention(tile.data(), count, 0, kv.data(), table.data(), s, scratch.data());
        CHECK(same_bits(together, alone));
      }
}

// ---- row kernels ----------------------------------------------------------------------------------------

TEST_CASE("kernels: rmsnorm by hand and against double precision") {
  Floats x(16, 0.0f), weight(16, 1.0f), y(16);
  x[3] = 8.0f, weight[3] = 0.5f;  // mean of squares 4, factor 1/2
  CHECK(rmsnorm(y.data(), x.data(), weight.data(), 16, 0.0f) == 0.5f);
  for (size_t i = 0; i < 16; ++i) CHECK(y[i] == (i == 3 ? 2.0f : 0.0f));

  for (const int d : {16, 48, 256}) {
    const Floats in = random_floats(z(d), 11, 3.0f), by = random_floats(z(d), 12);
    Floats out(z(d));
    const double scale = double{rmsnorm(out.data(), in.data(), by.data(), d, 1e-2f)};
    double squares = 0;
    for (const float v : in) squares += double{v} * double{v};
    const double right = 1 / std::sqrt(squares / d + double{1e-2f});
    CHECK(scale == doctest::Approx(right).epsilon(1e-6));
    for (size_t i = 0; i < out.size(); ++i)
      CHECK(std::abs(double{out[i]} - double{in[i]} * right * double{by[i]}) < 3e-6);
    Floats in_place = in;
    rmsnorm(in_place.data(), in_place.data(), by.data(), d, 1e-2f);
    CHECK(same_bits(in_place, out));
  }
  std::fill(x.begin(), x.end(), 0.0f);
  CHECK(rmsnorm(y.data(), x.data(), weight.data(), 16, 0.25f) == 2.0f);  // only eps is left: no division by 0
  CHECK(y == x);
}

TEST_CASE("kernels: rope at positions 0, 1, 7 and 50 against libm, and back again") {
  for (const double base : {10000.0, 1000000.0})
    for (const int E : {16, 64}) {
      const Floats table = rope_table(51, E, base);
      REQUIRE(table.size() == z(51 * E));
      const Floats head = random_floats(z(E), 13);
      for (const int position : {0, 1, 7, 50}) {
        CAPTURE(position);
        Floats turned = head;
        rope(turned.data(), table.data() + position * E, E);
        double worst = 0;
        for (int i = 0; i < E / 2; ++i) {
          const double angle = position * std::pow(base, -2.0 * i / E);
          const double a = double{head[z(2 * i)]}, b = double{head[z(2 * i + 1)]};
          worst = std::max(worst,
                           std::abs(double{turned[z(2 * i)]} - (a * std::cos(angle) - b * std::sin(angle))));
          worst = std::max(
              worst, std::abs(double{turned[z(2 * i + 1)]} - (a * std::sin(angle) + b * std::cos(angle))));
        }
        CHECK(worst < 3e-7);
        CHECK(same_bits(turned, head) == (position == 0));  // position 0 does not rotate
        rope(turned.data(), table.data() + position * E, E, -1.0f);
        for (size_t i = 0; i < head.size(); ++i) CHECK(std::abs(turned[i] - head[i]) < 5e-7f);
      }
    }
}

TEST_CASE("kernels: the rope table by hand: neighbours are a pair, the first pair turns fastest") {
  // E = 4, base 10000: frequencies 1 and 1/100.
  const Floats table = rope_table(3, 4, 10000.0);
  CHECK(table[8] == static_cast<float>(std::cos(2.0)));
  CHECK(table[9] == static_cast<float>(std::sin(2.0)));
  CHECK(table[10] == doctest::Approx(std::cos(0.02)).epsilon(1e-7));
  CHECK(table[11] == doctest::Approx(std::sin(0.02)).epsilon(1e-7));
  Floats head = {1, 0, 0, 1};
  rope(head.data(), table.data() + 8, 4);
  CHECK(head == Floats{table[8], table[9], -table[11], table[10]});
}

TEST_CASE("kernels: swiglu against double precision, and where e^-x leaves the floats") {
  Floats gate = random_floats(160, 14, 20.0f);
  const Floats x = gate, up = random_floats(160, 15);
  swiglu(gate.data(), up.data(), 160);
  for (size_t i = 0; i < gate.size(); ++i) {
    const double right = double{x[i]} / (1 + std::exp(-double{x[i]})) * double{up[i]};
    CHECK(std::abs(double{gate[i]} - right) <= 1e-6 * std::abs(right) + 1e-12);
  }
  Floats edge(16, 0.0f);
  edge[1] = 1000.0f, edge[2] = -1000.0f, edge[3] = 88.0f, edge[4] = -88.0f;
  const Floats ones(16, 1.0f);
  swiglu(edge.data(), ones.data(), 16);
  CHECK(edge[0] == 0.0f);
  CHECK(edge[1] == 1000.0f);
  CHECK(std::abs(edge[2]) < 1e-30f);
  CHECK(edge[3] == 88.0f);
  CHECK(std::abs(edge[4]) < 1e-30f);
}

TEST_CASE("kernels: add_rows") {
  Floats x(48);
  std::iota(x.begin(), x.end(), 0.0f);
  const Floats y(48, 0.5f);
  add_rows(x.data(), y.data(), 32);
  for (size_t i = 0; i < 48; ++i) CHECK(x[i] == static_cast<float>(i) + (i < 32 ? 0.5f : 0.0f));
}

TEST_CASE("kernels: softmax numerators: exp(s - max), sum in a fixed order, stale fill-up lanes ignored") {
  for (const int n : {1, 2, 15, 16, 17, 31, 32, 33, 100}) {
    CAPTURE(n);
    const Floats s = random_floats(z(n), 16, 8.0f);
    const float highest = *std::max_element(s.begin(), s.end());
    Floats row((z(n) + 15) / 16 * 16, std::numeric_limits<float>::quiet_NaN());
    Floats again(row.size(), 1e30f);
    std::copy(s.begin(), s.end(), row.begin());
    std::copy(s.begin(), s.end(), again.begin());
    const float total = softmax_numerators(row.data(), n);

    float lane[16] = {};
    double right = 0;
    for (int i = 0; i < n; ++i) {
      CHECK(row[z(i)] == exp1(s[z(i)] - highest));
      lane[i % 16] += row[z(i)];
      right += std::exp(double{s[z(i)]} - double{highest});
    }
    CHECK(total == sum(load(lane)));
    CHECK(double{total} == doctest::Approx(right).epsilon(1e-6));
    for (size_t i = z(n); i < row.size(); ++i) CHECK(row[i] == 0.0f);
    CHECK(softmax_numerators(again.data(), n) == total);
    CHECK(same_bits(again, row));
  }
  Floats wide(16);  // scores a thousand apart: finite, and the highest counts 1
  wide[0] = -500.0f, wide[1] = 500.0f;
  CHECK(softmax_numerators(wide.data(), 2) == 1.0f);
  CHECK(wide[1] == 1.0f);
  Floats low(16, -1e30f);
  CHECK(softmax_numerators(low.data(), 5) == 5.0f);
}

// ---- paged attention
// ----------------------------------------------------------------------------------------

TEST_CASE("kernels: write_kv puts each number where the picture says, and nothing elsewhere") {
  const KvShape s{2, 3, 4};  // G, E, P
  CHECK(s.half() == 24);
  Floats block(48, -1.0f);
  const Floats k = {1, 2, 3, 4, 5, 6}, v = {10, 20, 30, 40, 50, 60};
  write_kv(block.data(), k.data(), v.data(), 2, s);
  Floats right(48, -1.0f);
  right[2] = 1, right[6] = 2, right[10] = 3;       // K[g=0][e][2]
  right[14] = 4, right[18] = 5, right[22] = 6;     // K[g=1][e][2]
  right[30] = 10, right[31] = 20, right[32] = 30;  // V[g=0][2][e]
  right[42] = 40, right[43] = 50, right[44] = 60;  // V[g=1][2][e]
  CHECK(block == right);
}

TEST_CASE("kernels: copy_kv copies the first slots of all heads and leaves the others alone") {
  const KvShape s{2, 3, 4};
  Floats from(48), k(6), v(6);
  for (int slot = 0; slot < 4; ++slot) {
    std::iota(k.begin(), k.end(), static_cast<float>(100 * slot + 1));
    std::iota(v.begin(), v.end(), static_cast<float>(100 * slot + 51));
    write_kv(from.data(), k.data(), v.data(), slot, s);
  }
  for (int tokens = 0; tokens <= 4; ++tokens) {
    Floats to(48, -1.0f), right(48, -1.0f);
    copy_kv(to.data(), from.data(), tokens, s);
    for (int slot = 0; slot < tokens; ++slot) {
      std::iota(k.begin(), k.end(), static_cast<float>(100 * slot + 1));
      std::iota(v.begin(), v.end(), static_cast<float>(100 * slot + 51));
      write_kv(right.data(), k.data(), v.data(), slot, s);
    }
    CHECK(to == right);
  }
}

namespace {

struct Scene {
  int heads, kv_heads, head_width, tokens;  // query heads per KV head, G, E, n
  Floats q, k, v;                           // [G x heads x E], [n x G x E] twice
};

Scene make_scene(int heads, int kv_heads, int head_width, int tokens, float size) {
  return {heads,
          kv_heads,
          head_width,
          tokens,
          random_floats(z(kv_heads * heads * head_width), 21, size),
          random_floats(z(tokens * kv_heads * head_width), 22, 2.0f),
          random_floats(z(tokens * kv_heads * head_width), 23)};
}

/// The scene's answer [G x heads x E] with blocks of this size in shuffled order, the unused memory NaN.
Floats run_paged(const Scene& a, int block_size, unsigned seed) {
  const KvShape s{a.kv_heads, a.head_width, block_size};
  const int used = (a.tokens + block_size - 1) / block_size, blocks = used + 3;
  std::vector<int> table(z(blocks));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(seed));
  table.resize(z(used));
  Floats kv(z(blocks) * 2 * s.half(), std::numeric_limits<float>::quiet_NaN());
  const int row = a.kv_heads * a.head_width;
  for (int p = 0; p < a.tokens; ++p)
    write_kv(kv.data() + z(table[z(p / block_size)]) * 2 * s.half(), a.k.data() + p * row,
             a.v.data() + p * row, p % block_size, s);
  Floats out(a.q.size()), scratch(z(a.heads * ((a.tokens + 63) / 64 * 64)));
  for (int g = 0; g < a.kv_heads; ++g) {
    std::vector<Query> queries;
    for (int h = g * a.heads; h < (g + 1) * a.heads; ++h)
      queries.push_back({a.q.data() + h * a.head_width, out.data() + h * a.head_width, a.tokens});
    paged_attention(queries.data(), a.heads, g, kv.data(), table.data(), s, scratch.data());
  }
  return out;
}

/// The largest distance to softmax(q k) v in double precision.
double distance_to_reference(const Scene& a, const Floats& out) {
  double worst = 0;
  const int E = a.head_width;
  for (int g = 0; g < a.kv_heads; ++g)
    for (int h = 0; h < a.heads; ++h) {
      const float* q = a.q.data() + (g * a.heads + h) * E;
      std::vector<double> weight(z(a.tokens)), value(z(E));
      double highest = -1e300, total = 0;
      for (int p = 0; p < a.tokens; ++p) {
        for (int e = 0; e < E; ++e)
          weight[z(p)] += double{q[e]} * double{a.k[z((p * a.kv_heads + g) * E + e)]};
        highest = std::max(highest, weight[z(p)]);
      }
      for (double& w : weight) total += w = std::exp(w - highest);
      for (int p = 0; p < a.tokens; ++p)
        for (int e = 0; e < E; ++e)
          value[z(e)] += weight[z(p)] / total * double{a.v[z((p * a.kv_heads + g) * E + e)]};
      for (int e = 0; e < E; ++e)
        worst = std::max(worst, std::abs(value[z(e)] - double{out[z((g * a.heads + h) * E + e)]}));
    }
  return worst;
}

}  // namespace

TEST_CASE("kernels: paged attention by hand: equal keys average the values, one strong key picks its own") {
  Scene a = make_scene(1, 1, 16, 4, 1.0f);
  std::fill(a.k.begin(), a.k.end(), 0.0f);
  for (int p = 0; p < 4; ++p)
    for (int e = 0; e < 16; ++e) a.v[z(p * 16 + e)] = static_cast<float>(p * e);
  Floats out = run_paged(a, 4, 1);
  for (int e = 0; e < 16; ++e) CHECK(out[z(e)] == 1.5f * static_cast<float>(e));  // (0 + 1 + 2 + 3) / 4
  a.q.assign(16, 0.0f), a.q[5] = 10.0f, a.k[2 * 16 + 5] = 20.0f;                  // score 200 against 0
  out = run_paged(a, 1, 2);
  for (int e = 0; e < 16; ++e) CHECK(out[z(e)] == 2.0f * static_cast<float>(e));
}

TEST_CASE("kernels: paged attention is near double precision and has the same bits for all block sizes") {
  for (const int E : {16, 32, 48})
    for (const int heads : {1, 2, 3})
      for (const int n : {1, 2, 15, 16, 17, 63, 64, 65, 130}) {
        CAPTURE(E);
        CAPTURE(heads);
        CAPTURE(n);
        const Scene a = make_scene(heads, 2, E, n, 0.5f);
        const Floats out = run_paged(a, 1, 1);
        CHECK(distance_to_reference(a, out) < 5e-6);
        unsigned seed = 2;
        for (const int block_size : {3, 4, 16, 32, 64, 160}) {
          CAPTURE(block_size);
          CHECK(same_bits(run_paged(a, block_size, seed++), out));
        }
      }
}

TEST_CASE("kernels: a query head has the same bits whichever heads it is computed with") {
  const Scene three = make_scene(3, 1, 32, 70, 0.5f);
  const Floats out = run_paged(three, 16, 1);
  for (int h = 0; h < 3; ++h) {
    Scene one = three;
    one.heads = 1;
    one.q.assign(three.q.begin() + h * 32, three.q.begin() + (h + 1) * 32);
    CHECK(same_bits(run_paged(one, 4, 2), Floats(out.begin() + h * 32, out.begin() + (h + 1) * 32)));
  }
}

TEST_CASE("kernels: every instruction set gives these very bits") {
  // Golden: FNV-1a over the outputs, as computed on the plain lanes.
  uint64_t hash = 0xcbf29ce484222325ull;
  const auto take = [&](const Floats& x) {
    for (const float f : x) {
      uint32_t bits;
      std::memcpy(&bits, &f, 4);
      hash = (hash ^ bits) * 0x100000001b3ull;
    }
  };
  const int K = 48, N = 80, rows = 9;
  const Floats p = packed(random_floats(z(N * K), 32), N, K), ones(z(N), 1.0f);
  Floats x = random_floats(z(rows * K), 31), y(z(rows * N));
  matmul(y.data(), N, x.data(), K, rows, p.data(), K, N);
  take(y);
  rmsnorm(y.data(), y.data(), random_floats(z(N), 33).data(), N, 1e-5f);
  swiglu(y.data(), ones.data(), N);
  take(y);
  const Floats table = rope_table(60, K, 10000.0);
  rope(x.data(), table.data() + 59 * K, K);
  take(table), take(x);
  take(run_paged(make_scene(3, 2, 32, 100, 0.5f), 16, 1));
  CHECK(hash == 0x1b412fc86421c9dbull);
}
