// Attention over a plan: forward and backward for every kind of bias, flash style, O(n d) memory.
//
// A unit of work is a tile of sorted queries of one label, and the KV heads that share what the tile
// computes. Its query rows fill lane groups. For each key class, the groups process the runs of the
// plan block by block with an online softmax in base 2. Rows of a block that every lane may read
// without bias go straight from product to exponential; the others get bias and mask.
//
// Nothing here depends on torch: there are raw pointers, sizes, and a function that runs tasks in
// parallel.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "gemm.h"

namespace mosar {

// Runs task(i) for i in [0, count), spread over the threads; thread_count says how many there are.
struct Parallel {
  std::function<void(int64_t count, const std::function<void(int64_t)>& task)> run;
  int64_t thread_count;
};

enum class Bias : int64_t {
  kNone = 0,      // softmax(cap(s)) over the plan's pairs
  kGeometry = 1,  // + log gate of the pair's classes + key_bias[head][key] (sparse routing)
  kWorth = 2,     // + log sum_mn pi_q[m] gate[m][n][d] pi_k[n] (soft and top-1 routing)
  kTable = 3,     // + table[head][d] - slope[head] d + key_bias[head][key] (distance attention)
};

// Table rows have this many entries of padding on both sides, so that a vector load stays inside.
constexpr int64_t kTablePad = 32;
// From this barrier on, a worth can outweigh any score, so the maximum of softmax must include it.
constexpr float kHighBarrier = 20;
// A long sum of blocks (of keys, or of the units that add to one gradient) is moved into a double or
// a second sum after this many blocks, because short chains of additions have less rounding error.
constexpr int64_t kStretchBlocks = 32, kStretchUnits = 128;
static_assert(kTablePad >= kLanes, "a vector of distances may start kLanes before the table");

// log2 of a gate; geometry: plateau, 1 / transition. In double, because a float cannot hold the
// fraction of a far plateau, and a large barrier multiplies the rounding error.
inline vd log_gate(vd distance, const double* geometry, double barrier, double exponent) {
  vd t = (distance - geometry[0]) * geometry[1];
  t = t > 0.0 ? t : vd{};
  t = t < 1.0 ? t : vd{} + 1.0;
  if (exponent == 2) t *= t;
  else
    for (int l = 0; l < kWidth; ++l) t[l] = std::pow(t[l], exponent);
  return t * (-barrier * kLog2eDouble);
}

constexpr double kLn2 = 0.69314718055994531;

// log(2^top sum)
inline float log_sum(double top, double sum) {
  if (sum == 0) return -std::numeric_limits<float>::infinity();
  return static_cast<float>(top * kLn2 + std::log(sum));
}

struct Matrix {
  const float* data;
  int64_t batch, head, token;  // strides; the head dimension is contiguous
  const float* row(int64_t b, int64_t h, int64_t t) const {
    return data + b * batch + h * head + t * token;
  }
};

struct Problem {
  int64_t batch, query_heads, kv_heads, groups, queries, keys, dim;
  Matrix q, k, v;
  // The plan (plan.h), with 1 row, one row per batch entry, or one per batch entry and group.
  int64_t plan_rows, labels, classes;
  const int32_t *query_order, *key_order, *query_offsets, *key_offsets, *run_lo, *run_hi;
  const int32_t *pos_q, *pos_k;
  Bias bias;
  float scale, softcap;  // softcap 0: none
  // kGeometry: [labels][classes][2] of (plateau, 1 / transition), barrier and exponent. If the exponent
  // is not 2, a table of log2 gates per (label, class) avoids computing powers.
  const double* geometry;
  double barrier, exponent;  // barrier for kWorth too: a worth above 0 is at least e^-barrier
  // kWorth: pi_q [batch][groups][queries][regimes], pi_k [..][keys][columns]; the first `regimes`
  // columns are routed, and one more column is for sinks. Gates per (regime, column) are in `table`, or
  // computed from `geometry` [regimes][columns][2] if a table would be too long.
  const float *pi_q, *pi_k;
  int64_t regimes, columns;
  float epsilon;  // lower bound of the worth; 0: pairs of worth 0 do not exist
  // kTable: log2 biases per head (or one for all) and slopes, both in base 2; any may be null.
  const float *table, *slopes;
  int64_t table_rows, table_length;
  // kTable and kGeometry: biases of keys [batch][query_heads][keys], or null.
  const double* key_bias;
};

struct Gradients {
  const float *out, *softmax, *dout, *dlse;  // softmax as the forward pass returned it
  float *dq, *dk, *dv;            // contiguous, as q, k, v
  float *dpi_q, *dpi_k;           // as pi_q, pi_k; null unless kWorth
  float *dtable, *dslopes;        // kTable: as table with its padding, and slopes; null if not asked for
  double* dkey_bias;              // as key_bias
};

template <class T>
struct AlignedDelete {
  void operator()(T* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
template <class T>
using Aligned = std::unique_ptr<T[], AlignedDelete<T>>;
template <class T>
Aligned<T> aligned(int64_t count) {
  return Aligned<T>(static_cast<T*>(
      ::operator new[](static_cast<size_t>(count > 0 ? count : 1) * sizeof(T), std::align_val_t(64))));
}

// A large buffer that outlives the call, because mapping fresh pages takes as long as copying the keys.
// One buffer is kept, up to a limit; if another call is using it, a call allocates its own.
class Buffer {
 public:
  explicit Buffer(int64_t count) {
    {
      std::lock_guard<std::mutex> hold(kept().mutex);
      if (kept().count >= count) std::swap(data_, kept().data), std::swap(count_, kept().count);
    }
    if (!data_) data_ = aligned<float>(count), count_ = count;
  }
  ~Buffer() {
    if (count_ > kLimit) return;
    std::lock_guard<std::mutex> hold(kept().mutex);
    if (kept().count < count_) std::swap(data_, kept().data), std::swap(count_, kept().count);
  }
  Buffer(const Buffer&) = delete;
  float* get() const { return data_.get(); }

 private:
  static constexpr int64_t kLimit = 64 << 20;  // floats: 256 MiB
  struct Kept {
    std::mutex mutex;
    Aligned<float> data;
    int64_t count = 0;
  };
  static Kept& kept() {
    static Kept* instance = new Kept;  // never destroyed: threads may outlive static destruction
    return *instance;
  }
  Aligned<float> data_;
  int64_t count_ = 0;
};

// Keys and values of every KV head in the order of the plan. Rows are an odd number of cache lines
// apart: with a power of two, a block's rows would fall into a few sets of the first-level cache.
struct SortedKeys {
  std::vector<char> in_order;     // [plan_rows]: the plan keeps the order, and no padding is needed
  std::vector<int32_t> position;  // [plan_rows][keys], by sorted key
  std::unique_ptr<Buffer> storage;
  int64_t stride;
  std::vector<const float*> k, v;  // [batch][kv_heads]
};

struct Unit {
  int64_t b, kv_begin, kv_end, plan_row, label;
  int32_t begin, end;  // places in the sorted queries
};

class Attention {
 public:
  Attention(const Problem& problem, const Parallel& parallel)
      : p_(problem),
        parallel_(parallel),
        dim_((problem.dim + kWidth - 1) / kWidth * kWidth),
        share_(problem.query_heads / problem.kv_heads),
        // If a bias is looked up per token, the heads share it: lanes are tokens of one head, and a
        // unit has all heads of the routing group. If keys have a bias, it is that of one head too.
        // Otherwise lanes are tokens and heads of one KV head together, which trims the runs most
        // tightly.
        lanes_are_tokens_(problem.bias == Bias::kWorth || problem.bias == Bias::kTable ||
                          problem.key_bias),
        key_block_(dim_ <= 96 ? 128 : 64) {
    sort_keys();
    make_units();
  }

  // out [batch][query_heads][queries][dim], lse [batch][query_heads][queries]; softmax [2][..] stores
  // each row's maximum (base 2) and sum, because the log-sum-exp is too coarse to recompute
  // exponentials from it.
  void forward(float* out, float* lse, float* softmax);

  // Each (owner of keys, chunk of its units) sums into its own gradients, in a fixed order, so the
  // result depends on the number of threads but never on their timing.
  void backward(const Gradients& g);

 private:
  struct Group {
    int count;        // active lanes; the others repeat the last one with zero data
    int64_t kv_head;
    int64_t row[kLanes];  // index into [batch][query_heads][queries]
    int64_t head0;        // the head of all lanes when lanes are tokens
    alignas(64) int32_t pos[kLanes];
    int32_t pos_max;
    // The biases of keys of this head. They can grow without limit along a text, so each lane takes
    // them relative to the bias of the newest key that it reads, in double.
    const double* key_bias;
    double key_shift[kLanes];
    std::vector<int32_t> lo, hi;                          // [classes][kLanes]
    std::vector<int32_t> lo_min, lo_max, hi_min, hi_max;  // [classes]
    std::vector<int32_t> flat_from;                       // [classes]: no transition from here on
    alignas(64) float max[kLanes];
    LongSum sum[2];  // of exponentials
    alignas(64) float inverse[kLanes];  // backward: 1 / sum
    alignas(64) float delta[kLanes];  // dO·O - dlse
    float dlse[kLanes];
    double dot[kLanes];               // dO·O
    double weight[kLanes], weighted_dprob[kLanes];  // sums of P and of P dP
    double* mixed;  // backward: [regimes][kLanes], sums of P times the coefficient of pi_q
    float *q, *o;              // [dim][kLanes]: scaled queries, output (or dQ) of this stretch
    double* settled;           // [dim][kLanes]: of all stretches before
    alignas(64) float settled_max[kLanes];  // the maximum it is relative to
    int64_t blocks;            // visited so far
    float *q_rows, *do_rows, *d_o;  // backward: [kLanes][dim] queries and dO, [dim][kLanes] dO
  };

  class Worker;
  friend class Worker;
  class StretchOfUnits;

  // A task's sums of dS for the bias of each query head of one batch entry: for the table with its
  // padding, the keys, and the slope, as requested.
  struct LearnedBias {
    int64_t padded, keys, slopes;
    double* sums;
    int64_t size() const { return padded + keys + slopes; }
    double* row(int64_t head) const { return sums + head * size(); }
  };

  int64_t plan_row(int64_t b, int64_t g) const {
    if (p_.plan_rows == 1) return 0;
    return p_.plan_rows == p_.batch ? b : b * p_.groups + g;
  }
  int64_t group_of(int64_t kv_head) const { return kv_head / (p_.kv_heads / p_.groups); }

  void sort_keys();
  void make_units();
  void add_up_bias(const Gradients& g, const LearnedBias& learned, const std::vector<double>& sums,
                   int64_t chunks) const;

  const Problem& p_;
  const Parallel& parallel_;
  const int64_t dim_, share_;
  const bool lanes_are_tokens_;
  const int64_t key_block_;
  int64_t tile_tokens_, groups_per_unit_;
  SortedKeys keys_;
  std::vector<Unit> units_;
};

inline void Attention::sort_keys() {
  const int64_t rows = p_.plan_rows, keys = p_.keys;
  keys_.position.resize(rows * keys);
  keys_.in_order.assign(rows, dim_ == p_.dim);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* order = p_.key_order + r * keys;
    const int32_t* pos = p_.pos_k + r * keys;
    const int32_t count = p_.key_offsets[r * (p_.classes + 1) + p_.classes];
    for (int32_t j = 0; j < count; ++j) {
      keys_.position[r * keys + j] = pos[order[j]];
      if (order[j] != j) keys_.in_order[r] = 0;
    }
  }
  const int64_t heads = p_.batch * p_.kv_heads, chunk = 512, chunks = (keys + chunk - 1) / chunk;
  keys_.k.resize(heads);
  keys_.v.resize(heads);
  // A short context that is already in order is read in place.
  bool in_place = keys <= chunk && p_.k.token == p_.v.token;
  for (char in_order : keys_.in_order) in_place = in_place && in_order;
  if (in_place) {
    keys_.stride = p_.k.token;
    for (int64_t head = 0; head < heads; ++head) {
      keys_.k[head] = p_.k.row(head / p_.kv_heads, head % p_.kv_heads, 0);
      keys_.v[head] = p_.v.row(head / p_.kv_heads, head % p_.kv_heads, 0);
    }
    return;
  }
  constexpr int64_t line = 16;
  keys_.stride = ((dim_ + line - 1) / line | 1) * line;
  const int64_t size = keys * keys_.stride;
  keys_.storage = std::make_unique<Buffer>(heads * 2 * size);
  for (int64_t head = 0; head < heads; ++head) {
    keys_.k[head] = keys_.storage->get() + head * 2 * size;
    keys_.v[head] = keys_.k[head] + size;
  }
  parallel_.run(heads * chunks, [&](int64_t i) {
    const int64_t head = i / chunks, b = head / p_.kv_heads, h = head % p_.kv_heads;
    const int64_t r = plan_row(b, group_of(h));
    const int32_t* order = p_.key_order + r * keys;
    const int64_t count = p_.key_offsets[r * (p_.classes + 1) + p_.classes];
    const int64_t begin = i % chunks * chunk, end = std::min(count, begin + chunk);
    for (const auto& [from, base] :
         {std::pair{&p_.k, keys_.k[head]}, std::pair{&p_.v, keys_.v[head]}}) {
      for (int64_t j = begin; j < end; ++j) {
        float* to = const_cast<float*>(base) + j * keys_.stride;
        std::memcpy(to, from->row(b, h, order[j]), p_.dim * sizeof(float));
        std::fill(to + p_.dim, to + dim_, 0.0f);
      }
    }
  });
}

inline void Attention::make_units() {
  const int64_t heads_per_unit = lanes_are_tokens_ && p_.bias == Bias::kWorth
                                     ? p_.kv_heads / p_.groups
                                     : 1;
  if (lanes_are_tokens_) {
    tile_tokens_ = kLanes;
    groups_per_unit_ = heads_per_unit * share_;
  } else {
    // The number of lane groups per tile whose state fits well into a second-level cache.
    const int64_t state = 2 * dim_ * kLanes * static_cast<int64_t>(sizeof(float));
    const int64_t most = std::clamp<int64_t>(256 * 1024 / state, 1, 8);
    tile_tokens_ = std::max<int64_t>(1, most * kLanes / share_);
    groups_per_unit_ = (tile_tokens_ * share_ + kLanes - 1) / kLanes;
  }
  for (int64_t b = 0; b < p_.batch; ++b)
    for (int64_t h = 0; h < p_.kv_heads; h += heads_per_unit) {
      const int64_t r = plan_row(b, group_of(h));
      const int32_t* offsets = p_.query_offsets + r * (p_.labels + 1);
      // Late tiles of labels with a long reach are heavy. They go first, so that none runs alone at
      // the end.
      for (int64_t m = p_.labels - 1; m >= 0; --m)
        for (int64_t tiles = (offsets[m + 1] - offsets[m] + tile_tokens_ - 1) / tile_tokens_;
             tiles-- > 0;) {
          const int32_t begin = offsets[m] + static_cast<int32_t>(tiles * tile_tokens_);
          const int32_t end =
              std::min<int32_t>(offsets[m + 1], begin + static_cast<int32_t>(tile_tokens_));
          units_.push_back({b, h, h + heads_per_unit, r, m, begin, end});
        }
    }
}

class Attention::Worker {
 public:
  Worker(const Attention& attention, bool backward)
      : a_(attention),
        p_(attention.p_),
        dim_(attention.dim_),
        backward_(backward),
        groups_(attention.groups_per_unit_) {
    const int64_t matrix = dim_ * kLanes, block = a_.key_block_ * kLanes;
    const int64_t routing = p_.regimes * kLanes;
    // A run can start anywhere in its first block, so each class may need one more block.
    const bool is_long = p_.keys / a_.key_block_ + p_.classes >= kStretchBlocks;
    const int64_t per_group = (backward ? 5 : 2) * matrix;
    const int64_t coefficients = backward ? p_.regimes * block : 0;
    const int64_t scratch = 6 * block + matrix + routing + coefficients;
    memory_ = aligned<float>(a_.groups_per_unit_ * per_group + scratch);
    const int64_t doubles = (is_long ? matrix : 0) + (backward ? routing : 0);
    long_memory_ = aligned<double>(a_.groups_per_unit_ * doubles + (backward ? routing : 0));
    float* next = memory_.get();
    double* next_long = long_memory_.get();
    auto take = [&](int64_t size) { return next += size, next - size; };
    auto take_long = [&](int64_t size) { return next_long += size, next_long - size; };
    for (Group& group : groups_) {
      group.q = take(matrix);
      group.o = take(matrix);
      group.settled = take_long(is_long ? matrix : 0);
      if (backward) {
        group.q_rows = take(matrix);
        group.do_rows = take(matrix);
        group.d_o = take(matrix);
        group.mixed = take_long(routing);
      }
      for (auto* list : {&group.lo, &group.hi}) list->resize(p_.classes * kLanes);
      for (auto* list :
           {&group.lo_min, &group.lo_max, &group.hi_min, &group.hi_max, &group.flat_from})
        list->resize(p_.classes);
    }
    score_ = take(block);
    prob_ = take(block);
    dprob_ = take(block);
    slope_ = take(block);
    worth_ = take(block);
    dbias_ = take(block);
    rows_ = take(matrix);
    pi_q_ = take(routing);
    coefficient_ = take(coefficients);
    dpi_q_ = take_long(backward ? routing : 0);
  }

  void forward(const Unit& unit, float* out, float* lse, float* softmax) {
    start(unit);
    for (int64_t n = 0; n < used_; ++n) {
      Group& group = groups_[n];
      std::fill(group.o, group.o + dim_ * kLanes, 0.0f);
      std::fill(group.max, group.max + kLanes, kLowest);
      group.sum[0] = group.sum[1] = {};
      group.blocks = 0;
    }
    walk([&](Group& group, int64_t c, int32_t begin, int32_t end, int32_t block) {
      forward_block(group, c, begin, end, block);
    });
    for (int64_t n = 0; n < used_; ++n) finish(groups_[n], out, lse, softmax);
  }

  void backward(const Unit& unit, const Gradients& g, float* const* dk, float* const* dv,
                double* dpi_k, const LearnedBias* learned) {
    start(unit);
    for (int64_t n = 0; n < used_; ++n) start_backward(groups_[n], g);
    dpi_k_ = dpi_k;
    learned_ = learned;
    std::fill(dpi_q_, dpi_q_ + p_.regimes * kLanes, 0.0);
    walk([&](Group& group, int64_t c, int32_t begin, int32_t end, int32_t block) {
      const int64_t h = group.kv_head - unit.kv_begin;
      backward_block(group, c, begin, end, block, dk[h], dv[h]);
    });
    for (int64_t n = 0; n < used_; ++n) finish_backward(groups_[n], g);
    if (g.dpi_q) {
      const int64_t base = (unit.b * p_.groups + a_.group_of(unit.kv_begin)) * p_.queries;
      for (int32_t t = unit.begin; t < unit.end; ++t)
        for (int64_t m = 0; m < p_.regimes; ++m)
          g.dpi_q[(base + order_q_[t]) * p_.regimes + m] =
              static_cast<float>(dpi_q_[m * kLanes + t - unit.begin]);
    }
  }

 private:
  // Fills the lane groups of a unit: rows, positions, runs, and the scaled queries by lane.
  void start(const Unit& unit) {
    unit_ = &unit;
    order_q_ = p_.query_order + unit.plan_row * p_.queries;
    order_k_ = p_.key_order + unit.plan_row * p_.keys;
    pos_q_ = p_.pos_q + unit.plan_row * p_.queries;
    pos_k_ = a_.keys_.position.data() + unit.plan_row * p_.keys;
    const int64_t tokens = unit.end - unit.begin;
    used_ = 0;
    for (int64_t h = unit.kv_begin; h < unit.kv_end; ++h) {
      const int64_t rows = a_.lanes_are_tokens_ ? tokens : tokens * a_.share_;
      const int64_t repeats = a_.lanes_are_tokens_ ? a_.share_ : 1;
      for (int64_t j = 0; j < repeats; ++j)
        for (int64_t first = 0; first < rows; first += kLanes)
          fill(groups_[used_++], h, j, first, std::min<int64_t>(kLanes, rows - first));
    }
    if (p_.bias == Bias::kWorth || p_.bias == Bias::kTable) {
      const Group& group = groups_[0];
      consecutive_ = true;
      for (int l = 1; l < group.count; ++l)
        consecutive_ = consecutive_ && group.pos[l] == group.pos[0] + l;
    }
    if (p_.bias == Bias::kWorth) {
      const int64_t routing = unit.b * p_.groups + a_.group_of(unit.kv_begin);
      routing_k_ = p_.pi_k + routing * p_.keys * p_.columns;
      for (int l = 0; l < kLanes; ++l) {
        const int64_t t = std::min<int64_t>(unit.begin + l, unit.end - 1);
        const float* pi = p_.pi_q + (routing * p_.queries + order_q_[t]) * p_.regimes;
        for (int64_t m = 0; m < p_.regimes; ++m) pi_q_[m * kLanes + l] = pi[m];
      }
    }
  }

  void fill(Group& group, int64_t kv_head, int64_t head_in_share, int64_t first, int64_t count) {
    const Unit& unit = *unit_;
    group.count = static_cast<int>(count);
    group.kv_head = kv_head;
    group.head0 = kv_head * a_.share_ + head_in_share;
    const float factor = p_.softcap > 0 ? p_.scale / p_.softcap : p_.scale * kLog2e;
    for (int l = 0; l < kLanes; ++l) {
      const int64_t place = first + std::min<int64_t>(l, count - 1);
      const int64_t t = unit.begin + (a_.lanes_are_tokens_ ? place : place / a_.share_);
      const int64_t head =
          a_.lanes_are_tokens_ ? group.head0 : kv_head * a_.share_ + place % a_.share_;
      const int64_t token = order_q_[t];
      group.row[l] = (unit.b * p_.query_heads + head) * p_.queries + token;
      group.pos[l] = pos_q_[token];
      for (int64_t c = 0; c < p_.classes; ++c) {
        const int64_t run = (unit.plan_row * p_.queries + t) * p_.classes + c;
        group.lo[c * kLanes + l] = p_.run_lo[run];
        group.hi[c * kLanes + l] = p_.run_hi[run];
      }
      float* row = rows_ + l * dim_;
      if (l < count) {
        const float* q = p_.q.row(unit.b, head, token);
        for (int64_t d = 0; d < p_.dim; ++d) row[d] = q[d] * factor;
        std::fill(row + p_.dim, row + dim_, 0.0f);
      } else {
        std::fill(row, row + dim_, 0.0f);
      }
      if (backward_) {
        // dK needs the plain scale; the factor above also includes the base and the cap.
        float* plain = group.q_rows + l * dim_;
        std::copy(row, row + dim_, plain);
        if (l < count) {
          const float* q = p_.q.row(unit.b, head, token);
          for (int64_t d = 0; d < p_.dim; ++d) plain[d] = q[d] * p_.scale;
        }
      }
    }
    rows_to_lanes(rows_, dim_, group.q);
    group.pos_max = *std::max_element(group.pos, group.pos + kLanes);
    group.key_bias = nullptr;
    if (p_.key_bias) {
      group.key_bias = p_.key_bias + (unit.b * p_.query_heads + group.head0) * p_.keys;
      for (int l = 0; l < kLanes; ++l) {
        int32_t newest = -1;
        for (int64_t c = 0; c < p_.classes; ++c) {
          const int32_t last = group.hi[c * kLanes + l] - 1;
          if (last < group.lo[c * kLanes + l]) continue;
          if (newest < 0 || pos_k_[last] > pos_k_[newest]) newest = last;
        }
        group.key_shift[l] = newest < 0 ? 0 : group.key_bias[order_k_[newest]];
      }
    }
    for (int64_t c = 0; c < p_.classes; ++c) {
      const int32_t* lo = group.lo.data() + c * kLanes;
      const int32_t* hi = group.hi.data() + c * kLanes;
      group.lo_min[c] = *std::min_element(lo, lo + kLanes);
      group.lo_max[c] = *std::max_element(lo, lo + kLanes);
      group.hi_min[c] = *std::min_element(hi, hi + kLanes);
      group.hi_max[c] = *std::max_element(hi, hi + kLanes);
      group.flat_from[c] = group.lo_min[c];
      if (p_.bias == Bias::kGeometry) {
        const double plateau = p_.geometry[(unit.label * p_.classes + c) * 2];
        const double limit = group.pos_max - plateau;
        group.flat_from[c] = static_cast<int32_t>(
            std::partition_point(pos_k_ + group.lo_min[c],
                                 pos_k_ + std::max(group.lo_min[c], group.hi_max[c]),
                                 [&](int32_t pos) { return pos < limit; }) -
            pos_k_);
      }
    }
  }

  // Visits (group, class, run of keys) block by block. All groups of the unit process a block before
  // the next one, so that its keys and values stay in cache.
  template <class Visit>
  void walk(const Visit& visit) {
    for (int64_t c = 0; c < p_.classes; ++c) {
      int32_t begin = INT32_MAX, end = 0;
      for (int64_t n = 0; n < used_; ++n) {
        if (groups_[n].lo_min[c] >= groups_[n].hi_max[c]) continue;
        begin = std::min(begin, groups_[n].lo_min[c]);
        end = std::max(end, groups_[n].hi_max[c]);
      }
      for (int64_t block = begin; block < end; block += a_.key_block_) {
        const int32_t stop = static_cast<int32_t>(std::min<int64_t>(block + a_.key_block_, end));
        const int32_t from = static_cast<int32_t>(block);
        if (p_.bias == Bias::kWorth) compute_worth(from, stop);
        for (int64_t n = 0; n < used_; ++n) {
          Group& group = groups_[n];
          const int32_t first = std::max(from, group.lo_min[c]);
          const int32_t last = std::min(stop, group.hi_max[c]);
          if (first < last) visit(group, c, first, last, from);
        }
        if (p_.bias == Bias::kWorth && backward_) spread_dbias(from, stop);
      }
    }
  }

  // Gates (or biases) of one table row at the distances of both vectors of lanes to a key.
  void look_up(const float* table, const int32_t* pos, int32_t key_pos, vf* result) const {
    const float* base = table + kTablePad;
    if (consecutive_) {
      const int64_t d = std::clamp<int64_t>(static_cast<int64_t>(pos[0]) - key_pos, -kTablePad,
                                            p_.table_length);
      // Past the end, every entry equals the last one, which the padding repeats.
      result[0] = load_unaligned(base + d);
      result[1] = load_unaligned(base + std::min<int64_t>(d + kWidth, p_.table_length));
      return;
    }
    alignas(64) float found[kLanes];
    for (int l = 0; l < kLanes; ++l)
      found[l] = base[std::clamp<int64_t>(static_cast<int64_t>(pos[l]) - key_pos, 0,
                                          p_.table_length - 1)];
    result[0] = load(found);
    result[1] = load(found + kWidth);
  }

  const float* table_row(int64_t row) const {
    return p_.table + row * (p_.table_length + 2 * kTablePad);
  }

  vd log_gates(int64_t pair, const int32_t* pos, int32_t key_pos) const {
    return log_gate(to_double(load_int(pos)) - key_pos, p_.geometry + pair * 2, p_.barrier,
                    p_.exponent);
  }

  // The gates of a regime and a column at the distances of both vectors of lanes to a key.
  void gates(int64_t m, int64_t n, const int32_t* pos, int32_t key_pos, vf* result) const {
    const int64_t pair = m * p_.columns + n;
    if (p_.table) return look_up(table_row(pair), pos, key_pos, result);
    for (int v = 0; v < 2; ++v) result[v] = exp2(log_gates(pair, pos + v * kWidth, key_pos));
  }

  void compute_worth(int32_t begin, int32_t end) {
    const int32_t* pos = groups_[0].pos;
    for (int32_t j = begin; j < end; ++j) {
      const float* pi = routing_k_ + order_k_[j] * p_.columns;
      vf w[2] = {};
      for (int64_t n = 0; n < p_.columns; ++n) {
        if (pi[n] == 0) continue;
        vf h[2] = {};
        for (int64_t m = 0; m < p_.regimes; ++m) {
          vf g[2];
          gates(m, n, pos, pos_k_[j], g);
          for (int v = 0; v < 2; ++v) h[v] += load(pi_q_ + m * kLanes + v * kWidth) * g[v];
        }
        for (int v = 0; v < 2; ++v) w[v] += pi[n] * h[v];
      }
      float* row = worth_ + (j - begin) * kLanes;
      // In this order, so that NaN propagates.
      for (int v = 0; v < 2; ++v) store(row + v * kWidth, max(splat(p_.epsilon), w[v]));
      if (backward_) compute_coefficients(pi, pos, j, w, begin);
    }
    if (backward_) std::fill(dbias_, dbias_ + (end - begin) * kLanes, 0.0f);
  }

  // d log W / d pi_q[m] = sum_n gate[m][n] pi_k[n] / W; 0 where the worth is clamped to epsilon. Sinks,
  // the column after the routed ones, have worth 1, whatever the routing.
  void compute_coefficients(const float* pi, const int32_t* pos, int32_t j, const vf* w,
                            int32_t begin) {
    vf inverse[2];
    for (int v = 0; v < 2; ++v) inverse[v] = w[v] > p_.epsilon ? 1.0f / w[v] : vf{};
    for (int64_t m = 0; m < p_.regimes; ++m) {
      vf x[2] = {};
      for (int64_t n = 0; n < p_.regimes; ++n) {
        if (pi[n] == 0) continue;
        vf g[2];
        gates(m, n, pos, pos_k_[j], g);
        for (int v = 0; v < 2; ++v) x[v] += pi[n] * g[v];
      }
      float* row = coefficient_ + (m * a_.key_block_ + j - begin) * kLanes;
      for (int v = 0; v < 2; ++v) store(row + v * kWidth, x[v] * inverse[v]);
    }
  }

  // Turns the gradient of the bias, summed over heads, into the gradients of both routings.
  void spread_dbias(int32_t begin, int32_t end) {
    const int32_t* pos = groups_[0].pos;
    for (int32_t j = begin; j < end; ++j) {
      const int64_t key = order_k_[j];
      vf dbias[2], inverse[2];
      for (int v = 0; v < 2; ++v) {
        const int64_t at = (j - begin) * kLanes + v * kWidth;
        vf w = load(worth_ + at);
        dbias[v] = load(dbias_ + at);
        inverse[v] = w > p_.epsilon ? 1.0f / w : vf{};
      }
      for (int64_t n = 0; n < p_.regimes; ++n) {
        vf h[2] = {};
        for (int64_t m = 0; m < p_.regimes; ++m) {
          vf g[2];
          gates(m, n, pos, pos_k_[j], g);
          for (int v = 0; v < 2; ++v) h[v] += load(pi_q_ + m * kLanes + v * kWidth) * g[v];
        }
        // In this order, because a gradient divided by a tiny worth can overflow a float.
        dpi_k_[key * p_.columns + n] +=
            horizontal_sum(dbias[0] * (h[0] * inverse[0]) + dbias[1] * (h[1] * inverse[1]));
      }
    }
    for (int64_t m = 0; m < p_.regimes; ++m)
      add_products(dbias_, coefficient_ + m * a_.key_block_ * kLanes, end - begin,
                   dpi_q_ + m * kLanes);
  }

  // sums[lane] += sum_row a[row][lane] (b[row][lane])
  static void add_products(const float* a, const float* b, int64_t rows, double* sums) {
    for (int v = 0; v < 2; ++v) {
      vf sum = vf{};
      for (int64_t from = 0; from < rows; from += kTerms) {
        vf part = vf{};
        for (int64_t j = from; j < std::min(rows, from + kTerms); ++j) {
          const int64_t at = j * kLanes + v * kWidth;
          part += b ? load(a + at) * load(b + at) : load(a + at);
        }
        sum += part;
      }
      for (int l = 0; l < kWidth; ++l) sums[v * kWidth + l] += sum[l];
    }
  }

  // Turns products into logits in base 2, in place: soft-cap, additive bias, mask. `slope`, if given,
  // receives the derivative of the cap. Rows in [plain_from, plain_to) need no bias and no mask; they
  // are visited only if every row has a cap or a bias.
  void finish_scores(const Group& group, int64_t c, int32_t begin, int32_t end, int32_t block,
                     float* slope) {
    const bool hard = p_.bias == Bias::kWorth && p_.epsilon == 0;
    const bool every_row = p_.softcap > 0 || p_.bias == Bias::kTable || hard || group.key_bias;
    const int32_t plain_from =
        std::clamp(std::max(group.lo_max[c], group.flat_from[c]), begin, end);
    const int32_t plain_to = std::clamp(group.hi_min[c], plain_from, end);
    for (int32_t j = begin; j < end; ++j) {
      if (!every_row && j == plain_from) j = plain_to;
      if (j >= end) break;
      float* row = score_ + (j - begin) * kLanes;
      vf added[2] = {};
      if (p_.bias == Bias::kTable) table_bias(group, j, added);
      if (p_.bias == Bias::kGeometry && j < group.flat_from[c]) gate_bias(group, c, pos_k_[j], added);
      if (group.key_bias) key_bias(group, j, added);
      const bool masked = j < group.lo_max[c] || j >= group.hi_min[c];
      for (int v = 0; v < 2; ++v) {
        vf s = load(row + v * kWidth);
        if (p_.softcap > 0) {
          vf t = tanh(s);
          if (slope) store(slope + (j - begin) * kLanes + v * kWidth, 1.0f - t * t);
          s = t * (p_.softcap * kLog2e);
        }
        s += added[v];
        if (masked) {
          const int64_t at = c * kLanes + v * kWidth;
          vi lo, hi;
          std::memcpy(&lo, group.lo.data() + at, sizeof lo);
          std::memcpy(&hi, group.hi.data() + at, sizeof hi);
          s = select((lo <= j) & (hi > j), s, splat(kMasked));
        }
        if (hard) {
          vf worth = load(worth_ + (j - block) * kLanes + v * kWidth);
          s = select(worth > 0.0f, s, splat(kMasked));
        }
        store(row + v * kWidth, s);
      }
    }
  }

  void table_bias(const Group& group, int32_t j, vf* added) const {
    const int32_t key_pos = pos_k_[j];
    if (p_.table) {
      const int64_t row = p_.table_rows == 1 ? 0 : group.head0;
      look_up(table_row(row), group.pos, key_pos, added);
    }
    if (p_.slopes)
      for (int v = 0; v < 2; ++v)
        added[v] -= p_.slopes[group.head0] * to_float(load_int(group.pos + v * kWidth) - key_pos);
  }

  void key_bias(const Group& group, int32_t j, vf* added) const {
    const double of_key = group.key_bias[order_k_[j]];
    for (int v = 0; v < 2; ++v) {
      vd shift;
      std::memcpy(&shift, group.key_shift + v * kWidth, sizeof shift);
      added[v] += to_float((of_key - shift) * kLog2eDouble);
    }
  }

  // Adds dS of keys [begin, begin + count), stored in dbias_, to the gradients of their bias.
  void gather_bias(const Group& group, int32_t begin, int64_t count) const {
    const LearnedBias& to = *learned_;
    double* row = to.row(group.head0);
    double *table = row + kTablePad, *keys = row + to.padded;
    vd by_distance[2] = {};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t j = begin + i;
      const int32_t key_pos = pos_k_[j];
      vf ds[2];
      for (int v = 0; v < 2; ++v) ds[v] = load(dbias_ + i * kLanes + v * kWidth);
      if (to.keys) keys[order_k_[j]] += horizontal_sum(ds[0] + ds[1]);
      if (to.slopes)
        for (int v = 0; v < 2; ++v)
          by_distance[v] +=
              to_double(ds[v]) * to_double(load_int(group.pos + v * kWidth) - key_pos);
      if (!to.padded) continue;
      // The table entries that the lanes read as their bias; lanes without a pair add 0.
      if (consecutive_) {
        const int64_t d = std::clamp<int64_t>(static_cast<int64_t>(group.pos[0]) - key_pos,
                                              -kTablePad, p_.table_length);
        add_unaligned(table + d, to_double(ds[0]));
        add_unaligned(table + std::min<int64_t>(d + kWidth, p_.table_length), to_double(ds[1]));
        continue;
      }
      for (int l = 0; l < kLanes; ++l)
        table[std::clamp<int64_t>(static_cast<int64_t>(group.pos[l]) - key_pos, 0,
                                  p_.table_length - 1)] += ds[l / kWidth][l % kWidth];
    }
    if (to.slopes)
      for (int v = 0; v < 2; ++v)
        for (int l = 0; l < kWidth; ++l) row[to.padded + to.keys] -= by_distance[v][l];
  }

  void gate_bias(const Group& group, int64_t c, int32_t key_pos, vf* added) const {
    const int64_t pair = unit_->label * p_.classes + c;
    if (!p_.table) {
      for (int v = 0; v < 2; ++v)
        added[v] = to_float(log_gates(pair, group.pos + v * kWidth, key_pos));
      return;
    }
    const float* table = table_row(pair) + kTablePad;
    for (int l = 0; l < kLanes; ++l)
      added[l / kWidth][l % kWidth] = table[std::clamp<int64_t>(
          static_cast<int64_t>(group.pos[l]) - key_pos, 0, p_.table_length - 1)];
  }

  void forward_block(Group& group, int64_t c, int32_t begin, int32_t end, int32_t block) {
    const SortedKeys& sorted = a_.keys_;
    const int64_t head = unit_->b * p_.kv_heads + group.kv_head, count = end - begin;
    const int64_t stride = sorted.stride;
    const float *k = sorted.k[head] + begin * stride, *v = sorted.v[head] + begin * stride;
    score(k, stride, count, group.q, p_.dim, kScoreChain, score_);
    finish_scores(group, c, begin, end, block, nullptr);
    const float* worth = worth_ + (begin - block) * kLanes;
    const bool weighted = p_.bias == Bias::kWorth, high = weighted && p_.barrier > kHighBarrier;
    vf top[2], old[2];
    for (int v = 0; v < 2; ++v) old[v] = top[v] = load(group.max + v * kWidth);
    for (int64_t j = 0; j < count; ++j)
      for (int v = 0; v < 2; ++v) {
        const int64_t at = j * kLanes + v * kWidth;
        vf s = load(score_ + at);
        // The exponent of the worth is nearly its logarithm, so weights are in [0, 2).
        if (high) s += exponent(load(worth + at));
        top[v] = max(top[v], s);
      }
    bool moved = false;
    for (int v = 0; v < 2; ++v)
      for (int l = 0; l < kWidth; ++l) moved |= top[v][l] > old[v][l];
    if (moved) {
      vf shrink[2];
      for (int v = 0; v < 2; ++v) {
        shrink[v] = exp2(old[v] - top[v]);
        group.sum[v].high *= shrink[v];
        group.sum[v].low *= shrink[v];
        store(group.max + v * kWidth, top[v]);
      }
      for (int64_t d = 0; d < dim_; ++d)
        for (int v = 0; v < 2; ++v) {
          float* o = group.o + d * kLanes + v * kWidth;
          store(o, load(o) * shrink[v]);
        }
    }
    for (int64_t from = 0; from < count; from += kTerms) {
      vf sum[2] = {};
      for (int64_t j = from; j < std::min(count, from + kTerms); ++j)
        for (int v = 0; v < 2; ++v) {
          const int64_t at = j * kLanes + v * kWidth;
          vf e = exp2(load(score_ + at) - top[v]);
          if (weighted) e *= load(worth + at);
          sum[v] += e;
          store(score_ + at, e);
        }
      for (int v = 0; v < 2; ++v) group.sum[v].add(sum[v]);
    }
    accumulate(v, stride, score_, count, group.o, dim_);
    if (++group.blocks % kStretchBlocks == 0) settle(group);
  }

  // Adds the stretch that ends here to the sum of those before it.
  void settle(Group& group) {
    if (group.blocks > kStretchBlocks) {
      add_settled(group);
    } else {
      for (int64_t i = 0; i < dim_ * kLanes; ++i) group.settled[i] = group.o[i];
    }
    std::copy(group.max, group.max + kLanes, group.settled_max);
    std::fill(group.o, group.o + dim_ * kLanes, 0.0f);
  }

  // settled = settled, relative to the present maximum, + o
  void add_settled(Group& group) {
    alignas(64) float shrink[kLanes];
    for (int v = 0; v < 2; ++v) {
      const int64_t at = v * kWidth;
      store(shrink + at, exp2(load(group.settled_max + at) - load(group.max + at)));
    }
    for (int64_t d = 0; d < dim_; ++d)
      for (int l = 0; l < kLanes; ++l) {
        const int64_t i = d * kLanes + l;
        group.settled[i] = group.settled[i] * shrink[l] + group.o[i];
      }
  }

  // Leaves the sum over all stretches in o.
  void finish_sum(Group& group) {
    if (group.blocks < kStretchBlocks) return;
    add_settled(group);
    for (int64_t i = 0; i < dim_ * kLanes; ++i) group.o[i] = static_cast<float>(group.settled[i]);
  }

  void finish(Group& group, float* out, float* lse, float* softmax) {
    const int64_t rows = p_.batch * p_.query_heads * p_.queries;
    finish_sum(group);
    lanes_to_rows(group.o, dim_, rows_);
    for (int l = 0; l < group.count; ++l) {
      const LongSum& half = group.sum[l / kWidth];
      const double sum = static_cast<double>(half.high[l % kWidth]) + half.low[l % kWidth];
      const double inverse = sum == 0 ? 0 : 1 / sum;
      float* o = out + group.row[l] * p_.dim;
      for (int64_t d = 0; d < p_.dim; ++d)
        o[d] = static_cast<float>(rows_[l * dim_ + d] * inverse);
      softmax[group.row[l]] = group.max[l];
      softmax[rows + group.row[l]] = static_cast<float>(sum);
      const double shift = group.key_bias ? group.key_shift[l] : 0;
      lse[group.row[l]] = log_sum(group.max[l] + shift * kLog2eDouble, sum);
    }
  }

  void start_backward(Group& group, const Gradients& g) {
    const int64_t rows = p_.batch * p_.query_heads * p_.queries;
    for (int l = 0; l < kLanes; ++l) {
      float* row = group.do_rows + l * dim_;
      std::fill(row, row + dim_, 0.0f);
      group.delta[l] = 0;
      group.dot[l] = group.weight[l] = group.weighted_dprob[l] = 0;
      // Lanes beyond the tile belong to no query, so their probabilities are set to 0.
      group.max[l] = -kMasked;
      group.inverse[l] = 0;
      if (l >= group.count) continue;
      const float sum = g.softmax[rows + group.row[l]];
      group.max[l] = g.softmax[group.row[l]];
      group.inverse[l] = sum == 0 ? 0 : 1 / sum;
      const float* dout = g.dout + group.row[l] * p_.dim;
      std::copy(dout, dout + p_.dim, row);
      group.dot[l] = dot_product(dout, g.out + group.row[l] * p_.dim, p_.dim);
      group.dlse[l] = g.dlse[group.row[l]];
      group.delta[l] = static_cast<float>(group.dot[l] - group.dlse[l]);
    }
    group.blocks = 0;
    std::fill(group.mixed, group.mixed + p_.regimes * kLanes, 0.0);
    rows_to_lanes(group.do_rows, dim_, group.d_o);
    std::fill(group.o, group.o + dim_ * kLanes, 0.0f);
  }

  void backward_block(Group& group, int64_t c, int32_t begin, int32_t end, int32_t block, float* dk,
                      float* dv) {
    const SortedKeys& sorted = a_.keys_;
    const int64_t head = unit_->b * p_.kv_heads + group.kv_head, count = end - begin;
    const int64_t stride = sorted.stride;
    const float *k = sorted.k[head] + begin * stride, *v = sorted.v[head] + begin * stride;
    score(k, stride, count, group.q, p_.dim, kScoreChain, score_);
    score(v, stride, count, group.d_o, p_.dim, kGradientChain, dprob_);
    finish_scores(group, c, begin, end, block, slope_);
    const bool weighted = p_.bias == Bias::kWorth, capped = p_.softcap > 0;
    auto probability = [&](int64_t j, int v) {
      const int64_t at = j * kLanes + v * kWidth;
      vf e = exp2(load(score_ + at) - load(group.max + v * kWidth));
      e *= load(group.inverse + v * kWidth);
      return weighted ? e * load(worth_ + at + (begin - block) * kLanes) : e;
    };
    if (weighted && holds_all(group, c, begin, end)) {
      for (int64_t j = 0; j < count; ++j)
        for (int v = 0; v < 2; ++v) store(prob_ + j * kLanes + v * kWidth, probability(j, v));
      settle_delta(group, count);
    }
    for (int64_t j = 0; j < count; ++j)
      for (int v = 0; v < 2; ++v) {
        const int64_t at = j * kLanes + v * kWidth, in_block = at + (begin - block) * kLanes;
        const vf e = probability(j, v);
        vf ds = e * (load(dprob_ + at) - load(group.delta + v * kWidth));
        store(prob_ + at, e);
        if (weighted) store(dbias_ + in_block, load(dbias_ + in_block) + ds);
        if (learned_) store(dbias_ + at, ds);
        if (capped) ds *= load(slope_ + at);
        store(score_ + at, ds);
      }
    if (weighted) gather_sums(group, count, begin - block);
    if (learned_) gather_bias(group, begin, count);
    outer(prob_, count, group.do_rows, dv + begin * dim_, dim_, dim_);
    outer(score_, count, group.q_rows, dk + begin * dim_, dim_, dim_);
    accumulate(k, stride, score_, count, group.o, dim_);
    if (++group.blocks % kStretchBlocks == 0) settle(group);
  }

  // Whether keys [begin, end) of a class are all that the group reads.
  bool holds_all(const Group& group, int64_t c, int32_t begin, int32_t end) const {
    for (int64_t other = 0; other < p_.classes; ++other)
      if (other != c && group.lo_min[other] < group.hi_max[other]) return false;
    return begin == group.lo_min[c] && end == group.hi_max[c];
  }

  // If a row has few keys, P can be nearly 1 and dP nearly delta. Their difference must use the same
  // rounded numbers, because dpi_k divides it by the worth.
  void settle_delta(Group& group, int64_t count) const {
    double weight[kLanes] = {}, weighted_dprob[kLanes] = {};
    add_products(prob_, nullptr, count, weight);
    add_products(prob_, dprob_, count, weighted_dprob);
    for (int l = 0; l < group.count; ++l) {
      if (weight[l] <= 0) continue;
      group.dot[l] = weighted_dprob[l] / weight[l];
      group.delta[l] = static_cast<float>(group.dot[l] - group.dlse[l]);
    }
  }

  // The sums that `finish_backward` needs to correct dpi_q.
  void gather_sums(Group& group, int64_t count, int64_t first) {
    add_products(prob_, nullptr, count, group.weight);
    add_products(prob_, dprob_, count, group.weighted_dprob);
    for (int64_t m = 0; m < p_.regimes; ++m)
      add_products(prob_, coefficient_ + (m * a_.key_block_ + first) * kLanes, count,
                   group.mixed + m * kLanes);
  }

  void finish_backward(Group& group, const Gradients& g) {
    if (p_.bias == Bias::kWorth) {
      // dS = P (dP - delta) must sum to 0 over keys. With delta = dO·O, which was rounded elsewhere, it
      // does so only roughly. The coefficients of pi_q all have one sign, so the errors add up. So we
      // replace delta afterwards by the sum of P dP over this pass.
      for (int l = 0; l < group.count; ++l) {
        if (group.weight[l] <= 0) continue;
        const double error = group.dot[l] - group.weighted_dprob[l] / group.weight[l];
        for (int64_t m = 0; m < p_.regimes; ++m)
          dpi_q_[m * kLanes + l] += error * group.mixed[m * kLanes + l];
      }
    }
    finish_sum(group);
    lanes_to_rows(group.o, dim_, rows_);
    for (int l = 0; l < group.count; ++l) {
      float* dq = g.dq + group.row[l] * p_.dim;
      for (int64_t d = 0; d < p_.dim; ++d) dq[d] = rows_[l * dim_ + d] * p_.scale;
    }
  }

  const Attention& a_;
  const Problem& p_;
  const int64_t dim_;
  const bool backward_;
  std::vector<Group> groups_;
  int64_t used_ = 0;
  const Unit* unit_ = nullptr;
  const int32_t *order_q_ = nullptr, *order_k_ = nullptr, *pos_q_ = nullptr, *pos_k_ = nullptr;
  bool consecutive_ = false;
  const float* routing_k_ = nullptr;
  Aligned<float> memory_;
  Aligned<double> long_memory_;
  float *score_, *prob_, *dprob_, *slope_, *worth_, *dbias_, *rows_, *pi_q_, *coefficient_;
  double *dpi_q_, *dpi_k_ = nullptr;
  const LearnedBias* learned_ = nullptr;
};

inline void Attention::forward(float* out, float* lse, float* softmax) {
  std::atomic<int64_t> next{0};
  const int64_t count = static_cast<int64_t>(units_.size());
  parallel_.run(std::min(parallel_.thread_count, count), [&](int64_t) {
    Worker worker(*this, false);
    for (int64_t i; (i = next.fetch_add(1)) < count;) worker.forward(units_[i], out, lse, softmax);
  });
}

// The contribution of a stretch of units to the gradients of keys, separate from earlier ones.
class Attention::StretchOfUnits {
 public:
  StretchOfUnits(const Attention& attention, int64_t count) : a_(attention), sums_(count) {}

  // Zeros at first.
  float* const* sums() {
    const int64_t size = a_.p_.keys * a_.dim_, count = static_cast<int64_t>(sums_.size());
    if (!memory_) {
      memory_ = aligned<float>(count * size);
      std::fill(memory_.get(), memory_.get() + count * size, 0.0f);
      touched_.assign((a_.p_.keys + kBlock - 1) / kBlock, 0);
      for (int64_t i = 0; i < count; ++i) sums_[i] = memory_.get() + i * size;
    }
    return sums_.data();
  }

  // Sparse units read only a few keys, so only the touched rows are added and cleared.
  void mark(const Unit& unit) {
    const Problem& p = a_.p_;
    for (int64_t t = unit.begin; t < unit.end; ++t)
      for (int64_t c = 0; c < p.classes; ++c) {
        const int64_t run = (unit.plan_row * p.queries + t) * p.classes + c;
        if (p.run_lo[run] >= p.run_hi[run]) continue;
        std::fill(touched_.begin() + p.run_lo[run] / kBlock,
                  touched_.begin() + (p.run_hi[run] - 1) / kBlock + 1, 1);
      }
  }

  void settle(float* const* result) {
    for (int64_t block = 0; block < static_cast<int64_t>(touched_.size()); ++block) {
      if (!touched_[block]) continue;
      touched_[block] = 0;
      const int64_t begin = block * kBlock * a_.dim_;
      const int64_t end = std::min(a_.p_.keys, (block + 1) * kBlock) * a_.dim_;
      for (size_t n = 0; n < sums_.size(); ++n)
        for (int64_t i = begin; i < end; ++i) {
          result[n][i] += sums_[n][i];
          sums_[n][i] = 0;
        }
    }
  }

 private:
  static constexpr int64_t kBlock = 64;
  const Attention& a_;
  std::vector<float*> sums_;
  Aligned<float> memory_;
  std::vector<char> touched_;
};

// Combines the sums of all tasks, always in the same order; those of table and slopes are in base 2.
inline void Attention::add_up_bias(const Gradients& g, const LearnedBias& learned,
                                   const std::vector<double>& sums, int64_t chunks) const {
  const int64_t size = learned.size(), heads = p_.query_heads;
  auto total = [&](int64_t b, int64_t h, int64_t i) {
    double sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      sum += sums[((chunk * p_.batch + b) * heads + h) * size + i];
    return sum;
  };
  const int64_t shared = g.dtable && p_.table_rows == 1 ? heads : 1;
  for (int64_t h = 0; g.dtable && h < heads; h += shared)
    for (int64_t i = 0; i < learned.padded; ++i) {
      double sum = 0;
      for (int64_t b = 0; b < p_.batch; ++b)
        for (int64_t other = h; other < h + shared; ++other) sum += total(b, other, i);
      g.dtable[h / shared * learned.padded + i] = static_cast<float>(sum * kLn2);
    }
  for (int64_t h = 0; h < heads; ++h) {
    double slope = 0;
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t j = 0; j < learned.keys; ++j)
        g.dkey_bias[(b * heads + h) * p_.keys + j] = total(b, h, learned.padded + j);
      if (g.dslopes) slope += total(b, h, learned.padded + learned.keys);
    }
    if (g.dslopes) g.dslopes[h] = static_cast<float>(slope * kLn2);
  }
}

inline void Attention::backward(const Gradients& g) {
  const int64_t heads = units_.empty() ? 1 : units_[0].kv_end - units_[0].kv_begin;
  const int64_t owners = p_.batch * p_.kv_heads / heads;
  const int64_t chunks =
      std::clamp<int64_t>((parallel_.thread_count + owners - 1) / owners, 1, 16);
  // If the plan keeps the order of the keys, the first chunk sums directly into the result.
  bool direct = true;
  for (char in_order : keys_.in_order) direct = direct && in_order;
  const int64_t size = p_.keys * dim_, all = p_.batch * p_.kv_heads;
  const Aligned<float> storage = aligned<float>((chunks - direct) * all * 2 * size);
  auto aside = [&](int64_t chunk, int64_t head) {
    return storage.get() + ((chunk - direct) * all + head) * 2 * size;
  };
  auto dk_of = [&](int64_t chunk, int64_t head) {
    return direct && chunk == 0 ? g.dk + head * size : aside(chunk, head);
  };
  auto dv_of = [&](int64_t chunk, int64_t head) {
    return direct && chunk == 0 ? g.dv + head * size : aside(chunk, head) + size;
  };
  const int64_t routing = g.dpi_k ? p_.batch * p_.groups * p_.keys * p_.columns : 0;
  std::vector<double> dpi_k(chunks * routing, 0.0);
  LearnedBias learned{g.dtable ? p_.table_length + 2 * kTablePad : 0, g.dkey_bias ? p_.keys : 0,
                      g.dslopes ? 1 : 0, nullptr};
  const int64_t of_batch = p_.query_heads * learned.size();
  std::vector<double> dbias(chunks * p_.batch * of_batch, 0.0);
  std::vector<std::vector<const Unit*>> tasks(owners * chunks);
  std::vector<int64_t> seen(owners, 0);
  for (const Unit& unit : units_) {
    const int64_t owner = (unit.b * p_.kv_heads + unit.kv_begin) / heads;
    tasks[owner * chunks + seen[owner]++ % chunks].push_back(&unit);
  }
  std::atomic<int64_t> next{0};
  const int64_t count = owners * chunks;
  parallel_.run(std::min(parallel_.thread_count, count), [&](int64_t) {
    Worker worker(*this, true);
    std::vector<float*> result(2 * heads);  // dK of each head, then dV
    StretchOfUnits stretch(*this, 2 * heads);
    for (int64_t task; (task = next.fetch_add(1)) < count;) {
      const int64_t owner = task / chunks, chunk = task % chunks;
      for (int64_t h = 0; h < heads; ++h) {
        result[h] = dk_of(chunk, owner * heads + h);
        result[heads + h] = dv_of(chunk, owner * heads + h);
      }
      for (float* sums : result) std::fill(sums, sums + size, 0.0f);
      const int64_t units = static_cast<int64_t>(tasks[task].size());
      const bool is_long = units > kStretchUnits;
      float* const* sums = is_long ? stretch.sums() : result.data();
      for (int64_t i = 0; i < units; ++i) {
        const Unit& unit = *tasks[task][i];
        const int64_t row = (unit.b * p_.groups + group_of(unit.kv_begin)) * p_.keys * p_.columns;
        LearnedBias own = learned;
        own.sums = dbias.data() + (chunk * p_.batch + unit.b) * of_batch;
        worker.backward(unit, g, sums, sums + heads,
                        routing ? dpi_k.data() + chunk * routing + row : nullptr,
                        of_batch ? &own : nullptr);
        if (!is_long) continue;
        stretch.mark(unit);
        if ((i + 1) % kStretchUnits == 0 || i + 1 == units) stretch.settle(result.data());
      }
    }
  });
  for (int64_t i = 0; i < routing; ++i) {
    double sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += dpi_k[chunk * routing + i];
    g.dpi_k[i] = static_cast<float>(sum);
  }
  if (of_batch) add_up_bias(g, learned, dbias, chunks);
  if (direct && chunks == 1) return;
  parallel_.run(all, [&](int64_t head) {
    const int64_t b = head / p_.kv_heads, r = plan_row(b, group_of(head % p_.kv_heads));
    const int32_t* order = p_.key_order + r * p_.keys;
    const int32_t used = p_.key_offsets[r * (p_.classes + 1) + p_.classes];
    for (bool values : {false, true}) {
      float* to = (values ? g.dv : g.dk) + head * p_.keys * p_.dim;
      if (!direct && used < p_.keys) std::fill(to, to + p_.keys * p_.dim, 0.0f);
      for (int32_t j = 0; j < used; ++j) {
        float* row = to + order[j] * p_.dim;
        for (int64_t chunk = direct; chunk < chunks; ++chunk) {
          const float* from = (values ? dv_of(chunk, head) : dk_of(chunk, head)) + j * dim_;
          if (chunk == 0) std::copy(from, from + p_.dim, row);
          else
            for (int64_t d = 0; d < p_.dim; ++d) row[d] += from[d];
        }
      }
    }
  });
}

}  // namespace mosar
