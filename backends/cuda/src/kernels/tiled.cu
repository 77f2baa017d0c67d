// Products x w^T of several rows of x, on the tensor cores of compute capability 9.0.
//
// A block makes tiles of 64 rows of the weight a warpgroup, by COLUMNS rows of x. One warp has the copy engine bring pieces of the
// weight and of x; the warpgroups expand the weight's values in registers, where they are the first operand of the product. Blocks
// share all pieces of all tiles evenly: where a tile is divided, whoever comes last adds its parts.
//
// With TILE_GROUPED the weights are stacks of matrices, and rows of x come in groups, each for one matrix of the stack; `tiles` are
// those of one group.
//
// A value of few bits, as the lowest bits of a bf16, is that number times 2^-133, so one fused multiply-add gives the weight: scale
// times 2^120 and bias times 2^-13, which the result is multiplied with at the end.

constexpr int kTeams = TILE_TEAMS, kTileRows = 64 * kTeams, kThreads = 128 * kTeams + 32;
// A piece: 128 bytes of each row.
constexpr int kPieceK = 1024 / WEIGHT_BITS, kBlocks = kPieceK / 64, kWeightBytes = kTileRows * 128;

#if WEIGHT_BITS < 16
constexpr int kPieceGroups = kPieceK / GROUP_SIZE;
// Scales or biases of a row in a piece, as words: taken apart where they are used, so that nothing waits for them earlier.
constexpr int kScaleWords = kPieceGroups > 2 ? kPieceGroups / 2 : 1;
struct RowScales {
  u32 words[kScaleWords];
};
__device__ __forceinline__ RowScales load_row_scales(const u16* from) {
  RowScales v;
  if constexpr (kPieceGroups == 1) {
    v.words[0] = __ldg(from);
  } else if constexpr (kPieceGroups == 2) {
    v.words[0] = __ldg(reinterpret_cast<const u32*>(from));
  } else if constexpr (kPieceGroups == 4) {
    uint2 w = __ldg(reinterpret_cast<const uint2*>(from));
    v.words[0] = w.x, v.words[1] = w.y;
  } else {
    uint4 w = __ldg(reinterpret_cast<const uint4*>(from));
    v.words[0] = w.x, v.words[1] = w.y, v.words[2] = w.z, v.words[3] = w.w;
  }
  return v;
}
// One of them, twice in a word.
__device__ __forceinline__ u32 of_group(const RowScales& v, int g) {
  return __byte_perm(v.words[g / 2], 0, g % 2 ? 0x3232 : 0x1010);
}

// Scale and bias of a group as the expansion takes them.
__device__ __forceinline__ void prepare(u32 two, u32 also, u32& s, u32& b) {
#if F16
  s = two, b = also;
#else
  // 2^120 and, for values that stand four bits higher, 2^116; 2^-13.
  s = mul2(two, WEIGHT_BITS == 4 ? 0x79807B80u : 0x7B807B80u);
  b = mul2(also, 0x39003900u);
#endif
}

// Two values of a word to two weights. `pick` says which byte (two bytes) of the word.
__device__ __forceinline__ u32 expand(u32 w, u32 other, u32 pick, u32 s, u32 b) {
  u32 v = __byte_perm(w, other, pick);
#if WEIGHT_BITS == 4
#if F16
  return fma2(fma2((v & 0x00F0000Fu) | 0x64006400u, 0x2C003C00u, 0xD400E400u), s, b);
#else
  return fma2(v & 0x00F0000Fu, s, b);
#endif
#else
#if F16
  return fma2(fma2((v & 0x00FF00FFu) | 0x64006400u, 0x3C003C00u, 0xE400E400u), s, b);
#else
  return fma2(v & 0x00FF00FFu, s, b);
#endif
#endif
}
#endif

#if F16 || WEIGHT_BITS == 16
constexpr float kUndo = 1.0f;
#else
constexpr float kUndo = 0x1p13f;
#endif

// What a tile works on: its place among those of its group, the matrix of the stack, its first row of x and how many it has.
struct Place {
  int tile;
  int matrix;
  int first_x;
  int rows;
};

template <int COLUMNS, int STAGES>
__device__ __forceinline__ void tiled(
    const Weights& all, const Map& x_map, float* scratch, u32* counters, int k_total, int rows, int tiles, int waits,
    const uint4* groups, const u32* group_count) {
  constexpr int kStageBytes = kWeightBytes + COLUMNS * kPieceK * 2;
  // Blocks of the weight that are expanded at a time; with more columns there are no registers for two.
  constexpr int kNumbers = COLUMNS / 2, kBuffers = COLUMNS > 64 ? 1 : 2;
  extern __shared__ __align__(1024) u8 memory[];
  const u32 stages = shared_address(memory), full = stages + STAGES * kStageBytes, empty = full + STAGES * 8;
  __shared__ int is_last;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int chunks = k_total / kPieceK;
  let_next_start();
#if TILE_GROUPED
  wait_for_inputs();
  const u32 total = *group_count * tiles * chunks;
  auto place_of = [&](int tile) {
    const uint4 group = groups[tile / tiles];
    return Place{tile % tiles, static_cast<int>(group.x), static_cast<int>(group.y), static_cast<int>(group.z)};
  };
#else
  const u32 total = tiles * chunks;
  auto place_of = [&](int tile) {
    const int first = blockIdx.y * COLUMNS;
    return Place{tile, 0, first, rows - first};
  };
#endif
  // No block without work lies between two that share a tile.
  const u32 blocks = min(gridDim.x, total);
  if (blockIdx.x >= blocks) {
    return;
  }
  const int begin = blockIdx.x * total / blocks, end = (blockIdx.x + 1) * total / blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      init_barrier(full + i * 8, 1);
      init_barrier(empty + i * 8, kTeams);
    }
    fence_barriers();
  }
  __syncthreads();
  if (warp >= 4 * kTeams) {
    if (lane != 0) {
      return;
    }
    if (waits) {
      wait_for_inputs();
    }
    auto fetch_weight = [&](int unit, int stage) {
      const Place place = place_of(unit / chunks);
      const int tile = place.tile, chunk = unit % chunks;
      int i = WHICH(all, tile), row = place.matrix * all.n[i] + (tile - (i == 0 ? 0 : all.start[i])) * kTileRows;
      const u8* map = PICK(all.w, i);
      expect_bytes(full + stage * 8, kStageBytes);
      fetch_box_2(stages + stage * kStageBytes, map, chunk * (WEIGHT_BITS == 16 ? 64 : 32), row, full + stage * 8);
    };
    auto fetch_x = [&](int unit, int stage) {
      const int chunk = unit % chunks, first_x = place_of(unit / chunks).first_x;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        fetch_box_2(stages + stage * kStageBytes + kWeightBytes + block * COLUMNS * 128, &x_map, chunk * kPieceK + block * 64, first_x,
                    full + stage * 8);
      }
    };
    for (int i = 0; i < STAGES && begin + i < end; ++i) {
      fetch_weight(begin + i, i);
    }
    wait_for_inputs();
    for (int i = 0; i < STAGES && begin + i < end; ++i) {
      fetch_x(begin + i, i);
    }
    int stage = 0;
    u32 parity = 0;
    for (int unit = begin + STAGES; unit < end; ++unit) {
      wait_barrier(empty + stage * 8, parity);
      fetch_weight(unit, stage);
      fetch_x(unit, stage);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    return;
  }
  const int team = warp / 4, quad = lane & 3, in_tile = lane >> 2;
  const int own_row = team * 64 + warp % 4 * 16 + in_tile;
  int stage = 0;
  u32 parity = 0;
  for (int unit = begin; unit < end;) {
    const int tile = unit / chunks, until = min(end, (tile + 1) * chunks);
    const bool from_start = unit == tile * chunks;
    const Place place = place_of(tile);
    const int which = WHICH(all, place.tile), n = PICK(all.n, which), first = (place.tile - FIRST_TILE(all, which)) * kTileRows;
    float sums[kNumbers];
    int before = -1;
#if WEIGHT_BITS < 16
    const int row_groups = k_total / GROUP_SIZE;
    const u16 *scales = PICK(all.scales, which), *biases = PICK(all.biases, which);
    const size_t upper = (static_cast<size_t>(place.matrix) * n + min(first + own_row, n - 1)) * row_groups;
    const size_t lower = (static_cast<size_t>(place.matrix) * n + min(first + own_row + 8, n - 1)) * row_groups;
    RowScales next[4];
    auto load_scales = [&](int at) {
      int g = (at - tile * chunks) * kPieceGroups;
      next[0] = load_row_scales(scales + upper + g);
      next[1] = load_row_scales(scales + lower + g);
      next[2] = load_row_scales(biases + upper + g);
      next[3] = load_row_scales(biases + lower + g);
    };
    load_scales(unit);
#endif
    int adds = 0;
    for (; unit < until; ++unit) {
      const u32 w = stages + stage * kStageBytes, xs = w + kWeightBytes;
      // The same for all threads, which the compiler does not see.
      const u64 x_rows = rows_descriptor(__shfl_sync(0xFFFFFFFFu, xs, 0));
#if WEIGHT_BITS < 16
      RowScales now[4] = {next[0], next[1], next[2], next[3]};
      if (unit + 1 < until) {
        load_scales(unit + 1);
      }
      wait_barrier(full + stage * 8, parity);
      u32 a[kBuffers][4][4];
      // The next block's words are on their way while this one's are expanded.
      constexpr int kUnits = WEIGHT_BITS / 2;
      uint4 raw[2][kUnits];
      auto load = [&](int block) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          u32 at = w + own_row * 128 + (((block * kUnits + i) ^ in_tile) << 4);
          raw[0][i] = load_shared(at), raw[1][i] = load_shared(at + 1024);
        }
      };
      load(0);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        u32 (&own)[4][4] = a[block % kBuffers];
        group_wait<kBuffers - 1>();
        if (block == kBuffers - 1 && before >= 0) {
          if ((threadIdx.x & 127) == 0) {
            arrive(empty + before * 8);
          }
        }
        constexpr int kRuns = GROUP_SIZE == 32 ? 2 : 1, kSlabs = 4 / kRuns;
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
          u32 s[2], b[2];
          const int g = block * 64 / GROUP_SIZE + run;
          prepare(of_group(now[0], g), of_group(now[2], g), s[0], b[0]);
          prepare(of_group(now[1], g), of_group(now[3], g), s[1], b[1]);
#pragma unroll
          for (int i = run * kSlabs; i < (run + 1) * kSlabs; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#if WEIGHT_BITS == 4
              const u32 pick = 0x4040u + quad * 0x0101u;
              const uint4& v = raw[half][i / 2];
              own[i][half] = expand(i % 2 ? v.z : v.x, 0, pick, s[half], b[half]);
              own[i][2 + half] = expand(i % 2 ? v.w : v.y, 0, pick, s[half], b[half]);
#else
              const u32 pick = 0x1100u + quad * 0x2222u;
              const uint4& v = raw[half][i];
              own[i][half] = expand(v.x, v.y, pick, s[half], b[half]);
              own[i][2 + half] = expand(v.z, v.w, pick, s[half], b[half]);
#endif
            }
          }
        }
        if (block + 1 < kBlocks) {
          load(block + 1);
        }
        group_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          multiply(sums, own[i], x_rows + (block * COLUMNS * 8 + i * 2), adds);
          adds = 1;
        }
        group_commit();
      }
#else
      const u64 w_rows = rows_descriptor(__shfl_sync(0xFFFFFFFFu, w + team * 8192, 0));
      wait_barrier(full + stage * 8, parity);
      group_begin();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply(sums, w_rows + i * 2, x_rows + i * 2, adds);
        adds = 1;
      }
      group_commit();
      group_wait<1>();
      if (before >= 0 && (threadIdx.x & 127) == 0) {
        arrive(empty + before * 8);
      }
#endif
      before = stage;
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    group_wait<0>();
    if ((threadIdx.x & 127) == 0) {
      arrive(empty + before * 8);
    }
    wait_for_inputs();
    const bool is_whole = from_start && unit == (tile + 1) * chunks;
    if (!is_whole) {
      // Parts of a tile lie two to a block: of the tile that the block before began, and of the one that it begins.
      const int contributor = ((tile * chunks + 1) * blocks - 1) / total, last = ((tile + 1) * chunks * blocks - 1) / total;
      const size_t part = static_cast<size_t>(kTileRows) * COLUMNS;
      float* base = scratch + blockIdx.y * blocks * 2 * part;
      float* to = base + (blockIdx.x * 2 + from_start) * part + threadIdx.x * 2;
#pragma unroll
      for (int i = 0; i < kNumbers / 2; ++i) {
        *reinterpret_cast<float2*>(to + i * kTeams * 256) = make_float2(sums[2 * i], sums[2 * i + 1]);
      }
      __threadfence();
      meet_teams<kTeams>();
      u32* counter = counters + blockIdx.y * tiles + tile;
      if (threadIdx.x == 0) {
        is_last = atomicAdd(counter, 1u) == static_cast<u32>(last - contributor);
      }
      meet_teams<kTeams>();
      if (!is_last) {
        continue;
      }
      __threadfence();
      for (int b = contributor; b <= last; ++b) {
        const float* from = base + (b * 2 + (b == contributor)) * part + threadIdx.x * 2;
#pragma unroll
        for (int i = 0; i < kNumbers / 2; ++i) {
          float2 v = __ldcg(reinterpret_cast<const float2*>(from + i * kTeams * 256));
          sums[2 * i] = b == contributor ? v.x : sums[2 * i] + v.x;
          sums[2 * i + 1] = b == contributor ? v.y : sums[2 * i + 1] + v.y;
        }
      }
      if (threadIdx.x == 0) {
        *counter = 0;
      }
    }
    u16* out = PICK(all.out, which);
#pragma unroll
    for (int j = 0; j < kNumbers / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int c = j * 8 + quad * 2 + (i & 1), r = first + own_row + (i >> 1) * 8;
        if (c < place.rows && r < n) {
          out[static_cast<size_t>(place.first_x + c) * n + r] = from_float(sums[4 * j + i] * kUndo);
        }
      }
    }
  }
}

#if TILE_GROUPED
#define TILE_GROUPS , const uint4 *groups, const u32 *group_count
#else
#define TILE_GROUPS
constexpr const uint4* groups = nullptr;
constexpr const u32* group_count = nullptr;
#endif
#define TILED(COLUMNS)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) tiled_##COLUMNS(                                                  \
      const __grid_constant__ Weights all, const __grid_constant__ Map x_map, float* scratch, u32* counters, int k, int rows, \
      int tiles, int waits TILE_GROUPS) {                                                                                     \
    constexpr int kStage = kWeightBytes + COLUMNS * kPieceK * 2, kFit = TILE_BYTES / kStage;                                  \
    tiled<COLUMNS, (kFit > 12 ? 12 : kFit)>(all, x_map, scratch, counters, k, rows, tiles, waits, groups, group_count);       \
  }
TILED(8)
TILED(16)
TILED(32)
TILED(64)
TILED(128)
