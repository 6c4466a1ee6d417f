// Attention of one query per row over the regime lists of a cache; it reads only the slices.
//
// A query reads one contiguous slice of each class, found by binary search. Slices are cut at page
// boundaries into pieces of at most kPageKeys keys. Pieces are divided evenly among tasks (portion, key
// head); all query heads of the key head share a task. A task computes the scores of its keys, their
// softmax, and the weighted sum of values; then the portions of one query are combined. Lanes are keys
// for the scores and dimensions for the values, so each task has only one sum across lanes.
//
// Storage may be float, bfloat16 or float16; it is widened when loaded. Sums are float32.
#pragma once

#include <atomic>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "lists.h"
#include "widen.h"

namespace mosar {

static_assert(kPageKeys % kLanes == 0, "a page is a whole number of lane groups");

constexpr int kHeadBlock = kManyRegisters ? 8 : 6;
// With more keys at once, the scores of 8 heads would not fit into the first-level cache.
constexpr int64_t kMostTaskKeys = 512;
constexpr int64_t kLeastTaskKeys = 32;
// Reading fewer numbers than this takes less time than waking another thread.
constexpr int64_t kWorthSharing = 16384;

struct DecodeProblem {
  RegimeLists lists;
  int64_t heads, share, dim, labels;  // key heads of a group, query heads of a key head
  const float* q;                     // [rows][groups * heads * share][dim]
  const int64_t *label_q, *pos_q;     // [rows][groups], [rows]
  const double* bias_q;               // as q without dim: what the biases of keys are relative to
  const int32_t* reach;               // [labels][classes], kBoundless where it is
  const double* geometry;             // [labels][classes][2]: plateau, 1 / transition
  float scale, softcap;  // softcap 0: none
  double barrier, exponent;
};

// `next` is read after k; it is prefetched, because pages are too short for the hardware prefetcher.
template <class T, int Heads, int Vectors>
void score_keys(const T* __restrict k, const T* next, const float* __restrict q, int64_t dim,
                float* __restrict s, int64_t stride) {
  vf sum[Heads][Vectors];
#pragma GCC unroll 8
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) sum[h][v] = vf{};
  for (int64_t d = 0; d < dim; ++d) {
    vf key[Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) key[v] = widen(k + d * kPageKeys + v * kWidth);
    for (int64_t at = 0; at < kPageKeys; at += 64 / static_cast<int64_t>(sizeof(T)))
      __builtin_prefetch(next + d * kPageKeys + at);
#pragma GCC unroll 8
    for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) sum[h][v] += q[d * Heads + h] * key[v];
  }
#pragma GCC unroll 8
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) store(s + h * stride + v * kWidth, sum[h][v]);
}

template <class T, int Heads, int Vectors>
void add_values(const T* __restrict v, int64_t dim, const float* __restrict p, int64_t stride,
                int64_t keys, float* __restrict o) {
  vf sum[Heads][Vectors];
#pragma GCC unroll 8
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; ++i) sum[h][i] = vf{};
  for (int64_t key = 0; key < keys; ++key) {
    vf value[Vectors];
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; ++i) value[i] = widen(v + key * dim + i * kWidth);
#pragma GCC unroll 8
    for (int h = 0; h < Heads; ++h) {
      const float weight = p[h * stride + key];
#pragma GCC unroll 4
      for (int i = 0; i < Vectors; ++i) sum[h][i] += weight * value[i];
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; ++i) {
      float* at = o + h * (dim + 2) + i * kWidth;
      store_unaligned(at, load_unaligned(at) + sum[h][i]);
    }
}

// Calls body with the number of heads as a compile-time constant.
template <class Body>
void with_count(int count, const Body& body) {
  switch (count) {
    case 1: return body(std::integral_constant<int, 1>());
    case 2: return body(std::integral_constant<int, 2>());
    case 3: return body(std::integral_constant<int, 3>());
    case 4: return body(std::integral_constant<int, 4>());
    case 5: return body(std::integral_constant<int, 5>());
    case 6: return body(std::integral_constant<int, 6>());
  }
  if constexpr (kHeadBlock > 6)
    return count == 7 ? body(std::integral_constant<int, 7>())
                      : body(std::integral_constant<int, 8>());
}

template <class T>
class Decode {
 public:
  Decode(const DecodeProblem& problem, const T* k_pool, const T* v_pool, const Parallel& parallel)
      : p_(problem), k_(k_pool), v_(v_pool), parallel_(parallel) {
    find_pieces();
    make_tasks();
  }

  // out [rows][query heads][dim], lse [rows][query heads].
  void run(float* out, float* lse) {
    partials_.resize(tasks_.size() * p_.share * (p_.dim + 2));
    std::atomic<int64_t> next{0};
    const int64_t count = static_cast<int64_t>(tasks_.size());
    auto work = [&](int64_t) {
      Worker worker(*this);
      for (int64_t i; (i = next.fetch_add(1)) < count;) worker.run(tasks_[i]);
    };
    if (threads_ == 1) work(0);
    else parallel_.run(threads_, work);
    combine(out, lse);
  }

 private:
  struct Piece {
    int32_t page, lo, hi;  // places within the page
    int32_t flat;          // from here on there is no bias
    const int32_t* positions;
    const double* geometry;
  };
  struct Task {
    int64_t member, head;  // member: row and group
    int32_t first, last;   // pieces
  };

  int64_t members() const { return p_.lists.rows * p_.lists.groups; }

  void find_pieces() {
    starts_.assign(1, 0);
    for (int64_t m = 0; m < members(); ++m) {
      const int64_t here = p_.pos_q[m / p_.lists.groups], label = p_.label_q[m];
      for (int64_t c = 0; c < p_.lists.classes; ++c) {
        const List list(p_.lists, m * p_.lists.classes + c);
        if (list.begin() == list.end()) continue;
        const int64_t reach = p_.reach[label * p_.lists.classes + c];
        const double* geometry = p_.geometry + (label * p_.lists.classes + c) * 2;
        const int32_t lo = reach == kBoundless ? list.begin() : list.find(here - reach);
        const int32_t hi = list.position(list.end() - 1) <= here ? list.end() : list.find(here + 1);
        int32_t flat = lo;
        if (lo < hi && here - list.position(lo) > geometry[0])
          flat = list.find(static_cast<int64_t>(std::ceil(here - geometry[0])));
        for (int32_t place = lo; place < hi;) {
          const int32_t base = place - place % kPageKeys;
          const int32_t stop = std::min<int32_t>(hi, base + kPageKeys);
          pieces_.push_back({list.page(place), place - base, stop - base, flat - base,
                             list.positions(place), geometry});
          place = stop;
        }
      }
      starts_.push_back(static_cast<int32_t>(pieces_.size()));
    }
  }

  void make_tasks() {
    int64_t keys = 0;
    for (const Piece& piece : pieces_) keys += piece.hi - piece.lo;
    const int64_t work = keys * p_.heads;
    threads_ = 2 * work * p_.dim < kWorthSharing ? 1 : parallel_.thread_count;
    const int64_t target = std::clamp<int64_t>(work / (threads_ * 3), kLeastTaskKeys, kMostTaskKeys);
    for (int64_t m = 0; m < members(); ++m) {
      int64_t own = 0;
      for (int32_t i = starts_[m]; i < starts_[m + 1]; ++i) own += pieces_[i].hi - pieces_[i].lo;
      const int64_t portions = std::max<int64_t>(1, (own + target / 2) / target);
      int32_t first = starts_[m];
      int64_t done = 0;
      for (int64_t n = 1; n <= portions; ++n) {
        int32_t last = first;
        while (last < starts_[m + 1] && done < own * n / portions)
          done += pieces_[last].hi - pieces_[last].lo, ++last;
        if (n == portions) last = starts_[m + 1];
        for (int64_t h = 0; h < p_.heads; ++h) tasks_.push_back({m, h, first, last});
        first = last;
      }
    }
    threads_ = std::min<int64_t>(threads_, static_cast<int64_t>(tasks_.size()));
  }

  // Sums of one query's portions, in the order of the tasks.
  void combine(float* out, float* lse) const {
    const int64_t size = p_.dim + 2, share = p_.share;
    std::vector<double> total(p_.dim);
    int64_t task = 0;
    for (int64_t m = 0; m < members(); ++m) {
      int64_t end = task;
      while (end < static_cast<int64_t>(tasks_.size()) && tasks_[end].member == m) ++end;
      for (int64_t h = 0; h < p_.heads; ++h)
        for (int64_t j = 0; j < share; ++j) {
          const int64_t head = (m * p_.heads + h) * share + j;
          auto partial = [&](int64_t i) { return partials_.data() + (i * share + j) * size; };
          float top = kLowest;
          double sum = 0;
          for (int64_t i = task + h; i < end; i += p_.heads) top = std::max(top, partial(i)[0]);
          std::fill(total.begin(), total.end(), 0.0);
          for (int64_t i = task + h; i < end; i += p_.heads) {
            const float* x = partial(i);
            const double weight = std::exp2(x[0] - top);
            sum += weight * x[1];
            for (int64_t d = 0; d < p_.dim; ++d) total[d] += weight * x[2 + d];
          }
          const double inverse = sum == 0 ? 0 : 1 / sum;
          for (int64_t d = 0; d < p_.dim; ++d)
            out[head * p_.dim + d] = static_cast<float>(total[d] * inverse);
          lse[head] = log_sum(top, sum);
          if (p_.lists.biased) lse[head] = static_cast<float>(lse[head] + p_.bias_q[head]);
        }
      task = end;
    }
  }

  class Worker {
   public:
    explicit Worker(const Decode& decode) : a_(decode), p_(decode.p_) {}

    void run(const Task& task) {
      const int64_t index = &task - a_.tasks_.data();
      float* partial = a_.partials_.data() + index * p_.share * (p_.dim + 2);
      for_balanced(p_.share, kHeadBlock, [&](int64_t first, int64_t count) {
        run_heads(task, first, static_cast<int>(count), partial + first * (p_.dim + 2));
      });
    }

   private:
    // Some query heads of the task's key head, into [heads][2 + dim].
    void run_heads(const Task& task, int64_t first, int heads, float* partial) {
      const int64_t pieces = task.last - task.first, dim = p_.dim, size = dim + 2;
      heads_ = heads;
      first_ = first;
      stride_ = pieces * kPageKeys;
      score_.reserve(stride_ * heads);
      load_queries(task, first);
      vf top[kHeadBlock];
      std::fill(top, top + heads, splat(kLowest));
      for (int64_t i = 0; i < pieces; ++i) {
        const Piece& piece = a_.pieces_[task.first + i];
        const Piece& after = a_.pieces_[task.first + std::min(i + 1, pieces - 1)];
        float* s = score_.get() + i * kPageKeys;
        const T* k = a_.k_ + (piece.page * p_.heads + task.head) * dim * kPageKeys;
        const T* next = a_.k_ + (after.page * p_.heads + task.head) * dim * kPageKeys;
        for (int64_t lane = piece.lo / kWidth * kWidth; lane < piece.hi;) {
          // If half of a lane group has no key, it is not read.
          const bool both = piece.hi - lane > kWidth && lane + kLanes <= kPageKeys;
          if (both) score<2>(k + lane, next, s + lane);
          else score<1>(k + lane, next, s + lane);
          lane += both ? kLanes : kWidth;
        }
        finish_scores(task, piece, s, top);
      }
      for (int h = 0; h < heads; ++h) {
        float* to = partial + h * size;
        to[0] = kLowest;
        for (int l = 0; l < kWidth; ++l) to[0] = std::max(to[0], top[h][l]);
        to[1] = exponentiate(task, h, to[0]);
        std::fill(to + 2, to + size, 0.0f);
      }
      for (int64_t i = 0; i < pieces; ++i) {
        const Piece& piece = a_.pieces_[task.first + i];
        const T* v = a_.v_ + ((piece.page * p_.heads + task.head) * kPageKeys + piece.lo) * dim;
        weigh_values(v, score_.get() + i * kPageKeys + piece.lo, piece.hi - piece.lo, partial + 2);
      }
    }

    // Queries as [dim][heads], scaled to base 2 (or to the argument of tanh).
    void load_queries(const Task& task, int64_t first) {
      query_.reserve(p_.dim * heads_);
      const float factor = p_.softcap > 0 ? p_.scale / p_.softcap : p_.scale * kLog2e;
      const float* q = p_.q + ((task.member * p_.heads + task.head) * p_.share + first) * p_.dim;
      for (int64_t d = 0; d < p_.dim; ++d)
        for (int h = 0; h < heads_; ++h) query_.get()[d * heads_ + h] = q[h * p_.dim + d] * factor;
    }

    template <int Vectors>
    void score(const T* k, const T* next, float* s) const {
      const float* q = query_.get();
      with_count(heads_, [&](auto heads) {
        score_keys<T, decltype(heads)::value, Vectors>(k, next, q, p_.dim, s, stride_);
      });
    }

    // Turns products into logits in base 2 (soft-cap, bias, mask), with their running maximum by lane.
    void finish_scores(const Task& task, const Piece& piece, float* s, vf* top) const {
      const int64_t here = p_.pos_q[task.member / p_.lists.groups];
      for (int64_t lane = piece.lo / kWidth * kWidth; lane < piece.hi; lane += kWidth) {
        vi place;
        for (int l = 0; l < kWidth; ++l) place[l] = static_cast<int32_t>(lane) + l;
        const bool masked = lane < piece.lo || lane + kWidth > piece.hi;
        const bool biased = lane < piece.flat;
        const vf added = biased ? bias(piece, lane, here) : vf{};
        for (int h = 0; h < heads_; ++h) {
          float* at = s + h * stride_ + lane;
          vf x = load(at);
          if (p_.softcap > 0) x = tanh(x) * (p_.softcap * kLog2e);
          if (biased) x += added;
          if (p_.lists.biased) x += key_bias(task, piece, lane, h);
          if (masked) x = select((place >= piece.lo) & (place < piece.hi), x, splat(kMasked));
          top[h] = max(x, top[h]);
          store(at, x);
        }
      }
    }

    // The log gate of one vector of keys, in base 2; places outside the piece are masked later.
    vf bias(const Piece& piece, int64_t lane, int64_t here) const {
      vi at;
      std::memcpy(&at, piece.positions + lane, sizeof at);
      const vd distance = static_cast<double>(here) - to_double(at);
      return to_float(log_gate(distance, piece.geometry, p_.barrier, p_.exponent));
    }

    // The biases of one vector of keys for one head, in base 2. They grow along a text, so they are taken
    // relative to that of the query's own key, in double.
    vf key_bias(const Task& task, const Piece& piece, int64_t lane, int h) const {
      const int64_t in_group = task.head * p_.share + first_ + h;
      vd of_key;
      std::memcpy(&of_key, p_.lists.biases + (piece.page * p_.lists.biased + in_group) * kPageKeys + lane,
                  sizeof of_key);
      return to_float((of_key - p_.bias_q[task.member * p_.lists.biased + in_group]) * kLog2eDouble);
    }

    // Turns the logits of one head into weights, in place; returns their sum.
    float exponentiate(const Task& task, int head, float maximum) const {
      LongSum sum;
      for (int32_t i = task.first; i < task.last; ++i) {
        const Piece& piece = a_.pieces_[i];
        vf part = vf{};
        float* s = score_.get() + head * stride_ + (i - task.first) * kPageKeys;
        for (int64_t lane = piece.lo / kWidth * kWidth; lane < piece.hi; lane += kWidth) {
          const vf e = exp2(load(s + lane) - maximum);
          part += e;
          store(s + lane, e);
        }
        sum.add(part);
      }
      return horizontal_sum(sum.high) + horizontal_sum(sum.low);
    }

    // o [heads][2 + dim] += weights times values, with as many sums at once as fit into registers.
    void weigh_values(const T* v, const float* p, int64_t keys, float* o) const {
      const int64_t dim = p_.dim, whole = dim / kWidth;
      with_count(heads_, [&](auto heads) {
        constexpr int count = decltype(heads)::value;
        int64_t done = 0;
        if constexpr (kManyRegisters && count <= 6)
          for (; whole - done >= 4; done += 4)
            add_values<T, count, 4>(v + done * kWidth, dim, p, stride_, keys, o + done * kWidth);
        for (; whole - done >= 2; done += 2)
          add_values<T, count, 2>(v + done * kWidth, dim, p, stride_, keys, o + done * kWidth);
        if (done < whole)
          add_values<T, count, 1>(v + done * kWidth, dim, p, stride_, keys, o + done * kWidth);
      });
      for (int64_t d = whole * kWidth; d < dim; ++d)
        for (int h = 0; h < heads_; ++h) {
          float sum = 0;
          for (int64_t key = 0; key < keys; ++key)
            sum += p[h * stride_ + key] * widen_one(v[key * dim + d]);
          o[h * (dim + 2) + d] += sum;
        }
    }

    // Memory that grows to the largest requested size.
    class Scratch {
     public:
      void reserve(int64_t size) {
        if (size > size_) data_ = aligned<float>(size), size_ = size;
      }
      float* get() const { return data_.get(); }

     private:
      Aligned<float> data_;
      int64_t size_ = 0;
    };

    const Decode& a_;
    const DecodeProblem& p_;
    int heads_ = 0;       // that are being worked on
    int64_t first_ = 0;   // of them, among those of the key head
    int64_t stride_ = 0;  // from the scores of one head to those of the next
    Scratch score_, query_;
  };

  const DecodeProblem& p_;
  const T *k_, *v_;
  const Parallel& parallel_;
  int64_t threads_ = 1;
  std::vector<Piece> pieces_;
  std::vector<int32_t> starts_;  // [members + 1] into pieces_
  std::vector<Task> tasks_;
  mutable std::vector<float> partials_;  // [tasks][share][2 + dim]: maximum, sum, weighted values
};

}  // namespace mosar
