// Reductions, running reductions and order.
#include <numeric>

#include "internal.h"

namespace mlxcel {

namespace {

std::vector<int> axes_of(Axes axes, const mx::array& a) {
  std::vector<int> out;
  if (axes.empty()) {
    out.resize(a.ndim());
    std::iota(out.begin(), out.end(), 0);
  }
  for (auto axis : axes) {
    out.push_back(axis_of(axis, a));
  }
  return out;
}

bool has_empty_axis(const mx::array& a, const std::vector<int>& axes) {
  for (auto axis : axes) {
    if (a.shape(axis) == 0) {
      return true;
    }
  }
  return false;
}

// Half types accumulate in f32. Sums of short integers and of bools are 32 bits wide, as the library
// has them.
mx::array wide_sum(const mx::array& a, const std::vector<int>& axes, bool keep_dims) {
  if (is_half(a.dtype())) {
    return mx::astype(mx::sum(mx::astype(a, mx::float32), axes, keep_dims), a.dtype());
  }
  return mx::sum(a, axes, keep_dims);
}

mx::array wide_prod(const mx::array& a, const std::vector<int>& axes, bool keep_dims) {
  if (is_half(a.dtype())) {
    return mx::astype(mx::prod(mx::astype(a, mx::float32), axes, keep_dims), a.dtype());
  }
  return mx::prod(a, axes, keep_dims);
}

mx::array running(uint32_t kind, const mx::array& a, int axis, bool reverse, bool inclusive) {
  switch (kind) {
    case 1:
      return mx::cumsum(a, axis, reverse, inclusive);
    case 2:
      return mx::cumprod(a, axis, reverse, inclusive);
    case 3:
      return mx::cummax(a, axis, reverse, inclusive);
    case 4:
      return mx::cummin(a, axis, reverse, inclusive);
    case 5:
      return mx::logcumsumexp(a, axis, reverse, inclusive);
    default:
      fail(kUnimplemented, "cumulative kind ", kind, " is not known");
  }
}

} // namespace

Out reduce(uint32_t kind, const Array& array, Axes axis_list, bool keep_dims) {
  auto& a = array.value;
  auto axes = axes_of(axis_list, a);
  if ((kind == 4 || kind == 5 || kind == 9) && has_empty_axis(a, axes)) {
    fail(kInvalidArgument, "an axis of shape ", text_of(a.shape()), " has no element to choose from");
  }
  switch (kind) {
    case 1:
      return keep(wide_sum(a, axes, keep_dims));
    case 2:
      return keep(in_f32(a, [&](const mx::array& x) { return mx::mean(x, axes, keep_dims); }));
    case 3:
      return keep(wide_prod(a, axes, keep_dims));
    case 4:
      return keep(mx::max(a, axes, keep_dims));
    case 5:
      return keep(mx::min(a, axes, keep_dims));
    case 6:
      return keep(mx::all(a, axes, keep_dims));
    case 7:
      return keep(mx::any(a, axes, keep_dims));
    case 8:
      return keep(in_f32(a, [&](const mx::array& x) { return mx::var(x, axes, keep_dims); }));
    case 9:
      return keep(in_f32(a, [&](const mx::array& x) { return mx::logsumexp(x, axes, keep_dims); }));
    default:
      fail(kUnimplemented, "reduce kind ", kind, " is not known");
  }
}

Out arg_reduce(uint32_t kind, const Array& a, int32_t axis, bool keep_dims) {
  auto along = axis_of(axis, a.value);
  switch (kind) {
    case 1:
      return keep(mx::argmax(a.value, along, keep_dims));
    case 2:
      return keep(mx::argmin(a.value, along, keep_dims));
    default:
      fail(kUnimplemented, "arg_reduce kind ", kind, " is not known");
  }
}

Out cumulative(uint32_t kind, const Array& array, int32_t axis, bool reverse, bool inclusive) {
  auto& a = array.value;
  auto along = axis_of(axis, a);
  bool chooses = kind == 3 || kind == 4;
  if (kind == 5 || (is_half(a.dtype()) && !chooses)) {
    return keep(in_f32(a, [&](const mx::array& x) { return running(kind, x, along, reverse, inclusive); }));
  }
  return keep(running(kind, a, along, reverse, inclusive));
}

Out order(uint32_t kind, const Array& a, int64_t k, int32_t axis) {
  auto along = axis_of(axis, a.value);
  auto size = a.value.shape(along);
  bool partitions = kind == 3 || kind == 4;
  if (partitions && (k < -int64_t{size} || k >= size)) {
    fail(kInvalidArgument, "position ", k, " does not exist on an axis of ", size);
  }
  if (kind == 5 && (k < 0 || k > size)) {
    fail(kInvalidArgument, "the largest ", k, " were asked of an axis of ", size);
  }
  switch (kind) {
    case 1:
      return keep(mx::sort(a.value, along));
    case 2:
      return keep(mx::argsort(a.value, along));
    case 3:
      return keep(mx::partition(a.value, static_cast<int>(k), along));
    case 4:
      return keep(mx::argpartition(a.value, static_cast<int>(k), along));
    case 5:
      return keep(mx::topk(a.value, static_cast<int>(k), along));
    default:
      fail(kUnimplemented, "order kind ", kind, " is not known");
  }
}

Out softmax(const Array& a, int32_t axis) {
  return keep(mx::softmax(a.value, axis_of(axis, a.value), /* precise = */ true));
}

} // namespace mlxcel
