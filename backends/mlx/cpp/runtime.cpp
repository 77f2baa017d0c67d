// Devices, streams, evaluation and memory.
#include <chrono>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

#include "internal.h"
#include "mlx/device.h"
#include "mlx/memory.h"
#include "mlx/stream.h"
#include "mlx/transforms.h"
#include "mlx/version.h"
#include "stream.h"

namespace mlxcel {

namespace {

mx::Device device_of(uint32_t kind, int32_t index) {
  return mx::Device(kind == 0 ? mx::Device::cpu : mx::Device::gpu, index);
}

size_t size_of_limit(uint64_t bytes) {
  // The library adds to limits; the upper half is kept free so that no sum can wrap.
  constexpr uint64_t kTop = std::numeric_limits<int64_t>::max();
  return static_cast<size_t>(std::min(bytes, kTop));
}

} // namespace

rust::String library_version() {
  return rust::String::lossy(mx::version());
}

rust::String header_version() {
  return rust::String::lossy(
      std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
      std::to_string(MLX_VERSION_PATCH));
}

int32_t device_count(uint32_t kind) {
  return mx::device_count(device_of(kind, 0).type);
}

rust::Vec<DeviceFact> device_facts(uint32_t kind, int32_t index) {
  rust::Vec<DeviceFact> facts;
  for (auto& [key, value] : mx::device_info(device_of(kind, index))) {
    DeviceFact fact{rust::String::lossy(key), rust::String(), 0};
    if (auto text = std::get_if<std::string>(&value)) {
      fact.text = rust::String::lossy(*text);
    } else {
      fact.number = std::get<size_t>(value);
    }
    facts.push_back(std::move(fact));
  }
#ifdef __APPLE__
  if (kind == 0) {
    uint64_t bytes = 0;
    size_t length = sizeof(bytes);
    if (sysctlbyname("hw.memsize", &bytes, &length, nullptr, 0) == 0) {
      facts.push_back(DeviceFact{rust::String("total_memory"), rust::String(), bytes});
    }
  }
#endif
  return facts;
}

void open_device(uint32_t kind, int32_t index) {
  auto device = device_of(kind, index);
  if (!mx::is_available(device)) {
    fail(kFailedPrecondition, "this MLX has no such device");
  }
  mx::set_default_device(device);
  // Streams belong to threads: this makes the one of the backend thread.
  mx::default_stream(device);
  mx::reset_peak_memory();
}

void close_device() {
  mx::synchronize();
  mx::clear_cache();
}

MemoryFigures memory_figures() {
  MemoryFigures figures;
  figures.active = mx::get_active_memory();
  // A reset sets the peak to zero, not to what is in use.
  figures.peak = std::max<uint64_t>(mx::get_peak_memory(), figures.active);
  figures.cache = mx::get_cache_memory();
  uint64_t limit = mx::get_memory_limit();
  figures.limit = limit >= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ? 0 : limit;
  return figures;
}

void set_memory_limit(uint64_t bytes) {
  mx::set_memory_limit(size_of_limit(bytes));
}

void set_cache_limit(uint64_t bytes) {
  mx::set_cache_limit(size_of_limit(bytes));
}

void set_wired_limit(uint64_t bytes) {
  mx::set_wired_limit(size_of_limit(bytes));
}

void reset_peak_memory() {
  mx::reset_peak_memory();
}

void clear_cache() {
  mx::clear_cache();
#ifdef __GLIBC__
  // MLX frees its buffers to the C library's heap, which keeps what lies below a live allocation:
  // whole pages in between go back to the system only when they are asked for.
  malloc_trim(0);
#endif
}

void synchronize() {
  submit_held();
  mx::synchronize();
}

void eval(Refs arrays, bool wait) {
  submit_held();
  if (wait) {
    mx::eval(arrays_of(arrays));
  } else {
    mx::async_eval(arrays_of(arrays));
  }
}

std::unique_ptr<Memo> new_memo() {
  return std::make_unique<Memo>();
}

void forget(Memo& memo) {
  memo.clear();
}

double direct_add_ns(uint64_t iterations) {
  auto a = mx::array(1.0f);
  auto b = mx::array(2.0f);
  auto start = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < iterations; ++i) {
    auto out = mx::add(a, b);
  }
  std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / static_cast<double>(std::max<uint64_t>(iterations, 1));
}

} // namespace mlxcel
