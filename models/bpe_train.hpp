// bpe_train.hpp: learns the vocabulary of the shipped model from its corpus.
//
// Byte pair encoding (Sennrich et al., 2016) over words: start from characters, and again and again make
// the most frequent adjacent pair one token, until the vocabulary is full. The order is the score.
//
// Kept apart on purpose: a word never merges with the next; a digit never merges with anything, so that
// numbers are spelled digit by digit; nor do punctuation or capitals inside a word, so that words in
// capitals are spelled letter by letter. (A capital at a word's start may merge: "_The".)
//
// Deterministic: everything is counted and compared in the order of bytes.
#pragma once

#include <map>
#include <servelite/tokenizer.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace servelite {

namespace bpe_detail {

inline bool is_lower(std::string_view s) { return s.size() == 1 && s[0] >= 'a' && s[0] <= 'z'; }
inline bool is_letter(std::string_view s) {
  return is_lower(s) || (s.size() == 1 && s[0] >= 'A' && s[0] <= 'Z');
}

struct Word {
  std::vector<std::string> symbols;
  long long count;
};

/// Cuts a text into words: blank sign, first letter, lower-case letters. Anything else stands alone.
inline void count_words(const std::string& text, std::map<std::vector<std::string>, long long>& counts) {
  std::vector<std::string> word = {std::string(kBlank)};
  const auto end_word = [&] {
    if (word.size() > 1) ++counts[word];
    word.clear();
  };
  for (const char c : text) {
    const std::string symbol(1, c);
    const bool starts_here = word.size() == 1 && word[0] == kBlank;
    if (c == ' ') {
      end_word();
      word = {std::string(kBlank)};
    } else if (is_lower(symbol) || (is_letter(symbol) && starts_here)) {
      word.push_back(symbol);
    } else {
      end_word();
    }
  }
  end_word();
}

}  // namespace bpe_detail

/// Ids: 0 <unk>, 1 <s>, 2 </s>, 3 <|system|>, 4 <|user|>, 5 <|assistant|>, 6 <|end|> (the end of turn, eos),
/// 7..262 the bytes, then the blank sign and all printable ASCII characters, then the merges.
/// Throws Error if the texts do not have enough pairs to fill vocab_size.
inline Vocabulary train_bpe(const std::vector<std::string>& texts, int vocab_size) {
  using namespace bpe_detail;
  Vocabulary v;
  const auto add = [&](const std::string& token, float score, TokenType type) {
    v.tokens.push_back(token), v.scores.push_back(score), v.types.push_back(type);
  };
  add("<unk>", 0, TokenType::unknown);
  for (const char* control : {"<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"})
    add(control, 0, TokenType::control);
  v.unk = 0, v.bos = 1, v.eos = 6;
  for (int b = 0; b < 256; ++b) {
    constexpr const char* digits = "0123456789ABCDEF";
    add(std::string("<0x") + digits[b / 16] + digits[b % 16] + ">", 0, TokenType::byte);
  }
  constexpr float below_all_merges = -1e6f;
  add(std::string(kBlank), below_all_merges, TokenType::normal);
  for (char c = '!'; c <= '~'; ++c) add(std::string(1, c), below_all_merges, TokenType::normal);
  if (vocab_size < static_cast<int>(v.tokens.size()))
    fail("vocabulary: expected a size of at least ", v.tokens.size(), ", found ", vocab_size);

  std::map<std::vector<std::string>, long long> counts;
  for (const std::string& text : texts) count_words(text, counts);
  std::vector<Word> words;
  for (const auto& [symbols, count] : counts) words.push_back({symbols, count});

  for (int rank = 1; static_cast<int>(v.tokens.size()) < vocab_size; ++rank) {
    std::map<std::pair<std::string, std::string>, long long> pairs;
    for (const Word& w : words)
      for (size_t i = 0; i + 1 < w.symbols.size(); ++i) pairs[{w.symbols[i], w.symbols[i + 1]}] += w.count;
    auto best = pairs.begin();  // of equally frequent pairs the first in byte order
    for (auto it = pairs.begin(); it != pairs.end(); ++it)
      if (it->second > best->second) best = it;
    if (pairs.empty())
      fail("vocabulary: expected texts with pairs for ", vocab_size, " tokens, found enough for ",
           v.tokens.size());
    const auto [left, right] = best->first;
    add(left + right, static_cast<float>(-rank), TokenType::normal);
    for (Word& w : words)
      for (size_t i = 0; i + 1 < w.symbols.size(); ++i)
        if (w.symbols[i] == left && w.symbols[i + 1] == right) {
          w.symbols[i] += right;
          w.symbols.erase(w.symbols.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        }
  }
  return v;
}

}  // namespace servelite
