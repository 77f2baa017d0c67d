// What the bridge (src/bridge.rs) calls: one function per operation, over arrays that Rust owns.
#pragma once

#include <cstdint>
#include <memory>

#include "error.h"
#include "memo.h"
#include "mlx/array.h"
#include "rust/cxx.h"

namespace mlxcel {

struct Array {
  mlx::core::array value;
};
using Out = std::unique_ptr<Array>;

// Defined by the bridge.
struct Ref;
struct ArrayInfo;
struct MemoryFigures;
struct DeviceFact;
struct SliceSpec;
struct ConvSpec;
struct QuantWeight;
struct RopeSpec;
struct AttentionSpec;
struct PagedSpec;
struct StateRowsSpec;
struct ShortConvSpec;
struct GatedDeltaSpec;
struct SparseIndexSpec;
struct RandomSpec;
struct Three;
struct RawArray;

using Dims = rust::Slice<const int64_t>;
using Axes = rust::Slice<const int32_t>;
using Refs = rust::Slice<const Ref>;

// runtime.cpp
rust::String library_version();
rust::String header_version();
int32_t device_count(uint32_t kind);
rust::Vec<DeviceFact> device_facts(uint32_t kind, int32_t index);
void open_device(uint32_t kind, int32_t index);
void close_device();
MemoryFigures memory_figures();
void set_memory_limit(uint64_t bytes);
void set_cache_limit(uint64_t bytes);
void set_wired_limit(uint64_t bytes);
void set_tensor_limit(uint64_t bytes);
void reset_peak_memory();
void clear_cache();
void synchronize();
void eval(Refs arrays, bool wait);
std::unique_ptr<Memo> new_memo();
void forget(Memo& memo);
double direct_add_ns(uint64_t iterations);

// native.cpp
bool is_computed(const Array& a);
RawArray raw_array(const Array& a);
Out new_array(uint32_t dtype, Dims dims);
Out share_array(const Array& a, Dims dims);

// array.cpp
ArrayInfo info(const Array& a);
Out from_host_copy(const uint8_t* data, size_t len, uint32_t dtype, Dims dims);
Out from_host_borrow(const uint8_t* data, uint32_t dtype, Dims dims, size_t release, size_t owner);
Out full(double value, uint32_t dtype, Dims dims);
Out arange(double start, double stop, double step, uint32_t dtype);
Out eye(int64_t n, int64_t m, int64_t k, uint32_t dtype);
void read(const Array& a, uint8_t* dst, size_t len);
Out cast(const Array& a, uint32_t dtype);
Out view(const Array& a, uint32_t dtype);

// elementwise.cpp
Out unary(uint32_t kind, const Array& a);
Out binary(uint32_t kind, const Array& a, const Array& b);
Out binary_scalar(uint32_t kind, const Array& a, double scalar, bool scalar_first);
Out select(const Array& cond, const Array& a, const Array& b);
Out clip(const Array& a, double low, double high);
Out glu(uint32_t kind, const Array& gate, const Array& up);

// reduction.cpp
Out reduce(uint32_t kind, const Array& a, Axes axes, bool keep_dims);
Out arg_reduce(uint32_t kind, const Array& a, int32_t axis, bool keep_dims);
Out cumulative(uint32_t kind, const Array& a, int32_t axis, bool reverse, bool inclusive);
Out order(uint32_t kind, const Array& a, int64_t k, int32_t axis);
Out softmax(const Array& a, int32_t axis);

// shape.cpp
Out reshape(const Array& a, Dims dims);
Out transpose(const Array& a, Axes axes);
Out broadcast_to(const Array& a, Dims dims);
Out concat(Refs arrays, int32_t axis);
Out slice(const Array& a, const SliceSpec& spec);
Out slice_update(const Array& a, const Array& update, const SliceSpec& spec);
Out pad(const Array& a, Dims low, Dims high, double value);
Out repeat(const Array& a, int64_t n, int32_t axis);
Out tile(const Array& a, Dims reps);
Out contiguous(const Array& a);

// indexing.cpp
Out take(const Array& a, const Array& indices, int32_t axis);
Out take_along(const Array& a, const Array& indices, int32_t axis);
Out put_along(const Array& a, const Array& indices, const Array& values, int32_t axis);
Out gather(const Array& a, Refs indices, Axes axes, Dims slice_sizes);
Out scatter(uint32_t kind, const Array& a, const Array& updates, Refs indices, Axes axes);

// product.cpp
Out matmul(const Array& a, const Array& b);
Out addmm(const Array& c, const Array& a, const Array& b, float alpha, float beta);
Out gather_matmul(const Array& a, const Array& b, Refs lhs, Refs rhs, bool sorted);
Out conv(const Array& x, const Array& w, const ConvSpec& spec);
Out fft(uint32_t kind, const Array& a, Dims n, Axes axes);

// quantized.cpp
Three quantize(const Array& w, uint32_t mode, int32_t bits, int32_t group_size);
Out dequantize(const QuantWeight& w, uint32_t dtype);
Out quantized_matmul(const Array& x, const QuantWeight& w, bool transpose);
Out gather_quantized_matmul(
    const Array& x,
    const QuantWeight& w,
    bool transpose,
    Refs lhs,
    Refs rhs,
    bool sorted);

// layer.cpp
Out rms_norm(const Array& x, Refs w, float eps);
Out layer_norm(const Array& x, Refs w, Refs b, float eps);
Out rope(const RopeSpec& spec, Memo& memo);

// attention.cpp, paged.cpp
Out attention(const AttentionSpec& spec);
Three paged_attention(const PagedSpec& spec, Memo& memo);

// recurrent.cpp, selection.cpp: the third result is null
Three short_conv(const ShortConvSpec& spec);
Three gated_delta(const GatedDeltaSpec& spec);
Three sparse_index(const SparseIndexSpec& spec);

// random.cpp
Out random_key(uint64_t seed);
Out random_split(const Array& key, int64_t n);
Out random(const RandomSpec& spec);

} // namespace mlxcel
