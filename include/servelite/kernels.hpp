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
#include <span>
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
//   for r in rows, for o in outputs:  acc = add ? y[r][o] : 0;  for k ascending: acc = fma(x[r][k], w[o][k], acc)
// R rows times Q panels are kept in registers: R * Q * 2 chains run side by side and hide the latency
// of each. R and Q are chosen by the number of registers, and change no bit.
template <int R, int Q>
inline void matmul_tile(float* y, ptrdiff_t y_stride, const float* x, ptrdiff_t x_stride, const float* panel,
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
      w[q] = load(panel + (static_cast<ptrdiff_t>(q / 2) * n_in + k) * kPanel + q % 2 * 16);
      keep(w[q]);
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
template <int R, int Q>
inline void matmul_up_to(int rows, float* y, ptrdiff_t y_stride, const float* x, ptrdiff_t x_stride,
                         const float* panel, int n_in, int n_out_left, bool add) {
  if (rows == R) return matmul_tile<R, Q>(y, y_stride, x, x_stride, panel, n_in, n_out_left, add);
  if constexpr (R > 1) matmul_up_to<R - 1, Q>(rows, y, y_stride, x, x_stride, panel, n_in, n_out_left, add);
}

/// All rows of a group of Q panels.
template <int Q>
inline void matmul_group(float* y, ptrdiff_t y_stride, const float* x, ptrdiff_t x_stride, int rows,
                         const float* panel, int n_in, int n_out_left, bool add) {
  constexpr int most = Q == 4 ? 2 : Q == 2 ? (kManyRegisters ? 6 : 1) : kTileRows;
  for (int r = 0; r < rows; r += most)
    matmul_up_to<most, Q>(std::min(most, rows - r), y + r * y_stride, y_stride, x + r * x_stride, x_stride,
                          panel, n_in, n_out_left, add);
}

/// y[rows x N] (+)= x[rows x K] * W^T with W packed; this thread's share of the panels.
/// Strides in floats between rows. add: y's old value starts the chain instead of 0.
inline void matmul(float* y, ptrdiff_t y_stride, const float* x, ptrdiff_t x_stride, int rows,
                   const float* packed, int n_in, int n_out, int thread = 0, int threads = 1,
                   bool add = false) {
  // Few rows: several panels at once, or the few chains would wait for each other. Many rows: one panel
  // at a time stays in the cache; threads then share panels, and rows too, since panels may be few.
  const int panels = panels_of(n_out), group = panels_for(rows), groups = (panels + group - 1) / group;
  const int slices = rows >= 2 * kTileRows * threads ? threads : 1;
  for (int unit = thread; unit < groups * slices; unit += threads) {
    const int slice = unit % slices;
    const int r0 = static_cast<int>(static_cast<int64_t>(rows) * slice / slices);
    const int r1 = static_cast<int>(static_cast<int64_t>(rows) * (slice + 1) / slices);
    const int last = std::min(unit / slices * group + group, panels);
    for (int p = unit / slices * group; p < last;) {
      const float* panel = packed + static_cast<ptrdiff_t>(p) * kPanel * n_in;
      float* to = y + r0 * y_stride + p * kPanel;
      const float* from = x + r0 * x_stride;
      const int left = n_out - p * kPanel, q = last - p >= group ? group : 1;
      if (q == 4) matmul_group<4>(to, y_stride, from, x_stride, r1 - r0, panel, n_in, left, add);
      if (q == 2) matmul_group<2>(to, y_stride, from, x_stride, r1 - r0, panel, n_in, left, add);
      if (q == 1) matmul_group<1>(to, y_stride, from, x_stride, r1 - r0, panel, n_in, left, add);
      p += q;
    }
  }
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

/// scores[p] = q . k[p] for positions 0..n-1, one chain over e per position. q comes scaled by 1 / sqrt(E).
/// kv: base of the layer's blocks; block b starts at kv + b * 2 * half().
inline void attention_scores(float* scores, const float* q, int g, const float* kv, const int* table, int n,
                             const KvShape& s) {
  const int width = s.head_width, block_size = s.block_size;
  const auto k_at = [&](int p) {  // address of k[p][0]; the next e is block_size floats further
    return kv + static_cast<size_t>(table[p / block_size]) * 2 * s.half() +
           static_cast<size_t>(g * width * block_size + p % block_size);
  };
  if (block_size % 16 != 0) {  // small blocks: the plain loop, which says what the fast one computes
    for (int p = 0; p < n; ++p) {
      const float* k = k_at(p);
      float dot = 0.0f;
      for (int e = 0; e < width; ++e) dot = std::fma(q[e], k[e * block_size], dot);
      scores[p] = dot;
    }
    return;
  }
  constexpr int kGroups = 4;  // 64 positions at a time: four independent chains
  for (int p = 0; p < n; p += 16 * kGroups) {
    const float* k[kGroups];
    f32x16 dot[kGroups];
    const int groups = std::min(kGroups, (n - p + 15) / 16);
    for (int j = 0; j < kGroups; ++j) k[j] = k_at(p + 16 * std::min(j, groups - 1)), dot[j] = splat(0.0f);
    for (int e = 0; e < width; ++e) {
      const f32x16 qe = splat(q[e]);
      for (int j = 0; j < kGroups; ++j) dot[j] = fma(qe, load(k[j] + e * block_size), dot[j]);
    }
    for (int j = 0; j < groups; ++j) store(scores + p + 16 * j, dot[j]);
  }
}

/// out[E] = sum over p of weight[p] * v[p], one chain over p per output, then divided by total.
/// kHeads heads of the same KV head go together, 16 * kWide outputs at a time: one chain would wait for itself.
template <int kHeads, int kWide>
inline void attention_values(float* out, const float* weights, ptrdiff_t weights_stride, const float* total,
                             int g, const float* kv, const int* table, int n, const KvShape& s) {
  for (int e = 0; e < s.head_width; e += 16 * kWide) {
    f32x16 acc[kHeads][kWide];
    for (int h = 0; h < kHeads; ++h)
      for (int i = 0; i < kWide; ++i) acc[h][i] = splat(0.0f);
    for (int p0 = 0; p0 < n; p0 += s.block_size) {
      const float* v = kv + static_cast<size_t>(table[p0 / s.block_size]) * 2 * s.half() + s.half() +
                       static_cast<size_t>(g * s.block_size * s.head_width + e);
      const int stop = std::min(s.block_size, n - p0);
      for (int p = 0; p < stop; ++p)
        for (int h = 0; h < kHeads; ++h)
          for (int i = 0; i < kWide; ++i)
            acc[h][i] = fma(splat(weights[h * weights_stride + p0 + p]), load(v + p * s.head_width + 16 * i), acc[h][i]);
    }
    for (int h = 0; h < kHeads; ++h)
      for (int i = 0; i < kWide; ++i) store(out + h * s.head_width + e + 16 * i, div(acc[h][i], splat(total[h])));
  }
}

/// Causal attention of one query row over its sequence's first n positions, for KV head g and the
/// `heads` query heads that share it. q (scaled by 1 / sqrt(E)), out: [heads x E].
/// scratch: heads * (n rounded up to 64) floats.
/// Softmax in two passes over the whole row, so the result does not depend on how blocks are cut.
inline void paged_attention(float* out, const float* q, int heads, int g, const float* kv, const int* table, int n,
                            const KvShape& s, float* scratch) {
  const ptrdiff_t stride = (n + 63) / 64 * 64;
  for (int h = 0; h < heads;) {
    const int together = heads - h >= 2 ? 2 : 1;
    float total[2];
    for (int i = 0; i < together; ++i) {
      float* scores = scratch + (h + i) * stride;
      attention_scores(scores, q + (h + i) * s.head_width, g, kv, table, n, s);
      total[i] = softmax_numerators(scores, n);
    }
    const auto values = together == 2 ? (s.head_width % 32 == 0 ? attention_values<2, 2> : attention_values<2, 1>)
                                      : (s.head_width % 32 == 0 ? attention_values<1, 2> : attention_values<1, 1>);
    values(out + h * s.head_width, scratch + h * stride, stride, total, g, kv, table, n, s);
    h += together;
  }
}

}  // namespace servelite
