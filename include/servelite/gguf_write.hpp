// gguf_write.hpp: write GGUF v3, laid out as gguf.hpp draws it.
//
// For the trainer, for presets and for tests; serving only reads. Outer circle.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "files.hpp"
#include "gguf.hpp"
#include "machine.hpp"

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

// ---- changing types --------------------------------------------------------------------------------

/// n floats as the bytes of a tensor type: F32, F16, BF16 (rounded to nearest, ties to even) or Q8_0 (blocks
/// of 32: scale = largest size / 127 as a half, numbers rounded to whole multiples of it).
inline void quantize(DType type, const float* x, size_t n, std::byte* out) {
  const auto put_next = [&out](auto number) {
    std::memcpy(out, &number, sizeof number);
    out += sizeof number;
  };
  const DTypeInfo* info = find_dtype(type);
  if (!info || n % info->block != 0)
    fail("quantize: expected a multiple of the type's block, found ", n, " numbers");
  if (type == DType::f32) return void(std::memcpy(out, x, n * 4));
  for (size_t i = 0; i < n; i += info->block) {
    if (type == DType::f16)
      put_next(float_to_half(x[i]));
    else if (type == DType::bf16)
      put_next(float_to_bf16(x[i]));
    else if (type == DType::q8_0) {
      float top = 0;
      for (size_t k = i; k < i + 32; ++k) top = std::max(top, std::abs(x[k]));
      const uint16_t scale = float_to_half(top / 127.0f);
      const float d = half_to_float(scale);
      put_next(scale);
      for (size_t k = i; k < i + 32; ++k)
        put_next(static_cast<int8_t>(d > 0 ? std::clamp(std::nearbyint(x[k] / d), -127.0f, 127.0f) : 0.0f));
    } else {
      fail("quantize: expected F32, F16, BF16 or Q8_0, found ", info->name);
    }
  }
}

/// "f32", "f16", "bf16" or "q8_0", as the programs' --type has it.
inline DType dtype_of(const std::string& name) {
  if (name == "f32") return DType::f32;
  if (name == "f16") return DType::f16;
  if (name == "bf16") return DType::bf16;
  if (name == "q8_0") return DType::q8_0;
  fail("type: expected f32, f16, bf16 or q8_0, found '", name, "'");
}

/// The same model with its matrices in another type; vectors stay as they are. The result owns its bytes.
inline Gguf convert(const Gguf& file, DType type) {
  Gguf out{file.name, file.metadata, {}, file.alignment, {}, false};
  auto memory = std::make_shared<std::vector<std::shared_ptr<std::byte>>>();
  for (const Tensor& t : file.tensors) {
    Tensor converted = make_tensor(t.name, t.dims.size() < 2 ? t.type : type, t.dims, nullptr);
    memory->push_back(allocate(static_cast<size_t>(converted.bytes)));
    converted.data = memory->back().get();
    if (converted.type == t.type) {
      std::memcpy(memory->back().get(), t.data, static_cast<size_t>(t.bytes));
    } else {
      std::vector<float> values(static_cast<size_t>(t.elements()));
      dequantize(t, values.data());
      quantize(type, values.data(), values.size(), memory->back().get());
    }
    out.tensors.push_back(std::move(converted));
  }
  out.bytes = memory;
  return out;
}

}  // namespace servelite
