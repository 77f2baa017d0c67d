// Shared by the shim's source files: conversions, result checks and the dtype rules of the operation table.
#pragma once

#include <optional>
#include <vector>

#include "mlx/ops.h"
#include "mlx/utils.h"
#include "mlxcel-backend-mlx/src/bridge.rs.h"

namespace mlxcel {

namespace mx = mlx::core;

// Most dimensions a tensor may have at the boundary.
constexpr size_t kMaxDims = 8;

// Whether operations of this thread run on the CPU.
bool on_cpu();

// Hands a result to Rust. `keep` is for results that get memory of their own, `keep_view` for those
// that share it; both refuse what the boundary cannot express.
Out keep(mx::array a);
Out keep_view(mx::array a);

// Refuses an intermediate result that cannot be allocated, before it is built.
void check_bytes(std::initializer_list<int64_t> dims, size_t item_bytes);
void check_shape(const mx::Shape& shape, size_t item_bytes);
// Bytes above which a single tensor is refused; 0 is no limit.
uint64_t tensor_limit_bytes();

mx::Dtype dtype_of(uint32_t code);
uint32_t code_of(mx::Dtype dtype);
const char* name_of(mx::Dtype dtype);

mx::Shape shape_of(Dims dims);
std::vector<int> ints_of(Dims values);
std::vector<int> ints_of(Axes values);
std::vector<mx::array> arrays_of(Refs refs);
std::optional<mx::array> optional_of(Refs refs);
int axis_of(int32_t axis, const mx::array& a);
std::string text_of(const mx::Shape& shape);

inline bool is_float(mx::Dtype dtype) {
  return mx::issubdtype(dtype, mx::floating);
}
inline bool is_half(mx::Dtype dtype) {
  return dtype == mx::float16 || dtype == mx::bfloat16;
}
inline bool is_integer(mx::Dtype dtype) {
  return mx::issubdtype(dtype, mx::integer);
}
inline bool is_signed(mx::Dtype dtype) {
  return mx::issubdtype(dtype, mx::signedinteger);
}

// A constant of `dtype`; refuses values the type cannot hold.
mx::array constant(double value, mx::Dtype dtype);

// The library divides by sizes that may be 0 in products and scatters: with an empty input nothing
// is left to compute, and `out`, which was built for its checks and its shape, is not evaluated.
template <typename... Inputs>
bool any_empty(const Inputs&... inputs) {
  return ((inputs.size() == 0) || ...);
}
inline mx::array zeros_of(const mx::array& out) {
  return mx::zeros(out.shape(), out.dtype());
}

// Computes `f` in f32 when `a` is of a half type or no float, and gives the result `a`'s half type.
template <typename F>
mx::array in_f32(const mx::array& a, F f) {
  auto dtype = a.dtype();
  if (is_half(dtype)) {
    return mx::astype(f(mx::astype(a, mx::float32)), dtype);
  }
  if (!mx::issubdtype(dtype, mx::inexact)) {
    return f(mx::astype(a, mx::float32));
  }
  return f(a);
}

// attention.cpp: softmax(q k^T * scale ..) v over 4-dimensional inputs. `mask` is bool or additive.
struct AttentionInputs {
  mx::array q;
  mx::array k;
  mx::array v;
  float scale;
  float softcap;
  bool causal;
  std::optional<mx::array> mask;
  std::optional<mx::array> sinks;
};
mx::array attend(const AttentionInputs& in);

} // namespace mlxcel
