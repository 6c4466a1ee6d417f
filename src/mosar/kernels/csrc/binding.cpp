// The torch operators: schemas, checks, and tensors to pointers. The arithmetic is in attention.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "attention.h"
#include "choice_gradient.h"
#include "decode.h"
#include "elementwise.h"
#include "plan.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument("mosar: " + message);
}

template <class T>
constexpr ScalarType scalar_type();
template <>
constexpr ScalarType scalar_type<float>() { return ScalarType::Float; }
template <>
constexpr ScalarType scalar_type<mosar::Bfloat16>() { return ScalarType::BFloat16; }
template <>
constexpr ScalarType scalar_type<double>() { return ScalarType::Double; }
template <>
constexpr ScalarType scalar_type<int32_t>() { return ScalarType::Int; }
template <>
constexpr ScalarType scalar_type<int64_t>() { return ScalarType::Long; }
template <>
constexpr ScalarType scalar_type<bool>() { return ScalarType::Bool; }

template <class T>
const T* data(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  check(tensor.is_cpu(), std::string(name) + " must be on the CPU");
  check(tensor.scalar_type() == scalar_type<T>(), std::string(name) + " has the wrong dtype");
  check(tensor.is_contiguous(), std::string(name) + " must be contiguous");
  check(tensor.dim() == static_cast<int64_t>(shape.size()), std::string(name) + " has the wrong rank");
  int64_t i = 0;
  for (int64_t size : shape)
    check(tensor.size(i++) == size, std::string(name) + " has the wrong shape");
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
const T* data(const std::optional<Tensor>& tensor, const char* name,
              std::initializer_list<int64_t> shape) {
  return tensor.has_value() ? data<T>(*tensor, name, shape) : nullptr;
}

mosar::Matrix matrix(const Tensor& tensor, const char* name) {
  check(tensor.is_cpu() && tensor.dim() == 4 && tensor.scalar_type() == ScalarType::Float,
        std::string(name) + " must be a float32 CPU tensor [B, H, T, D]");
  check(tensor.size(3) == 1 || tensor.stride(3) == 1,
        std::string(name) + " must be contiguous in its last dimension");
  return {static_cast<const float*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

mosar::Parallel parallel() {
  mosar::Parallel result;
  result.thread_count = torch::stable::get_num_threads();
  result.run = [](int64_t count, const std::function<void(int64_t)>& task) {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) task(i);
    });
  };
  return result;
}

Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType type) {
  std::vector<int64_t> sizes(shape);
  return torch::stable::new_empty(like, {sizes.data(), sizes.size()}, type);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> plan(
    const Tensor& labels_q, const Tensor& classes_k, const Tensor& pos_q, const Tensor& pos_k,
    const std::optional<Tensor>& floor_q, const std::optional<Tensor>& valid_k, const Tensor& reach) {
  check(labels_q.dim() == 2 && classes_k.dim() == 2 && reach.dim() == 2,
        "labels_q, classes_k and reach must have two dimensions");
  const int64_t rows = labels_q.size(0), queries = labels_q.size(1), keys = classes_k.size(1);
  const int64_t labels = reach.size(0), classes = reach.size(1);
  const auto* label_q = data<int32_t>(labels_q, "labels_q", {rows, queries});
  const auto* class_k = data<int32_t>(classes_k, "classes_k", {rows, keys});
  const auto* query_pos = data<int32_t>(pos_q, "pos_q", {rows, queries});
  const auto* key_pos = data<int32_t>(pos_k, "pos_k", {rows, keys});
  const auto* floor = data<int32_t>(floor_q, "floor_q", {rows, queries});
  const auto* valid = data<bool>(valid_k, "valid_k", {rows, keys});
  const auto* reaches = data<int32_t>(reach, "reach", {labels, classes});
  Tensor query_order = empty(labels_q, {rows, queries}, ScalarType::Int);
  Tensor key_order = empty(labels_q, {rows, keys}, ScalarType::Int);
  Tensor query_offsets = empty(labels_q, {rows, labels + 1}, ScalarType::Int);
  Tensor key_offsets = empty(labels_q, {rows, classes + 1}, ScalarType::Int);
  Tensor run_lo = empty(labels_q, {rows, queries, classes}, ScalarType::Int);
  Tensor run_hi = empty(labels_q, {rows, queries, classes}, ScalarType::Int);
  auto out = [](Tensor& tensor, int64_t row, int64_t size) {
    return static_cast<int32_t*>(tensor.mutable_data_ptr()) + row * size;
  };
  for (int64_t r = 0; r < rows; ++r)
    mosar::build_plan_row({queries, keys, labels, classes, label_q + r * queries,
                           class_k + r * keys, query_pos + r * queries, key_pos + r * keys,
                           floor ? floor + r * queries : nullptr, valid ? valid + r * keys : nullptr,
                           reaches, out(query_order, r, queries), out(key_order, r, keys),
                           out(query_offsets, r, labels + 1), out(key_offsets, r, classes + 1),
                           out(run_lo, r, queries * classes), out(run_hi, r, queries * classes)});
  return {query_order, key_order, query_offsets, key_offsets, run_lo, run_hi};
}

// The plan indexes memory, so its indices are checked, whatever made it.
void check_plan(const mosar::Problem& p) {
  auto within = [](const int32_t* values, int64_t count, int64_t low, int64_t high) {
    bool inside = true;
    for (int64_t i = 0; i < count; ++i) inside &= values[i] >= low && values[i] <= high;
    return inside;
  };
  auto ascending = [](const int32_t* offsets, int64_t count, int64_t last) {
    bool inside = offsets[0] == 0 && offsets[count - 1] <= last;
    for (int64_t i = 1; i < count; ++i) inside &= offsets[i] >= offsets[i - 1];
    return inside;
  };
  for (int64_t r = 0; r < p.plan_rows; ++r) {
    const int32_t* key_offsets = p.key_offsets + r * (p.classes + 1);
    const int32_t* query_offsets = p.query_offsets + r * (p.labels + 1);
    check(ascending(key_offsets, p.classes + 1, p.keys), "key_offsets leave the keys");
    check(ascending(query_offsets, p.labels + 1, p.queries) &&
              query_offsets[p.labels] == p.queries,
          "query_offsets must cover the queries");
    const int64_t used = key_offsets[p.classes], runs = p.queries * p.classes;
    check(within(p.key_order + r * p.keys, used, 0, p.keys - 1), "key_order leaves the keys");
    check(within(p.query_order + r * p.queries, p.queries, 0, p.queries - 1),
          "query_order leaves the queries");
    check(within(p.run_lo + r * runs, runs, 0, used) && within(p.run_hi + r * runs, runs, 0, used),
          "runs leave the sorted keys");
  }
}

mosar::Problem problem(const Tensor& q, const Tensor& k, const Tensor& v,
                       const std::optional<Tensor>& pi_q, const std::optional<Tensor>& pi_k,
                       const Tensor& pos_q, const Tensor& pos_k, const Tensor& query_order,
                       const Tensor& key_order, const Tensor& query_offsets,
                       const Tensor& key_offsets, const Tensor& run_lo, const Tensor& run_hi,
                       const std::optional<Tensor>& geometry, const std::optional<Tensor>& table,
                       const std::optional<Tensor>& slopes, const std::optional<Tensor>& key_bias,
                       int64_t groups, int64_t bias, double scale, double softcap, double barrier,
                       double exponent, double epsilon) {
  mosar::Problem p{};
  p.q = matrix(q, "q");
  p.k = matrix(k, "k");
  p.v = matrix(v, "v");
  p.batch = q.size(0), p.query_heads = q.size(1), p.queries = q.size(2), p.dim = q.size(3);
  p.kv_heads = k.size(1), p.keys = k.size(2), p.groups = groups;
  for (int64_t i = 0; i < 4; ++i) check(k.size(i) == v.size(i), "k and v must have one shape");
  check(k.size(0) == p.batch && k.size(3) == p.dim, "q and k must agree in batch and head_dim");
  check(p.kv_heads > 0 && p.query_heads % p.kv_heads == 0, "heads of q: a multiple of those of k");
  check(groups > 0 && p.kv_heads % groups == 0, "routing groups must divide the key/value heads");
  check(query_offsets.dim() == 2 && key_offsets.dim() == 2, "offsets must have two dimensions");
  check(query_offsets.size(1) > 1 && key_offsets.size(1) > 1, "offsets must hold a class");
  p.plan_rows = query_offsets.size(0);
  p.labels = query_offsets.size(1) - 1, p.classes = key_offsets.size(1) - 1;
  check(p.plan_rows == 1 || p.plan_rows == p.batch || p.plan_rows == p.batch * groups,
        "the plan must have 1 row, a row per batch entry, or a row per batch entry and group");
  p.query_order = data<int32_t>(query_order, "query_order", {p.plan_rows, p.queries});
  p.key_order = data<int32_t>(key_order, "key_order", {p.plan_rows, p.keys});
  p.query_offsets = data<int32_t>(query_offsets, "query_offsets", {p.plan_rows, p.labels + 1});
  p.key_offsets = data<int32_t>(key_offsets, "key_offsets", {p.plan_rows, p.classes + 1});
  p.run_lo = data<int32_t>(run_lo, "run_lo", {p.plan_rows, p.queries, p.classes});
  p.run_hi = data<int32_t>(run_hi, "run_hi", {p.plan_rows, p.queries, p.classes});
  p.pos_q = data<int32_t>(pos_q, "pos_q", {p.plan_rows, p.queries});
  p.pos_k = data<int32_t>(pos_k, "pos_k", {p.plan_rows, p.keys});
  check_plan(p);
  check(bias >= 0 && bias <= 3, "bias must be 0, 1, 2 or 3");
  p.bias = static_cast<mosar::Bias>(bias);
  p.scale = static_cast<float>(scale), p.softcap = static_cast<float>(softcap);
  p.barrier = barrier, p.exponent = exponent, p.epsilon = static_cast<float>(epsilon);
  if (table.has_value()) {
    check(table->dim() == 2 && table->size(1) > 2 * mosar::kTablePad, "table must be [rows, length]");
    p.table_rows = table->size(0);
    p.table_length = table->size(1) - 2 * mosar::kTablePad;
    p.table = data<float>(*table, "table", {table->size(0), table->size(1)});
  }
  if (p.bias == mosar::Bias::kGeometry) {
    check(geometry.has_value(), "geometry is missing");
    p.geometry = data<double>(geometry, "geometry", {p.labels, p.classes, 2});
    check(!p.table || p.table_rows == p.labels * p.classes, "table must have a row per class pair");
  }
  if (p.bias == mosar::Bias::kWorth) {
    check(pi_q.has_value() && pi_k.has_value() && pi_q->dim() == 4 && pi_k->dim() == 4,
          "pi_q and pi_k must be [B, groups, length, regimes]");
    check(p.labels == 1 && p.classes == 1, "worth needs a plan of one label and one class");
    p.regimes = pi_q->size(3), p.columns = pi_k->size(3);
    check(p.columns == p.regimes || p.columns == p.regimes + 1, "pi_k: one column may follow pi_q's");
    p.pi_q = data<float>(pi_q, "pi_q", {p.batch, groups, p.queries, p.regimes});
    p.pi_k = data<float>(pi_k, "pi_k", {p.batch, groups, p.keys, p.columns});
    p.geometry = data<double>(geometry, "geometry", {p.regimes, p.columns, 2});
    check(p.table ? p.table_rows == p.regimes * p.columns : p.geometry && p.epsilon > 0,
          "table must have a row per regime pair, or geometry must stand in for it");
  }
  if (p.bias == mosar::Bias::kTable) {
    p.slopes = data<float>(slopes, "slopes", {p.query_heads});
    check(!p.table || p.table_rows == 1 || p.table_rows == p.query_heads,
          "table must have one row, or one per query head");
  }
  p.key_bias = data<double>(key_bias, "key_bias", {p.batch, p.query_heads, p.keys});
  check(!p.key_bias || p.bias == mosar::Bias::kTable || p.bias == mosar::Bias::kGeometry,
        "key_bias goes with a table or with labels");
  return p;
}

std::tuple<Tensor, Tensor, Tensor> attend(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& pi_q,
    const std::optional<Tensor>& pi_k, const Tensor& pos_q, const Tensor& pos_k,
    const Tensor& query_order, const Tensor& key_order, const Tensor& query_offsets,
    const Tensor& key_offsets, const Tensor& run_lo, const Tensor& run_hi,
    const std::optional<Tensor>& geometry, const std::optional<Tensor>& table,
    const std::optional<Tensor>& slopes, const std::optional<Tensor>& key_bias, int64_t groups,
    int64_t bias, double scale, double softcap, double barrier, double exponent, double epsilon) {
  const mosar::Problem p =
      problem(q, k, v, pi_q, pi_k, pos_q, pos_k, query_order, key_order, query_offsets, key_offsets,
              run_lo, run_hi, geometry, table, slopes, key_bias, groups, bias, scale, softcap, barrier,
              exponent, epsilon);
  Tensor out = empty(q, {p.batch, p.query_heads, p.queries, p.dim}, ScalarType::Float);
  Tensor lse = empty(q, {p.batch, p.query_heads, p.queries}, ScalarType::Float);
  Tensor softmax = empty(q, {2, p.batch, p.query_heads, p.queries}, ScalarType::Float);
  auto pointer = [](Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); };
  const mosar::Parallel threads = parallel();
  mosar::Attention(p, threads).forward(pointer(out), pointer(lse), pointer(softmax));
  return {out, lse, softmax};
}

// learned: 1 for the table, 2 for the slopes, 4 for the biases of keys; other gradients are empty.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attend_backward(
    const Tensor& dout, const Tensor& dlse, const Tensor& out, const Tensor& softmax,
    int64_t learned, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& pi_q, const std::optional<Tensor>& pi_k,
    const Tensor& pos_q, const Tensor& pos_k, const Tensor& query_order, const Tensor& key_order,
    const Tensor& query_offsets, const Tensor& key_offsets, const Tensor& run_lo,
    const Tensor& run_hi, const std::optional<Tensor>& geometry, const std::optional<Tensor>& table,
    const std::optional<Tensor>& slopes, const std::optional<Tensor>& key_bias, int64_t groups,
    int64_t bias, double scale, double softcap, double barrier, double exponent, double epsilon) {
  const mosar::Problem p =
      problem(q, k, v, pi_q, pi_k, pos_q, pos_k, query_order, key_order, query_offsets, key_offsets,
              run_lo, run_hi, geometry, table, slopes, key_bias, groups, bias, scale, softcap, barrier,
              exponent, epsilon);
  Tensor dq = empty(q, {p.batch, p.query_heads, p.queries, p.dim}, ScalarType::Float);
  Tensor dk = empty(q, {p.batch, p.kv_heads, p.keys, p.dim}, ScalarType::Float);
  Tensor dv = empty(q, {p.batch, p.kv_heads, p.keys, p.dim}, ScalarType::Float);
  const bool worth = p.bias == mosar::Bias::kWorth;
  Tensor dpi_q = worth ? empty(q, {p.batch, p.groups, p.queries, p.regimes}, ScalarType::Float)
                       : empty(q, {0}, ScalarType::Float);
  Tensor dpi_k = worth ? empty(q, {p.batch, p.groups, p.keys, p.columns}, ScalarType::Float)
                       : empty(q, {0}, ScalarType::Float);
  check(learned >= 0 && learned < 8, "learned must be 0 to 7");
  const bool by_distance = p.bias == mosar::Bias::kTable;
  const bool table_learns = by_distance && p.table && learned & 1;
  const bool slopes_learn = by_distance && p.slopes && learned & 2;
  const bool keys_learn = p.key_bias && learned & 4;
  Tensor dtable = table_learns ? empty(q, {table->size(0), table->size(1)}, ScalarType::Float)
                               : empty(q, {0}, ScalarType::Float);
  Tensor dslopes = empty(q, {slopes_learn ? p.query_heads : 0}, ScalarType::Float);
  Tensor dkey_bias = keys_learn ? empty(q, {p.batch, p.query_heads, p.keys}, ScalarType::Double)
                                : empty(q, {0}, ScalarType::Double);
  auto pointer = [](Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); };
  mosar::Gradients g{};
  g.dout = data<float>(dout, "dout", {p.batch, p.query_heads, p.queries, p.dim});
  g.out = data<float>(out, "out", {p.batch, p.query_heads, p.queries, p.dim});
  g.dlse = data<float>(dlse, "dlse", {p.batch, p.query_heads, p.queries});
  g.softmax = data<float>(softmax, "softmax", {2, p.batch, p.query_heads, p.queries});
  g.dq = pointer(dq), g.dk = pointer(dk), g.dv = pointer(dv);
  g.dpi_q = worth ? pointer(dpi_q) : nullptr;
  g.dpi_k = worth ? pointer(dpi_k) : nullptr;
  g.dtable = table_learns ? pointer(dtable) : nullptr;
  g.dslopes = slopes_learn ? pointer(dslopes) : nullptr;
  g.dkey_bias = keys_learn ? static_cast<double*>(dkey_bias.mutable_data_ptr()) : nullptr;
  const mosar::Parallel threads = parallel();
  mosar::Attention(p, threads).backward(g);
  return {dq, dk, dv, dpi_q, dpi_k, dtable, dslopes, dkey_bias};
}

template <class T>
T* written(Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}
float* floats(Tensor& tensor) { return written<float>(tensor); }

// Calls body with a null pointer to the type in which float32 or bfloat16 tensors are stored.
template <class Body>
auto with_storage(const Tensor& tensor, const char* name, const Body& body) {
  if (tensor.scalar_type() == ScalarType::BFloat16) return body(static_cast<mosar::Bfloat16*>(nullptr));
  check(tensor.scalar_type() == ScalarType::Float, std::string(name) + " must be float32 or bfloat16");
  return body(static_cast<float*>(nullptr));
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check(x.dim() == 2, "x must have two dimensions");
  const int64_t rows = x.size(0), size = x.size(1);
  Tensor y = empty(x, {rows, size}, x.scalar_type()), inverse = empty(x, {rows}, ScalarType::Float);
  with_storage(x, "x", [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    mosar::rms_norm(data<T>(x, "x", {rows, size}), data<float>(weight, "weight", {size}),
                    static_cast<float>(eps), rows, size, written<T>(y), floats(inverse), parallel());
  });
  return {y, inverse};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& gradient, const Tensor& x,
                                             const Tensor& inverse, const Tensor& weight) {
  check(x.dim() == 2, "x must have two dimensions");
  const int64_t rows = x.size(0), size = x.size(1);
  Tensor dx = empty(x, {rows, size}, x.scalar_type()), dweight = empty(x, {size}, ScalarType::Float);
  with_storage(x, "x", [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    mosar::rms_norm_backward(
        data<T>(gradient, "gradient", {rows, size}), data<T>(x, "x", {rows, size}),
        data<float>(inverse, "inverse", {rows}), data<float>(weight, "weight", {size}), rows, size,
        written<T>(dx), floats(dweight), parallel());
  });
  return {dx, dweight};
}

Tensor geglu(const Tensor& gate, const Tensor& up) {
  check(gate.dim() == 1, "gate must have one dimension");
  const int64_t count = gate.size(0);
  Tensor out = empty(gate, {count}, gate.scalar_type());
  with_storage(gate, "gate", [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    mosar::geglu(data<T>(gate, "gate", {count}), data<T>(up, "up", {count}), count, written<T>(out),
                 parallel());
  });
  return out;
}

std::tuple<Tensor, Tensor> geglu_backward(const Tensor& gradient, const Tensor& gate,
                                          const Tensor& up) {
  check(gate.dim() == 1, "gate must have one dimension");
  const int64_t count = gate.size(0);
  Tensor dgate = empty(gate, {count}, gate.scalar_type()), dup = empty(gate, {count}, gate.scalar_type());
  with_storage(gate, "gate", [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    mosar::geglu_backward(data<T>(gradient, "gradient", {count}), data<T>(gate, "gate", {count}),
                          data<T>(up, "up", {count}), count, written<T>(dgate), written<T>(dup),
                          parallel());
  });
  return {dgate, dup};
}

Tensor cross_entropy(Tensor scores, const Tensor& targets, double cap, double factor) {
  check(scores.dim() == 2, "scores must have two dimensions");
  const int64_t rows = scores.size(0), size = scores.size(1);
  const auto* target = data<int64_t>(targets, "targets", {rows});
  for (int64_t row = 0; row < rows; ++row)
    check(target[row] >= 0 && target[row] < size, "targets must be columns of the scores");
  Tensor losses = empty(scores, {rows}, ScalarType::Float);
  with_storage(scores, "scores", [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    data<T>(scores, "scores", {rows, size});
    mosar::cross_entropy(written<T>(scores), target, rows, size, static_cast<float>(cap),
                         static_cast<float>(factor), floats(losses), parallel());
  });
  return losses;
}

// The lists of a cache; rows and groups are those of the tensors that come with them.
mosar::RegimeLists regime_lists(int64_t rows, int64_t groups, int64_t classes, const Tensor& k_pool,
                                const Tensor& v_pool, const Tensor& table, const Tensor& marks,
                                const Tensor& progress, const Tensor& biases) {
  constexpr int64_t keys = mosar::kPageKeys;
  check(k_pool.dim() == 4 && v_pool.dim() == 4, "k_pool and v_pool must have four dimensions");
  check(k_pool.is_cpu() && v_pool.is_cpu(), "k_pool and v_pool must be on the CPU");
  check(k_pool.is_contiguous() && v_pool.is_contiguous(), "k_pool and v_pool must be contiguous");
  check(k_pool.scalar_type() == v_pool.scalar_type(), "k_pool and v_pool must have one dtype");
  const int64_t pages = k_pool.size(0), heads = k_pool.size(1), dim = k_pool.size(2);
  check(k_pool.size(3) == keys, "k_pool must be [pages, heads, dim, 32]");
  check(v_pool.size(0) == pages && v_pool.size(1) == heads && v_pool.size(2) == keys &&
            v_pool.size(3) == dim,
        "v_pool must be [pages, heads, 32, dim]");
  check(table.dim() == 2 && table.size(1) >= 2, "table must be [lists, 2 + width]");
  mosar::RegimeLists lists{};
  lists.rows = rows, lists.groups = groups, lists.classes = classes;
  lists.pages = pages, lists.width = table.size(1) - 2;
  auto int32 = [](const int32_t* p) { return const_cast<int32_t*>(p); };
  lists.table = int32(data<int32_t>(table, "table", {lists.count(), table.size(1)}));
  lists.marks = int32(data<int32_t>(marks, "marks", {pages, 2, keys}));
  lists.progress = const_cast<int64_t*>(data<int64_t>(progress, "progress", {rows, 4}));
  check(biases.dim() == 3, "biases must be [pages, heads, 32]");
  lists.biased = biases.size(1);
  lists.biases = const_cast<double*>(data<double>(biases, "biases", {pages, lists.biased, keys}));
  for (int64_t i = 0; i < lists.count(); ++i)
    check(mosar::List(lists, i).is_sound(), "table leaves the pool");
  return lists;
}

// Calls body with a pointer to the storage type of a pool.
template <class Body>
void with_storage(const Tensor& pool, const Body& body) {
  switch (pool.scalar_type()) {
    case ScalarType::Float: return body(static_cast<float*>(pool.mutable_data_ptr()));
    case ScalarType::BFloat16:
      return body(static_cast<mosar::Bfloat16*>(pool.mutable_data_ptr()));
    case ScalarType::Half: return body(static_cast<mosar::Float16*>(pool.mutable_data_ptr()));
    default: check(false, "k_pool must be float32, bfloat16 or float16");
  }
}

void check_token(const mosar::RegimeLists& lists, const mosar::Token& token) {
  const int64_t regimes = lists.classes - (token.sinks > 0);
  for (int64_t row = 0; row < lists.rows; ++row) {
    if (token.valid && !token.valid[row]) continue;
    const int64_t position = token.position ? token.position[row] : token.slot;
    check(position >= mosar::progress_of(lists, row).last_position && position >= 0,
          "key_positions must not decrease");
    check(position < mosar::kBoundless, "key_positions must stay below 2^31 - 1");
    for (int64_t g = 0; g < lists.groups; ++g) {
      const int64_t label = token.label[row * lists.groups + g];
      check(label >= 0 && label < regimes, "labels_k must be regimes");
    }
  }
}

int64_t cache_append(const Tensor& k, const Tensor& v, const Tensor& labels,
                     const std::optional<Tensor>& positions, const std::optional<Tensor>& valid,
                     const Tensor& k_pool, const Tensor& v_pool, const Tensor& table,
                     const Tensor& marks, const Tensor& free, const Tensor& progress,
                     const Tensor& biases, const std::optional<Tensor>& bias, const Tensor& reach,
                     int64_t slot, int64_t sinks, int64_t margin) {
  check(labels.dim() == 2 && labels.size(0) > 0 && labels.size(1) > 0, "labels must be [B, Gr]");
  const int64_t rows = labels.size(0), groups = labels.size(1), classes = reach.numel();
  check(classes > (sinks > 0), "reach must hold a regime");
  mosar::RegimeLists lists =
      regime_lists(rows, groups, classes, k_pool, v_pool, table, marks, progress, biases);
  lists.free = const_cast<int32_t*>(data<int32_t>(free, "free", {1 + lists.pages}));
  const int64_t heads = k_pool.size(1), dim = k_pool.size(2);
  for (const auto& [x, name] : {std::pair{&k, "k"}, std::pair{&v, "v"}}) {
    check(x->is_cpu() && x->scalar_type() == k_pool.scalar_type(),
          std::string(name) + " must have the pool's dtype, on the CPU");
    check(x->dim() == 4 && x->size(0) == rows && x->size(1) == groups * heads && x->size(2) == 1 &&
              x->size(3) == dim,
          std::string(name) + " must be [B, Hkv, 1, D]");
  }
  mosar::Token token{};
  token.label = data<int64_t>(labels, "labels", {rows, groups});
  token.position = data<int64_t>(positions, "positions", {rows, 1});
  token.valid = data<bool>(valid, "valid", {rows, 1});
  token.bias = data<double>(bias, "of_key", {rows, groups * lists.biased});
  check(token.bias || !lists.biased, "of_key must be given always or never");
  token.slot = slot, token.sinks = sinks, token.margin = margin;
  token.reach = data<int32_t>(reach, "reach", {classes});
  check(slot >= 0 && slot < mosar::kBoundless, "slot must stay below 2^31 - 1");
  check(lists.free[0] >= 0 && lists.free[0] <= lists.pages, "free leaves the pool");
  for (int64_t i = 1; i <= lists.free[0]; ++i)
    check(lists.free[i] >= 0 && lists.free[i] < lists.pages, "free leaves the pool");
  check(mosar::room(lists) > 0, "the cache is full");
  check_token(lists, token);
  with_storage(k_pool, [&](auto* keys) {
    using T = std::remove_pointer_t<decltype(keys)>;
    auto source = [](const Tensor& x) {
      return mosar::Source<T>{static_cast<const T*>(x.const_data_ptr()), x.stride(0), x.stride(1),
                              x.stride(3)};
    };
    mosar::append_token(lists, token, source(k), source(v), heads, dim, keys,
                        static_cast<T*>(v_pool.mutable_data_ptr()));
  });
  return mosar::room(lists);
}

std::tuple<Tensor, Tensor> cache_attend(
    const Tensor& q, const Tensor& labels, const std::optional<Tensor>& positions,
    const Tensor& k_pool, const Tensor& v_pool, const Tensor& table, const Tensor& marks,
    const Tensor& progress, const Tensor& biases, const std::optional<Tensor>& bias_q,
    const Tensor& reach, const Tensor& geometry, int64_t position, double scale, double softcap,
    double barrier, double exponent) {
  check(labels.dim() == 2 && labels.size(0) > 0 && labels.size(1) > 0, "labels must be [B, Gr]");
  check(reach.dim() == 2, "reach must be [regimes, classes]");
  const int64_t rows = labels.size(0), groups = labels.size(1), classes = reach.size(1);
  mosar::DecodeProblem p{};
  p.lists = regime_lists(rows, groups, classes, k_pool, v_pool, table, marks, progress, biases);
  p.heads = k_pool.size(1), p.dim = k_pool.size(2), p.labels = reach.size(0);
  check(q.dim() == 4 && q.size(1) > 0 && q.size(1) % (groups * p.heads) == 0,
        "heads of q: a multiple of those of k");
  p.share = q.size(1) / (groups * p.heads);
  p.q = data<float>(q, "q", {rows, q.size(1), 1, p.dim});
  p.bias_q = data<double>(bias_q, "bias_q", {rows, q.size(1)});
  check(!p.lists.biased || (p.bias_q && p.lists.biased == p.heads * p.share),
        "keys have a bias for each of their query heads, and queries what it is relative to");
  p.label_q = data<int64_t>(labels, "labels", {rows, groups});
  p.reach = data<int32_t>(reach, "reach", {p.labels, classes});
  p.geometry = data<double>(geometry, "geometry", {p.labels, classes, 2});
  for (int64_t i = 0; i < rows * groups; ++i)
    check(p.label_q[i] >= 0 && p.label_q[i] < p.labels, "labels_q must be regimes");
  std::vector<int64_t> same;
  p.pos_q = data<int64_t>(positions, "positions", {rows, 1});
  if (!p.pos_q) same.assign(rows, position), p.pos_q = same.data();
  for (int64_t row = 0; row < rows; ++row) {
    check(p.pos_q[row] >= 0 && p.pos_q[row] < mosar::kBoundless,
          "query_positions must lie in 0..2^31 - 2");
    check(p.pos_q[row] >= mosar::progress_of(p.lists, row).horizon,
          "query_positions lie before what the cache has kept");
  }
  p.scale = static_cast<float>(scale), p.softcap = static_cast<float>(softcap);
  p.barrier = barrier, p.exponent = exponent;
  Tensor out = empty(q, {rows, q.size(1), 1, p.dim}, ScalarType::Float);
  Tensor lse = empty(q, {rows, q.size(1), 1}, ScalarType::Float);
  auto pointer = [](Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); };
  const mosar::Parallel threads = parallel();
  with_storage(k_pool, [&](auto* keys) {
    using T = std::remove_pointer_t<decltype(keys)>;
    const T* values = static_cast<const T*>(v_pool.const_data_ptr());
    mosar::Decode<T>(p, keys, values, threads).run(pointer(out), pointer(lse));
  });
  return {out, lse};
}

std::tuple<Tensor, Tensor> choice_gradient(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout, const Tensor& lse,
    const Tensor& delta, const Tensor& labels_q, const Tensor& classes_k, const Tensor& pos_q,
    const Tensor& pos_k, const std::optional<Tensor>& segment_q, const std::optional<Tensor>& segment_k,
    const std::optional<Tensor>& valid_k, const std::optional<Tensor>& of_key, const Tensor& table,
    int64_t window, double scale, double softcap) {
  mosar::ChoiceProblem p{};
  p.q = matrix(q, "q"), p.k = matrix(k, "k"), p.v = matrix(v, "v"), p.dout = matrix(dout, "dout");
  p.batch = q.size(0), p.query_heads = q.size(1), p.queries = q.size(2), p.dim = q.size(3);
  p.kv_heads = k.size(1), p.keys = k.size(2);
  check(labels_q.dim() == 3 && classes_k.dim() == 3, "labels must be [B, Gr, T]");
  p.groups = labels_q.size(1);
  for (const Tensor& other : {k, v})
    check(other.size(0) == p.batch && other.size(1) == p.kv_heads && other.size(2) == p.keys &&
              other.size(3) == p.dim,
          "k and v must have the same shape, with the rows and dimensions of q");
  for (int64_t i = 0; i < 4; ++i) check(dout.size(i) == q.size(i), "dout must have the shape of q");
  check(p.kv_heads > 0 && p.query_heads % p.kv_heads == 0, "heads of q: a multiple of those of k");
  check(p.groups > 0 && p.kv_heads % p.groups == 0, "groups must divide the heads of k");
  check(table.dim() == 3 && table.size(0) > 0, "table must be [length, regimes, columns]");
  p.length = table.size(0), p.regimes = table.size(1), p.columns = table.size(2);
  check(p.columns == p.regimes || p.columns == p.regimes + 1, "a column per regime, and one for sinks");
  p.table = data<float>(table, "table", {p.length, p.regimes, p.columns});
  p.lse = data<float>(lse, "lse", {p.batch, p.query_heads, p.queries});
  p.delta = data<float>(delta, "delta", {p.batch, p.query_heads, p.queries});
  p.label_q = data<int64_t>(labels_q, "labels_q", {p.batch, p.groups, p.queries});
  p.class_k = data<int64_t>(classes_k, "classes_k", {p.batch, p.groups, p.keys});
  p.pos_q = data<int64_t>(pos_q, "pos_q", {p.batch, p.queries});
  p.pos_k = data<int64_t>(pos_k, "pos_k", {p.batch, p.keys});
  p.segment_q = data<int64_t>(segment_q, "segment_q", {p.batch, p.queries});
  p.segment_k = data<int64_t>(segment_k, "segment_k", {p.batch, p.keys});
  p.valid_k = data<bool>(valid_k, "valid_k", {p.batch, p.keys});
  p.of_key = data<double>(of_key, "of_key", {p.batch, p.query_heads, p.keys});
  for (int64_t i = 0; i < p.batch * p.groups * p.queries; ++i)
    check(p.label_q[i] >= 0 && p.label_q[i] < p.regimes, "labels_q must be regimes");
  for (int64_t i = 0; i < p.batch * p.groups * p.keys; ++i)
    check(p.class_k[i] >= 0 && p.class_k[i] < p.columns, "classes_k must be columns");
  p.window = window, p.scale = static_cast<float>(scale), p.softcap = static_cast<float>(softcap);
  Tensor dpi_q = empty(q, {p.batch, p.groups, p.queries, p.regimes}, ScalarType::Float);
  Tensor dpi_k = empty(q, {p.batch, p.groups, p.keys, p.regimes}, ScalarType::Float);
  std::fill_n(floats(dpi_k), p.batch * p.groups * p.keys * p.regimes, 0.0f);
  const mosar::Parallel threads = parallel();
  mosar::ChoiceGradient(p, threads).run(floats(dpi_q), floats(dpi_k));
  return {dpi_q, dpi_k};
}

}  // namespace

#define MOSAR_PROBLEM                                                                             \
  "Tensor q, Tensor k, Tensor v, Tensor? pi_q, Tensor? pi_k, Tensor pos_q, Tensor pos_k, "        \
  "Tensor query_order, Tensor key_order, Tensor query_offsets, Tensor key_offsets, "              \
  "Tensor run_lo, Tensor run_hi, Tensor? geometry, Tensor? table, Tensor? slopes, "               \
  "Tensor? key_bias, int groups, int bias, float scale, float softcap, float barrier, "           \
  "float exponent, float epsilon"

STABLE_TORCH_LIBRARY(mosar, m) {
  m.def(
      "plan(Tensor labels_q, Tensor classes_k, Tensor pos_q, Tensor pos_k, Tensor? floor_q, "
      "Tensor? valid_k, Tensor reach) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("attend(" MOSAR_PROBLEM ") -> (Tensor, Tensor, Tensor)");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor gradient, Tensor x, Tensor inverse, Tensor weight) "
      "-> (Tensor, Tensor)");
  m.def(
      "choice_gradient(Tensor q, Tensor k, Tensor v, Tensor dout, Tensor lse, Tensor delta, "
      "Tensor labels_q, Tensor classes_k, Tensor pos_q, Tensor pos_k, Tensor? segment_q, "
      "Tensor? segment_k, Tensor? valid_k, Tensor? of_key, Tensor table, int window, float scale, "
      "float softcap) "
      "-> (Tensor, Tensor)");
  m.def("cross_entropy(Tensor(a!) scores, Tensor targets, float cap, float factor) -> Tensor");
  m.def("geglu(Tensor gate, Tensor up) -> Tensor");
  m.def("geglu_backward(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  m.def("attend_backward(Tensor dout, Tensor dlse, Tensor out, Tensor softmax, int learned, "
        MOSAR_PROBLEM ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "cache_append(Tensor k, Tensor v, Tensor labels, Tensor? positions, Tensor? valid, "
      "Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor(c!) table, Tensor(d!) marks, Tensor(e!) free, "
      "Tensor(f!) progress, Tensor(g!) biases, Tensor? bias, Tensor reach, int slot, int sinks, "
      "int margin) -> int");
  m.def(
      "cache_attend(Tensor q, Tensor labels, Tensor? positions, Tensor k_pool, Tensor v_pool, "
      "Tensor table, Tensor marks, Tensor progress, Tensor biases, Tensor? bias_q, Tensor reach, "
      "Tensor geometry, int position, "
      "float scale, float softcap, float barrier, float exponent) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(mosar, CPU, m) {
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("choice_gradient", TORCH_BOX(&choice_gradient));
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("geglu", TORCH_BOX(&geglu));
  m.impl("geglu_backward", TORCH_BOX(&geglu_backward));
  m.impl("attend_backward", TORCH_BOX(&attend_backward));
  m.impl("cache_append", TORCH_BOX(&cache_append));
  m.impl("cache_attend", TORCH_BOX(&cache_attend));
}
