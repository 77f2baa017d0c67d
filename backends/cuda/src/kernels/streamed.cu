// Products x w^T of one to eight rows of x, at the speed at which the memory gives the weight.
//
// A block walks tiles of 16 rows of the weight; its warps share the sum over K. Each warp has a ring of its own in shared memory,
// which the copy engine fills: pieces of 16 rows by one chunk of K, with their scales and biases. Nothing of it waits for the
// launch before, so the next product's first pieces arrive while this one still runs.
//
// A value of few bits, as the lowest bits of a bf16, is that number times 2^-133: numbers of such small exponents lie evenly. So
// quantised values go to the tensor core as they are, and rows of x are scaled by 2^64 instead (f16: 2^10 plus the value, and the
// 2^10 is taken off at the start of each sum). Scales are applied to the sums of a group, biases to the sums of x in it. Follows
// `engine.cuh`.

constexpr int kTileRows = 16;
#if WEIGHT_BITS == 16
constexpr int kGroups = 0, kPieceK = 128, kWeightBytes = kTileRows * kPieceK * 2, kScaleBytes = 0;
#else
constexpr int kGroups = 8, kPieceK = kGroups * GROUP_SIZE;
constexpr int kWeightBytes = kTileRows * kPieceK * WEIGHT_BITS / 8, kScaleBytes = kTileRows * kGroups * 2;
#endif
// Pieces of 128 bytes of a row.
constexpr int kLines = kWeightBytes / kTileRows / 128;
constexpr int kWarps = STREAM_WARPS, kStages = STREAM_STAGES;
// Blocks that a multiprocessor should find registers for, some of them of the next launch.
#ifndef STREAM_BLOCKS
#define STREAM_BLOCKS (STREAM_WARPS > 8 ? 1 : 3)
#endif

// What x is multiplied by, a sixteenth of it where values stand four bits higher, and what undoes it.
#if F16
constexpr float kScaleX = 1.0f, kUndo = 1.0f;
#else
constexpr float kScaleX = 0x1p64f, kUndo = 0x1p69f;
#endif

// As one number: taken apart where its words are used.
__device__ __forceinline__ u64 load_pair(u32 address) {
  u64 v;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void mma_half(float (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col." MMA_TYPE " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b0));
}

// A number that a generic function is compiled for.
template <int N>
struct Count {
  static constexpr int value = N;
};

// `waits`: the weight may be made by the launch before.
// Bytes of shared memory: rings, scales and biases, barriers, x in the tensor core's order, sums of groups, parts of the result.
// The host knows the same sum.
template <bool GATED>
__device__ __forceinline__ void streamed(const Weights& all, const u16* x, u16* both, int k_total, int rows, int kind, int tiles, int waits,
    const Around& around) {
  extern __shared__ __align__(1024) u8 memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, in_tile = lane >> 2;
  u8* const rings = memory;
  u8* const scale_rings = rings + kWarps * kStages * kWeightBytes;
  u64* const barriers = reinterpret_cast<u64*>(scale_rings + kWarps * kStages * 2 * kScaleBytes);
  u8* const xs = reinterpret_cast<u8*>(barriers + kWarps * kStages);
  const int groups = kGroups * (k_total / kPieceK);
  // Sums of x: [piece][8 columns][groups of a piece], halves and what they leave out; f16 also the start of each sum.
  u16* const high = reinterpret_cast<u16*>(xs + static_cast<size_t>(rows) * k_total * 2);
  u16* const low = high + groups * 8;
  float* const starts = reinterpret_cast<float*>(low + groups * 8);
  // [2][kWarps][16 rows of the tile][rows of x]
  float* const parts = starts + (F16 ? groups * 8 : 0);
  const int chunks = k_total / kPieceK;
  const int own_tiles = (tiles - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;
  const u32 ring = shared_address(rings) + warp * kStages * kWeightBytes;
  const u32 scale_ring = shared_address(scale_rings) + warp * kStages * 2 * kScaleBytes;
  const u32 barrier = shared_address(barriers) + warp * kStages * 8;

  const u64 once = read_once();
  // What is fetched next.
  int tile = blockIdx.x, chunk = warp;
  auto fetch = [&](int stage) {
    while (chunk >= chunks) {
      chunk -= chunks;
      tile += gridDim.x;
    }
    if (tile >= tiles) {
      return;
    }
    u32 to = ring + stage * kWeightBytes, done = barrier + stage * 8;
    auto weight_of = [&](int half, int& i, int& row) {
      if constexpr (GATED) {
        i = half, row = tile * 8;
      } else {
        i = WHICH(all, tile);
        row = (tile - (i == 0 ? 0 : all.start[i])) * 16 + half * 8;
      }
    };
    if (lane == 0) {
      expect_bytes(done, kWeightBytes + 2 * kScaleBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int i, row;
        weight_of(half, i, row);
        const u8* map = PICK(all.w, i);
#pragma unroll
        for (int line = 0; line < kLines; ++line) {
          fetch_box_2(to + half * (kWeightBytes / 2) + line * 1024, map, (chunk * kLines + line) * (WEIGHT_BITS == 16 ? 64 : 32), row, done,
                      once);
        }
        if constexpr (WEIGHT_BITS < 16) {
          u32 scales = scale_ring + stage * 2 * kScaleBytes + half * (kScaleBytes / 2);
          fetch_box_2(scales, map + 128, chunk * kGroups, row, done, once);
          fetch_box_2(scales + kScaleBytes, map + 256, chunk * kGroups, row, done, once);
        }
      }
    }
    chunk += kWarps;
  };
  let_next_start();
  if (waits) {
    wait_for_inputs();
  }
  if (lane == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(barrier + i * 8, 1);
    }
    fence_barriers();
  }
  __syncwarp();
  for (int i = 0; i < kStages; ++i) {
    fetch(i);
  }
  // Into the second cache, whoever wrote it.
  const int vectors = k_total / 8;
  if (around.normed > 1) {
    for (int i = threadIdx.x; i < vectors / 8; i += kWarps * 32) {
      prefetch(around.norm + i * 64);
    }
  }
  wait_for_inputs();
  // A row is divided by its root mean square at the end, so that nothing waits for it. f16 has no room for what it is before.
  constexpr bool kNormsLate = !F16;
  constexpr int kThreads = kWarps * 32;
  __shared__ float squares[8][kWarps], factors[8];
  const uint4* const x_vectors = reinterpret_cast<const uint4*>(x);
  auto add_squares = [&](int row, float sum) {
    sum = sum_of_warp(sum);
    if (lane == 0) {
      squares[row][warp] = sum;
    }
  };
  auto factor_of = [&](int row) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += squares[row][w];
    }
    return rsqrtf(sum / k_total + around.eps);
  };
  if (!kNormsLate && around.normed) {
    for (int row = 0; row < rows; ++row) {
      float sum = 0.0f;
      for (int at = threadIdx.x; at < vectors; at += kThreads) {
        sum += sum_of_squares(x_vectors[row * vectors + at]);
      }
      add_squares(row, sum);
    }
    __syncthreads();
  }
  // As the tensor core takes it, 16 bytes at a time: [k / 32 or 16][half][row][quad].
  auto place = [&](int row, int at, uint4 v) {
    if constexpr (WEIGHT_BITS == 16) {
      // 32 values of K at a time, a quad having 8 of them.
      *reinterpret_cast<uint4*>(xs + ((at / 4 * rows + row) * 4 + at % 4) * 16) = v;
    } else {
      float f[8] = {low_float(v.x), high_float(v.x), low_float(v.y), high_float(v.y),
                    low_float(v.z), high_float(v.z), low_float(v.w), high_float(v.w)};
      constexpr float kPlain = kScaleX, kSixteenth = kScaleX / 16;
      float sum = 0.0f, start = 0.0f;
      u32 p[4];
      if constexpr (WEIGHT_BITS == 4) {
        p[0] = pack(f[0] * kPlain, f[4] * kPlain), p[1] = pack(f[1] * kSixteenth, f[5] * kSixteenth);
        p[2] = pack(f[2] * kPlain, f[6] * kPlain), p[3] = pack(f[3] * kSixteenth, f[7] * kSixteenth);
      } else {
        p[0] = pack(f[0] * kPlain, f[2] * kPlain), p[1] = pack(f[1] * kPlain, f[3] * kPlain);
        p[2] = pack(f[4] * kPlain, f[6] * kPlain), p[3] = pack(f[5] * kPlain, f[7] * kPlain);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum += f[j];
      }
#if F16
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        start += low_float(p[j]) + high_float(p[j]);
      }
#endif
      // A group of 16 neighbours in K and quad; 4 bits: 16 values a quad, so two vectors; 8 bits: also 16 values.
      int block = at / 8, within = at % 8, q = within / 2, half = within % 2;
      *reinterpret_cast<uint4*>(xs + (((block * 2 + half) * rows + row) * 4 + q) * 16) = make_uint4(p[0], p[1], p[2], p[3]);
#pragma unroll
      for (int step = 1; step < GROUP_SIZE / 8; step *= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
        start += __shfl_xor_sync(0xFFFFFFFFu, start, step);
      }
      constexpr int kPer = WEIGHT_BITS == 16 ? 1 : kGroups;
      int group = at / (GROUP_SIZE / 8);
      if (at % (GROUP_SIZE / 8) == 0) {
        int place = (group / kPer * 8 + row) * kPer + group % kPer;
        float mean = sum / GROUP_SIZE;
        u16 rounded = from_float(mean);
        high[place] = rounded;
        low[place] = from_float(mean - to_float(rounded));
#if F16
        starts[group * 8 + row] = -1024.0f * start;
#endif
      }
    }
  };
  // N vectors of a thread are on their way at once.
  auto bring = [&](auto count, int row) {
    constexpr int N = decltype(count)::value;
    const float factor = !kNormsLate && around.normed ? factor_of(row) : 1.0f;
    float sum = 0.0f;
    for (int first = threadIdx.x; first < vectors; first += kThreads * N) {
      uint4 held[N], of_norm[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int at = first + j * kThreads;
        held[j] = make_uint4(0, 0, 0, 0), of_norm[j] = make_uint4(ONE_TWICE, ONE_TWICE, ONE_TWICE, ONE_TWICE);
        if (at < vectors) {
          held[j] = x_vectors[row * vectors + at];
          if (N <= 2 && around.normed > 1) {
            of_norm[j] = *reinterpret_cast<const uint4*>(around.norm + at * 8);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int at = first + j * kThreads;
        // Lanes of a group are all here or all not: a row is whole chunks.
        if (at < vectors) {
          if (N <= 2 && around.normed) {
            sum += kNormsLate ? sum_of_squares(held[j]) : 0.0f;
            held[j] = scaled_by(held[j], of_norm[j], factor);
          }
          place(row, at, held[j]);
        }
      }
    }
    if (N <= 2 && kNormsLate && around.normed) {
      add_squares(row, sum);
    }
  };
  for (int row = 0; row < rows; ++row) {
    if (around.normed || vectors <= kThreads * 2) {
      bring(Count<2>(), row);
    } else {
      bring(Count<8>(), row);
    }
  }
  __syncthreads();
  // Read behind the next time that all threads meet.
  if (kNormsLate && around.normed && threadIdx.x < rows) {
    factors[threadIdx.x] = factor_of(threadIdx.x);
  }
  const int column = min(in_tile, rows - 1), row = row_of_lane(in_tile, WEIGHT_BITS);
  const u32 x_at = shared_address(xs) + (column * 4 + quad) * 16, x_step = rows * 64;
  int unit = warp, turn = 0;
  u32 parity = 0;
  for (int t = 0; t < own_tiles; ++t) {
    float sums[4] = {}, by_bias[4] = {};
    for (; unit < (t + 1) * chunks; unit += kWarps) {
      const int piece = unit - t * chunks;
      const u32 from = ring + turn * kWeightBytes, scales = scale_ring + turn * 2 * kScaleBytes;
      wait_barrier(barrier + turn * 8, parity);
      if constexpr (WEIGHT_BITS == 16) {
#pragma unroll
        for (int line = 0; line < kLines; ++line) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            u32 at = line * 1024 + row * 128 + (((part * 4 + quad) ^ row) << 4);
            uint4 a = load_shared(from + at), b = load_shared(from + kWeightBytes / 2 + at);
            uint4 v = load_shared(x_at + (piece * 4 + line * 2 + part) * x_step);
            mma(sums, a.x, b.x, a.y, b.y, v.x, v.y);
            mma(sums, a.z, b.z, a.w, b.w, v.z, v.w);
          }
        }
      } else {
        const u32 of_row = scales + row * kGroups * 2;
        const uint4 s_upper = load_shared(of_row), s_lower = load_shared(of_row + kScaleBytes / 2);
        {
          u32 at = of_row + kScaleBytes + quad * 4;
          u32 b0 = load_word_shared(at), b1 = load_word_shared(at + kScaleBytes / 2);
          int place = (piece * 8 + column) * kGroups + quad * 2;
          mma_half(by_bias, b0, b1, *reinterpret_cast<const u32*>(high + place));
          mma_half(by_bias, b0, b1, *reinterpret_cast<const u32*>(low + place));
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          float acc[4];
#if F16
          float2 first = *reinterpret_cast<const float2*>(starts + (piece * kGroups + g) * 8 + quad * 2);
          acc[0] = acc[2] = first.x, acc[1] = acc[3] = first.y;
#else
          acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
#endif
#pragma unroll
          for (int block = 0; block < GROUP_SIZE / 64; ++block) {
            const int k64 = g * (GROUP_SIZE / 64) + block;
            const u32 vx = x_at + (piece * (kPieceK / 64) + k64) * 2 * x_step;
            uint4 v0 = load_shared(vx), v1 = load_shared(vx + x_step);
            if constexpr (WEIGHT_BITS == 4) {
              u32 at = (k64 / 4) * 1024 + row * 128 + (((k64 % 4 * 2 + (quad >> 1)) ^ row) << 4) + (quad & 1) * 8;
              u64 a = load_pair(from + at), b = load_pair(from + kWeightBytes / 2 + at);
              u32 a0 = static_cast<u32>(a), a1 = static_cast<u32>(a >> 32), b0 = static_cast<u32>(b), b1 = static_cast<u32>(b >> 32);
              mma(acc, RAW(a0, 0x000F000Fu), RAW(b0, 0x000F000Fu), RAW(a0, 0x00F000F0u), RAW(b0, 0x00F000F0u), v0.x, v0.y);
              a0 >>= 8, b0 >>= 8;
              mma(acc, RAW(a0, 0x000F000Fu), RAW(b0, 0x000F000Fu), RAW(a0, 0x00F000F0u), RAW(b0, 0x00F000F0u), v0.z, v0.w);
              mma(acc, RAW(a1, 0x000F000Fu), RAW(b1, 0x000F000Fu), RAW(a1, 0x00F000F0u), RAW(b1, 0x00F000F0u), v1.x, v1.y);
              a1 >>= 8, b1 >>= 8;
              mma(acc, RAW(a1, 0x000F000Fu), RAW(b1, 0x000F000Fu), RAW(a1, 0x00F000F0u), RAW(b1, 0x00F000F0u), v1.z, v1.w);
            } else {
              u32 at = (k64 / 2) * 1024 + row * 128 + (((k64 % 2 * 4 + quad) ^ row) << 4);
              uint4 a = load_shared(from + at), b = load_shared(from + kWeightBytes / 2 + at);
              mma(acc, RAW(a.x, 0x00FF00FFu), RAW(b.x, 0x00FF00FFu), RAW(a.x >> 8, 0x00FF00FFu), RAW(b.x >> 8, 0x00FF00FFu), v0.x, v0.y);
              mma(acc, RAW(a.y, 0x00FF00FFu), RAW(b.y, 0x00FF00FFu), RAW(a.y >> 8, 0x00FF00FFu), RAW(b.y >> 8, 0x00FF00FFu), v0.z, v0.w);
              mma(acc, RAW(a.z, 0x00FF00FFu), RAW(b.z, 0x00FF00FFu), RAW(a.z >> 8, 0x00FF00FFu), RAW(b.z >> 8, 0x00FF00FFu), v1.x, v1.y);
              mma(acc, RAW(a.w, 0x00FF00FFu), RAW(b.w, 0x00FF00FFu), RAW(a.w >> 8, 0x00FF00FFu), RAW(b.w >> 8, 0x00FF00FFu), v1.z, v1.w);
            }
          }
          const u32 u = word_of(s_upper, g / 2), l = word_of(s_lower, g / 2);
          const float upper = g % 2 ? high_float(u) : low_float(u), lower = g % 2 ? high_float(l) : low_float(l);
          sums[0] = fmaf(acc[0], upper, sums[0]);
          sums[1] = fmaf(acc[1], upper, sums[1]);
          sums[2] = fmaf(acc[2], lower, sums[2]);
          sums[3] = fmaf(acc[3], lower, sums[3]);
        }
      }
      __syncwarp();
      fetch(turn);
      if (++turn == kStages) {
        turn = 0;
        parity ^= 1;
      }
    }
    float* own = parts + ((t & 1) * kWarps + warp) * 16 * rows;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int c = quad * 2 + (i & 1), r = row + (i >> 1) * 8;
      if (c < rows) {
        own[r * rows + c] = WEIGHT_BITS == 16 ? sums[i] : fmaf(by_bias[i], static_cast<float>(GROUP_SIZE), sums[i] * kUndo);
      }
    }
    __syncthreads();
    // One warp adds the parts; the others go on with the next tile.
    if (warp != t % kWarps) {
      continue;
    }
    const float* from = parts + (t & 1) * kWarps * 16 * rows;
    const int made = blockIdx.x + t * gridDim.x;
    auto total = [&](int r, int c) {
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        sum += from[(part * 16 + r) * rows + c];
      }
      return kNormsLate && around.normed ? sum * factors[c] : sum;
    };
    if constexpr (GATED) {
      for (int i = lane; i < 8 * rows; i += 32) {
        int r = i % 8, c = i / 8, at = made * 8 + r;
        if (at < all.n[0]) {
          size_t place = static_cast<size_t>(c) * all.n[0] + at;
          u16 gate = from_float(total(r, c)), up = from_float(total(r + 8, c));
          if (all.out[0] != nullptr) {
            all.out[0][place] = gate;
            all.out[1][place] = up;
          }
          both[place] = from_float(gated(to_float(gate), to_float(up), kind));
        }
      }
    } else {
      int i = WHICH(all, made), first = (made - (i == 0 ? 0 : all.start[i])) * 16, n = all.n[i];
      for (int j = lane; j < 16 * rows; j += 32) {
        int r = j % 16, c = j / 16;
        if (first + r < n) {
          size_t place = static_cast<size_t>(c) * n + first + r;
          all.out[i][place] = with_residual(total(r, c), around.residual, place);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kWarps * 32, STREAM_BLOCKS) stream_rows(
    const __grid_constant__ Weights all, const u16* x, int k, int rows, int tiles, int waits, const __grid_constant__ Around around) {
  streamed<false>(all, x, nullptr, k, rows, 0, tiles, waits, around);
}
extern "C" __global__ void __launch_bounds__(kWarps * 32, STREAM_BLOCKS) stream_gated(
    const __grid_constant__ Weights all, const u16* x, u16* both, int k, int rows, int kind, int tiles, int waits,
    const __grid_constant__ Around around) {
  streamed<true>(all, x, both, k, rows, kind, tiles, waits, around);
}
