// Products x w^T of several rows of x with weights that are small: by clusters of blocks that share the sum over K.
//
// A tile is 128 rows of the weight by COLUMNS rows of x, and belongs to a cluster, each block of which has an eighth of K: the
// sooner all of the weight is asked for the sooner it is there, and blocks read it before the launch before has ended. Then they add
// what they have through each other's shared memory, each its rows of the tile. A norm is made with the product: what x is weighted
// with before it, what it is divided by afterwards, from squares that the blocks add in the same way. Follows `cluster.cuh`
// and `raw.cuh`.

constexpr int kBlocks = 8, kClusterWarps = 8, kTileRows = 128;

// Bytes of shared memory: x in the tensor core's order, sums of its groups, what f16 starts from, parts, squares. The host knows the
// same sum.
template <int COLUMNS>
__device__ __forceinline__ void clustered(const Weights& all, const u16* x, int k, int rows, const Around& around) {
  constexpr int kTiles = COLUMNS / 8, kEach = COLUMNS / kClusterWarps;
  extern __shared__ __align__(16) u8 memory[];
  let_next_start();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, in_tile = lane >> 2;
  const int rank = blockIdx.x % kBlocks, tile = blockIdx.x / kBlocks, first_x = blockIdx.y * COLUMNS, count = min(COLUMNS, rows - first_x);
  const int which = WHICH(all, tile), n = PICK(all.n, which), first = (tile - FIRST_TILE(all, which)) * kTileRows;
  const int slice = k / kBlocks, pieces = slice / kPiece, groups = slice / GROUP_SIZE;
  u8* const xs = memory;
  float* const sums_of_x = reinterpret_cast<float*>(xs + slice * COLUMNS * 2);
  float* const starts = sums_of_x + groups * COLUMNS;
  float* const parts = starts + (F16 ? groups * COLUMNS : 0);
  float* const squares = parts + kTileRows * COLUMNS;
  Rows own;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const size_t line = min(first + warp * 16 + half * 8 + in_tile, n - 1);
    const u8* w = PICK(all.w, which);
    const u16* scales = PICK(all.scales, which);
    const u16* biases = PICK(all.biases, which);
    own.words[half] = w + line * (k / 2) + rank * (slice / 2);
    own.scales[half] = scales + line * (k / GROUP_SIZE) + rank * groups;
    own.biases[half] = biases + line * (k / GROUP_SIZE) + rank * groups;
  }
  Piece piece;
  load_piece(piece, own, 0, quad);
  wait_for_inputs();
  // A warp has a row of x at a time, and several on their way.
  const u16* from = x + static_cast<size_t>(first_x) * k + rank * slice;
  float of_row[kEach] = {};
  for (int at = lane; at < slice / 8; at += 32) {
    uint4 held[kEach], of_norm = make_uint4(ONE_TWICE, ONE_TWICE, ONE_TWICE, ONE_TWICE);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      held[i] = *reinterpret_cast<const uint4*>(from + static_cast<size_t>(min(warp + i * kClusterWarps, count - 1)) * k + at * 8);
    }
    if (around.normed > 1) {
      of_norm = *reinterpret_cast<const uint4*>(around.norm + rank * slice + at * 8);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = warp + i * kClusterWarps;
      uint4 v = held[i];
      if (around.normed) {
        of_row[i] += sum_of_squares(v);
        v = scaled_by(v, of_norm, 1.0f);
      }
      const uint4 to = in_order(v);
      *reinterpret_cast<uint4*>(xs + (((at / 8 * 2 + at % 2) * COLUMNS + row) * 4 + at % 8 / 2) * 16) = to;
      const GroupSums sums = sums_of_group(v, to);
      if (at % GROUP_LANES == 0) {
        sums_of_x[at / GROUP_LANES * COLUMNS + row] = sums.x;
#if F16
        starts[at / GROUP_LANES * COLUMNS + row] = -1024.0f * sums.ordered;
#endif
      }
    }
  }
  if (around.normed) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        of_row[i] += __shfl_xor_sync(0xFFFFFFFFu, of_row[i], step);
      }
    }
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        squares[warp + i * kClusterWarps] = of_row[i];
      }
    }
  }
  __syncthreads();
  float sums[kTiles][4] = {};
  const u32 x_at = shared_address(xs) + (in_tile * 4 + quad) * 16;
  constexpr u32 kStep = COLUMNS * 64;
  for (int at = 0; at < pieces; ++at) {
    if (at > 0) {
      load_piece(piece, own, at, quad);
    }
#pragma unroll
    for (int g = 0; g < kPieceGroups; ++g) {
      float acc[kTiles][4] = {};
      const int group = at * kPieceGroups + g;
#if F16
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const float2 v = *reinterpret_cast<const float2*>(starts + group * COLUMNS + t * 8 + quad * 2);
        acc[t][0] = acc[t][2] = v.x, acc[t][1] = acc[t][3] = v.y;
      }
#endif
#pragma unroll
      for (int i = 0; i < GROUP_SIZE / 64; ++i) {
        const int block = g * (GROUP_SIZE / 64) + i;
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          const u32 a = word ? piece.words[0][block].y : piece.words[0][block].x;
          const u32 b = word ? piece.words[1][block].y : piece.words[1][block].x;
          const u32 a0 = RAW(a, 0x000F000Fu), b0 = RAW(b, 0x000F000Fu), a1 = RAW(a, 0x00F000F0u), b1 = RAW(b, 0x00F000F0u);
          const u32 a2 = RAW(a >> 8, 0x000F000Fu), b2 = RAW(b >> 8, 0x000F000Fu);
          const u32 a3 = RAW(a >> 8, 0x00F000F0u), b3 = RAW(b >> 8, 0x00F000F0u);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            const uint4 v = load_shared(x_at + ((at * kPieceBlocks + block) * 2 + word) * kStep + t * 512);
            mma(acc[t], a0, b0, a1, b1, v.x, v.y);
            mma(acc[t], a2, b2, a3, b3, v.z, v.w);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const float2 of_x = *reinterpret_cast<const float2*>(sums_of_x + group * COLUMNS + t * 8 + quad * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float by_bias = fmaf(i % 2 ? of_x.y : of_x.x, group_of(piece.biases[i / 2], g), sums[t][i]);
          sums[t][i] = fmaf(acc[t][i], group_of(piece.scales[i / 2], g) * kUndo, by_bias);
        }
      }
    }
  }
  // [pair of rows of x][row of the tile]
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2* to = reinterpret_cast<float2*>(parts) + (t * 4 + quad) * kTileRows + warp * 16 + half * 8 + in_tile;
      *to = make_float2(sums[t][2 * half], sums[t][2 * half + 1]);
    }
  }
  cluster_arrive();
  cluster_wait();
  u16* out = PICK(all.out, which);
  constexpr int kOwnRows = kTileRows / kBlocks;
  for (int i = threadIdx.x; i < kOwnRows * COLUMNS / 2; i += kClusterWarps * 32) {
    const int line = rank * kOwnRows + i % kOwnRows, pair = i / kOwnRows;
    float2 got[kBlocks], of[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      got[b] = pair_of_block(parts + (pair * kTileRows + line) * 2, b);
      if (around.normed) {
        of[b] = pair_of_block(squares + pair * 2, b);
      }
    }
    float2 sum = make_float2(0.0f, 0.0f), square = sum;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      sum.x += got[b].x, sum.y += got[b].y;
      if (around.normed) {
        square.x += of[b].x, square.y += of[b].y;
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = pair * 2 + c;
      if (row < count && first + line < n) {
        float v = c ? sum.y : sum.x;
        if (around.normed) {
          v *= rsqrtf((c ? square.y : square.x) / k + around.eps);
        }
        const size_t place = static_cast<size_t>(first_x + row) * n + first + line;
        u16 value = from_float(v);
        if (around.residual != nullptr) {
          value = from_float(to_float(value) + to_float(around.residual[place]));
        }
        out[place] = value;
      }
    }
  }
  // The others may end when nobody reads their memory any more.
  cluster_arrive();
  cluster_wait();
}

#define CLUSTERED(COLUMNS, BLOCKS)                                                                                              \
  extern "C" __global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kClusterWarps * 32, BLOCKS) clustered_##COLUMNS( \
      const __grid_constant__ Weights all, const u16* x, int k, int rows, const __grid_constant__ Around around) {              \
    clustered<COLUMNS>(all, x, k, rows, around);                                                                                \
  }
CLUSTERED(8, 4)
CLUSTERED(16, 3)
