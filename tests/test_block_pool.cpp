// Block pool: hand-worked scenes, then thousands of random operations against a pool that keeps plain lists.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <servelite/block_pool.hpp>
#include <vector>

using servelite::BlockPool;
using servelite::Error;

TEST_CASE("block pool: sizes that make no sense are refused") {
  CHECK_THROWS_AS(BlockPool(0, 4), Error);
  CHECK_THROWS_AS(BlockPool(4, 0), Error);
  CHECK_THROWS_AS(BlockPool(-1, 4), Error);
}

TEST_CASE("block pool: blocks_for rounds up, at P-1, P, P+1") {
  for (const int P : {1, 4, 16}) {
    const BlockPool pool(8, P);
    CHECK(pool.blocks_for(0) == 0);
    CHECK(pool.blocks_for(1) == 1);
    CHECK(pool.blocks_for(P - 1) == (P == 1 ? 0 : 1));
    CHECK(pool.blocks_for(P) == 1);
    CHECK(pool.blocks_for(P + 1) == 2);
    CHECK(pool.blocks_for(2 * P) == 2);
  }
  CHECK(BlockPool(1, 16).blocks_for(2147483647) == 134217728);  // 2^31 - 1 tokens: no overflow on the way up
}

TEST_CASE("block pool: a fresh pool hands out 0, 1, 2, ... and then says -1") {
  BlockPool pool(5, 4);
  for (int b = 0; b < 5; ++b) CHECK(pool.allocate() == b);
  CHECK(pool.allocate() == -1);
  CHECK(pool.referenced_blocks() == 5);
  pool.check();
}

TEST_CASE("block pool: a block with two owners is free after both have gone") {
  BlockPool pool(2, 4);
  const int b = pool.allocate();
  pool.share(b);
  CHECK(pool.references(b) == 2);
  pool.release(b);
  CHECK(pool.free_blocks() == 1);
  CHECK(pool.referenced_blocks() == 1);
  pool.release(b);
  CHECK(pool.free_blocks() == 2);
  CHECK(pool.referenced_blocks() == 0);
  pool.check();
}

TEST_CASE("block pool: cached blocks wait in the order of their last release, and come back to life") {
  BlockPool pool(3, 4);
  std::vector<int> table;
  for (int i = 0; i < 3; ++i) table.push_back(pool.allocate());
  for (const int b : table) pool.set_cached(b);
  CHECK(pool.oldest_evictable() == -1);  // all in use

  pool.release_table(table);  // 2, 1, 0: the end of a prefix is evicted before its beginning
  CHECK(table.empty());
  CHECK(pool.cached_blocks() == 3);
  CHECK(pool.allocate() == -1);  // evictable is not free
  CHECK(pool.oldest_evictable() == 2);
  pool.share(2);  // revived; released again it is the youngest: 1, 0, 2
  CHECK(pool.oldest_evictable() == 1);
  CHECK(pool.references(2) == 1);
  pool.release(2);
  CHECK(pool.oldest_evictable() == 1);
  pool.clear_cached(1);
  CHECK(pool.oldest_evictable() == 0);
  pool.clear_cached(0);
  CHECK(pool.oldest_evictable() == 2);
  CHECK(pool.free_blocks() == 2);
  CHECK(pool.cached_blocks() == 1);
  pool.check();
}

TEST_CASE("block pool: a block that is no longer cached when its last owner goes is free") {
  BlockPool pool(1, 4);
  const int b = pool.allocate();
  pool.set_cached(b);
  pool.clear_cached(b);  // in use: stays with its owner
  CHECK(pool.references(b) == 1);
  CHECK_FALSE(pool.cached(b));
  pool.release(b);
  CHECK(pool.free_blocks() == 1);
  CHECK(pool.cached_blocks() == 0);
  pool.check();
}

namespace {

/// The same rules with nothing but lists that are searched from end to end.
struct NaivePool {
  std::vector<int> owners;     // one element per reference
  std::vector<int> marked;     // cached, with or without references
  std::vector<int> evictable;  // oldest first
  int n;
  explicit NaivePool(int blocks) : n(blocks) {}

  static bool has(const std::vector<int>& v, int b) { return std::find(v.begin(), v.end(), b) != v.end(); }
  static void drop_one(std::vector<int>& v, int b) {
    const auto it = std::find(v.begin(), v.end(), b);
    if (it != v.end()) v.erase(it);
  }
  bool free(int b) const { return !has(owners, b) && !has(evictable, b); }
  int count_free() const {
    int k = 0;
    for (int b = 0; b < n; ++b) k += free(b);
    return k;
  }
  void share(int b) {
    owners.push_back(b);
    drop_one(evictable, b);
  }
  void release(int b) {
    drop_one(owners, b);
    if (!has(owners, b) && has(marked, b)) evictable.push_back(b);
  }
  void clear(int b) {
    drop_one(marked, b);
    drop_one(evictable, b);
  }
};

}  // namespace

TEST_CASE("block pool: random operations agree with a naive pool, and the counts always add up") {
  for (const int n : {1, 2, 7, 40}) {
    std::mt19937 random(static_cast<unsigned>(n));
    BlockPool pool(n, 4);
    NaivePool naive(n);
    for (int operation = 0; operation < 6000; ++operation) {
      const int b = static_cast<int>(random() % static_cast<unsigned>(n));
      const bool used = NaivePool::has(naive.owners, b);
      switch (random() % 6) {
        case 0:
        case 1: {
          const int got = pool.allocate();
          if (naive.count_free() == 0) {
            REQUIRE(got == -1);
          } else {
            REQUIRE(got >= 0);
            REQUIRE(got < n);
            REQUIRE(naive.free(got));
            naive.owners.push_back(got);
          }
          break;
        }
        case 2:
          if (!naive.free(b)) pool.share(b), naive.share(b);
          break;
        case 3:
          if (used) pool.release(b), naive.release(b);
          break;
        case 4:
          if (used) {
            pool.set_cached(b);
            if (!NaivePool::has(naive.marked, b)) naive.marked.push_back(b);
          }
          break;
        default:
          if (random() % 3 == 0) pool.clear_cached(b), naive.clear(b);
      }
      pool.check();
      REQUIRE(pool.free_blocks() == naive.count_free());
      REQUIRE(pool.cached_blocks() == static_cast<int>(naive.evictable.size()));
      REQUIRE(pool.free_blocks() + pool.cached_blocks() + pool.referenced_blocks() == n);
      REQUIRE(pool.oldest_evictable() == (naive.evictable.empty() ? -1 : naive.evictable.front()));
      for (int k = 0; k < n; ++k) {
        REQUIRE(pool.references(k) == std::count(naive.owners.begin(), naive.owners.end(), k));
        REQUIRE(pool.cached(k) == NaivePool::has(naive.marked, k));
      }
    }
    for (const int b : std::vector<int>(naive.owners)) pool.release(b);
    for (int b = 0; b < n; ++b) pool.clear_cached(b);
    CHECK(pool.free_blocks() == n);  // nothing leaked
    pool.check();
  }
}
