// gguf.hpp: read GGUF, the file format of weights and vocabularies (version 3; reads 2 too).
//
//   "GGUF" | u32 version | u64 tensor count | u64 key count
//   per key:     string name | u32 type | value             string: u64 length, bytes
//   per tensor:  string name | u32 n_dims | u64 dims[] | u32 type | u64 offset
//   padding to a multiple of general.alignment (32 if absent)
//   data section: each tensor at its offset, counted from here, padded to the alignment
//
// All numbers are little endian. dims[0] is the row length: its elements lie next to each other.
//
// A file comes from outside, so no number in it is used before it is checked: a count must fit into
// the bytes that are left, a tensor into the file. Whatever the bytes are, the result is either a Gguf
// that is safe to use or an Error that names file, byte offset, field, what was expected and found.
//
// Rules of use
//  1. A Tensor is a view. After read_gguf() the Gguf (and its copies) keep the bytes alive; after
//     parse_gguf() the caller does.
//  2. Getters throw when a key is missing; those with a second argument return it instead. A key of
//     the wrong type always throws.
//
// Chapter: docs/01_one_token.md. Format: the GGUF specification in the ggml project.
#pragma once

#include <algorithm>
#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "dtype.hpp"
#include "error.hpp"
#include "machine.hpp"

namespace servelite {

static_assert(std::endian::native == std::endian::little, "GGUF is copied byte by byte: little endian only");

// ---- what a file holds ---------------------------------------------------------------------------

/// A metadata value: twelve scalar types, then the arrays of each, in the same order.
using Value =
    std::variant<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, float, bool, std::string, uint64_t,
                 int64_t, double, std::vector<uint8_t>, std::vector<int8_t>, std::vector<uint16_t>,
                 std::vector<int16_t>, std::vector<uint32_t>, std::vector<int32_t>, std::vector<float>,
                 std::vector<bool>, std::vector<std::string>, std::vector<uint64_t>, std::vector<int64_t>,
                 std::vector<double>>;

using Metadata = std::vector<std::pair<std::string, Value>>;  // in the order of the file

struct Tensor {
  std::string name;
  DType type = DType::f32;
  std::vector<uint64_t> dims;       // dims[0] = row length
  const std::byte* data = nullptr;  // bytes long; aligned as the file says
  uint64_t bytes = 0;

  uint64_t elements() const {
    uint64_t n = 1;
    for (const uint64_t d : dims) n *= d;
    return n;
  }
};

namespace gguf_detail {

inline constexpr size_t kScalars = std::variant_size_v<Value> / 2;
inline constexpr uint32_t kTypeCode[kScalars] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12};
inline constexpr uint32_t kArrayCode = 9;
inline constexpr const char* kTypeName[kScalars] = {"u8",  "i8",   "u16",    "i16", "u32", "i32",
                                                    "f32", "bool", "string", "u64", "i64", "f64"};

inline std::string type_name(const Value& v) {
  return std::string(v.index() < kScalars ? "" : "array of ") + kTypeName[v.index() % kScalars];
}

/// Type, and for an integer its value: that it does not fit may be what is wrong.
inline std::string described(const Value& v) {
  std::string text = type_name(v);
  std::visit(
      [&text](const auto& x) {
        if constexpr (std::is_integral_v<std::decay_t<decltype(x)>>) text += " " + std::to_string(x);
      },
      v);
  return text;
}

/// Text of the file as an error shows it: short, and on one line whatever the bytes are.
inline std::string shown(std::string_view text) {
  std::string out = "\"";
  for (const char c : text.substr(0, 64)) out += c >= ' ' && c <= '~' ? c : '?';
  return out + (text.size() > 64 ? "...\"" : "\"");
}

template <class T>
inline constexpr bool is_integer = std::is_integral_v<T> && !std::is_same_v<T, bool>;

/// to = from, if both are of one type, or both integers and the value fits.
template <class From, class To>
bool convert(const From& from, To& to) {
  if constexpr (std::is_same_v<From, To>) {
    to = from;
    return true;
  } else if constexpr (is_integer<From> && is_integer<To>) {
    to = static_cast<To>(from);
    return std::in_range<To>(from);
  } else {
    return false;
  }
}
template <class From, class To>
bool convert(const std::vector<From>& from, std::vector<To>& to) {
  To item{};
  for (const From& x : from) {
    if (!convert(x, item)) return false;
    to.push_back(item);
  }
  return std::is_same_v<From, To> || (is_integer<From> && is_integer<To>);  // empty lists have a type too
}

}  // namespace gguf_detail

struct Gguf {
  std::string name;  // of the file, for errors
  Metadata metadata;
  std::vector<Tensor> tensors;
  uint32_t alignment = 32;
  std::shared_ptr<const void> bytes;  // what the tensors point into; empty after parse_gguf()
  bool mapped = false;                // bytes is the file itself, paged in by the system

  const Value* find(std::string_view key) const {
    for (const auto& [k, value] : metadata)
      if (k == key) return &value;
    return nullptr;
  }
  bool has(std::string_view key) const { return find(key) != nullptr; }

  /// The value of a key; `otherwise`, if given, when there is none. Integers, alone or in a list, are
  /// accepted from any integer type of the file as long as they fit.
  template <class T>
  T get(std::string_view key, const std::optional<T>& otherwise = {}) const {
    using namespace gguf_detail;
    const Value* v = find(key);
    if (!v && otherwise) return *otherwise;
    T result{};
    if (v && std::visit([&](const auto& x) { return convert(x, result); }, *v)) return result;
    fail(name, ": key ", shown(key), ": expected ", type_name(Value(T{})), ", found ",
         v ? described(*v) : "no such key");
  }
  uint32_t get_u32(std::string_view key, std::optional<uint32_t> otherwise = {}) const {
    return get(key, otherwise);
  }
  uint64_t get_u64(std::string_view key, std::optional<uint64_t> otherwise = {}) const {
    return get(key, otherwise);
  }
  float get_f32(std::string_view key, std::optional<float> otherwise = {}) const {
    return get(key, otherwise);
  }
  bool get_bool(std::string_view key, std::optional<bool> otherwise = {}) const {
    return get(key, otherwise);
  }
  std::string get_string(std::string_view key, const std::optional<std::string>& otherwise = {}) const {
    return get(key, otherwise);
  }
  std::vector<std::string> get_strings(std::string_view key) const {
    return get<std::vector<std::string>>(key);
  }
  std::vector<float> get_f32s(std::string_view key) const { return get<std::vector<float>>(key); }
  std::vector<int32_t> get_i32s(std::string_view key) const { return get<std::vector<int32_t>>(key); }

  const Tensor* find_tensor(std::string_view tensor_name) const {
    for (const Tensor& t : tensors)
      if (t.name == tensor_name) return &t;
    return nullptr;
  }
  const Tensor& tensor(std::string_view tensor_name) const {
    if (const Tensor* t = find_tensor(tensor_name)) return *t;
    fail(name, ": tensor ", gguf_detail::shown(tensor_name), ": expected among ", tensors.size(),
         " tensors, found none of that name");
  }
};

/// Bytes of a tensor of this shape. Throws Error, which begins with `where`, if there is no such tensor.
inline uint64_t tensor_bytes(const std::string& where, DType type, const std::vector<uint64_t>& dims) {
  constexpr uint64_t most = std::numeric_limits<int64_t>::max();
  const DTypeInfo* info = find_dtype(type);
  if (!info) fail(where, ": type: expected a known tensor type, found ", static_cast<uint32_t>(type));
  if (dims.empty() || dims.size() > 4) fail(where, ": n_dims: expected 1 to 4, found ", dims.size());
  uint64_t elements = 1;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] == 0) fail(where, ": dims[", i, "]: expected at least 1, found 0");
    if (elements > most / dims[i])
      fail(where, ": dims[", i, "]: expected fewer than 2^63 elements, found ", elements, " times ", dims[i]);
    elements *= dims[i];
  }
  if (dims[0] % info->block != 0)
    fail(where, ": dims[0]: expected a multiple of ", info->block, ", the block of ", info->name, ", found ",
         dims[0]);
  if (elements / info->block > most / info->bytes)
    fail(where, ": dims: expected fewer than 2^63 bytes, found ", elements, " elements of ", info->name);
  return elements / info->block * info->bytes;
}

/// A view of `data`, for write_gguf().
inline Tensor make_tensor(std::string name, DType type, std::vector<uint64_t> dims, const void* data) {
  const uint64_t bytes = tensor_bytes("tensor " + gguf_detail::shown(name), type, dims);
  return {std::move(name), type, std::move(dims), static_cast<const std::byte*>(data), bytes};
}

/// out[elements] = the tensor as floats. Q8_0: blocks of an f16 scale d and 32 i8 q, value d q.
inline void dequantize(const Tensor& t, float* out) {
  const std::byte* in = t.data;
  const auto next = [&in](auto number) {  // of the same type; memcpy, as data need not be aligned
    std::memcpy(&number, in, sizeof number);
    in += sizeof number;
    return number;
  };
  float* const end = out + t.elements();
  switch (t.type) {
    case DType::f32: std::memcpy(out, in, t.bytes); return;
    case DType::f16:
      while (out != end) *out++ = half_to_float(next(uint16_t{}));
      return;
    case DType::bf16:
      while (out != end) *out++ = bf16_to_float(next(uint16_t{}));
      return;
    case DType::q8_0:
      while (out != end) {
        const float scale = half_to_float(next(uint16_t{}));
        for (int i = 0; i < 32; ++i) *out++ = scale * static_cast<float>(next(int8_t{}));
      }
      return;
    default:
      fail("tensor ", gguf_detail::shown(t.name), ": expected F32, F16, BF16 or Q8_0, found ",
           find_dtype(t.type) ? find_dtype(t.type)->name : "an unknown type");
  }
}

// ---- reading -------------------------------------------------------------------------------------

namespace gguf_detail {

/// Walks through the bytes. The only code that touches them before they are known to be sound.
struct Reader {
  std::span<const std::byte> bytes;
  const std::string& name;
  size_t at = 0;
  std::string item = {};  // what is being read, for errors: `key "general.name": `

  size_t left() const { return bytes.size() - at; }

  template <class... Parts>
  [[noreturn]] void wrong(size_t where, const Parts&... parts) const {
    fail(name, ": byte ", where, ": ", item, parts...);
  }

  /// The next number, bool or string.
  template <class T>
  T read(const char* field) {
    if constexpr (std::is_same_v<T, std::string>) {
      const uint64_t length = read<uint64_t>(field);
      if (length > left())
        wrong(at - 8, field, ": expected a length of at most ", left(), ", the bytes left, found ", length);
      std::string text(reinterpret_cast<const char*>(bytes.data()) + at, static_cast<size_t>(length));
      at += text.size();
      return text;
    } else if constexpr (std::is_same_v<T, bool>) {
      const unsigned byte = read<uint8_t>(field);
      if (byte > 1) wrong(at - 1, field, ": expected a bool, 0 or 1, found ", byte);
      return byte == 1;
    } else {
      if (left() < sizeof(T))
        wrong(at, field, ": expected ", sizeof(T), " bytes, found the file's end after ", left());
      T number;
      std::memcpy(&number, bytes.data() + at, sizeof number);
      at += sizeof number;
      return number;
    }
  }

  /// A number of things that take at least `each` bytes, so that memory is only asked for what is there.
  size_t count(const char* field, size_t each) {
    const uint64_t n = read<uint64_t>(field);
    if (n > left() / each)
      wrong(at - 8, field, ": expected at most ", left() / each, ", ", each, " bytes or more each in the ",
            left(), " left, found ", n);
    return static_cast<size_t>(n);
  }
};

template <class T>
Value read_as(Reader& r, bool array) {
  if (!array) return r.read<T>("value");
  const size_t count = r.count("array count", std::is_same_v<T, std::string> ? 8 : sizeof(T));
  std::vector<T> items;
  items.reserve(count);
  for (size_t i = 0; i < count; ++i) items.push_back(r.read<T>("array item"));
  return items;
}

inline Value read_value(Reader& r) {
  uint32_t code = r.read<uint32_t>("type");
  const bool array = code == kArrayCode;
  if (array) {
    code = r.read<uint32_t>("item type");
    if (code == kArrayCode)
      r.wrong(r.at - 4, "item type: expected a scalar or string, found an array in an array");
  }
  if (code == 0) return read_as<uint8_t>(r, array);
  if (code == 1) return read_as<int8_t>(r, array);
  if (code == 2) return read_as<uint16_t>(r, array);
  if (code == 3) return read_as<int16_t>(r, array);
  if (code == 4) return read_as<uint32_t>(r, array);
  if (code == 5) return read_as<int32_t>(r, array);
  if (code == 6) return read_as<float>(r, array);
  if (code == 7) return read_as<bool>(r, array);
  if (code == 8) return read_as<std::string>(r, array);
  if (code == 10) return read_as<uint64_t>(r, array);
  if (code == 11) return read_as<int64_t>(r, array);
  if (code == 12) return read_as<double>(r, array);
  r.wrong(r.at - 4, array ? "item type" : "type", ": expected a value type from 0 to 12, found ", code);
}

/// The name of the index-th key or tensor; from here on errors are about that one.
inline std::string read_new_name(Reader& r, const char* kind, size_t index, std::set<std::string>& seen) {
  r.item = kind + (" " + std::to_string(index)) + ": ";
  const size_t start = r.at;
  std::string name = r.read<std::string>("name");
  r.item = kind + (" " + shown(name)) + ": ";
  if (!seen.insert(name).second) r.wrong(start, "name: expected a new one, found a duplicate");
  return name;
}

inline void read_metadata(Reader& r, size_t count, Gguf& file) {
  std::set<std::string> seen;
  for (size_t i = 0; i < count; ++i) {
    std::string key = read_new_name(r, "key", i, seen);
    const size_t type_at = r.at;
    Value value = read_value(r);
    if (key == "general.alignment") {  // the one key that the format itself uses
      const uint32_t* alignment = std::get_if<uint32_t>(&value);
      if (!alignment) r.wrong(type_at, "type: expected u32, found ", type_name(value));
      if (!std::has_single_bit(*alignment))
        r.wrong(type_at + 4, "value: expected a power of two, found ", *alignment);
      file.alignment = *alignment;
    }
    file.metadata.emplace_back(std::move(key), std::move(value));
  }
}

inline uint64_t align_up(uint64_t x, uint64_t alignment) {
  return (x + alignment - 1) / alignment * alignment;
}

/// Where a tensor says its data lies, and where in the file it says so.
struct Placement {
  uint64_t offset;  // from the start of the data section
  size_t said_at;
  size_t tensor;  // index

  auto operator<=>(const Placement&) const = default;  // by offset
};

/// Checks that every tensor lies within the file and none in another, and sets the data pointers.
inline void place_tensors(Reader& r, std::vector<Placement> placements, std::vector<Tensor>& tensors,
                          uint64_t alignment) {
  const uint64_t start = align_up(r.at, alignment), size = r.bytes.size();
  const uint64_t room = size > start ? size - start : 0;
  for (const Placement& p : placements) {
    Tensor& t = tensors[p.tensor];
    r.item = "tensor " + shown(t.name) + ": ";
    if (p.offset > room || t.bytes > room - p.offset)
      r.wrong(p.said_at, "offset: expected ", t.bytes, " bytes of data within the ", room,
              " of the data section, found offset ", p.offset);
    t.data = r.bytes.data() + start + p.offset;
  }
  std::sort(placements.begin(), placements.end());
  for (size_t i = 1; i < placements.size(); ++i) {
    const Tensor &before = tensors[placements[i - 1].tensor], &t = tensors[placements[i].tensor];
    const uint64_t end = placements[i - 1].offset + before.bytes;
    r.item = "tensor " + shown(t.name) + ": ";
    if (placements[i].offset < end)
      r.wrong(placements[i].said_at, "offset: expected ", end, " or more, the end of tensor ",
              shown(before.name), ", found an overlap at ", placements[i].offset);
  }
}

inline void read_tensors(Reader& r, size_t count, Gguf& file) {
  std::set<std::string> seen;
  std::vector<Placement> placements;
  for (size_t i = 0; i < count; ++i) {
    Tensor t;
    t.name = read_new_name(r, "tensor", i, seen);
    const uint32_t n_dims = r.read<uint32_t>("n_dims");
    if (n_dims < 1 || n_dims > 4) r.wrong(r.at - 4, "n_dims: expected 1 to 4, found ", n_dims);
    const size_t dims_at = r.at;
    for (uint32_t d = 0; d < n_dims; ++d) t.dims.push_back(r.read<uint64_t>("dims"));
    t.type = static_cast<DType>(r.read<uint32_t>("type"));
    if (!find_dtype(t.type))
      r.wrong(r.at - 4, "type: expected a known tensor type, found ", static_cast<uint32_t>(t.type));
    t.bytes = tensor_bytes(r.name + ": byte " + std::to_string(dims_at) + ": tensor " + shown(t.name), t.type,
                           t.dims);
    const uint64_t offset = r.read<uint64_t>("offset");
    if (offset % file.alignment != 0)
      r.wrong(r.at - 8, "offset: expected a multiple of the alignment ", file.alignment, ", found ", offset);
    placements.push_back({offset, r.at - 8, i});
    file.tensors.push_back(std::move(t));
  }
  place_tensors(r, std::move(placements), file.tensors, file.alignment);
}

}  // namespace gguf_detail

/// Reads a GGUF from memory. The tensors point into `bytes`, which has to outlive them.
inline Gguf parse_gguf(std::span<const std::byte> bytes, std::string name_for_errors) {
  Gguf file;
  file.name = std::move(name_for_errors);
  gguf_detail::Reader r{bytes, file.name};
  if (r.read<uint32_t>("magic") != 0x46554747)  // "GGUF", the first character lowest
    r.wrong(0, "magic: expected \"GGUF\", found ",
            gguf_detail::shown({reinterpret_cast<const char*>(bytes.data()), 4}));
  const uint32_t version = r.read<uint32_t>("version");
  if (version != 2 && version != 3) r.wrong(4, "version: expected 2 or 3, little endian, found ", version);
  const size_t tensors = r.count("tensor count", 8 + 4 + 8 + 4 + 8);  // an unnamed vector
  const size_t keys = r.count("key count", 8 + 4 + 1);                // an unnamed byte
  gguf_detail::read_metadata(r, keys, file);
  gguf_detail::read_tensors(r, tensors, file);
  return file;
}

/// Opens a file: its bytes are mapped where the system can do that, else read, and kept by the result.
inline Gguf read_gguf(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))  // a directory opens, and claims to be 2^63 bytes long
    fail(path, ": expected a readable file, found ", error ? error.message() : "something else");
  const size_t size = static_cast<size_t>(std::filesystem::file_size(path, error));
  if (error) fail(path, ": expected a readable file, found ", error.message());
  std::shared_ptr<std::byte> bytes = map_file(path, size);
  const bool mapped = bytes != nullptr;
  if (!mapped) {
    bytes = allocate(size);
    std::ifstream in(path, std::ios::binary);
    in.read(reinterpret_cast<char*>(bytes.get()), static_cast<std::streamsize>(size));
    if (!in) fail(path, ": expected ", size, " bytes, could read ", in.gcount());
  }
  Gguf file = parse_gguf({bytes.get(), size}, path);
  file.bytes = bytes, file.mapped = mapped;
  return file;
}

}  // namespace servelite
