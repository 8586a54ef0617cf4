// prefix_cache.hpp: which blocks hold which token prefix, so that it is computed and stored once.
//
// K and V of a position depend on that token and all tokens before it. So a block may be shared only
// by sequences that agree from position 0 to the block's end. The cache is therefore a trie with one
// entry per block: the block's tokens, and the block that came before it. P = 4, digits are tokens:
//
//   root --- block 7 [1 2 3 4] --+-- block 2 [5 6 7 8] ----- block 5 [9 9]
//                                +-- block 3 [5 6 0]
//
//   match 1 2 3 4 5 6 7 8 9 3    shares blocks 7 and 2, copies the first token of block 5
//   match 1 2 3 4 5 6 7 9        shares block 7, copies the first three tokens of block 2
//
// A full block is shared by reference: nobody writes to it again. A partly matching one is copied into
// a fresh block, which the new sequence then continues on its own.
//
// Full blocks are found by a chain of hashes, h(block) = hash(h(parent), tokens), and then verified by
// parent and tokens: a collision costs time, never an answer. Partly matching ones are looked for among
// the children of the last shared block.
//
// Rules of use:
// - Allocate through this class, not the pool, so that old entries make room when no block is free.
// - insert() may come before the forward pass that computes the tokens, so that requests of the same step
//   share. That pass must then run; if it cannot, clear() the cache.
// - What match() returns is referenced for the caller, who releases it: `blocks` when the sequence ends,
//   `copy_from` once the copy is made. Released earlier, it could be evicted and overwritten first.
// - If allocate() fails while `copy_from` is held, give up the copy and try again: in a small pool
//   it may be the very block that is missing.
//
// The entry of a sequence's block may hang below another sequence's block, when both computed the same
// tokens on their own and only one was registered. So an entry's parent can be unreferenced, and be
// evicted, while the entry itself is in use: it leaves the trie, its block stays with its owner.
//
// Chapter: docs/10_side_by_side.md
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "block_pool.hpp"
#include "error.hpp"

namespace servelite {

/// Mixes the tokens into the parent's hash one by one: multiply by an odd constant (2^64 / golden ratio),
/// then fold the well-mixed upper half into the lower.
inline uint64_t hash_tokens(uint64_t parent, std::span<const int> tokens) {
  uint64_t h = parent + 1;
  for (const int t : tokens) {
    h = (h ^ static_cast<uint32_t>(t)) * 0x9E3779B97F4A7C15u;
    h ^= h >> 32;
  }
  return h;
}

class PrefixCache {
 public:
  using Hash = uint64_t (*)(uint64_t parent, std::span<const int> tokens);

  struct Match {
    std::vector<int> blocks;  ///< full blocks shared by reference, the first part of a block table
    int full_tokens = 0;      ///< tokens in `blocks`
    int copy_from = -1;       ///< the first copy_tokens tokens of this block match too; -1: none do
    int copy_tokens = 0;      ///< below P
    int tokens() const { return full_tokens + copy_tokens; }
  };

  struct Counters {
    long long lookups = 0;        ///< calls of match(), also for a request that then had to wait
    long long lookup_tokens = 0;  ///< tokens they asked for
    long long hit_tokens = 0;     ///< tokens they found
    long long evictions = 0;      ///< entries lost to make room, those below the evicted block included
  };

  /// Another hash than the usual one is for tests: a bad one must change nothing but the speed.
  explicit PrefixCache(BlockPool& pool, Hash hash = hash_tokens)
      : pool_(pool), hash_(hash), root_(pool.size()), entries_(static_cast<size_t>(pool.size()) + 1) {}

  /// The longest cached prefix of tokens[0 .. max_tokens). Callers pass max_tokens = prompt - 1: the last
  /// position must be computed, its logits choose the next token.
  Match match(std::span<const int> tokens, int max_tokens) {
    tokens = tokens.first(std::min(tokens.size(), static_cast<size_t>(std::max(max_tokens, 0))));
    counters_.lookups += 1;
    counters_.lookup_tokens += static_cast<long long>(tokens.size());

    Match m;
    int last = root_;
    while (tokens.size() >= block_size()) {
      const int next = find(last, tokens.first(block_size()));
      if (next < 0) break;
      m.blocks.push_back(next);
      m.full_tokens += pool_.block_size();
      tokens = tokens.subspan(block_size());
      last = next;
    }
    for (const int child : at(last).children) {
      const int common = common_prefix(at(child).tokens, tokens);
      if (common > m.copy_tokens) m.copy_from = child, m.copy_tokens = common;
    }
    for (const int b : m.blocks) pool_.share(b);
    if (m.copy_from >= 0) pool_.share(m.copy_from);
    counters_.hit_tokens += m.tokens();
    return m;
  }

  /// Tells that position p of `tokens` is, or will be after this step, in block_table[p / P]. Call it again
  /// when a sequence has grown. The caller's blocks are registered where no entry says the same yet.
  void insert(std::span<const int> tokens, std::span<const int> block_table) {
    assert(block_table.size() * block_size() >= tokens.size() && "every token needs its block");
    int parent = root_;
    for (size_t i = 0; i * block_size() < tokens.size(); ++i) {
      const auto part =
          tokens.subspan(i * block_size(), std::min(block_size(), tokens.size() - i * block_size()));
      const int own = block_table[i];
      int known = says(own, parent, part) ? own : find(parent, part);
      if (known != own) forget(own);  // its entry, if any, told of fewer tokens: it has grown
      if (known < 0) {
        add(own, parent, part);
        known = own;
      }
      parent = known;
    }
  }

  /// A free block with one reference; if there is none, the least recently released cached block makes room.
  /// -1 when every block is referenced.
  int allocate() {
    if (pool_.free_blocks() == 0 && pool_.oldest_evictable() >= 0)
      counters_.evictions += forget(pool_.oldest_evictable());
    return pool_.allocate();
  }

  /// Forgets everything. Blocks in use stay with their owners.
  void clear() {
    while (!at(root_).children.empty()) forget(at(root_).children.back());
  }

  const Counters& counters() const { return counters_; }

  /// Throws Error with the rule that does not hold. For tests: walks over all entries.
  void check() const {
    pool_.check();
    size_t full = 0, linked = 0;
    for (int b = 0; b <= root_; ++b) {
      const Entry& e = at(b);
      linked += e.children.size();
      for (const int child : e.children)
        if (at(child).parent != b)
          fail("prefix cache: child ", child, " of block ", b, " names another parent");
      if (b == root_) break;
      if (has_entry(b) != pool_.cached(b))
        fail("prefix cache: block ", b, " must be cached and have an entry, or neither");
      if (!has_entry(b)) {
        if (!e.tokens.empty() || !e.children.empty())
          fail("prefix cache: forgotten block ", b, " left something behind");
        continue;
      }
      linked -= 1;  // every entry is the child of exactly one other
      if (e.tokens.empty() || e.tokens.size() > block_size())
        fail("prefix cache: block ", b, " has ", e.tokens.size(), " tokens");
      if (e.tokens.size() < block_size() && !e.children.empty())
        fail("prefix cache: block ", b, " is not full, yet has children");
      if (e.parent != root_ && !has_entry(e.parent))
        fail("prefix cache: block ", b, " outlived its parent's entry");
      if (e.tokens.size() < block_size()) continue;
      full += 1;
      if (find(e.parent, e.tokens) != b)
        fail("prefix cache: full block ", b, " is not the one that its hash finds");
    }
    if (linked != 0) fail("prefix cache: each entry must be listed by its parent, once");
    if (full != by_hash_.size())
      fail("prefix cache: ", full, " full blocks, but ", by_hash_.size(), " hashes");
  }

 private:
  struct Entry {                // of block b: entries_[b]; the last one is the root, which has no tokens
    int parent = -1;            // block before this one; -1: no entry
    uint64_t hash = 0;          // of the whole prefix that ends here, if the block is full
    std::vector<int> tokens;    // 1 to P of them: what was insert()ed, not what the owner wrote since
    std::vector<int> children;  // blocks that continue this one
  };

  Entry& at(int b) { return entries_[static_cast<size_t>(b)]; }
  const Entry& at(int b) const { return entries_[static_cast<size_t>(b)]; }
  bool has_entry(int b) const { return at(b).parent >= 0; }
  size_t block_size() const { return static_cast<size_t>(pool_.block_size()); }

  static int common_prefix(std::span<const int> a, std::span<const int> b) {
    const size_t n = std::min(a.size(), b.size());
    return static_cast<int>(
        std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin()).first - a.begin());
  }

  /// Does block b, coming after `parent`, begin with these tokens? (P tokens: is it exactly these.)
  bool says(int b, int parent, std::span<const int> tokens) const {
    return at(b).parent == parent && common_prefix(at(b).tokens, tokens) == static_cast<int>(tokens.size());
  }

  /// The block that comes after `parent` and begins with these 1 to P tokens, or -1.
  int find(int parent, std::span<const int> tokens) const {
    if (tokens.size() < block_size()) {
      for (const int child : at(parent).children)
        if (says(child, parent, tokens)) return child;
      return -1;
    }
    // At most one entry says the same, so the order within equal hashes does not matter.
    auto [it, end] = by_hash_.equal_range(hash_(at(parent).hash, tokens));
    for (; it != end; ++it)
      if (says(it->second, parent, tokens)) return it->second;
    return -1;
  }

  void add(int b, int parent, std::span<const int> tokens) {
    Entry& e = at(b);
    e.parent = parent;
    e.tokens.assign(tokens.begin(), tokens.end());
    at(parent).children.push_back(b);
    if (tokens.size() == block_size()) {
      e.hash = hash_(at(parent).hash, tokens);
      by_hash_.emplace(e.hash, b);
    }
    pool_.set_cached(b);
  }

  /// Removes block b's entry and all below it, which nobody could reach any more. Returns how many. Blocks
  /// without a reference become free, others merely stop being shareable. A loop: the trie can be deep.
  int forget(int b) {
    if (!has_entry(b)) return 0;
    std::erase(at(at(b).parent).children, b);
    std::vector<int> doomed = {b};
    for (size_t i = 0; i < doomed.size(); ++i) {
      Entry& e = at(doomed[i]);
      doomed.insert(doomed.end(), e.children.begin(), e.children.end());
      auto [it, end] = by_hash_.equal_range(e.hash);
      it = std::find_if(it, end, [&](const auto& hashed) { return hashed.second == doomed[i]; });
      if (it != end) by_hash_.erase(it);
      e = Entry{};
      pool_.clear_cached(doomed[i]);
    }
    return static_cast<int>(doomed.size());
  }

  BlockPool& pool_;
  Hash hash_;
  int root_;                                        // its place in entries_: one past the last block
  std::vector<Entry> entries_;                      // [blocks + 1]
  std::unordered_multimap<uint64_t, int> by_hash_;  // full blocks; only ever searched, never walked through
  Counters counters_;
};

}  // namespace servelite
