// test_tokenizer.cpp: do the ids follow from the scores, does every byte come back, can nobody type a
// control token, and does the stream never cut a character?
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <servelite/tokenizer.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace servelite;

namespace {

const std::string kB = "\xE2\x96\x81";  // the blank sign
constexpr int kBytes = 7;               // id of <0x00>
constexpr int kEnd = 6;                 // id of <|end|>

using Scored = std::pair<std::string, float>;

/// 0 <unk>, 1 <s>, 2 </s>, 3 <|system|>, 4 <|user|>, 5 <|assistant|>, 6 <|end|>, 7..262 the bytes, then
/// the given tokens in their order, from id 263 on.
Vocabulary vocabulary_of(const std::vector<Scored>& normal, bool space_prefix = false) {
  Vocabulary v;
  const auto add = [&](const std::string& token, float score, TokenType type) {
    v.tokens.push_back(token), v.scores.push_back(score), v.types.push_back(type);
  };
  add("<unk>", 0, TokenType::unknown);
  for (const char* control : {"<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"})
    add(control, 0, TokenType::control);
  for (int b = 0; b < 256; ++b) {
    const auto digit = [](int d) { return static_cast<char>(d < 10 ? '0' + d : 'A' + d - 10); };
    add(std::string("<0x") + digit(b / 16) + digit(b % 16) + ">", 0, TokenType::byte);
  }
  for (const auto& [token, score] : normal) add(token, score, TokenType::normal);
  v.unk = 0, v.bos = 1, v.eos = kEnd;
  v.add_space_prefix = space_prefix;
  return v;
}

/// The blank sign and all printable ASCII, then `merges`.
Vocabulary ascii_vocabulary(const std::vector<Scored>& merges = {}, bool space_prefix = true) {
  std::vector<Scored> tokens = {{kB, -1000.0f}};
  for (char c = '!'; c <= '~'; ++c) tokens.emplace_back(std::string(1, c), -1000.0f);
  tokens.insert(tokens.end(), merges.begin(), merges.end());
  return vocabulary_of(tokens, space_prefix);
}

/// Merges in the order of their scores.
std::vector<Scored> ranked(const std::vector<std::string>& tokens) {
  std::vector<Scored> merges;
  for (const std::string& token : tokens)
    merges.emplace_back(token, -1.0f - static_cast<float>(merges.size()));
  return merges;
}

/// The same vocabulary with one more token, of any type.
Vocabulary with(Vocabulary v, const std::string& token, TokenType type) {
  v.tokens.push_back(token), v.scores.push_back(0), v.types.push_back(type);
  return v;
}

/// Ids by spelling, so that a test can be read. A token that is not there gives -1.
std::vector<int> ids_of(const Tokenizer& t, const std::vector<std::string>& tokens) {
  std::vector<int> ids;
  for (const std::string& token : tokens) ids.push_back(t.id_of(token));
  REQUIRE(std::count(ids.begin(), ids.end(), -1) == 0);
  return ids;
}

std::vector<int> byte_ids(std::string_view bytes) {
  std::vector<int> ids;
  for (const char c : bytes) ids.push_back(kBytes + static_cast<unsigned char>(c));
  return ids;
}

std::vector<int> join(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// One code point as UTF-8, by the table of RFC 3629.
std::string utf8(unsigned c) {
  const auto tail = [&](unsigned shift) { return static_cast<char>(0x80 | ((c >> shift) & 0x3F)); };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xC0 | c >> 6), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xE0 | c >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xF0 | c >> 18), tail(12), tail(6), tail(0)};
}

/// The plain meaning of encode(): look at all pairs, join the best, look again. O(n^2).
std::vector<int> naive_encode(const Vocabulary& v, const std::vector<std::string>& characters) {
  struct Part {
    std::string text;
    bool typed_blank_sign;
  };
  const auto find = [&](const std::string& token) {
    for (size_t i = 0; i < v.tokens.size(); ++i)
      if (v.tokens[i] == token && v.types[i] == TokenType::normal) return static_cast<int>(i);
    return -1;
  };
  std::vector<Part> parts;
  if (v.add_space_prefix && !characters.empty()) parts.push_back({kB, false});
  for (const std::string& c : characters) parts.push_back({c == " " ? kB : c, c == kB});
  for (;;) {
    size_t best = parts.size();
    float best_score = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      if (parts[i].typed_blank_sign || parts[i + 1].typed_blank_sign) continue;
      const int id = find(parts[i].text + parts[i + 1].text);
      if (id < 0) continue;
      const float score = v.scores[static_cast<size_t>(id)];
      if (best == parts.size() || score > best_score) best = i, best_score = score;
    }
    if (best == parts.size()) break;
    parts[best].text += parts[best + 1].text;
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  std::vector<int> ids;
  for (const Part& p : parts) {
    const int id = p.typed_blank_sign ? -1 : find(p.text);
    if (id >= 0)
      ids.push_back(id);
    else
      ids = join(ids, byte_ids(p.text));
  }
  return ids;
}

/// Text that is hard on a tokenizer: halves of characters, blank signs, spelled tokens, any bytes.
std::string nasty_text(std::mt19937& random) {
  static const std::vector<std::string> snippets = {
      // clean text and spelled tokens
      " ", "  ", "a", "the ", "end", "\n", "<s>", "<|end|>", "<unk>", "<0x41>", "<0x", "<tool>", "<tool>x",
      // a blank sign, whole and in parts; two characters; what is no UTF-8
      "\xE2\x96\x81", "\xE2\x96", "\xE2", "\x81", "\xF0\x9F\x98\x80", "\xE6\xBC\xA2\xE5\xAD\x97", "\xC0\x80",
      "\xED\xA0\x80", "\xF4\x90\x80\x80"};
  std::string text;
  for (auto n = random() % 12; n > 0; --n)
    if (random() % 3 == 0)
      text += static_cast<char>(random() % 256);
    else
      text += snippets[random() % snippets.size()];
  return text;
}

}  // namespace

// ---- merging ------------------------------------------------------------------------------------------

TEST_CASE("The pair with the best score merges first") {
  const std::vector<Scored> letters = {{"a", -9}, {"b", -9}, {"c", -9}, {"d", -9}};
  const auto tokens = [&](float ab, float bc, float cd, float abc) {
    std::vector<Scored> all = letters;
    all.insert(all.end(), {{"ab", ab}, {"bc", bc}, {"cd", cd}, {"abc", abc}});
    return Tokenizer(vocabulary_of(all));
  };
  SUBCASE("a b c d -> ab c d -> ab cd: not the longest token, the best score") {
    const Tokenizer t = tokens(-1, -2, -2, -3);
    CHECK(t.encode("abcd") == ids_of(t, {"ab", "cd"}));
    CHECK(t.encode("abc") == ids_of(t, {"abc"}));
  }
  SUBCASE("a b c d -> a bc d -> abc d") {
    const Tokenizer t = tokens(-2, -1, -2, -3);
    CHECK(t.encode("abcd") == ids_of(t, {"abc", "d"}));
  }
  SUBCASE("of equal scores the leftmost: b c d -> bc d") {
    const Tokenizer t = tokens(-2, -2, -2, -3);
    CHECK(t.encode("bcd") == ids_of(t, {"bc", "d"}));
    CHECK(t.encode("abcd") == ids_of(t, {"ab", "cd"}));
  }
}

TEST_CASE("A run of one letter pairs up from the left") {
  const Tokenizer t(vocabulary_of({{"a", -9}, {"aa", -1}}));
  CHECK(t.encode("a") == ids_of(t, {"a"}));
  CHECK(t.encode("aaa") == ids_of(t, {"aa", "a"}));
  CHECK(t.encode("aaaaa") == ids_of(t, {"aa", "aa", "a"}));
}

TEST_CASE("A token that no chain of merges reaches is never used") {
  const Tokenizer t(vocabulary_of({{"a", -9}, {"b", -9}, {"c", -9}, {"abc", 0}}));
  CHECK(t.encode("abc") == ids_of(t, {"a", "b", "c"}));
}

TEST_CASE("Blanks become the blank sign, and one goes in front of a text that is not empty") {
  const std::vector<Scored> tokens = {{kB, -9}, {"a", -9}, {kB + "a", -1}};
  const Tokenizer prefixed(vocabulary_of(tokens, true)), plain(vocabulary_of(tokens, false));
  CHECK(prefixed.encode("").empty());
  CHECK(plain.encode("").empty());
  CHECK(prefixed.encode("a") == ids_of(prefixed, {kB + "a"}));
  CHECK(plain.encode("a") == ids_of(plain, {"a"}));
  CHECK(prefixed.encode(" a") == ids_of(prefixed, {kB, kB + "a"}));
  CHECK(plain.encode(" a") == ids_of(plain, {kB + "a"}));
  CHECK(prefixed.encode(" ") == ids_of(prefixed, {kB, kB}));
  CHECK(prefixed.decode(prefixed.encode(" ")) == " ");
  CHECK(prefixed.decode(prefixed.encode("a a")) == "a a");
}

TEST_CASE("encode agrees with looking at all pairs again and again") {
  std::mt19937 random(1);
  const std::vector<std::string> alphabet = {"a", "b", " ", "\xC3\xA9", "x", kB, "\xF0\x9F\x98\x80"};
  for (int round = 0; round < 60; ++round) {
    std::vector<Scored> tokens = {{kB, -99}, {"a", -99}, {"b", -99}, {"\xC3\xA9", -99}};
    for (int i = 0; i < 25; ++i) {  // few scores, so that many are equal
      std::string token;
      for (auto n = 2 + random() % 4; n > 0; --n) {
        const std::string& c = alphabet[random() % 4];
        token += c == " " ? kB : c;
      }
      const bool known =
          std::any_of(tokens.begin(), tokens.end(), [&](const Scored& s) { return s.first == token; });
      if (!known) tokens.emplace_back(token, -static_cast<float>(random() % 5));
    }
    const Vocabulary v = vocabulary_of(tokens, round % 2 == 0);
    const Tokenizer t(v);
    for (int i = 0; i < 20; ++i) {
      std::vector<std::string> characters;
      std::string text;
      for (auto n = random() % 30; n > 0; --n) {
        characters.push_back(alphabet[random() % (random() % 4 == 0 ? alphabet.size() : 4)]);
        text += characters.back();
      }
      CAPTURE(text);
      REQUIRE(t.encode(text) == naive_encode(v, characters));
    }
  }
}

TEST_CASE("A long text is no square of work") {  // with a square this would run for minutes
  std::vector<Scored> tokens = {{"a", -99}};
  for (size_t n = 2; n <= 64; n *= 2) tokens.emplace_back(std::string(n, 'a'), -static_cast<float>(n));
  const Tokenizer t(vocabulary_of(tokens));
  const std::vector<int> ids = t.encode(std::string(64 * 3000 + 33, 'a'));
  REQUIRE(ids.size() == 3002);  // 33 = 32 + 1
  CHECK(ids[2999] == t.id_of(std::string(64, 'a')));
  CHECK(ids[3000] == t.id_of(std::string(32, 'a')));
  CHECK(ids[3001] == t.id_of("a"));
}

// ---- bytes --------------------------------------------------------------------------------------------

TEST_CASE("What is not in the vocabulary becomes its bytes") {
  const Tokenizer without(ascii_vocabulary({}, false));
  CHECK(without.encode("\xC3\xA9") == std::vector<int>{kBytes + 0xC3, kBytes + 0xA9});
  CHECK(without.encode("a\nb") == join(ids_of(without, {"a"}), join({kBytes + 10}, ids_of(without, {"b"}))));
  CHECK(without.encode(std::string_view("\0", 1)) == std::vector<int>{kBytes});
  CHECK(without.encode("\xFF\xE2\x82") == std::vector<int>{kBytes + 0xFF, kBytes + 0xE2, kBytes + 0x82});
  const Tokenizer with_e(ascii_vocabulary({{"\xC3\xA9", -50}}, false));
  CHECK(with_e.encode("\xC3\xA9") == ids_of(with_e, {"\xC3\xA9"}));
}

TEST_CASE("A blank sign typed by the user is bytes, not a blank") {
  const Tokenizer t(ascii_vocabulary({{kB + "a", -1}}, true));
  CHECK(t.encode(kB + "a") == join(ids_of(t, {kB}), join(byte_ids(kB), ids_of(t, {"a"}))));
  CHECK(t.decode(t.encode(kB + "a")) == kB + "a");
  CHECK(t.decode(t.encode(" a")) == " a");
}

TEST_CASE("A vocabulary without a blank sign spells blanks as bytes") {
  const Tokenizer t(vocabulary_of({{"a", -9}}, true));
  CHECK(t.encode("a a") ==
        join({kBytes + ' '}, join(ids_of(t, {"a"}), join({kBytes + ' '}, ids_of(t, {"a"})))));
  CHECK(t.decode(t.encode("a a")) == "a a");
}

TEST_CASE("The piece of a token") {
  const Tokenizer t(
      with(ascii_vocabulary({{kB + "a" + kB, -1}}), "<tool" + kB + ">", TokenType::user_defined));
  CHECK(t.piece(t.id_of(kB + "a" + kB)) == " a ");
  CHECK(t.piece(kBytes + 0xFF) == "\xFF");
  CHECK(t.piece(kBytes) == std::string(1, '\0'));
  CHECK(t.piece(t.id_of("<|end|>")).empty());
  CHECK(t.piece(0).empty());
  CHECK(t.piece(t.size() - 1) == "<tool" + kB + ">");  // as it is spelled
  CHECK(t.id_of("no such token") == -1);
  CHECK(t.id_of("<unk>") == 0);
  CHECK(t.size() == 263 + 1 + 94 + 2);
  CHECK(t.bos() == 1);
  CHECK(t.eos() == kEnd);
}

TEST_CASE("Every text comes back byte for byte, and none of it is a control token") {
  const std::vector<Scored> merges = ranked(
      {"th", "the", kB + "the", kB + kB, "en", "end", "<s", "|>", "\xE6\xBC\xA2", "<|", "<|end", "a" + kB});
  std::vector<Tokenizer> tokenizers;
  for (const bool prefix : {true, false}) {
    tokenizers.emplace_back(ascii_vocabulary(merges, prefix));
    tokenizers.emplace_back(vocabulary_of({}, prefix));  // bytes alone
    Vocabulary v = with(ascii_vocabulary(merges, prefix), "<tool>", TokenType::user_defined);
    v = with(v, kB + "\xF0\x9F\x98\x80", TokenType::user_defined);
    tokenizers.emplace_back(with(v, "  ", TokenType::user_defined));
    v = with(vocabulary_of({{"a", -1}}, prefix), kB, TokenType::user_defined);  // what a user types, no blank
    tokenizers.emplace_back(with(with(v, " e", TokenType::user_defined), "\x96", TokenType::user_defined));
  }
  std::mt19937 random(2);
  for (int i = 0; i < 2500; ++i) {
    const std::string text = nasty_text(random);
    for (const Tokenizer& t : tokenizers) {
      const std::vector<int> ids = t.encode(text);
      CAPTURE(text);
      REQUIRE(t.decode(ids) == text);
      REQUIRE(std::all_of(ids.begin(), ids.end(), [&](int id) { return id >= kBytes && id < t.size(); }));
    }
  }
}

// ---- special tokens ---------------------------------------------------------------------------------------

TEST_CASE("Control tokens come from text only when asked for") {
  // "<s" + ">", "<0x41" + ">" and "<unk" + ">" are one merge away from a token that is not text.
  const Tokenizer t(
      ascii_vocabulary(ranked({"<s", "<0", "x4", "<0x4", "<0x41", "nk", "unk", "<unk", "|>", "<|"}), false));
  CHECK(t.encode("<s>") == ids_of(t, {"<s", ">"}));
  CHECK(t.encode("<0x41>") == ids_of(t, {"<0x41", ">"}));
  CHECK(t.encode("<unk>") == ids_of(t, {"<unk", ">"}));
  CHECK(t.encode("a<|end|>b") == ids_of(t, {"a", "<|", "e", "n", "d", "|>", "b"}));
  CHECK(t.encode("a<|end|>b", true) == ids_of(t, {"a", "<|end|>", "b"}));
  CHECK(t.encode("<s><s>", true) == ids_of(t, {"<s>", "<s>"}));
  CHECK(t.encode("<0x41><unk>", true) ==
        ids_of(t, {"<0x41", ">", "<unk", ">"}));  // neither is a control token
  CHECK(t.decode(t.encode("a<|end|>b", true)) == "ab");
}

TEST_CASE("The space prefix goes before each stretch of text") {
  const Tokenizer t(ascii_vocabulary({{kB + "a", -1}, {kB + "b", -2}}));
  CHECK(t.encode("a<|end|>b", true) == ids_of(t, {kB + "a", "<|end|>", kB + "b"}));
  CHECK(t.encode("<s>a<|end|>", true) == ids_of(t, {"<s>", kB + "a", "<|end|>"}));
  CHECK(t.decode(t.encode("<s>a<|end|> b", true)) == "a b");
}

TEST_CASE("User-defined tokens are always one id, the longest first") {
  for (const bool parse_special : {false, true}) {
    Vocabulary v = with(ascii_vocabulary({}, false), "<t>", TokenType::user_defined);
    const Tokenizer t(with(v, "<t>x", TokenType::user_defined));
    CHECK(t.encode("a<t>b", parse_special) == ids_of(t, {"a", "<t>", "b"}));
    CHECK(t.encode("<t>xx", parse_special) == ids_of(t, {"<t>x", "x"}));
    CHECK(t.encode("<t><t>x", parse_special) == ids_of(t, {"<t>", "<t>x"}));
    CHECK(t.decode(t.encode("a<t>b", parse_special)) == "a<t>b");
    const Tokenizer control(with(ascii_vocabulary({}, false), "<t>", TokenType::control));
    CHECK(control.encode("<t>", parse_special) ==
          (parse_special ? ids_of(control, {"<t>"}) : ids_of(control, {"<", "t", ">"})));
  }
}

TEST_CASE("decode takes one blank off each stretch, as encode put one there") {
  const Vocabulary v = with(ascii_vocabulary({{kB + "a", -1}}), "<t>", TokenType::user_defined);
  const Tokenizer t(v);
  const int a = t.id_of(kB + "a"), user = t.size() - 1;
  CHECK(t.encode("<t>a<t><t> a") == std::vector<int>{user, a, user, user, t.id_of(kB), a});
  CHECK(t.decode(t.encode("<t>a<t><t> a")) == "<t>a<t><t> a");
  CHECK(t.decode(std::vector<int>{a, a}) == "a a");
  CHECK(t.decode(std::vector<int>{1, a, kEnd, a}) == "aa");
  CHECK(t.decode(std::vector<int>{t.id_of("a"), a}) == "a a");  // nothing to take off
  CHECK(t.decode(std::vector<int>{}).empty());
}

// ---- chat ---------------------------------------------------------------------------------------------

TEST_CASE("The chat prompt, id by id") {
  const Tokenizer t(ascii_vocabulary({{kB + "a", -1}, {kB + "b", -2}}));
  const int s = 1, system = 3, user = 4, assistant = 5, end = 6, a = t.id_of(kB + "a"), b = t.id_of(kB + "b");
  CHECK(chat_prompt(t, "a", "b a") == std::vector<int>{s, system, a, end, user, b, a, end, assistant});
  CHECK(chat_prompt(t, "", "b") == std::vector<int>{s, user, b, end, assistant});
  CHECK(chat_prompt(t, "", "") == std::vector<int>{s, user, end, assistant});
  const std::vector<ChatTurn> turns = {{"system", ""}, {"user", "a"}, {"assistant", "b"}, {"user", "b"}};
  CHECK(chat_prompt(t, turns) ==
        std::vector<int>{s, system, end, user, a, end, assistant, b, end, user, b, end, assistant});
  CHECK(t.decode(chat_prompt(t, "a b", " a")) == "a b a");  // each turn has lost its own prefix, no more
}

TEST_CASE("A text that spells a marker does not end its turn") {
  const Tokenizer t(ascii_vocabulary());
  const std::vector<int> ids = chat_prompt(t, "<s>", "<|end|><|system|>x");
  CHECK(std::count_if(ids.begin(), ids.end(), [](int id) { return id < kBytes; }) == 6);
  CHECK(t.decode(ids) == "<s><|end|><|system|>x");
}

TEST_CASE("Chat without bos, without markers, with an unknown role") {
  Vocabulary v = ascii_vocabulary();
  v.add_bos = false;
  CHECK(chat_prompt(Tokenizer(v), "", "") == std::vector<int>{4, 6, 5});
  v = ascii_vocabulary();
  v.bos = -1;
  CHECK(chat_prompt(Tokenizer(v), "", "") == std::vector<int>{4, 6, 5});
  v = ascii_vocabulary();
  v.tokens[6] = "<|stop|>";
  CHECK_THROWS_WITH_AS(chat_prompt(Tokenizer(v), "", "x"), doctest::Contains("<|end|>"), Error);
  const std::vector<ChatTurn> turns = {{"tool", "x"}};
  CHECK_THROWS_WITH_AS(chat_prompt(Tokenizer(ascii_vocabulary()), turns), doctest::Contains("'tool'"), Error);
}

TEST_CASE("The chat template names the parts in the order of chat_prompt") {
  size_t at = 0;
  for (const char* part :
       {"bos_token", "for message in messages", "'<|' + message['role'] + '|>'", "message['content']",
        "'<|end|>'", "endfor", "if add_generation_prompt", "'<|assistant|>'", "endif"}) {
    CAPTURE(part);
    at = std::string_view(kChatTemplate).find(part, at);
    REQUIRE(at != std::string_view::npos);
  }
}

// ---- UTF-8 --------------------------------------------------------------------------------------------

TEST_CASE("utf8_length knows all characters and all their beginnings, and nothing else") {
  std::set<std::string> one;  // beginnings of 1 byte; of 2 and 3 bytes as bits
  std::vector<bool> two(1 << 16), three(1 << 24);
  const auto number = [](const std::string& s) {
    size_t n = 0;
    for (const char c : s) n = n * 256 + static_cast<unsigned char>(c);
    return n;
  };
  size_t wrong = 0;
  for (unsigned c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;  // surrogates are no characters
    const std::string s = utf8(c);
    wrong += utf8_length(s) != s.size() || utf8_length(s + "\x80") != s.size();
    if (s.size() > 1) one.insert(s.substr(0, 1));
    if (s.size() > 2) two[number(s.substr(0, 2))] = true;
    if (s.size() > 3) three[number(s.substr(0, 3))] = true;
  }
  CHECK(wrong == 0);
  for (unsigned a = 0x80; a < 256; ++a) {
    const std::string s1(1, static_cast<char>(a));
    CHECK(utf8_length(s1) == (one.count(s1) ? 0 : 1));
    for (unsigned b = 0; b < 256; ++b) {
      const std::string s2 = s1 + static_cast<char>(b);
      const bool whole2 = a >= 0xC2 && a < 0xE0 && b >= 0x80 && b < 0xC0;
      wrong += utf8_length(s2) != (whole2 ? 2u : two[number(s2)] ? 0u : 1u);
      if (a < 0xE0) continue;
      for (unsigned c = 0x70; c < 0xD0; ++c) {
        const std::string s3 = s2 + static_cast<char>(c);
        const bool whole3 = a < 0xF0 && two[number(s2)] && c >= 0x80 && c < 0xC0;
        wrong += utf8_length(s3) != (whole3 ? 3u : three[number(s3)] ? 0u : 1u);
      }
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("The stream holds back half a character, and only that") {
  Utf8Stream stream;
  CHECK(stream.push("a\xE2") == "a");
  CHECK(stream.push("\x82").empty());
  CHECK(stream.push("\xAC"
                    "b") ==
        "\xE2\x82\xAC"
        "b");
  CHECK(stream.push("\xF0\x9F").empty());
  CHECK(stream.flush() == "\xF0\x9F");  // the end came within a character
  CHECK(stream.flush().empty());
  CHECK(stream.push("\xC0") == "\xC0");          // begins nothing
  CHECK(stream.push("\xE0\x80") == "\xE0\x80");  // overlong: certain at the second byte
  CHECK(stream.push("\xE2\x82").empty());
  CHECK(stream.push("x") == "\xE2\x82x");  // the rest never came
  CHECK(stream.push("").empty());
  CHECK(stream.flush().empty());
}

TEST_CASE("Valid text leaves the stream character by character") {
  const std::vector<std::string> characters = {"a", "\xC3\xA9", "\xE6\xBC\xA2", "\xF0\x9F\x98\x80", " ",
                                               kB,  "\n"};
  Utf8Stream stream;
  for (const std::string& character : characters)
    for (size_t i = 0; i < character.size(); ++i)
      CHECK(stream.push(character.substr(i, 1)) == (i + 1 == character.size() ? character : ""));
  CHECK(stream.flush().empty());
}

TEST_CASE("Cut anywhere, the stream joins to the text") {
  std::mt19937 random(3);
  std::vector<std::string> texts = {"caf\xC3\xA9 \xE6\xBC\xA2\xE5\xAD\x97 \xF0\x9F\x98\x80!", "\xF0\x9F\x98",
                                    "\xFF\xFE\xE2\x96\xE2\x96\x81\xF4\x90\x80\x80\xED\xA0\x80", ""};
  for (int i = 0; i < 40; ++i) texts.push_back(nasty_text(random));
  for (const std::string& text : texts)
    for (size_t i = 0; i <= text.size(); ++i)
      for (size_t j = i; j <= text.size(); ++j) {
        Utf8Stream stream;
        std::string out = stream.push(text.substr(0, i));
        REQUIRE(i - out.size() <= 3);
        out += stream.push(text.substr(i, j - i));
        REQUIRE(j - out.size() <= 3);
        out += stream.push(text.substr(j));
        out += stream.flush();
        REQUIRE(out == text);
      }
}

TEST_CASE("Pieces of any ids, streamed, are the decoded text") {
  const Tokenizer t(ascii_vocabulary({{kB + "a", -1}}, false));
  const std::string text = "a \xF0\x9F\x98\x80 a\xE2\x96 a";
  Utf8Stream stream;
  std::string out;
  for (const int id : t.encode(text)) out += stream.push(t.piece(id));
  CHECK(out + stream.flush() == text);
}

// ---- damaged vocabularies ---------------------------------------------------------------------------------

TEST_CASE("A damaged vocabulary is refused, and the token at fault named") {
  Vocabulary v = ascii_vocabulary();
  const auto refused = [&](const char* because) {
    CAPTURE(because);
    CHECK_THROWS_WITH_AS(Tokenizer{v}, doctest::Contains(because), Error);
  };
  CHECK_NOTHROW(Tokenizer{v});
  SUBCASE("scores missing") { v.scores.pop_back(), refused("357 scores"); }
  SUBCASE("types missing") { v.types.pop_back(), refused("357 types"); }
  SUBCASE("nothing at all") { v = {}, refused("0 tokens"); }
  SUBCASE("an empty token") { v.tokens[300] = "", refused("token 300 is empty"); }
  SUBCASE("a token twice") { v.tokens[301] = v.tokens[300], refused("token 301 repeats token 300"); }
  SUBCASE("a byte missing") {
    v.tokens[kBytes + 65] = "?!", v.types[kBytes + 65] = TokenType::normal, refused("byte 65");
  }
  SUBCASE("no hexadecimal digit") { v.tokens[kBytes + 65] = "<0x4G>", refused("byte token 72"); }
  SUBCASE("a byte too long") { v.tokens[kBytes + 65] = "<0x041>", refused("byte token 72"); }
  SUBCASE("a byte not closed") { v.tokens[kBytes + 65] = "<0x41)", refused("byte token 72"); }
  SUBCASE("bos too large") { v.bos = 358, refused("bos id"); }
  SUBCASE("eos too large") { v.eos = 1 << 30, refused("eos id"); }
  SUBCASE("eos negative") { v.eos = -2, refused("eos id"); }
  SUBCASE("unknown too large") { v.unk = 358, refused("unknown id"); }
}
