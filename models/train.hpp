// train.hpp: forward, backward and update of the tiny Llama, by hand.
//
// Every matrix product of training is the matmul of kernels.hpp over packed panels:
//
//   forward    Y  = X W^T      rows X,    weights W           (N outputs, K inputs)
//   backward   dX = dY W       rows dY,   weights W^T         (K outputs, N inputs)
//              dW = dY^T X     rows dY^T, weights X^T         (K outputs, T inputs), added chunk by chunk
//
// so each number is one chain of fused multiply-adds in a fixed order, and threads only share out
// numbers. The same seed gives the same bytes on one thread or many, on any vector width.
// Letters as in kernels.hpp; T is the number of tokens in the batch, all sequences end to end.
#pragma once

#ifdef _OPENMP
  #include <omp.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <servelite/error.hpp>
#include <servelite/kernels.hpp>
#include <string>
#include <vector>

namespace servelite::train {

struct Shape {
  int vocabulary = 768, width = 192, layers = 4, heads = 6, kv_heads = 2, head_width = 32, feed_forward = 384;
  int context = 1024;
  float norm_eps = 1e-5f;
  double rope_base = 10000.0;
  int qkv_width() const { return (heads + 2 * kv_heads) * head_width; }
};

// ---- threads --------------------------------------------------------------------------------------

/// Runs f(thread, threads) on all threads.
template <class F>
void parallel(int threads, F&& f) {
#ifdef _OPENMP
  #pragma omp parallel num_threads(threads)
  f(omp_get_thread_num(), omp_get_num_threads());
#else
  (void)threads;
  f(0, 1);
#endif
}

/// A thread's share of 0..n-1.
struct Share {
  int first, last;
  Share(int n, int thread, int threads)
      : first(static_cast<int>(int64_t{n} * thread / threads)),
        last(static_cast<int>(int64_t{n} * (thread + 1) / threads)) {}
};

// ---- parameters -----------------------------------------------------------------------------------

/// Where each tensor lies in the flat array of parameters (and in that of gradients, and moments).
struct Layout {
  struct Tensor {
    std::string name;  // as in GGUF
    size_t at;
    int rows, columns;
    size_t size() const { return static_cast<size_t>(rows) * static_cast<size_t>(columns); }
  };
  struct Block {
    size_t attention_norm, qkv, attention_out, ff_norm, gate_up, down;
  };
  std::vector<Tensor> tensors;
  std::vector<Block> blocks;
  size_t embedding = 0, output_norm = 0, size = 0;

  explicit Layout(const Shape& s) {
    const int D = s.width, E = s.head_width;
    embedding = add("token_embd.weight", s.vocabulary, D);
    for (int l = 0; l < s.layers; ++l) {
      const std::string blk = "blk." + std::to_string(l) + ".";
      Block b;
      b.attention_norm = add(blk + "attn_norm.weight", 1, D);
      b.qkv = add(blk + "attn_q.weight", s.heads * E, D);  // q, k, v lie below each other: one matrix
      add(blk + "attn_k.weight", s.kv_heads * E, D);
      add(blk + "attn_v.weight", s.kv_heads * E, D);
      b.attention_out = add(blk + "attn_output.weight", D, s.heads * E);
      b.ff_norm = add(blk + "ffn_norm.weight", 1, D);
      b.gate_up = add(blk + "ffn_gate.weight", s.feed_forward, D);  // and so do gate and up
      add(blk + "ffn_up.weight", s.feed_forward, D);
      b.down = add(blk + "ffn_down.weight", D, s.feed_forward);
      blocks.push_back(b);
    }
    output_norm = add("output_norm.weight", 1, D);
  }

 private:
  size_t add(const std::string& name, int rows, int columns) {
    tensors.push_back({name, size, rows, columns});
    size += tensors.back().size();
    return tensors.back().at;
  }
};

/// splitmix64, and normal numbers by Box and Muller; no library function whose last bit may differ.
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>((next() >> 11) + 1) * 0x1p-53; }  // in (0, 1]
  double normal() {
    const double radius = std::sqrt(-2.0 * log64(uniform()));
    return radius * sincos64(6.283185307179586 * uniform()).cos;
  }
};

/// Norms start at 1, matrices normal with deviation 1 / sqrt(inputs); what is added to the residual stream
/// is smaller by sqrt(2 L), as in GPT-2 (Radford et al., 2019).
inline std::vector<float> initial_parameters(const Shape& s, const Layout& layout, uint64_t seed) {
  std::vector<float> p(layout.size);
  Random random{seed};
  for (const Layout::Tensor& t : layout.tensors) {
    const bool norm = t.rows == 1, residual = t.name.find("output.weight") != std::string::npos ||
                                              t.name.find("down") != std::string::npos;
    double deviation = t.at == layout.embedding ? 0.05 : 1.0 / std::sqrt(static_cast<double>(t.columns));
    if (residual) deviation /= std::sqrt(2.0 * s.layers);
    for (size_t i = 0; i < t.size(); ++i)
      p[t.at + i] = norm ? 1.0f : static_cast<float>(deviation * random.normal());
  }
  return p;
}

// ---- matrix products --------------------------------------------------------------------------------

/// Y[T x N] = X[T x K] W^T, W[N x K].
inline void product(float* y, const float* x, const float* w, int rows, int n_in, int n_out,
                    std::vector<float>& packed, int threads) {
  packed.resize(std::max(packed.size(), packed_size(n_out, n_in)));
  pack_panels(packed.data(), w, n_out, n_in);
  parallel(threads, [&](int t, int n) { matmul(y, n_out, x, n_in, rows, packed.data(), n_in, n_out, t, n); });
}

/// dX[T x K] = dY[T x N] W.
inline void product_back(float* dx, const float* dy, const float* w, int rows, int n_in, int n_out,
                         std::vector<float>& packed, int threads) {
  packed.resize(std::max(packed.size(), packed_size(n_in, n_out)));
  pack_panels(packed.data(), w, n_in, n_out, 1, n_in, 0, panels_of(n_in));
  parallel(threads,
           [&](int t, int n) { matmul(dx, n_in, dy, n_out, rows, packed.data(), n_out, n_in, t, n); });
}

/// to[columns x rows] = from[rows x columns] transposed, in tiles that stay in the cache.
inline void transpose(float* to, ptrdiff_t to_stride, const float* from, ptrdiff_t from_stride, int rows,
                      int columns) {
  for (int r0 = 0; r0 < rows; r0 += 16)
    for (int c0 = 0; c0 < columns; c0 += 16)
      for (int c = c0; c < std::min(c0 + 16, columns); ++c)
        for (int r = r0; r < std::min(r0 + 16, rows); ++r) to[c * to_stride + r] = from[r * from_stride + c];
}

inline constexpr int kChunk = 256;  // tokens of dY^T X at a time: both stay in the cache

/// dW[N x K] += dY[T x N]^T X[T x K]. Threads share the rows of dW.
inline void product_weights(float* dw, const float* dy, const float* x, int rows, int n_in, int n_out,
                            std::vector<std::vector<float>>& scratch, int threads) {
  parallel(threads, [&](int thread, int n) {
    const Share mine(n_out, thread, n);
    const int outs = mine.last - mine.first;
    if (outs == 0) return;
    std::vector<float>& buffer = scratch[static_cast<size_t>(thread)];
    const size_t packed = packed_size(n_in, kChunk);
    buffer.resize(std::max(buffer.size(), packed + static_cast<size_t>(outs) * kChunk));
    for (int t0 = 0; t0 < rows; t0 += kChunk) {
      const int chunk = std::min(kChunk, rows - t0);
      float* turned = buffer.data() + packed;
      pack_panels(buffer.data(), x + ptrdiff_t{t0} * n_in, n_in, chunk, 1, n_in, 0, panels_of(n_in));
      transpose(turned, chunk, dy + ptrdiff_t{t0} * n_out + mine.first, n_out, chunk, outs);
      matmul(dw + ptrdiff_t{mine.first} * n_in, n_in, turned, chunk, outs, buffer.data(), chunk, n_in, 0, 1,
             true);
    }
  });
}

// ---- row functions, backward --------------------------------------------------------------------------

/// y = x s w with s = 1 / sqrt(mean x^2 + eps):  dx = s w dy - x s^3 / D sum(w dy x).  dx is added to.
inline void rmsnorm_back(float* dx, const float* dy, const float* x, const float* w, float s, int d) {
  f32x16 dot = splat(0.0f);
  for (int i = 0; i < d; i += 16) dot = fma(mul(load(w + i), load(dy + i)), load(x + i), dot);
  const float c = sum(dot) * s * s * s / static_cast<float>(d);
  for (int i = 0; i < d; i += 16) {
    const f32x16 straight = fma(mul(load(w + i), load(dy + i)), splat(s), load(dx + i));
    store(dx + i, fma(load(x + i), splat(-c), straight));
  }
}

/// dw += sum over rows of dy x s, one chain over the rows per column; columns [first, last), multiples of 16.
inline void rmsnorm_weight_back(float* dw, const float* dy, const float* x, const float* s, int rows, int d,
                                int first, int last) {
  for (int i = first; i < last; i += 16) {
    f32x16 acc = load(dw + i);
    for (int t = 0; t < rows; ++t)
      acc = fma(mul(load(dy + ptrdiff_t{t} * d + i), load(x + ptrdiff_t{t} * d + i)), splat(s[t]), acc);
    store(dw + i, acc);
  }
}

/// a = silu(g) u:  du = da silu(g),  dg = da u sigma(g) (1 + g (1 - sigma(g))).  gate, up become dg, du.
inline void swiglu_back(float* gate, float* up, const float* da, int n) {
  for (int i = 0; i < n; i += 16) {
    const f32x16 g = load(gate + i), u = load(up + i), d = load(da + i), one = splat(1.0f);
    const f32x16 sigma = div(one, add(one, servelite::exp(sub(splat(0.0f), g))));
    store(up + i, mul(d, mul(g, sigma)));
    store(gate + i, mul(mul(d, u), mul(sigma, fma(g, sub(one, sigma), one))));
  }
}

// ---- attention ----------------------------------------------------------------------------------------

inline constexpr int kRowTile = 64;

/// One (sequence, KV head): q, k, v are views into qkv [n x qkv_width], already rotated, q scaled.
/// Rows are taken kRowTile at a time; a tile's scores reach up to its last row, the rest is causally 0.
struct AttentionUnit {
  const Shape& s;
  int n, g;
  std::vector<float>& buffer;

  int width() const { return s.qkv_width(); }
  int group() const { return s.heads / s.kv_heads; }
  ptrdiff_t q_at(int h) const { return ptrdiff_t{g * group() + h} * s.head_width; }
  ptrdiff_t k_at() const { return ptrdiff_t{s.heads + g} * s.head_width; }
  ptrdiff_t v_at() const { return ptrdiff_t{s.heads + s.kv_heads + g} * s.head_width; }

  /// p[rows x m] = softmax of q k^T for rows r0..r0+rows-1, zero behind each row's own position.
  void probabilities(float* p, ptrdiff_t stride, const float* q, int r0, int rows, int m,
                     const float* k_panels) const {
    matmul(p, stride, q + ptrdiff_t{r0} * width(), width(), rows, k_panels, s.head_width, m);
    for (int r = 0; r < rows; ++r) {
      float* row = p + r * stride;
      const float total = softmax_numerators(row, r0 + r + 1);
      for (int i = 0; i <= r0 + r; i += 16) store(row + i, div(load(row + i), splat(total)));
      std::fill(row + r0 + r + 1, row + stride, 0.0f);
    }
  }

  /// out[n x heads * E]: this unit's columns of the attention's result.
  void forward(float* out, ptrdiff_t out_stride, const float* qkv) const {
    const int E = s.head_width;
    const ptrdiff_t stride = (n + 31) / 32 * 32;
    const int length = static_cast<int>(stride);
    const size_t panels = std::max(packed_size(length, E), packed_size(E, length));
    buffer.resize(std::max(buffer.size(), 2 * panels + static_cast<size_t>(kRowTile * stride)));
    float *k = buffer.data(), *v = k + panels, *p = v + panels;
    pack_panels(k, qkv + k_at(), n, E, width(), 1, 0, panels_of(n));
    pack_panels(v, qkv + v_at(), E, n, 1, width(), 0, panels_of(E));
    for (int h = 0; h < group(); ++h)
      for (int r0 = 0; r0 < n; r0 += kRowTile) {
        const int rows = std::min(kRowTile, n - r0), m = r0 + rows;
        probabilities(p, stride, qkv + q_at(h), r0, rows, m, k);
        matmul(out + ptrdiff_t{r0} * out_stride + q_at(h), out_stride, p, stride, rows, v, m, E);
      }
  }

  /// dqkv's columns of this unit from dout, for q scaled and rotated.
  void backward(float* dqkv, const float* dout, ptrdiff_t out_stride, const float* qkv) const {
    const int E = s.head_width;
    const ptrdiff_t stride = (n + 31) / 32 * 32;
    const int length = static_cast<int>(stride);
    const size_t panels = std::max(packed_size(length, E), packed_size(E, length)),
                 tile = static_cast<size_t>(kRowTile * stride);
    const size_t rows_panel = packed_size(E, kRowTile);
    buffer.resize(std::max(buffer.size(), 3 * panels + 2 * tile + rows_panel + tile));
    float *k = buffer.data(), *k_turned = k + panels, *v_turned = k_turned + panels;
    float *p = v_turned + panels, *dp = p + tile, *turned = dp + tile, *few = turned + tile;
    pack_panels(k, qkv + k_at(), n, E, width(), 1, 0, panels_of(n));         // for q k^T
    pack_panels(k_turned, qkv + k_at(), E, n, 1, width(), 0, panels_of(E));  // for dS k
    pack_panels(v_turned, qkv + v_at(), n, E, width(), 1, 0, panels_of(n));  // for dO v^T
    for (int t = 0; t < n; ++t) {
      std::fill_n(dqkv + ptrdiff_t{t} * width() + k_at(), E, 0.0f);
      std::fill_n(dqkv + ptrdiff_t{t} * width() + v_at(), E, 0.0f);
    }
    for (int h = 0; h < group(); ++h)
      for (int r0 = 0; r0 < n; r0 += kRowTile) {
        const int rows = std::min(kRowTile, n - r0), m = r0 + rows;
        const float* d = dout + ptrdiff_t{r0} * out_stride + q_at(h);
        const float* q = qkv + ptrdiff_t{r0} * width() + q_at(h);
        probabilities(p, stride, qkv + q_at(h), r0, rows, m, k);
        matmul(dp, stride, d, out_stride, rows, v_turned, E, m);

        transpose(turned, kRowTile, p, stride, rows, m);  // dv += p^T dO
        pack_panels(few, d, E, rows, 1, out_stride, 0, panels_of(E));
        matmul(dqkv + v_at(), width(), turned, kRowTile, m, few, rows, E, 0, 1, true);

        for (int r = 0; r < rows; ++r)
          softmax_back(dp + r * stride, p + r * stride, r0 + r + 1, m);  // dp becomes dS
        matmul(dqkv + ptrdiff_t{r0} * width() + q_at(h), width(), dp, stride, rows, k_turned, m, E);

        transpose(turned, kRowTile, dp, stride, rows, m);  // dk += dS^T q
        pack_panels(few, q, E, rows, 1, width(), 0, panels_of(E));
        matmul(dqkv + k_at(), width(), turned, kRowTile, m, few, rows, E, 0, 1, true);
      }
  }

  /// dS = p (dp - sum(p dp)); zero from n on. p is zero there already, and so is dS.
  static void softmax_back(float* dp, const float* p, int n, int m) {
    const int padded = (n + 15) / 16 * 16;
    for (int i = n; i < padded; ++i) dp[i] = 0.0f;
    f32x16 dot = splat(0.0f);
    for (int i = 0; i < padded; i += 16) dot = fma(load(p + i), load(dp + i), dot);
    const f32x16 all = splat(sum(dot));
    for (int i = 0; i < padded; i += 16) store(dp + i, mul(load(p + i), sub(load(dp + i), all)));
    for (int i = padded; i < m; ++i) dp[i] = 0.0f;
  }
};

// ---- the model ----------------------------------------------------------------------------------------

/// Sequences end to end, with the token that should follow each and how much that counts.
struct Batch {
  std::vector<int> tokens, targets, first;  // first: where each sequence begins, then T
  std::vector<float> weights;
  int size() const { return static_cast<int>(tokens.size()); }
};

class Trainer {
 public:
  Shape s;
  Layout layout;
  std::vector<float> parameters, gradients;
  int threads;

  Trainer(const Shape& shape, uint64_t seed, int thread_count)
      : s(shape),
        layout(shape),
        parameters(initial_parameters(shape, layout, seed)),
        gradients(layout.size),
        threads(thread_count),
        rope_(rope_table(shape.context, shape.head_width, shape.rope_base)),
        layers_(static_cast<size_t>(shape.layers)),
        scratch_(static_cast<size_t>(thread_count)) {
    for (const int n : {s.vocabulary, s.width, s.feed_forward, s.head_width})
      if (n < 16 || n % 16 != 0)
        fail("shape: expected multiples of 16 for vocabulary, width, feed-forward and head width, found ", n);
    if (s.head_width > kPanel)
      fail("shape: expected a head width of at most ", kPanel, ", found ", s.head_width);
    if (s.kv_heads < 1 || s.heads % s.kv_heads != 0)
      fail("shape: expected heads to be a multiple of KV heads, found ", s.heads, " and ", s.kv_heads);
  }

  struct Loss {
    double all = 0, answers = 0;  // mean cross-entropy, weighted; and of tokens with weight 1 alone
  };

  /// Loss and, unless only_forward, its gradient.
  Loss run(const Batch& batch, bool only_forward = false) {
    T_ = batch.size();
    lay_out(batch);
    std::fill(gradients.begin(), gradients.end(), 0.0f);
    forward(batch);
    const Loss loss = cross_entropy(batch, only_forward);
    if (!only_forward) backward(batch);
    return loss;
  }

 private:
  struct Saved {                                    // what backward needs of a layer's forward
    std::vector<float> x, norm, scale, qkv, heads;  // [T x D], [T x D], [T], [T x (H+2G)E], [T x HE]
    std::vector<float> middle, ff_norm, ff_scale, gate_up, active;  // [T x D] twice, [T], [T x 2F], [T x F]
  };

  static void fit(std::vector<float>& v, int rows, int columns) {
    const size_t need = static_cast<size_t>(rows) * static_cast<size_t>(columns);
    if (v.size() < need) v.resize(need);
  }

  void lay_out(const Batch& batch) {
    const int D = s.width, F = s.feed_forward, HE = s.heads * s.head_width;
    for (Saved& l : layers_) {
      fit(l.x, T_, D), fit(l.norm, T_, D), fit(l.scale, T_, 1), fit(l.qkv, T_, s.qkv_width()),
          fit(l.heads, T_, HE);
      fit(l.middle, T_, D), fit(l.ff_norm, T_, D), fit(l.ff_scale, T_, 1), fit(l.gate_up, T_, 2 * F),
          fit(l.active, T_, F);
    }
    fit(x_, T_, D), fit(norm_, T_, D), fit(scale_, T_, 1), fit(dx_, T_, D), fit(d_, T_, std::max(D, HE));
    fit(dwide_, T_, std::max(2 * F, s.qkv_width())), fit(dactive_, T_, F), fit(logits_, kChunk, s.vocabulary);
    positions_.resize(static_cast<size_t>(T_));
    for (size_t i = 0; i + 1 < batch.first.size(); ++i)
      for (int t = batch.first[i]; t < batch.first[i + 1]; ++t)
        positions_[static_cast<size_t>(t)] = t - batch.first[i];
  }

  template <class F>
  void rows(F&& f) {
    parallel(threads, [&](int thread, int n) {
      const Share mine(T_, thread, n);
      for (int t = mine.first; t < mine.last; ++t) f(t);
    });
  }
  float* at(size_t offset) { return parameters.data() + offset; }
  float* grad(size_t offset) { return gradients.data() + offset; }

  void norm_rows(std::vector<float>& y, std::vector<float>& scale, const std::vector<float>& x,
                 size_t weight) {
    rows([&](int t) {
      scale[static_cast<size_t>(t)] =
          rmsnorm(y.data() + ptrdiff_t{t} * s.width, x.data() + ptrdiff_t{t} * s.width, at(weight), s.width,
                  s.norm_eps);
    });
  }

  /// (sequence, KV head) units, handed out in order; who computes one does not matter.
  template <class F>
  void attention_units(const Batch& batch, F&& f) {
    const int units = (static_cast<int>(batch.first.size()) - 1) * s.kv_heads;
    parallel(threads, [&](int thread, int n) {
      for (int u = thread; u < units; u += n) {
        const int first = batch.first[static_cast<size_t>(u / s.kv_heads)];
        f(AttentionUnit{s, batch.first[static_cast<size_t>(u / s.kv_heads) + 1] - first, u % s.kv_heads,
                        scratch_[static_cast<size_t>(thread)]},
          first);
      }
    });
  }

  void rotate(float* qkv, int t,
              float direction) {  // direction 1: rope, then scale q; -1: the gradient's way back
    const float* angle = rope_.data() + ptrdiff_t{positions_[static_cast<size_t>(t)]} * s.head_width;
    for (int h = 0; h < s.heads + s.kv_heads; ++h)
      rope(qkv + h * s.head_width, angle, s.head_width, direction);
    const f32x16 c = splat(1.0f / std::sqrt(static_cast<float>(s.head_width)));
    for (int i = 0; i < s.heads * s.head_width; i += 16) store(qkv + i, mul(load(qkv + i), c));
  }

  void forward(const Batch& batch) {
    const int D = s.width, F = s.feed_forward, HE = s.heads * s.head_width, W = s.qkv_width();
    rows([&](int t) {
      std::copy_n(at(layout.embedding) + ptrdiff_t{batch.tokens[static_cast<size_t>(t)]} * D, D,
                  x_.data() + ptrdiff_t{t} * D);
    });
    for (int l = 0; l < s.layers; ++l) {
      Saved& a = layers_[static_cast<size_t>(l)];
      const Layout::Block& w = layout.blocks[static_cast<size_t>(l)];
      rows([&](int t) { std::copy_n(x_.data() + ptrdiff_t{t} * D, D, a.x.data() + ptrdiff_t{t} * D); });
      norm_rows(a.norm, a.scale, a.x, w.attention_norm);
      product(a.qkv.data(), a.norm.data(), at(w.qkv), T_, D, W, packed_, threads);
      rows([&](int t) { rotate(a.qkv.data() + ptrdiff_t{t} * W, t, 1.0f); });
      attention_units(batch, [&](const AttentionUnit& unit, int first) {
        unit.forward(a.heads.data() + ptrdiff_t{first} * HE, HE, a.qkv.data() + ptrdiff_t{first} * W);
      });
      product(d_.data(), a.heads.data(), at(w.attention_out), T_, HE, D, packed_, threads);
      rows([&](int t) {
        float* m = a.middle.data() + ptrdiff_t{t} * D;
        std::copy_n(a.x.data() + ptrdiff_t{t} * D, D, m);
        add_rows(m, d_.data() + ptrdiff_t{t} * D, D);
      });
      norm_rows(a.ff_norm, a.ff_scale, a.middle, w.ff_norm);
      product(a.gate_up.data(), a.ff_norm.data(), at(w.gate_up), T_, D, 2 * F, packed_, threads);
      rows([&](int t) {
        float* active = a.active.data() + ptrdiff_t{t} * F;
        std::copy_n(a.gate_up.data() + ptrdiff_t{t} * 2 * F, F, active);
        swiglu(active, a.gate_up.data() + ptrdiff_t{t} * 2 * F + F, F);
      });
      product(d_.data(), a.active.data(), at(w.down), T_, F, D, packed_, threads);
      rows([&](int t) {
        std::copy_n(a.middle.data() + ptrdiff_t{t} * D, D, x_.data() + ptrdiff_t{t} * D);
        add_rows(x_.data() + ptrdiff_t{t} * D, d_.data() + ptrdiff_t{t} * D, D);
      });
    }
    norm_rows(norm_, scale_, x_, layout.output_norm);
  }

  /// Leaves d loss / d norm_ in d_ and adds the output matrix's gradient (tied to the embedding).
  Loss cross_entropy(const Batch& batch, bool only_forward) {
    const int D = s.width, V = s.vocabulary;
    double total = 0, loss = 0, answers = 0;
    int answered = 0;
    for (const float w : batch.weights) total += static_cast<double>(w);
    losses_.resize(static_cast<size_t>(T_));
    for (int t0 = 0; t0 < T_; t0 += kChunk) {
      const int chunk = std::min(kChunk, T_ - t0);
      product(logits_.data(), norm_.data() + ptrdiff_t{t0} * D, at(layout.embedding), chunk, D, V, packed_,
              threads);
      parallel(threads, [&](int thread, int n) {
        const Share mine(chunk, thread, n);
        for (int r = mine.first; r < mine.last; ++r) {
          float* row = logits_.data() + ptrdiff_t{r} * V;
          const size_t t = static_cast<size_t>(t0 + r);
          const float target = row[batch.targets[t]], highest = *std::max_element(row, row + V);
          const float sum_all = softmax_numerators(row, V);
          losses_[t] = log64(static_cast<double>(sum_all)) - static_cast<double>(target) +
                       static_cast<double>(highest);
          const float c = static_cast<float>(static_cast<double>(batch.weights[t]) / total);
          const f32x16 factor = splat(c / sum_all);
          for (int v = 0; v < V; v += 16) store(row + v, mul(load(row + v), factor));
          row[batch.targets[t]] -= c;
        }
      });
      if (only_forward) continue;
      product_back(d_.data() + ptrdiff_t{t0} * D, logits_.data(), at(layout.embedding), chunk, D, V, packed_,
                   threads);
      product_weights(grad(layout.embedding), logits_.data(), norm_.data() + ptrdiff_t{t0} * D, chunk, D, V,
                      scratch_, threads);
    }
    for (size_t t = 0; t < static_cast<size_t>(T_); ++t) {
      loss = std::fma(losses_[t], static_cast<double>(batch.weights[t]), loss);
      if (batch.weights[t] == 1.0f) answers += losses_[t], ++answered;
    }
    return {loss / total, answered > 0 ? answers / answered : 0};
  }

  void norm_back(float* dx, const float* dy, const std::vector<float>& x, const std::vector<float>& scale,
                 size_t weight) {
    const int D = s.width;
    parallel(threads, [&](int thread, int n) {
      const Share columns(D / 16, thread, n), mine(T_, thread, n);
      rmsnorm_weight_back(grad(weight), dy, x.data(), scale.data(), T_, D, columns.first * 16,
                          columns.last * 16);
      for (int t = mine.first; t < mine.last; ++t)
        rmsnorm_back(dx + ptrdiff_t{t} * D, dy + ptrdiff_t{t} * D, x.data() + ptrdiff_t{t} * D, at(weight),
                     scale[static_cast<size_t>(t)], D);
    });
  }

  void backward(const Batch& batch) {
    const int D = s.width, F = s.feed_forward, HE = s.heads * s.head_width, W = s.qkv_width();
    rows([&](int t) { std::fill_n(dx_.data() + ptrdiff_t{t} * D, D, 0.0f); });
    norm_back(dx_.data(), d_.data(), x_, scale_, layout.output_norm);
    for (int l = s.layers - 1; l >= 0; --l) {
      Saved& a = layers_[static_cast<size_t>(l)];
      const Layout::Block& w = layout.blocks[static_cast<size_t>(l)];
      product_back(dactive_.data(), dx_.data(), at(w.down), T_, F, D, packed_, threads);
      product_weights(grad(w.down), dx_.data(), a.active.data(), T_, F, D, scratch_, threads);
      rows([&](int t) {
        float* gate = a.gate_up.data() + ptrdiff_t{t} * 2 * F;  // becomes its own gradient
        swiglu_back(gate, gate + F, dactive_.data() + ptrdiff_t{t} * F, F);
      });
      product_back(d_.data(), a.gate_up.data(), at(w.gate_up), T_, D, 2 * F, packed_, threads);
      product_weights(grad(w.gate_up), a.gate_up.data(), a.ff_norm.data(), T_, D, 2 * F, scratch_, threads);
      norm_back(dx_.data(), d_.data(), a.middle, a.ff_scale, w.ff_norm);

      product_back(d_.data(), dx_.data(), at(w.attention_out), T_, HE, D, packed_, threads);
      product_weights(grad(w.attention_out), dx_.data(), a.heads.data(), T_, HE, D, scratch_, threads);
      attention_units(batch, [&](const AttentionUnit& unit, int first) {
        unit.backward(dwide_.data() + ptrdiff_t{first} * W, d_.data() + ptrdiff_t{first} * HE, HE,
                      a.qkv.data() + ptrdiff_t{first} * W);
      });
      rows([&](int t) { rotate(dwide_.data() + ptrdiff_t{t} * W, t, -1.0f); });
      product_back(d_.data(), dwide_.data(), at(w.qkv), T_, D, W, packed_, threads);
      product_weights(grad(w.qkv), dwide_.data(), a.norm.data(), T_, D, W, scratch_, threads);
      norm_back(dx_.data(), d_.data(), a.x, a.scale, w.attention_norm);
    }
    parallel(threads, [&](int thread, int n) {  // embedding: threads share columns, each adds in token order
      const Share columns(D / 16, thread, n);
      for (int t = 0; t < T_; ++t)
        for (int i = columns.first * 16; i < columns.last * 16; i += 16) {
          float* to = grad(layout.embedding) + ptrdiff_t{batch.tokens[static_cast<size_t>(t)]} * D + i;
          store(to, add(load(to), load(dx_.data() + ptrdiff_t{t} * D + i)));
        }
    });
  }

  int T_ = 0;
  std::vector<float> rope_;
  std::vector<int> positions_;
  std::vector<Saved> layers_;
  std::vector<float> x_, norm_, scale_;  // the last layer's output and its norm
  std::vector<float> dx_, d_, dwide_, dactive_, logits_, packed_;
  std::vector<double> losses_;
  std::vector<std::vector<float>> scratch_;  // one per thread
};

// ---- AdamW (Loshchilov and Hutter, 2019) ----------------------------------------------------------------

struct Adam {
  float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, decay = 0.1f, clip = 1.0f;
  double power1 = 1, power2 = 1;  // beta^step
  std::vector<float> mean, square;

  void step(const Layout& layout, std::vector<float>& p, const std::vector<float>& g, float rate,
            int threads) {
    mean.resize(p.size()), square.resize(p.size());
    double norm = 0;
    for (const float x : g) norm = std::fma(static_cast<double>(x), static_cast<double>(x), norm);
    norm = std::sqrt(norm);
    const float shrink =
        norm > static_cast<double>(clip) ? static_cast<float>(static_cast<double>(clip) / norm) : 1.0f;
    power1 *= static_cast<double>(beta1), power2 *= static_cast<double>(beta2);
    const float c1 = static_cast<float>(1.0 / (1.0 - power1)), c2 = static_cast<float>(1.0 / (1.0 - power2));
    for (const Layout::Tensor& t : layout.tensors) {
      const float keep_part =
          t.rows == 1
              ? 1.0f
              : static_cast<float>(std::fma(-static_cast<double>(rate), static_cast<double>(decay), 1.0));
      parallel(threads, [&](int thread, int n) {
        const Share mine(static_cast<int>(t.size()), thread, n);
        for (size_t i = t.at + static_cast<size_t>(mine.first); i < t.at + static_cast<size_t>(mine.last);
             ++i) {
          const float x = g[i] * shrink;
          mean[i] = std::fma(beta1, mean[i], (1.0f - beta1) * x);
          square[i] = std::fma(beta2, square[i], (1.0f - beta2) * x * x);
          const float root = std::sqrt(square[i] * c2);
          p[i] = std::fma(-rate, mean[i] * c1 / (root + eps), p[i] * keep_part);
        }
      });
    }
  }
};

}  // namespace servelite::train
