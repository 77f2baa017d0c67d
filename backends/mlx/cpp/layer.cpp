// Norms and rotary embedding.
#include <bit>
#include <cmath>

#include "internal.h"
#include "mlx/fast.h"

namespace mlxcel {

namespace {

std::optional<mx::array> parameter(Refs refs, mx::Dtype activation) {
  auto found = optional_of(refs);
  return found ? std::optional(mx::astype(*found, activation)) : std::nullopt;
}

// A parameter that the formula does not have costs nothing to leave out, but the library wants
// both of layer norm's or the first.
void check_norm(const mx::array& x, const std::optional<mx::array>& p, const char* what) {
  if (x.ndim() == 0 || !is_float(x.dtype())) {
    fail(kInvalidArgument, "a norm needs floats of at least 1 dimension, found ", name_of(x.dtype()), " ", text_of(x.shape()));
  }
  if (p && (p->ndim() != 1 || p->shape(0) != x.shape(-1))) {
    fail(kInvalidArgument, what, " ", text_of(p->shape()), " does not fit ", text_of(x.shape()));
  }
}

void check_rope(const RopeSpec& spec) {
  auto& x = spec.x.value;
  auto& positions = spec.positions.value;
  if (x.ndim() != 3 || !is_float(x.dtype())) {
    fail(kInvalidArgument, "rotation needs floats [T, H, D], found ", name_of(x.dtype()), " ", text_of(x.shape()));
  }
  if (positions.ndim() != 1 || positions.shape(0) != x.shape(0) || !is_integer(positions.dtype())) {
    fail(kInvalidArgument, "positions must be [", x.shape(0), "] i32, found ", name_of(positions.dtype()), " ", text_of(positions.shape()));
  }
  if (spec.dims < 2 || spec.dims % 2 != 0 || spec.dims > x.shape(2)) {
    fail(kInvalidArgument, "the number of rotated features must be even and at most ", x.shape(2), ", found ", spec.dims);
  }
  if (!spec.freqs.empty()) {
    auto& freqs = spec.freqs.front().array.value;
    if (freqs.ndim() != 1 || freqs.shape(0) != spec.dims / 2 || !is_float(freqs.dtype())) {
      fail(kInvalidArgument, "freqs must be [", spec.dims / 2, "] f32, found ", name_of(freqs.dtype()), " ", text_of(freqs.shape()));
    }
  } else if (!(spec.base > 0.0f)) {
    fail(kInvalidArgument, "the base of the frequencies must be above 0, found ", spec.base);
  }
}

// base^(-2 i / dims), equation 15 of Su et al., RoFormer.
mx::array inverse_frequencies(const RopeSpec& spec) {
  int half = spec.dims / 2;
  if (!spec.freqs.empty()) {
    return mx::reciprocal(mx::astype(spec.freqs.front().array.value, mx::float32));
  }
  std::vector<float> values(half);
  for (int i = 0; i < half; ++i) {
    values[i] = static_cast<float>(std::pow(double{spec.base}, -2.0 * i / spec.dims));
  }
  return mx::array(values.begin(), mx::Shape{half}, mx::float32);
}

// Cosines, and sines with the sign of each half of a pair, laid out for the view of x as pairs:
// [T, H, 2, dims / 2], or [T, H, dims / 2, 2] when neighbours are pairs.
std::vector<mx::array> rotation(const RopeSpec& spec) {
  int half = spec.dims / 2;
  auto rows = spec.x.value.shape(0);
  auto positions = mx::astype(spec.positions.value, mx::float32);
  if (spec.scale != 1.0f) {
    positions = mx::multiply(positions, mx::array(spec.scale));
  }
  auto angles = mx::multiply(mx::reshape(positions, {rows, 1}), inverse_frequencies(spec));
  auto shape = spec.interleaved ? mx::Shape{rows, 1, half, 1} : mx::Shape{rows, 1, 1, half};
  auto cosines = mx::reshape(mx::cos(angles), shape);
  auto sines = mx::reshape(mx::sin(angles), shape);
  return {cosines, mx::concatenate({mx::negative(sines), sines}, spec.interleaved ? 3 : 2)};
}

std::vector<mx::array> rotation_of(const RopeSpec& spec, Memo& memo) {
  std::vector<mx::array> keys = {spec.positions.value};
  for (auto& freqs : spec.freqs) {
    keys.push_back(freqs.array.value);
  }
  std::vector<uint64_t> numbers = {
      static_cast<uint64_t>('r'),
      static_cast<uint64_t>(spec.dims),
      spec.interleaved,
      std::bit_cast<uint32_t>(spec.base),
      std::bit_cast<uint32_t>(spec.scale)};
  return memo.get(std::move(keys), std::move(numbers), [&] { return rotation(spec); });
}

mx::array rotate(const RopeSpec& spec, Memo& memo) {
  auto& x = spec.x.value;
  auto rows = x.shape(0);
  auto heads = x.shape(1);
  auto width = x.shape(2);
  auto tables = rotation_of(spec, memo);
  auto rotated = width == spec.dims ? x : mx::slice(x, {0, 0, 0}, {rows, heads, spec.dims});
  auto view = spec.interleaved ? mx::Shape{rows, heads, spec.dims / 2, 2} : mx::Shape{rows, heads, 2, spec.dims / 2};
  auto pairs = mx::reshape(mx::astype(rotated, mx::float32), view);
  // The other member of every pair.
  auto start = mx::Shape{0, 0, 0, 0};
  auto stop = view;
  auto step = mx::Shape{1, 1, 1, 1};
  int pair_axis = spec.interleaved ? 3 : 2;
  start[pair_axis] = 1;
  stop[pair_axis] = -3;
  step[pair_axis] = -1;
  auto others = mx::slice(pairs, start, stop, step);
  auto out = mx::add(mx::multiply(pairs, tables[0]), mx::multiply(others, tables[1]));
  out = mx::astype(mx::reshape(out, {rows, heads, spec.dims}), x.dtype());
  if (width == spec.dims) {
    return out;
  }
  return mx::concatenate({out, mx::slice(x, {0, 0, spec.dims}, {rows, heads, width})}, 2);
}

} // namespace

Out rms_norm(const Array& x, Refs w, float eps) {
  auto weight = parameter(w, x.value.dtype());
  check_norm(x.value, weight, "weight");
  return keep(mx::fast::rms_norm(x.value, weight, eps));
}

Out layer_norm(const Array& x, Refs w, Refs b, float eps) {
  auto dtype = x.value.dtype();
  auto weight = parameter(w, dtype);
  auto bias = parameter(b, dtype);
  check_norm(x.value, weight, "weight");
  check_norm(x.value, bias, "bias");
  return keep(mx::fast::layer_norm(x.value, weight, bias, eps));
}

Out rope(const RopeSpec& spec, Memo& memo) {
  check_rope(spec);
  auto& x = spec.x.value;
  if (x.size() == 0) {
    return keep_view(x);
  }
  if (on_cpu()) {
    return keep(rotate(spec, memo));
  }
  // Rows are a batch to the library, each with its own offset.
  auto batch = mx::expand_dims(x, 2);
  auto freqs = optional_of(spec.freqs);
  auto base = freqs ? std::nullopt : std::optional<float>(spec.base);
  auto positions = mx::astype(spec.positions.value, mx::int32);
  auto out = mx::fast::rope(batch, spec.dims, spec.interleaved, base, spec.scale, positions, freqs);
  return keep(mx::squeeze(out, 2));
}

} // namespace mlxcel
