// json.hpp: writing JSON.
//
// A writer only; nothing in the library reads JSON. Numbers are written so that they read back exactly,
// whatever the locale; NaN and infinity, which JSON lacks, become null; invalid UTF-8 becomes U+FFFD.
//
// Outer circle.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

#include "files.hpp"
#include "tokenizer.hpp"  // utf8_length

namespace servelite {

/// "text" with quotes, everything escaped that has to be.
inline std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    const size_t n = utf8_length(text.substr(i));
    if (c == '"' || c == '\\')
      (out += '\\') += text[i];
    else if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else if (c < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      out += code;
    } else if (n == 0 || (n == 1 && c >= 0x80))
      out += "\xEF\xBF\xBD";
    else
      out += text.substr(i, n);
    i += n == 0 ? 1 : n;
  }
  return out + '"';
}

/// json.begin_object().field("a", 1).key("b").begin_array().value(2).end_array().end_object()
class Json {
 public:
  Json& begin_object() { return open('{'); }
  Json& begin_array() { return open('['); }
  Json& end_object() { return close('}'); }
  Json& end_array() { return close(']'); }

  Json& key(std::string_view name) {
    separate();
    out_ += json_string(name) + ": ";
    after_key_ = true;
    return *this;
  }

  template <class T>
  Json& value(const T& v) {
    separate();
    if constexpr (std::is_same_v<T, bool>) {
      out_ += v ? "true" : "false";
    } else if constexpr (std::is_floating_point_v<T>) {
      char digits[40];
      if (!std::isfinite(v))
        out_ += "null";
      else
        out_.append(digits, std::to_chars(digits, digits + sizeof digits, v).ptr);
    } else if constexpr (std::is_integral_v<T>) {
      out_ += std::to_string(v);
    } else {
      out_ += json_string(v);
    }
    return *this;
  }

  template <class T>
  Json& field(std::string_view name, const T& v) {
    return key(name).value(v);
  }

  const std::string& str() const { return out_; }

 private:
  Json& open(char bracket) {
    separate();
    out_ += bracket;
    ++depth_;
    first_ = true;
    return *this;
  }
  Json& close(char bracket) {
    const bool own_line = depth_-- <= kLineDepth;
    if (!first_) line(own_line);
    out_ += bracket;
    first_ = false;
    return *this;
  }
  void separate() {
    if (!after_key_ && depth_ > 0) {
      if (!first_) out_ += ',';
      line(depth_ <= kLineDepth);
    }
    first_ = after_key_ = false;
  }
  void line(bool own) {
    if (own)
      (out_ += '\n').append(static_cast<size_t>(2 * depth_), ' ');
    else
      out_ += ' ';
  }

  static constexpr int kLineDepth = 2;  // the two outer levels get a line per item; what is deeper shares one
  std::string out_;
  int depth_ = 0;
  bool first_ = true, after_key_ = false;
};

}  // namespace servelite
