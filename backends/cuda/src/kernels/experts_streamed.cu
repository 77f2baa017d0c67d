// Products of experts for pairs that are in order of experts, at the speed at which the memory gives the weights. Follows
// `grouped.cu`.
//
// All blocks are there at once and share the tiles of all groups evenly. A tile is 16 rows of a matrix (or 8 of a gate and the same
// 8 of what it gates) with all of K, and belongs to one warp, which has a ring of its own that the copy engine fills with parts of
// K, over the ends of tiles and groups. Pairs of the groups that a block works on lie in shared memory in the tensor core's order,
// with their sums, as many groups at a time as there is room for.
//
// `streamed_gated` lets the next launch start when the order is known, so `streamed_product`, which comes next, fetches its first
// weights while the activations are still made.

#if WEIGHT_BITS == 4 && GROUP_SIZE >= 64 && __CUDA_ARCH__ >= 900
// Groups that a block can meet.
constexpr int kMostGroups = 64;
constexpr int kLine = 256, kLineGroups = kLine / GROUP_SIZE;

struct Flow {
  // Tensor maps of the stacks: 8 rows by 128 bytes.
  const u8* maps[2];
  const u16* scales[2];
  const u16* biases[2];
  const u16* x;
  u16* out;
  const uint4* groups;
  const u32* group_count;
  // Row of x for every pair; null: pair p is of row p.
  const u32* rows;
  int n;
  int k;
  // Values of K in a part, parts that a warp has under way (one more than there are in a tile at most), and pairs that there is
  // room for.
  int part;
  int stages;
  int room;
  int kind;
};

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

template <bool GATED>
__device__ __forceinline__ void flow(const Flow& all) {
  constexpr int kTile = GATED ? 8 : 16;
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ uint4 own_groups[kMostGroups];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, quad = lane & 3, in_tile = lane >> 2;
  const int n = all.n, k = all.k, row_groups = k / GROUP_SIZE, parts = (k + all.part - 1) / all.part, tiles = (n + kTile - 1) / kTile;
  const u32 stage_bytes = all.part * 8, group_bytes = 16 * row_groups;
  const u32 ring = shared_address(memory) + warp * all.stages * stage_bytes;
  const u32 rings_end = shared_address(memory) + warps * all.stages * stage_bytes;
  // Scales and biases of two tiles.
  const u32 slots = rings_end + warp * 2 * 4 * group_bytes;
  const u32 barriers = rings_end + warps * 2 * 4 * group_bytes + warp * all.stages * 8;
  // x: [64 values of K][word][pair][quad], then sums of groups: [group][pair].
  const u32 xs = rings_end + warps * (2 * 4 * group_bytes + all.stages * 8), x_step = all.room * 64;
  const u32 sums_of_x = xs + all.room * k * 2, starts = sums_of_x + row_groups * all.room * 4 + 32;
  if (lane < all.stages) {
    init_barrier(barriers + lane * 8, 1);
  }
  fence_barriers();
  if constexpr (GATED) {
    wait_for_inputs();
    let_next_start();
  } else {
    let_next_start();
  }
  const u32 group_count = __ldcg(all.group_count);
  const u32 total = group_count * tiles, blocks = min(gridDim.x, total);
  if (blockIdx.x >= blocks) {
    wait_for_inputs();
    return;
  }
  const int begin = static_cast<u64>(blockIdx.x) * total / blocks, end = static_cast<u64>(blockIdx.x + 1) * total / blocks;
  const int first_group = begin / tiles, groups_end = (end - 1) / tiles + 1;
  for (int i = threadIdx.x; i < groups_end - first_group; i += blockDim.x) {
    own_groups[i] = __ldcg(all.groups + first_group + i);
  }
  __syncthreads();

  // What is fetched next.
  int next_tile = begin + warp, next_part = 0, next_slot = 0;
  auto fetch = [&](int stage) {
    if (next_tile >= end) {
      return;
    }
    const int group = next_tile / tiles, row = own_groups[group - first_group].x * n + (next_tile - group * tiles) * kTile;
    const int values = min(all.part, k - next_part * all.part);
    const u32 done = barriers + stage * 8;
    if (lane == 0) {
      expect_bytes(done, values * 8 + (next_part == 0 ? 4 * group_bytes : 0));
    }
    __syncwarp();
    const int half = lane & 1, line = lane >> 1;
    const bool is_other = GATED && half;
    if (line < values / kLine) {
      fetch_box_2(ring + stage * stage_bytes + half * (stage_bytes / 2) + line * 1024, is_other ? all.maps[1] : all.maps[0],
                  (next_part * all.part / kLine + line) * 32, row + (GATED ? 0 : half * 8), done);
    }
    if (next_part == 0 && lane >= 28) {
      const bool is_bias = lane & 2;
      const u16* from = is_bias ? (is_other ? all.biases[1] : all.biases[0]) : (is_other ? all.scales[1] : all.scales[0]);
      fetch_line(slots + (next_slot * 4 + (is_bias ? 2 : 0) + half) * group_bytes,
                 from + static_cast<size_t>(row + (GATED ? 0 : half * 8)) * row_groups, group_bytes, done);
    }
    if (++next_part == parts) {
      next_part = 0, next_slot ^= 1, next_tile += warps;
    }
  };
  for (int i = 0; i < all.stages; ++i) {
    fetch(i);
  }
  wait_for_inputs();
  const int row = row_of_lane(in_tile), vectors = k / 8;
  int stage = 0, slot = 0, tile = begin + warp;
  u32 parity = 0;
  for (int from = first_group; from < groups_end;) {
    const int first_pair = own_groups[from - first_group].y;
    int until = from, pairs = 0;
    while (until < groups_end && own_groups[until - first_group].y + own_groups[until - first_group].z - first_pair <= all.room) {
      pairs = own_groups[until - first_group].y + own_groups[until - first_group].z - first_pair;
      ++until;
    }
    for (int i = threadIdx.x; i < pairs * vectors; i += blockDim.x) {
      const int r = i / vectors, at = i - r * vectors;
      const size_t of = all.rows == nullptr ? first_pair + r : all.rows[first_pair + r];
      const uint4 v = *reinterpret_cast<const uint4*>(all.x + of * k + at * 8);
      u32 p[4];
      pairs_of<4>(v, 0, p);
      const uint4 to = make_uint4(times(p[0], SCALE_PLAIN), times(p[1], SCALE_HIGH), times(p[2], SCALE_PLAIN), times(p[3], SCALE_HIGH));
      store_shared(xs + (at / 8 * 2 + at % 2) * x_step + (r * 4 + at % 8 / 2) * 16, to);
      float sum = low_float(v.x) + high_float(v.x) + low_float(v.y) + high_float(v.y);
      sum += low_float(v.z) + high_float(v.z) + low_float(v.w) + high_float(v.w);
      float start = low_float(to.x) + high_float(to.x) + low_float(to.y) + high_float(to.y);
      start += low_float(to.z) + high_float(to.z) + low_float(to.w) + high_float(to.w);
#pragma unroll
      for (int step = 1; step < GROUP_SIZE / 8; step *= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
        start += __shfl_xor_sync(0xFFFFFFFFu, start, step);
      }
      if (at % (GROUP_SIZE / 8) == 0) {
        store_float_shared(sums_of_x + (at / (GROUP_SIZE / 8) * all.room + r) * 4, sum);
#if F16
        store_float_shared(starts + (at / (GROUP_SIZE / 8) * all.room + r) * 4, -1024.0f * start);
#endif
      }
    }
    __syncthreads();
    for (; tile < min(end, until * tiles); tile += warps) {
      const int group = tile / tiles;
      const uint4 own = own_groups[group - first_group];
      const int before = own.y - first_pair, count = own.z;
      const u32 x_at = xs + ((before + min(in_tile, count - 1)) * 4 + quad) * 16;
      // Sums of the thread's two columns; those of others where there are none are not used.
      const u32 of_columns = (before + quad * 2) * 4;
      const u32 scales = slots + slot * 4 * group_bytes + row * row_groups * 2;
      float sums[4] = {};
      for (int part = 0; part < parts; ++part) {
        const int lines = min(all.part, k - part * all.part) / kLine;
        const u32 words = ring + stage * stage_bytes;
        wait_barrier(barriers + stage * 8, parity);
        for (int line = 0; line < lines; ++line) {
          const int at = part * (all.part / kLine) + line;
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
            const u32 of_group = (at * kLineGroups + g) * all.room * 4 + of_columns;
            const float x_sums[2] = {load_float_shared(sums_of_x + of_group), load_float_shared(sums_of_x + of_group + 4)};
            float acc[4] = {};
#if F16
            acc[0] = acc[2] = load_float_shared(starts + of_group), acc[1] = acc[3] = load_float_shared(starts + of_group + 4);
#endif
#pragma unroll
            for (int i = 0; i < GROUP_SIZE / 64; ++i) {
              const int block = g * (GROUP_SIZE / 64) + i;
              const u32 vx = x_at + (at * 4 + block) * 2 * x_step;
              const uint4 v0 = load_shared(vx), v1 = load_shared(vx + x_step);
              const u32 place = line * 1024 + row * 128 + (((block * 2 + (quad >> 1)) ^ row) << 4) + (quad & 1) * 8;
              const uint2 a = load_pair_shared(words + place), c = load_pair_shared(words + stage_bytes / 2 + place);
              mma(acc, RAW(a.x, 0x000F000Fu), RAW(c.x, 0x000F000Fu), RAW(a.x, 0x00F000F0u), RAW(c.x, 0x00F000F0u), v0.x, v0.y);
              mma(acc, RAW(a.x >> 8, 0x000F000Fu), RAW(c.x >> 8, 0x000F000Fu), RAW(a.x >> 8, 0x00F000F0u), RAW(c.x >> 8, 0x00F000F0u),
                  v0.z, v0.w);
              mma(acc, RAW(a.y, 0x000F000Fu), RAW(c.y, 0x000F000Fu), RAW(a.y, 0x00F000F0u), RAW(c.y, 0x00F000F0u), v1.x, v1.y);
              mma(acc, RAW(a.y >> 8, 0x000F000Fu), RAW(c.y >> 8, 0x000F000Fu), RAW(a.y >> 8, 0x00F000F0u), RAW(c.y >> 8, 0x00F000F0u),
                  v1.z, v1.w);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sums[i] = fmaf(acc[i], group_of(s[i / 2], g) * kUndo, fmaf(x_sums[i % 2], group_of(b[i / 2], g), sums[i]));
            }
          }
        }
        __syncwarp();
        fetch(stage);
        if (++stage == all.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      slot ^= 1;
      const int first = (tile - group * tiles) * kTile + row;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = quad * 2 + i;
        if (c < count) {
          u16* to = all.out + static_cast<size_t>(own.y + c) * n + first;
          if constexpr (GATED) {
            *to = from_float(gated(to_float(from_float(sums[i])), to_float(from_float(sums[2 + i])), all.kind));
          } else {
            to[0] = from_float(sums[i]);
            to[8] = from_float(sums[2 + i]);
          }
        }
      }
    }
    __syncthreads();
    from = until;
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) streamed_gated(const __grid_constant__ Flow all) {
  flow<true>(all);
}
extern "C" __global__ void __launch_bounds__(512, 1) streamed_product(const __grid_constant__ Flow all) {
  flow<false>(all);
}
#endif
