// Vectors of float from storage that may be narrower: float, bfloat16, float16.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace mosar {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float widen_one(float x) { return x; }
inline float widen_one(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline float widen_one(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  // A product changes the exponent's bias; it is exact, also for denormal numbers.
  uint32_t bits = rest << 13;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  result *= 0x1p112f;
  if (rest >= 0x7c00u) {  // infinite or NaN
    bits = 0x7f800000u | rest << 13;
    std::memcpy(&result, &bits, sizeof result);
  }
  std::memcpy(&bits, &result, sizeof bits);
  bits |= sign;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

typedef uint16_t vh __attribute__((vector_size(2 * kWidth)));
typedef uint32_t vu __attribute__((vector_size(4 * kWidth)));

inline vf widen(const float* p) { return load_unaligned(p); }
inline vf widen(const Bfloat16* p) {
  vh half;
  std::memcpy(&half, p, sizeof half);
  return reinterpret_cast<vf>(__builtin_convertvector(half, vu) << 16);
}
inline vf widen(const Float16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  vf result;
  for (int i = 0; i < kWidth; ++i) result[i] = widen_one(p[i]);
  return result;
#endif
}

}  // namespace mosar
