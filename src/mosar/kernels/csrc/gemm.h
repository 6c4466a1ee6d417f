// The three matrix products of attention, for one lane group of query rows and a run of keys.
//
//   score       S[key][lane]  = sum_d K[key][d] Q[d][lane]           (also dP = V dO)
//   accumulate  O[d][lane]   += sum_key V[key][d] P[key][lane]       (also dQ += K dS)
//   outer       G[key][d]    += sum_lane P[key][lane] X[lane][d]     (dV += P dO, dK += dS Q)
//
// Lanes are query rows, so keys need no padding or alignment: the cost of a run is proportional to its
// length, and softmax over keys never crosses lanes. Sums start at 0 and are added to the result once
// per block, because many short chains of additions have less rounding error than a long one. A score's
// sum over d is split in the same way, every `chain` terms. Matrices over lanes have kLanes columns and
// are 64-byte aligned.
#pragma once

#include <algorithm>

#include "simd.h"

namespace mosar {

constexpr int kKeyBlock = kManyRegisters ? 8 : 6;
constexpr int kDimBlock = kManyRegisters ? 8 : 6;
constexpr int kOuterKeys = kManyRegisters ? 6 : 3;
constexpr int kOuterVectors = kManyRegisters ? 4 : 3;
// A score is scaled down before it is used. dP is not, and dP - dO·O cancels, so dP must be as accurate
// as is cheaply possible.
constexpr int64_t kScoreChain = 128, kGradientChain = 32;

template <int Keys>
void score_block(const float* __restrict k, int64_t stride, const float* __restrict q, int64_t dim,
                 int64_t chain, float* __restrict s) {
  vf sum[Keys][2];
  for (int64_t from = 0; from < dim; from += chain) {
    const int64_t to = std::min(dim, from + chain);
#pragma GCC unroll 8
    for (int i = 0; i < Keys; ++i) sum[i][0] = sum[i][1] = vf{};
    for (int64_t d = from; d < to; ++d) {
      if (d % 16 == 0)
#pragma GCC unroll 8
        for (int i = 0; i < Keys; ++i) __builtin_prefetch(k + (i + Keys) * stride + d);
      vf q0 = load(q + d * kLanes), q1 = load(q + d * kLanes + kWidth);
#pragma GCC unroll 8
      for (int i = 0; i < Keys; ++i) {
        float x = k[i * stride + d];
        sum[i][0] += x * q0;
        sum[i][1] += x * q1;
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < Keys; ++i)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        float* out = s + i * kLanes + c * kWidth;
        store(out, from ? load(out) + sum[i][c] : sum[i][c]);
      }
  }
}

template <int Dims>
void accumulate_block(const float* __restrict v, int64_t stride, const float* __restrict p,
                      int64_t keys, float* __restrict o) {
  vf sum[Dims][2];
#pragma GCC unroll 8
  for (int i = 0; i < Dims; ++i) sum[i][0] = sum[i][1] = vf{};
  for (int64_t j = 0; j < keys; ++j) {
    vf p0 = load(p + j * kLanes), p1 = load(p + j * kLanes + kWidth);
    const float* row = v + j * stride;
    __builtin_prefetch(row + Dims);
#pragma GCC unroll 8
    for (int i = 0; i < Dims; ++i) {
      sum[i][0] += row[i] * p0;
      sum[i][1] += row[i] * p1;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Dims; ++i)
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      float* out = o + i * kLanes + c * kWidth;
      store(out, load(out) + sum[i][c]);
    }
}

template <int Keys, int Vectors>
void outer_block(const float* __restrict p, const float* __restrict x, int64_t x_stride,
                 float* __restrict g, int64_t g_stride) {
  vf sum[Keys][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < Keys; ++i)
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) sum[i][c] = vf{};
  for (int r = 0; r < kLanes; ++r) {
    vf row[Vectors];
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) row[c] = load(x + r * x_stride + c * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < Keys; ++i) {
      float weight = p[i * kLanes + r];
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) sum[i][c] += weight * row[c];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Keys; ++i)
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      float* out = g + i * g_stride + c * kWidth;
      store_unaligned(out, load_unaligned(out) + sum[i][c]);
    }
}

// Calls body(start, count) over `total` items in runs of at most `block` that differ by at most one,
// because the multiply-add units would have to wait in a short last run.
template <class Body>
void for_balanced(int64_t total, int64_t block, const Body& body) {
  int64_t runs = (total + block - 1) / block;
  for (int64_t r = 0; r < runs; ++r) {
    int64_t start = total * r / runs;
    body(start, total * (r + 1) / runs - start);
  }
}

inline void score(const float* k, int64_t stride, int64_t keys, const float* q, int64_t dim,
                  int64_t chain, float* s) {
  for_balanced(keys, kKeyBlock, [&](int64_t start, int64_t count) {
    const float* rows = k + start * stride;
    float* out = s + start * kLanes;
    switch (count) {
      case 1: return score_block<1>(rows, stride, q, dim, chain, out);
      case 2: return score_block<2>(rows, stride, q, dim, chain, out);
      case 3: return score_block<3>(rows, stride, q, dim, chain, out);
      case 4: return score_block<4>(rows, stride, q, dim, chain, out);
      case 5: return score_block<5>(rows, stride, q, dim, chain, out);
      case 6: return score_block<6>(rows, stride, q, dim, chain, out);
      case 7: return score_block<7>(rows, stride, q, dim, chain, out);
      default: return score_block<8>(rows, stride, q, dim, chain, out);
    }
  });
}

// `dim` is even.
inline void accumulate(const float* v, int64_t stride, const float* p, int64_t keys, float* o,
                       int64_t dim) {
  for_balanced(dim / 2, kDimBlock / 2, [&](int64_t start, int64_t count) {
    const float* columns = v + 2 * start;
    float* out = o + 2 * start * kLanes;
    switch (count) {
      case 1: return accumulate_block<2>(columns, stride, p, keys, out);
      case 2: return accumulate_block<4>(columns, stride, p, keys, out);
      case 3: return accumulate_block<6>(columns, stride, p, keys, out);
      default: return accumulate_block<8>(columns, stride, p, keys, out);
    }
  });
}

template <int Vectors>
void outer_keys(int64_t count, const float* p, const float* x, int64_t x_stride, float* g,
                int64_t g_stride) {
  switch (count) {
    case 1: return outer_block<1, Vectors>(p, x, x_stride, g, g_stride);
    case 2: return outer_block<2, Vectors>(p, x, x_stride, g, g_stride);
    case 3: return outer_block<3, Vectors>(p, x, x_stride, g, g_stride);
    case 4: return outer_block<4, Vectors>(p, x, x_stride, g, g_stride);
    case 5: return outer_block<5, Vectors>(p, x, x_stride, g, g_stride);
    default: return outer_block<6, Vectors>(p, x, x_stride, g, g_stride);
  }
}

inline void outer(const float* p, int64_t keys, const float* x, float* g, int64_t g_stride,
                  int64_t dim) {
  for_balanced(keys, kOuterKeys, [&](int64_t start, int64_t count) {
    const float* weights = p + start * kLanes;
    for_balanced(dim / kWidth, kOuterVectors, [&](int64_t vector, int64_t vectors) {
      const float* rows = x + vector * kWidth;
      float* out = g + start * g_stride + vector * kWidth;
      switch (vectors) {
        case 1: return outer_keys<1>(count, weights, rows, dim, out, g_stride);
        case 2: return outer_keys<2>(count, weights, rows, dim, out, g_stride);
        case 3: return outer_keys<3>(count, weights, rows, dim, out, g_stride);
        default: return outer_keys<4>(count, weights, rows, dim, out, g_stride);
      }
    });
  });
}

// [kLanes][dim] row-major <-> [dim][kLanes], in squares of kWidth; dim is a multiple of kWidth.
inline void transpose_square(const float* __restrict in, int64_t in_stride, float* __restrict out,
                             int64_t out_stride) {
  vf a[kWidth], b[kWidth];
  for (int i = 0; i < kWidth; ++i) a[i] = load_unaligned(in + i * in_stride);
  // Each round interleaves row i with row i + width/2; log2(width) rounds transpose.
#pragma GCC unroll 4
  for (int round = 1; round < kWidth; round *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth / 2; ++i) {
      vi low, high;
      for (int j = 0; j < kWidth; ++j) {
        low[j] = j / 2 + (j % 2) * kWidth;
        high[j] = low[j] + kWidth / 2;
      }
#if defined(__clang__)
      for (int j = 0; j < kWidth; ++j) {
        b[2 * i][j] = low[j] < kWidth ? a[i][low[j]] : a[i + kWidth / 2][low[j] - kWidth];
        b[2 * i + 1][j] = high[j] < kWidth ? a[i][high[j]] : a[i + kWidth / 2][high[j] - kWidth];
      }
#else
      b[2 * i] = __builtin_shuffle(a[i], a[i + kWidth / 2], low);
      b[2 * i + 1] = __builtin_shuffle(a[i], a[i + kWidth / 2], high);
#endif
    }
    for (int i = 0; i < kWidth; ++i) a[i] = b[i];
  }
  for (int i = 0; i < kWidth; ++i) store_unaligned(out + i * out_stride, a[i]);
}

inline void rows_to_lanes(const float* rows, int64_t dim, float* lanes) {
  for (int64_t d = 0; d < dim; d += kWidth)
    for (int v = 0; v < 2; ++v)
      transpose_square(rows + v * kWidth * dim + d, dim, lanes + d * kLanes + v * kWidth, kLanes);
}

inline void lanes_to_rows(const float* lanes, int64_t dim, float* rows) {
  for (int64_t d = 0; d < dim; d += kWidth)
    for (int v = 0; v < 2; ++v)
      transpose_square(lanes + d * kLanes + v * kWidth, kLanes, rows + v * kWidth * dim + d, dim);
}

}  // namespace mosar
