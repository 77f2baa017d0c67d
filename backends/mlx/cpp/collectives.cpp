// Groups of processes: MLX's distributed layer, whose settings it reads from the environment.
#include "collectives.h"

#include <cstdlib>
#include <mutex>
#include <optional>

#include "internal.h"
#include "mlx/distributed/distributed.h"
#include "mlx/distributed/ops.h"
#include "mlxcel-backend-mlx/src/collectives.rs.h"

namespace mlxcel {

namespace {

namespace dist = mx::distributed;

// One for the process, as the library has it. Never destroyed: its threads may wait for a rank that is gone.
std::optional<dist::Group>& group() {
  static auto* joined = new std::optional<dist::Group>();
  return *joined;
}

void set(const char* name, const std::string& value) {
  if (setenv(name, value.c_str(), 1) != 0) {
    fail(kInternal, "cannot set ", name);
  }
}

void join(const char* transport) {
  group() = dist::init(true, transport);
}

const dist::Group& joined() {
  if (!group()) {
    fail(kFailedPrecondition, "this process has joined no group");
  }
  return *group();
}

} // namespace

bool has_transport(rust::Str name) {
  return dist::is_available(std::string(name));
}

void join_ring(rust::Str hosts, uint32_t rank) {
  set("MLX_HOSTFILE", std::string(hosts));
  set("MLX_RANK", std::to_string(rank));
  join("ring");
}

void join_nccl(rust::Str host, rust::Str port, uint32_t rank, uint32_t size) {
  set("NCCL_HOST_IP", std::string(host));
  set("NCCL_PORT", std::string(port));
  set("MLX_RANK", std::to_string(rank));
  set("MLX_WORLD_SIZE", std::to_string(size));
  join("nccl");
}

uint32_t group_rank() {
  return group() ? static_cast<uint32_t>(group()->rank()) : 0;
}

uint32_t group_size() {
  return group() ? static_cast<uint32_t>(group()->size()) : 0;
}

Out all_sum(const Array& a) {
  const auto& all = joined();
  // Of nothing there is nothing to send.
  return keep(a.value.size() == 0 ? a.value : dist::all_sum(a.value, all));
}

Out all_gather(const Array& a) {
  const auto& all = joined();
  if (a.value.ndim() == 0) {
    fail(kInvalidArgument, "all_gather needs a first axis, the tensor is a scalar");
  }
  if (a.value.size() == 0) {
    auto shape = a.value.shape();
    shape[0] *= all.size();
    return keep(mx::zeros(shape, a.value.dtype()));
  }
  return keep(dist::all_gather(a.value, all));
}

} // namespace mlxcel
