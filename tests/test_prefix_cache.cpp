// Prefix cache: hand-worked scenes, then random serving steps against a naive cache (a flat list of prefixes,
// searched linearly) while the contents of the blocks are simulated as plain arrays of token ids.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <servelite/prefix_cache.hpp>
#include <span>
#include <string>
#include <vector>

using servelite::BlockPool;
using servelite::PrefixCache;
using Tokens = std::vector<int>;

namespace {

Tokens first(const Tokens& tokens, int n) { return Tokens(tokens.begin(), tokens.begin() + n); }

Tokens count_up(int n, int from = 1) {
  Tokens t;
  for (int i = 0; i < n; ++i) t.push_back(from + i);
  return t;
}

uint64_t same_for_all(uint64_t, std::span<const int>) { return 0; }
uint64_t two_values(uint64_t parent, std::span<const int> tokens) {
  return (parent + static_cast<uint64_t>(tokens.back())) % 2;
}

/// Serves a sequence to its end: blocks taken, prefix inserted, blocks given back. Returns its block table.
std::vector<int> serve_and_leave(BlockPool& pool, PrefixCache& cache, const Tokens& tokens) {
  std::vector<int> table;
  while (static_cast<int>(table.size()) < pool.blocks_for(static_cast<int>(tokens.size())))
    table.push_back(cache.allocate());
  cache.insert(tokens, table);
  std::vector<int> given_back = table;
  pool.release_table(given_back);
  cache.check();
  return table;
}

/// How many tokens match; every reference is given back.
int matched(BlockPool& pool, PrefixCache& cache, const Tokens& tokens, int max_tokens) {
  PrefixCache::Match m = cache.match(tokens, max_tokens);
  if (m.copy_from >= 0) pool.release(m.copy_from);
  pool.release_table(m.blocks);
  cache.check();
  return m.tokens();
}
int matched(BlockPool& pool, PrefixCache& cache, const Tokens& tokens) {
  return matched(pool, cache, tokens, static_cast<int>(tokens.size()));
}

}  // namespace

TEST_CASE("prefix cache: the drawing in the header") {
  BlockPool pool(8, 4);
  PrefixCache cache(pool);
  // Own ids in place of the drawing's: 0 [1 2 3 4], 1 [5 6 7 8], 2 [9 9]; 3 duplicates 0, 4 [5 6 0].
  serve_and_leave(pool, cache, {1, 2, 3, 4, 5, 6, 7, 8, 9, 9});
  CHECK(pool.cached_blocks() == 3);
  std::vector<int> table = {cache.allocate(), cache.allocate()};
  REQUIRE(table == std::vector<int>{3, 4});
  cache.insert(Tokens{1, 2, 3, 4, 5, 6, 0}, table);
  pool.release_table(table);
  CHECK(pool.cached_blocks() == 4);  // the duplicate of [1 2 3 4] was not kept, its continuation was

  PrefixCache::Match m = cache.match(Tokens{1, 2, 3, 4, 5, 6, 7, 8, 9, 3}, 9);
  CHECK(m.blocks == std::vector<int>{0, 1});
  CHECK(m.full_tokens == 8);
  CHECK(m.copy_from == 2);
  CHECK(m.copy_tokens == 1);
  CHECK(m.tokens() == 9);
  for (const int b : {0, 1, 2}) CHECK(pool.references(b) == 1);  // the source of the copy is held, too

  const PrefixCache::Match n = cache.match(Tokens{1, 2, 3, 4, 5, 6, 7, 9}, 7);
  CHECK(n.blocks == std::vector<int>{0});
  CHECK(n.copy_from == 1);
  CHECK(n.copy_tokens == 3);
  CHECK(pool.references(0) == 2);

  CHECK(matched(pool, cache, {1, 2, 3, 4, 5, 6, 0, 0}) == 7);  // block 4, below the other's block 0
  CHECK(matched(pool, cache, {2, 3, 4}) == 0);
  CHECK(cache.counters().lookups == 4);
  CHECK(cache.counters().lookup_tokens == 9 + 7 + 8 + 3);
  CHECK(cache.counters().hit_tokens == 9 + 7 + 7 + 0);
}

// CASES: vLLM 3193. A prompt whose blocks are all cached must still leave one position to compute.
TEST_CASE("prefix cache: an entirely cached prompt matches prompt - 1 tokens, at block-1, block, block+1") {
  for (const int P : {1, 4, 16})
    for (const int blocks : {1, 2})
      for (const int extra : {-1, 0, 1}) {
        const int n = blocks * P + extra;
        if (n < 1) continue;
        CAPTURE(P);
        CAPTURE(n);
        BlockPool pool(16, P);
        PrefixCache cache(pool);
        const Tokens prompt = count_up(n);
        CHECK(matched(pool, cache, prompt, n - 1) == 0);
        const std::vector<int> table = serve_and_leave(pool, cache, prompt);

        PrefixCache::Match m = cache.match(prompt, n - 1);
        CHECK(m.tokens() == n - 1);
        CHECK(static_cast<int>(m.blocks.size()) == (n - 1) / P);
        CHECK(m.copy_tokens == (n - 1) % P);
        CHECK(m.copy_from == (m.copy_tokens > 0 ? table[m.blocks.size()] : -1));
        PrefixCache::Match twin = cache.match(prompt, n - 1);  // two at once: the same again
        CHECK(twin.blocks == m.blocks);
        CHECK(twin.copy_from == m.copy_from);
        CHECK(twin.copy_tokens == m.copy_tokens);
        for (PrefixCache::Match* each : {&m, &twin}) {
          if (each->copy_from >= 0) pool.release(each->copy_from);
          pool.release_table(each->blocks);
        }
        CHECK(matched(pool, cache, prompt, n + 100) == n);  // no limit: all of it, and no more
        CHECK(pool.referenced_blocks() == 0);
      }
}

TEST_CASE("prefix cache: nothing asked, nothing found") {
  BlockPool pool(4, 4);
  PrefixCache cache(pool);
  serve_and_leave(pool, cache, count_up(6));
  CHECK(matched(pool, cache, {}, -1) == 0);  // an empty prompt, max_tokens = prompt - 1
  CHECK(matched(pool, cache, count_up(6), 0) == 0);
  serve_and_leave(pool, cache, {});  // and nothing inserted
  CHECK(pool.cached_blocks() == 2);
}

// CASES: Mooncake 4153.
TEST_CASE("prefix cache: divergence at every position of every block") {
  const Tokens stored = count_up(12);
  for (int at = 0; at < 12; ++at) {
    BlockPool pool(8, 4);
    PrefixCache cache(pool);
    serve_and_leave(pool, cache, stored);
    Tokens query = stored;
    query[static_cast<size_t>(at)] = 99;
    PrefixCache::Match m = cache.match(query, 12);
    CHECK(m.tokens() == at);
    CHECK(static_cast<int>(m.blocks.size()) == at / 4);
    CHECK(m.copy_tokens == at % 4);
  }
}

// CASES: openvino.genai 3722. Also equal blocks after different beginnings, with hashes that collide always.
TEST_CASE("prefix cache: colliding hashes never give a wrong block") {
  for (PrefixCache::Hash hash :
       {servelite::hash_tokens, PrefixCache::Hash(same_for_all), PrefixCache::Hash(two_values)}) {
    BlockPool pool(16, 2);
    PrefixCache cache(pool, hash);
    const auto a = serve_and_leave(pool, cache, {1, 1, 5, 5, 7, 7});
    const auto b = serve_and_leave(pool, cache, {2, 2, 5, 5, 8, 8});  // [5 5] again, after another block
    auto shared = [&](const Tokens& query) {
      PrefixCache::Match m = cache.match(query, static_cast<int>(query.size()));
      if (m.copy_from >= 0) pool.release(m.copy_from);
      std::vector<int> blocks = m.blocks;
      pool.release_table(m.blocks);
      return blocks;
    };
    CHECK(shared({1, 1, 5, 5, 7, 7}) == a);
    CHECK(shared({2, 2, 5, 5, 8, 8}) == b);
    CHECK(shared({1, 1, 5, 5, 8, 8}) == std::vector<int>{a[0], a[1]});
    CHECK(shared({2, 2, 5, 5, 7, 7}) == std::vector<int>{b[0], b[1]});
    CHECK(shared({5, 5, 7, 7}).empty());
    CHECK(shared({3, 3}).empty());
    cache.check();
  }
}

// CASES: inference-sim 196. A prompt that is inserted in chunks is known as if inserted at once.
TEST_CASE("prefix cache: a prefix that grows by chunks is one chain, in its own blocks") {
  for (const int chunk : {1, 3, 4, 5, 7}) {
    BlockPool pool(8, 4);
    PrefixCache cache(pool);
    const Tokens prompt = count_up(15);
    std::vector<int> table;
    for (int done = 0; done < 15;) {
      done = std::min(15, done + chunk);
      while (static_cast<int>(table.size()) < pool.blocks_for(done)) table.push_back(cache.allocate());
      cache.insert(first(prompt, done), table);
      cache.check();
      CHECK(matched(pool, cache, prompt) == done);  // neither less nor more than was inserted
    }
    const PrefixCache::Match m = cache.match(prompt, 15);
    CHECK(m.blocks == first(table, 3));
    CHECK(m.copy_from == table[3]);
    CHECK(m.copy_tokens == 3);
  }
}

TEST_CASE("prefix cache: what the owner appended without insert() is not shared") {
  BlockPool pool(4, 4);
  PrefixCache cache(pool);
  const std::vector<int> table = {cache.allocate(), cache.allocate()};
  cache.insert(Tokens{1, 2, 3, 4, 5}, table);
  // The owner goes on to write 6 behind the 5. Asked for 1..6, the cache promises five tokens.
  CHECK(matched(pool, cache, {1, 2, 3, 4, 5, 6}) == 5);
  cache.insert(Tokens{1, 2, 3, 4, 5, 6}, table);
  CHECK(matched(pool, cache, {1, 2, 3, 4, 5, 6}) == 6);
  cache.insert(Tokens{1, 2, 3, 4, 5}, table);  // less than before: what is known stays known
  CHECK(matched(pool, cache, {1, 2, 3, 4, 5, 6}) == 6);
}

TEST_CASE("prefix cache: two sequences with equal tokens in blocks of their own: one is kept") {
  BlockPool pool(8, 4);
  PrefixCache cache(pool);
  std::vector<int> a = {cache.allocate()}, b = {cache.allocate()};
  cache.insert(Tokens{1, 2}, a);
  cache.insert(Tokens{1, 2, 3}, b);  // longer, so it is news
  cache.insert(Tokens{1, 2, 3}, a);  // a has caught up: b says the same already, a's entry goes
  CHECK_FALSE(pool.cached(a[0]));
  CHECK(pool.cached(b[0]));
  cache.insert(Tokens{1, 2, 3, 4}, a);  // a is the first to be full
  cache.insert(Tokens{1, 2, 3, 4}, b);
  CHECK(pool.cached(a[0]));
  CHECK_FALSE(pool.cached(b[0]));
  b.push_back(cache.allocate());
  cache.insert(Tokens{1, 2, 3, 4, 5}, b);  // below a's block, though b has its own
  cache.check();
  CHECK(matched(pool, cache, {1, 2, 3, 4, 5}) == 5);

  // a's block is now a parent without references while its child is in use. Evicted, it takes the child out
  // of the trie, but not away from b.
  pool.release_table(a);
  CHECK(pool.oldest_evictable() == 0);
  for (int i = 0; i < 5; ++i) CHECK(cache.allocate() == 3 + i);
  CHECK(cache.allocate() == 0);
  CHECK(cache.counters().evictions == 2);
  CHECK(pool.references(b[1]) == 1);
  CHECK_FALSE(pool.cached(b[1]));
  CHECK(matched(pool, cache, {1, 2, 3, 4, 5}) == 0);
  cache.check();
  cache.insert(Tokens{1, 2, 3, 4, 5}, b);  // told again, b's own blocks take the place
  CHECK(matched(pool, cache, {1, 2, 3, 4, 5}) == 5);
  pool.release_table(b);
  CHECK(pool.cached_blocks() == 2);
  cache.check();
}

TEST_CASE("prefix cache: the least recently used prefix is evicted first, its end before its beginning") {
  BlockPool pool(6, 2);
  PrefixCache cache(pool);
  const Tokens a = {1, 1, 1, 1, 1, 1}, b = {2, 2, 2, 2, 2, 2};
  serve_and_leave(pool, cache, a);      // blocks 0 1 2
  serve_and_leave(pool, cache, b);      // blocks 3 4 5
  CHECK(matched(pool, cache, a) == 6);  // a is now the more recent one
  CHECK(cache.allocate() == 5);
  CHECK(matched(pool, cache, b, 5) == 4);  // touched again: b's two blocks are the most recent ones
  CHECK(cache.allocate() == 2);
  CHECK(cache.allocate() == 1);
  CHECK(matched(pool, cache, a) == 2);  // and now a's last one is
  CHECK(cache.allocate() == 4);
  CHECK(cache.allocate() == 3);
  CHECK(cache.allocate() == 0);
  CHECK(cache.allocate() == -1);
  CHECK(cache.counters().evictions == 6);
  CHECK(matched(pool, cache, a) == 0);
  CHECK(matched(pool, cache, b) == 0);
}

// nano-vllm 163.
TEST_CASE("prefix cache: an evicted and reused block leaves no stale entry") {
  BlockPool pool(2, 2);
  PrefixCache cache(pool);
  serve_and_leave(pool, cache, {1, 2, 3, 4});
  std::vector<int> table = {cache.allocate(), cache.allocate()};
  CHECK(matched(pool, cache, {1, 2, 3, 4}) == 0);
  cache.insert(Tokens{5, 6, 3, 4}, table);  // the second block has its old tokens again, after another first
  CHECK(matched(pool, cache, {1, 2, 3, 4}) == 0);
  CHECK(matched(pool, cache, {5, 6, 3, 4}) == 4);
  pool.release_table(table);
  cache.check();
}

TEST_CASE("prefix cache: a held copy source can be the block that is missing; giving up the copy frees it") {
  BlockPool pool(2, 4);
  PrefixCache cache(pool);
  serve_and_leave(pool, cache, count_up(7));
  PrefixCache::Match m = cache.match(count_up(7), 6);
  REQUIRE(m.blocks.size() == 1);
  REQUIRE(m.copy_from >= 0);
  CHECK(cache.allocate() == -1);
  pool.release(m.copy_from);
  CHECK(cache.allocate() == m.copy_from);
  CHECK(pool.references(m.blocks[0]) == 1);  // the shared block was never in danger
}

TEST_CASE("prefix cache: clear forgets all and takes nothing from its owner") {
  BlockPool pool(8, 2);
  PrefixCache cache(pool);
  serve_and_leave(pool, cache, {1, 1, 2, 2, 3});
  serve_and_leave(pool, cache, {4, 4, 5, 5});
  const std::vector<int> table = {cache.allocate()};
  cache.insert(Tokens{6, 6}, table);
  cache.clear();
  cache.check();
  CHECK(pool.free_blocks() == 7);
  CHECK(pool.references(table[0]) == 1);
  CHECK(matched(pool, cache, {1, 1, 2}) == 0);
  CHECK(matched(pool, cache, {6, 6}) == 0);
}

TEST_CASE("prefix cache: a chain of very many blocks is evicted without recursion") {
  const int n = 200000;
  BlockPool pool(n, 1);
  PrefixCache cache(pool);
  std::vector<int> table;
  for (int i = 0; i < n; ++i) table.push_back(cache.allocate());
  cache.insert(Tokens(static_cast<size_t>(n), 7), table);
  for (const int b : table) pool.release(b);  // first block first: the worst order
  CHECK(cache.allocate() == table.back());    // the whole chain went with its first block
  CHECK(cache.counters().evictions == n);
  CHECK(pool.free_blocks() == n - 1);
}

namespace {

/// The naive cache: each registered block with its whole prefix, from position 0 to the block's last known
/// token. No trie, no hash. Eviction order comes from a list, too.
struct NaiveCache {
  struct Known {
    Tokens prefix;
    int block;
  };
  std::vector<Known> list;
  int P;
  explicit NaiveCache(int block_size) : P(block_size) {}

  static bool starts_with(const Tokens& long_one, const Tokens& beginning) {
    return beginning.size() <= long_one.size() &&
           std::equal(beginning.begin(), beginning.end(), long_one.begin());
  }
  int level(const Tokens& prefix) const { return (static_cast<int>(prefix.size()) - 1) / P; }

  /// A block that holds the last part of this prefix, `preferred` if it does.
  int holder(const Tokens& prefix, int preferred) const {
    int found = -1;
    for (const Known& k : list)
      if (level(k.prefix) == level(prefix) && starts_with(k.prefix, prefix) &&
          (found < 0 || k.block == preferred))
        found = k.block;
    return found;
  }

  /// Drops a block's entry and all whose prefix goes through it.
  void forget(int block) {
    const auto it = std::find_if(list.begin(), list.end(), [&](const Known& k) { return k.block == block; });
    if (it == list.end()) return;
    const Tokens gone = it->prefix;
    const bool full = static_cast<int>(gone.size()) % P == 0;  // nothing hangs below a partial one
    std::erase_if(list, [&](const Known& k) {
      return k.block == block || (full && level(k.prefix) > level(gone) && starts_with(k.prefix, gone));
    });
  }

  void insert(const Tokens& tokens, const std::vector<int>& table) {
    const int n = static_cast<int>(tokens.size());
    for (int i = 0; i * P < n; ++i) {
      const Tokens prefix = first(tokens, std::min(n, (i + 1) * P));
      const int own = table[static_cast<size_t>(i)], found = holder(prefix, own);
      if (found != own) forget(own);
      if (found < 0) list.push_back({prefix, own});
    }
  }

  /// Tokens of the longest known prefix of `tokens`: any whole blocks, then the longest common beginning.
  int match(const Tokens& tokens, std::vector<int>& blocks) const {
    const int n = static_cast<int>(tokens.size());
    while ((static_cast<int>(blocks.size()) + 1) * P <= n) {
      const int b = holder(first(tokens, (static_cast<int>(blocks.size()) + 1) * P), -1);
      if (b < 0) break;
      blocks.push_back(b);
    }
    const int full = static_cast<int>(blocks.size()) * P;
    int best = full;
    for (const Known& k : list) {
      if (level(k.prefix) != static_cast<int>(blocks.size())) continue;
      int common = 0;
      while (common < n && common < static_cast<int>(k.prefix.size()) &&
             k.prefix[static_cast<size_t>(common)] == tokens[static_cast<size_t>(common)])
        ++common;
      best = std::max(best, common);
    }
    return best;
  }
};

struct Sequence {
  Tokens tokens;
  std::vector<int> table;
};

/// A little server: it schedules, then "computes" by writing token ids into the blocks.
struct Server {
  int P;
  BlockPool pool;
  PrefixCache cache;
  NaiveCache naive;
  std::vector<int> lru;  // the naive pool: unreferenced blocks with an entry, oldest first
  std::vector<Tokens> contents;
  std::vector<Sequence> running;
  long long hits = 0, evictions = 0;

  Server(int blocks, int block_size, PrefixCache::Hash hash)
      : P(block_size),
        pool(blocks, block_size),
        cache(pool, hash),
        naive(block_size),
        contents(static_cast<size_t>(blocks), Tokens(static_cast<size_t>(block_size), -1)) {}

  bool naive_knows(int b) const {
    return std::any_of(naive.list.begin(), naive.list.end(), [&](const auto& k) { return k.block == b; });
  }
  /// Blocks may have left the naive list since: they are no longer evictable, but free.
  void tidy_lru() {
    std::erase_if(lru, [&](int b) { return !naive_knows(b); });
  }

  int allocate() {
    tidy_lru();
    const int free_before = pool.free_blocks();
    const int b = cache.allocate();
    if (free_before == 0) {
      REQUIRE((b < 0) == lru.empty());
      if (b >= 0) {
        naive.forget(lru.front());
        tidy_lru();
        ++evictions;
      }
    }
    if (b >= 0) {
      REQUIRE_FALSE(naive_knows(b));
      std::fill(contents[static_cast<size_t>(b)].begin(), contents[static_cast<size_t>(b)].end(), -1);
    }
    return b;
  }

  void share(int b) { std::erase(lru, b); }
  void release(int b) {
    pool.release(b);
    if (pool.references(b) == 0 && naive_knows(b)) lru.push_back(b);
  }
  void release_all(std::vector<int>& table) {
    for (; !table.empty(); table.pop_back()) release(table.back());
  }
  void insert(const Sequence& s, int n) {
    cache.insert(first(s.tokens, n), s.table);
    naive.insert(first(s.tokens, n), s.table);
  }
  int& slot(const Sequence& s, int position) {
    return contents[static_cast<size_t>(s.table[static_cast<size_t>(position / P)])]
                   [static_cast<size_t>(position % P)];
  }

  struct Todo {
    size_t who;
    int from;
    PrefixCache::Match match;
  };

  /// Match, take blocks, insert before anything is computed. False if no block is left.
  bool admit(const Tokens& prompt, std::vector<Todo>& step) {
    const int n = static_cast<int>(prompt.size());
    std::vector<int> expected_blocks;
    const int expected = naive.match(first(prompt, n - 1), expected_blocks);
    PrefixCache::Match m = cache.match(prompt, n - 1);
    REQUIRE(m.tokens() == expected);
    REQUIRE(m.tokens() < n);
    REQUIRE(m.blocks == expected_blocks);
    REQUIRE(m.full_tokens == static_cast<int>(m.blocks.size()) * P);
    REQUIRE(m.copy_tokens < P);
    REQUIRE((m.copy_from >= 0) == (m.copy_tokens > 0));
    for (const int b : m.blocks) share(b);
    if (m.copy_from >= 0) share(m.copy_from);
    hits += m.tokens();

    Sequence s{prompt, m.blocks};
    while (static_cast<int>(s.table.size()) < pool.blocks_for(n)) {
      const int b = allocate();
      if (b < 0) {
        if (m.copy_from >= 0) release(m.copy_from);
        release_all(s.table);
        return false;
      }
      s.table.push_back(b);
    }
    insert(s, n);
    running.push_back(s);
    step.push_back({running.size() - 1, m.tokens(), m});
    return true;
  }

  /// All rows are written first, then the copies are made in order, as in a layer of the forward pass.
  void compute(const std::vector<Todo>& step) {
    for (const Todo& t : step) {
      const Sequence& s = running[t.who];
      for (int p = t.from; p < static_cast<int>(s.tokens.size()); ++p)
        slot(s, p) = s.tokens[static_cast<size_t>(p)];
    }
    for (const Todo& t : step) {
      if (t.match.copy_from < 0) continue;
      const Tokens& from = contents[static_cast<size_t>(t.match.copy_from)];
      for (int i = 0; i < t.match.copy_tokens; ++i)
        slot(running[t.who], t.match.full_tokens + i) = from[static_cast<size_t>(i)];
    }
    for (const Todo& t : step)
      if (t.match.copy_from >= 0) release(t.match.copy_from);
  }

  /// One more token for a running sequence, if a block can be had; perhaps told to the cache, perhaps later.
  void decode(Sequence& s, int token, bool tell) {
    if (static_cast<int>(s.table.size()) < pool.blocks_for(static_cast<int>(s.tokens.size()) + 1)) {
      const int b = allocate();
      if (b < 0) return;
      s.table.push_back(b);
    }
    s.tokens.push_back(token);
    slot(s, static_cast<int>(s.tokens.size()) - 1) = token;
    if (tell) insert(s, static_cast<int>(s.tokens.size()));
  }

  void leave(size_t who, bool tell) {
    if (tell) insert(running[who], static_cast<int>(running[who].tokens.size()));
    release_all(running[who].table);
    running.erase(running.begin() + static_cast<std::ptrdiff_t>(who));
  }

  void check() {
    cache.check();
    tidy_lru();
    REQUIRE(pool.oldest_evictable() == (lru.empty() ? -1 : lru.front()));
    REQUIRE(pool.cached_blocks() == static_cast<int>(lru.size()));
    for (int b = 0; b < pool.size(); ++b) REQUIRE(pool.cached(b) == naive_knows(b));
    // Every sequence still reads its own tokens: nobody has written into a block that it shares.
    for (const Sequence& s : running)
      for (int p = 0; p < static_cast<int>(s.tokens.size()); ++p)
        if (slot(s, p) != s.tokens[static_cast<size_t>(p)]) FAIL("position ", p, " was overwritten");
    // Every entry tells the truth about its block.
    for (const auto& k : naive.list) {
      const int begin = naive.level(k.prefix) * P;
      for (int p = begin; p < static_cast<int>(k.prefix.size()); ++p)
        if (contents[static_cast<size_t>(k.block)][static_cast<size_t>(p - begin)] !=
            k.prefix[static_cast<size_t>(p)])
          FAIL("block ", k.block, " does not hold what its entry says");
    }
  }
};

}  // namespace

TEST_CASE("prefix cache: random serving agrees with the naive cache, and every block holds what it should") {
  const PrefixCache::Hash hashes[] = {servelite::hash_tokens, same_for_all, two_values};
  unsigned seed = 0;
  for (PrefixCache::Hash hash : hashes)
    for (const int P : {1, 2, 4, 16})
      for (const int blocks : {3, 12, 40}) {
        CAPTURE(P);
        CAPTURE(blocks);
        std::mt19937 random(++seed);
        const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
        Server server(blocks, P, hash);
        std::vector<Tokens> past = {{0}};  // new prompts continue the beginnings of old ones
        for (int operation = 0; operation < 400; ++operation) {
          const int what = below(10);
          if (what < 3) {
            std::vector<Server::Todo> step;
            for (int k = below(3); k >= 0; --k) {  // up to three requests arrive together
              const Tokens& old = past[static_cast<size_t>(below(static_cast<int>(past.size())))];
              Tokens prompt = first(old, below(static_cast<int>(old.size()) + 1));
              for (int more = 1 + below(P + 2); more > 0; --more) prompt.push_back(below(2));
              if (server.pool.blocks_for(static_cast<int>(prompt.size())) > blocks) continue;
              if (server.admit(prompt, step)) past.push_back(prompt);
              if (past.size() > 12) past.erase(past.begin() + below(12));
            }
            server.compute(step);
          } else if (server.running.empty()) {
            continue;
          } else if (what < 8) {
            Sequence& s = server.running[static_cast<size_t>(below(static_cast<int>(server.running.size())))];
            const int token = below(2);
            server.decode(s, token, below(3) == 0);
          } else if (below(60) == 0) {
            server.cache.clear();
            server.naive.list.clear();
          } else {
            const size_t who = static_cast<size_t>(below(static_cast<int>(server.running.size())));
            past.push_back(server.running[who].tokens);
            server.leave(who, below(2) == 0);
          }
          server.check();
        }
        CHECK(server.hits > 0);
        if (blocks < 40 || P < 4) CHECK(server.evictions > 0);
        CHECK(server.cache.counters().hit_tokens == server.hits);
        CHECK(server.cache.counters().evictions >= server.evictions);
        while (!server.running.empty()) server.leave(0, false);
        server.check();
        server.cache.clear();
        CHECK(server.pool.free_blocks() == blocks);  // nothing leaked
        server.cache.check();
      }
}

TEST_CASE("prefix cache: requests that arrive together compute each unique token once") {
  // Six prompts: one system prompt of 21 tokens, then two of their own. P = 4: five full blocks and one
  // token.
  Server server(32, 4, servelite::hash_tokens);
  std::vector<Server::Todo> step;
  int computed = 0;
  for (int user = 0; user < 6; ++user) {
    Tokens prompt = count_up(21);
    prompt.push_back(100 + user);
    prompt.push_back(200 + user);
    REQUIRE(server.admit(prompt, step));
    computed += 23 - step.back().from;
  }
  server.compute(step);
  server.check();
  CHECK(computed == 21 + 6 * 2);
  CHECK(server.pool.referenced_blocks() == 5 + 6);
}
