// Memory that becomes an array only when the library has to see it.
#include "blocks.h"

#include "internal.h"
#include "mlx/allocator.h"
#include "mlx/memory.h"
#include "mlxcel-backend-mlx/src/blocks.rs.h"

namespace mlxcel {

NewBlock new_block(size_t bytes) {
  auto& allocator = mx::allocator::allocator();
  auto buffer = allocator.malloc(bytes);
  auto data = reinterpret_cast<size_t>(buffer.raw_ptr());
  return {reinterpret_cast<size_t>(buffer.ptr()), data, data == 0 ? 0 : allocator.size(buffer)};
}

void free_block(size_t buffer) {
  mx::allocator::allocator().free(mx::allocator::Buffer(reinterpret_cast<void*>(buffer)));
}

Out adopt_block(size_t buffer, size_t bytes) {
  mx::Shape shape{mx::safe_cast(static_cast<int64_t>(bytes))};
  auto free = [](mx::allocator::Buffer memory) { mx::allocator::allocator().free(memory); };
  mx::allocator::Data memory(mx::allocator::Buffer(reinterpret_cast<void*>(buffer)), free);
  return keep_view(mx::array(std::move(memory), std::move(shape), mx::uint8));
}

Out array_in_block(const Array& base, size_t offset_bytes, uint32_t dtype, Dims dims) {
  mx::array out(shape_of(dims), dtype_of(dtype), nullptr, {});
  mx::Strides strides(out.ndim());
  int64_t step = 1;
  auto wide = 0;
  for (size_t i = out.ndim(); i-- > 0;) {
    auto dim = out.shape(static_cast<int>(i));
    strides[i] = step;
    step *= dim;
    wide += dim > 1;
  }
  mx::array::Flags flags{};
  flags.contiguous = true;
  flags.row_contiguous = true;
  flags.col_contiguous = wide <= 1;
  auto offset = static_cast<int64_t>(offset_bytes / out.itemsize());
  out.copy_shared_buffer(base.value, strides, flags, out.size(), offset);
  out.set_status(mx::array::Status::available);
  return keep_view(out);
}

bool has_room(uint64_t wanted) {
  uint64_t limit = mx::get_memory_limit();
  uint64_t used = mx::get_active_memory();
  auto tensor = tensor_limit_bytes();
  return (limit == 0 || (used <= limit && wanted <= limit - used)) && (tensor == 0 || wanted <= tensor);
}

} // namespace mlxcel
