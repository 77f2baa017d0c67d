// Products of experts for pairs that are in order of experts, at the speed at which the memory gives the weights. Follows
// `lines.cuh`.
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
  const int row = row_of_lane(in_tile, WEIGHT_BITS), vectors = k / 8;
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
      put_values(v, at, xs + r * 64, x_step, sums_of_x + r * 4, starts + r * 4, all.room * 4);
    }
    __syncthreads();
    for (; tile < min(end, until * tiles); tile += warps) {
      const int group = tile / tiles;
      const uint4 own = own_groups[group - first_group];
      const int before = own.y - first_pair, count = own.z;
      // Sums of columns that are not there are not used.
      const u32 of_columns = (before + quad * 2) * 4;
      const Held held{xs + ((before + min(in_tile, count - 1)) * 4 + quad) * 16, x_step, sums_of_x + of_columns, starts + of_columns,
                      static_cast<u32>(all.room) * 4};
      const u32 scales = slots + slot * 4 * group_bytes + row * row_groups * 2;
      float sums[4] = {};
      for (int part = 0; part < parts; ++part) {
        const int lines = min(all.part, k - part * all.part) / kLine;
        const u32 words = ring + stage * stage_bytes;
        wait_barrier(barriers + stage * 8, parity);
        for (int line = 0; line < lines; ++line) {
          const u32 upper = words + line * 1024;
          add_line(sums, upper, upper + stage_bytes / 2, scales, group_bytes, part * (all.part / kLine) + line, held, row, quad);
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
            *to = from_float(gated(rounded(sums[i]), rounded(sums[2 + i]), all.kind));
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
