// test_gguf.cpp: does a GGUF come back as it was written, and does a damaged one never do harm?
//
// Hostile files are built byte by byte with Raw below, not with the writer under test. Offsets in the
// expectations are counted by hand: the header is 24 bytes; a key named by one character has its type at
// 33 and its value at 37; a tensor named so has n_dims at 33, dims at 37, type at 45, offset at 49.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "servelite/gguf_write.hpp"

using namespace servelite;

namespace {

using Bytes = std::vector<std::byte>;
constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();

/// Little-endian bytes, one field after the other.
struct Raw {
  Bytes bytes;
  Raw& le(uint64_t value, int size) {
    for (int i = 0; i < size; ++i) bytes.push_back(static_cast<std::byte>(value >> (8 * i) & 0xff));
    return *this;
  }
  Raw& u8(uint64_t v) { return le(v, 1); }
  Raw& u32(uint64_t v) { return le(v, 4); }
  Raw& u64(uint64_t v) { return le(v, 8); }
  Raw& chars(const std::string& s) {
    for (const char c : s) u8(static_cast<unsigned char>(c));
    return *this;
  }
  Raw& string(const std::string& s) { return u64(s.size()).chars(s); }
  Raw& zeros(int n) {
    while (n-- > 0) u8(0);
    return *this;
  }
};

Raw header(uint64_t tensors, uint64_t keys) { return Raw().chars("GGUF").u32(3).u64(tensors).u64(keys); }

/// A file of one tensor "t" and no keys, with 64 bytes of data from byte 64 on.
Bytes one_tensor(const std::vector<uint64_t>& dims, uint64_t type, uint64_t offset) {
  Raw raw = header(1, 0).string("t").u32(dims.size());
  for (const uint64_t d : dims) raw.u64(d);
  raw.u32(type).u64(offset);
  return raw.zeros(128 - static_cast<int>(raw.bytes.size())).bytes;
}

/// The message of the Error that `action` throws, or "no error".
template <class Action>
std::string message(Action action) {
  try {
    action();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

std::string parse_error(const Bytes& bytes) {
  return message([&] { parse_gguf(bytes, "file.gguf"); });
}

/// Parsing fails at that byte, and the message goes on with `rest`.
void check_refused(const Bytes& bytes, int byte, const std::string& rest) {
  const std::string found = parse_error(bytes),
                    expected = "file.gguf: byte " + std::to_string(byte) + ": " + rest;
  CHECK(found.substr(0, expected.size()) == expected);
  CHECK(found.find("expected ") != std::string::npos);
  CHECK(found.find("found ") != std::string::npos);
}

/// Every scalar type at both ends of its range, and every type of list, one of them empty.
Metadata every_type() {
  return {{"u8", uint8_t{255}},
          {"i8", int8_t{-128}},
          {"u16", uint16_t{65535}},
          {"i16", int16_t{-32768}},
          {"u32", uint32_t{4294967295u}},
          {"i32", std::numeric_limits<int32_t>::min()},
          {"f32", 0.1f},
          {"bool", true},
          {"string", std::string("caf\xc3\xa9\0!", 7)},
          {"u64", kHuge},
          {"i64", std::numeric_limits<int64_t>::min()},
          {"f64", 0.1},
          {"u8s", std::vector<uint8_t>{0, 255}},
          {"i8s", std::vector<int8_t>{-128, 127}},
          {"u16s", std::vector<uint16_t>{1, 65535}},
          {"i16s", std::vector<int16_t>{-32768, 3}},
          {"u32s", std::vector<uint32_t>{7, 4294967295u}},
          {"i32s", std::vector<int32_t>{-1, 0, 1}},
          {"f32s", std::vector<float>{1.5f, -0.25f}},
          {"bools", std::vector<bool>{true, false, true}},
          {"strings", std::vector<std::string>{"", "a", "bc"}},
          {"u64s", std::vector<uint64_t>{kHuge}},
          {"i64s", std::vector<int64_t>{-5}},
          {"f64s", std::vector<double>{}}};
}

constexpr float kValues[] = {1.0f, -2.0f};

/// About 900 bytes in which everything occurs.
Bytes rich_file() {
  static const uint8_t block[34] = {0x00, 0x3c, 1, 2, 255};  // scale 1
  return gguf_bytes(
      every_type(),
      {make_tensor("t", DType::f32, {2}, kValues), make_tensor("q", DType::q8_0, {32, 1}, block)}, "rich");
}

/// Uses everything that a parsed file offers, so that a sanitizer sees what is wrong with it.
double touch(const Gguf& file) {
  double sum = 0;
  for (const Tensor& t : file.tensors) {
    for (uint64_t i = 0; i < t.bytes; ++i) sum += std::to_integer<int>(t.data[i]);
    std::vector<float> values(t.elements());
    try {
      dequantize(t, values.data());
    } catch (const Error&) {
    }
  }
  for (const auto& [key, value] : file.metadata)
    sum += static_cast<double>(gguf_detail::described(value).size() + key.size());
  return sum;
}

/// A folder that is gone at the end of the test.
struct Folder {
  std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("servelite_gguf_" + std::to_string(std::random_device()()));
  Folder() { std::filesystem::create_directory(path); }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string file(const char* name) const { return (path / name).string(); }
  std::vector<std::string> list() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path))
      names.push_back(entry.path().filename().string());
    return names;
  }
};

Bytes file_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  Bytes bytes;
  for (int c; (c = in.get()) != EOF;) bytes.push_back(static_cast<std::byte>(c));
  return bytes;
}

}  // namespace

// ---- numbers -------------------------------------------------------------------------------------

TEST_CASE("half_to_float: all 65536, against the definition") {
  for (uint32_t h = 0; h < 65536; ++h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const double sign = h & 0x8000 ? -1 : 1;
    const float found = half_to_float(static_cast<uint16_t>(h));
    double expected = 0;
    if (exponent == 31)
      expected = mantissa ? std::nan("") : HUGE_VAL;
    else if (exponent == 0)
      expected = std::ldexp(mantissa, -24);
    else
      expected = std::ldexp(1024 + mantissa, exponent - 25);
    if (std::isnan(expected))
      REQUIRE(std::isnan(found));
    else
      REQUIRE(found == sign * expected);
    if (!std::isnan(expected)) REQUIRE(std::signbit(found) == (sign < 0));
  }
}

TEST_CASE("float_to_half: at, below and above the middle of every two neighbours") {
  for (uint32_t h = 0; h < 0x7c00; ++h) {  // finite ones; the neighbour of the last is infinity, as if 2^16
    const double low = half_to_float(static_cast<uint16_t>(h));
    const double high = h + 1 == 0x7c00 ? 65536.0 : half_to_float(static_cast<uint16_t>(h + 1));
    const float middle = static_cast<float>((low + high) / 2);  // exact: one bit more than a half has
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float s = sign ? -1.0f : 1.0f;
      REQUIRE(float_to_half(s * static_cast<float>(low)) == (sign | h));
      REQUIRE(float_to_half(s * middle) == (sign | (h % 2 == 0 ? h : h + 1)));
      REQUIRE(float_to_half(s * std::nextafter(middle, 0.0f)) == (sign | h));
      REQUIRE(float_to_half(s * std::nextafter(middle, HUGE_VALF)) == (sign | (h + 1)));
    }
  }
  CHECK(float_to_half(HUGE_VALF) == 0x7c00);
  CHECK(float_to_half(-HUGE_VALF) == 0xfc00);
  CHECK(float_to_half(std::numeric_limits<float>::max()) == 0x7c00);
  CHECK(float_to_half(-std::numeric_limits<float>::denorm_min()) == 0x8000);
  for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0xff800001u, 0x7fffffffu}) {
    const uint16_t h = float_to_half(std::bit_cast<float>(bits));
    CHECK((h & 0x7c00) == 0x7c00);
    CHECK((h & 0x03ff) != 0);
    CHECK((h >> 15) == (bits >> 31));
  }
}

TEST_CASE("bf16: all 65536, and the middle of every two neighbours") {
  for (uint32_t b = 0; b < 65536; ++b) {
    const int exponent = b >> 7 & 255, mantissa = b & 127;
    const float found = bf16_to_float(static_cast<uint16_t>(b));
    if (exponent == 255 && mantissa) {
      REQUIRE(std::isnan(found));
      continue;
    }
    double expected = HUGE_VAL;
    if (exponent == 0)
      expected = std::ldexp(mantissa, -133);
    else if (exponent < 255)
      expected = std::ldexp(128 + mantissa, exponent - 134);
    REQUIRE(found == (b & 0x8000 ? -expected : expected));
  }
  for (uint32_t b = 0; b < 0x7f80; ++b) {
    const double low = bf16_to_float(static_cast<uint16_t>(b));
    const double high = b + 1 == 0x7f80 ? 0x1p128 : bf16_to_float(static_cast<uint16_t>(b + 1));
    const float middle = static_cast<float>((low + high) / 2);
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float s = sign ? -1.0f : 1.0f;
      REQUIRE(float_to_bf16(s * static_cast<float>(low)) == (sign | b));
      REQUIRE(float_to_bf16(s * middle) == (sign | (b % 2 == 0 ? b : b + 1)));
      REQUIRE(float_to_bf16(s * std::nextafter(middle, 0.0f)) == (sign | b));
      REQUIRE(float_to_bf16(s * std::nextafter(middle, HUGE_VALF)) == (sign | (b + 1)));
    }
  }
  CHECK(float_to_bf16(HUGE_VALF) == 0x7f80);
  CHECK(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0x7f800001u)))));  // not infinity
  CHECK(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0xffffffffu)))));  // not zero
}

TEST_CASE("dequantize") {
  float out[64];
  SUBCASE("F32 at an odd address") {
    char data[9];
    std::memcpy(data + 1, kValues, 8);
    dequantize(make_tensor("x", DType::f32, {2}, data + 1), out);
    CHECK(out[0] == 1.0f);
    CHECK(out[1] == -2.0f);
  }
  SUBCASE("F16 and BF16") {
    const uint16_t half[] = {0x3c00, 0xc000, 0x3555}, brain[] = {0x3f80, 0xc000, 0x3eab};
    dequantize(make_tensor("x", DType::f16, {3}, half), out);
    CHECK(out[0] == 1.0f);
    CHECK(out[1] == -2.0f);
    CHECK(out[2] == 0x1.554p-2f);
    dequantize(make_tensor("x", DType::bf16, {3}, brain), out);
    CHECK(out[0] == 1.0f);
    CHECK(out[1] == -2.0f);
    CHECK(out[2] == 0x1.56p-2f);
  }
  SUBCASE("Q8_0: two blocks of their own scale") {
    Raw raw;
    raw.le(0x3800, 2);  // 0.5
    for (int i = 0; i < 32; ++i) raw.u8(static_cast<uint64_t>(i - 16));
    raw.le(0xc000, 2);  // -2
    for (int i = 0; i < 32; ++i) raw.u8(static_cast<uint64_t>(i == 0 ? -128 : 4 * i));
    dequantize(make_tensor("x", DType::q8_0, {32, 2}, raw.bytes.data()), out);
    for (int i = 0; i < 32; ++i) CHECK(out[i] == 0.5f * static_cast<float>(i - 16));
    CHECK(out[32] == 256.0f);
    for (int i = 1; i < 32; ++i) CHECK(out[32 + i] == static_cast<float>(-8 * i));
  }
  SUBCASE("others are named") {
    const char data[256] = {};
    CHECK(message([&] { dequantize(make_tensor("x", DType::q6_k, {256}, data), out); }) ==
          "tensor \"x\": expected F32, F16, BF16 or Q8_0, found Q6_K");
  }
}

// ---- writing and reading back --------------------------------------------------------------------

TEST_CASE("the bytes of a small file, written out by hand") {
  Raw raw = header(1, 2);
  raw.string("a").u32(0).u8(7);                                 // bytes 24 to 38
  raw.string("b").u32(9).u32(5).u64(2).u32(1).u32(0xfffffffe);  // to 71: i32 1, -2
  raw.string("t").u32(2).u64(2).u64(1).u32(0).u64(0);           // to 112: [2 x 1] F32 at 0
  raw.zeros(128 - 112);
  raw.u32(0x3f800000).u32(0xc0000000).zeros(24);  // 1, -2, padded to 160
  const Bytes found = gguf_bytes({{"a", uint8_t{7}}, {"b", std::vector<int32_t>{1, -2}}},
                                 {make_tensor("t", DType::f32, {2, 1}, kValues)}, "small");
  CHECK(raw.bytes.size() == 160);
  CHECK(found == raw.bytes);

  const Gguf file = parse_gguf(raw.bytes, "small");
  CHECK(file.get_u32("a") == 7);
  CHECK(file.get_i32s("b") == std::vector<int32_t>{1, -2});
  CHECK(file.tensor("t").dims == std::vector<uint64_t>{2, 1});
  CHECK(file.tensor("t").data == raw.bytes.data() + 128);
}

TEST_CASE("every type of value comes back, in order, from memory and from a file") {
  const Folder folder;
  const Metadata metadata = every_type();
  for (size_t i = 0; i < metadata.size(); ++i) REQUIRE(metadata[i].second.index() == i);  // none is missing
  CHECK(std::variant_size_v<Value> == metadata.size());
  const std::string path = folder.file("types.gguf");
  write_gguf(path, metadata, {});
  CHECK(read_gguf(path).metadata == metadata);
  CHECK(file_bytes(path) == gguf_bytes(metadata, {}, "again"));
}

TEST_CASE("every type of tensor comes back, aligned, also after its file object was copied and gone") {
  const Folder folder;
  std::mt19937 random(7);
  std::vector<Bytes> data;
  std::vector<Tensor> tensors;
  const size_t expected_bytes[] = {3 * 256 * 4, 3 * 256 * 2, 3 * 144, 3 * 272,
                                   3 * 144,     3 * 176,     3 * 210, 3 * 256 * 2};
  for (size_t i = 0; i < std::size(kDTypes); ++i) {
    data.emplace_back(expected_bytes[i]);
    for (std::byte& b : data.back()) b = static_cast<std::byte>(random() & 255);
    tensors.push_back(make_tensor(kDTypes[i].name, kDTypes[i].type, {256, 1, 3}, data.back().data()));
    CHECK(tensors.back().bytes == expected_bytes[i]);
    CHECK(tensors.back().elements() == 768);
  }
  for (const uint32_t alignment : {1u, 8u, 32u, 64u}) {
    const std::string path = folder.file("tensors.gguf");
    write_gguf(path, {{"general.alignment", alignment}}, tensors);
    Gguf file;
    {
      const Gguf first = read_gguf(path);
      file = first;
    }
    REQUIRE(file.tensors.size() == tensors.size());
    CHECK(file.alignment == alignment);
    CHECK(file.name == path);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& t = file.tensors[i];
      CHECK(t.name == tensors[i].name);
      CHECK(t.type == tensors[i].type);
      CHECK(t.dims == tensors[i].dims);
      CHECK(reinterpret_cast<uintptr_t>(t.data) % alignment == 0);
      CHECK(Bytes(t.data, t.data + t.bytes) == data[i]);
    }
  }
}

TEST_CASE("a version 2 file is read") {
  Bytes bytes = rich_file();
  bytes[4] = std::byte{2};
  CHECK(parse_gguf(bytes, "v2").metadata == every_type());
}

TEST_CASE("the least file: no keys, no tensors, no padding") {
  const Gguf file = parse_gguf(header(0, 0).bytes, "least");
  CHECK(file.metadata.empty());
  CHECK(file.tensors.empty());
}

TEST_CASE("tensors need not be stored in the order they are listed") {
  const Bytes bytes = header(2, 0)
                          .string("t")
                          .u32(1)
                          .u64(1)
                          .u32(0)
                          .u64(32)
                          .string("u")
                          .u32(1)
                          .u64(1)
                          .u32(0)
                          .u64(0)
                          .zeros(6)
                          .u32(0x3f800000)
                          .zeros(28)
                          .u32(0x40000000)
                          .bytes;
  const Gguf file = parse_gguf(bytes, "swapped");
  float t = 0, u = 0;
  dequantize(file.tensor("t"), &t);
  dequantize(file.tensor("u"), &u);
  CHECK(t == 2.0f);
  CHECK(u == 1.0f);
}

TEST_CASE("a file is replaced whole or not at all") {
  const Folder folder;
  const std::string path = folder.file("a.gguf");
  write_gguf(path, {{"a", uint8_t{1}}}, {});
  const Bytes before = file_bytes(path);
  CHECK(message([&] {
          write_gguf(path, {{"a", uint8_t{1}}, {"a", uint8_t{2}}}, {});
        }).find("duplicate") != std::string::npos);
  CHECK(message([&] {
          write_gguf(path, {{"general.alignment", uint32_t{0}}}, {});
        }).find("power of two") != std::string::npos);
  Tensor t = make_tensor("t", DType::f32, {2}, kValues);
  CHECK(message([&] { write_gguf(path, {}, {t, t}); }).find("duplicate") != std::string::npos);
  t.bytes = 4;
  CHECK(message([&] { write_gguf(path, {}, {t}); }) == path + ": tensor \"t\": bytes: expected 8, found 4");
  CHECK(file_bytes(path) == before);
  write_gguf(path, {{"a", uint8_t{3}}}, {});
  CHECK(read_gguf(path).get_u32("a") == 3);

  std::filesystem::create_directory(folder.file("taken"));
  CHECK(message([&] { write_gguf(folder.file("taken"), {}, {}); }).find("cannot write") != std::string::npos);
  CHECK(message([&] { write_gguf(folder.file("none/a.gguf"), {}, {}); }).find("cannot write") !=
        std::string::npos);
  CHECK(folder.list().size() == 2);  // nothing partial is left
}

TEST_CASE("what is not a file") {
  const Folder folder;
  for (const std::string& path : {folder.path.string(), folder.file("missing.gguf")}) {
    const std::string text = message([&] { read_gguf(path); });
    CHECK(text.find(path + ": expected a readable file, found ") == 0);
  }
  std::ofstream(folder.file("empty.gguf"));
  CHECK(message([&] { read_gguf(folder.file("empty.gguf")); }).find("empty.gguf: byte 0: magic: expected") !=
        std::string::npos);
}

// ---- getters -------------------------------------------------------------------------------------

TEST_CASE("getters: the right type, an integer that fits, or an Error that says why not") {
  const Bytes bytes = rich_file();
  const Gguf file = parse_gguf(bytes, "f");
  CHECK(file.get_u32("u8") == 255);
  CHECK(file.get_u32("u32") == 4294967295u);
  CHECK(file.get_u64("u64") == kHuge);
  CHECK(file.get_f32("f32") == 0.1f);
  CHECK(file.get_bool("bool"));
  CHECK(file.get_string("string") == std::string("caf\xc3\xa9\0!", 7));
  CHECK(file.get_strings("strings") == std::vector<std::string>{"", "a", "bc"});
  CHECK(file.get_f32s("f32s") == std::vector<float>{1.5f, -0.25f});
  CHECK(file.get_i32s("u8s") == std::vector<int32_t>{0, 255});
  CHECK(file.get_i32s("i64s") == std::vector<int32_t>{-5});
  CHECK(file.has("f64s"));
  CHECK_FALSE(file.has("f64t"));
  CHECK(file.find_tensor("u") == nullptr);
  CHECK(file.find_tensor("t") == &file.tensors[0]);

  CHECK(file.get_u32("none", 5) == 5);
  CHECK(file.get_u32("u8", 5) == 255);
  CHECK(file.get_u64("none", 6) == 6);
  CHECK(file.get_f32("none", 0.5f) == 0.5f);
  CHECK(file.get_bool("none", true));
  CHECK_FALSE(file.get_bool("none", false));
  CHECK(file.get_string("none", "x") == "x");

  CHECK(message([&] { file.get_u32("none"); }) == "f: key \"none\": expected u32, found no such key");
  CHECK(message([&] { file.get_u32("u64"); }) ==
        "f: key \"u64\": expected u32, found u64 18446744073709551615");
  CHECK(message([&] { file.get_u64("i8"); }) == "f: key \"i8\": expected u64, found i8 -128");
  CHECK(message([&] { file.get_u32("bool"); }) == "f: key \"bool\": expected u32, found bool 1");
  CHECK(message([&] { file.get_u32("string", 5); }) == "f: key \"string\": expected u32, found string");
  CHECK(message([&] { file.get_f32("f64"); }) == "f: key \"f64\": expected f32, found f64");
  CHECK(message([&] { file.get_bool("u8"); }) == "f: key \"u8\": expected bool, found u8 255");
  CHECK(message([&] { file.get_string("strings"); }) ==
        "f: key \"strings\": expected string, found array of string");
  CHECK(message([&] { file.get_strings("string"); }) ==
        "f: key \"string\": expected array of string, found string");
  CHECK(message([&] { file.get_f32s("f64s"); }) ==
        "f: key \"f64s\": expected array of f32, found array of f64");
  CHECK(message([&] { file.get_i32s("u32s"); }) ==
        "f: key \"u32s\": expected array of i32, found array of u32");
  CHECK(message([&] { file.get_i32s("bools"); }) ==
        "f: key \"bools\": expected array of i32, found array of bool");
  CHECK(message([&] { file.get_i32s("string"); }) ==
        "f: key \"string\": expected array of i32, found string");
  CHECK(message([&] { file.tensor("u"); }).find("f: tensor \"u\": expected") == 0);
}

// ---- damage --------------------------------------------------------------------------------------

TEST_CASE("cut at any byte: an Error, unless only padding is lost") {
  const Bytes bytes = rich_file();
  const size_t padding = 64 - 34;  // after the last tensor, one block of Q8_0
  for (size_t n = 0; n < bytes.size(); ++n) {
    const Bytes cut(bytes.data(), bytes.data() + n);  // of exactly n bytes, so that a sanitizer sees its end
    const std::string found = parse_error(cut);
    CAPTURE(n);
    if (n < bytes.size() - padding)
      REQUIRE(found.find("file.gguf: byte ") == 0);
    else
      REQUIRE(found == "no error");
  }
}

TEST_CASE("any one byte changed to any value: an Error or a sound file") {
  const Bytes bytes = gguf_bytes(
      {{"general.alignment", uint32_t{32}},
       {"b", true},
       {"s", std::string("xy")},
       {"n", std::vector<std::string>{"a", ""}}},
      {make_tensor("t", DType::f32, {2}, kValues), make_tensor("u", DType::f16, {4}, kValues)}, "small");
  int refused = 0, sound = 0;
  for (size_t at = 0; at < bytes.size() - 64; ++at)
    for (int value = 0; value < 256; ++value) {
      Bytes damaged(bytes.data(), bytes.data() + bytes.size());
      damaged[at] = static_cast<std::byte>(value);
      try {
        touch(parse_gguf(damaged, "damaged"));
        ++sound;
      } catch (const Error&) {
        ++refused;
      }
    }
  CHECK(refused > sound);
  CHECK(sound > 1000);  // letters of names, values, padding
}

TEST_CASE("random damage to several bytes") {
  const Bytes bytes = rich_file();
  std::mt19937 random(1);
  for (int round = 0; round < 5000; ++round) {
    Bytes damaged(bytes.data(), bytes.data() + bytes.size());
    for (int i = 0; i < 4; ++i)
      damaged[random() % damaged.size()] = static_cast<std::byte>(random() % 4 ? 0 : random() & 255);
    try {
      touch(parse_gguf(damaged, "damaged"));
    } catch (const Error& e) {
      REQUIRE(std::string(e.what()).find('\n') == std::string::npos);
    }
  }
}

TEST_CASE("hostile header") {
  check_refused(Raw().chars("GGUX").u32(3).u64(0).u64(0).bytes, 0,
                "magic: expected \"GGUF\", found \"GGUX\"");
  for (const uint64_t version : {0u, 1u, 4u, 0x03000000u})
    check_refused(Raw().chars("GGUF").u32(version).u64(0).u64(0).bytes, 4, "version: ");
  check_refused(header(kHuge, 0).bytes, 8, "tensor count: ");
  check_refused(header(1ull << 59, 0).zeros(64).bytes, 8, "tensor count: ");  // times 32 is 2^64, which is 0
  check_refused(header(3, 0).zeros(64).bytes, 8, "tensor count: expected at most 2");
  check_refused(header(0, kHuge).bytes, 16, "key count: ");
  check_refused(header(0, 2).zeros(25).bytes, 16, "key count: expected at most 1");
}

TEST_CASE("hostile keys") {
  const auto key = [](uint64_t type) { return header(0, 1).string("k").u32(type); };
  check_refused(header(0, 1).u64(kHuge).zeros(8).bytes, 24, "key 0: name: expected a length of at most 8");
  check_refused(header(0, 1).u64(9).zeros(8).bytes, 24, "key 0: name: expected a length of at most 8");
  check_refused(header(0, 1).string("abcde").bytes, 37, "key \"abcde\": type: expected 4 bytes");
  check_refused(key(13).u64(0).bytes, 33, "key \"k\": type: ");
  check_refused(key(0xffffffff).u64(0).bytes, 33, "key \"k\": type: ");
  check_refused(key(10).u32(0).bytes, 37, "key \"k\": value: expected 8 bytes, found the file's end after 4");
  check_refused(key(7).u8(2).bytes, 37, "key \"k\": value: expected a bool, 0 or 1, found 2");
  check_refused(key(7).u8(255).bytes, 37, "key \"k\": value: ");
  check_refused(key(8).u64(1ull << 63).zeros(8).bytes, 37, "key \"k\": value: expected a length");
  check_refused(key(8).u64(2).u8('x').bytes, 37, "key \"k\": value: expected a length of at most 1");
  check_refused(header(0, 2).string("k").u32(0).u8(1).string("k").u32(0).u8(1).bytes, 38,
                "key \"k\": name: ");
  // A name that would break the line, or the terminal.
  check_refused(header(0, 1).string("a\n\x1b\xff").u32(99).u8(0).bytes, 36, "key \"a???\": type: ");
}

TEST_CASE("hostile arrays") {
  const auto array = [](uint64_t item) { return header(0, 1).string("k").u32(9).u32(item); };
  check_refused(array(9).u32(0).u64(1).u8(0).bytes, 37, "key \"k\": item type: ");
  check_refused(array(13).u64(0).bytes, 37, "key \"k\": item type: ");
  for (const uint64_t item : {0u, 4u, 7u, 8u, 10u, 12u})
    for (const uint64_t count : {uint64_t{17}, uint64_t{1} << 40, uint64_t{1} << 61, kHuge})
      check_refused(array(item).u64(count).zeros(16).bytes, 41, "key \"k\": array count: expected at most ");
  check_refused(array(10).u64(3).zeros(23).bytes, 41, "key \"k\": array count: expected at most 2");
  check_refused(array(8).u64(2).zeros(15).bytes, 41, "key \"k\": array count: expected at most 1");
  check_refused(array(8).u64(2).string("ab").u64(1).bytes, 59,
                "key \"k\": array item: expected a length of at most 0");
  check_refused(array(7).u64(2).u8(1).u8(3).bytes, 50, "key \"k\": array item: expected a bool");
}

TEST_CASE("hostile alignment") {
  const auto alignment = [](uint64_t type) { return header(0, 1).string("general.alignment").u32(type); };
  for (const uint64_t value : {0u, 3u, 48u, 0x80000001u, 0xffffffffu})
    check_refused(alignment(4).u32(value).bytes, 53,
                  "key \"general.alignment\": value: expected a power of two");
  check_refused(alignment(10).u64(32).bytes, 49, "key \"general.alignment\": type: expected u32, found u64");
  check_refused(alignment(8).string("32").bytes, 49,
                "key \"general.alignment\": type: expected u32, found string");
  // The largest one moves the data section past the end: fine without tensors, refused with one.
  CHECK(parse_error(alignment(4).u32(0x80000000u).bytes) == "no error");
  Raw raw = header(1, 1).string("general.alignment").u32(4).u32(0x80000000u);
  check_refused(raw.string("t").u32(1).u64(1).u32(0).u64(0).zeros(64).bytes, 82, "tensor \"t\": offset: ");
}

TEST_CASE("hostile tensors") {
  CHECK(parse_error(one_tensor({16}, 0, 0)) == "no error");  // 64 bytes: fits exactly
  check_refused(header(1, 0).u64(kHuge).zeros(32).bytes, 24, "tensor 0: name: expected a length");
  check_refused(one_tensor({}, 0, 0), 33, "tensor \"t\": n_dims: expected 1 to 4, found 0");
  check_refused(one_tensor({1, 1, 1, 1, 1}, 0, 0), 33, "tensor \"t\": n_dims: expected 1 to 4, found 5");
  check_refused(header(1, 0).string("t").u32(0xffffffff).zeros(64).bytes, 33, "tensor \"t\": n_dims: ");
  check_refused(one_tensor({0}, 0, 0), 37, "tensor \"t\": dims[0]: expected at least 1, found 0");
  check_refused(one_tensor({4, 1, 0}, 0, 0), 37, "tensor \"t\": dims[2]: expected at least 1, found 0");
  check_refused(one_tensor({1ull << 63}, 0, 0), 37,
                "tensor \"t\": dims[0]: expected fewer than 2^63 elements");
  check_refused(one_tensor({1ull << 32, 1ull << 32}, 0, 0), 37,
                "tensor \"t\": dims[1]: expected fewer than 2^63 el");
  check_refused(one_tensor({(1ull << 62) + 1, 4}, 0, 0), 37,
                "tensor \"t\": dims[1]: expected fewer than 2^63 el");
  check_refused(one_tensor({kHuge, kHuge, 1}, 1, 0), 37,
                "tensor \"t\": dims[0]: expected fewer than 2^63 elements");
  check_refused(one_tensor({(1ull << 62) + 4}, 0, 0), 37,
                "tensor \"t\": dims: expected fewer than 2^63 bytes");
  check_refused(one_tensor({33}, 8, 0), 37,
                "tensor \"t\": dims[0]: expected a multiple of 32, the block of Q8_0");
  check_refused(one_tensor({16, 2}, 8, 0), 37, "tensor \"t\": dims[0]: expected a multiple of 32");
  for (const uint64_t type : {3u, 6u, 31u, 0xffffffffu})
    check_refused(one_tensor({1}, type, 0), 45, "tensor \"t\": type: expected a known tensor type");
  check_refused(one_tensor({1}, 0, 4), 49, "tensor \"t\": offset: expected a multiple of the alignment 32");
  check_refused(one_tensor({1}, 0, 64), 49, "tensor \"t\": offset: expected 4 bytes of data within the 64");
  check_refused(one_tensor({9}, 0, 32), 49, "tensor \"t\": offset: expected 36 bytes of data within the 64");
  check_refused(one_tensor({17}, 0, 0), 49, "tensor \"t\": offset: expected 68 bytes of data within the 64");
  check_refused(one_tensor({16}, 0, kHuge - 31), 49,
                "tensor \"t\": offset: expected 64 bytes");  // the sum wraps
  check_refused(one_tensor({1ull << 60}, 0, 1ull << 63), 49, "tensor \"t\": offset: ");

  const auto two = [](const char* second, uint64_t first_offset, uint64_t second_offset) {
    return header(2, 0)
        .string("t")
        .u32(1)
        .u64(9)
        .u32(0)
        .u64(first_offset)  // 36 bytes
        .string(second)
        .u32(1)
        .u64(1)
        .u32(0)
        .u64(second_offset)
        .zeros(134)
        .bytes;
  };
  CHECK(parse_error(two("u", 0, 64)) == "no error");
  check_refused(two("t", 0, 64), 57, "tensor \"t\": name: expected a new one, found a duplicate");
  check_refused(two("u", 0, 32), 82, "tensor \"u\": offset: expected 36 or more, the end of tensor \"t\"");
  check_refused(two("u", 0, 0), 82, "tensor \"u\": offset: expected 36 or more");
  check_refused(two("u", 64, 96), 82, "tensor \"u\": offset: expected 100 or more");
}
