// transformer.hpp: the forward pass of a StepBatch on the CPU.
//
// One function, forward(), reads top to bottom as a Llama does:
//
//   x = embedding[token]
//   for each layer:  x += Wo  attention(rope(Wq norm(x)), rope(Wk norm(x)), Wv norm(x))
//                    x += Wdown (silu(Wgate norm(x)) * (Wup norm(x)))
//   logits = Wout norm(x)            only for the rows that want them
//
// All rows of the step, whatever sequence they belong to and whether they are prefill or decode, go
// through each matmul together: the weights are read once per step, not once per request. Only attention
// looks at which row belongs to whom. A row's result depends on its own sequence alone, bit for bit.
//
// The whole pass is one parallel region: every thread runs forward() and does its share of each kernel;
// barriers stand where a kernel reads what others wrote. (A tiny model's step is shorter than a few forks.)
//
// Chapter: docs/02_prefill_and_decode.md. Double-precision reference: tests/reference.hpp.
#pragma once

#include <atomic>
#include <exception>
#include <thread>

#include "kernels.hpp"
#include "machine.hpp"
#include "model.hpp"
#include "step_batch.hpp"

namespace servelite {

/// All threads of a step meet here some fifty times in a tiny model's pass. It waits by spinning for the
/// few microseconds that normally takes; when the machine has other work too, it gives the core away
/// (OpenMP's own barrier would spin on, and each pass could take a scheduler's time slice per barrier).
class SpinBarrier {
 public:
  void wait(int threads) {
    if (threads == 1) return;
    const unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins)
      if (spins > 4000) std::this_thread::yield();
  }

 private:
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

class Transformer final : public Executor {
 public:
  /// blocks of block_size tokens is the whole KV memory. threads 0: all cores.
  Transformer(const Model& model, int blocks, int block_size, int threads = 0)
      : model_(model),
        kv_shape_{model.config.kv_heads, model.config.head_width, block_size},
        layer_stride_(static_cast<size_t>(blocks) * 2 * kv_shape_.half()),
        blocks_(blocks),
        threads_(threads > 0 ? threads : default_threads()) {
    if (blocks < 1 || block_size < 1)
      fail("KV memory: expected at least one block of one token, found ", blocks, " blocks of ", block_size);
    const size_t floats = layer_stride_ * static_cast<size_t>(model.config.layers);
    try {
      kv_ = allocate(floats * sizeof(float));
    } catch (const std::exception&) {  // bad_alloc, length_error
      fail("KV memory: expected room for ", blocks, " blocks of ", block_size,
           " tokens, found less than the ", floats * sizeof(float) >> 20, " MB that takes");
    }
#ifndef _OPENMP
    threads_ = 1;
#endif
    const int together = model.config.heads / model.config.kv_heads;
    tile_rows_ = std::max(1, kTileQueries / together);
    scratch_.resize(static_cast<size_t>(threads_));
    for (Scratch& s : scratch_) {
      s.queries.resize(static_cast<size_t>(tile_rows_ * together));
      s.scores.resize(s.queries.size() * (static_cast<size_t>(model.config.context + 63) / 64 * 64));
    }
  }

  int vocabulary() const override { return model_.config.vocabulary; }
  int threads() const { return threads_; }

  void run(const StepBatch& step, std::vector<float>& logits) override {
    lay_out(step);
    logits.resize(wanted_.size() * static_cast<size_t>(model_.config.vocabulary));
    SERVELITE_OMP(omp parallel num_threads(threads_)) {
#ifdef _OPENMP
      forward(step, logits.data(), omp_get_thread_num(), omp_get_num_threads());
#else
      forward(step, logits.data(), 0, 1);
#endif
    }
  }

 private:
  struct Row {
    const Span* span;
    int token, position;
  };
  struct Tile {  // neighbouring rows of a span: their attention reads the same K and V
    int first_row, rows;
  };
  struct Scratch {  // one thread's
    std::vector<Query> queries;
    std::vector<float> scores;
  };
  static constexpr int kTileQueries = 24;
  // Between rows that a matmul reads side by side: at a distance of 4 KB they would all want the same few
  // places of the first cache.
  static constexpr int kPad = 16;

  /// Lists the step's rows and makes room for their activations.
  void lay_out(const StepBatch& step) {
    rows_.clear(), wanted_.clear(), tiles_.clear();
    for (const Span& span : step.spans) {
      const int n = static_cast<int>(span.tokens.size());
      if (span.logits_of >= 0) wanted_.push_back(static_cast<int>(rows_.size()) + span.logits_of);
      for (int i = 0; i < n; i += tile_rows_)
        tiles_.push_back({static_cast<int>(rows_.size()) + i, std::min(tile_rows_, n - i)});
      for (int i = 0; i < n; ++i)
        rows_.push_back({&span, span.tokens[static_cast<size_t>(i)], span.first_position + i});
      assert(span.logits_of < n && span.first_position + n <= model_.config.context);
      assert(static_cast<int>(span.block_table.size()) * kv_shape_.block_size >= span.first_position + n);
      for ([[maybe_unused]] const int block : span.block_table) assert(block >= 0 && block < blocks_);
    }
    const Config& c = model_.config;
    const size_t t = rows_.size();
    const auto make = [t](std::vector<float>& buffer, int width) {
      if (buffer.size() < t * static_cast<size_t>(width)) buffer.resize(t * static_cast<size_t>(width));
    };
    make(x_, c.width), make(norm_, c.width + kPad), make(out_, c.width);
    make(qkv_, c.qkv_width()), make(heads_, c.heads * c.head_width + kPad),
        make(ff_, 2 * c.feed_forward + kPad);
    if (model_.has_q8())
      q8_.make_room(static_cast<int>(t), std::max({c.width, c.heads * c.head_width, c.feed_forward}));
  }

  /// This thread's share of the whole pass. logits: [wanted x V].
  void forward(const StepBatch& step, float* logits, int thread, int threads) {
    const Config& c = model_.config;
    const int T = static_cast<int>(rows_.size()), D = c.width, E = c.head_width, F = c.feed_forward;
    const int first = T * thread / threads, last = T * (thread + 1) / threads;  // this thread's rows
    const int N = D + kPad, O = c.heads * E + kPad, W = 2 * F + kPad;           // strides of norm, heads, ff
    float *x = x_.data(), *norm = norm_.data(), *out = out_.data();             // each [T x D]
    float *qkv = qkv_.data(), *heads = heads_.data(), *ff = ff_.data();  // [T x (H+2G)E], [T x HE], [T x 2F]

    for (int t = first; t < last; ++t) model_.embedding.row(rows_[static_cast<size_t>(t)].token, x + t * D);

    for (int l = 0; l < c.layers; ++l) {
      const Layer& w = model_.layers[static_cast<size_t>(l)];
      float* kv = reinterpret_cast<float*>(kv_.get()) + static_cast<size_t>(l) * layer_stride_;

      for (int t = first; t < last; ++t) {
        rmsnorm(norm + t * N, x + t * D, w.attention_norm.data(), D, c.norm_eps);
        ready(w.qkv, t, norm + t * N);
      }
      barrier_.wait(threads);
      multiply(w.qkv, qkv, c.qkv_width(), norm, N, T, thread, threads);
      barrier_.wait(threads);
      for (int t = first; t < last; ++t) place(rows_[static_cast<size_t>(t)], qkv + t * c.qkv_width(), kv);
      if (thread == 0) next_unit_ = 0;
      barrier_.wait(threads);
      if (!step.copies.empty()) {
        if (thread == 0)
          for (const BlockCopy& b : step.copies)
            copy_kv(block(kv, b.to), block(kv, b.from), b.tokens, kv_shape_);
        barrier_.wait(threads);
      }
      // Whoever is free takes the next piece, long ones first: contexts differ. Pieces are few and large.
      const int tiles = static_cast<int>(tiles_.size()), G = c.kv_heads;
      const int pieces = std::clamp(2 * threads / std::max(tiles, 1), 1, G);
      for (int unit; (unit = next_unit_++) < tiles * pieces;)
        for (int i = unit % pieces, g = G * i / pieces; g < G * (i + 1) / pieces; ++g)
          attend(tiles_[static_cast<size_t>(tiles - 1 - unit / pieces)], g, qkv, heads, kv,
                 scratch_[static_cast<size_t>(thread)]);
      barrier_.wait(threads);
      if (w.attention_out.type == DType::q8_0) {
        for (int t = first; t < last; ++t) ready(w.attention_out, t, heads + t * O);
        barrier_.wait(threads);
      }
      multiply(w.attention_out, out, D, heads, O, T, thread, threads);
      barrier_.wait(threads);

      for (int t = first; t < last; ++t) {
        add_rows(x + t * D, out + t * D, D);
        rmsnorm(norm + t * N, x + t * D, w.ff_norm.data(), D, c.norm_eps);
        ready(w.gate_up, t, norm + t * N);
      }
      barrier_.wait(threads);
      multiply(w.gate_up, ff, W, norm, N, T, thread, threads);
      barrier_.wait(threads);
      for (int t = first; t < last; ++t) {
        swiglu(ff + t * W, ff + t * W + F, F);
        ready(w.down, t, ff + t * W);
      }
      barrier_.wait(threads);
      multiply(w.down, out, D, ff, W, T, thread, threads);
      barrier_.wait(threads);
      for (int t = first; t < last; ++t) add_rows(x + t * D, out + t * D, D);
    }

    barrier_.wait(threads);
    const int wanted = static_cast<int>(wanted_.size());
    for (int i = thread; i < wanted; i += threads) {
      rmsnorm(norm + i * N, x + wanted_[static_cast<size_t>(i)] * D, model_.output_norm.data(), D,
              c.norm_eps);
      ready(model_.output(), i, norm + i * N);
    }
    barrier_.wait(threads);
    multiply(model_.output(), logits, c.vocabulary, norm, N, wanted, thread, threads);
  }

  /// Row t of a matmul's input: in 8 bits, if that is how w wants it.
  void ready(const Matrix& w, int t, const float* x) {
    if (w.type == DType::q8_0) quantize_row(q8_, t, x, w.inputs);
  }

  /// y[rows x outputs] = x[rows x inputs] W^T; for a Q8_0 matrix x is what ready() was given.
  void multiply(const Matrix& w, float* y, int y_stride, const float* x, int x_stride, int rows, int thread,
                int threads) const {
    const int n = w.outputs, k = w.inputs;
    if (w.type == DType::f32) matmul(y, y_stride, x, x_stride, rows, w.as<float>(), k, n, thread, threads);
    if (w.type == DType::f16) matmul(y, y_stride, x, x_stride, rows, w.as<Half>(), k, n, thread, threads);
    if (w.type == DType::bf16) matmul(y, y_stride, x, x_stride, rows, w.as<Bf16>(), k, n, thread, threads);
    if (w.type == DType::q8_0) matmul_q8(y, y_stride, q8_, rows, w.as<std::byte>(), k, n, thread, threads);
  }

  float* block(float* kv, int b) const { return kv + static_cast<size_t>(b) * 2 * kv_shape_.half(); }

  /// Rotates one row's queries and keys to its position, scales the queries, stores K and V in its block.
  void place(const Row& row, float* qkv, float* kv) {
    const Config& c = model_.config;
    const int E = c.head_width;
    const float* angle = model_.rope.data() + static_cast<ptrdiff_t>(row.position) * E;
    for (int h = 0; h < c.heads + c.kv_heads; ++h) rope(qkv + h * E, angle, E);
    const f32x16 scale = splat(1.0f / std::sqrt(static_cast<float>(E)));
    for (int i = 0; i < c.heads * E; i += 16) store(qkv + i, mul(load(qkv + i), scale));
    const int b = row.span->block_table[static_cast<size_t>(row.position / kv_shape_.block_size)];
    const float* k = qkv + c.heads * E;
    write_kv(block(kv, b), k, k + c.kv_heads * E, row.position % kv_shape_.block_size, kv_shape_);
  }

  /// Attention of a tile's rows for the query heads that share KV head g.
  void attend(const Tile& tile, int g, const float* qkv, float* heads, const float* kv,
              Scratch& scratch) const {
    const Config& c = model_.config;
    const int together = c.heads / c.kv_heads, E = c.head_width;
    const Span& span = *rows_[static_cast<size_t>(tile.first_row)].span;
    int count = 0;
    for (int t = tile.first_row; t < tile.first_row + tile.rows; ++t)
      for (int h = g * together; h < (g + 1) * together; ++h)
        scratch.queries[static_cast<size_t>(count++)] = {qkv + t * c.qkv_width() + h * E,
                                                         heads + t * (c.heads * E + kPad) + h * E,
                                                         rows_[static_cast<size_t>(t)].position + 1};
    paged_attention(scratch.queries.data(), count, g, kv, span.block_table.data(), kv_shape_,
                    scratch.scores.data());
  }

  const Model& model_;
  KvShape kv_shape_;
  size_t layer_stride_;  // floats of KV per layer
  int blocks_, threads_, tile_rows_;
  std::shared_ptr<std::byte> kv_;  // floats [L][blocks][K half, V half]: see kernels.hpp
  std::vector<Row> rows_;
  std::vector<Tile> tiles_;
  std::vector<int> wanted_;  // rows whose logits are wanted
  std::vector<float> x_, norm_, out_, qkv_, heads_, ff_;
  Q8Rows q8_;
  SpinBarrier barrier_;
  std::atomic<int> next_unit_{0};  // of attention
  std::vector<Scratch> scratch_;
};

}  // namespace servelite
