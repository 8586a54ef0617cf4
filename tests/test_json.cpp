// JSON as written: escapes, numbers and layout by hand, any bytes at all; and files, whole or not at all.
#include <doctest/doctest.h>

#include <clocale>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <servelite/error.hpp>
#include <servelite/files.hpp>
#include <servelite/json.hpp>
#include <sstream>
#include <string>
#if __has_include(<sys/resource.h>)
  #include <sys/resource.h>

  #include <csignal>
#endif

using namespace servelite;

namespace {

template <class T>
std::string value(const T& v) {
  Json json;
  json.value(v);
  return json.str();
}

/// Whether a text is UTF-8, said by the code points: decode, then ask whether a shorter form existed.
bool is_utf8(const std::string& s) {
  for (size_t i = 0; i < s.size();) {
    const auto c = static_cast<unsigned char>(s[i]);
    const size_t n = c < 0x80 ? 1 : c >> 5 == 6 ? 2 : c >> 4 == 14 ? 3 : c >> 3 == 30 ? 4 : 0;
    if (n == 0 || i + n > s.size()) return false;
    uint32_t point = n == 1 ? c : c & (0x7Fu >> n);
    for (size_t k = 1; k < n; ++k) {
      const auto next = static_cast<unsigned char>(s[i + k]);
      if (next >> 6 != 2) return false;
      point = point << 6 | (next & 0x3Fu);
    }
    const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (point < least[n] || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) return false;
    i += n;
  }
  return true;
}

/// The text a JSON string stands for. Knows every escape of JSON whose code point is below 0x80.
std::string unescaped(const std::string& json) {
  REQUIRE(json.size() >= 2);
  REQUIRE(json.front() == '"');
  REQUIRE(json.back() == '"');
  std::string out;
  for (size_t i = 1; i + 1 < json.size(); ++i) {
    REQUIRE(static_cast<unsigned char>(json[i]) >= 0x20);
    REQUIRE(json[i] != '"');
    if (json[i] != '\\') {
      out += json[i];
      continue;
    }
    const std::string names = "\"\\/bfnrtu", meant = "\"\\/\b\f\n\r\t";
    const size_t which = names.find(json[++i]);
    REQUIRE(which != std::string::npos);
    if (names[which] != 'u') {
      out += meant[which];
      continue;
    }
    REQUIRE(i + 5 < json.size());
    const std::string digits = json.substr(i + 1, 4);
    REQUIRE(digits.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos);
    out += static_cast<char>(std::stoi(digits, nullptr, 16));
    i += 4;
  }
  return out;
}

std::string content(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream all;
  all << in.rdbuf();
  return all.str();
}

/// The message of the Error that writing throws; empty if it throws none.
std::string refusal(const std::filesystem::path& path, const std::string& bytes) {
  try {
    write_file(path.string(), bytes);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

/// An empty folder for one test.
struct Folder {
  std::filesystem::path path;
  explicit Folder(const std::string& name)
      : path(std::filesystem::temp_directory_path() / ("servelite_json_" + name)) {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  size_t files() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path), {}));
  }
};

}  // namespace

TEST_CASE("json: strings") {
  CHECK(json_string("") == R"("")");
  CHECK(json_string("plain") == R"("plain")");
  CHECK(json_string("say \"hi\"") == R"("say \"hi\"")");
  CHECK(json_string("C:\\x") == R"("C:\\x")");
  CHECK(json_string("a\nb\tc") == R"("a\nb\tc")");
  CHECK(json_string(std::string("\0\x01\x1F\r\x7F", 5)) == "\"\\u0000\\u0001\\u001f\\u000d\x7F\"");
  CHECK(json_string("a/b") == R"("a/b")");
  CHECK(json_string("\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80") ==
        "\"\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80\"");
}

TEST_CASE("json: bytes that are no UTF-8 become U+FFFD") {
  const std::string bad = "\xEF\xBF\xBD";
  CHECK(json_string("a\xFF"
                    "b") == "\"a" + bad + "b\"");
  CHECK(json_string("\x80") == '"' + bad + '"');
  CHECK(json_string("\xC3") == '"' + bad + '"');                             // the end is missing
  CHECK(json_string("\xC3x") == '"' + bad + "x\"");                          // ... and an x is not it
  CHECK(json_string("\xC0\xAF") == '"' + bad + bad + '"');                   // an overlong slash
  CHECK(json_string("\xED\xA0\x80") == '"' + bad + bad + bad + '"');         // half of a surrogate pair
  CHECK(json_string("\xF4\x90\x80\x80").find('\xF4') == std::string::npos);  // above U+10FFFF

  std::mt19937 random(7);
  const std::string alphabet =
      std::string("\0\x1F\"\\az\x7F\x80\x8F\x90\x9F\xA0\xBF\xC0\xC2\xDF\xE0\xE2\xED", 19) +
      "\xEF\xF0\xF4\xF5\xFF";
  int valid = 0;
  for (int round = 0; round < 100000; ++round) {
    std::string text;
    for (size_t n = random() % 8; n > 0; --n) text += alphabet[random() % alphabet.size()];
    const std::string json = json_string(text);
    REQUIRE(is_utf8(json));
    const std::string back = unescaped(json);
    if (is_utf8(text)) {
      ++valid;
      REQUIRE(back == text);
    } else {
      REQUIRE(back.find(bad) != std::string::npos);
    }
  }
  CHECK(valid > 1000);  // both branches were taken
  CHECK(valid < 99000);
}

TEST_CASE("json: numbers, booleans and null") {
  CHECK(value(true) == "true");
  CHECK(value(false) == "false");
  CHECK(value(0) == "0");
  CHECK(value(-12) == "-12");
  CHECK(value(std::numeric_limits<int64_t>::min()) == "-9223372036854775808");
  CHECK(value(std::numeric_limits<uint64_t>::max()) == "18446744073709551615");
  CHECK(value(0.5) == "0.5");
  CHECK(value(0.1f) == "0.1");
  CHECK(value(1e300) == "1e+300");
  CHECK(value(std::numeric_limits<double>::quiet_NaN()) == "null");
  CHECK(value(std::numeric_limits<double>::infinity()) == "null");
  CHECK(value(-std::numeric_limits<float>::infinity()) == "null");
  CHECK(value("text") == R"("text")");
  CHECK(value(std::string("text")) == R"("text")");

  std::mt19937_64 random(3);
  for (int i = 0; i < 10000; ++i) {  // what is written reads back as the same number
    const double x = std::ldexp(static_cast<double>(static_cast<int64_t>(random())),
                                static_cast<int>(random() % 1000) - 500);
    REQUIRE(std::strtod(value(x).c_str(), nullptr) == x);
  }
}

TEST_CASE("json: a decimal point is a point, whatever the locale") {
  const std::string before = std::setlocale(LC_ALL, nullptr);
  bool comma = false;
  for (const char* name : {"de_DE.UTF-8", "de_DE", "fr_FR.UTF-8", "German"})
    if (!comma && std::setlocale(LC_ALL, name)) comma = std::localeconv()->decimal_point[0] == ',';
  CHECK(value(1.5) == "1.5");
  CHECK(value(1234567) == "1234567");
  std::setlocale(LC_ALL, before.c_str());
  if (!comma) MESSAGE("this machine has no locale with a decimal comma");
}

TEST_CASE("json: layout") {
  Json empty;
  empty.begin_object().end_object();
  CHECK(empty.str() == "{}");

  Json json;
  json.begin_object().field("a", 1).field("b \"q\"", "x").key("none").begin_array().end_array();
  json.key("list").begin_array().value(1).value(2.5).begin_object().field("deep", true).field("er", 0);
  json.key("in").begin_array().value(7).end_array().end_object();
  json.begin_array().end_array().end_array().key("last").begin_object().end_object().end_object();
  CHECK(json.str() ==
        "{\n"
        "  \"a\": 1,\n"
        "  \"b \\\"q\\\"\": \"x\",\n"
        "  \"none\": [],\n"
        "  \"list\": [\n"
        "    1,\n"
        "    2.5,\n"
        "    { \"deep\": true, \"er\": 0, \"in\": [ 7 ] },\n"
        "    []\n"
        "  ],\n"
        "  \"last\": {}\n"
        "}");
}

TEST_CASE("write_file: all the bytes, and nothing else in the folder") {
  const Folder folder("whole");
  const std::filesystem::path path = folder.path / "a.json";
  std::string bytes("\0\r\n\x1A\xFF", 5);  // written as they are
  write_file(path.string(), bytes);
  CHECK(content(path) == bytes);
  write_file(path.string(), "");
  CHECK(std::filesystem::file_size(path) == 0);
  bytes.assign(3'000'000, 'x');
  write_file(path.string(), bytes);
  CHECK(content(path) == bytes);
  CHECK(folder.files() == 1);
}

TEST_CASE("write_file: an error names the path and the reason, and leaves no file") {
  const Folder folder("refused");
  const std::filesystem::path missing = folder.path / "no" / "such" / "a.json";
  std::string message = refusal(missing, "x");
  CHECK(message.find(missing.string()) != std::string::npos);
  CHECK(message.find("No such file or directory") != std::string::npos);

  const std::filesystem::path taken = folder.path / "folder";
  std::filesystem::create_directory(taken);
  message = refusal(taken, "x");
  CHECK(message.find(taken.string()) != std::string::npos);
  CHECK(message.find("directory") != std::string::npos);
  CHECK(std::filesystem::is_directory(taken));
  CHECK(folder.files() == 1);
  CHECK(refusal("", "x") != "");
}

#if __has_include(<sys/resource.h>)
TEST_CASE("write_file: a disk that is full in the middle leaves the old file as it was") {
  const Folder folder("full");
  const std::filesystem::path path = folder.path / "a.json";
  write_file(path.string(), "old");

  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  rlimit small = before;
  small.rlim_cur = 1 << 20;  // bytes a file may have: the second half of the write fails
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  const std::string message = refusal(path, std::string(2 << 20, 'n'));
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);

  CHECK(message.find(path.string()) != std::string::npos);
  CHECK(message.find("File too large") != std::string::npos);
  CHECK(content(path) == "old");
  CHECK(folder.files() == 1);
}
#endif
