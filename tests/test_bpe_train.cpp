// The vocabulary trainer: a tiny corpus worked out by hand, what must never merge, determinism.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "../models/bpe_train.hpp"

using namespace servelite;

namespace {

constexpr int kFirstCharacter = 263, kFirstMerge = 263 + 1 + 94;  // the blank, then '!' to '~'

/// With _ for the blank sign.
std::string shown(std::string s) {
  for (size_t at; (at = s.find(kBlank)) != std::string::npos;) s.replace(at, kBlank.size(), "_");
  return s;
}

std::vector<std::string> merges_of(const Vocabulary& v) {
  std::vector<std::string> out;
  for (size_t i = kFirstMerge; i < v.tokens.size(); ++i) out.push_back(shown(v.tokens[i]));
  return out;
}

std::vector<std::string> merges(const std::vector<std::string>& texts, int n) {
  return merges_of(train_bpe(texts, kFirstMerge + n));
}

using Words = std::vector<std::string>;

/// The vocabulary of all merges the texts have.
Vocabulary train_to_the_end(const std::vector<std::string>& texts) {
  Vocabulary v = train_bpe(texts, kFirstMerge);
  for (int n = 1;; ++n) try {
      v = train_bpe(texts, kFirstMerge + n);
    } catch (const Error&) {
      return v;
    }
}

}  // namespace

TEST_CASE("bpe: the fixed part of the vocabulary") {
  const Vocabulary v = train_bpe({}, kFirstMerge);
  REQUIRE(v.tokens.size() == size_t{kFirstMerge});
  const Words head = {"<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"};
  for (size_t i = 0; i < head.size(); ++i) {
    CHECK(v.tokens[i] == head[i]);
    CHECK(v.types[i] == (i == 0 ? TokenType::unknown : TokenType::control));
  }
  CHECK(v.unk == 0);
  CHECK(v.bos == 1);
  CHECK(v.eos == 6);
  CHECK(v.tokens[7] == "<0x00>");
  CHECK(v.tokens[7 + 0xAF] == "<0xAF>");
  CHECK(v.tokens[262] == "<0xFF>");
  for (size_t i = 7; i < 263; ++i) CHECK(v.types[i] == TokenType::byte);
  CHECK(v.tokens[kFirstCharacter] == kBlank);
  for (int c = '!'; c <= '~'; ++c)
    CHECK(v.tokens[static_cast<size_t>(kFirstCharacter + 1 + c - '!')] ==
          std::string(1, static_cast<char>(c)));
  for (size_t i = kFirstCharacter; i < kFirstMerge; ++i) CHECK(v.types[i] == TokenType::normal);
  CHECK_NOTHROW(Tokenizer{v});
}

TEST_CASE("bpe: a tiny corpus by hand") {
  // Words: _low twice, _lower, _new, _newer. Of equal counts the first pair in byte order, and the blank sign
  // (bytes E2 96 81) comes after all letters.
  //   _ l 3, l o 3, o w 3               -> lo, then low, then _low
  //   e r 2, e w 2, n e 2, _ n 2, w e 1 -> er; then (ew 2, ne 2, _n 2) ew; then (n ew 2, _n 2) new; then _new
  //   _low er 1, _new er 1              -> _lower, then _newer; then nothing is left
  const Words texts = {"low low lower", "new newer"};
  CHECK(merges(texts, 9) == Words{"lo", "low", "_low", "er", "ew", "new", "_new", "_lower", "_newer"});
  CHECK_THROWS_AS(train_bpe(texts, kFirstMerge + 10), Error);
  const Vocabulary v = train_bpe(texts, kFirstMerge + 9);
  for (int rank = 1; rank <= 9; ++rank)
    CHECK(v.scores[static_cast<size_t>(kFirstMerge + rank - 1)] == -static_cast<float>(rank));
  for (size_t i = kFirstCharacter; i < kFirstMerge; ++i) CHECK(v.scores[i] < -9.0f);  // below all merges
  for (const TokenType t : std::vector(v.types.begin() + kFirstMerge, v.types.end()))
    CHECK(t == TokenType::normal);

  const Tokenizer t(v);
  CHECK(t.encode("low lower newer") == std::vector<int>{t.id_of(std::string(kBlank) + "low"),
                                                        t.id_of(std::string(kBlank) + "lower"),
                                                        t.id_of(std::string(kBlank) + "newer")});
}

TEST_CASE("bpe: frequency decides before byte order, and counts whole texts") {
  CHECK(merges({"ab zz zz"}, 1) == Words{"zz"});  // zz 2, _z 2, ab 1, _a 1; "z" is before the blank sign
  CHECK(merges({"ab", "ab", "ab zz zz"}, 1) == Words{"ab"});
  CHECK(merges({"aaaa"}, 2) == Words{"aa", "aaaa"});  // aa twice from the left, then both together
}

TEST_CASE("bpe: digits, punctuation, newlines and capitals inside a word never merge; words neither") {
  const std::string text =
      "The THE MacDonald x1 12 34 1234 don't a-b end. (see) two\nlines caf\xC3\xA9 tab\there end. 7up up7 "
      "A.B THE";
  const Vocabulary v = train_to_the_end({text, text, text});
  const Words all = merges_of(v);
  CHECK(all.size() > 20);
  for (const std::string& token : all) {
    CAPTURE(token);
    const size_t start = token[0] == '_' ? 1 : 0;
    for (size_t i = 0; i < token.size(); ++i) {
      const char c = token[i];
      const bool lower = c >= 'a' && c <= 'z', upper = c >= 'A' && c <= 'Z';
      CHECK((lower || (c == '_' && i == 0) || (upper && i == start)));
    }
  }
  const auto has = [&](const char* token) { return std::count(all.begin(), all.end(), token) == 1; };
  CHECK(has("_The"));
  CHECK(has("_T"));  // of THE too
  CHECK(has("_end"));
  CHECK(has("see"));  // after a bracket: no blank
  CHECK(has("lines"));
  CHECK(has("up"));
  CHECK_FALSE(has("_see"));
  CHECK(has("onald"));

  const Tokenizer t(v);
  const auto pieces = [&](const std::string& s) {
    Words out;
    for (const int id : t.encode(s)) out.push_back(shown(t.vocabulary().tokens[static_cast<size_t>(id)]));
    return out;
  };
  CHECK(pieces("1234") == Words{"_", "1", "2", "3", "4"});
  CHECK(pieces("THE") == Words{"_T", "H", "E"});
  CHECK(pieces("The end.") == Words{"_The", "_end", "."});
  CHECK(t.decode(t.encode(text)) == text);
}

TEST_CASE("bpe: no token twice, each merge of two tokens before it, and the tokenizer accepts all") {
  std::string text;
  unsigned state = 1;
  for (int word = 0; word < 1500; ++word) {  // words over few letters: many overlaps
    if (word) text += ' ';
    for (unsigned n = 1 + (state >> 16) % 7; n > 0; --n) {
      state = state * 1664525u + 1013904223u;
      text += "aabcd"[(state >> 24) % 5];
    }
    state = state * 1664525u + 1013904223u;
  }
  const Vocabulary v = train_bpe({text}, kFirstMerge + 150);
  std::set<std::string> before(v.tokens.begin(), v.tokens.begin() + kFirstMerge);
  CHECK(before.size() == size_t{kFirstMerge});
  for (size_t i = kFirstMerge; i < v.tokens.size(); ++i) {
    const std::string& token = v.tokens[i];
    bool made = false;
    for (size_t cut = 1; cut < token.size(); ++cut)
      made = made || (before.count(token.substr(0, cut)) && before.count(token.substr(cut)));
    CHECK(made);
    CHECK(before.insert(token).second);
  }
  const Tokenizer t(v);
  const std::vector<int> ids = t.encode(text);
  CHECK(t.decode(ids) == text);
  CHECK(ids.size() * 2 < text.size());  // it does compress
}

TEST_CASE("bpe: deterministic, and the order of the texts does not matter") {
  const Words texts = {"one two three", "three two", "The other one, the other two", "to the one"};
  const Words turned(texts.rbegin(), texts.rend());
  const Vocabulary a = train_bpe(texts, kFirstMerge + 15), b = train_bpe(texts, kFirstMerge + 15);
  CHECK(a.tokens == b.tokens);
  CHECK(a.scores == b.scores);
  CHECK(train_bpe(turned, kFirstMerge + 15).tokens == a.tokens);
  // A smaller vocabulary is the beginning of a larger one.
  const Vocabulary small = train_bpe(texts, kFirstMerge + 6);
  CHECK(std::equal(small.tokens.begin(), small.tokens.end(), a.tokens.begin()));
}

TEST_CASE("bpe: sizes that cannot be filled, or are too small, are refused with the numbers") {
  CHECK_THROWS_WITH_AS(train_bpe({"ab"}, kFirstMerge - 1),
                       "vocabulary: expected a size of at least 358, found 357", Error);
  CHECK_THROWS_AS(train_bpe({"ab"}, -5), Error);
  CHECK(merges({"ab"}, 2) == Words{"ab", "_ab"});
  CHECK_THROWS_WITH_AS(train_bpe({"ab"}, 361),
                       "vocabulary: expected texts with pairs for 361 tokens, found enough for 360", Error);
  CHECK_THROWS_AS(train_bpe({}, kFirstMerge + 1), Error);
  CHECK_THROWS_AS(train_bpe({"", "   ", "1 2 3 ... \n"}, kFirstMerge + 1), Error);  // nothing that may merge
}
