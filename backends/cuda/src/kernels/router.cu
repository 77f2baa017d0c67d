// Norm, router and choice of experts of a mixture in one: what a step of few rows waits for before it can read any expert.
//
// A cluster of 8 blocks has up to 8 rows of x. Its blocks share the experts, 16 to a tile, and read their part of the router's
// weight before x is there. Each norms all rows for itself, in shared memory. Then it has the logits of one row from all others
// and chooses. Follows `few.cuh` and `choice.cu`.

struct Router {
  const u8* w;
  const u16* scales;
  const u16* biases;
  const u16* x;
  // Not null: added to x first, and where the sum goes.
  const u16* added;
  u16* total;
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

__device__ __forceinline__ uint4 sum_of(const uint4& a, const uint4& b) {
  return make_uint4(
      pack(low_float(a.x) + low_float(b.x), high_float(a.x) + high_float(b.x)),
      pack(low_float(a.y) + low_float(b.y), high_float(a.y) + high_float(b.y)),
      pack(low_float(a.z) + low_float(b.z), high_float(a.z) + high_float(b.z)),
      pack(low_float(a.w) + low_float(b.w), high_float(a.w) + high_float(b.w)));
}

constexpr int kBlocks = 8, kRows = 8, kRouterWarps = 8, kMostTiles = 8;
template <int COUNT>
struct Together {
  static constexpr int kCount = COUNT;
};

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
  const size_t first = static_cast<size_t>(first_row) * k;
  // Rows lie apart by as much as keeps banks free.
  extern __shared__ __align__(16) u8 memory[];
  const int pitch = k + 8;
  u16* const rows = reinterpret_cast<u16*>(memory);
  // All rows at once, so that their values are on their way together.
  auto take = [&](auto of_rows) {
    constexpr int kTogether = decltype(of_rows)::kCount;
    float sums[kTogether] = {};
    for (int at = threadIdx.x * 8; at < k; at += kThreads * 8) {
      uint4 v[kTogether], w[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        // Those that are not there are the last one again.
        const size_t place = first + static_cast<size_t>(min(i, count - 1)) * k + at;
        v[i] = *reinterpret_cast<const uint4*>(all.x + place);
        if (all.added != nullptr) {
          w[i] = *reinterpret_cast<const uint4*>(all.added + place);
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = min(i, count - 1);
        if (all.added != nullptr) {
          v[i] = sum_of(v[i], w[i]);
          if (row == rank) {
            *reinterpret_cast<uint4*>(all.total + first + static_cast<size_t>(row) * k + at) = v[i];
          }
        }
        sums[i] += sum_of_squares(v[i]);
        *reinterpret_cast<uint4*>(rows + row * pitch + at) = v[i];
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        sums[i] += __shfl_xor_sync(0xFFFFFFFFu, sums[i], step);
      }
    }
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        squares[i][warp] = sums[i];
      }
    }
  };
  if (count == 1) {
    take(Together<1>{});
  } else {
    take(Together<kRows>{});
  }
  if (all.around.normed) {
    __syncthreads();
#pragma unroll 4
    for (int row = 0; row < count; ++row) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kRouterWarps; ++i) {
        sum += squares[row][i];
      }
      const float factor = rsqrtf(sum / k + all.around.eps);
      for (int at = threadIdx.x * 8; at < k; at += kThreads * 8) {
        uint4* own = reinterpret_cast<uint4*>(rows + row * pitch + at);
        const uint4 v = normed_values(*own, all.around, factor, at);
        *own = v;
        if (row == rank) {
          *reinterpret_cast<uint4*>(all.normed + first + static_cast<size_t>(row) * k + at) = v;
        }
      }
    }
  }
  __syncthreads();
  const bool has_x = in_tile < count;
  const u16* own_x = rows + (has_x ? in_tile * pitch : 0);
  const int tiles = (all.n + 15) / 16;
  for (int tile = rank, turn = 0; tile < tiles; tile += kBlocks, ++turn) {
    float products[1][4] = {};
    if (turn > 0) {
      point(tile);
    }
    for (int from = start; from - quad * kOwn < k; from += kStep * kUnroll) {
      if (turn > 0 || from > start) {
        load_pieces(held, own, own_scales, own_biases, k, from, kStep);
      }
      multiply_pieces(products, held, own_x, has_x, k, from, kStep, Around{}, 1.0f);
    }
    parts[warp][in_tile][quad * 2] = products[0][0];
    parts[warp][in_tile][quad * 2 + 1] = products[0][1];
    parts[warp][in_tile + 8][quad * 2] = products[0][2];
    parts[warp][in_tile + 8][quad * 2 + 1] = products[0][3];
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

#define ROUTER(HELD)                                                                                                \
  extern "C" __global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kRouterWarps * 32, 2) router_##HELD( \
      const __grid_constant__ Router all) {                                                                         \
    routed<HELD>(all);                                                                                              \
  }
ROUTER(4)
ROUTER(8)
ROUTER(32)
