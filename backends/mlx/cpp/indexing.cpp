// Reading and writing at indices. Values of indices are not checked: they are data of the device.
#include "internal.h"

namespace mlxcel {

namespace {

void check_indices(const mx::array& indices) {
  if (!is_integer(indices.dtype())) {
    fail(kInvalidArgument, "indices are of type ", name_of(indices.dtype()), ", integers are needed");
  }
}

std::vector<mx::array> indices_of(Refs refs) {
  auto indices = arrays_of(refs);
  for (auto& index : indices) {
    check_indices(index);
  }
  return indices;
}

mx::array apply_scatter(
    uint32_t kind,
    const mx::array& a,
    const std::vector<mx::array>& indices,
    const mx::array& updates,
    const std::vector<int>& axes) {
  switch (kind) {
    case 1:
      return mx::scatter(a, indices, updates, axes);
    case 2:
      return mx::scatter_add(a, indices, updates, axes);
    case 3:
      return mx::scatter_prod(a, indices, updates, axes);
    case 4:
      return mx::scatter_max(a, indices, updates, axes);
    case 5:
      return mx::scatter_min(a, indices, updates, axes);
    default:
      fail(kUnimplemented, "scatter kind ", kind, " is not known");
  }
}

} // namespace

Out take(const Array& a, const Array& indices, int32_t axis) {
  check_indices(indices.value);
  return keep(mx::take(a.value, indices.value, axis_of(axis, a.value)));
}

Out take_along(const Array& a, const Array& indices, int32_t axis) {
  check_indices(indices.value);
  return keep(mx::take_along_axis(a.value, indices.value, axis_of(axis, a.value)));
}

Out put_along(const Array& a, const Array& indices, const Array& values, int32_t axis) {
  check_indices(indices.value);
  return keep(mx::put_along_axis(a.value, indices.value, values.value, axis_of(axis, a.value)));
}

Out gather(const Array& a, Refs indices, Axes axes, Dims slice_sizes) {
  return keep(mx::gather(a.value, indices_of(indices), ints_of(axes), shape_of(slice_sizes)));
}

Out scatter(uint32_t kind, const Array& a, const Array& updates, Refs refs, Axes axis_list) {
  auto indices = indices_of(refs);
  auto axes = ints_of(axis_list);
  auto out = apply_scatter(kind, a.value, indices, updates.value, axes);
  return any_empty(a.value, updates.value) ? keep_view(a.value) : keep(std::move(out));
}

} // namespace mlxcel
