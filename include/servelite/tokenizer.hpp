// tokenizer.hpp: text to token ids and back, the chat prompt, and safe streaming of UTF-8.
//
// The scheme is SentencePiece BPE as GGUF files of type "llama" use it (Kudo and Richardson, 2018):
//
//   "two foxes"  ->  _two_foxes        blanks become U+2581 (here _), one is put in front
//                ->  _ t w o _ f o x e s            start from characters
//                ->  _t w o _ f o x e s             merge the adjacent pair whose union scores best
//                ->  _two _fox es                   until no union is in the vocabulary
//   a character that is not in the vocabulary becomes its bytes: <0xF0> <0x9F> ...
//
// So any bytes can be said, and decode(encode(x)) == x for every x, valid UTF-8 or not. A U+2581 that the
// user typed goes as bytes, so that it is not mistaken for a blank.
//
// Control tokens (<s>, <|end|>, ...) never come from text unless parse_special asks for it: a user cannot
// type an end of turn. User-defined tokens are always matched as one token, as in llama.cpp.
//
// Chapter: docs/01_one_token.md
#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "error.hpp"

namespace servelite {

enum class TokenType : int { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

struct Vocabulary {
  std::vector<std::string> tokens;
  std::vector<float> scores;  ///< of merges: the higher, the earlier
  std::vector<TokenType> types;
  int bos = -1, eos = -1, unk = -1;
  bool add_bos = true, add_space_prefix = true;
};

inline constexpr std::string_view kBlank = "\xE2\x96\x81";  // U+2581

/// Length of the UTF-8 character that begins at text[0]: 1 to 4 bytes. 0: the text ends within it.
/// Bytes that begin no valid character are characters of length 1 on their own.
inline size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t n = byte(0) < 0x80   ? 1
                   : byte(0) < 0xC2 ? 0
                   : byte(0) < 0xE0 ? 2
                   : byte(0) < 0xF0 ? 3
                   : byte(0) < 0xF5 ? 4
                                    : 0;
  if (n <= 1) return 1;
  for (size_t i = 1; i < n; ++i) {
    if (i == text.size()) return 0;
    unsigned low = 0x80, high = 0xBF;  // the second byte must not make it overlong, a surrogate or too large
    if (i == 1 && byte(0) == 0xE0) low = 0xA0;
    if (i == 1 && byte(0) == 0xED) high = 0x9F;
    if (i == 1 && byte(0) == 0xF0) low = 0x90;
    if (i == 1 && byte(0) == 0xF4) high = 0x8F;
    if (byte(i) < low || byte(i) > high) return 1;
  }
  return n;
}

class Tokenizer {
 public:
  /// Checks the vocabulary; Error names the token at fault.
  explicit Tokenizer(Vocabulary vocabulary) : v_(std::move(vocabulary)) {
    const size_t n = v_.tokens.size();
    if (n == 0 || v_.scores.size() != n || v_.types.size() != n)
      fail("vocabulary: expected as many scores and types as tokens, found ", n, " tokens, ",
           v_.scores.size(), " scores, ", v_.types.size(), " types");
    bytes_.fill(-1);
    for (size_t i = 0; i < n; ++i) {
      if (v_.tokens[i].empty()) fail("vocabulary: token ", i, " is empty");
      if (!std::isfinite(v_.scores[i]))
        fail("vocabulary: token ", i, ": expected a finite score, found ", v_.scores[i]);
      const auto [known, fresh] = ids_.emplace(v_.tokens[i], static_cast<int>(i));
      if (!fresh) fail("vocabulary: token ", i, " repeats token ", known->second, ", '", v_.tokens[i], "'");
      if (v_.types[i] == TokenType::byte) bytes_[byte_of(static_cast<int>(i))] = static_cast<int>(i);
      if (v_.types[i] == TokenType::control || v_.types[i] == TokenType::user_defined)
        special_.push_back(static_cast<int>(i));
    }
    for (size_t b = 0; b < 256; ++b)
      if (bytes_[b] < 0)
        fail("vocabulary: expected a byte token for each of the 256 bytes, found none for byte ", b);
    for (const auto& [name, id] :
         {std::pair("bos", v_.bos), std::pair("eos", v_.eos), std::pair("unknown", v_.unk)})
      if (id < -1 || id >= static_cast<int>(n))
        fail("vocabulary: ", name, " id: expected below ", n, ", found ", id);
    std::stable_sort(special_.begin(), special_.end(),
                     [&](int a, int b) { return text(a).size() > text(b).size(); });
  }

  int size() const { return static_cast<int>(v_.tokens.size()); }
  int bos() const { return v_.bos; }
  int eos() const { return v_.eos; }
  const Vocabulary& vocabulary() const { return v_; }

  /// The id of a token spelled exactly so in the vocabulary, or -1.
  int id_of(std::string_view token) const {
    const auto found = ids_.find(std::string(token));
    return found == ids_.end() ? -1 : found->second;
  }

  /// Ids of a text; no bos is added. parse_special: exact spellings of control tokens become that token.
  /// The space prefix goes before each stretch of text between special tokens.
  std::vector<int> encode(std::string_view text, bool parse_special = false) const {
    std::vector<int> ids;
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
      const int id = special_at(text.substr(i), parse_special);
      if (id < 0) {
        ++i;
        continue;
      }
      encode_stretch(text.substr(begin, i - begin), ids);
      ids.push_back(id);
      i += this->text(id).size();
      begin = i;
    }
    encode_stretch(text.substr(begin), ids);
    return ids;
  }

  /// The bytes one token stands for; none for control and unknown tokens.
  std::string piece(int id) const {
    switch (v_.types[static_cast<size_t>(id)]) {
      case TokenType::control:
      case TokenType::unknown: return "";
      case TokenType::byte: return std::string(1, static_cast<char>(byte_of(id)));
      case TokenType::user_defined:
        return text(id);  // matched in the text as it is spelled, blank signs and all
      default: break;
    }
    std::string out = text(id);
    for (size_t at; (at = out.find(kBlank)) != std::string::npos;) out.replace(at, kBlank.size(), " ");
    return out;
  }

  /// The text of all ids; the space prefix of each stretch between special tokens is taken off again.
  std::string decode(std::span<const int> ids) const {
    std::string out;
    bool first = v_.add_space_prefix;  // does a stretch begin here?
    for (const int id : ids) {
      const TokenType type = v_.types[static_cast<size_t>(id)];
      const bool special = type == TokenType::control || type == TokenType::user_defined;
      const std::string bytes = piece(id);
      out.append(bytes, first && !special && bytes.starts_with(' ') ? 1 : 0);
      first = v_.add_space_prefix && special;
    }
    return out;
  }

 private:
  const std::string& text(int id) const {
    assert(id >= 0 && id < size());
    return v_.tokens[static_cast<size_t>(id)];
  }

  /// <0x0A> -> 10
  size_t byte_of(int id) const {
    const std::string& t = text(id);
    const auto digit = [&](size_t i) {
      const size_t at = std::string_view("0123456789ABCDEF").find(t[i]);
      if (at == std::string_view::npos)
        fail("vocabulary: byte token ", id, ": expected <0xNN>, found '", t, "'");
      return at;
    };
    if (t.size() != 6 || t.compare(0, 3, "<0x") != 0 || t[5] != '>')
      fail("vocabulary: byte token ", id, ": expected <0xNN>, found '", t, "'");
    return digit(3) * 16 + digit(4);
  }

  /// The longest special token that the text begins with, or -1.
  int special_at(std::string_view rest, bool parse_control) const {
    for (const int id : special_)
      if ((parse_control || v_.types[static_cast<size_t>(id)] == TokenType::user_defined) &&
          rest.starts_with(text(id)))
        return id;
    return -1;
  }

  struct Symbol {  // a run of the text; merged into its left neighbour it has length 0
    size_t begin, length;
    int previous, next;
    bool bytes;  // a blank sign typed by the user: not to be merged
  };
  struct Pair {
    float score;
    int left;
    size_t length;  // of both together; no longer true once either was merged
    bool operator<(const Pair& other) const {
      return score != other.score ? score < other.score : left > other.left;
    }
  };

  void encode_stretch(std::string_view raw, std::vector<int>& ids) const {
    if (raw.empty()) return;
    std::string s;
    std::vector<Symbol> symbols;
    const auto add = [&](std::string_view character, bool bytes) {
      const int i = static_cast<int>(symbols.size());
      symbols.push_back({s.size(), character.size(), i - 1, i + 1, bytes});
      s += character;
    };
    if (v_.add_space_prefix) add(kBlank, false);
    for (size_t i = 0; i < raw.size();) {
      const size_t n = std::max<size_t>(utf8_length(raw.substr(i)), 1);
      if (raw[i] == ' ')
        add(kBlank, false);
      else
        add(raw.substr(i, n), raw.substr(i, n) == kBlank);
      i += n;
    }
    symbols.back().next = -1;

    std::priority_queue<Pair> pairs;
    const auto offer = [&](int left, int right) {
      if (left < 0 || right < 0) return;
      const Symbol &a = symbols[static_cast<size_t>(left)], &b = symbols[static_cast<size_t>(right)];
      if (a.bytes || b.bytes) return;
      const int id = id_of(std::string_view(s).substr(a.begin, a.length + b.length));
      if (id >= 0 && v_.types[static_cast<size_t>(id)] == TokenType::normal)
        pairs.push({v_.scores[static_cast<size_t>(id)], left, a.length + b.length});
    };
    for (int i = 1; i < static_cast<int>(symbols.size()); ++i) offer(i - 1, i);
    while (!pairs.empty()) {
      const Pair best = pairs.top();
      pairs.pop();
      Symbol& left = symbols[static_cast<size_t>(best.left)];
      if (left.length == 0 || left.next < 0) continue;
      Symbol& right = symbols[static_cast<size_t>(left.next)];
      if (left.length + right.length != best.length) continue;  // one of them has changed since
      left.length = best.length;
      right.length = 0;
      left.next = right.next;
      if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = best.left;
      offer(left.previous, best.left);
      offer(best.left, left.next);
    }
    for (const Symbol& symbol : symbols) {
      if (symbol.length == 0) continue;
      const std::string_view word = std::string_view(s).substr(symbol.begin, symbol.length);
      const int id = symbol.bytes ? -1 : id_of(word);
      if (id >= 0 && v_.types[static_cast<size_t>(id)] == TokenType::normal)
        ids.push_back(id);
      else if (word == kBlank && !symbol.bytes)  // a vocabulary without a blank sign
        ids.push_back(bytes_[' ']);
      else
        for (const char c : word) ids.push_back(bytes_[static_cast<unsigned char>(c)]);
    }
  }

  Vocabulary v_;
  std::unordered_map<std::string, int> ids_;  // only ever searched
  std::array<int, 256> bytes_;
  std::vector<int> special_;  // control and user-defined tokens, the longest first
};

// ---- chat ---------------------------------------------------------------------------------------------

struct ChatTurn {
  std::string role, text;  ///< role: system, user or assistant
};

/// The same as chat_prompt(), in the language of the key tokenizer.chat_template.
inline constexpr const char* kChatTemplate =
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

/// <s> <|system|> text <|end|> <|user|> text <|end|> <|assistant|> text <|end|> ... <|assistant|>
/// The markers are ids, put in directly; a text that spells one stays text.
inline std::vector<int> chat_prompt(const Tokenizer& tokenizer, std::span<const ChatTurn> turns) {
  const auto marker = [&](const std::string& name) {
    const int id = tokenizer.id_of("<|" + name + "|>");
    if (id < 0) fail("chat: expected the token <|", name, "|> in the vocabulary, found none");
    return id;
  };
  std::vector<int> ids;
  if (tokenizer.vocabulary().add_bos && tokenizer.bos() >= 0) ids.push_back(tokenizer.bos());
  for (const ChatTurn& turn : turns) {
    if (turn.role != "system" && turn.role != "user" && turn.role != "assistant")
      fail("chat: expected the role system, user or assistant, found '", turn.role, "'");
    ids.push_back(marker(turn.role));
    const std::vector<int> text = tokenizer.encode(turn.text);
    ids.insert(ids.end(), text.begin(), text.end());
    ids.push_back(marker("end"));
  }
  ids.push_back(marker("assistant"));
  return ids;
}

/// One question; an empty system prompt is left out.
inline std::vector<int> chat_prompt(const Tokenizer& tokenizer, const std::string& system,
                                    const std::string& user) {
  std::vector<ChatTurn> turns;
  if (!system.empty()) turns.push_back({"system", system});
  turns.push_back({"user", user});
  return chat_prompt(tokenizer, turns);
}

// ---- streaming ------------------------------------------------------------------------------------------

/// Lets whole UTF-8 characters through and holds back the beginning of one. Invalid bytes pass as they
/// are, as soon as it is certain that nothing valid begins there. What comes out joins to what went in.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes) {
    held_ += bytes;
    size_t whole = 0;
    while (whole < held_.size()) {
      const size_t n = utf8_length(std::string_view(held_).substr(whole));
      if (n == 0) break;
      whole += n;
    }
    std::string out = held_.substr(0, whole);
    held_.erase(0, whole);
    return out;
  }
  /// The end: whatever is held back.
  std::string flush() { return std::exchange(held_, ""); }

 private:
  std::string held_;
};

}  // namespace servelite
