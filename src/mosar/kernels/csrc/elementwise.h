// The passes of a decoder that only stream through memory: RMSNorm with weight 1 + w, the GeGLU product
// gelu(gate) * up with the tanh form of GELU, and the cross-entropy of soft-capped scores with its gradient.
// Each has one pass forward and one backward, in float32 whatever the storage T (float or bfloat16); torch
// operators need three to ten passes and store as many tensors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "simd.h"
#include "widen.h"

namespace mosar {

// Rows per task. Rows are summed per task, and then tasks in order, so the sums do not depend on the
// number of threads.
constexpr int64_t kRowBlock = 32;
// Entries per task, if rows do not matter.
constexpr int64_t kEntryBlock = 16384;

inline double sum_of_squares(const float* x, int64_t count) { return dot_product(x, x, count); }

// y = x r (1 + w), r = 1 / sqrt(mean(x^2) + eps) per row.
template <class T>
inline void rms_norm(const T* x, const float* weight, float eps, int64_t rows, int64_t size, T* y,
                     float* inverse, const Parallel& threads) {
  threads.run((rows + kRowBlock - 1) / kRowBlock, [&](int64_t block) {
    std::vector<float> in_scratch, out_scratch;
    const int64_t end = std::min(rows, (block + 1) * kRowBlock);
    for (int64_t row = block * kRowBlock; row < end; ++row) {
      const float* in = widened(x + row * size, size, in_scratch);
      float* out = room(y + row * size, size, out_scratch);
      const float r = static_cast<float>(1 / std::sqrt(sum_of_squares(in, size) / size + eps));
      inverse[row] = r;
      int64_t i = 0;
      for (; i + kWidth <= size; i += kWidth)
        store_unaligned(out + i, load_unaligned(in + i) * r * (load_unaligned(weight + i) + 1.0f));
      for (; i < size; ++i) out[i] = in[i] * r * (weight[i] + 1.0f);
      put_back(out, size, y + row * size);
    }
  });
}

// With u = g (1 + w): dx = r (u - x r^2 mean(u x)), dw = sum over rows of g x r.
template <class T>
inline void rms_norm_backward(const T* gradient, const T* x, const float* inverse,
                              const float* weight, int64_t rows, int64_t size, T* dx,
                              float* dweight, const Parallel& threads) {
  const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  std::vector<float> sums(blocks * size, 0.0f);
  threads.run(blocks, [&](int64_t block) {
    std::vector<float> g_scratch, in_scratch, out_scratch;
    float* sum = sums.data() + block * size;
    const int64_t end = std::min(rows, (block + 1) * kRowBlock);
    for (int64_t row = block * kRowBlock; row < end; ++row) {
      const float* g = widened(gradient + row * size, size, g_scratch);
      const float* in = widened(x + row * size, size, in_scratch);
      float* out = room(dx + row * size, size, out_scratch);
      const float r = inverse[row];
      vf products = vf{};
      float product = 0;
      int64_t i = 0;
      for (; i + kWidth <= size; i += kWidth) {
        const vf gx = load_unaligned(g + i) * load_unaligned(in + i);
        store_unaligned(sum + i, load_unaligned(sum + i) + gx * r);
        products += gx * (load_unaligned(weight + i) + 1.0f);
      }
      for (; i < size; ++i) {
        sum[i] += g[i] * in[i] * r;
        product += g[i] * in[i] * (weight[i] + 1.0f);
      }
      const float mean = (product + horizontal_sum(products)) / size * r * r;
      for (i = 0; i + kWidth <= size; i += kWidth) {
        const vf u = load_unaligned(g + i) * (load_unaligned(weight + i) + 1.0f);
        store_unaligned(out + i, (u - load_unaligned(in + i) * mean) * r);
      }
      for (; i < size; ++i) out[i] = (g[i] * (weight[i] + 1.0f) - in[i] * mean) * r;
      put_back(out, size, dx + row * size);
    }
  });
  for (int64_t i = 0; i < size; ++i) {
    double total = 0;
    for (int64_t block = 0; block < blocks; ++block) total += sums[block * size + i];
    dweight[i] = static_cast<float>(total);
  }
}

// gelu(x) = x s, s = (1 + tanh(z)) / 2 = 1 / (1 + 2^(-2 z log2(e))), z = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float kGeluScale = 0.797884560802865356f, kGeluCubic = 0.044715f;

inline vf gelu_share(vf x) {
  const vf z = x * (x * x * (kGeluScale * kGeluCubic) + kGeluScale);
  // Beyond this s is 0 or 1 in float32; exp2 is defined up to 127.
  const vf exponent = min(z * (-2.0f * kLog2e), splat(126.0f));
  return 1.0f / (exp2(exponent) + 1.0f);
}

inline vf gelu_slope(vf x, vf share) {
  const vf dz = x * x * (3.0f * kGeluScale * kGeluCubic) + kGeluScale;
  return share + x * share * (1.0f - share) * dz * 2.0f;
}

// Calls body(offset, count) for the vectors of a long row; only the last vector of a task may be shorter.
template <class Body>
inline void for_vectors(int64_t count, const Parallel& threads, const Body& body) {
  threads.run((count + kEntryBlock - 1) / kEntryBlock, [&](int64_t block) {
    const int64_t end = std::min(count, (block + 1) * kEntryBlock);
    int64_t i = block * kEntryBlock;
    for (; i + kWidth <= end; i += kWidth) body(i, kWidth);
    if (i < end) body(i, end - i);
  });
}

template <class T>
inline vf load_some(const T* p, int64_t count) {
  if (count == kWidth) return widen(p);
  vf x = vf{};
  for (int64_t i = 0; i < count; ++i) x[i] = widen_one(p[i]);
  return x;
}

template <class T>
inline void store_some(T* p, vf x, int64_t count) {
  if (count == kWidth) return narrow(x, p);
  for (int64_t i = 0; i < count; ++i) narrow_one(x[i], p + i);
}

template <class T>
inline void geglu(const T* gate, const T* up, int64_t count, T* out, const Parallel& threads) {
  for_vectors(count, threads, [&](int64_t i, int64_t n) {
    const vf x = load_some(gate + i, n);
    store_some(out + i, x * gelu_share(x) * load_some(up + i, n), n);
  });
}

template <class T>
inline void geglu_backward(const T* gradient, const T* gate, const T* up, int64_t count, T* dgate,
                           T* dup, const Parallel& threads) {
  for_vectors(count, threads, [&](int64_t i, int64_t n) {
    const vf g = load_some(gradient + i, n), x = load_some(gate + i, n), u = load_some(up + i, n);
    const vf share = gelu_share(x);
    store_some(dup + i, g * x * share, n);
    store_some(dgate + i, g * u * gelu_slope(x, share), n);
  });
}

// Logits up to this size need no shift before exp2 in float32.
constexpr float kTame = 60.0f;

// With logits l = cap tanh(score) (or the score, without a cap), p = softmax(l): the loss of a row is
// -log p[target]; its scores become factor (p - [target]) dl/dscore / cap.
template <class T>
inline void cross_entropy(T* scores, const int64_t* targets, int64_t rows, int64_t size, float cap,
                          float factor, float* losses, const Parallel& threads) {
  const bool capped = cap > 0;
  threads.run((rows + kRowBlock - 1) / kRowBlock, [&](int64_t block) {
    std::vector<float> logits((size + kWidth - 1) / kWidth * kWidth), odds(logits.size());
    const int64_t end = std::min(rows, (block + 1) * kRowBlock);
    for (int64_t row = block * kRowBlock; row < end; ++row) {
      T* line = scores + row * size;
      float shift = 0;
      for (int64_t i = 0; i < size; i += kWidth) {
        const vf score = load_some(line + i, std::min<int64_t>(kWidth, size - i));
        store_unaligned(logits.data() + i, capped ? tanh(score) * cap : score);
      }
      if (!capped || cap > kTame) shift = *std::max_element(logits.data(), logits.data() + size);
      LongSum sums;
      for (int64_t i = 0; i < size; i += kTerms * kWidth) {
        vf part = vf{};
        for (int64_t j = i; j < std::min(size, i + kTerms * kWidth); j += kWidth) {
          vf odd = exp2((load_unaligned(logits.data() + j) - shift) * kLog2e);
          if (j + kWidth > size)
            for (int64_t l = size - j; l < kWidth; ++l) odd[l] = 0;
          store_unaligned(odds.data() + j, odd);
          part += odd;
        }
        sums.add(part);
      }
      double total = 0;
      for (int l = 0; l < kWidth; ++l) total += static_cast<double>(sums.high[l]) + sums.low[l];
      const int64_t target = targets[row];
      losses[row] = static_cast<float>(std::log(total) + shift - logits[target]);
      const float share = static_cast<float>(factor / total);
      odds[target] -= static_cast<float>(total);
      for (int64_t i = 0; i < size; i += kWidth) {
        vf gradient = load_unaligned(odds.data() + i) * share;
        if (capped) {
          const vf t = load_unaligned(logits.data() + i) * (1 / cap);
          gradient = gradient - gradient * t * t;
        }
        store_some(line + i, gradient, std::min<int64_t>(kWidth, size - i));
      }
    }
  });
}

}  // namespace mosar
