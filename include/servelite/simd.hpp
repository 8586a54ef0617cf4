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

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
  #include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
  #include <arm_neon.h>
#endif

namespace servelite {

// ---- what one register is, per instruction set ------------------------------------------------

// Selected by the compiler's flags (-march=native, -mavx2 -mfma, ...). Defining SERVELITE_PLAIN
// forces the plain version, for tests that compare the variants.
namespace lanes {
#if defined(__AVX512F__) && !defined(SERVELITE_PLAIN)
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
inline reg max(reg a, reg b) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), b, a); }
inline reg min(reg a, reg b) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), b, a); }
inline void keep(reg& a) { asm("" : "+v"(a)); }
inline reg shift_to_exponent(reg t) {
  using ints = int __attribute__((vector_size(64)));  // the intrinsic warns falsely in g++ 12 (PR 105593)
  const ints bits = reinterpret_cast<ints>(t) << 23;
  return reinterpret_cast<reg>(bits + (127 << 23));
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
inline reg max(reg a, reg b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline reg min(reg a, reg b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline void keep(reg& a) { asm("" : "+x"(a)); }
inline reg shift_to_exponent(reg t) {
  const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23)));
}
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
inline reg shift_to_exponent(reg t) {
  const int32x4_t bits = vshlq_n_s32(vreinterpretq_s32_f32(t), 23);
  return vreinterpretq_f32_s32(vaddq_s32(bits, vdupq_n_s32(127 << 23)));
}
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
inline reg shift_to_exponent(reg t) {
  uint32_t bits;
  std::memcpy(&bits, &t, 4);
  bits = (bits << 23) + (127u << 23);
  std::memcpy(&t, &bits, 4);
  return t;
}
#endif
inline constexpr int kRegs = 16 / kCount;
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
#define SERVELITE_BINARY(name)                                                 \
  inline f32x16 name(f32x16 a, f32x16 b) {                                     \
    SERVELITE_EACH_REG a.part[i] = lanes::name(a.part[i], b.part[i]);          \
    return a;                                                                  \
  }
SERVELITE_BINARY(add)
SERVELITE_BINARY(sub)
SERVELITE_BINARY(mul)
SERVELITE_BINARY(div)
SERVELITE_BINARY(max)
SERVELITE_BINARY(min)
#undef SERVELITE_BINARY

/// a * b + c, rounded once.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  SERVELITE_EACH_REG c.part[i] = lanes::fma(a.part[i], b.part[i], c.part[i]);
  return c;
}

/// Tells the compiler to hold a loaded value in a register. Left alone, g++ loads a weight again from the
/// cache for every row that uses it, which halves the speed of small batches.
inline void keep(f32x16& a) { SERVELITE_EACH_REG lanes::keep(a.part[i]); }

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
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
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
