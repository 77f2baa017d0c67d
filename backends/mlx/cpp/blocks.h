// What the bridge of src/blocks.rs calls: memory of the host's allocator that no array has yet.
#pragma once

#include "shim.h"

namespace mlxcel {

// Defined by the bridge.
struct NewBlock;

// Memory of at least so many bytes; its address is 0 when there is none.
NewBlock new_block(size_t bytes);
void free_block(size_t buffer);
// An array of bytes that owns the block from now on.
Out adopt_block(size_t buffer, size_t bytes);
// A row-major array over a part of an adopted block.
Out array_in_block(const Array& base, size_t offset_bytes, uint32_t dtype, Dims dims);
// Whether so many bytes may be taken: neither the limit of memory nor that of a tensor is in the way.
bool has_room(uint64_t wanted);

} // namespace mlxcel
