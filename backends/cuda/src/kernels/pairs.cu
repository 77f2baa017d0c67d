// Products of experts for pairs that are each for themselves: a step of very few rows. Follows `lines.cuh`.
//
// All of a block's weights are asked for at once, by the copy engine, as soon as it is known which expert they are of. Nothing is
// fetched twice and nothing waits for room.
//
// `pairs_gated` lets the next launch start when the choice of experts is made, and not before. So `pairs_summed`, which always
// comes next, may read the choice without waiting, and its weights arrive while the activations are still made.

#if WEIGHT_BITS == 4 && GROUP_SIZE >= 64 && __CUDA_ARCH__ >= 900
// Values of a row that come together, and what keeps the rows of a tile apart.
constexpr int kPartK = 1024, kMostParts = 8, kApart = 32;

// A warp's tile in shared memory: rows, scales, biases; the second half of rows has its own of the latter.
struct Slot {
  u32 rows;
  u32 groups;
  // One for each part of K.
  u32 barriers;
  int pitch;
  int group_bytes;
};
__device__ __forceinline__ Slot slot_of(u8* memory, int k, int warp, int warps) {
  const int pitch = k / 2 + kApart, group_bytes = 8 * (k / GROUP_SIZE) * 2;
  const u32 base = shared_address(memory), size = 16 * pitch + 4 * group_bytes;
  return Slot{base + warps * kMostParts * 8 + warp * size, base + warps * kMostParts * 8 + warp * size + 16 * pitch,
              base + warp * kMostParts * 8, pitch, group_bytes};
}
// Where what lies behind the tiles of all warps begins.
__device__ __forceinline__ u32 behind_slots(const Slot& slot, u8* memory, int warps) {
  return shared_address(memory) + warps * (kMostParts * 8 + 16 * slot.pitch + 4 * slot.group_bytes);
}

__device__ __forceinline__ void prepare(const Slot& slot, int lane) {
  if (lane < kMostParts) {
    init_barrier(slot.barriers + lane * 8, 1);
  }
  fence_barriers();
  __syncwarp();
}
// Asks for 8 rows of each of two matrices.
__device__ __forceinline__ void fetch_tile(
    const Slot& slot, const Matrix& upper, int upper_row, const Matrix& lower, int lower_row, int k, int lane) {
  const int parts = (k + kPartK - 1) / kPartK, row_bytes = k / 2;
  if (lane < parts) {
    const u32 bytes = min(kPartK, k - lane * kPartK) / 2 * 16;
    expect_bytes(slot.barriers + lane * 8, lane == 0 ? bytes + 4 * slot.group_bytes : bytes);
  }
  __syncwarp();
  const bool is_lower = (lane < 16 ? lane : lane - 16) >= (lane < 16 ? 8 : 2);
  const Matrix& m = is_lower ? lower : upper;
  const int first = is_lower ? lower_row : upper_row;
  if (lane < 16) {
    const u8* row = m.w + static_cast<size_t>(first + lane % 8) * row_bytes;
    for (int part = 0; part < parts; ++part) {
      const int at = part * (kPartK / 2);
      fetch_line(slot.rows + lane * slot.pitch + at, row + at, min(kPartK / 2, row_bytes - at), slot.barriers + part * 8);
    }
  } else if (lane < 20) {
    const u16* from = (lane % 2 ? m.quant.biases : m.quant.scales) + static_cast<size_t>(first) * m.quant.groups;
    fetch_line(slot.groups + (lane - 16) * slot.group_bytes, from, slot.group_bytes, slot.barriers);
  }
}

// Row of x in the tensor core's order: [64 values of K][word][quad].
__device__ __forceinline__ void put_row(u32 to, const u16* x, int k, int thread, int threads) {
  for (int at = thread; at < k / 8; at += threads) {
    const uint4 v = *reinterpret_cast<const uint4*>(x + at * 8);
    store_shared(to + ((at / 8 * 2 + at % 2) * 4 + at % 8 / 2) * 16, in_order(v));
  }
}

// Sums of the tile's rows: those of the thread's upper and lower row are the first and the third, in the first of four threads.
__device__ __forceinline__ void add_tile(float (&sums)[4], const Slot& slot, u32 x, int k, u32 parity, int lane) {
  const int quad = lane & 3, in_tile = lane >> 2;
  const u32 rows = slot.rows + in_tile * slot.pitch + quad * 8;
  const u32 groups = slot.groups + in_tile * (slot.group_bytes / 8);
  for (int at = 0; at < k / kPiece; ++at) {
    if (at % (kPartK / kPiece) == 0) {
      wait_barrier(slot.barriers + at / (kPartK / kPiece) * 8, parity);
    }
    Piece piece;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < kPieceBlocks; ++block) {
        piece.words[half][block] = load_pair_shared(rows + half * 8 * slot.pitch + at * (kPiece / 2) + block * 32);
      }
      const u32 scales = groups + half * 2 * slot.group_bytes + at * kPieceGroups * 2;
      if constexpr (kPieceGroups == 4) {
        const uint2 s = load_pair_shared(scales), b = load_pair_shared(scales + slot.group_bytes);
        piece.scales[half][0] = s.x, piece.scales[half][1] = s.y;
        piece.biases[half][0] = b.x, piece.biases[half][1] = b.y;
      } else {
        piece.scales[half][0] = load_word_shared(scales);
        piece.biases[half][0] = load_word_shared(scales + slot.group_bytes);
      }
    }
    add_piece(sums, piece, x + at * kPieceBlocks * 2 * 64 + quad * 16, 64);
  }
}

// both[pair] = f(gate x) * (up x). Four warps have 8 columns of it and share the sum over K: what is left to do when the last weights
// have come is little. Maps are those of the stacks.
extern "C" __global__ void __launch_bounds__(512) pairs_gated(
    const u8* gate_map, const u8* up_map, Stack gate, Stack up, const u16* x, u16* both, const u32* experts, int chosen, int n_experts,
    int n, int k, int kind) {
  constexpr int kSplits = 4, kMostWarps = 16;
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ float parts[kMostWarps][16];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, in_tile = lane >> 2, pair = blockIdx.y;
  const int tiles = blockDim.x / (32 * kSplits), tile = warp / kSplits, part = warp % kSplits;
  const int first = (blockIdx.x * tiles + tile) * 8, all_lines = k / kLine, each = (all_lines + kSplits - 1) / kSplits;
  const int first_line = part * each, lines = first < n ? max(0, min(each, all_lines - first_line)) : 0;
  const u32 tile_bytes = all_lines * 2048, group_bytes = 16 * (k / GROUP_SIZE);
  // Lines of the tiles, their scales and biases, barriers of warps and of tiles' scales, x, sums.
  const u32 base = shared_address(memory), own_lines = base + tile * tile_bytes;
  const u32 groups = base + tiles * tile_bytes + tile * 4 * group_bytes;
  const u32 barriers = base + tiles * (tile_bytes + 4 * group_bytes), own_barrier = barriers + warp * 8;
  const u32 of_groups = barriers + (tiles * kSplits + tile) * 8, xs = barriers + tiles * (kSplits + 1) * 8 + tiles % 2 * 8;
  const u32 sums_of_x = xs + k * 2, starts = sums_of_x + k / GROUP_SIZE * 4 + 32;
  if (lane == 0) {
    init_barrier(own_barrier, 1);
    if (part == 0) {
      init_barrier(of_groups, 1);
    }
  }
  fence_barriers();
  __syncwarp();
  wait_for_inputs();
  let_next_start();
  const int expert = min(__ldcg(experts + pair), static_cast<u32>(n_experts - 1));
  const int line_of_stack = expert * n + first;
  if (lane == 0) {
    if (lines > 0) {
      expect_bytes(own_barrier, lines * 2048);
    }
    if (part == 0 && first < n) {
      expect_bytes(of_groups, 4 * group_bytes);
    }
  }
  __syncwarp();
  if (lane < 2 * lines) {
    const int line = first_line + (lane >> 1);
    fetch_box_2(own_lines + (line * 2 + (lane & 1)) * 1024, lane & 1 ? up_map : gate_map, line * 32, line_of_stack, own_barrier);
  }
  if (part == 0 && first < n && lane >= 28) {
    const Stack& of = lane & 1 ? up : gate;
    const u16* from = (lane & 2 ? of.biases : of.scales) + static_cast<size_t>(line_of_stack) * (k / GROUP_SIZE);
    fetch_line(groups + (lane - 28) * group_bytes, from, group_bytes, of_groups);
  }
  const u16* own_x = x + static_cast<size_t>(pair / chosen) * k;
  for (int at = threadIdx.x; at < k / 8; at += blockDim.x) {
    put_values(*reinterpret_cast<const uint4*>(own_x + at * 8), at, xs, 64, sums_of_x, starts, 4);
  }
  __syncthreads();
  const int row = row_of_lane(in_tile, WEIGHT_BITS);
  float sums[4] = {};
  if (lines > 0) {
    // Every column is the same row of x, the first one counts.
    const Held held{xs + quad * 16, 64, sums_of_x, starts, 4};
    wait_barrier(of_groups, 0);
    wait_barrier(own_barrier, 0);
    for (int line = first_line; line < first_line + lines; ++line) {
      const u32 upper = own_lines + line * 2048;
      add_line(sums, upper, upper + 1024, groups + row * (k / GROUP_SIZE) * 2, group_bytes, line, held, row, quad);
    }
  }
  if (quad == 0) {
    parts[warp][row] = sums[0];
    parts[warp][row + 8] = sums[2];
  }
  __syncthreads();
  const int column = blockIdx.x * tiles * 8 + threadIdx.x;
  if (threadIdx.x < tiles * 8 && column < n) {
    float g = 0.0f, u = 0.0f;
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      g += parts[threadIdx.x / 8 * kSplits + i][threadIdx.x % 8];
      u += parts[threadIdx.x / 8 * kSplits + i][threadIdx.x % 8 + 8];
    }
    both[static_cast<size_t>(pair) * n + column] = from_float(gated(rounded(g), rounded(u), kind));
  }
}

// out[row] = residual[row] + the weighted sum of its experts' products: a block has 16 columns, its warps the experts in turns.
extern "C" __global__ void __launch_bounds__(256) pairs_summed(
    Stack stack, const u16* x, u16* out, const u32* experts, const u16* weights, const u16* residual, int chosen, int n_experts, int n,
    int k) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ float parts[8][16];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, row = blockIdx.y, first = blockIdx.x * 16;
  const Slot slot = slot_of(memory, k, warp, warps);
  const u32 own_x = behind_slots(slot, memory, warps) + warp * k * 2;
  let_next_start();
  prepare(slot, lane);
  auto fetch = [&](int c) {
    // Made before the launch before this one could let it start.
    const int expert = min(__ldcg(experts + row * chosen + c), static_cast<u32>(n_experts - 1));
    const Matrix m = matrix_of(stack, expert, n, k);
    fetch_tile(slot, m, first, m, first + 8, k, lane);
  };
  fetch(warp);
  wait_for_inputs();
  float total[2] = {};
  u32 parity = 0;
  for (int c = warp; c < chosen; c += warps, parity ^= 1) {
    const int at = row * chosen + c;
    put_row(own_x, x + static_cast<size_t>(at) * k, k, lane, 32);
    const float weight = to_float(weights[at]);
    __syncwarp();
    float sums[4] = {};
    add_tile(sums, slot, own_x, k, parity, lane);
    __syncwarp();
    if (c + warps < chosen) {
      fetch(c + warps);
    }
    total[0] += weight * sums[0];
    total[1] += weight * sums[2];
  }
  if ((lane & 3) == 0) {
    parts[warp][lane >> 2] = total[0];
    parts[warp][(lane >> 2) + 8] = total[1];
  }
  __syncthreads();
  if (threadIdx.x < 16) {
    float sum = 0.0f;
    for (int i = 0; i < warps; ++i) {
      sum += parts[i][threadIdx.x];
    }
    const size_t at = static_cast<size_t>(row) * n + first + threadIdx.x;
    out[at] = with_residual(sum, residual, at);
  }
}
#endif
