// json.hpp: writing JSON, and writing files so that no half file is ever left under the final name.
//
// A writer only; nothing in the library reads JSON. Numbers are written so that they read back exactly,
// whatever the locale; NaN and infinity, which JSON lacks, become null; invalid UTF-8 becomes U+FFFD.
//
// Outer circle.
#pragma once

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

#include "error.hpp"
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
    --depth_;
    if (!first_) line();
    out_ += bracket;
    first_ = false;
    return *this;
  }
  void separate() {
    if (!after_key_ && depth_ > 0) {
      if (!first_) out_ += ',';
      line();
    }
    first_ = after_key_ = false;
  }
  void line() {  // two levels are indented; what is deeper stays on its line
    if (depth_ <= 2)
      (out_ += '\n').append(static_cast<size_t>(2 * depth_), ' ');
    else
      out_ += ' ';
  }

  std::string out_;
  int depth_ = 0;
  bool first_ = true, after_key_ = false;
};

/// Writes a whole file: into path + ".partial" first, then renamed. On failure Error says why, and neither
/// file is left.
inline void write_file(const std::string& path, std::string_view bytes) {
  const std::string partial = path + ".partial";
  std::FILE* file = std::fopen(partial.c_str(), "wb");
  if (!file) fail(path, ": cannot write: ", std::strerror(errno));
  const bool written =
      std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() && std::fflush(file) == 0;
  int error = errno;
  const bool closed = std::fclose(file) == 0;
  if (written && !closed) error = errno;
  if (written && closed && std::rename(partial.c_str(), path.c_str()) == 0) return;
  if (written && closed) error = errno;
  std::remove(partial.c_str());
  fail(path, ": cannot write: ", std::strerror(error));
}

}  // namespace servelite
