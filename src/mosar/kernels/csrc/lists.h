// The lists of the regime KV cache: one list of keys per (row, routing group, class), in pages of a pool.
//
// A page has kPageKeys keys of one list. Keys are stored transposed, [head][dim][key], so that scores
// need no sum across lanes; values are rows, [head][key][dim]. A list's keys are at places [begin, end) of
// its pages, in the order in which they came, with ascending positions. Keys are removed at the front,
// and an empty page goes back to the pool. Where keys have a bias, it is stored by query head,
// [head][key]. All bookkeeping is in arrays that the caller owns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace mosar {

constexpr int64_t kPageKeys = 32;
constexpr int32_t kBoundless = std::numeric_limits<int32_t>::max();

struct RegimeLists {
  int64_t rows, groups, classes;
  int64_t pages;     // of the pool
  int64_t width;     // how many pages per list fit into the table
  int32_t* table;    // [rows][groups][classes][2 + width]: begin, end, and the list's pages
  int32_t* marks;    // [pages][2][kPageKeys]: positions and slots (indices among all tokens, with padding)
  int32_t* free;     // [1 + pages]: the height of a stack of unused pages, then the stack
  int64_t* progress;  // [rows][4], see Progress
  int64_t biased;     // query heads of a group whose keys have a bias; 0: none have
  double* biases;     // [pages][biased][kPageKeys]

  int64_t count() const { return rows * groups * classes; }
};

// For each row: tokens seen, the last position, the first query position from which no evicted key can
// be reached, and the last evicted slot.
struct Progress {
  int64_t seen, last_position, horizon, evicted_slot;
};

inline Progress& progress_of(const RegimeLists& lists, int64_t row) {
  return *reinterpret_cast<Progress*>(lists.progress + 4 * row);
}

class List {
 public:
  List(const RegimeLists& lists, int64_t index)
      : lists_(lists), data_(lists.table + index * (2 + lists.width)) {}

  int32_t begin() const { return data_[0]; }
  int32_t end() const { return data_[1]; }
  int32_t page(int64_t place) const { return data_[2 + place / kPageKeys]; }
  int32_t position(int64_t place) const { return mark(place)[0]; }
  int32_t slot(int64_t place) const { return mark(place)[kPageKeys]; }
  const int32_t* positions(int64_t place) const { return mark(place - place % kPageKeys); }

  // Whether all indices of the table are inside the pool, whatever wrote it.
  bool is_sound() const {
    if (begin() < 0 || end() < begin() || end() > lists_.width * kPageKeys) return false;
    for (int64_t i = 0; i * kPageKeys < end(); ++i)
      if (data_[2 + i] < 0 || data_[2 + i] >= lists_.pages) return false;
    return true;
  }

  // The first place whose position is at least `limit`; the search starts at the end, where it mostly is.
  int32_t find(int64_t limit) const {
    int32_t low = begin(), high = end();
    for (int32_t step = 1; high > low; step *= 2) {
      const int32_t probe = std::max(low, high - step);
      if (position(probe) < limit) {
        low = probe + 1;
        break;
      }
      high = probe;
    }
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      if (position(middle) < limit) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Makes room for one more key at the end, marks it, and returns its place. The pool must have a page.
  int32_t push(int32_t position, int32_t slot) {
    const int32_t place = data_[1]++;
    if (place % kPageKeys == 0) data_[2 + place / kPageKeys] = lists_.free[lists_.free[0]--];
    int32_t* at = mark(place);
    at[0] = position;
    at[kPageKeys] = slot;
    return place;
  }

  void pop_front() {
    if (++data_[0] < kPageKeys) return;
    lists_.free[++lists_.free[0]] = data_[2];
    const int64_t left = (data_[1] + kPageKeys - 1) / kPageKeys - 1;
    std::memmove(data_ + 2, data_ + 3, left * sizeof(int32_t));
    data_[0] -= kPageKeys;
    data_[1] -= kPageKeys;
  }

 private:
  int32_t* mark(int64_t place) const {
    return lists_.marks + page(place) * 2 * kPageKeys + place % kPageKeys;
  }

  const RegimeLists& lists_;
  int32_t* data_;
};

// One token per row. Elements are copied as bytes, because storage has the same dtype.
struct Token {
  const int64_t* label;     // [rows][groups]
  const int64_t* position;  // [rows]; null: the slot
  const bool* valid;        // [rows]; null: every row has a token
  const double* bias;       // [rows][groups][biased]
  int64_t slot;
  int64_t sinks;          // how many first keys of a row belong to the last class
  int64_t margin;         // for how many positions keys are kept after they are out of reach; < 0: for ever
  const int32_t* reach;   // [classes]: the longest reach of any query
};

template <class T>
struct Source {  // of keys or values, [rows][heads][dim] with any strides
  const T* data;
  int64_t row, head, dim;
};

inline void evict(const RegimeLists& lists, int64_t row, int64_t position, const Token& token) {
  Progress& progress = progress_of(lists, row);
  const int64_t evictable = lists.classes - (token.sinks > 0);
  for (int64_t g = 0; g < lists.groups; ++g)
    for (int64_t c = 0; c < evictable; ++c) {
      const int64_t reach = token.reach[c];
      if (reach == kBoundless) continue;
      List list(lists, (row * lists.groups + g) * lists.classes + c);
      while (list.begin() < list.end() &&
             list.position(list.begin()) + reach < position - token.margin) {
        progress.horizon = std::max(progress.horizon, list.position(list.begin()) + reach + 1);
        progress.evicted_slot =
            std::max<int64_t>(progress.evicted_slot, list.slot(list.begin()));
        list.pop_front();
      }
    }
}

// Adds a token to every row that has one, and evicts keys that no later query can read. `k_pool` is
// [pages][heads][dim][kPageKeys], `v_pool` [pages][heads][kPageKeys][dim]. All arguments were checked.
template <class T>
void append_token(const RegimeLists& lists, const Token& token, const Source<T>& k,
                  const Source<T>& v, int64_t heads, int64_t dim, T* k_pool, T* v_pool) {
  for (int64_t row = 0; row < lists.rows; ++row) {
    if (token.valid && !token.valid[row]) continue;
    const int64_t position = token.position ? token.position[row] : token.slot;
    Progress& progress = progress_of(lists, row);
    if (token.margin >= 0) evict(lists, row, position, token);
    for (int64_t g = 0; g < lists.groups; ++g) {
      int64_t c = token.label[row * lists.groups + g];
      if (progress.seen < token.sinks) c = lists.classes - 1;
      List list(lists, (row * lists.groups + g) * lists.classes + c);
      const int64_t place =
          list.push(static_cast<int32_t>(position), static_cast<int32_t>(token.slot));
      const int64_t page = list.page(place), at = place % kPageKeys;
      for (int64_t h = 0; h < lists.biased; ++h)
        lists.biases[(page * lists.biased + h) * kPageKeys + at] =
            token.bias[(row * lists.groups + g) * lists.biased + h];
      for (int64_t h = 0; h < heads; ++h) {
        const T* key = k.data + row * k.row + (g * heads + h) * k.head;
        const T* value = v.data + row * v.row + (g * heads + h) * v.head;
        T* to_key = k_pool + (page * heads + h) * dim * kPageKeys + at;
        T* to_value = v_pool + ((page * heads + h) * kPageKeys + at) * dim;
        for (int64_t d = 0; d < dim; ++d) to_key[d * kPageKeys] = key[d * k.dim];
        for (int64_t d = 0; d < dim; ++d) to_value[d] = value[d * v.dim];
      }
    }
    ++progress.seen;
    progress.last_position = position;
  }
}

// How many more tokens are sure to fit before the pool or the table must grow.
inline int64_t room(const RegimeLists& lists) {
  int32_t longest = 0;
  for (int64_t i = 0; i < lists.count(); ++i) longest = std::max(longest, List(lists, i).end());
  return std::min<int64_t>(lists.free[0] / (lists.rows * lists.groups),
                           lists.width * kPageKeys - longest);
}

}  // namespace mosar
