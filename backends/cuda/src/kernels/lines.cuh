// Weights of 4 bits in lines of 256 values of K, as the copy engine brings them: 8 rows by 128 bytes, swizzled. Nothing for other
// forms. Follows `raw.cuh` and `engine.cuh`.

#if WEIGHT_BITS == 4 && GROUP_SIZE >= 64 && __CUDA_ARCH__ >= 900
constexpr int kLine = 256, kLineGroups = kLine / GROUP_SIZE;

__device__ __forceinline__ void fetch_line(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ uint2 load_pair_shared(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 load_word_shared(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_shared(u32 address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Which row of half a tile a lane has, so that lanes that read at once use different banks.
__device__ __forceinline__ int row_of_lane(int in_tile) {
  return ((in_tile & 3) << 1) | (in_tile >> 2);
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
  u32 p[4];
  pairs_of<4>(v, 0, p);
  const uint4 to = make_uint4(times(p[0], SCALE_PLAIN), times(p[1], SCALE_HIGH), times(p[2], SCALE_PLAIN), times(p[3], SCALE_HIGH));
  store_shared(place + (at / 8 * 2 + at % 2) * x_step + at % 8 / 2 * 16, to);
  float sum = low_float(v.x) + high_float(v.x) + low_float(v.y) + high_float(v.y);
  sum += low_float(v.z) + high_float(v.z) + low_float(v.w) + high_float(v.w);
#if F16
  float start = low_float(to.x) + high_float(to.x) + low_float(to.y) + high_float(to.y);
  start += low_float(to.z) + high_float(to.z) + low_float(to.w) + high_float(to.w);
#endif
#pragma unroll
  for (int step = 1; step < GROUP_SIZE / 8; step *= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
#if F16
    start += __shfl_xor_sync(0xFFFFFFFFu, start, step);
#endif
  }
  if (at % (GROUP_SIZE / 8) == 0) {
    store_float_shared(sums + at / (GROUP_SIZE / 8) * sums_step, sum);
#if F16
    store_float_shared(starts + at / (GROUP_SIZE / 8) * sums_step, -1024.0f * start);
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
