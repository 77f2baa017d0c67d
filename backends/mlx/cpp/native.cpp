// Direct access to the memory of computed arrays, for backends with kernels of their own.
#include "internal.h"
#include "mlx/allocator.h"
#include "mlx/transforms.h"

namespace mlxcel {

bool is_computed(const Array& a) {
  return a.value.is_available();
}

RawArray raw_array(const Array& a) {
  auto value = a.value;
  if (!value.is_available()) {
    value.eval();
  }
  RawArray out{};
  out.dtype = code_of(value.dtype());
  out.ndim = static_cast<uint32_t>(value.ndim());
  out.row_contiguous = value.flags().row_contiguous;
  out.data = value.size() == 0 ? 0 : reinterpret_cast<size_t>(value.data<char>());
  for (size_t i = 0; i < value.ndim() && i < out.dims.size(); ++i) {
    out.dims[i] = value.shape(static_cast<int>(i));
    out.strides[i] = value.strides(static_cast<int>(i));
  }
  return out;
}

Out new_array(uint32_t dtype, Dims dims) {
  auto type = dtype_of(dtype);
  auto shape = shape_of(dims);
  size_t bytes = type.size();
  for (auto dim : dims) {
    bytes *= static_cast<size_t>(dim);
  }
  check_bytes({static_cast<int64_t>(bytes)}, 1);
  auto memory = mx::allocator::malloc(bytes);
  if (memory.buffer().raw_ptr() == nullptr && bytes > 0) {
    fail(kResourceExhausted, "no memory for ", bytes, " bytes");
  }
  return keep(mx::array(std::move(memory), std::move(shape), type));
}

Out share_array(const Array& a, Dims dims) {
  auto shape = shape_of(dims);
  const auto& source = a.value;
  mx::array out(std::move(shape), source.dtype(), nullptr, {});
  mx::Strides strides(out.ndim());
  int64_t step = 1;
  for (size_t i = out.ndim(); i-- > 0;) {
    strides[i] = step;
    step *= out.shape(static_cast<int>(i));
  }
  auto flags = source.flags();
  flags.row_contiguous = true;
  auto wide = 0;
  for (auto dim : out.shape()) {
    wide += dim > 1;
  }
  flags.col_contiguous = wide <= 1;
  flags.contiguous = true;
  out.copy_shared_buffer(source, strides, flags, source.data_size());
  out.set_status(mx::array::Status::available);
  return keep_view(out);
}

} // namespace mlxcel
