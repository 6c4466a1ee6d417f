// Sort by regime: the support as one run of sorted keys per (query, key class).
//
// Keys are sorted by (class, position) and queries by (label, position), stably. Then the keys of class c
// that query i may read are the sorted keys [lo, hi): from the first one inside its reach (and inside its
// segment) to the last one that is not in its future. Both ends only move forward from one query of a
// label to the next, so all runs are found in O((T + S) R C) steps after the counting sort.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace mosar {

struct PlanRow {
  int64_t queries, keys, labels, classes;
  const int32_t *label_q, *class_k;  // [queries], [keys]
  const int32_t *pos_q, *pos_k;      // positions, ascending from segment to segment
  const int32_t* floor_q;            // the start of the query's segment; null: 0
  const bool* valid_k;               // null: every key
  const int32_t* reach;              // [labels][classes], INT32_MAX if unlimited
  // Results:
  int32_t *query_order, *key_order;      // [queries], [keys]; unused places of key_order hold -1
  int32_t *query_offsets, *key_offsets;  // [labels + 1], [classes + 1]
  int32_t *run_lo, *run_hi;              // [queries in sorted order][classes]
};

inline void sort_by_class(int64_t count, const int32_t* item_class, const int32_t* position,
                          const bool* valid, int64_t classes, int32_t* order, int32_t* offsets) {
  std::vector<int32_t> items;
  items.reserve(count);
  bool ascending = true;
  for (int64_t i = 0; i < count; ++i) {
    if (valid && !valid[i]) continue;
    if (item_class[i] < 0 || item_class[i] >= classes)
      throw std::out_of_range("a regime label is outside the table of reaches");
    ascending = ascending && (items.empty() || position[items.back()] <= position[i]);
    items.push_back(static_cast<int32_t>(i));
  }
  if (!ascending)
    std::stable_sort(items.begin(), items.end(),
                     [&](int32_t a, int32_t b) { return position[a] < position[b]; });
  std::fill(offsets, offsets + classes + 1, 0);
  for (int32_t item : items) ++offsets[item_class[item] + 1];
  for (int64_t c = 0; c < classes; ++c) offsets[c + 1] += offsets[c];
  std::vector<int32_t> next(offsets, offsets + classes);
  for (int32_t item : items) order[next[item_class[item]]++] = item;
  std::fill(order + items.size(), order + count, -1);
}

inline void build_plan_row(const PlanRow& row) {
  sort_by_class(row.queries, row.label_q, row.pos_q, nullptr, row.labels, row.query_order,
                row.query_offsets);
  sort_by_class(row.keys, row.class_k, row.pos_k, row.valid_k, row.classes, row.key_order,
                row.key_offsets);
  std::vector<int32_t> position(row.key_offsets[row.classes]);
  for (size_t j = 0; j < position.size(); ++j) position[j] = row.pos_k[row.key_order[j]];
  for (int64_t m = 0; m < row.labels; ++m) {
    for (int64_t c = 0; c < row.classes; ++c) {
      const int64_t reach = row.reach[m * row.classes + c];
      const int32_t end = row.key_offsets[c + 1];
      int32_t lo = row.key_offsets[c], hi = lo;
      for (int32_t t = row.query_offsets[m]; t < row.query_offsets[m + 1]; ++t) {
        const int32_t query = row.query_order[t];
        const int64_t here = row.pos_q[query];
        const int64_t floor = row.floor_q ? row.floor_q[query] : 0;
        const int64_t first = std::max(here - reach, floor);
        while (lo < end && position[lo] < first) ++lo;
        while (hi < end && position[hi] <= here) ++hi;
        row.run_lo[t * row.classes + c] = lo;
        row.run_hi[t * row.classes + c] = std::max(lo, hi);
      }
    }
  }
}

}  // namespace mosar
