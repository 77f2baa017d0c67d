// What the bridge of src/stream.rs calls: arrays in the memory of a CUDA device, for kernels that work on MLX's own stream.
#pragma once

#include "shim.h"

namespace mlxcel {

// Defined by the bridge.
struct DeviceView;
struct DeviceBlock;

// The device that is open.
int32_t device_index();
// The CUDA stream of this thread; 0 where this MLX has none.
size_t device_stream();
// Submits what is left to compute, and says where the elements are or will be in stream order.
DeviceView device_view(const Array& a);
// An array over memory that is not MLX's. What was submitted before writes it, or has to be submitted before it is used.
Out wrap_block(const DeviceBlock& block, uint32_t dtype, Dims dims);
// Keeps an array's memory; `let_go_when_done` lets go of all that is kept as soon as what was submitted before it is done.
void hold(const Array& a);
void let_go_when_done();
// Has a backend submit what it holds back on this thread; called before the library submits or waits.
void submit_held();

} // namespace mlxcel
