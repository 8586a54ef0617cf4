// static_batcher.hpp: the school bus, and with one seat the serial baseline.
//
// The bus waits until its seats are taken or its patience is over, drives the whole route, and only then
// takes new passengers:
//
//   seat 0  [prompt......|pad pad]  d d d d d d d d d d d d d   <- the longest answer sets the time
//   seat 1  [prompt|pad pad pad  ]  d d d x x x x x x x x x x   <- x: finished, its seat still computed
//   seat 2  [prompt..............]  d d d d d x x x x x x x x
//
// Naive, not a straw man: same kernels, same packed weights, same sampler as the others. What it wastes
// is what the policy wastes, and each kind is counted: padding up to the longest prompt, dead seats,
// waiting for the bus to fill, KV reserved for a full context per seat, prefixes computed again.
//
// Chapter: docs/10_side_by_side.md
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "request.hpp"

namespace servelite {

/// What a batcher must know of the model.
struct ModelLimits {
  int context, vocabulary, eos;
};

struct StaticOptions {
  int seats = 8;           ///< at most; the KV memory may hold fewer slots of a full context
  double patience = 0.02;  ///< seconds the first passenger waits before the bus leaves half empty
  bool stream = false;     ///< tokens leave as they are sampled, not when the bus is back
};

class StaticBatcher final : public Batcher {
 public:
  /// Each seat owns a slab of consecutive blocks, enough for a full context.
  StaticBatcher(BlockPool& pool, ModelLimits limits, StaticOptions options)
      : pool_(pool), limits_(limits), options_(options) {
    if (options.seats < 1) fail("static batcher: expected at least one seat, found ", options.seats);
    const int per_seat = pool.blocks_for(limits.context);
    const int seats = std::min(options.seats, pool.size() / per_seat);
    if (seats < 1)
      fail("static batcher: expected KV memory for at least one full context of ", limits.context,
           " tokens, found ", pool.size() * pool.block_size(), " tokens");
    for (int s = 0; s < seats; ++s) {
      slabs_.emplace_back();
      for (int b = 0; b < per_seat; ++b) slabs_.back().push_back(pool.allocate());
    }
  }
  ~StaticBatcher() override {
    for (const std::vector<int>& slab : slabs_)
      for (const int b : slab) pool_.release(b);
  }
  StaticBatcher(const StaticBatcher&) = delete;
  StaticBatcher& operator=(const StaticBatcher&) = delete;

  void submit(Sequence& s, double) override {
    if (refuse_impossible(s, limits_.context, limits_.context, limits_.vocabulary)) return;
    waiting_.push_back(&s);
  }

  StepBatch schedule(double now) override {
    if (!bus_.empty()) return decode();
    const bool full = static_cast<int>(waiting_.size()) >= seats();
    if (waiting_.empty() || (!full && now < leaves_at())) return {};
    board();
    return prefill();
  }

  void complete(const StepBatch& step, const std::vector<int>& tokens, double) override {
    size_t next = 0;
    bool all_done = true;
    for (size_t i = 0; i < bus_.size(); ++i) {
      Sequence& s = *bus_[i];
      s.computed = step.spans[i].first_position + static_cast<int>(step.spans[i].tokens.size()) -
                   step.spans[i].padding;
      if (step.spans[i].logits_of >= 0) accept_token(s, tokens[next++], limits_.eos);
      if (s.finish == Finish::none) all_done = false;
      if (s.finish != Finish::none && options_.stream) s.left = true;
    }
    if (!all_done) return;
    for (Sequence* s : bus_) s->left = true, s->seat = -1;  // the bus is back
    bus_.clear();
  }

  double wake_at() const override {
    return bus_.empty() && !waiting_.empty() ? leaves_at() : std::numeric_limits<double>::infinity();
  }
  bool streams() const override { return options_.stream; }
  int seats() const override { return static_cast<int>(slabs_.size()); }
  const std::deque<Sequence*>& waiting() const override { return waiting_; }

  /// Every seat reserves a full context from start to end, taken or not.
  KvUse kv_use() const override {
    KvUse use;
    for (const Sequence* s : bus_)
      if (s->finish == Finish::none) use.used += s->known();
    use.reserved = seats() * limits_.context;
    use.capacity = pool_.size() * pool_.block_size();
    return use;
  }

 private:
  /// The first passenger's patience ends; if the bus was away longer than that, it leaves at once.
  double leaves_at() const { return waiting_.front()->request.arrival + options_.patience; }

  void board() {
    while (!waiting_.empty() && static_cast<int>(bus_.size()) < seats()) {
      waiting_.front()->seat = static_cast<int>(bus_.size());
      bus_.push_back(waiting_.front());
      waiting_.pop_front();
    }
  }

  /// All prompts at once, padded to the longest. The padding is really computed; its K/V lies behind the
  /// prompt, where causality hides it until the answer overwrites it.
  StepBatch prefill() const {
    size_t longest = 0;
    for (const Sequence* s : bus_) longest = std::max(longest, s->tokens.size());
    StepBatch step;
    for (const Sequence* s : bus_) {
      Span span = span_of(*s, Phase::prefill, 0, s->tokens);
      span.logits_of = s->prompt_tokens - 1;
      span.padding = static_cast<int>(longest) - s->prompt_tokens;
      span.tokens.resize(longest, limits_.eos);
      step.spans.push_back(std::move(span));
    }
    return step;
  }

  /// One token per seat, finished or not. A finished seat goes on computing its last token, further and
  /// further out, until the slab ends.
  StepBatch decode() const {
    StepBatch step;
    for (const Sequence* s : bus_) {
      const int position = std::min(s->computed, limits_.context - 1);
      Span span = span_of(*s, Phase::decode, position, {s->tokens.back()});
      span.dead = s->finish != Finish::none;
      span.logits_of = span.dead ? -1 : 0;
      step.spans.push_back(std::move(span));
    }
    return step;
  }

  Span span_of(const Sequence& s, Phase phase, int position, std::vector<int> tokens) const {
    Span span;
    span.request = s.index, span.seat = s.seat, span.phase = phase;
    span.tokens = std::move(tokens), span.first_position = position;
    span.block_table = slabs_[static_cast<size_t>(s.seat)];
    return span;
  }

  BlockPool& pool_;
  ModelLimits limits_;
  StaticOptions options_;
  std::vector<std::vector<int>> slabs_;  // per seat: its blocks
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> bus_;  // by seat
};

}  // namespace servelite
