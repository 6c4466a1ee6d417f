// Vectors of floats with the CPU's own width, written with the compiler's vector extension so that
// one source serves AVX-512, AVX2, SSE and NEON; and the two functions that softmax needs: exp2, tanh.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace mosar {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// With 32 registers, a block of 8 x 2 sums fits with room to spare; with 16, a block of 6 x 2.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

typedef float vf __attribute__((vector_size(4 * kWidth)));
typedef int32_t vi __attribute__((vector_size(4 * kWidth)));
typedef double vd __attribute__((vector_size(8 * kWidth)));
typedef float vf_unaligned __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));

// A lane group is two vectors wide: every lane is one query row (a token of one head).
constexpr int kLanes = 2 * kWidth;

constexpr double kLog2eDouble = 1.44269504088896341;
constexpr float kLog2e = static_cast<float>(kLog2eDouble);
// The score of pairs that do not exist, and the smallest running maximum; exp2 of their difference is 0.
constexpr float kMasked = -1e30f;
constexpr float kLowest = -1e29f;

inline vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
inline vf load_unaligned(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf*>(p) = x; }
inline void store_unaligned(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }
inline vi load_int(const int32_t* p) { return *reinterpret_cast<const vi*>(p); }
inline vf splat(float x) { return x - vf{}; }
inline vf select(vi mask, vf a, vf b) {
  return reinterpret_cast<vf>((mask & reinterpret_cast<vi>(a)) | (~mask & reinterpret_cast<vi>(b)));
}
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }
inline vf to_float(vd x) { return __builtin_convertvector(x, vf); }
inline vd to_double(vi x) { return __builtin_convertvector(x, vd); }
inline vd to_double(vf x) { return __builtin_convertvector(x, vd); }
inline void add_unaligned(double* p, vd x) {
  vd sum;
  std::memcpy(&sum, p, sizeof sum);
  sum += x;
  std::memcpy(p, &sum, sizeof sum);
}
inline float horizontal_sum(vf x) {
  float sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += x[i];
  return sum;
}

// 2^f - 1 over f in [-1/2, 1/2]: minimax of relative error 2e-9, fitted by Lawson's method.
inline vf exp2_fraction(vf f) {
  vf p = splat(1.5353258640971035e-4f);
  p = p * f + 1.339900423772633e-3f;
  p = p * f + 9.61843878030777e-3f;
  p = p * f + 5.550331994891167e-2f;
  p = p * f + 0.24022647738456726f;
  p = p * f + 0.6931471824645996f;
  return p * f + 1.0f;
}

inline double dot_product(const float* a, const float* b, int64_t count) {
  constexpr int64_t chain = 8 * kWidth;
  double sum = 0;
  int64_t i = 0;
  while (i + kWidth <= count) {
    const int64_t end = std::min(count, i + chain);
    vf sums = vf{};
    for (; i + kWidth <= end; i += kWidth) sums += load_unaligned(a + i) * load_unaligned(b + i);
    for (int l = 0; l < kWidth; ++l) sum += sums[l];
  }
  for (; i < count; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

// A sum over many terms that tracks its rounding errors (Knuth's two-sum), so that its error does not
// grow with the number of terms.
struct LongSum {
  vf high = vf{}, low = vf{};
  void add(vf x) {
    const vf sum = high + x, added = sum - high;
    low += (high - (sum - added)) + (x - added);
    high = sum;
  }
};
// The number of terms that are added before they go into a long sum.
constexpr int64_t kTerms = 8;

// The integer part of log2 of a normal number.
inline vf exponent(vf x) { return to_float((reinterpret_cast<vi>(x) >> 23) - 127); }

// Below this exponent, 2^x counts as 0. It is far above the smallest float, so that products with it
// are normal numbers: denormal numbers cost a hundred cycles each.
constexpr float kExponentCut = -100.0f;

// 2^x within 2 ulp for kExponentCut <= x <= 127, exactly 0 below; NaN for NaN.
inline vf exp2(vf x) {
#if defined(__AVX512F__)
  const __mmask16 kept = _mm512_cmp_ps_mask(x, splat(kExponentCut), _CMP_NLT_UQ);  // NaN too
  const vf whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_maskz_scalef_ps(kept, exp2_fraction(x - whole), whole);
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low bits
  vf clamped = max(x, splat(kExponentCut));
  vf shifted = clamped + magic;
  vf p = exp2_fraction(clamped - (shifted - magic));
  vf result = reinterpret_cast<vf>(reinterpret_cast<vi>(p) + (reinterpret_cast<vi>(shifted) << 23));
  result = x == x ? result : x;  // NaN in, NaN out
  return x < kExponentCut ? vf{} : result;
#endif
}

// 2^x within 2 ulp for -126 <= x <= 127, for an exponent that needs more digits than a float has.
inline vf exp2(vd x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves round(x)
  const vd whole = x + magic - magic;
  const vi power = __builtin_convertvector(whole, vi) + 127;
  return exp2_fraction(to_float(x - whole)) * reinterpret_cast<vf>(power << 23);
}

// tanh(x) = x P(x^2) / Q(x^2) within 3 ulp, saturated beyond |x| = 7.95 where 1 - tanh < 3e-7.
inline vf tanh(vf x) {
  // Comparisons with NaN are false, so NaN propagates.
  x = x > 7.95f ? splat(7.95f) : x;
  x = x < -7.95f ? splat(-7.95f) : x;
  vf u = x * x;
  vf p = splat(1.532881022114907e-8f);
  p = p * u + 2.1958854631520808e-5f;
  p = p * u + 3.5752940457314253e-3f;
  p = p * u + 0.13447558879852295f;
  p = p * u + 1.0f;
  vf q = splat(8.56051542541536e-7f);
  q = q * u + 3.4174666507169604e-4f;
  q = q * u + 2.617833949625492e-2f;
  q = q * u + 0.46780887246131897f;
  q = q * u + 1.0f;
  return x * p / q;
}

}  // namespace mosar
