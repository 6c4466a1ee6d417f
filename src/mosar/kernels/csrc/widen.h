// Vectors of float from storage that may be narrower (float, bfloat16, float16), and back into float and
// bfloat16.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

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

// Rounded to the nearest, ties to even; NaN stays NaN.
inline void narrow_one(float x, float* p) { *p = x; }
inline void narrow_one(float x, Bfloat16* p) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  p->bits = static_cast<uint16_t>(x == x ? rounded : 0x7fc0u);
}
inline void narrow(vf x, float* p) { store_unaligned(p, x); }
inline void narrow(vf x, Bfloat16* p) {
  const vu bits = reinterpret_cast<vu>(x);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu is_number = reinterpret_cast<vu>(x == x);
  const vh half = __builtin_convertvector((rounded & is_number) | (~is_number & 0x7fc0u), vh);
  std::memcpy(p, &half, sizeof half);
}

// A row as floats: the row itself, or a copy in `scratch`.
template <class T>
inline const float* widened(const T* row, int64_t size, std::vector<float>& scratch) {
  if constexpr (std::is_same_v<T, float>) {
    return row;
  } else {
    scratch.resize(size);
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) store_unaligned(scratch.data() + i, widen(row + i));
    for (; i < size; ++i) scratch[i] = widen_one(row[i]);
    return scratch.data();
  }
}

// Where to write a row of floats that `put_back` then narrows: the row itself, or `scratch`.
template <class T>
inline float* room(T* row, int64_t size, std::vector<float>& scratch) {
  if constexpr (std::is_same_v<T, float>) {
    return row;
  } else {
    scratch.resize(size);
    return scratch.data();
  }
}

template <class T>
inline void put_back(const float* written, int64_t size, T* row) {
  if constexpr (!std::is_same_v<T, float>) {
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) narrow(load_unaligned(written + i), row + i);
    for (; i < size; ++i) narrow_one(written[i], row + i);
  }
}

}  // namespace mosar
