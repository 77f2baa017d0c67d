// Products x w^T with weights of WEIGHT_BITS bits a value (4, 8 or 16) where the copy engine is not there or does not pay, and
// the expansion of weights.

#define FEW_ROWS(NAME, TILES, UNROLL)                                                                                 \
  extern "C" __global__ void __launch_bounds__(256) NAME(Weights all, const u16* x, int k, int rows, Around around) { \
    let_next_start();                                                                                                 \
    int block = blockIdx.x, i = WHICH(all, block);                                                                    \
    const u8* w = PICK(all.w, i);                                                                                     \
    const u16 *scales = PICK(all.scales, i), *biases = PICK(all.biases, i);                                           \
    u16* out = PICK(all.out, i);                                                                                      \
    int n = PICK(all.n, i), start = FIRST_TILE(all, i);                                                               \
    few_rows<WEIGHT_BITS, TILES, UNROLL, 8>(                                                                          \
        w, Quant{scales, biases, k / GROUP_SIZE}, x, out, n, k, rows, (block - start) * 16 * TILES, around);          \
  }
FEW_ROWS(few_rows_1, 1, 4)
FEW_ROWS(few_rows_2, 2, 2)

extern "C" __global__ void __launch_bounds__(256) few_rows_gated(
    Weights all, const u16* x, u16* both, int k, int rows, int kind, Around around) {
  let_next_start();
  Pair pair{all.w[1], Quant{all.scales[1], all.biases[1], k / GROUP_SIZE}, all.out[1], both, kind};
  few_rows<WEIGHT_BITS, 2, 2, 8, true>(
      all.w[0], Quant{all.scales[0], all.biases[0], k / GROUP_SIZE}, x, all.out[0], all.n[0], k, rows, blockIdx.x * 16, around, pair);
}

// Up to 8 * COLUMNS rows of x at a time: activations go through shared memory, from where all warps of a block take them.
// A block makes 128 columns of the result over a part of K; the last block of a tile adds the parts in their order.
template <int BITS, int COLUMNS>
__device__ __forceinline__ void many_rows(
    const u8* w, Quant quant, const u16* x, u16* out, float* parts, u32* counters, int n_total, int k_total, int rows,
    int steps_each) {
  constexpr int kOwn = Form<BITS>::kOwn, kChunk = Form<BITS>::kChunk;
  // Values of K in a stage, units of 16 bytes in a row of activations of a stage, chunks of weights in it.
  constexpr int kDepth = BITS == 16 ? 64 : 128;
  constexpr int kUnits = kDepth / 8, kChunks = kDepth / kChunk;
  constexpr int kRows = 8 * COLUMNS;
  constexpr int kWeightBytes = 128 * kDepth * BITS / 8, kRowBytes = kRows * kDepth * 2;
  constexpr int kStageBytes = kWeightBytes + kRowBytes;
  constexpr int kStages = kStageBytes * 4 <= 72 * 1024 ? 4 : 3;
  extern __shared__ __align__(128) u8 memory[];
  const u32 base = shared_address(memory);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int quad = lane & 3, in_tile = lane >> 2;
  const int first = blockIdx.x * 128 + warp * 32, first_row = blockIdx.y * kRows;
  const size_t row_bytes = static_cast<size_t>(k_total) * BITS / 8;
  const int steps_total = (k_total + kDepth - 1) / kDepth;
  const int begin = blockIdx.z * steps_each, end = min(begin + steps_each, steps_total);
  const u8* own[4];
  int weight_row[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    weight_row[t] = min(first + t * 8 + in_tile, n_total - 1);
    own[t] = w + weight_row[t] * row_bytes;
  }
  // Where a unit of a row lies, so that the 8 threads that read at once use different banks.
  auto place = [](int row, int unit) {
    int moved = BITS == 4 ? unit ^ ((unit >> 3) & 1) ^ ((row & 1) << 1) : BITS == 8 ? unit ^ (row & 1) : unit ^ ((row & 1) << 2);
    return (row * kUnits + moved) * 16;
  };
  auto fetch_weights = [&](int step) {
    u32 stage = base + (step % kStages) * kStageBytes;
    if (step < end) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        int k = step * kDepth + j * kChunk + quad * kOwn;
        bool there = k < k_total;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          u32 place = ((warp * kChunks + j) * 4 + t) * 32 + lane;
          copy_async(stage + place * 16, there ? own[t] + static_cast<size_t>(k) * BITS / 8 : own[t], there);
        }
      }
    }
  };
  auto fetch_rows = [&](int step) {
    u32 stage = base + (step % kStages) * kStageBytes;
    if (step < end) {
#pragma unroll
      for (int i = threadIdx.x; i < kRows * kUnits; i += 128) {
        int row = i / kUnits, unit = i % kUnits, k = step * kDepth + unit * 8;
        bool there = first_row + row < rows && k < k_total;
        const u16* from = x + static_cast<size_t>(first_row + row) * k_total + k;
        copy_async(stage + kWeightBytes + place(row, unit), there ? from : x, there);
      }
    }
    copy_commit();
  };
  // A quantised weight does not depend on the launch before; activations do, and a plain weight may.
  if constexpr (BITS == 16) {
    wait_for_inputs();
  }
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    fetch_weights(begin + i);
  }
  if constexpr (BITS < 16) {
    wait_for_inputs();
  }
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    fetch_rows(begin + i);
  }
  float sums[2][COLUMNS][4] = {};
  for (int step = begin; step < end; ++step) {
    u32 scale_of[kChunks][4], bias_of[kChunks][4];
    if constexpr (BITS < 16) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        int k = min(step * kDepth + j * kChunk + quad * kOwn, k_total - 1);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          size_t group = static_cast<size_t>(weight_row[t]) * quant.groups + k / GROUP_SIZE;
          scale_of[j][t] = twice(__ldg(quant.scales + group));
          bias_of[j][t] = twice(__ldg(quant.biases + group));
        }
      }
    }
    copy_wait<kStages - 2>();
    __syncthreads();
    fetch_weights(step + kStages - 1);
    fetch_rows(step + kStages - 1);
    u32 stage = base + (step % kStages) * kStageBytes;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      uint4 q[4];
      u32 s[4], b[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        u32 place = ((warp * kChunks + j) * 4 + t) * 32 + lane;
        q[t] = load_shared(stage + place * 16);
        s[t] = scale_of[j][t];
        b[t] = bias_of[j][t];
      }
#pragma unroll
      for (int i = 0; i < kOwn / 8; ++i) {
        constexpr int kWords = BITS == 8 ? 2 : 1;
        u32 a[2][kWords][BITS == 8 ? 4 : 8];
#pragma unroll
        for (int h = 0; h < kWords; ++h) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            if constexpr (BITS == 16) {
              a[t][0][0] = q[2 * t].x, a[t][0][1] = q[2 * t + 1].x, a[t][0][2] = q[2 * t].y, a[t][0][3] = q[2 * t + 1].y;
              a[t][0][4] = q[2 * t].z, a[t][0][5] = q[2 * t + 1].z, a[t][0][6] = q[2 * t].w, a[t][0][7] = q[2 * t + 1].w;
            } else {
              u32 upper[Words<BITS>::kPairs], lower[Words<BITS>::kPairs];
              int word = i * kWords + h;
              Words<BITS>::expand(word_of(q[2 * t], word), s[2 * t], b[2 * t], upper);
              Words<BITS>::expand(word_of(q[2 * t + 1], word), s[2 * t + 1], b[2 * t + 1], lower);
#pragma unroll
              for (int p = 0; p < Words<BITS>::kPairs; ++p) {
                a[t][h][2 * p] = upper[p];
                a[t][h][2 * p + 1] = lower[p];
              }
            }
          }
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          int unit = (j * kChunk + quad * kOwn) / 8 + i;
          uint4 v = load_shared(stage + kWeightBytes + place(c * 8 + in_tile, unit));
#pragma unroll
          for (int h = 0; h < kWords; ++h) {
            u32 p[4];
            pairs_of<BITS>(v, h, p);
#pragma unroll
            for (int t = 0; t < 2; ++t) {
              mma(sums[t][c], a[t][h][0], a[t][h][1], a[t][h][2], a[t][h][3], p[0], p[1]);
              if constexpr (BITS != 8) {
                mma(sums[t][c], a[t][h][4], a[t][h][5], a[t][h][6], a[t][h][7], p[2], p[3]);
              }
            }
          }
        }
      }
    }
  }
  copy_wait<0>();
  __syncthreads();
  // Through shared memory, so that neighbouring threads write neighbouring columns.
  float* tile = reinterpret_cast<float*>(memory);
  constexpr int kPitch = 132;
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      int column = warp * 32 + t * 16 + in_tile, row = c * 8 + quad * 2;
      tile[row * kPitch + column] = sums[t][c][0];
      tile[(row + 1) * kPitch + column] = sums[t][c][1];
      tile[row * kPitch + column + 8] = sums[t][c][2];
      tile[(row + 1) * kPitch + column + 8] = sums[t][c][3];
    }
  }
  __syncthreads();
  const int splits = gridDim.z, left = min(kRows, rows - first_row), column = blockIdx.x * 128 + threadIdx.x;
  if (splits == 1) {
    for (int row = 0; row < left; ++row) {
      if (column < n_total) {
        out[static_cast<size_t>(first_row + row) * n_total + column] = from_float(tile[row * kPitch + threadIdx.x]);
      }
    }
    return;
  }
  const size_t part = static_cast<size_t>(rows) * n_total;
  float* own_part = parts + blockIdx.z * part;
  for (int row = 0; row < left; ++row) {
    if (column < n_total) {
      own_part[static_cast<size_t>(first_row + row) * n_total + column] = tile[row * kPitch + threadIdx.x];
    }
  }
  __threadfence();
  __syncthreads();
  __shared__ bool is_last;
  u32* counter = counters + blockIdx.y * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counter, 1u) == static_cast<u32>(splits) - 1;
  }
  __syncthreads();
  if (!is_last) {
    return;
  }
  __threadfence();
  for (int row = 0; row < left; ++row) {
    if (column < n_total) {
      size_t at = static_cast<size_t>(first_row + row) * n_total + column;
      float sum = 0.0f;
      for (int split = 0; split < splits; ++split) {
        sum += __ldcg(parts + split * part + at);
      }
      out[at] = from_float(sum);
    }
  }
  if (threadIdx.x == 0) {
    *counter = 0;
  }
}

#define MANY_ROWS(NAME, COLUMNS)                                                                                            \
  extern "C" __global__ void __launch_bounds__(128) NAME(                                                                   \
      const u8* w, const u16* scales, const u16* biases, const u16* x, u16* out, float* parts, u32* counters, int n, int k, \
      int rows, int steps_each) {                                                                                           \
    let_next_start();                                                                                                       \
    many_rows<WEIGHT_BITS, COLUMNS>(                                                                                        \
        w, Quant{scales, biases, k / GROUP_SIZE}, x, out, parts, counters, n, k, rows, steps_each);                         \
  }
MANY_ROWS(many_rows_16, 2)
MANY_ROWS(many_rows_32, 4)
MANY_ROWS(many_rows_64, 8)

#if WEIGHT_BITS < 16
// A quantised weight in full, for products with many rows and for rows of an embedding.
extern "C" __global__ void expand_all(
    const u32* w, const u16* scales, const u16* biases, u16* out, u64 words) {
  let_next_start();
  wait_for_inputs();
  for (u64 i = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; i < words; i += static_cast<u64>(gridDim.x) * blockDim.x) {
    u32 packed = w[i];
    constexpr int kValues = 32 / WEIGHT_BITS;
    u64 group = i * kValues / GROUP_SIZE;
    float s = to_float(scales[group]), b = to_float(biases[group]);
    u32 pairs[kValues / 2];
#pragma unroll
    for (int p = 0; p < kValues / 2; ++p) {
      float low = static_cast<float>((packed >> (2 * p * WEIGHT_BITS)) & ((1u << WEIGHT_BITS) - 1));
      float high = static_cast<float>((packed >> ((2 * p + 1) * WEIGHT_BITS)) & ((1u << WEIGHT_BITS) - 1));
      pairs[p] = pack(fmaf(low, s, b), fmaf(high, s, b));
    }
    if constexpr (WEIGHT_BITS == 4) {
      reinterpret_cast<uint4*>(out)[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
      reinterpret_cast<uint2*>(out)[i] = make_uint2(pairs[0], pairs[1]);
    }
  }
}
#endif
