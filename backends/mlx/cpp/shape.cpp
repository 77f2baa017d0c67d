// Shapes, joining and cutting.
#include "internal.h"

namespace mlxcel {

namespace {

struct Box {
  mx::Shape starts;
  mx::Shape stops;
  mx::Shape strides;
};

Box box_of(const mx::array& a, const SliceSpec& spec) {
  if (spec.starts.size() != a.ndim()) {
    fail(
        kInvalidArgument, "a box of ", spec.starts.size(), " axes does not fit shape ", text_of(a.shape()));
  }
  Box box;
  for (size_t i = 0; i < a.ndim(); ++i) {
    // Indices beyond an end mean the end; keeping them near it keeps sums within 32 bits.
    int64_t size = a.shape(static_cast<int>(i));
    auto near = [&](int64_t index) {
      return static_cast<int32_t>(std::clamp<int64_t>(index, -size - 1, size));
    };
    box.starts.push_back(near(spec.starts[i]));
    box.stops.push_back(near(spec.stops[i]));
    // A step of the axis' size or more takes one element; the count adds the step to it.
    auto step = std::clamp(spec.strides[i], -std::max<int64_t>(size, 1), std::max<int64_t>(size, 1));
    if (size > std::numeric_limits<int32_t>::max() / 2 && step != 1) {
      fail(kUnimplemented, "strided boxes of an axis of ", size, " are not implemented");
    }
    box.strides.push_back(static_cast<int32_t>(step));
  }
  return box;
}

} // namespace

Out reshape(const Array& a, Dims dims) {
  return keep(mx::reshape(a.value, shape_of(dims)));
}

Out transpose(const Array& a, Axes axes) {
  if (axes.size() != a.value.ndim()) {
    fail(kInvalidArgument, axes.size(), " axes do not permute shape ", text_of(a.value.shape()));
  }
  if (axes.empty()) {
    return keep_view(a.value);
  }
  return keep_view(mx::transpose(a.value, ints_of(axes)));
}

Out broadcast_to(const Array& a, Dims dims) {
  return keep_view(mx::broadcast_to(a.value, shape_of(dims)));
}

Out concat(Refs refs, int32_t axis) {
  auto arrays = arrays_of(refs);
  if (arrays.empty()) {
    fail(kInvalidArgument, "there is nothing to join");
  }
  auto along = axis_of(axis, arrays.front());
  return keep(mx::concatenate(std::move(arrays), along));
}

Out slice(const Array& a, const SliceSpec& spec) {
  auto box = box_of(a.value, spec);
  return keep_view(mx::slice(a.value, box.starts, box.stops, box.strides));
}

Out slice_update(const Array& a, const Array& update, const SliceSpec& spec) {
  auto box = box_of(a.value, spec);
  return keep(mx::slice_update(a.value, update.value, box.starts, box.stops, box.strides));
}

Out pad(const Array& a, Dims low, Dims high, double value) {
  if (low.size() != a.value.ndim()) {
    fail(kInvalidArgument, low.size(), " paddings do not fit shape ", text_of(a.value.shape()));
  }
  std::vector<int> axes(low.size());
  for (size_t i = 0; i < axes.size(); ++i) {
    axes[i] = static_cast<int>(i);
  }
  if (axes.empty()) {
    return keep_view(a.value);
  }
  auto fill = constant(value, a.value.dtype());
  return keep(mx::pad(a.value, axes, shape_of(low), shape_of(high), fill));
}

Out repeat(const Array& a, int64_t n, int32_t axis) {
  auto along = axis_of(axis, a.value);
  if (n < 0) {
    fail(kInvalidArgument, "elements cannot be repeated ", n, " times");
  }
  return keep(mx::repeat(a.value, mx::safe_cast(n), along));
}

Out tile(const Array& a, Dims reps) {
  for (auto count : reps) {
    if (count < 0) {
      fail(kInvalidArgument, "a tensor cannot be repeated ", count, " times");
    }
  }
  return keep(mx::tile(a.value, ints_of(reps)));
}

Out contiguous(const Array& a) {
  return keep(mx::contiguous(a.value));
}

} // namespace mlxcel
