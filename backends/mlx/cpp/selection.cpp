// Choice of the keys that rows attend to, composed from the library's own operations.
#include <limits>

#include "runs.h"

namespace mlxcel {

namespace {

// Scores alive at a time, at most.
constexpr int64_t kMostScores = int64_t{1} << 25;

void check_index(const SparseIndexSpec& spec) {
  auto& q = spec.q.value;
  auto& k = spec.k.value;
  auto& pool = spec.pool.value;
  bool fits = q.ndim() == 3 && k.ndim() == 2 && pool.ndim() == 3 && k.shape(0) == q.shape(0) &&
      k.shape(1) == q.shape(2) && pool.shape(2) == q.shape(2) && pool.size() > 0 &&
      spec.weights.value.shape() == mx::Shape{q.shape(0), q.shape(1)} && is_float(q.dtype()) &&
      is_float(k.dtype()) && is_float(pool.dtype()) && is_float(spec.weights.value.dtype());
  if (!fits) {
    fail(
        kInvalidArgument,
        "rows and pool of the index do not fit together: q ",
        text_of(q.shape()),
        ", k ",
        text_of(k.shape()),
        ", weights ",
        text_of(spec.weights.value.shape()),
        ", pool ",
        text_of(pool.shape()));
  }
  for (auto ref : {&spec.slots, &spec.positions}) {
    if (ref->value.ndim() != 1 || ref->value.shape(0) != q.shape(0) || !is_integer(ref->value.dtype())) {
      fail(kInvalidArgument, "slots and positions are [", q.shape(0), "] i32");
    }
  }
  auto& table = spec.page_table.value;
  if (table.ndim() != 2 || table.shape(1) < 1 || !is_integer(table.dtype())) {
    fail(kInvalidArgument, "the page table is [S, P] i32, found ", name_of(table.dtype()), " ", text_of(table.shape()));
  }
  if (spec.top_k == 0 || spec.top_k > 0x7fffffff || !(spec.scale > 0.0f)) {
    fail(kInvalidArgument, "top_k is at least 1 and the scale above 0, found ", spec.top_k, " and ", spec.scale);
  }
}

} // namespace

Three sparse_index(const SparseIndexSpec& spec) {
  check_index(spec);
  auto& q = spec.q.value;
  auto& table = spec.page_table.value;
  int rows = q.shape(0), heads = q.shape(1), width = q.shape(2), top_k = static_cast<int>(spec.top_k);
  auto runs = runs_of(spec.starts, table.shape(0), rows);
  auto pool = spec.pool.value;
  int page_size = pool.shape(1);
  auto length = mx::safe_cast(int64_t{table.shape(1)} * page_size);
  check_bytes({rows, top_k}, sizeof(int32_t));
  if (rows == 0) {
    return Three{keep(mx::zeros({0, top_k}, mx::int32)), keep_view(pool), nullptr};
  }
  auto slots = mx::astype(spec.slots.value, mx::int32);
  auto size = mx::array(page_size, mx::int32);
  auto page = mx::floor_divide(slots, size);
  auto updates = mx::reshape(mx::astype(spec.k.value, pool.dtype()), {rows, 1, 1, width});
  pool = mx::scatter(pool, {page, mx::subtract(slots, mx::multiply(page, size))}, updates, {0, 1});

  auto none = mx::array(-1, mx::int32);
  int most = std::min(top_k, length);
  auto weights = mx::multiply(mx::astype(spec.weights.value, mx::float32), mx::array(spec.scale));
  std::vector<mx::array> parts;
  int done = 0;
  auto fill_up_to = [&](int row) {
    if (row > done) {
      parts.push_back(mx::full({row - done, top_k}, none));
    }
  };
  for (auto& run : runs) {
    fill_up_to(run.first_row);
    int c = run.sequences, n = run.rows_each;
    check_bytes({c, length, width}, sizeof(float));
    auto keys = mx::take(pool, sequences_of_run(table, run), 0);
    keys = mx::swapaxes(mx::astype(mx::reshape(keys, {c, length, width}), mx::float32), -1, -2);
    auto q_run = mx::astype(rows_of_run(q, run), mx::float32);
    auto w_run = mx::expand_dims(rows_of_run(weights, run), -1);
    auto own = mx::expand_dims(mx::astype(rows_of_run(spec.positions.value, run), mx::int32), -1);
    auto visible = mx::less_equal(mx::arange(0, length, mx::int32), own); // [c, n, L]
    auto step = static_cast<int>(std::max<int64_t>(1, kMostScores / (int64_t{c} * heads * length)));
    std::vector<mx::array> scored;
    for (int first = 0; first < n; first += step) {
      int last = std::min(n, first + step);
      auto queries = mx::slice(q_run, {0, first, 0, 0}, {c, last, heads, width});
      queries = mx::reshape(queries, {c, (last - first) * heads, width});
      auto each = mx::maximum(mx::matmul(queries, keys), mx::array(0.0f));
      each = mx::reshape(each, {c, last - first, heads, length});
      scored.push_back(mx::sum(mx::multiply(each, mx::slice(w_run, {0, first, 0, 0}, {c, last, heads, 1})), 2));
    }
    auto scores = scored.size() == 1 ? scored.front() : mx::concatenate(std::move(scored), 1);
    auto never = mx::array(std::numeric_limits<float>::infinity());
    auto losses = mx::where(visible, mx::negative(scores), never);
    auto order = most < length ? mx::argpartition(losses, most - 1, -1) : mx::argsort(losses, -1);
    auto chosen = mx::slice(order, {0, 0, 0}, {c, n, most});
    auto seen = mx::take_along_axis(visible, chosen, -1);
    auto positions = mx::where(seen, mx::astype(chosen, mx::int32), none);
    if (most < top_k) {
      positions = mx::concatenate({positions, mx::full({c, n, top_k - most}, none)}, -1);
    }
    parts.push_back(mx::reshape(positions, {c * n, top_k}));
    done = run.first_row + c * n;
  }
  fill_up_to(rows);
  return Three{keep(mx::concatenate(std::move(parts), 0)), keep(pool), nullptr};
}

} // namespace mlxcel
