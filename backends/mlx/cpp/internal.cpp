#include "internal.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <typeinfo>

namespace mlxcel {

namespace {

// Bytes above which a single tensor is refused; 0 is no limit. The library allocates through
// malloc and does not look at its answer on the CPU.
std::atomic<uint64_t> tensor_limit{0};

bool contains_any(const char* text, std::initializer_list<const char*> needles) {
  for (auto needle : needles) {
    if (std::strstr(text, needle) != nullptr) {
      return true;
    }
  }
  return false;
}

// Bytes of a tensor, or nothing when the number does not fit.
template <typename It>
std::optional<uint64_t> byte_count(It begin, It end, size_t item_bytes) {
  uint64_t bytes = item_bytes;
  bool empty = false;
  for (auto it = begin; it != end; ++it) {
    empty |= *it == 0;
    if (*it > 0 && __builtin_mul_overflow(bytes, static_cast<uint64_t>(*it), &bytes)) {
      bytes = std::numeric_limits<uint64_t>::max();
    }
  }
  if (empty) {
    return 0;
  }
  if (bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return std::nullopt;
  }
  return bytes;
}

template <typename It>
void check_size(It begin, It end, size_t item_bytes, bool allocates) {
  auto bytes = byte_count(begin, end, item_bytes);
  auto limit = tensor_limit.load(std::memory_order_relaxed);
  if (bytes && (!allocates || limit == 0 || *bytes <= limit)) {
    return;
  }
  mx::Shape shape;
  for (auto it = begin; it != end; ++it) {
    shape.push_back(static_cast<int32_t>(*it));
  }
  if (!bytes) {
    fail(kResourceExhausted, "a tensor of shape ", text_of(shape), " has more bytes than can be counted");
  }
  fail(
      kResourceExhausted,
      "a tensor of shape ",
      text_of(shape),
      " needs ",
      *bytes,
      " bytes, the limit is ",
      limit);
}

Out checked(mx::array&& a, bool allocates) {
  if (a.ndim() > kMaxDims) {
    fail(kInvalidArgument, "the result has ", a.ndim(), " dimensions, at most ", kMaxDims, " are possible");
  }
  check_size(a.shape().begin(), a.shape().end(), a.itemsize(), allocates);
  return std::make_unique<Array>(Array{std::move(a)});
}

} // namespace

Code classify(const std::exception& error) noexcept {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return kResourceExhausted;
  }
  auto text = error.what();
  if (contains_any(text, {"out of memory", "bad_alloc", "Unable to allocate", "Attempting to allocate", "[malloc"})) {
    return kResourceExhausted;
  }
  if (contains_any(
          text,
          {"not supported",
           "not yet support",
           "not implemented",
           "only supports",
           "Unsupported type",
           "NYI",
           "has no CPU implementation",
           "has no GPU implementation"})) {
    return kUnimplemented;
  }
  // invalid_argument, out_of_range, length_error and domain_error, and the overflow of a dimension.
  if (dynamic_cast<const std::logic_error*>(&error) != nullptr ||
      dynamic_cast<const std::overflow_error*>(&error) != nullptr) {
    return kInvalidArgument;
  }
  return kInternal;
}

void set_tensor_limit(uint64_t bytes) {
  tensor_limit.store(bytes, std::memory_order_relaxed);
}

uint64_t tensor_limit_bytes() {
  return tensor_limit.load(std::memory_order_relaxed);
}

bool on_cpu() {
  return mx::default_device().type == mx::Device::cpu;
}

Out keep(mx::array a) {
  return checked(std::move(a), true);
}

Out keep_view(mx::array a) {
  return checked(std::move(a), false);
}

void check_bytes(std::initializer_list<int64_t> dims, size_t item_bytes) {
  check_size(dims.begin(), dims.end(), item_bytes, true);
}

void check_shape(const mx::Shape& shape, size_t item_bytes) {
  check_size(shape.begin(), shape.end(), item_bytes, true);
}

mx::Dtype dtype_of(uint32_t code) {
  static constexpr mx::Dtype table[] = {
      mx::bool_, mx::uint8, mx::uint16, mx::uint32, mx::uint64, mx::int8, mx::int16,
      mx::int32, mx::int64, mx::float16, mx::bfloat16, mx::float32, mx::float64, mx::complex64};
  if (code < 1 || code > std::size(table)) {
    fail(kInvalidArgument, "dtype code ", code, " is not known");
  }
  auto dtype = table[code - 1];
  if (dtype == mx::float64 && !on_cpu()) {
    fail(kUnimplemented, "f64 is not supported by this device");
  }
  return dtype;
}

uint32_t code_of(mx::Dtype dtype) {
  switch (dtype.val()) {
    case mx::Dtype::Val::bool_:
      return 1;
    case mx::Dtype::Val::uint8:
      return 2;
    case mx::Dtype::Val::uint16:
      return 3;
    case mx::Dtype::Val::uint32:
      return 4;
    case mx::Dtype::Val::uint64:
      return 5;
    case mx::Dtype::Val::int8:
      return 6;
    case mx::Dtype::Val::int16:
      return 7;
    case mx::Dtype::Val::int32:
      return 8;
    case mx::Dtype::Val::int64:
      return 9;
    case mx::Dtype::Val::float16:
      return 10;
    case mx::Dtype::Val::bfloat16:
      return 11;
    case mx::Dtype::Val::float32:
      return 12;
    case mx::Dtype::Val::float64:
      return 13;
    case mx::Dtype::Val::complex64:
      return 14;
  }
  return 0;
}

const char* name_of(mx::Dtype dtype) {
  static constexpr const char* names[] = {
      "unknown", "bool", "u8", "u16", "u32", "u64", "i8", "i16",
      "i32", "i64", "f16", "bf16", "f32", "f64", "c64"};
  return names[code_of(dtype)];
}

mx::Shape shape_of(Dims dims) {
  mx::Shape shape;
  for (auto dim : dims) {
    shape.push_back(mx::safe_cast(dim));
  }
  return shape;
}

std::vector<int> ints_of(Dims values) {
  std::vector<int> out;
  out.reserve(values.size());
  for (auto value : values) {
    out.push_back(mx::safe_cast(value));
  }
  return out;
}

std::vector<int> ints_of(Axes values) {
  return {values.begin(), values.end()};
}

std::vector<mx::array> arrays_of(Refs refs) {
  std::vector<mx::array> out;
  out.reserve(refs.size());
  for (auto& ref : refs) {
    out.push_back(ref.array.value);
  }
  return out;
}

std::optional<mx::array> optional_of(Refs refs) {
  if (refs.empty()) {
    return std::nullopt;
  }
  return refs.front().array.value;
}

int axis_of(int32_t axis, const mx::array& a) {
  auto ndim = static_cast<int32_t>(a.ndim());
  auto found = axis < 0 ? axis + ndim : axis;
  if (found < 0 || found >= ndim) {
    fail(kInvalidArgument, "axis ", axis, " does not exist in shape ", text_of(a.shape()));
  }
  return found;
}

std::string text_of(const mx::Shape& shape) {
  std::string text = "[";
  for (auto dim : shape) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  }
  return text + "]";
}

mx::array constant(double value, mx::Dtype dtype) {
  if (dtype == mx::complex64) {
    return mx::array(std::complex<float>(static_cast<float>(value), 0.0f));
  }
  if (dtype == mx::bool_) {
    return mx::array(value != 0.0);
  }
  if (!is_integer(dtype)) {
    return mx::array(value, dtype);
  }
  // Powers of two are exact, so the comparison with the upper end is too.
  int bits = 8 * dtype.size();
  double low = is_signed(dtype) ? -std::ldexp(1.0, bits - 1) : 0.0;
  double high = std::ldexp(1.0, is_signed(dtype) ? bits - 1 : bits);
  if (!(value >= low && value < high) || value != std::trunc(value)) {
    fail(kInvalidArgument, value, " is not a value of type ", name_of(dtype));
  }
  if (is_signed(dtype)) {
    return mx::array(static_cast<int64_t>(value), dtype);
  }
  return mx::array(static_cast<uint64_t>(value), dtype);
}

} // namespace mlxcel
