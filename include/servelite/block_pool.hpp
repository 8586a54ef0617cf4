// block_pool.hpp: who holds which page of the KV memory. Bookkeeping only, no floats.
//
// KV memory is cut into blocks (pages) 0..n-1 of P tokens each. A sequence takes one when its tokens
// reach it, so it wastes at most P - 1 slots instead of a full context (Kwon et al. 2023,
// PagedAttention). Its block table says where they lie:
//
//   P = 4, a sequence of 10 tokens, block table [7, 2, 5]
//
//   position      0  1  2  3 | 4  5  6  7 | 8  9
//   block              7     |      2     |   5         position p: block table[p / P]
//   slot          0  1  2  3 | 0  1  2  3 | 0  1  -  -              slot  p % P
//
// A block is in one of three states, and the three counts always add up to n:
//
//                  allocate()                     release() of the last reference, when cached
//     free  ----------------------->  referenced  -------------------->  cached, no reference
//       ^                             |        ^                         |            |
//       +-----------------------------+        +------- share() ---------+            |
//       |   release() of the last reference, when not cached                          |
//       +------------------------- clear_cached() ------------------------------------+
//
// Rules of use:
// - Every allocate() and share() is paid back by one release(). Who breaks this meets an assertion.
// - Whether a block is cached is the prefix cache's decision (prefix_cache.hpp); only it calls
//   set_cached() and clear_cached().
// - Release a table from its last block to its first (release_table does). The least recently
//   released block is evicted first, and a prefix must outlive what continues it.
//
// Chapter: docs/10_side_by_side.md
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "error.hpp"

namespace servelite {

class BlockPool {
 public:
  BlockPool(int block_count, int block_size) : block_size_(block_size) {
    if (block_count < 1 || block_size < 1)
      fail("block pool: expected at least one block of one token, found ", block_count, " blocks of ",
           block_size);
    blocks_.resize(static_cast<size_t>(block_count));
    // A stack whose top is block 0: a fresh pool hands out 0, 1, 2, ..., so slabs are consecutive.
    for (int b = block_count - 1; b >= 0; --b) free_.push_back(b);
  }

  /// A free block, now with one reference, or -1 if none is free (evicting is PrefixCache's job).
  int allocate() {
    if (free_.empty()) return -1;
    const int b = free_.back();
    free_.pop_back();
    at(b).references = 1;
    ++referenced_;
    return b;
  }

  /// One more reference; a cached block without any comes back to life.
  void share(int b) {
    assert((at(b).references > 0 || at(b).cached) && "a free block cannot be shared");
    if (at(b).references++ > 0) return;
    evictable_.erase({at(b).released_at, b});
    ++referenced_;
  }

  /// One reference less. The last one gone, a cached block waits for reuse or eviction, others are free.
  void release(int b) {
    assert(at(b).references > 0 && "a block is released once for each reference");
    if (--at(b).references > 0) return;
    --referenced_;
    if (at(b).cached) {
      at(b).released_at = ++releases_;
      evictable_.insert({at(b).released_at, b});
    } else {
      free_.push_back(b);
    }
  }

  /// Gives back all of a sequence's references, the last block first, and empties the table.
  void release_table(std::vector<int>& table) {
    for (; !table.empty(); table.pop_back()) release(table.back());
  }

  /// The prefix cache knows what this block holds: keep it when its last reference goes.
  void set_cached(int b) {
    assert(at(b).references > 0 && "only a block in use can become cached");
    at(b).cached = true;
  }

  /// The prefix cache has forgotten the block: free now, if nobody refers to it.
  void clear_cached(int b) {
    if (at(b).cached && at(b).references == 0) {
      evictable_.erase({at(b).released_at, b});
      free_.push_back(b);
    }
    at(b).cached = false;
  }

  /// The cached block whose last reference went longest ago, or -1.
  int oldest_evictable() const { return evictable_.empty() ? -1 : evictable_.begin()->second; }

  int size() const { return static_cast<int>(blocks_.size()); }
  int block_size() const { return block_size_; }
  int free_blocks() const { return static_cast<int>(free_.size()); }
  int cached_blocks() const {
    return static_cast<int>(evictable_.size());
  }  ///< only those without a reference
  int referenced_blocks() const { return referenced_; }
  int references(int b) const { return at(b).references; }
  bool cached(int b) const { return at(b).cached; }  ///< with or without references

  /// How many blocks hold this many tokens: ceil(tokens / P).
  int blocks_for(int tokens) const { return tokens / block_size_ + (tokens % block_size_ > 0 ? 1 : 0); }

  /// Throws Error with the rule that does not hold. For tests: O(n log n).
  void check() const {
    const int sum = free_blocks() + cached_blocks() + referenced_blocks();
    if (sum != size()) fail("block pool: free + cached + referenced must be ", size(), ", found ", sum);
    std::vector<bool> listed(blocks_.size());
    for (const int b : free_) {
      if (listed[static_cast<size_t>(b)]) fail("block pool: block ", b, " is free twice");
      if (at(b).references != 0 || at(b).cached)
        fail("block pool: free block ", b, " is referenced or cached");
      listed[static_cast<size_t>(b)] = true;
    }
    int referenced = 0;
    for (int b = 0; b < size(); ++b) {
      if (at(b).references < 0) fail("block pool: block ", b, " has ", at(b).references, " references");
      if (at(b).references > 0) ++referenced;
      const bool evictable = evictable_.count({at(b).released_at, b}) > 0;
      if (evictable != (at(b).references == 0 && at(b).cached))
        fail("block pool: exactly the cached blocks without a reference are evictable, block ", b,
             " is wrong");
    }
    if (referenced != referenced_)
      fail("block pool: ", referenced, " blocks have references, counted are ", referenced_);
  }

 private:
  struct Block {
    int references = 0;
    bool cached = false;
    uint64_t released_at = 0;  // when its last reference went, in releases; its place in evictable_
  };
  Block& at(int b) {
    assert(b >= 0 && b < size());
    return blocks_[static_cast<size_t>(b)];
  }
  const Block& at(int b) const {
    assert(b >= 0 && b < size());
    return blocks_[static_cast<size_t>(b)];
  }

  int block_size_;
  std::vector<Block> blocks_;
  std::vector<int> free_;                         // a stack
  std::set<std::pair<uint64_t, int>> evictable_;  // (released_at, block), oldest first
  int referenced_ = 0;                            // blocks with at least one reference
  uint64_t releases_ = 0;                         // the clock of released_at
};

}  // namespace servelite
