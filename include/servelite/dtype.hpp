// dtype.hpp: how numbers are stored in weight files: the types, and half and bfloat16 to float and back.
//
// Chapter: docs/01_one_token.md
#pragma once

#include <bit>
#include <cstdint>

namespace servelite {

/// The values are the format's codes.
enum class DType : uint32_t { f32 = 0, f16, q4_0, q8_0 = 8, q4_k = 12, q5_k = 13, q6_k = 14, bf16 = 30 };

/// Elements are stored in blocks: `block` elements of a row in `bytes` bytes.
struct DTypeInfo {
  DType type;
  const char* name;
  uint32_t block, bytes;
};

inline constexpr DTypeInfo kDTypes[] = {
    {DType::f32, "F32", 1, 4},       {DType::f16, "F16", 1, 2},       {DType::q4_0, "Q4_0", 32, 18},
    {DType::q8_0, "Q8_0", 32, 34},   {DType::q4_k, "Q4_K", 256, 144}, {DType::q5_k, "Q5_K", 256, 176},
    {DType::q6_k, "Q6_K", 256, 210}, {DType::bf16, "BF16", 1, 2},
};

/// nullptr for a type this library does not know.
inline const DTypeInfo* find_dtype(DType type) {
  for (const DTypeInfo& info : kDTypes)
    if (info.type == type) return &info;
  return nullptr;
}

/// As they lie in memory.
struct Half {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

/// IEEE half precision, 1 sign + 5 exponent + 10 mantissa bits. Every half is a float: exact.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 0)  // zero and subnormals: mantissa * 2^-24
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-24f));
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);  // infinity, NaN
  return std::bit_cast<float>(sign | (exponent + (127 - 15)) << 23 | mantissa << 13);
}

/// Rounds to the nearest half, ties to even. NaN stays NaN (made quiet, upper payload kept).
inline uint16_t float_to_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  uint32_t h;
  if (size > 0x7f800000u) {
    h = 0x7e00u | (size >> 13 & 0x3ffu);
  } else if (size >= 0x477ff000u) {  // 65520, halfway between the largest half and 2^16, and above
    h = 0x7c00u;
  } else if (size < 0x38800000u) {
    // Below 2^-14 halves are multiples of 2^-24, and so are the floats just above 0.5: let the
    // addition round.
    h = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    const uint32_t rebiased = size - ((127u - 15u) << 23);
    h = (rebiased + 0xfffu + (rebiased >> 13 & 1u)) >> 13;  // just under half a unit; the rest when odd
  }
  return static_cast<uint16_t>(sign | h);
}

/// bfloat16 is the upper half of a float.
inline float bf16_to_float(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

/// Rounds to the nearest, ties to even. NaN stays NaN (made quiet).
inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace servelite
