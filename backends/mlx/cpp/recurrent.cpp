// States that move on with every row, composed from the library's own operations.
#include "runs.h"

namespace mlxcel {

namespace {

void check_rows(const StateRowsSpec& rows, const mx::array& pool, int n_rows) {
  auto sequences = static_cast<int64_t>(rows.starts.size()) - 1;
  auto check = [&](const char* what, const mx::array& array, int64_t length) {
    if (array.ndim() != 1 || array.shape(0) != length || !is_integer(array.dtype())) {
      fail(
          kInvalidArgument, what, " is [", length, "] i32, found ", name_of(array.dtype()), " ", text_of(array.shape()));
    }
  };
  if (sequences < 0) {
    fail(kInvalidArgument, "there are no row boundaries");
  }
  check("sources", rows.sources.value, sequences);
  check("targets", rows.targets.value, sequences);
  check("row_sequences", rows.row_sequences.value, n_rows);
  check("row_starts", rows.row_starts.value, sequences + 1);
  if (pool.dtype() != mx::float32 || pool.shape(0) < 1) {
    fail(kInvalidArgument, "a pool of states is f32 with a slot, found ", name_of(pool.dtype()), " ", text_of(pool.shape()));
  }
}

// States of all sequences: [S, ..], zeros where one begins.
mx::array states_of(const StateRowsSpec& rows, const mx::array& pool) {
  auto& sources = rows.sources.value;
  auto held = mx::take(pool, mx::maximum(sources, mx::array(0, sources.dtype())), 0);
  mx::Shape shape(pool.ndim(), 1);
  shape[0] = sources.shape(0);
  auto known = mx::reshape(mx::greater_equal(sources, mx::array(0, sources.dtype())), std::move(shape));
  return mx::where(known, held, mx::array(0.0f));
}

// The pool with the states of all sequences at their targets.
mx::array put_states(const StateRowsSpec& rows, const mx::array& pool, const mx::array& states) {
  if (states.shape(0) == 0) {
    return pool;
  }
  return mx::scatter(pool, rows.targets.value, mx::expand_dims(states, 1), 0);
}

mx::array to_f32(const mx::array& a) {
  return mx::astype(a, mx::float32);
}

// Rows [.., C] by their place in the step; places before a sequence's start are in its state.
mx::array rows_at(
    const mx::array& both,
    int sequences,
    int before,
    const mx::array& places,
    const mx::array& starts,
    const mx::array& owners) {
  auto whole = mx::array(before, mx::int32);
  auto from_start = mx::subtract(places, starts);
  auto in_state = mx::add(mx::add(mx::multiply(owners, whole), from_start), whole);
  auto in_step = mx::add(places, mx::array(sequences * before, mx::int32));
  return mx::take(both, mx::where(mx::greater_equal(places, starts), in_step, in_state), 0);
}

} // namespace

Three short_conv(const ShortConvSpec& spec) {
  auto& x = spec.x.value;
  auto& weight = spec.weight.value;
  auto& pool = spec.pool.value;
  bool fits = x.ndim() == 2 && weight.ndim() == 2 && pool.ndim() == 3 && weight.shape(0) == x.shape(1) &&
      weight.shape(1) >= 2 && pool.shape(1) == weight.shape(1) - 1 && pool.shape(2) == x.shape(1);
  if (!fits || !is_float(x.dtype()) || !is_float(weight.dtype())) {
    fail(
        kInvalidArgument,
        "rows, kernel and pool do not fit together: ",
        text_of(x.shape()),
        ", ",
        text_of(weight.shape()),
        ", ",
        text_of(pool.shape()));
  }
  auto bias = optional_of(spec.bias);
  if (bias && (bias->ndim() != 1 || bias->shape(0) != x.shape(1))) {
    fail(kInvalidArgument, "a bias of ", text_of(bias->shape()), " does not fit ", x.shape(1), " channels");
  }
  int n_rows = x.shape(0), width = x.shape(1), before = pool.shape(1);
  check_rows(spec.rows, pool, n_rows);
  int sequences = static_cast<int>(spec.rows.starts.size()) - 1;
  // The host's copy is checked; the tensors are what is computed with.
  runs_of(spec.rows.starts, sequences, n_rows);
  check_bytes({n_rows, before + 1, width}, sizeof(float));
  if (n_rows == 0 || sequences == 0) {
    return Three{keep(mx::zeros(x.shape(), x.dtype())), keep_view(pool), nullptr};
  }
  auto ints = [](const mx::array& a) { return mx::astype(a, mx::int32); };
  auto boundaries = ints(spec.rows.row_starts.value);
  auto starts = mx::slice(boundaries, {0}, {sequences});
  auto ends = mx::reshape(mx::slice(boundaries, {1}, {sequences + 1}), {sequences, 1});
  auto owners = ints(spec.rows.row_sequences.value);
  auto state = mx::reshape(states_of(spec.rows, pool), {sequences * before, width});
  auto both = mx::concatenate({state, to_f32(x)}, 0);

  auto places = mx::add(
      mx::reshape(mx::arange(0, n_rows, mx::int32), {n_rows, 1}), mx::arange(-before, 1, mx::int32));
  auto row_starts = mx::reshape(mx::take(starts, owners, 0), {n_rows, 1});
  auto seen = rows_at(both, sequences, before, places, row_starts, mx::reshape(owners, {n_rows, 1}));
  auto y = mx::sum(mx::multiply(seen, mx::transpose(to_f32(weight))), 1);
  if (bias) {
    y = mx::add(y, to_f32(*bias));
  }
  if (spec.activation != 0) {
    y = unary(spec.activation, Array{y})->value;
  }
  auto tail = mx::add(ends, mx::arange(-before, 0, mx::int32));
  auto order = mx::reshape(mx::arange(0, sequences, mx::int32), {sequences, 1});
  auto kept = rows_at(both, sequences, before, tail, mx::reshape(starts, {sequences, 1}), order);
  return Three{keep(mx::astype(y, x.dtype())), keep(put_states(spec.rows, pool, kept)), nullptr};
}

Three gated_delta(const GatedDeltaSpec& spec) {
  auto& q = spec.q.value;
  auto& k = spec.k.value;
  auto& v = spec.v.value;
  auto& g = spec.g.value;
  auto& beta = spec.beta.value;
  auto& pool = spec.pool.value;
  bool fits = q.ndim() == 3 && k.ndim() == 3 && v.ndim() == 3 && pool.ndim() == 4 && q.shape() == k.shape() &&
      v.shape(0) == k.shape(0) && k.shape(1) > 0 && v.shape(1) % k.shape(1) == 0 &&
      beta.shape() == mx::Shape{v.shape(0), v.shape(1)} && pool.shape(1) == v.shape(1) &&
      pool.shape(2) == k.shape(2) && pool.shape(3) == v.shape(2) &&
      (g.shape() == beta.shape() || g.shape() == mx::Shape{v.shape(0), v.shape(1), k.shape(2)});
  for (auto array : {&q, &k, &v, &g, &beta}) {
    fits = fits && is_float(array->dtype());
  }
  if (!fits) {
    fail(
        kInvalidArgument,
        "rows and pool of the delta rule do not fit together: q ",
        text_of(q.shape()),
        ", k ",
        text_of(k.shape()),
        ", v ",
        text_of(v.shape()),
        ", g ",
        text_of(g.shape()),
        ", beta ",
        text_of(beta.shape()),
        ", pool ",
        text_of(pool.shape()));
  }
  int n_rows = v.shape(0), heads = v.shape(1), width = v.shape(2), key_width = k.shape(2);
  check_rows(spec.rows, pool, n_rows);
  int sequences = static_cast<int>(spec.rows.starts.size()) - 1;
  auto runs = runs_of(spec.rows.starts, sequences, n_rows);
  check_bytes({sequences, heads, key_width, width}, sizeof(float));
  if (n_rows == 0 || sequences == 0) {
    return Three{keep(mx::zeros(v.shape(), v.dtype())), keep_view(pool), nullptr};
  }
  auto before = states_of(spec.rows, pool);
  int group = heads / k.shape(1);
  auto per_head = [&](const mx::array& a) {
    auto wide = to_f32(a);
    return group == 1 ? wide : mx::repeat(wide, group, 1);
  };
  auto queries = per_head(q), keys = per_head(k), values = to_f32(v);
  auto decay = mx::exp(to_f32(g)), rates = to_f32(beta);
  int decays = g.ndim() == 3 ? key_width : 1;

  std::vector<mx::array> out, after;
  int done_rows = 0, done_sequences = 0;
  auto fill_up_to = [&](int row, int sequence) {
    if (row > done_rows) {
      out.push_back(mx::zeros({row - done_rows, heads, width}, mx::float32));
    }
    if (sequence > done_sequences) {
      auto rest = mx::slice(before, {done_sequences, 0, 0, 0}, {sequence, heads, key_width, width});
      after.push_back(rest);
    }
  };
  for (auto& run : runs) {
    fill_up_to(run.first_row, run.first_sequence);
    int c = run.sequences, n = run.rows_each;
    auto state = sequences_of_run(before, run);
    auto q_run = rows_of_run(queries, run), k_run = rows_of_run(keys, run), v_run = rows_of_run(values, run);
    auto d_run = rows_of_run(decay, run), b_run = rows_of_run(rates, run);
    std::vector<mx::array> rows;
    for (int i = 0; i < n; ++i) {
      // Row i of every sequence of the run.
      auto row = [&](const mx::array& a, mx::Shape shape) {
        auto stops = a.shape();
        mx::Shape first(a.ndim(), 0);
        first[1] = i;
        stops[1] = i + 1;
        return mx::reshape(mx::slice(a, std::move(first), std::move(stops)), std::move(shape));
      };
      auto key = row(k_run, {c, heads, key_width, 1});
      state = mx::multiply(state, row(d_run, {c, heads, decays, 1}));
      auto recalled = mx::matmul(mx::swapaxes(key, -1, -2), state);
      auto delta = mx::multiply(
          mx::subtract(row(v_run, {c, heads, 1, width}), recalled), row(b_run, {c, heads, 1, 1}));
      state = mx::add(state, mx::multiply(key, delta));
      rows.push_back(mx::matmul(row(q_run, {c, heads, 1, key_width}), state));
    }
    auto mixed = rows.size() == 1 ? rows.front() : mx::concatenate(std::move(rows), 2); // [c, H, n, Dv]
    out.push_back(mx::reshape(mx::transpose(mixed, {0, 2, 1, 3}), {c * n, heads, width}));
    after.push_back(state);
    done_rows = run.first_row + c * n;
    done_sequences = run.first_sequence + c;
  }
  fill_up_to(n_rows, sequences);
  auto y = mx::astype(mx::concatenate(std::move(out), 0), v.dtype());
  auto states = mx::concatenate(std::move(after), 0);
  return Three{keep(y), keep(put_states(spec.rows, pool, states)), nullptr};
}

} // namespace mlxcel
