// Norm, router and choice of experts of a mixture in one: what a step of few rows waits for before it can read any expert.
//
// A cluster of 8 blocks has up to 8 rows of x. Its blocks share the experts, 16 to a tile, and read their part of the router's
// weight before x is there. Then each has the logits of one row from all others and chooses. Follows `few.cuh` and `choice.cu`.

struct Router {
  const u8* w;
  const u16* scales;
  const u16* biases;
  const u16* x;
  // x normed, where `around` says so; not null then.
  u16* normed;
  u16* logits;
  u32* experts;
  u16* weights;
  Around around;
  int rows;
  int n;
  int k;
  int chosen;
  int renormalised;
  // 1: the weight may be made by the launch before.
  int waits;
};

constexpr int kBlocks = 8, kRows = 8, kRouterWarps = 8, kMostTiles = 8;

template <int kHeld>
__device__ __forceinline__ void routed(const Router& all) {
  constexpr int kOwn = Form<WEIGHT_BITS>::kOwn, kChunk = Form<WEIGHT_BITS>::kChunk, kUnroll = WEIGHT_BITS / 2;
  constexpr int kStep = kRouterWarps * kChunk, kThreads = kRouterWarps * 32;
  __shared__ float parts[kRouterWarps][16][kRows + 1];
  __shared__ float own_logits[kMostTiles * 16][kRows];
  __shared__ float squares[kRows][kRouterWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, in_tile = lane >> 2;
  const int rank = blockIdx.x % kBlocks, first_row = blockIdx.y * kRows, count = min(kRows, all.rows - first_row), k = all.k;
  const size_t row_bytes = static_cast<size_t>(k) * WEIGHT_BITS / 8;
  const u8* own[2];
  const u16 *own_scales[2], *own_biases[2];
  auto point = [&](int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const size_t line = min(tile * 16 + half * 8 + in_tile, all.n - 1);
      own[half] = all.w + line * row_bytes;
      own_scales[half] = all.scales + line * (k / GROUP_SIZE);
      own_biases[half] = all.biases + line * (k / GROUP_SIZE);
    }
  };
  const int start = warp * kChunk + quad * kOwn;
  let_next_start();
  if (all.waits) {
    wait_for_inputs();
  }
  Pieces<WEIGHT_BITS, 1, kUnroll> held;
  point(rank);
  load_pieces(held, own, own_scales, own_biases, k, start, kStep);
  wait_for_inputs();
  const u16* x = all.x + static_cast<size_t>(first_row) * k;
  float factor = 1.0f;
  if (all.around.normed) {
    float sums[kRows] = {};
    for (int at = threadIdx.x * 8; at < k; at += kThreads * 8) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        sums[row] += row < count ? sum_of_squares(*reinterpret_cast<const uint4*>(x + static_cast<size_t>(row) * k + at)) : 0.0f;
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        sums[row] += __shfl_xor_sync(0xFFFFFFFFu, sums[row], step);
      }
    }
    if (lane == 0) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        squares[row][warp] = sums[row];
      }
    }
    __syncthreads();
    auto factor_of = [&](int row) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kRouterWarps; ++i) {
        sum += squares[row][i];
      }
      return rsqrtf(sum / k + all.around.eps);
    };
    factor = factor_of(in_tile);
    if (rank < count) {
      const float of_row = factor_of(rank);
      for (int at = threadIdx.x * 8; at < k; at += kThreads * 8) {
        const uint4 v = *reinterpret_cast<const uint4*>(x + static_cast<size_t>(rank) * k + at);
        *reinterpret_cast<uint4*>(all.normed + static_cast<size_t>(first_row + rank) * k + at) = normed_values(v, all.around, of_row, at);
      }
    }
  }
  const bool has_x = in_tile < count;
  const u16* own_x = x + (has_x ? static_cast<size_t>(in_tile) * k : 0);
  const int tiles = (all.n + 15) / 16;
  for (int tile = rank, turn = 0; tile < tiles; tile += kBlocks, ++turn) {
    float sums[1][4] = {};
    if (turn > 0) {
      point(tile);
    }
    for (int from = start; from - quad * kOwn < k; from += kStep * kUnroll) {
      if (turn > 0 || from > start) {
        load_pieces(held, own, own_scales, own_biases, k, from, kStep);
      }
      multiply_pieces(sums, held, own_x, has_x, k, from, kStep, all.around, factor);
    }
    parts[warp][in_tile][quad * 2] = sums[0][0];
    parts[warp][in_tile][quad * 2 + 1] = sums[0][1];
    parts[warp][in_tile + 8][quad * 2] = sums[0][2];
    parts[warp][in_tile + 8][quad * 2 + 1] = sums[0][3];
    __syncthreads();
    if (threadIdx.x < 16 * kRows) {
      const int expert = threadIdx.x % 16, row = threadIdx.x / 16;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kRouterWarps; ++i) {
        sum += parts[i][expert][row];
      }
      const u16 rounded = from_float(sum);
      own_logits[turn * 16 + expert][row] = to_float(rounded);
      if (row < count && tile * 16 + expert < all.n) {
        all.logits[static_cast<size_t>(first_row + row) * all.n + tile * 16 + expert] = rounded;
      }
    }
    __syncthreads();
  }
  cluster_arrive();
  cluster_wait();
  if (warp == 0 && rank < count) {
    float found[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = i * 32 + lane, tile = at / 16;
      found[i] = at < all.n ? of_block(&own_logits[tile / kBlocks * 16 + at % 16][rank], tile % kBlocks) : -kInfinity;
    }
    const size_t to = static_cast<size_t>(first_row + rank) * all.chosen;
    choose(found, all.n, all.chosen, all.renormalised, lane, all.experts + to, all.weights + to);
  }
  // The others may end when nobody reads their memory any more.
  cluster_arrive();
  cluster_wait();
}

#define ROUTER(HELD)                                                                                                        \
  extern "C" __global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kRouterWarps * 32) router_##HELD(            \
      const __grid_constant__ Router all) {                                                                                 \
    routed<HELD>(all);                                                                                                      \
  }
ROUTER(4)
ROUTER(8)
ROUTER(32)
