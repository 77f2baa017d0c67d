// Quantised weights.
#include "internal.h"

namespace mlxcel {

namespace {

struct Format {
  const char* name;
  bool affine;
};

// Which bits and group sizes exist; the library divides by them before it looks.
Format format_of(uint32_t mode, int32_t bits, int32_t group_size) {
  static constexpr const char* names[] = {"affine", "mxfp4", "mxfp8", "nvfp4"};
  if (mode < 1 || mode > 4) {
    fail(kUnimplemented, "quantisation mode ", mode, " is not known");
  }
  bool known = false;
  switch (mode) {
    case 1:
      known = ((bits >= 2 && bits <= 6) || bits == 8) &&
          (group_size == 32 || group_size == 64 || group_size == 128);
      break;
    case 2:
      known = bits == 4 && group_size == 32;
      break;
    case 3:
      known = bits == 8 && group_size == 32;
      break;
    case 4:
      known = bits == 4 && group_size == 16;
      break;
  }
  if (!known) {
    fail(
        kInvalidArgument, names[mode - 1], " has no form with ", bits, " bits and groups of ", group_size);
  }
  return {names[mode - 1], mode == 1};
}

Format check_weight(const QuantWeight& w) {
  auto format = format_of(w.mode, w.bits, w.group_size);
  auto& packed = w.weight.value;
  auto& scales = w.scales.value;
  if (packed.dtype() != mx::uint32 || packed.ndim() < 2 || packed.ndim() != scales.ndim()) {
    fail(
        kInvalidArgument,
        "packed weights are u32 with at least 2 dimensions and as many as the scales, found ",
        name_of(packed.dtype()),
        " ",
        text_of(packed.shape()),
        " and scales ",
        text_of(scales.shape()));
  }
  bool groups_fit = int64_t{packed.shape(-1)} * 32 == int64_t{scales.shape(-1)} * w.group_size * w.bits &&
      std::equal(packed.shape().begin(), packed.shape().end() - 1, scales.shape().begin());
  if (!groups_fit) {
    fail(
        kInvalidArgument,
        "packed weights ",
        text_of(packed.shape()),
        " and scales ",
        text_of(scales.shape()),
        " do not fit ",
        w.bits,
        " bits in groups of ",
        w.group_size);
  }
  if (format.affine != !w.biases.empty()) {
    fail(kInvalidArgument, format.name, format.affine ? " needs biases" : " has no biases");
  }
  if (format.affine != is_float(scales.dtype()) || (!format.affine && scales.dtype() != mx::uint8)) {
    fail(
        kInvalidArgument,
        format.name,
        " needs scales of type ",
        format.affine ? "float" : "u8",
        ", found ",
        name_of(scales.dtype()));
  }
  return format;
}

// On the CPU the library multiplies half types one by one: through f32 it is many times faster,
// and more exact.
mx::Dtype product_type(mx::Dtype x) {
  if (!is_float(x) || x == mx::float64) {
    fail(kInvalidArgument, "activations of type ", name_of(x), " cannot be multiplied with quantised weights");
  }
  return on_cpu() ? mx::float32 : x;
}

std::optional<mx::array> biases_of(const QuantWeight& w, mx::Dtype dtype) {
  auto biases = optional_of(w.biases);
  return biases ? std::optional(mx::astype(*biases, dtype)) : std::nullopt;
}

mx::array scales_of(const QuantWeight& w, const Format& format, mx::Dtype dtype) {
  return format.affine ? mx::astype(w.scales.value, dtype) : w.scales.value;
}

// A vector is a matrix of one row to the library.
mx::array as_matrix(const mx::array& x) {
  if (x.ndim() == 0) {
    fail(kInvalidArgument, "a scalar cannot be multiplied with a matrix");
  }
  return x.ndim() == 1 ? mx::expand_dims(x, 0) : x;
}

} // namespace

Three quantize(const Array& w, uint32_t mode, int32_t bits, int32_t group_size) {
  auto format = format_of(mode, bits, group_size);
  if (w.value.dtype() == mx::float64) {
    fail(kUnimplemented, "weights of f64 cannot be quantised");
  }
  auto parts = mx::quantize(w.value, group_size, bits, format.name);
  if (any_empty(w.value)) {
    for (auto& part : parts) {
      part = zeros_of(part);
    }
  }
  Three out{keep(parts.at(0)), keep(parts.at(1)), nullptr};
  if (format.affine) {
    out.third = keep(parts.at(2));
  }
  return out;
}

Out dequantize(const QuantWeight& w, uint32_t dtype) {
  auto type = dtype_of(dtype);
  auto format = check_weight(w);
  if (!is_float(type)) {
    fail(kInvalidArgument, "weights cannot be expanded to ", name_of(type));
  }
  // The library expands in the scales' type, so that has to be as exact as the result's.
  bool narrow = format.affine ? w.scales.value.dtype() == type : type != mx::float64;
  auto inner = narrow && type != mx::float64 ? type : mx::float32;
  if (any_empty(w.weight.value)) {
    auto shape = w.scales.value.shape();
    shape.back() *= w.group_size;
    return keep(mx::zeros(shape, type));
  }
  auto out = mx::dequantize(
      w.weight.value,
      scales_of(w, format, inner),
      format.affine ? biases_of(w, inner) : std::nullopt,
      w.group_size,
      w.bits,
      format.name,
      std::nullopt,
      inner);
  return keep(mx::astype(out, type));
}

Out quantized_matmul(const Array& activations, const QuantWeight& w, bool transpose) {
  auto format = check_weight(w);
  auto& x = activations.value;
  auto type = product_type(x.dtype());
  auto out = mx::quantized_matmul(
      mx::astype(as_matrix(x), type),
      w.weight.value,
      scales_of(w, format, type),
      biases_of(w, type),
      transpose,
      w.group_size,
      w.bits,
      format.name);
  if (any_empty(x, w.weight.value, out)) {
    out = zeros_of(out);
  }
  if (x.ndim() == 1) {
    out = mx::squeeze(out, static_cast<int>(out.ndim()) - 2);
  }
  return keep(mx::astype(out, x.dtype()));
}

Out gather_quantized_matmul(
    const Array& activations,
    const QuantWeight& w,
    bool transpose,
    Refs lhs,
    Refs rhs,
    bool sorted) {
  auto format = check_weight(w);
  auto& x = activations.value;
  auto type = product_type(x.dtype());
  auto out = mx::gather_qmm(
      mx::astype(as_matrix(x), type),
      w.weight.value,
      scales_of(w, format, type),
      biases_of(w, type),
      optional_of(lhs),
      optional_of(rhs),
      transpose,
      w.group_size,
      w.bits,
      format.name,
      std::nullopt,
      sorted);
  if (any_empty(x, w.weight.value, out)) {
    out = zeros_of(out);
  }
  return keep(mx::astype(out, x.dtype()));
}

} // namespace mlxcel
