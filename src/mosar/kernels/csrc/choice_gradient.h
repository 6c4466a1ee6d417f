// How each other choice of regime would change the loss, for a sample of the queries and all their keys.
//
//   query i takes regime m:  dpi_q[i][m] = dO_i (O_i|m - O_i) = sum_j g e a / sum_j g e,  g = gate[m][n_j]
//   key j takes regime n:    dpi_k[j][n] = sum_i a x / (1 + x),  x = (gate[m_i][n] - gate[m_i][n_j]) e
//
// with e = exp(s_ij - lse_i) and a = dO_i (v_j - O_i), summed over the heads of a routing group. Both are
// exact: the change of the output if that one token chose otherwise, times the gradient of the output.
// Gates are 0 beyond the reach. No buffer has the size queries x keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "gemm.h"

namespace mosar {

struct ChoiceProblem {
  int64_t batch, query_heads, kv_heads, groups, queries, keys, dim, regimes, columns;
  Matrix q, k, v, dout;
  const float *lse, *delta;             // [batch][query_heads][queries]; delta = dO O
  const int64_t *label_q, *class_k;     // [batch][groups][queries or keys]; class: label, or the sinks' column
  const int64_t *pos_q, *pos_k;         // [batch][queries or keys]
  const int64_t *segment_q, *segment_k; // likewise, or null
  const bool* valid_k;                  // [batch][keys], or null
  const double* of_key;                 // [batch][query_heads][keys], added to the scores of a key; or null
  const float* table;                   // [length][regimes][columns]; the last row holds for all farther keys
  int64_t length, window;
  float scale, softcap;
};

class ChoiceGradient {
 public:
  ChoiceGradient(const ChoiceProblem& problem, const Parallel& threads) : p_(problem), threads_(threads) {
    share_ = p_.query_heads / p_.groups;
    lane_groups_ = (p_.queries + kLanes - 1) / kLanes;
    // At most kBlocks of them, whatever the length, because the sums of all blocks are in memory at once.
    block_ = std::max(kBlock, ((p_.keys + kBlocks - 1) / kBlocks + kKeys - 1) / kKeys * kKeys);
    blocks_ = (p_.keys + block_ - 1) / block_;
    lanes_size_ = p_.dim * kLanes;
  }

  // dpi_q [batch][groups][queries][regimes], dpi_k [batch][groups][keys][regimes].
  void run(float* dpi_q, float* dpi_k) {
    const int64_t heads = p_.batch * p_.query_heads;
    Buffer q(heads * lane_groups_ * lanes_size_), dout(heads * lane_groups_ * lanes_size_);
    Buffer lse(heads * lane_groups_ * kLanes), delta(heads * lane_groups_ * kLanes);
    threads_.run(heads, [&](int64_t head) {
      to_lanes(p_.q, head, q.data());
      to_lanes(p_.dout, head, dout.data());
      // Lanes beyond the queries have gates of 0, and contain any finite numbers.
      const int64_t lanes = lane_groups_ * kLanes;
      std::copy_n(p_.lse + head * p_.queries, p_.queries, lse.data() + head * lanes);
      std::copy_n(p_.delta + head * p_.queries, p_.queries, delta.data() + head * lanes);
    });
    // Numerators and denominators of each block of keys, added in a fixed order.
    const int64_t sums_size = lane_groups_ * share_ * p_.regimes * 2 * kLanes;
    const int64_t rows = p_.batch * p_.groups;
    Buffer sums(rows * blocks_ * sums_size);
    threads_.run(rows * blocks_, [&](int64_t task) {
      Task(*this, task / blocks_, task % blocks_, q.data(), dout.data(), lse.data(), delta.data(),
           sums.data() + task * sums_size)
          .run(dpi_k);
    });
    threads_.run(rows, [&](int64_t row) {
      finish(row, sums.data() + row * blocks_ * sums_size, sums_size, dpi_q);
    });
  }

 private:
  static constexpr int64_t kBlock = 256, kBlocks = 32, kKeys = 32;
  // If one key holds nearly all of the attention, the rest without it is only rounding error below this
  // value, the square root of a float's epsilon.
  static constexpr float kLeast = 3.4526698e-4f;
  // exp2 of these is not 0, and leaves room for a sum over any number of keys.
  static constexpr float kHighest = 80.0f, kSmallest = -98.0f;

  // 64-byte aligned floats, zero at first.
  class Buffer {
   public:
    explicit Buffer(int64_t size) : storage_(size + 16, 0.0f) {}
    float* data() {
      const uintptr_t address = reinterpret_cast<uintptr_t>(storage_.data());
      return reinterpret_cast<float*>((address + 63) / 64 * 64);
    }

   private:
    std::vector<float> storage_;
  };

  void to_lanes(const Matrix& matrix, int64_t head, float* lanes) const {
    const int64_t b = head / p_.query_heads, h = head % p_.query_heads;
    lanes += head * lane_groups_ * lanes_size_;
    for (int64_t i = 0; i < p_.queries; ++i) {
      const float* row = matrix.row(b, h, i);
      float* to = lanes + i / kLanes * lanes_size_ + i % kLanes;
      for (int64_t d = 0; d < p_.dim; ++d) to[d * kLanes] = row[d];
    }
  }

  // One row of the batch, one routing group, one block of keys.
  class Task {
   public:
    Task(const ChoiceGradient& all, int64_t row, int64_t block, const float* q, const float* dout,
         const float* lse, const float* delta, float* sums)
        : g_(all), p_(all.p_), row_(row), b_(row / all.p_.groups), q_(q), dout_(dout), lse_(lse),
          delta_(delta), sums_(sums),
          first_(block * all.block_), end_(std::min(all.p_.keys, first_ + all.block_)),
          scores_(all.share_ * kKeys * kLanes), dprobs_(all.share_ * kKeys * kLanes),
          gate_q_(all.p_.regimes * kLanes), gate_k_(all.p_.regimes * kLanes),
          total_(all.p_.regimes) {}

    void run(float* dpi_k) {
      const int64_t head0 = row_ % p_.groups * g_.share_;
      for (int64_t l = 0; l < g_.lane_groups_; ++l)
        for (int64_t from = first_; from < end_; from += kKeys) {
          const int64_t to = std::min(end_, from + kKeys);
          if (!any_pair(l, from, to)) continue;
          for (int64_t i = 0; i < g_.share_; ++i) {
            const int64_t h = head0 + i, kv = h / (p_.query_heads / p_.kv_heads);
            const int64_t lanes = ((b_ * p_.query_heads + h) * g_.lane_groups_ + l) * g_.lanes_size_;
            score(p_.k.row(b_, kv, from), p_.k.token, to - from, q_ + lanes, p_.dim, kScoreChain,
                  scores_.data() + i * kKeys * kLanes);
            score(p_.v.row(b_, kv, from), p_.v.token, to - from, dout_ + lanes, p_.dim, kGradientChain,
                  dprobs_.data() + i * kKeys * kLanes);
          }
          for (int64_t j = from; j < to; ++j) key(l, j, j - from, head0, dpi_k);
        }
    }

   private:
    int64_t distance(int64_t i, int64_t j) const {
      return p_.pos_q[b_ * p_.queries + i] - p_.pos_k[b_ * p_.keys + j];
    }

    bool exists(int64_t i, int64_t j) const {
      const int64_t d = distance(i, j), at_q = b_ * p_.queries + i, at_k = b_ * p_.keys + j;
      return d >= 0 && d <= p_.window && (!p_.valid_k || p_.valid_k[at_k]) &&
             (!p_.segment_k || p_.segment_q[at_q] == p_.segment_k[at_k]);
    }

    // Whether a lane group sees any of these keys; most blocks are far in its future.
    bool any_pair(int64_t l, int64_t from, int64_t to) const {
      for (int64_t i = l * kLanes; i < std::min(p_.queries, (l + 1) * kLanes); ++i)
        for (int64_t j = from; j < to; ++j)
          if (exists(i, j)) return true;
      return false;
    }

    // The gates of a key for each choice of the queries, and for each choice of the key.
    bool look_up(int64_t l, int64_t j) {
      bool any = false;
      const int64_t column = p_.class_k[row_ * p_.keys + j], regimes = p_.regimes;
      const bool fixed = column >= regimes;  // a sink
      std::fill(gate_q_.data(), gate_q_.data() + regimes * kLanes, 0.0f);
      std::fill(gate_k_.data(), gate_k_.data() + regimes * kLanes, 0.0f);
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t i = l * kLanes + lane;
        now_[lane] = 0;
        if (i >= p_.queries || !exists(i, j)) continue;
        any = true;
        const int64_t label = p_.label_q[row_ * p_.queries + i];
        const float* gates =
            p_.table + std::min(distance(i, j), p_.length - 1) * regimes * p_.columns;
        now_[lane] = gates[label * p_.columns + column];
        for (int64_t m = 0; m < regimes; ++m) {
          gate_q_.data()[m * kLanes + lane] = gates[m * p_.columns + column];
          gate_k_.data()[m * kLanes + lane] = fixed ? now_[lane] : gates[label * p_.columns + m];
        }
      }
      return any;
    }

    double of_key(int64_t head, int64_t j) const {
      return p_.of_key[(b_ * p_.query_heads + head) * p_.keys + j];
    }

    void key(int64_t l, int64_t j, int64_t place, int64_t head0, float* dpi_k) {
      if (!look_up(l, j)) return;
      vf* total = total_.data();
      std::fill(total_.begin(), total_.end(), vf{});
      const int64_t row0 = ((b_ * p_.query_heads + head0) * g_.lane_groups_ + l) * kLanes;
      for (int64_t i = 0; i < g_.share_; ++i)
        for (int v = 0; v < 2; ++v) {
          const int64_t at = (i * kKeys + place) * kLanes + v * kWidth;
          const int64_t row = row0 + i * g_.lane_groups_ * kLanes + v * kWidth;
          vf s = load(scores_.data() + at) * p_.scale;
          if (p_.softcap > 0) s = p_.softcap * tanh(s / p_.softcap);
          const vf lse = load(lse_ + row);
          // Both grow along a text, so their difference is taken in double.
          s += p_.of_key ? to_float(of_key(head0 + i, j) - to_double(lse)) : -lse;
          const vf e = exp2(max(min(s * kLog2e, splat(kHighest)), splat(kSmallest)));
          const vf a = load(dprobs_.data() + at) - load(delta_ + row);
          float* sums = sums_ + (l * g_.share_ + i) * p_.regimes * 2 * kLanes + v * kWidth;
          const vf now = load(now_ + v * kWidth);
          for (int64_t m = 0; m < p_.regimes; ++m) {
            float* sum = sums + m * 2 * kLanes;
            const vf weight = load(gate_q_.data() + m * kLanes + v * kWidth) * e;
            store(sum, load(sum) + weight * a);
            store(sum + kLanes, load(sum + kLanes) + weight);
            const vf x = (load(gate_k_.data() + m * kLanes + v * kWidth) - now) * e;
            total[m] += a * x / max(x + 1.0f, splat(kLeast));
          }
        }
      for (int64_t m = 0; m < p_.regimes; ++m)
        dpi_k[(row_ * p_.keys + j) * p_.regimes + m] += horizontal_sum(total[m]);
    }

    const ChoiceGradient& g_;
    const ChoiceProblem& p_;
    int64_t row_, b_;
    const float *q_, *dout_, *lse_, *delta_;
    float* sums_;
    int64_t first_, end_;
    Buffer scores_, dprobs_, gate_q_, gate_k_;
    alignas(64) float now_[kLanes];
    std::vector<vf> total_;
  };

  void finish(int64_t row, const float* sums, int64_t sums_size, float* dpi_q) const {
    const int64_t b = row / p_.groups, head0 = row % p_.groups * share_;
    for (int64_t i = 0; i < p_.queries; ++i)
      for (int64_t m = 0; m < p_.regimes; ++m) {
        double change = 0;
        for (int64_t h = 0; h < share_; ++h) {
          const float* at = sums + ((i / kLanes * share_ + h) * p_.regimes + m) * 2 * kLanes + i % kLanes;
          double numerator = 0, denominator = 0;
          for (int64_t block = 0; block < blocks_; ++block) {
            numerator += at[block * sums_size];
            denominator += at[block * sums_size + kLanes];
          }
          // If a query had no key, its output would be 0.
          const float delta = p_.delta[(b * p_.query_heads + head0 + h) * p_.queries + i];
          change += denominator > 0 ? numerator / denominator : -delta;
        }
        dpi_q[(row * p_.queries + i) * p_.regimes + m] = static_cast<float>(change);
      }
  }

  const ChoiceProblem& p_;
  const Parallel& threads_;
  int64_t share_, lane_groups_, block_, blocks_, lanes_size_;
};

}  // namespace mosar
