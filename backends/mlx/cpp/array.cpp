// Creation, reading and reinterpretation.
#include <cstring>

#include "internal.h"
#include "mlx/allocator.h"
#include "mlx/transforms.h"
#include "stream.h"

namespace mlxcel {

namespace {

using ReleaseFn = void (*)(void*);

// The host's side of borrowed memory. Once it is taken over, the end of the last copy releases it; a
// failure before that leaves it with the host.
struct Owner {
  ReleaseFn release;
  void* owner;
  bool taken = false;

  Owner(size_t release, size_t owner)
      : release(reinterpret_cast<ReleaseFn>(release)), owner(reinterpret_cast<void*>(owner)) {}
  Owner(const Owner&) = delete;
  ~Owner() {
    if (taken) {
      release(owner);
    }
  }
};

// The CPU allocator puts a size in front of every buffer and its buffers point to that size. An
// array over foreign memory is possible without a copy when this is so; the size in front of it is
// read when the library considers reusing the buffer, and any value is a right answer there, since
// foreign memory is never reused. Where the library offers `make_buffer`, that is used instead.
bool has_size_in_front() {
  static const bool found = [] {
    if (!on_cpu() || mx::is_available(mx::Device::gpu)) {
      return false;
    }
    auto data = mx::allocator::malloc(24);
    auto buffer = data.buffer();
    auto raw = static_cast<char*>(buffer.raw_ptr());
    if (raw != static_cast<char*>(buffer.ptr()) + sizeof(size_t)) {
      return false;
    }
    // A buffer that was freed before and is given out again may be larger than what was asked for.
    auto size = *static_cast<size_t*>(buffer.ptr());
    return size >= 24 && size < (size_t{1} << 20);
  }();
  return found;
}

// The word in front of `data` must be readable, which it is when it lies on the same page.
bool can_borrow(const uint8_t* data, mx::Dtype dtype) {
  auto address = reinterpret_cast<uintptr_t>(data);
  return address % dtype.size() == 0 && address % 4096 >= sizeof(size_t);
}

} // namespace

ArrayInfo info(const Array& a) {
  ArrayInfo out{};
  out.dtype = code_of(a.value.dtype());
  out.ndim = static_cast<uint32_t>(a.value.ndim());
  for (size_t i = 0; i < a.value.ndim() && i < out.dims.size(); ++i) {
    out.dims[i] = a.value.shape(static_cast<int>(i));
  }
  return out;
}

Out from_host_copy(const uint8_t* data, size_t len, uint32_t dtype, Dims dims) {
  auto type = dtype_of(dtype);
  auto shape = shape_of(dims);
  check_bytes({static_cast<int64_t>(len)}, 1);
  auto memory = mx::allocator::malloc(len);
  auto raw = memory.buffer().raw_ptr();
  if (raw == nullptr && len > 0) {
    fail(kResourceExhausted, "no memory for ", len, " bytes");
  }
  if (len > 0) {
    std::memcpy(raw, data, len);
  }
  return keep(mx::array(std::move(memory), std::move(shape), type));
}

Out from_host_borrow(const uint8_t* data, uint32_t dtype, Dims dims, size_t release, size_t owner) {
  auto held = std::make_shared<Owner>(release, owner);
  auto type = dtype_of(dtype);
  auto shape = shape_of(dims);
  auto address = const_cast<uint8_t*>(data);
  Out out;
  if (has_size_in_front() && can_borrow(data, type)) {
    mx::allocator::Buffer buffer(address - sizeof(size_t));
    mx::allocator::Data memory(buffer, [held](mx::allocator::Buffer) {});
    out = keep_view(mx::array(std::move(memory), std::move(shape), type));
  } else {
    out = keep(mx::array(static_cast<void*>(address), std::move(shape), type, [held](void*) {}));
  }
  held->taken = true;
  return out;
}

Out full(double value, uint32_t dtype, Dims dims) {
  auto type = dtype_of(dtype);
  auto shape = shape_of(dims);
  return keep(mx::full(std::move(shape), constant(value, type), type));
}

Out arange(double start, double stop, double step, uint32_t dtype) {
  return keep(mx::arange(start, stop, step, dtype_of(dtype)));
}

Out eye(int64_t n, int64_t m, int64_t k, uint32_t dtype) {
  auto type = dtype_of(dtype);
  auto rows = mx::safe_cast(n);
  auto columns = mx::safe_cast(m);
  check_bytes({rows, columns}, type.size());
  // Diagonals outside the matrix are all alike.
  auto diagonal = std::clamp<int64_t>(k, -int64_t{rows}, columns);
  return keep(mx::eye(rows, columns, static_cast<int>(diagonal), type));
}

void read(const Array& a, uint8_t* dst, size_t len) {
  auto source = a.value;
  if (source.nbytes() != len) {
    fail(kInvalidArgument, "the tensor has ", source.nbytes(), " bytes, the destination ", len);
  }
  if (len == 0) {
    return;
  }
  submit_held();
  source.eval();
  if (!source.flags().row_contiguous) {
    source = mx::contiguous(source);
    source.eval();
  }
  std::memcpy(dst, source.data<char>(), len);
}

Out cast(const Array& a, uint32_t dtype) {
  return keep(mx::astype(a.value, dtype_of(dtype)));
}

Out view(const Array& a, uint32_t dtype) {
  return keep(mx::view(a.value, dtype_of(dtype)));
}

} // namespace mlxcel
