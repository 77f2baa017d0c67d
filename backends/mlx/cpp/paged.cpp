// Attention over a paged pool, composed from the library's own operations.
#include "internal.h"

namespace mlxcel {

namespace {

// Consecutive sequences with the same number of rows: one batched attention.
struct Run {
  int first_sequence;
  int sequences;
  int first_row;
  int rows_each;
};

void check_paged(const PagedSpec& spec) {
  auto& q = spec.q.value;
  auto& k = spec.k.value;
  auto& v = spec.v.value;
  auto& k_pool = spec.k_pool.value;
  auto& v_pool = spec.v_pool.value;
  bool ranks = q.ndim() == 3 && k.ndim() == 3 && v.ndim() == 3 && k_pool.ndim() == 4 && v_pool.ndim() == 4;
  bool fits = ranks && q.shape(0) == k.shape(0) && q.shape(0) == v.shape(0) && q.shape(2) == k.shape(2) &&
      k.shape(1) == v.shape(1) && k_pool.shape(0) == v_pool.shape(0) && k_pool.shape(1) == v_pool.shape(1) &&
      k_pool.shape(2) == k.shape(1) && v_pool.shape(2) == k.shape(1) && k_pool.shape(3) == k.shape(2) &&
      v_pool.shape(3) == v.shape(2) && k.shape(1) > 0 && q.shape(1) % k.shape(1) == 0 && k_pool.size() > 0;
  if (!fits) {
    fail(
        kInvalidArgument,
        "rows and pools do not fit together: q ",
        text_of(q.shape()),
        ", k ",
        text_of(k.shape()),
        ", v ",
        text_of(v.shape()),
        ", pools ",
        text_of(k_pool.shape()),
        " and ",
        text_of(v_pool.shape()));
  }
  for (auto array : {&q, &k, &v, &k_pool, &v_pool}) {
    if (!is_float(array->dtype())) {
      fail(kInvalidArgument, "rows and pools are floats, found ", name_of(array->dtype()));
    }
  }
  for (auto ref : {&spec.slots, &spec.row_sequences, &spec.positions}) {
    auto& array = ref->value;
    if (array.ndim() != 1 || array.shape(0) != q.shape(0) || !is_integer(array.dtype())) {
      fail(
          kInvalidArgument,
          "slots, row_sequences and positions are [",
          q.shape(0),
          "] i32, found ",
          name_of(array.dtype()),
          " ",
          text_of(array.shape()));
    }
  }
  auto& table = spec.page_table.value;
  if (table.ndim() != 2 || table.shape(1) < 1 || !is_integer(table.dtype())) {
    fail(kInvalidArgument, "the page table is [S, P] i32, found ", name_of(table.dtype()), " ", text_of(table.shape()));
  }
}

std::vector<Run> runs_of(const PagedSpec& spec) {
  auto& starts = spec.row_starts;
  int rows = spec.q.value.shape(0);
  if (static_cast<int64_t>(starts.size()) != int64_t{spec.page_table.value.shape(0)} + 1) {
    fail(
        kInvalidArgument,
        "there are ",
        starts.size(),
        " row boundaries for a page table of ",
        spec.page_table.value.shape(0),
        " sequences");
  }
  std::vector<Run> runs;
  for (size_t s = 0; s + 1 < starts.size(); ++s) {
    if (starts[s] > starts[s + 1] || starts[s + 1] > static_cast<uint32_t>(rows)) {
      fail(kInvalidArgument, "rows ", starts[s], " to ", starts[s + 1], " of sequence ", s, " are not among ", rows);
    }
    int count = static_cast<int>(starts[s + 1] - starts[s]);
    if (count == 0) {
      continue;
    }
    int sequence = static_cast<int>(s);
    bool joins = !runs.empty() && runs.back().rows_each == count &&
        runs.back().first_sequence + runs.back().sequences == sequence;
    if (joins) {
      ++runs.back().sequences;
    } else {
      runs.push_back({sequence, 1, static_cast<int>(starts[s]), count});
    }
  }
  return runs;
}

// Page and offset of every row, of one shape for both pools.
std::vector<mx::array> places_of(const PagedSpec& spec, Memo& memo) {
  auto& slots = spec.slots.value;
  int page_size = spec.k_pool.value.shape(1);
  return memo.get({slots}, {static_cast<uint64_t>('p'), static_cast<uint64_t>(page_size)}, [&] {
    auto size = mx::array(page_size, slots.dtype());
    auto page = mx::floor_divide(slots, size);
    return std::vector<mx::array>{page, mx::subtract(slots, mx::multiply(page, size))};
  });
}

// Writes rows into a pool. In place when nothing else holds the pool at the time of evaluation.
mx::array append(const mx::array& pool, const mx::array& rows, const std::vector<mx::array>& places) {
  auto updates = mx::reshape(rows, {rows.shape(0), 1, 1, rows.shape(1), rows.shape(2)});
  return mx::scatter(pool, places, updates, {0, 1});
}

// [c, 1, n, L], true where a row sees a key.
mx::array mask_of(const PagedSpec& spec, const Run& run, int keys, Memo& memo) {
  auto& positions = spec.positions.value;
  std::vector<uint64_t> numbers = {
      static_cast<uint64_t>('m'),
      static_cast<uint64_t>(run.first_row),
      static_cast<uint64_t>(run.sequences),
      static_cast<uint64_t>(run.rows_each),
      static_cast<uint64_t>(keys),
      spec.window};
  auto made = memo.get({positions}, std::move(numbers), [&] {
    int rows = run.sequences * run.rows_each;
    auto own = mx::slice(positions, {run.first_row}, {run.first_row + rows});
    own = mx::reshape(own, {run.sequences, 1, run.rows_each, 1});
    auto key = mx::astype(mx::arange(0, keys, mx::int32), positions.dtype());
    auto seen = mx::less_equal(key, own);
    if (spec.window > 0 && spec.window < static_cast<uint32_t>(keys)) {
      auto first = mx::subtract(own, mx::array(static_cast<int>(spec.window), positions.dtype()));
      seen = mx::logical_and(seen, mx::greater(key, first));
    }
    return std::vector<mx::array>{seen};
  });
  return made.front();
}

// Pages of the run's sequences side by side: [c, Hkv, L, D].
mx::array pages_of(const mx::array& pool, const mx::array& table) {
  auto pages = mx::take(pool, table, 0);
  auto keys = mx::safe_cast(int64_t{table.shape(1)} * pool.shape(1));
  pages = mx::reshape(pages, {table.shape(0), keys, pool.shape(2), pool.shape(3)});
  return mx::transpose(pages, {0, 2, 1, 3});
}

mx::array attend_run(
    const PagedSpec& spec,
    const Run& run,
    const mx::array& table,
    const mx::array& k_pool,
    const mx::array& v_pool,
    Memo& memo) {
  auto& q = spec.q.value;
  int heads = q.shape(1), width = q.shape(2), rows = run.sequences * run.rows_each;
  auto own = rows == q.shape(0) ? q : mx::slice(q, {run.first_row, 0, 0}, {run.first_row + rows, heads, width});
  own = mx::transpose(mx::reshape(own, {run.sequences, run.rows_each, heads, width}), {0, 2, 1, 3});
  auto pages = table.shape(0) == run.sequences
      ? table
      : mx::slice(
            table, {run.first_sequence, 0}, {run.first_sequence + run.sequences, table.shape(1)});
  check_bytes({run.sequences, pages.shape(1), k_pool.shape(1), k_pool.shape(2), k_pool.shape(3)}, k_pool.itemsize());
  auto keys = pages_of(k_pool, pages);
  auto mask = mask_of(spec, run, keys.shape(2), memo);
  AttentionInputs in{
      own, keys, pages_of(v_pool, pages), spec.scale, spec.softcap, false, mask, optional_of(spec.sinks)};
  auto out = mx::transpose(attend(in), {0, 2, 1, 3});
  return mx::reshape(out, {rows, heads, v_pool.shape(3)});
}

} // namespace

Three paged_attention(const PagedSpec& spec, Memo& memo) {
  check_paged(spec);
  auto& q = spec.q.value;
  int rows = q.shape(0);
  auto table = spec.page_table.value;
  std::vector<Run> runs;
  if (spec.row_starts.empty()) {
    // Without the boundaries every row is a sequence of its own.
    if (rows > 0) {
      table = mx::take(table, spec.row_sequences.value, 0);
      runs.push_back({0, rows, 0, 1});
    }
  } else {
    runs = runs_of(spec);
  }
  auto k_pool = spec.k_pool.value;
  auto v_pool = spec.v_pool.value;
  if (rows > 0) {
    auto places = places_of(spec, memo);
    k_pool = append(k_pool, spec.k.value, places);
    v_pool = append(v_pool, spec.v.value, places);
  }
  std::vector<mx::array> parts;
  int done = 0;
  auto fill_up_to = [&](int row) {
    if (row > done) {
      parts.push_back(mx::zeros({row - done, q.shape(1), v_pool.shape(3)}, q.dtype()));
    }
  };
  for (auto& run : runs) {
    fill_up_to(run.first_row);
    parts.push_back(attend_run(spec, run, table, k_pool, v_pool, memo));
    done = run.first_row + run.sequences * run.rows_each;
  }
  fill_up_to(rows);
  auto out = parts.empty() ? mx::zeros({0, q.shape(1), v_pool.shape(3)}, q.dtype())
                           : mx::concatenate(std::move(parts), 0);
  return Three{keep(out), keep(k_pool), keep(v_pool)};
}

} // namespace mlxcel
