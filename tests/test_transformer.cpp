// The forward pass: close to the double-precision reference (tests/reference.hpp), and bit for bit equal to
// itself however the same positions are cut into steps, blocks, batches and threads.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <servelite/gguf_write.hpp>
#include <servelite/transformer.hpp>
#include <span>
#include <string>
#include <vector>

#include "reference.hpp"

using namespace servelite;
using namespace servelite::test;

namespace {

using Ints = std::vector<int>;
using Logits = std::vector<std::vector<float>>;  // [positions][V]

std::mt19937 dice(11);
int below(int n) { return static_cast<int>(dice() % static_cast<unsigned>(n)); }

Ints random_tokens(int n, int vocabulary) {
  Ints t;
  while (static_cast<int>(t.size()) < n) t.push_back(below(vocabulary));
  return t;
}

Ints shuffled_table(int blocks) {
  Ints table(static_cast<size_t>(blocks));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), dice);
  return table;
}

/// tokens[begin, end) as a span that wants the last one's logits.
Span span_of(const Ints& tokens, int begin, int end, const Ints& table) {
  Span s;
  s.tokens.assign(tokens.begin() + begin, tokens.begin() + end);
  s.first_position = begin, s.block_table = table, s.logits_of = end - begin - 1;
  return s;
}

Logits run(Transformer& transformer, const StepBatch& step) {
  std::vector<float> flat;
  transformer.run(step, flat);
  Logits rows;
  const ptrdiff_t V = transformer.vocabulary();
  for (auto at = flat.begin(); at != flat.end(); at += V) rows.emplace_back(at, at + V);
  return rows;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// The plainest way: one token per step, one thread, blocks in order. What all others are compared with.
Logits one_by_one(const Model& model, const Ints& tokens, int block_size = 16) {
  const int n = static_cast<int>(tokens.size()), blocks = (n + block_size - 1) / block_size;
  Transformer transformer(model, blocks, block_size, 1);
  Ints table(static_cast<size_t>(blocks));
  std::iota(table.begin(), table.end(), 0);
  Logits logits;
  for (int p = 0; p < n; ++p)
    logits.push_back(run(transformer, {{span_of(tokens, p, p + 1, table)}, {}}).at(0));
  return logits;
}

/// Cuts [0, n) at random places, at most `most` apart. Begins with 0, ends with n.
Ints random_cuts(int n, int most) {
  Ints cuts = {0};
  while (cuts.back() < n) cuts.push_back(std::min(n, cuts.back() + 1 + below(most)));
  return cuts;
}

}  // namespace

TEST_CASE("transformer: logits of every position agree with the double-precision reference") {
  int shapes = 0;
  for (const int together : {1, 2, 4})  // query heads per KV head
    for (const int kv_heads : {1, 2})
      for (const int head_width : {16, 32}) {
        Shape s;
        s.heads = together * kv_heads, s.kv_heads = kv_heads, s.head_width = head_width;
        s.tied = shapes % 2 == 0, s.layers = 1 + shapes % 3, s.width = shapes % 2 ? 48 : 32;
        s.vocabulary = 263 + 7 * shapes, s.rope_base = shapes % 4 == 3 ? 1e6f : 1e4f;
        s.seed = static_cast<unsigned>(++shapes);
        CAPTURE(together);
        CAPTURE(kv_heads);
        CAPTURE(head_width);
        const Gguf file = file_of(s);
        const Model model = read_model(file);
        const Ints tokens = random_tokens(70, s.vocabulary);
        const Logits fast = one_by_one(model, tokens);
        const Rows exact = reference_logits(reference_from(file), tokens);
        double worst = 0, spread = 0;
        for (size_t p = 0; p < tokens.size(); ++p) {
          double largest = 0, error = 0;
          for (size_t v = 0; v < exact[p].size(); ++v) {
            largest = std::max(largest, std::abs(exact[p][v]));
            error = std::max(error, std::abs(exact[p][v] - static_cast<double>(fast[p][v])));
          }
          worst = std::max(worst, error / largest), spread = std::max(spread, largest);
        }
        CHECK(worst < 1e-4);
        CHECK(spread > 0.5);  // logits that are all nearly nothing would prove nothing
      }
}

TEST_CASE("transformer: the reference tells wrong models apart") {
  // Each change below is one that a wrong implementation would amount to; 1e-4 must be far from enough.
  const Gguf file = file_of({.layers = 2, .heads = 4, .kv_heads = 2, .seed = 5});
  const Ints tokens = random_tokens(20, 263);
  const ReferenceLlama right = reference_from(file);
  const Rows expected = reference_logits(right, tokens);
  const auto far_off = [&](const ReferenceLlama& wrong) {
    const Row logits = reference_logits(wrong, tokens).back();
    double error = 0, largest = 0;
    for (size_t v = 0; v < logits.size(); ++v) {
      largest = std::max(largest, std::abs(expected.back()[v]));
      error = std::max(error, std::abs(logits[v] - expected.back()[v]));
    }
    return error > 0.01 * largest;
  };
  ReferenceLlama base = right, swapped = right, untied = right, heads = right;
  base.rope_base = 1e6;
  std::swap(swapped.layers[0].gate, swapped.layers[0].up);
  untied.output = untied.embedding;
  std::rotate(heads.layers[1].k.begin(), heads.layers[1].k.begin() + 16, heads.layers[1].k.end());
  CHECK_FALSE(far_off(right));
  CHECK(far_off(base));
  CHECK(far_off(swapped));
  CHECK(far_off(untied));
  CHECK(far_off(heads));
}

TEST_CASE("transformer: token by token, at once or in chunks, in any blocks, on any threads: the same bits") {
  for (const int kv_heads : {1, 4}) {
    const Model model = read_model(file_of({.heads = 4, .kv_heads = kv_heads, .seed = 7}));
    const int n = 90;
    const Ints tokens = random_tokens(n, 263);
    const Logits expected = one_by_one(model, tokens);
    for (const int P : {1, 4, 16, 64})
      for (const int threads : {1, 2, 3}) {
        CAPTURE(kv_heads);
        CAPTURE(P);
        CAPTURE(threads);
        Transformer transformer(model, 128 / P + 3, P, threads);
        for (const int most : {1, 5, 40, n}) {  // the same memory again and again: it is full of old numbers
          CAPTURE(most);
          const Ints table = shuffled_table(128 / P + 3);
          const Ints cuts = most == n ? Ints{0, n} : random_cuts(n, most);
          bool equal = true;
          for (size_t i = 1; i < cuts.size(); ++i) {
            const Logits got = run(transformer, {{span_of(tokens, cuts[i - 1], cuts[i], table)}, {}});
            equal = equal && got.size() == 1 && same_bits(got[0], expected[static_cast<size_t>(cuts[i]) - 1]);
          }
          CHECK(equal);
        }
        // All positions in one step, each a span of its own: it reads what the others of this step write.
        StepBatch each;
        const Ints table = shuffled_table(128 / P + 3);
        for (int p = 0; p < n; ++p) each.spans.push_back(span_of(tokens, p, p + 1, table));
        const Logits got = run(transformer, each);
        REQUIRE(got.size() == expected.size());
        CHECK(std::equal(got.begin(), got.end(), expected.begin(), same_bits));
      }
  }
}

TEST_CASE("transformer: alone or among others, whatever they do: the same bits") {
  const Model model = read_model(file_of({.heads = 4, .kv_heads = 2, .tied = true, .seed = 8}));
  const int n = 6, blocks = 4 * 160 / 4;
  std::vector<Ints> tokens;
  std::vector<Logits> expected;
  for (int i = 0; i < n; ++i) {
    tokens.push_back(random_tokens(10 + 12 * i, 263));
    expected.push_back(one_by_one(model, tokens.back()));
  }
  for (const int threads : {1, 2, 3})
    for (int round = 0; round < 4; ++round) {
      CAPTURE(threads);
      Transformer transformer(model, blocks, 4, threads);
      const Ints all = shuffled_table(blocks);
      std::vector<Ints> tables;
      int given = 0;
      for (const Ints& t : tokens) {
        const int need = (static_cast<int>(t.size()) + 3) / 4;
        tables.emplace_back(all.begin() + given, all.begin() + given + need);
        given += need;
      }
      Ints done(static_cast<size_t>(n), 0);
      bool equal = true, finished = false;
      while (!finished) {  // each step: some of the sequences, some tokens of each, not all want logits
        StepBatch step;
        std::vector<std::pair<size_t, size_t>> wanted;  // sequence, position
        finished = true;
        for (size_t i = 0; i < tokens.size(); ++i) {
          const int left = static_cast<int>(tokens[i].size()) - done[i];
          if (left > 0) finished = false;
          if (left == 0 || below(3) == 0) continue;
          const int take = 1 + below(std::min(left, 1 + below(30)));
          Span span = span_of(tokens[i], done[i], done[i] + take, tables[i]);
          done[i] += take;
          if (below(4) == 0)
            span.logits_of = -1;
          else
            span.logits_of = below(take), wanted.emplace_back(i, done[i] - take + span.logits_of);
          step.spans.push_back(span);
        }
        if (step.empty()) continue;
        const Logits got = run(transformer, step);
        REQUIRE(got.size() == wanted.size());
        for (size_t w = 0; w < wanted.size(); ++w)
          equal = equal && same_bits(got[w], expected[wanted[w].first][wanted[w].second]);
      }
      CHECK(equal);
    }
}

TEST_CASE("transformer: padding behind a prompt changes nothing, the answer overwrites it") {
  const Model model = read_model(file_of({.seed = 9}));
  const Ints tokens = random_tokens(40, 263);
  const Logits expected = one_by_one(model, tokens);
  for (const int P : {1, 4, 16, 64}) {
    Transformer transformer(model, 160 / P, P, 2);
    const Ints table = shuffled_table(160 / P);
    Span padded = span_of(tokens, 0, 25, table);
    padded.tokens.resize(39, 6), padded.padding = 14;
    CHECK(same_bits(run(transformer, {{padded}, {}}).at(0), expected[24]));
    for (int p = 25; p < 40; ++p)
      CHECK(same_bits(run(transformer, {{span_of(tokens, p, p + 1, table)}, {}}).at(0),
                      expected[static_cast<size_t>(p)]));
  }
}

TEST_CASE("transformer: blocks shared and copied within one step") {
  // A computes 27 tokens. B agrees on 22 of them, C on 22 of A's and then on 2 more of B's. In one step:
  // B shares A's full blocks and copies the rest from A's next; C shares the same and copies from B's copy.
  const Model model = read_model(file_of({.heads = 4, .kv_heads = 2, .seed = 10}));
  const Ints a = random_tokens(27, 263);
  Ints b(a.begin(), a.begin() + 22), c = b;
  for (int i = 0; i < 9; ++i) b.push_back((a[static_cast<size_t>(22 + i % 5)] + 1 + i) % 263);
  c.insert(c.end(), b.begin() + 22, b.begin() + 24);
  for (int i = 0; i < 5; ++i) c.push_back((b[static_cast<size_t>(24 + i)] + 1) % 263);
  const Logits alone_a = one_by_one(model, a), alone_b = one_by_one(model, b), alone_c = one_by_one(model, c);
  for (const int P : {4, 16, 64})
    for (const int threads : {1, 2, 3}) {
      CAPTURE(P);
      CAPTURE(threads);
      const int each = (32 + P - 1) / P, full = 22 / P;
      const Ints table = shuffled_table(3 * each);
      const auto own = [&](int i) { return Ints(table.begin() + i * each, table.begin() + (i + 1) * each); };
      const Ints table_a = own(0);
      Ints table_b = own(1), table_c = own(2);
      std::copy_n(table_a.begin(), full, table_b.begin());
      std::copy_n(table_a.begin(), full, table_c.begin());
      // With P = 4 positions 20..23 are one block, so C has 4 of them from B; else its 24 tokens lie in B's
      // block.
      const int copied_c = std::min(24 - full * P, P);
      Transformer transformer(model, 3 * each, P, threads);
      const int n_a = static_cast<int>(a.size()), n_b = static_cast<int>(b.size()),
                n_c = static_cast<int>(c.size());
      StepBatch step;
      step.spans = {span_of(a, 0, n_a, table_a), span_of(b, 22, n_b, table_b),
                    span_of(c, full * P + copied_c, n_c, table_c)};
      step.copies = {{table_a[static_cast<size_t>(full)], table_b[static_cast<size_t>(full)], 22 - full * P},
                     {table_b[static_cast<size_t>(full)], table_c[static_cast<size_t>(full)], copied_c}};
      const Logits got = run(transformer, step);
      REQUIRE(got.size() == 3);
      CHECK(same_bits(got[0], alone_a.back()));
      CHECK(same_bits(got[1], alone_b.back()));
      CHECK(same_bits(got[2], alone_c.back()));
    }
}

TEST_CASE("transformer: a step that wants no logits gives none; the context's last position works") {
  const Model model = read_model(file_of({.context = 50, .seed = 12}));
  const Ints tokens = random_tokens(50, 263);
  const Logits expected = one_by_one(model, tokens);
  Transformer transformer(model, 4, 16, 2);
  Span silent = span_of(tokens, 0, 49, {2, 0, 3, 1});
  silent.logits_of = -1;
  CHECK(run(transformer, {{silent}, {}}).empty());
  CHECK(same_bits(run(transformer, {{span_of(tokens, 49, 50, {2, 0, 3, 1})}, {}}).at(0), expected[49]));
}

namespace {

/// Weights big enough to use every kind of tile, of a width that Q8_0 can hold.
Gguf typed_file(DType type) {
  return convert(file_of({.width = 96,
                          .layers = 2,
                          .heads = 6,
                          .kv_heads = 2,
                          .head_width = 32,
                          .feed_forward = 160,
                          .vocabulary = 290,
                          .seed = 77}),
                 type);
}

uint64_t hash_of(const Logits& logits) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const std::vector<float>& row : logits)
    for (const float f : row) hash = (hash ^ std::bit_cast<uint32_t>(f)) * 0x100000001b3ull;
  return hash;
}

}  // namespace

TEST_CASE("transformer: each type of weights has these very bits, on every machine, in every batch") {
  // Golden: computed on the plain lanes at -O1. Any compiler, instruction set and option must give the same.
  Ints tokens;
  for (int i = 0; i < 75; ++i) tokens.push_back((i * i * 7 + 3) % 290);
  for (const auto& entry : std::map<DType, uint64_t>{{DType::f32, 0xa412bf62ffc2a30cu},
                                                     {DType::f16, 0xa61039900265a4f2u},
                                                     {DType::bf16, 0xdf4873c520b4ee0au},
                                                     {DType::q8_0, 0xe4712f1a843b081du}}) {
    const DType type = entry.first;  // not a structured binding: clang 14 cannot capture one in a lambda
    CAPTURE(static_cast<int>(type));
    const Model model = read_model(typed_file(type));
    CHECK(model.layers[1].gate_up.type == type);
    CHECK(model.has_q8() == (type == DType::q8_0));
    const Logits alone = one_by_one(model, tokens);
    CHECK(hash_of(alone) == entry.second);
    for (const int threads : {1, 2, 3})
      for (const int rows :
           {1, 2, 5, 12, 75}) {  // five sequences at once, each cut into chunks of so many rows
        CAPTURE(threads);
        CAPTURE(rows);
        Transformer transformer(model, 50, 8, threads);
        const Ints tables = shuffled_table(50);
        for (int begin = 0; begin < 75; begin += rows) {
          const int end = std::min(75, begin + rows);
          StepBatch step;
          for (int i = 0; i < 5; ++i)
            step.spans.push_back(
                span_of(tokens, begin, end, Ints(tables.begin() + 10 * i, tables.begin() + 10 * i + 10)));
          for (const std::vector<float>& row : run(transformer, step))
            CHECK(same_bits(row, alone[static_cast<size_t>(end - 1)]));
        }
      }
  }
}

TEST_CASE(
    "transformer: 16-bit weights are exact, 8-bit ones near, compared with the reference on the file's "
    "numbers") {
  const Ints tokens = random_tokens(40, 290);
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8_0}) {
    CAPTURE(static_cast<int>(type));
    const Gguf file = typed_file(type);
    const Logits fast = one_by_one(read_model(file), tokens);
    const Rows exact = reference_logits(reference_from(file), tokens);
    double worst = 0;
    for (size_t p = 0; p < tokens.size(); ++p) {
      double largest = 0, error = 0;
      for (size_t v = 0; v < exact[p].size(); ++v) {
        largest = std::max(largest, std::abs(exact[p][v]));
        error = std::max(error, std::abs(exact[p][v] - static_cast<double>(fast[p][v])));
      }
      worst = std::max(worst, error / largest);
    }
    MESSAGE("worst error " << worst);
    CHECK(worst < (type == DType::q8_0 ? 0.05 : 1e-4));  // Q8_0: activations are rounded to 8 bits as well
    CHECK((worst > 1e-4) == (type == DType::q8_0));
  }
}

TEST_CASE("transformer: KV memory of no size is refused") {
  const Model model = read_model(file_of(Shape{}));
  CHECK_THROWS_WITH_AS(Transformer(model, 0, 16), doctest::Contains("found 0 blocks of 16"), Error);
  CHECK_THROWS_WITH_AS(Transformer(model, -1, 16), doctest::Contains("found -1 blocks"), Error);
  CHECK_THROWS_WITH_AS(Transformer(model, 4, 0), doctest::Contains("4 blocks of 0"), Error);
  CHECK(Transformer(model, 4, 16).threads() >= 1);
}
