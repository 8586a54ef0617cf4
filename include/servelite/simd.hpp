// simd.hpp: f32x16, sixteen floats that every machine adds and multiplies alike.
//
// The library's promise is that no bit of a logit depends on the machine's vector width. So there is
// one vector type, always 16 lanes, behind which stand one AVX-512 register, two AVX2 registers, four
// NEON registers or sixteen plain floats. Each lane is an ordinary IEEE-754 float, and each operation
// below rounds once per lane, so the four versions agree to the last bit.
//
// Rules of use
//  1. Where a fused multiply-add is meant, write fma(). Never write mul() inside add() or sub(): a
//     compiler may or may not fuse the two, and the bits would then depend on its mood.
//  2. Sums across lanes go through sum(), one fixed tree: ((l, l+8), (l, l+4), (l, l+2), (l, l+1)).
//
// Chapter: docs/02_prefill_and_decode.md
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "dtype.hpp"

#if defined(__AVX512BW__) || (defined(__AVX2__) && defined(__FMA__))
  #include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
  #include <arm_neon.h>
#endif

namespace servelite {

// ---- what one register is, per instruction set ------------------------------------------------

// Selected by the compiler's flags (-march=native, -mavx2 -mfma, ...). Defining SERVELITE_PLAIN
// forces the plain version, for tests that compare the variants.
namespace lanes {
#if defined(__AVX512BW__) && !defined(SERVELITE_PLAIN)
inline constexpr const char* kName = "AVX-512";
using reg = __m512;
inline constexpr int kCount = 16;
inline reg load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, reg a) { _mm512_storeu_ps(p, a); }
inline reg splat(float x) { return _mm512_set1_ps(x); }
inline reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
inline reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
inline reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
inline reg div(reg a, reg b) { return _mm512_div_ps(a, b); }
inline reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
// max is a > b ? a : b on every machine, so that it agrees on NaN and -0. The masked forms: g++ 12 warns
// about the plain.
inline reg max(reg a, reg b) { return _mm512_maskz_max_ps(0xFFFF, a, b); }
inline reg min(reg a, reg b) { return _mm512_maskz_min_ps(0xFFFF, a, b); }
inline void keep(reg& a) { asm("" : "+v"(a)); }
inline reg widen(const Half* p) {
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#elif defined(__AVX2__) && defined(__FMA__) && !defined(SERVELITE_PLAIN)
inline constexpr const char* kName = "AVX2";
using reg = __m256;
inline constexpr int kCount = 8;
inline reg load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, reg a) { _mm256_storeu_ps(p, a); }
inline reg splat(float x) { return _mm256_set1_ps(x); }
inline reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
inline reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
inline reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
inline reg div(reg a, reg b) { return _mm256_div_ps(a, b); }
inline reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
inline reg max(reg a, reg b) { return _mm256_max_ps(a, b); }
inline reg min(reg a, reg b) { return _mm256_min_ps(a, b); }
inline void keep(reg& a) { asm("" : "+x"(a)); }
  #ifdef __F16C__
inline reg widen(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
  #else
inline reg widen(const Half* p) {
  float x[8];
  for (int i = 0; i < 8; ++i) x[i] = half_to_float(p[i].bits);
  return load(x);
}
  #endif
#elif defined(__ARM_NEON) && defined(__aarch64__) && !defined(SERVELITE_PLAIN)
inline constexpr const char* kName = "NEON";
using reg = float32x4_t;
inline constexpr int kCount = 4;
inline reg load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, reg a) { vst1q_f32(p, a); }
inline reg splat(float x) { return vdupq_n_f32(x); }
inline reg add(reg a, reg b) { return vaddq_f32(a, b); }
inline reg sub(reg a, reg b) { return vsubq_f32(a, b); }
inline reg mul(reg a, reg b) { return vmulq_f32(a, b); }
inline reg div(reg a, reg b) { return vdivq_f32(a, b); }
inline reg fma(reg a, reg b, reg c) { return vfmaq_f32(c, a, b); }
inline reg max(reg a, reg b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline reg min(reg a, reg b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline void keep(reg& a) { asm("" : "+w"(a)); }
inline reg widen(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
#else
inline constexpr const char* kName = "plain";
using reg = float;
inline constexpr int kCount = 1;
inline reg load(const float* p) { return *p; }
inline void store(float* p, reg a) { *p = a; }
inline reg splat(float x) { return x; }
inline reg add(reg a, reg b) { return a + b; }
inline reg sub(reg a, reg b) { return a - b; }
inline reg mul(reg a, reg b) { return a * b; }
inline reg div(reg a, reg b) { return a / b; }
inline reg fma(reg a, reg b, reg c) { return std::fma(a, b, c); }
inline reg max(reg a, reg b) { return a > b ? a : b; }
inline reg min(reg a, reg b) { return a < b ? a : b; }
inline void keep(reg&) {}
inline reg widen(const Half* p) { return half_to_float(p->bits); }
#endif
inline constexpr int kRegs = 16 / kCount;

// Integers of the same shape need no intrinsics: the compilers' vector types have shifts and conversions.
using ints = int32_t __attribute__((vector_size(4 * kCount)));
using shorts = uint16_t __attribute__((vector_size(2 * kCount)));

inline reg shift_to_exponent(reg t) {
  return std::bit_cast<reg>((std::bit_cast<ints>(t) << 23) + (127 << 23));
}
inline reg widen(const Bf16* p) {
  shorts upper;
  std::memcpy(&upper, p, sizeof upper);
  return std::bit_cast<reg>(__builtin_convertvector(upper, ints) << 16);
}
inline reg to_float(ints a) {
  using floats = float __attribute__((vector_size(4 * kCount)));
  return std::bit_cast<reg>(__builtin_convertvector(a, floats));
}

/// acc + w . x per lane: each lane of w holds four bytes 0..255, x the same four numbers -128..127 for all.
inline ints dot4(ints acc, ints w, ints x) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(SERVELITE_PLAIN)
  return std::bit_cast<ints>(
      _mm512_dpbusd_epi32(std::bit_cast<__m512i>(acc), std::bit_cast<__m512i>(w), std::bit_cast<__m512i>(x)));
#elif defined(__AVX512BW__) && !defined(SERVELITE_PLAIN)
  const auto w16 = std::bit_cast<__m512i>(w), x16 = std::bit_cast<__m512i>(x);  // pairs (0, 2) and (1, 3)
  const auto even = _mm512_madd_epi16(_mm512_and_si512(w16, _mm512_set1_epi16(255)),
                                      _mm512_srai_epi16(_mm512_slli_epi16(x16, 8), 8));
  const auto odd = _mm512_madd_epi16(_mm512_srli_epi16(w16, 8), _mm512_srai_epi16(x16, 8));
  return acc + std::bit_cast<ints>(even) + std::bit_cast<ints>(odd);
#elif defined(__AVX2__) && defined(__FMA__) && !defined(SERVELITE_PLAIN)
  const auto w16 = std::bit_cast<__m256i>(w), x16 = std::bit_cast<__m256i>(x);
  const auto even = _mm256_madd_epi16(_mm256_and_si256(w16, _mm256_set1_epi16(255)),
                                      _mm256_srai_epi16(_mm256_slli_epi16(x16, 8), 8));
  const auto odd = _mm256_madd_epi16(_mm256_srli_epi16(w16, 8), _mm256_srai_epi16(x16, 8));
  return acc + std::bit_cast<ints>(even) + std::bit_cast<ints>(odd);
#else
  for (int i = 0; i < 4; ++i) acc += (w >> 8 * i & 255) * (x << (24 - 8 * i) >> 24);
  return acc;
#endif
}
}  // namespace lanes

// ---- the type ---------------------------------------------------------------------------------

struct f32x16 {
  lanes::reg part[lanes::kRegs];
};

// One operation, register by register; the loop unrolls completely.
#define SERVELITE_EACH_REG _Pragma("GCC unroll 16") for (int i = 0; i < lanes::kRegs; ++i)

inline f32x16 load(const float* p) {
  f32x16 y;
  SERVELITE_EACH_REG y.part[i] = lanes::load(p + i * lanes::kCount);
  return y;
}
inline void store(float* p, f32x16 a) { SERVELITE_EACH_REG lanes::store(p + i * lanes::kCount, a.part[i]); }
inline f32x16 splat(float x) {
  f32x16 y;
  SERVELITE_EACH_REG y.part[i] = lanes::splat(x);
  return y;
}
#define SERVELITE_BINARY(name)                                        \
  inline f32x16 name(f32x16 a, f32x16 b) {                            \
    SERVELITE_EACH_REG a.part[i] = lanes::name(a.part[i], b.part[i]); \
    return a;                                                         \
  }
SERVELITE_BINARY(add)
SERVELITE_BINARY(sub)
SERVELITE_BINARY(mul)
SERVELITE_BINARY(div)
SERVELITE_BINARY(max)
SERVELITE_BINARY(min)
#undef SERVELITE_BINARY

/// Sixteen stored numbers as floats; every half and every bfloat16 is a float, so nothing is rounded.
inline f32x16 load(const Half* p) {
  f32x16 y;
  SERVELITE_EACH_REG y.part[i] = lanes::widen(p + i * lanes::kCount);
  return y;
}
inline f32x16 load(const Bf16* p) {
  f32x16 y;
  SERVELITE_EACH_REG y.part[i] = lanes::widen(p + i * lanes::kCount);
  return y;
}

/// a * b + c, rounded once.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  SERVELITE_EACH_REG c.part[i] = lanes::fma(a.part[i], b.part[i], c.part[i]);
  return c;
}

/// Tells the compiler to hold a loaded value in a register. Left alone, g++ loads a weight again from the
/// cache for every row that uses it, which halves the speed of small batches.
inline f32x16 keep(f32x16 a) {
  SERVELITE_EACH_REG lanes::keep(a.part[i]);
  return a;
}

/// Sixteen integers, or sixteen times four bytes. Integer sums are exact, so their order is free.
struct i32x16 {
  lanes::ints part[lanes::kRegs];
};
inline i32x16 load_bytes(const void* p) {
  i32x16 y;
  std::memcpy(&y, p, sizeof y);
  return y;
}
inline i32x16 splat_int(int32_t x) {
  i32x16 y;
  SERVELITE_EACH_REG y.part[i] = lanes::ints{} + x;
  return y;
}
inline f32x16 to_float(i32x16 a) {
  f32x16 y;
  SERVELITE_EACH_REG y.part[i] = lanes::to_float(a.part[i]);
  return y;
}
inline i32x16 keep(i32x16 a) {
  SERVELITE_EACH_REG {
    auto part = std::bit_cast<lanes::reg>(a.part[i]);
    lanes::keep(part);
    a.part[i] = std::bit_cast<lanes::ints>(part);
  }
  return a;
}
/// Lane by lane: acc + w[0] x[0] + .. + w[3] x[3], w unsigned and x signed bytes.
inline i32x16 dot4(i32x16 acc, i32x16 w, i32x16 x) {
  SERVELITE_EACH_REG acc.part[i] = lanes::dot4(acc.part[i], w.part[i], x.part[i]);
  return acc;
}

/// The sum of the sixteen lanes, always in the same order.
inline float sum(f32x16 a) {
  float s[16];
  store(s, a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) s[i] += s[i + half];
  return s[0];
}

/// e^x per lane, relative error below 2e-7; x is clamped to [-87, 88].
/// e^x = 2^n * e^r with n = round(x / ln 2). Adding 1.5 * 2^23 rounds to an integer and leaves n in the
/// low bits of the float, from where a shift puts it into the exponent. ln 2 is subtracted in two
/// parts (Cody and Waite, 1980) so that r keeps its bits; e^r is its Taylor series to r^7.
inline f32x16 exp(f32x16 x) {
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  const f32x16 magic = splat(12582912.0f);
  const f32x16 t = fma(x, splat(1.44269504f), magic);
  const f32x16 n = sub(t, magic);
  f32x16 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = fma(p, r, splat(c));
  f32x16 scale;
  SERVELITE_EACH_REG scale.part[i] = lanes::shift_to_exponent(t.part[i]);
  return mul(p, scale);  // exact: the scale is a power of two
}
#undef SERVELITE_EACH_REG

/// The same for one float, bit for bit.
inline float exp1(float x) {
  float y[16];
  store(y, exp(splat(x)));
  return y[0];
}

// ---- double-precision functions that do not depend on the machine's libm ------------------------
// libm's last bit differs from system to system; these are used where a table or a schedule must not.
// Every multiply that feeds an add is a written fma, for the reason given above.

struct SinCos {
  double sin, cos;
};

/// sin and cos of x, |x| < 1e5, error below 1e-12: reduce by multiples of pi/2, then Taylor.
inline SinCos sincos64(double x) {
  const double k = std::nearbyint(x * 0.63661977236758134);
  double r = std::fma(k, -1.5707963267948966, x);
  r = std::fma(k, -6.1232339957367660e-17, r);
  const double r2 = r * r;
  double s = 0, c = 0;
  for (int n = 19; n >= 3; n -= 2) s = std::fma(s, r2, 1.0) * (-1.0 / (n * (n - 1)));
  for (int n = 20; n >= 2; n -= 2) c = std::fma(c, r2, 1.0) * (-1.0 / (n * (n - 1)));
  s = std::fma(s * r2, r, r);
  c = std::fma(c, r2, 1.0);
  switch (static_cast<long>(k) & 3) {
    case 0: return {s, c};
    case 1: return {c, -s};
    case 2: return {-s, -c};
    default: return {-c, s};
  }
}

/// Natural logarithm of a normal x > 0, error below 1e-14 relative to max(1, |log x|):
/// log(m * 2^e) = e ln 2 + 2 atanh((m - 1) / (m + 1)), m in [0.7, 1.4].
inline double log64(double x) {
  int e = 0;
  double m = std::frexp(x, &e);
  if (m < 0.70710678118654752) m *= 2, --e;
  const double z = (m - 1) / (m + 1), z2 = z * z;
  double p = 0;
  for (int n = 25; n >= 1; n -= 2) p = std::fma(p, z2, 1.0 / n);
  return std::fma(static_cast<double>(e), 0.69314718055994531, 2 * z * p);
}

/// e^x for |x| < 700, relative error below 1e-14.
inline double exp64(double x) {
  const double n = std::nearbyint(x * 1.4426950408889634);
  double r = std::fma(n, -0.69314718055994531, x);
  r = std::fma(n, -2.3190468138462996e-17, r);
  double p = 1;
  for (int k = 18; k >= 1; --k) p = std::fma(p * (1.0 / k), r, 1.0);
  return std::ldexp(p, static_cast<int>(n));
}

}  // namespace servelite
