// Arrays in the memory of a CUDA device, for kernels that work on MLX's own stream.
//
// Both kinds of operation are ordered by that one stream: MLX's are submitted when an array is evaluated, ours when they are
// called. Only names that the library exports are used; they are weak here, because the CPU's build of it lacks them.
#include "stream.h"

#include <cstdlib>
#include <functional>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "internal.h"
#include "mlx/allocator.h"
#include "mlx/stream.h"
#include "mlx/transforms.h"
#include "mlxcel-backend-mlx/src/stream.rs.h"

namespace mlx::core::cu {

class CommandEncoder {
 public:
  [[gnu::weak]] void add_completed_handler(std::function<void()> task);
  [[gnu::weak]] void commit();
};

[[gnu::weak]] CommandEncoder& get_command_encoder(Stream s);

} // namespace mlx::core::cu

namespace mlxcel {

namespace {

// As mlx/backend/cuda/allocator.h and device.h of the pinned version have them; `open` compares the versions.
struct CudaBuffer {
  void* data;
  size_t size;
  int device; // -1 when it is managed memory
};
struct EncoderHead {
  void* device;
  void* stream;
};

struct Block : CudaBuffer {
  void (*release)(void* owner, void* data, size_t bytes, bool moved);
  void* owner;
};

// Buffers that are ours, so that others can be told from them.
class Known {
 public:
  void add(const void* buffer) {
    std::lock_guard lock(mutex_);
    buffers_.insert(buffer);
  }
  void remove(const void* buffer) {
    std::lock_guard lock(mutex_);
    buffers_.erase(buffer);
  }
  bool has(const void* buffer) {
    std::lock_guard lock(mutex_);
    return buffers_.contains(buffer);
  }

 private:
  std::mutex mutex_;
  std::unordered_set<const void*> buffers_;
};

Known& known() {
  static auto* found = new Known();
  return *found;
}

std::vector<std::shared_ptr<mx::array::Data>>& held() {
  static thread_local std::vector<std::shared_ptr<mx::array::Data>> arrays;
  return arrays;
}

mx::cu::CommandEncoder& encoder() {
  return mx::cu::get_command_encoder(mx::default_stream(mx::default_device()));
}

} // namespace

void submit_held() {
  submit_held_launches();
}

int32_t device_index() {
  return mx::default_device().index;
}

size_t device_stream() {
  if (on_cpu() || &mx::cu::get_command_encoder == nullptr) {
    return 0;
  }
  // Products of f32 keep all its digits, unless the user asks otherwise; the library reads this when it first multiplies.
  setenv("MLX_ENABLE_TF32", "0", 0);
  return reinterpret_cast<size_t>(reinterpret_cast<EncoderHead&>(encoder()).stream);
}

DeviceView device_view(const Array& a) {
  auto value = a.value;
  // Nothing is to be computed of an empty array, and the library submits kernels without blocks for it, which fails.
  bool is_empty = value.size() == 0;
  if (!is_empty && value.status() == mx::array::Status::unscheduled) {
    submit_held();
    mx::async_eval({value});
  }
  DeviceView out{};
  out.dtype = code_of(value.dtype());
  out.ndim = static_cast<uint32_t>(value.ndim());
  out.row_contiguous = !is_empty && value.flags().row_contiguous;
  for (size_t i = 0; i < value.ndim() && i < out.dims.size(); ++i) {
    out.dims[i] = value.shape(static_cast<int>(i));
    out.strides[i] = is_empty ? 0 : value.strides(static_cast<int>(i));
  }
  if (is_empty) {
    return out;
  }
  if (value.data_shared_ptr() == nullptr) {
    // Operations that the library runs on the processor have no memory before they ran.
    submit_held();
    value.eval();
  }
  auto buffer = static_cast<CudaBuffer*>(value.buffer().ptr());
  if (buffer != nullptr) {
    out.address = reinterpret_cast<size_t>(buffer->data) + static_cast<size_t>(value.offset());
    out.is_foreign = !known().has(buffer);
  }
  return out;
}

Out wrap_block(const DeviceBlock& block, uint32_t dtype, Dims dims) {
  auto type = dtype_of(dtype);
  auto shape = shape_of(dims);
  auto own = new Block{
      {reinterpret_cast<void*>(block.address), block.bytes, block.device},
      reinterpret_cast<void (*)(void*, void*, size_t, bool)>(block.release),
      reinterpret_cast<void*>(block.owner)};
  known().add(own);
  auto free = [](mx::allocator::Buffer buffer) {
    auto own = static_cast<Block*>(buffer.ptr());
    known().remove(own);
    own->release(own->owner, own->data, own->size, own->device < 0);
    delete own;
  };
  mx::allocator::Data memory(mx::allocator::Buffer(own), free);
  return keep_view(mx::array(std::move(memory), std::move(shape), type));
}

void hold(const Array& a) {
  if (a.value.size() > 0) {
    held().push_back(a.value.data_shared_ptr());
  }
}

void let_go_when_done() {
  if (held().empty()) {
    return;
  }
  submit_held();
  auto& to = encoder();
  to.add_completed_handler([arrays = std::exchange(held(), {})]() {});
  to.commit();
}

} // namespace mlxcel
