// Weights of 4 bits in lines of 256 values of K, as the copy engine brings them: 8 rows by 128 bytes, swizzled. Nothing for other
// forms. Follows `raw.cuh` and `engine.cuh`.

#if WEIGHT_BITS == 4 && GROUP_SIZE >= 64 && __CUDA_ARCH__ >= 900
constexpr int kLine = 256, kLineGroups = kLine / GROUP_SIZE;

__device__ __forceinline__ void fetch_line(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ float load_float_shared(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_float_shared(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

// Rows of x in shared memory in the tensor core's order, [64 values of K][word][row][quad], and the sums of their groups.
struct Held {
  // Where those of the thread's column are.
  u32 x;
  u32 x_step;
  // Sums of the thread's two columns, and what f16 starts from; as many bytes to the next group.
  u32 sums;
  u32 starts;
  u32 sums_step;
};

// Puts 8 neighbouring values of a row there, which the lanes of a group have side by side: `place` is that of the row's first ones.
__device__ __forceinline__ void put_values(const uint4& v, int at, u32 place, u32 x_step, u32 sums, u32 starts, u32 sums_step) {
  const uint4 to = in_order(v);
  store_shared(place + (at / 8 * 2 + at % 2) * x_step + at % 8 / 2 * 16, to);
  const GroupSums own = sums_of_group(v, to);
  if (at % GROUP_LANES == 0) {
    store_float_shared(sums + at / GROUP_LANES * sums_step, own.x);
#if F16
    store_float_shared(starts + at / GROUP_LANES * sums_step, -1024.0f * own.ordered);
#endif
  }
}

// Adds the products of line `at` of 16 rows, whose halves are at `upper` and `lower`; `scales` is the thread's row of them, those of
// the lower half and then biases following by `group_bytes`.
__device__ __forceinline__ void add_line(
    float (&sums)[4], u32 upper, u32 lower, u32 scales, u32 group_bytes, int at, const Held& held, int row, int quad) {
  u32 s[2][kLineGroups / 2], b[2][kLineGroups / 2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 of_line = scales + half * group_bytes + at * kLineGroups * 2;
    if constexpr (kLineGroups == 4) {
      const uint2 v = load_pair_shared(of_line), w = load_pair_shared(of_line + 2 * group_bytes);
      s[half][0] = v.x, s[half][1] = v.y, b[half][0] = w.x, b[half][1] = w.y;
    } else {
      s[half][0] = load_word_shared(of_line), b[half][0] = load_word_shared(of_line + 2 * group_bytes);
    }
  }
#pragma unroll
  for (int g = 0; g < kLineGroups; ++g) {
    const u32 of_group = (at * kLineGroups + g) * held.sums_step;
    const float x_sums[2] = {load_float_shared(held.sums + of_group), load_float_shared(held.sums + of_group + 4)};
    float acc[4] = {};
#if F16
    acc[0] = acc[2] = load_float_shared(held.starts + of_group), acc[1] = acc[3] = load_float_shared(held.starts + of_group + 4);
#endif
#pragma unroll
    for (int i = 0; i < GROUP_SIZE / 64; ++i) {
      const int block = g * (GROUP_SIZE / 64) + i;
      const u32 vx = held.x + (at * 4 + block) * 2 * held.x_step;
      const uint4 v0 = load_shared(vx), v1 = load_shared(vx + held.x_step);
      const u32 place = row * 128 + (((block * 2 + (quad >> 1)) ^ row) << 4) + (quad & 1) * 8;
      const uint2 a = load_pair_shared(upper + place), c = load_pair_shared(lower + place);
      mma(acc, RAW(a.x, 0x000F000Fu), RAW(c.x, 0x000F000Fu), RAW(a.x, 0x00F000F0u), RAW(c.x, 0x00F000F0u), v0.x, v0.y);
      mma(acc, RAW(a.x >> 8, 0x000F000Fu), RAW(c.x >> 8, 0x000F000Fu), RAW(a.x >> 8, 0x00F000F0u), RAW(c.x >> 8, 0x00F000F0u), v0.z,
          v0.w);
      mma(acc, RAW(a.y, 0x000F000Fu), RAW(c.y, 0x000F000Fu), RAW(a.y, 0x00F000F0u), RAW(c.y, 0x00F000F0u), v1.x, v1.y);
      mma(acc, RAW(a.y >> 8, 0x000F000Fu), RAW(c.y >> 8, 0x000F000Fu), RAW(a.y >> 8, 0x00F000F0u), RAW(c.y >> 8, 0x00F000F0u), v1.z,
          v1.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = fmaf(acc[i], group_of(s[i / 2], g) * kUndo, fmaf(x_sums[i % 2], group_of(b[i / 2], g), sums[i]));
    }
  }
}
#endif
