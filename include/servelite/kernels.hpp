// kernels.hpp: the arithmetic of a Llama, on the CPU.
//
// Rule 1 of the design: lanes run along outputs, never along a reduction. Each output is one chain of
// fused multiply-adds over its reduction index in ascending order. So a result depends on its own
// inputs only: not on the batch it is computed in, not on the thread, not on the vector width.
// Where a reduction has to use lanes (rmsnorm, softmax) it is sixteen lanes and the fixed tree sum().
//
// Letters: T rows of the step, K inputs, N outputs, H query heads, G KV heads, E head width, P block size.
// Each kernel takes (thread, threads) where it can be shared: it does its own part and returns; the
// caller puts barriers between kernels, so that one parallel region serves a whole forward pass.
//
// Chapter: docs/02_prefill_and_decode.md. Plain versions of all of this: tests/reference.hpp.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "simd.hpp"

namespace servelite {

// ---- matmul -------------------------------------------------------------------------------------
//
// y[T x N] = x[T x K] * W^T, W[N x K] as in the file (one row per output). W is packed once, at load:
//
//   panel 0: outputs 0..31      k=0: w[0][0] w[1][0] .. w[31][0]
//                               k=1: w[0][1] w[1][1] .. w[31][1]
//                               ...
//   panel 1: outputs 32..63     ...           (the last panel is filled up with zeros)
//
// so that one row (decode) and many rows (prefill) both stream the weights in order.

inline constexpr int kPanel = 32;
inline int panels_of(int n_out) { return (n_out + kPanel - 1) / kPanel; }
inline size_t packed_size(int n_out, int n_in) {
  return static_cast<size_t>(panels_of(n_out)) * kPanel * static_cast<size_t>(n_in);
}

/// Packs W into panels; W's element (o, k) is w[o * out_stride + k * in_stride], so that a transposed
/// matrix packs as well as a plain one (out_stride = K, in_stride = 1). packed: packed_size(N, K) floats.
/// Packs panels [first, last) only, so that threads can share the work.
inline void pack_panels(float* packed, const float* w, int n_out, int n_in, ptrdiff_t out_stride,
                        ptrdiff_t in_stride, int first, int last) {
  for (int p = first; p < last; ++p) {
    float* panel = packed + static_cast<ptrdiff_t>(p) * kPanel * n_in;
    const int outs = std::min(kPanel, n_out - p * kPanel);
    for (int k = 0; k < n_in; ++k)
      for (int o = 0; o < kPanel; ++o)
        panel[k * kPanel + o] =
            o < outs ? w[(static_cast<ptrdiff_t>(p) * kPanel + o) * out_stride + k * in_stride] : 0.0f;
  }
}
inline void pack_panels(float* packed, const float* w, int n_out, int n_in) {
  pack_panels(packed, w, n_out, n_in, n_in, 1, 0, panels_of(n_out));
}

// What one tile computes, in plain words:
//   for r in rows, for o in outputs:  acc = add ? y[r][o] : 0
//                                     for k ascending:  acc = fma(x[r][k], w[o][k], acc)
// R rows times Q panels are kept in registers: R * Q * 2 chains run side by side and hide the latency
// of each. R and Q are chosen by the number of registers, and change no bit.
// Weights are prefetched kAhead steps ahead, so that memory is busy while the tile computes: 6 to 8 % more
// tokens/s at a batch of 32 of the 110m preset; one row, which only reads, gains nothing.
inline constexpr int kAhead = 128;

template <int R, int Q, class Weight>
inline void matmul_tile(float* y, ptrdiff_t y_stride, const float* x, ptrdiff_t x_stride, const Weight* panel,
                        int n_in, int n_out_left, bool add) {
  if (n_out_left < Q * kPanel) {  // the last panel is wider than y: compute into a full one, keep what fits
    alignas(64) float full[R * Q * kPanel] = {};
    for (int r = 0; add && r < R; ++r) std::copy_n(y + r * y_stride, n_out_left, full + r * Q * kPanel);
    matmul_tile<R, Q>(full, Q * kPanel, x, x_stride, panel, n_in, Q * kPanel, add);
    for (int r = 0; r < R; ++r) std::copy_n(full + r * Q * kPanel, n_out_left, y + r * y_stride);
    return;
  }
  f32x16 acc[R][Q * 2];
  for (int r = 0; r < R; ++r)
    for (int q = 0; q < Q * 2; ++q) acc[r][q] = add ? load(y + r * y_stride + q * 16) : splat(0.0f);
  for (int k = 0; k < n_in; ++k) {
    f32x16 w[Q * 2];
    for (int q = 0; q < Q * 2; ++q) {
      const Weight* from = panel + (static_cast<ptrdiff_t>(q / 2) * n_in + k) * kPanel + q % 2 * 16;
      __builtin_prefetch(from + kAhead * kPanel);
      w[q] = keep(load(from));
    }
    for (int r = 0; r < R; ++r) {
      const f32x16 xr = splat(x[r * x_stride + k]);
      for (int q = 0; q < Q * 2; ++q) acc[r][q] = fma(xr, w[q], acc[r][q]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int q = 0; q < Q * 2; ++q) store(y + r * y_stride + q * 16, acc[r][q]);
}

// Registers hold R * Q * 2 chains, 2 Q weights and one x: AVX-512 has 32 of them, AVX2 and NEON fewer.
inline constexpr bool kManyRegisters = lanes::kCount == 16;
inline constexpr int kTileRows = kManyRegisters ? 12 : 3;
constexpr int panels_for(int rows) {
  return kManyRegisters ? (rows <= 2 ? 4 : rows <= 6 ? 2 : 1) : (rows == 1 ? 2 : 1);
}

/// `rows` <= R rows of Q panels: finds the tile of exactly this many rows.
template <int R, int Q, class Weight>
inline void matmul_up_to(int rows, float* y, ptrdiff_t y_stride, const float* x, ptrdiff_t x_stride,
                         const Weight* panel, int n_in, int n_out_left, bool add) {
  if (rows == R) return matmul_tile<R, Q>(y, y_stride, x, x_stride, panel, n_in, n_out_left, add);
  if constexpr (R > 1) matmul_up_to<R - 1, Q>(rows, y, y_stride, x, x_stride, panel, n_in, n_out_left, add);
}

/// All rows of a group of Q panels.
template <int Q, class Weight>
inline void matmul_group(float* y, ptrdiff_t y_stride, const float* x, ptrdiff_t x_stride, int rows,
                         const Weight* panel, int n_in, int n_out_left, bool add) {
  constexpr int most = Q == 4 ? 2 : Q == 2 ? (kManyRegisters ? 6 : 1) : kTileRows;
  const int tiles = (rows + most - 1) / most;  // 32 rows: 10, 11 and 11
  for (int i = 0; i < tiles; ++i) {
    const int r = rows * i / tiles, next = rows * (i + 1) / tiles;
    matmul_up_to<most, Q>(next - r, y + r * y_stride, y_stride, x + r * x_stride, x_stride, panel, n_in,
                          n_out_left, add);
  }
}

/// Shares out the matmul of `rows` rows and N outputs: calls part(first panel, panels, first row, rows) for
/// this thread's pieces. Few rows: several panels at once, or the few chains would wait for each other; each
/// thread has a run of neighbouring panels, which it reads in order. Many rows: one panel at a time stays in
/// the cache while a thread's share of the rows passes.
template <class Part>
inline void each_piece(int rows, int n_out, int thread, int threads, Part&& part) {
  const int panels = panels_of(n_out), group = panels_for(rows), groups = (panels + group - 1) / group;
  const bool by_rows = rows >= 2 * kTileRows * threads;
  const auto share = [&](int of, int t) { return static_cast<int>(int64_t{of} * t / threads); };
  const int first = by_rows ? 0 : share(groups, thread) * group, r0 = by_rows ? share(rows, thread) : 0;
  const int last = by_rows ? panels : std::min(share(groups, thread + 1) * group, panels);
  const int r1 = by_rows ? share(rows, thread + 1) : rows;
  for (int p = first; p < last;) {
    const int together = last - p >= group ? group : 1;
    part(p, together, r0, r1 - r0);
    p += together;
  }
}

/// y[rows x N] (+)= x[rows x K] * W^T with W packed; this thread's share of the panels.
/// Strides in numbers between rows. add: y's old value starts the chain instead of 0.
/// Weight: float, or Half or Bf16, which are widened as they are read.
template <class Weight>
inline void matmul(float* y, ptrdiff_t y_stride, const float* x, ptrdiff_t x_stride, int rows,
                   const Weight* packed, int n_in, int n_out, int thread = 0, int threads = 1,
                   bool add = false) {
  each_piece(rows, n_out, thread, threads, [&](int p, int panels, int r0, int count) {
    const Weight* panel = packed + static_cast<ptrdiff_t>(p) * kPanel * n_in;
    float* to = y + r0 * y_stride + p * kPanel;
    const float* from = x + r0 * x_stride;
    const int left = n_out - p * kPanel;
    if (panels == 4) matmul_group<4>(to, y_stride, from, x_stride, count, panel, n_in, left, add);
    if (panels == 2) matmul_group<2>(to, y_stride, from, x_stride, count, panel, n_in, left, add);
    if (panels == 1) matmul_group<1>(to, y_stride, from, x_stride, count, panel, n_in, left, add);
  });
}

// ---- matmul in 8 bits -------------------------------------------------------------------------------
//
// Q8_0: 32 weights of a row share one scale: w = d * q, q -128..127. Activations are brought into the same
// form, x = dx * qx, and then per 32 inputs the sum of products is one of integers, which is exact:
//
//   y[o] = sum over blocks b:  (d[o][b] * dx[b]) * (sum over 32: q[o][k] * qx[k])      one fma chain over b
//
// The bytes of a panel, block of inputs by block of inputs; q + 128 as unsigned bytes, since the processors'
// instruction multiplies unsigned by signed ones; the extra 128 * sum of qx is taken off where a sum starts:
//
//   b=0: d[0] .. d[31] (Half) | k=0..3: q[0][0..3] .. q[31][0..3] | k=4..7: ... | .. | k=28..31: ...
//   b=1: ...

inline constexpr int kQ8Inputs = 32;
inline constexpr int kQ8Block = kPanel * (2 + kQ8Inputs);  // bytes

/// Rows of activations in 8 bits.
struct Q8Rows {
  std::vector<int8_t> q;       // [rows x K]
  std::vector<float> scale;    // [rows x K/32]
  std::vector<int32_t> start;  // [rows x K/32]: -128 * the sum of q

  void make_room(int rows, int n_in) {
    const size_t n = static_cast<size_t>(rows) * static_cast<size_t>(n_in);
    if (q.size() < n) q.resize(n), scale.resize(n / kQ8Inputs), start.resize(n / kQ8Inputs);
  }
};

/// Row r of `rows` becomes x[K]: per 32 the largest size becomes 127, the rest is rounded to whole numbers.
inline void quantize_row(Q8Rows& rows, int r, const float* x, int n_in) {
  for (int b = 0; b < n_in / kQ8Inputs; ++b) {
    const float* from = x + b * kQ8Inputs;
    const size_t at = static_cast<size_t>(r) * static_cast<size_t>(n_in / kQ8Inputs) + static_cast<size_t>(b);
    int8_t* q = rows.q.data() + at * kQ8Inputs;
    f32x16 sizes = max(load(from), load(from + 16));
    sizes = max(sizes, sub(splat(0.0f), min(load(from), load(from + 16))));
    float size[16];
    store(size, sizes);
    const float top = *std::max_element(size, size + 16), inverse = top > 0 ? 127.0f / top : 0.0f;
    int32_t sum = 0, bits[kQ8Inputs];
    const f32x16 magic = splat(0x1.8p23f);  // adding it rounds to a whole number, in the low bits
    for (int i = 0; i < kQ8Inputs; i += 16) {
      const f32x16 t = fma(load(from + i), splat(inverse), magic);
      std::memcpy(bits + i, &t, sizeof t);
    }
    for (int i = 0; i < kQ8Inputs; ++i) q[i] = static_cast<int8_t>(bits[i]), sum += q[i];
    rows.scale[at] = top / 127.0f;
    rows.start[at] = -128 * sum;
  }
}

/// R rows (from row r0 of x) times Q panels; the comment above says what it computes.
template <int R, int Q>
inline void matmul_q8_tile(float* y, ptrdiff_t y_stride, const Q8Rows& x, int r0, const std::byte* panel,
                           int blocks, int n_out_left) {
  f32x16 acc[R][Q * 2];
  for (int r = 0; r < R; ++r)
    for (int q = 0; q < Q * 2; ++q) acc[r][q] = splat(0.0f);
  for (int b = 0; b < blocks; ++b) {
    i32x16 sum[R][Q * 2];
    const size_t row_at = static_cast<size_t>(r0) * static_cast<size_t>(blocks) + static_cast<size_t>(b);
    for (int r = 0; r < R; ++r)
      for (int q = 0; q < Q * 2; ++q)
        sum[r][q] = splat_int(x.start[row_at + static_cast<size_t>(r * blocks)]);
    const auto block = [&](int q) { return panel + (static_cast<ptrdiff_t>(q / 2) * blocks + b) * kQ8Block; };
    for (int k = 0; k < kQ8Inputs; k += 4) {
      i32x16 w[Q * 2];
      for (int q = 0; q < Q * 2; ++q)
        w[q] = keep(load_bytes(block(q) + 2 * kPanel + k * kPanel + q % 2 * 64));
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, x.q.data() + (row_at + static_cast<size_t>(r * blocks)) * kQ8Inputs + k, 4);
        const i32x16 xs = splat_int(four);
        for (int q = 0; q < Q * 2; ++q) sum[r][q] = dot4(sum[r][q], w[q], xs);
      }
    }
    for (int q = 0; q < Q * 2; ++q) {
      const f32x16 d = load(reinterpret_cast<const Half*>(block(q)) + q % 2 * 16);
      for (int r = 0; r < R; ++r)
        acc[r][q] = fma(to_float(sum[r][q]), mul(d, splat(x.scale[row_at + static_cast<size_t>(r * blocks)])),
                        acc[r][q]);
    }
  }
  for (int r = 0; r < R; ++r) {
    float full[Q * kPanel];
    for (int q = 0; q < Q * 2; ++q) store(full + q * 16, acc[r][q]);
    std::copy_n(full, std::min(n_out_left, Q * kPanel), y + r * y_stride);
  }
}

template <int R, int Q>
inline void matmul_q8_up_to(int rows, float* y, ptrdiff_t y_stride, const Q8Rows& x, int r0,
                            const std::byte* panel, int blocks, int n_out_left) {
  if (rows == R) return matmul_q8_tile<R, Q>(y, y_stride, x, r0, panel, blocks, n_out_left);
  if constexpr (R > 1) matmul_q8_up_to<R - 1, Q>(rows, y, y_stride, x, r0, panel, blocks, n_out_left);
}

/// y[rows x N] = x * W^T, both in 8 bits; this thread's share. packed: panels of K/32 blocks.
inline void matmul_q8(float* y, ptrdiff_t y_stride, const Q8Rows& x, int rows, const std::byte* packed,
                      int n_in, int n_out, int thread = 0, int threads = 1) {
  constexpr int most = kManyRegisters ? 6 : 2;
  const int blocks = n_in / kQ8Inputs;
  each_piece(rows, n_out, thread, threads, [&](int p, int panels, int r0, int count) {
    for (const int last = p + panels; p < last;) {
      const std::byte* panel = packed + static_cast<ptrdiff_t>(p) * blocks * kQ8Block;
      const int left = n_out - p * kPanel, together = rows <= 2 && last - p >= 2 ? 2 : 1;
      for (int r = 0; r < count; r += most) {
        float* to = y + (r0 + r) * y_stride + p * kPanel;
        const int now = std::min(most, count - r);
        if (together == 2) matmul_q8_up_to<2, 2>(now, to, y_stride, x, r0 + r, panel, blocks, left);
        if (together == 1) matmul_q8_up_to<most, 1>(now, to, y_stride, x, r0 + r, panel, blocks, left);
      }
      p += together;
    }
  });
}

// ---- row kernels ----------------------------------------------------------------------------------

/// y[D] = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019). D a multiple of 16.
/// Returns the factor 1 / sqrt(...), which training needs again.
inline float rmsnorm(float* y, const float* x, const float* weight, int d, float eps) {
  f32x16 squares = splat(0.0f);
  for (int i = 0; i < d; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const float scale = 1.0f / std::sqrt(std::fma(sum(squares), 1.0f / static_cast<float>(d), eps));
  for (int i = 0; i < d; i += 16) store(y + i, mul(mul(load(x + i), splat(scale)), load(weight + i)));
  return scale;
}

/// Rotates the pairs (2i, 2i+1) of one head by the angle of its position (Su et al., 2021).
/// cos_sin: [E/2 x 2] of that position. direction -1 rotates back (the gradient's way).
inline void rope(float* head, const float* cos_sin, int e, float direction = 1.0f) {
  for (int i = 0; i < e / 2; ++i) {
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1] * direction;
    const float a = head[2 * i], b = head[2 * i + 1];
    head[2 * i] = std::fma(a, c, -(b * s));
    head[2 * i + 1] = std::fma(a, s, b * c);
  }
}

/// cos and sin of position * base^(-2i/E) for each pair: [positions x E/2 x 2].
inline std::vector<float> rope_table(int positions, int e, double base) {
  std::vector<float> table(static_cast<size_t>(positions) * static_cast<size_t>(e));
  for (int i = 0; i < e / 2; ++i) {
    const double frequency = exp64(-2.0 * i / e * log64(base));
    for (int p = 0; p < positions; ++p) {
      const SinCos a = sincos64(p * frequency);
      float* at = table.data() + static_cast<ptrdiff_t>(p) * e + 2 * i;
      at[0] = static_cast<float>(a.cos), at[1] = static_cast<float>(a.sin);
    }
  }
  return table;
}

/// gate[n] = silu(gate) * up with silu(x) = x / (1 + e^-x) (Shazeer, 2020). n a multiple of 16.
inline void swiglu(float* gate, const float* up, int n) {
  for (int i = 0; i < n; i += 16) {
    const f32x16 x = load(gate + i);
    const f32x16 silu = div(x, add(splat(1.0f), exp(sub(splat(0.0f), x))));
    store(gate + i, mul(silu, load(up + i)));
  }
}

/// x[n] += y. n a multiple of 16.
inline void add_rows(float* x, const float* y, int n) {
  for (int i = 0; i < n; i += 16) store(x + i, add(load(x + i), load(y + i)));
}

/// s[n] becomes exp(s - max); returns the sum, without dividing. Lane l sums positions l, l+16, ...:
/// the order depends on positions only, not on blocks. s must have room for n rounded up to 16.
inline float softmax_numerators(float* s, int n) {
  const int padded = (n + 15) / 16 * 16;
  for (int i = n; i < padded; ++i) s[i] = s[n - 1];  // any real score: changes no maximum
  f32x16 top = load(s);
  for (int i = 16; i < padded; i += 16) top = max(load(s + i), top);
  float lane[16];
  store(lane, top);
  const float highest = *std::max_element(lane, lane + 16);
  f32x16 total = splat(0.0f);
  for (int i = 0; i < padded; i += 16) {
    store(s + i, exp(sub(load(s + i), splat(highest))));
    for (int j = std::max(i, n); j < i + 16; ++j) s[j] = 0.0f;  // the fill-up lanes count nothing
    total = add(total, load(s + i));
  }
  return sum(total);
}

// ---- paged attention ------------------------------------------------------------------------------
//
// The KV of one layer, in blocks of P tokens. In K the token runs along the lanes, in V the head
// dimension, so that scores and weighted sums are chains along their reduction without a shuffle:
//
//   block b:  K [G][E][P]     k[b][g][e][0] k[b][g][e][1] ... k[b][g][e][P-1]
//             V [G][P][E]     v[b][g][p][0] v[b][g][p][1] ... v[b][g][p][E-1]
//
// Position p of a sequence lives in block table[p / P], slot p % P.

struct KvShape {
  int kv_heads, head_width, block_size;  // G, E, P
  size_t half() const {                  // floats of K (or of V) in one block of one layer
    return static_cast<size_t>(kv_heads) * static_cast<size_t>(head_width) * static_cast<size_t>(block_size);
  }
};

/// Writes one token's k[G x E] and v[G x E] into slot `slot` of a block (K half, then V half).
inline void write_kv(float* block, const float* k, const float* v, int slot, const KvShape& s) {
  float* vb = block + s.half();
  for (int g = 0; g < s.kv_heads; ++g)
    for (int e = 0; e < s.head_width; ++e) {
      block[(g * s.head_width + e) * s.block_size + slot] = k[g * s.head_width + e];
      vb[(g * s.block_size + slot) * s.head_width + e] = v[g * s.head_width + e];
    }
}

/// Copies the first `tokens` slots of one block into another (copy-on-write of a partly shared block).
inline void copy_kv(float* to, const float* from, int tokens, const KvShape& s) {
  for (int row = 0; row < s.kv_heads * s.head_width; ++row)
    std::copy_n(from + row * s.block_size, tokens, to + row * s.block_size);
  for (int g = 0; g < s.kv_heads; ++g) {
    const size_t at = s.half() + static_cast<size_t>(g * s.block_size * s.head_width);
    std::copy_n(from + at, tokens * s.head_width, to + at);
  }
}

/// One query vector: q (scaled by 1 / sqrt(E)) and out [E]; it sees the first n positions of its sequence.
struct Query {
  const float* q;
  float* out;
  int n;
  float total = 0.0f;  // of the softmax numerators
};

// A tile is some queries of one sequence that share a KV head: rows of a prefill, heads of a group. It goes
// through the positions in chunks, so that a chunk of K or V is read from memory once for all of them.
// (noinline: inside a large function g++ runs out of registers and keeps the sums in memory.)
inline constexpr int kQueries = kManyRegisters ? 6 : 2;  // so many at once share a loaded K or V
inline constexpr int kAttentionChunk = 16 * (kManyRegisters ? 4 : 2);  // positions

/// scores[r][16 j + lane] = q[r] . k[j][lane] for R queries and J groups of sixteen positions; K's rows are
/// block_size floats apart. ahead[j]: what will be read next, as many bytes; it is prefetched.
template <int R, int J>
inline void score_tile(float* scores, ptrdiff_t stride, const Query* queries, const float* const* k,
                       const float* const* ahead, int ahead_step, int width, int block_size) {
  f32x16 dot[R][J];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) dot[r][j] = splat(0.0f);
  for (int e = 0; e < width; ++e) {
    f32x16 ke[J];
    for (int j = 0; j < J; ++j) ke[j] = keep(load(k[j] + e * block_size));
    for (int j = 0; j < J; ++j) __builtin_prefetch(ahead[j] + e * ahead_step);
    for (int r = 0; r < R; ++r) {
      const f32x16 qe = splat(queries[r].q[e]);
      for (int j = 0; j < J; ++j) dot[r][j] = fma(qe, ke[j], dot[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) store(scores + r * stride + 16 * j, dot[r][j]);
}

/// scores[r][p] = q[r] . k[p] for R queries and positions p0 to p1 - 1: one chain over e each. Lanes are
/// positions; those past p1, up to the next multiple of 64, hold nothing of use.
template <int R>
[[gnu::noinline]] inline void attention_scores(float* scores, ptrdiff_t stride, const Query* queries, int g,
                                               const float* kv, const int* table, int p0, int p1,
                                               const KvShape& s) {
  const int width = s.head_width, block_size = s.block_size;
  const auto k_at = [&](int p) {  // address of k[p][0]; the next e is block_size floats further
    return kv + static_cast<size_t>(table[p / block_size]) * 2 * s.half() +
           static_cast<size_t>(g * width * block_size + p % block_size);
  };
  const auto v_at = [&](int p) {  // address of v[p][0]
    return kv + static_cast<size_t>(table[p / block_size]) * 2 * s.half() + s.half() +
           static_cast<size_t>((g * block_size + p % block_size) * width);
  };
  if (block_size % 16 != 0) {  // small blocks: the plain loop, which says what the fast one computes
    for (int r = 0; r < R; ++r)
      for (int p = p0; p < p1; ++p) {
        const float* k = k_at(p);
        float dot = 0.0f;
        for (int e = 0; e < width; ++e) dot = std::fma(queries[r].q[e], k[e * block_size], dot);
        scores[r * stride + p] = dot;
      }
    return;
  }
  constexpr int kGroups = kAttentionChunk / 16;
  for (int p = p0; p < p1; p += kAttentionChunk) {
    const float *k[kGroups], *ahead[kGroups];  // of sixteen positions each; the last again if there are fewer
    const bool more = p + kAttentionChunk < p1;
    for (int j = 0; j < kGroups; ++j) {
      k[j] = k_at(std::min(p + 16 * j, (p1 - 1) / 16 * 16));
      ahead[j] = more ? k_at(std::min(p + kAttentionChunk + 16 * j, (p1 - 1) / 16 * 16))
                      : v_at(std::min(p0 + 16 * j, (p1 - 1) / 16 * 16));
    }
    score_tile<R, kGroups>(scores + p, stride, queries, k, ahead, more ? block_size : 16, width, block_size);
  }
}

/// out[r][e] += weights[r][p] * v[p][e] for R queries and positions p0 to p1 - 1: chains over p go on.
/// Lanes are e, W * 16 of them at a time.
template <int R, int W>
[[gnu::noinline]] inline void attention_values(const float* weights, ptrdiff_t stride, const Query* queries,
                                               int g, const float* kv, const int* table, int p0, int p1,
                                               const KvShape& s) {
  const auto v_at = [&](int p) {  // address of v[p][0]
    return kv + static_cast<size_t>(table[p / s.block_size]) * 2 * s.half() + s.half() +
           static_cast<size_t>((g * s.block_size + p % s.block_size) * s.head_width);
  };
  for (int e = 0; e < s.head_width; e += 16 * W) {
    f32x16 acc[R][W];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < W; ++i) acc[r][i] = load(queries[r].out + e + 16 * i);
    for (int p = p0; p < p1;) {
      const float* v = v_at(p) + e;
      const int stop = std::min(p1, (p / s.block_size + 1) * s.block_size);
      const ptrdiff_t ahead = v_at(std::min(stop + s.block_size, p1 - 1)) + e - v;
      for (; p < stop; ++p, v += s.head_width) {
        f32x16 vp[W];
        for (int i = 0; i < W; ++i) vp[i] = keep(load(v + 16 * i)), __builtin_prefetch(v + ahead + 16 * i);
        for (int r = 0; r < R; ++r) {
          const f32x16 weight = splat(weights[r * stride + p]);
          for (int i = 0; i < W; ++i) acc[r][i] = fma(weight, vp[i], acc[r][i]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < W; ++i) store(queries[r].out + e + 16 * i, acc[r][i]);
  }
}

/// The same for `count` <= R queries: first the positions that all of them see, then each one's own rest.
template <int R, int W>
inline void attention_values_of(int count, const float* weights, ptrdiff_t stride, const Query* queries,
                                int g, const float* kv, const int* table, int p0, int p1, const KvShape& s) {
  if (count < R) {
    if constexpr (R > 1)
      attention_values_of<R - 1, W>(count, weights, stride, queries, g, kv, table, p0, p1, s);
    return;
  }
  const int common = std::clamp(queries[0].n, p0, p1);
  attention_values<R, W>(weights, stride, queries, g, kv, table, p0, common, s);
  for (int r = 0; r < R; ++r)
    if (const int stop = std::min(queries[r].n, p1); stop > common)
      attention_values<1, W>(weights + r * stride, stride, queries + r, g, kv, table, common, stop, s);
}
template <int R>
inline void attention_scores_of(int count, float* scores, ptrdiff_t stride, const Query* queries, int g,
                                const float* kv, const int* table, int p0, int n, const KvShape& s) {
  if (count == R) return attention_scores<R>(scores, stride, queries, g, kv, table, p0, n, s);
  if constexpr (R > 1) attention_scores_of<R - 1>(count, scores, stride, queries, g, kv, table, p0, n, s);
}

/// Causal attention of a tile: `count` queries in order of n, for KV head g of one sequence.
/// scratch: count * (the largest n rounded up to 64) floats.
/// Softmax in two passes over the whole row, so the result does not depend on how blocks or chunks are cut.
inline void paged_attention(Query* queries, int count, int g, const float* kv, const int* table,
                            const KvShape& s, float* scratch) {
  const int most = queries[count - 1].n;
  const ptrdiff_t stride = (most + 63) / 64 * 64;
  const int chunk = count <= kQueries ? most : kAttentionChunk;  // few queries: nobody to share a chunk with
  for (int p = 0; p < most; p += chunk)
    for (int r = 0; r < count; r += kQueries) {
      const int together = std::min(kQueries, count - r),
                n = std::min(queries[r + together - 1].n, p + chunk);
      if (p < n)
        attention_scores_of<kQueries>(together, scratch + r * stride, stride, queries + r, g, kv, table, p, n,
                                      s);
    }
  for (int r = 0; r < count; ++r) {
    queries[r].total = softmax_numerators(scratch + r * stride, queries[r].n);
    std::fill_n(queries[r].out, s.head_width, 0.0f);
  }
  const auto values = kManyRegisters && s.head_width % 64 == 0 ? attention_values_of < kQueries,
             kManyRegisters ? 4 : 2 >
      : s.head_width % 32 == 0 ? attention_values_of<kQueries, 2>
                               : attention_values_of<kQueries, 1>;
  for (int p = 0; p < most; p += chunk)
    for (int r = 0; r < count; r += kQueries)
      values(std::min(kQueries, count - r), scratch + r * stride, stride, queries + r, g, kv, table, p,
             std::min(p + chunk, most), s);
  for (int r = 0; r < count; ++r)
    for (int e = 0; e < s.head_width; e += 16)
      store(queries[r].out + e, div(load(queries[r].out + e), splat(queries[r].total)));
}

}  // namespace servelite
