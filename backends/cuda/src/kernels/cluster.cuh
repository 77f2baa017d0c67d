// Blocks of a cluster, from compute capability 9.0 on: they run at once and see each other's shared memory.

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where another block of the cluster has what this one has at `own`, and what is there.
__device__ __forceinline__ u32 address_in(const void* own, int block) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
  return address;
}
__device__ __forceinline__ float of_block(const float* own, int block) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address_in(own, block)));
  return v;
}
__device__ __forceinline__ float2 pair_of_block(const float* own, int block) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address_in(own, block)));
  return v;
}
__device__ __forceinline__ u64 of_block(const u64* own, int block) {
  u64 v;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(address_in(own, block)));
  return v;
}
