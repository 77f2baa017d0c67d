// Attention over a paged pool, composed from the library's own operations.
#include "runs.h"

namespace mlxcel {

namespace {

// Rows that are appended and the pool they go to; there may be none.
void check_appended(const char* what, const mx::array& pool, Refs rows, const mx::array& q, bool read_only) {
  if ((rows.size() == 0) != read_only) {
    fail(kInvalidArgument, what, " is given exactly when something is appended");
  }
  if (pool.ndim() != 4 || pool.size() == 0 || q.shape(1) % pool.shape(2) != 0 || !is_float(pool.dtype())) {
    fail(
        kInvalidArgument, "the pool of ", what, ", ", name_of(pool.dtype()), " ", text_of(pool.shape()), ", does not fit q ", text_of(q.shape()));
  }
  auto given = optional_of(rows);
  if (given && (given->shape() != mx::Shape{q.shape(0), pool.shape(2), pool.shape(3)} || !is_float(given->dtype()))) {
    fail(
        kInvalidArgument,
        what,
        " and its pool do not fit together: ",
        name_of(given->dtype()),
        " ",
        text_of(given->shape()),
        " and ",
        text_of(pool.shape()));
  }
}

void check_paged(const PagedSpec& spec) {
  auto& q = spec.q.value;
  auto& k_pool = spec.k_pool.value;
  if (q.ndim() != 3 || !is_float(q.dtype())) {
    fail(kInvalidArgument, "q is [T, H, D] of floats, found ", name_of(q.dtype()), " ", text_of(q.shape()));
  }
  check_appended("k", k_pool, spec.k, q, spec.read_only);
  auto v_pool = optional_of(spec.v_pool);
  bool is_latent = spec.latent_dim > 0;
  if (k_pool.shape(3) != q.shape(2) || is_latent == v_pool.has_value() ||
      spec.latent_dim > static_cast<uint32_t>(k_pool.shape(3)) || (is_latent && spec.v.size() > 0)) {
    fail(
        kInvalidArgument,
        "values have a pool or are the first elements of keys: q ",
        text_of(q.shape()),
        ", keys ",
        text_of(k_pool.shape()),
        ", latent_dim ",
        spec.latent_dim);
  }
  if (v_pool) {
    check_appended("v", *v_pool, spec.v, q, spec.read_only);
    auto& a = k_pool.shape();
    auto& b = v_pool->shape();
    if (a[0] != b[0] || a[1] != b[1] || a[2] != b[2]) {
      fail(kInvalidArgument, "the pools do not fit together: ", text_of(a), " and ", text_of(b));
    }
  }
  if (spec.slots.size() == 0 && !spec.read_only) {
    fail(kInvalidArgument, "slots are missing");
  }
  auto per_row = arrays_of(spec.slots);
  per_row.push_back(spec.row_sequences.value);
  per_row.push_back(spec.positions.value);
  if (auto selection = optional_of(spec.selection)) {
    if (selection->ndim() != 2 || selection->shape(0) != q.shape(0) || !is_integer(selection->dtype())) {
      fail(kInvalidArgument, "a selection is [", q.shape(0), ", N] i32, found ", text_of(selection->shape()));
    }
  }
  for (auto& array : per_row) {
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

// Page and offset of every row, of one shape for both pools.
std::vector<mx::array> places_of(const PagedSpec& spec, Memo& memo) {
  auto slots = arrays_of(spec.slots).front();
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
      spec.window,
      spec.chunk};
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
    if (spec.chunk > 0 && spec.chunk < static_cast<uint32_t>(keys)) {
      auto size = mx::array(static_cast<int>(spec.chunk), positions.dtype());
      auto first = mx::multiply(mx::floor_divide(own, size), size);
      seen = mx::logical_and(seen, mx::greater_equal(key, first));
    }
    return std::vector<mx::array>{seen};
  });
  return made.front();
}

// [c, 1, n, L], true where a row chose a key.
mx::array selected(const mx::array& selection, const Run& run, int keys) {
  auto own = mx::astype(rows_of_run(selection, run), mx::int32);
  // One more place than there are keys takes what is none.
  auto place = mx::where(mx::greater_equal(own, mx::array(0)), own, mx::array(keys));
  auto none = mx::zeros({run.sequences, run.rows_each, keys + 1}, mx::bool_);
  auto chosen = mx::put_along_axis(none, place, mx::array(true), -1);
  chosen = mx::slice(chosen, {0, 0, 0}, {run.sequences, run.rows_each, keys});
  return mx::expand_dims(chosen, 1);
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
    const std::optional<mx::array>& v_pool,
    Memo& memo) {
  auto& q = spec.q.value;
  int heads = q.shape(1), rows = run.sequences * run.rows_each;
  auto own = mx::transpose(rows_of_run(q, run), {0, 2, 1, 3});
  auto pages = sequences_of_run(table, run);
  check_bytes({run.sequences, pages.shape(1), k_pool.shape(1), k_pool.shape(2), k_pool.shape(3)}, k_pool.itemsize());
  auto keys = pages_of(k_pool, pages);
  auto width = static_cast<int>(spec.latent_dim);
  auto values = v_pool ? pages_of(*v_pool, pages)
                       : mx::slice(keys, {0, 0, 0, 0}, {keys.shape(0), keys.shape(1), keys.shape(2), width});
  auto mask = mask_of(spec, run, keys.shape(2), memo);
  auto selection = optional_of(spec.selection);
  if (selection) {
    mask = mx::logical_and(mask, selected(*selection, run, keys.shape(2)));
  }
  AttentionInputs in{own, keys, values, spec.scale, spec.softcap, false, mask, optional_of(spec.sinks)};
  auto out = attend(in);
  if (selection) {
    // A row that sees nothing has no weights to divide by.
    out = mx::where(mx::any(mask, -1, true), out, mx::array(0.0f, out.dtype()));
  }
  return mx::reshape(mx::transpose(out, {0, 2, 1, 3}), {rows, heads, values.shape(3)});
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
    runs = runs_of(spec.row_starts, table.shape(0), rows);
  }
  auto k_pool = spec.k_pool.value;
  auto v_pool = optional_of(spec.v_pool);
  if (rows > 0 && !spec.read_only) {
    auto places = places_of(spec, memo);
    k_pool = append(k_pool, arrays_of(spec.k).front(), places);
    if (v_pool) {
      v_pool = append(*v_pool, arrays_of(spec.v).front(), places);
    }
  }
  int width = v_pool ? v_pool->shape(3) : static_cast<int>(spec.latent_dim);
  std::vector<mx::array> parts;
  int done = 0;
  auto fill_up_to = [&](int row) {
    if (row > done) {
      parts.push_back(mx::zeros({row - done, q.shape(1), width}, q.dtype()));
    }
  };
  for (auto& run : runs) {
    fill_up_to(run.first_row);
    parts.push_back(attend_run(spec, run, table, k_pool, v_pool, memo));
    done = run.first_row + run.sequences * run.rows_each;
  }
  fill_up_to(rows);
  auto out = parts.empty() ? mx::zeros({0, q.shape(1), width}, q.dtype())
                           : mx::concatenate(std::move(parts), 0);
  return Three{keep(out), keep(k_pool), v_pool ? keep(*v_pool) : nullptr};
}

} // namespace mlxcel
