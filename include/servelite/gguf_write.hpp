// gguf_write.hpp: write GGUF v3, laid out as gguf.hpp draws it.
//
// For the trainer, for presets and for tests; serving only reads. Outer circle.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "files.hpp"
#include "gguf.hpp"

namespace servelite {

namespace gguf_detail {

inline void put_bytes(std::vector<std::byte>& out, const void* data, size_t size) {
  const auto* first = static_cast<const std::byte*>(data);
  out.insert(out.end(), first, first + size);
}

template <class T>
void put(std::vector<std::byte>& out, const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    put(out, static_cast<uint64_t>(value.size()));
    put_bytes(out, value.data(), value.size());
  } else {
    static_assert(std::is_arithmetic_v<T>);
    put_bytes(out, &value, sizeof value);
  }
}

template <class T>
void put(std::vector<std::byte>& out, const std::vector<T>& items) {
  put(out, static_cast<uint64_t>(items.size()));
  for (const T& item : items) put(out, item);
}

inline void put_value(std::vector<std::byte>& out, const Value& value) {
  if (value.index() >= kScalars) put(out, kArrayCode);
  put(out, kTypeCode[value.index() % kScalars]);
  std::visit([&out](const auto& v) { put(out, v); }, value);
}

}  // namespace gguf_detail

/// The bytes of a GGUF v3 file: the same arguments always give the same bytes. The alignment is that of
/// key general.alignment, 32 without it. Throws Error rather than write what read_gguf() would refuse.
inline std::vector<std::byte> gguf_bytes(const Metadata& metadata, const std::vector<Tensor>& tensors,
                                         const std::string& name_for_errors) {
  using gguf_detail::put;
  uint64_t alignment = 32;
  for (const auto& [key, value] : metadata)
    if (const auto* a = std::get_if<uint32_t>(&value);
        key == "general.alignment" && a && std::has_single_bit(*a))
      alignment = *a;  // any other is refused below

  std::vector<std::byte> out;
  gguf_detail::put_bytes(out, "GGUF", 4);
  put(out, uint32_t{3});
  put(out, static_cast<uint64_t>(tensors.size()));
  put(out, static_cast<uint64_t>(metadata.size()));
  for (const auto& [key, value] : metadata) {
    put(out, key);
    gguf_detail::put_value(out, value);
  }
  uint64_t offset = 0;
  for (const Tensor& t : tensors) {
    const std::string where = name_for_errors + ": tensor " + gguf_detail::shown(t.name);
    const uint64_t expected = tensor_bytes(where, t.type, t.dims);
    if (t.bytes != expected) fail(where, ": bytes: expected ", expected, ", found ", t.bytes);
    put(out, t.name);
    put(out, static_cast<uint32_t>(t.dims.size()));
    for (const uint64_t d : t.dims) put(out, d);
    put(out, static_cast<uint32_t>(t.type));
    put(out, offset);
    offset = gguf_detail::align_up(offset + t.bytes, alignment);
  }
  const auto pad = [&] { out.resize(static_cast<size_t>(gguf_detail::align_up(out.size(), alignment))); };
  pad();
  for (const Tensor& t : tensors) {
    gguf_detail::put_bytes(out, t.data, static_cast<size_t>(t.bytes));
    pad();
  }
  parse_gguf(out, name_for_errors);  // refuses duplicate names and a bad alignment
  return out;
}

/// Writes a GGUF v3 file; never half a one (files.hpp).
inline void write_gguf(const std::string& path, const Metadata& metadata,
                       const std::vector<Tensor>& tensors) {
  const std::vector<std::byte> bytes = gguf_bytes(metadata, tensors, path);
  write_file(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

}  // namespace servelite
