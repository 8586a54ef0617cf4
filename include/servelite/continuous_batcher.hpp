// continuous_batcher.hpp: the shuttle.
//
// Requests get on and off at every step (iteration-level scheduling: Yu et al., Orca, OSDI 2022). KV is
// given out block by block as sequences grow (Kwon et al., PagedAttention, SOSP 2023), and a prefix that
// several requests share is computed once and stored once:
//
//   seat 0  [prompt......] d d d d d d d d d d d d d d d
//   seat 1  [pr] d d d [pr.....] d d d d d d [p] d d d d        a seat is taken the step after it is free
//   seat 2      [p] d d d d d [pr..] d d d d d d d d d d        [pr]: only what is not yet in the cache
//
// Rules
//  1. First come, first served. A request that has to wait for blocks lets nobody pass.
//  2. When a running sequence needs a block and none is left, the youngest running one is preempted: its
//     blocks are released and it goes back to the head of the queue, where it is the next to be admitted.
//     What it had computed is computed again (or found in the prefix cache); its tokens are kept.
//  3. Every admitted request can finish: one that could not even have the whole memory was refused.
//
// Each of the three gains can be switched off, so that each can be seen alone.
// Chapter: docs/10_side_by_side.md
#pragma once

#include <algorithm>
#include <cassert>
#include <deque>
#include <vector>

#include "prefix_cache.hpp"
#include "request.hpp"
#include "static_batcher.hpp"  // ModelLimits

namespace servelite {

struct ContinuousOptions {
  int seats = 8;
  bool paging = true;   ///< off: every sequence reserves blocks for a full context when admitted
  bool sharing = true;  ///< off: no prefix is looked up
  bool joining = true;  ///< off: new requests get on only when all seats are empty
};

class ContinuousBatcher final : public Batcher {
 public:
  ContinuousBatcher(BlockPool& pool, ModelLimits limits, ContinuousOptions options)
      : pool_(pool), cache_(pool), limits_(limits), options_(options) {
    if (options.seats < 1) fail("continuous batcher: expected at least one seat, found ", options.seats);
    if (!options.paging && pool.size() < pool.blocks_for(limits.context))
      fail("continuous batcher without paging: expected KV memory for at least one full context of ",
           limits.context, " tokens, found ", pool.size() * pool.block_size(), " tokens");
    seats_.resize(static_cast<size_t>(options.seats));
  }

  void submit(Sequence& s, double) override {
    if (!refuse_impossible(s, limits_.context, pool_.size() * pool_.block_size(), limits_.vocabulary))
      waiting_.push_back(&s);
  }

  StepBatch schedule(double) override {
    StepBatch step;
    for (size_t i = 0; i < running_.size(); ++i) {  // oldest first; only younger ones are preempted
      Sequence& s = *running_[i];
      while (!grow(s) && running_.back() != &s) preempt_youngest();
      if (static_cast<int>(s.blocks.size()) < pool_.blocks_for(s.computed + 1)) {
        preempt_youngest();  // it is itself the youngest
        break;
      }
      step.spans.push_back(span_of(s, Phase::decode, s.computed));
    }
    if (options_.joining || running_.empty())
      while (!waiting_.empty() && running_.size() < seats_.size() && admit(*waiting_.front(), step))
        waiting_.pop_front();
    return step;
  }

  void complete(const StepBatch& step, const std::vector<int>& tokens, double) override {
    for (const int b : copied_from_) pool_.release(b);
    copied_from_.clear();
    const std::vector<Sequence*> in_step = running_;  // span i belongs to running sequence i
    assert(in_step.size() == step.spans.size() && tokens.size() == step.spans.size());
    for (size_t i = 0; i < in_step.size(); ++i) {
      Sequence& s = *in_step[i];
      s.computed = step.spans[i].first_position + static_cast<int>(step.spans[i].tokens.size());
      s.computed_before = std::max(s.computed_before, s.computed);
      accept_token(s, tokens[i], limits_.eos);
      if (s.finish == Finish::none) continue;
      s.left = true;
      leave(s);
    }
  }

  int seats() const override { return options_.seats; }
  const std::deque<Sequence*>& waiting() const override { return waiting_; }
  const PrefixCache& cache() const { return cache_; }

  KvUse kv_use() const override {
    // Tokens in each block; shared ones count once.
    std::vector<int> filled(static_cast<size_t>(pool_.size()));
    KvUse use;
    for (const Sequence* s : running_)
      for (size_t i = 0; i < s->blocks.size(); ++i) {
        int& most = filled[static_cast<size_t>(s->blocks[i])];
        const int here =
            std::clamp(s->known() - static_cast<int>(i) * pool_.block_size(), 0, pool_.block_size());
        use.used += std::max(0, here - most);
        most = std::max(most, here);
      }
    use.reserved = pool_.referenced_blocks() * pool_.block_size();
    use.capacity = pool_.size() * pool_.block_size();
    return use;
  }

 private:
  /// Makes sure the next position has a block. False if no block can be had.
  bool grow(Sequence& s) {
    while (static_cast<int>(s.blocks.size()) < pool_.blocks_for(s.computed + 1)) {
      const int b = cache_.allocate();
      if (b < 0) return false;
      s.blocks.push_back(b);
    }
    return true;
  }

  /// Gives the head of the queue a seat, blocks and a span of this step. False: not now.
  bool admit(Sequence& s, StepBatch& step) {
    const int known = s.known();
    PrefixCache::Match found;  // at most known - 1: one position at least must be computed for its logits
    if (options_.sharing) found = cache_.match(s.tokens, known - 1);
    s.blocks = found.blocks;
    const size_t need = static_cast<size_t>(pool_.blocks_for(options_.paging ? known : limits_.context));
    while (s.blocks.size() < need) {
      const int b = cache_.allocate();
      if (b >= 0) {
        s.blocks.push_back(b);
      } else if (found.copy_from >= 0) {  // the block to copy from may be the very one that is missing
        pool_.release(found.copy_from);
        found.copy_from = -1, found.copy_tokens = 0;
      } else {
        pool_.release_table(s.blocks);
        return false;
      }
    }
    if (found.copy_from >= 0) {  // match() holds the source for us until the copy is made
      step.copies.push_back({found.copy_from, s.blocks[found.blocks.size()], found.copy_tokens});
      copied_from_.push_back(found.copy_from);
    }
    if (s.sampled() == 0) s.shared_tokens = std::min(found.tokens(), s.prompt_tokens);
    if (options_.sharing) cache_.insert(s.tokens, s.blocks);  // now: the rest of this very step shares it
    take_seat(s);
    step.spans.push_back(span_of(s, Phase::prefill, found.tokens()));
    return true;
  }

  void preempt_youngest() {
    Sequence& s = *running_.back();
    leave(s);
    s.computed = 0, ++s.preemptions;
    waiting_.push_front(&s);
  }

  /// Off the shuttle. What was computed stays in the cache until the memory is needed.
  void leave(Sequence& s) {
    if (options_.sharing) cache_.insert(std::span(s.tokens).first(static_cast<size_t>(s.computed)), s.blocks);
    pool_.release_table(s.blocks);
    seats_[static_cast<size_t>(s.seat)] = nullptr;
    s.seat = -1;
    running_.erase(std::find(running_.begin(), running_.end(), &s));
  }

  void take_seat(Sequence& s) {
    const auto free_seat = std::find(seats_.begin(), seats_.end(), nullptr);
    *free_seat = &s;
    s.seat = static_cast<int>(free_seat - seats_.begin());
    running_.push_back(&s);
  }

  /// All known tokens from `position` on; the last one's logits are wanted.
  Span span_of(const Sequence& s, Phase phase, int position) const {
    Span span;
    span.request = s.index, span.seat = s.seat, span.phase = phase;
    span.tokens.assign(s.tokens.begin() + position, s.tokens.end());
    span.first_position = position;
    span.block_table = s.blocks;
    span.logits_of = static_cast<int>(span.tokens.size()) - 1;
    return span;
  }

  BlockPool& pool_;
  PrefixCache cache_;
  ModelLimits limits_;
  ContinuousOptions options_;
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> running_;  // in order of admission
  std::vector<Sequence*> seats_;
  std::vector<int> copied_from_;  // sources of this step's copies, held until it is complete
};

}  // namespace servelite
