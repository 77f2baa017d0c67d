// Matrix products, convolutions and Fourier transforms.
#include "internal.h"
#include "mlx/fft.h"

namespace mlxcel {

Out matmul(const Array& a, const Array& b) {
  return keep(mx::matmul(a.value, b.value));
}

Out addmm(const Array& c, const Array& a, const Array& b, float alpha, float beta) {
  return keep(mx::addmm(c.value, a.value, b.value, alpha, beta));
}

Out gather_matmul(const Array& a, const Array& b, Refs lhs, Refs rhs, bool sorted) {
  auto dtype = mx::result_type(a.value, b.value);
  if (dtype == mx::float64) {
    fail(kUnimplemented, "products of chosen f64 matrices are not implemented");
  }
  // On the CPU the library has this for f32 alone.
  auto inner = on_cpu() && is_half(dtype) ? mx::float32 : dtype;
  auto out = mx::gather_mm(
      mx::astype(a.value, inner), mx::astype(b.value, inner), optional_of(lhs), optional_of(rhs), sorted);
  if (any_empty(a.value, b.value, out)) {
    out = zeros_of(out);
  }
  return keep(mx::astype(out, dtype));
}

namespace {

void check_conv(const mx::array& x, const mx::array& w, const ConvSpec& spec) {
  auto spatial = spec.stride.size();
  if (!is_float(x.dtype())) {
    fail(kInvalidArgument, "a convolution needs floats, found ", name_of(x.dtype()));
  }
  if (x.dtype() == mx::float64) {
    fail(kUnimplemented, "a convolution of f64 is not implemented");
  }
  if (x.ndim() != spatial + 2 || w.ndim() != spatial + 2) {
    fail(
        kInvalidArgument,
        "a convolution over ",
        spatial,
        " axes needs tensors of ",
        spatial + 2,
        " dimensions, found ",
        text_of(x.shape()),
        " and ",
        text_of(w.shape()));
  }
  if (x.shape(-1) != int64_t{w.shape(-1)} * spec.groups || w.shape(0) % spec.groups != 0) {
    fail(
        kInvalidArgument,
        "channels of input ",
        text_of(x.shape()),
        " and kernel ",
        text_of(w.shape()),
        " do not fit ",
        spec.groups,
        " groups");
  }
}

// Outputs of a plain convolution along one axis, which must exist.
void check_extent(int64_t in, int64_t kernel, int64_t dilation, int64_t low, int64_t high) {
  auto reach = dilation * (kernel - 1) + 1;
  if (kernel < 1 || in + low + high < reach) {
    fail(
        kInvalidArgument,
        "a kernel that reaches over ",
        reach,
        " does not fit ",
        in,
        " padded with ",
        low,
        " and ",
        high);
  }
}

} // namespace

Out conv(const Array& input, const Array& kernel, const ConvSpec& spec) {
  auto dtype = mx::result_type(input.value, kernel.value);
  auto x = mx::astype(input.value, dtype);
  auto w = mx::astype(kernel.value, dtype);
  check_conv(x, w, spec);
  std::vector<int> stride, low, high, dilation, input_dilation;
  for (size_t i = 0; i < spec.stride.size(); ++i) {
    auto axis = static_cast<int>(i) + 1;
    int64_t reach = spec.dilation[i] * (int64_t{w.shape(axis)} - 1);
    // A transposed convolution is a plain one over the input with stride - 1 zeros between its
    // rows, with a mirrored kernel and the complement of the padding.
    auto before = spec.transposed ? reach - spec.padding_low[i] : spec.padding_low[i];
    auto after =
        spec.transposed ? reach - spec.padding_high[i] + spec.output_padding[i] : spec.padding_high[i];
    auto spread = spec.transposed ? spec.stride[i] : 1;
    check_extent((int64_t{x.shape(axis)} - 1) * spread + 1, w.shape(axis), spec.dilation[i], before, after);
    stride.push_back(spec.transposed ? 1 : mx::safe_cast(spec.stride[i]));
    low.push_back(mx::safe_cast(before));
    high.push_back(mx::safe_cast(after));
    dilation.push_back(mx::safe_cast(spec.dilation[i]));
    input_dilation.push_back(mx::safe_cast(spread));
  }
  auto groups = static_cast<int>(spec.groups);
  auto run = [&](const mx::array& x) {
    return mx::conv_general(
        x, mx::astype(w, x.dtype()), stride, low, high, dilation, input_dilation, groups, spec.transposed);
  };
  auto out = on_cpu() && is_half(dtype) ? in_f32(x, run) : run(x);
  return keep(any_empty(x, w, out) ? zeros_of(out) : out);
}

Out fft(uint32_t kind, const Array& array, Dims n, Axes axis_list) {
  auto& a = array.value;
  std::vector<int> axes;
  mx::Shape sizes;
  for (size_t i = 0; i < axis_list.size(); ++i) {
    axes.push_back(axis_of(axis_list[i], a));
    bool halved = kind == 4 && i + 1 == axis_list.size();
    int64_t kept = a.shape(axes.back());
    auto size = n[i] != 0 ? n[i] : (halved ? 2 * (kept - 1) : kept);
    if (size < 1) {
      fail(kInvalidArgument, "a transform of size ", size, " over axis ", axis_list[i], " is not possible");
    }
    sizes.push_back(mx::safe_cast(size));
  }
  if (axes.empty()) {
    fail(kInvalidArgument, "a transform needs at least one axis");
  }
  // The input is resized and made complex before the result is there.
  auto resized = a.shape();
  for (size_t i = 0; i < axes.size(); ++i) {
    resized[axes[i]] = sizes[static_cast<int>(i)];
  }
  check_shape(resized, 3 * sizeof(std::complex<float>));
  switch (kind) {
    case 1:
      return keep(mx::fft::fftn(a, sizes, axes));
    case 2:
      return keep(mx::fft::ifftn(a, sizes, axes));
    case 3:
      return keep(mx::fft::rfftn(a, sizes, axes));
    case 4:
      return keep(mx::fft::irfftn(a, sizes, axes));
    default:
      fail(kUnimplemented, "fft kind ", kind, " is not known");
  }
}

} // namespace mlxcel
