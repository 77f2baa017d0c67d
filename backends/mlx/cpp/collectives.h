// What the bridge of src/collectives.rs calls: MLX's own layer for groups of processes.
#pragma once

#include "shim.h"

namespace mlxcel {

// Whether this build of MLX has a transport of that name.
bool has_transport(rust::Str name);
// Joins the group of this process over TCP. `hosts` is a file with a list of lists of `host:port`, one for each rank.
void join_ring(rust::Str hosts, uint32_t rank);
// The same over NCCL; rank 0 listens at `host` and `port`.
void join_nccl(rust::Str host, rust::Str port, uint32_t rank, uint32_t size);
// 0 before a group was joined.
uint32_t group_rank();
uint32_t group_size();
Out all_sum(const Array& a);
Out all_gather(const Array& a);

} // namespace mlxcel
