// Attention over the paged pool.
//
// `decode`: one row of a sequence at a time, its keys split over blocks and warps; the query heads that share a key head go
// together. `prefill`: tiles of 64 query rows on the tensor cores. Both walk the page table on the device. Which rows are whose
// is seen from `row_sequences`: a row whose neighbours are of other sequences is alone and belongs to `decode`.

struct Step {
  const u16* q;
  const u16* keys;
  const u16* values;
  const int* row_sequences;
  const int* positions;
  const int* page_table;
  const u16* sinks;
  int rows;
  int heads;
  int kv_heads;
  int page_shift;
  int table_width;
  int pages;
  int window;
  float scale;
  float softcap;
};

#define STEP_ARGS                                                                                                        \
  const u16 *q, const u16 *keys, const u16 *values, const int *row_sequences, const int *positions,                      \
      const int *page_table, const u16 *sinks, u16 *out, float *parts, u32 *counters, int rows, int heads, int kv_heads, \
      int page_shift, int table_width, int pages, int window, float scale, float softcap, int alone_only
#define STEP                                                                                                             \
  Step{q, keys, values, row_sequences, positions, page_table, sinks, rows, heads, kv_heads, page_shift, table_width,     \
       pages, window, scale, softcap}

__device__ __forceinline__ bool is_alone(const Step& step, int row) {
  int own = step.row_sequences[row];
  return (row == 0 || step.row_sequences[row - 1] != own) && (row + 1 == step.rows || step.row_sequences[row + 1] != own);
}

// Row of the pool that holds key `at` of a sequence.
__device__ __forceinline__ size_t pool_row(const Step& step, int sequence, int at) {
  int entry = min(at >> step.page_shift, step.table_width - 1);
  int page = step.page_table[static_cast<size_t>(sequence) * step.table_width + entry];
  page = min(max(page, 0), step.pages - 1);
  return (static_cast<size_t>(page) << step.page_shift) + (at & ((1 << step.page_shift) - 1));
}

__device__ __forceinline__ float capped(const Step& step, float score) {
  return step.softcap > 0.0f ? step.softcap * tanhf(score / step.softcap) : score;
}

__device__ __forceinline__ void unpack(const uint4& v, float (&f)[8]) {
  f[0] = low_float(v.x), f[1] = high_float(v.x), f[2] = low_float(v.y), f[3] = high_float(v.y);
  f[4] = low_float(v.z), f[5] = high_float(v.z), f[6] = low_float(v.w), f[7] = high_float(v.w);
}

// GROUP query heads for one key head. WIDTH / 8 threads hold a key; a warp has several keys at a time.
template <int WIDTH, int GROUP>
__device__ __forceinline__ void decode(const Step& step, u16* out, float* parts, u32* counters, int alone_only) {
  constexpr int kWarps = 4, kLanes = WIDTH / 8, kKeys = 32 / kLanes, kUnroll = GROUP > 4 ? 2 : 4;
  let_next_start();
  wait_for_inputs();
  const int row = blockIdx.z, splits = gridDim.x;
  // Several blocks in y when more heads share a key head than GROUP.
  const int groups = step.heads / step.kv_heads / GROUP;
  const int kv_head = blockIdx.y / groups, first_head = blockIdx.y * GROUP;
  if (alone_only && !is_alone(step, row)) {
    return;
  }
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int part = lane % kLanes, key_of_warp = lane / kLanes;
  const int sequence = step.row_sequences[row], position = step.positions[row];
  const int from = step.window > 0 ? max(0, position + 1 - step.window) : 0, n_keys = position + 1 - from;
  // Whole warps' worth of keys to a split.
  constexpr int kStride = kWarps * kKeys * kUnroll;
  const int each = ((n_keys + splits - 1) / splits + kStride - 1) / kStride * kStride;
  const int begin = from + min(n_keys, static_cast<int>(blockIdx.x) * each), end = min(position + 1, begin + each);

  float query[GROUP][8], sum[GROUP][8], top[GROUP], total[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    uint4 v = *reinterpret_cast<const uint4*>(step.q + (static_cast<size_t>(row) * step.heads + first_head + g) * WIDTH + part * 8);
    unpack(v, query[g]);
    top[g] = -kInfinity;
    total[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      query[g][i] *= step.scale;
      sum[g][i] = 0.0f;
    }
  }
  for (int start = begin + warp * kKeys * kUnroll; start < end; start += kStride) {
    uint4 k[kUnroll], v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      int at = start + u * kKeys + key_of_warp;
      size_t place = (pool_row(step, sequence, min(at, position)) * step.kv_heads + kv_head) * WIDTH + part * 8;
      k[u] = load_once(step.keys + place);
      v[u] = load_once(step.values + place);
    }
    float score[kUnroll][GROUP];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float key[8];
      unpack(k[u], key);
      bool seen = start + u * kKeys + key_of_warp < end;
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          dot = fmaf(query[g][i], key[i], dot);
        }
#pragma unroll
        for (int s = kLanes / 2; s > 0; s /= 2) {
          dot += __shfl_xor_sync(0xFFFFFFFFu, dot, s);
        }
        score[u][g] = seen ? capped(step, dot) : -kInfinity;
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      float highest = top[g];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        highest = fmaxf(highest, score[u][g]);
      }
      float shrink = highest == -kInfinity ? 1.0f : __expf(top[g] - highest);
      top[g] = highest;
      total[g] *= shrink;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[g][i] *= shrink;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        score[u][g] = highest == -kInfinity ? 0.0f : __expf(score[u][g] - highest);
        total[g] += score[u][g];
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float value[8];
      unpack(v[u], value);
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[g][i] = fmaf(score[u][g], value[i], sum[g][i]);
        }
      }
    }
  }
  // The keys that a warp had at a time, then the warps of the block, then the blocks.
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
#pragma unroll
    for (int s = kLanes; s < 32; s *= 2) {
      float other_top = __shfl_xor_sync(0xFFFFFFFFu, top[g], s), other_total = __shfl_xor_sync(0xFFFFFFFFu, total[g], s);
      float highest = fmaxf(top[g], other_top);
      float a = highest == -kInfinity ? 1.0f : __expf(top[g] - highest), b = highest == -kInfinity ? 1.0f : __expf(other_top - highest);
      total[g] = total[g] * a + other_total * b;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[g][i] = sum[g][i] * a + __shfl_xor_sync(0xFFFFFFFFu, sum[g][i], s) * b;
      }
      top[g] = highest;
    }
  }
  __shared__ float tops[kWarps][GROUP], totals[kWarps][GROUP], sums[kWarps][GROUP][WIDTH];
  if (lane < kLanes) {
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      if (part == 0) {
        tops[warp][g] = top[g];
        totals[warp][g] = total[g];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sums[warp][g][part * 8 + i] = sum[g][i];
      }
    }
  }
  __syncthreads();
  // Where the parts of this row and group lie: a sum of WIDTH, then highest score and total.
  constexpr int kPart = WIDTH + 2;
  float* own_parts = parts + (static_cast<size_t>(row) * step.heads + first_head) * splits * kPart;
  for (int i = threadIdx.x; i < GROUP * WIDTH; i += kWarps * 32) {
    int g = i / WIDTH, at = i % WIDTH;
    float highest = -kInfinity;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) {
      highest = fmaxf(highest, tops[j][g]);
    }
    float all = 0.0f, value = 0.0f;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) {
      float weight = tops[j][g] == -kInfinity ? 0.0f : __expf(tops[j][g] - highest);
      all += totals[j][g] * weight;
      value += sums[j][g][at] * weight;
    }
    if (splits == 1) {
      if (step.sinks != nullptr) {
        float sink = to_float(step.sinks[first_head + g]), with = fmaxf(highest, sink);
        float weight = highest == -kInfinity ? 0.0f : __expf(highest - with);
        all = all * weight + __expf(sink - with);
        value *= weight;
      }
      out[(static_cast<size_t>(row) * step.heads + first_head + g) * WIDTH + at] = from_float(all > 0.0f ? value / all : 0.0f);
    } else {
      float* to = own_parts + (static_cast<size_t>(g) * splits + blockIdx.x) * kPart;
      to[at] = value;
      if (at == 0) {
        to[WIDTH] = highest;
        to[WIDTH + 1] = all;
      }
    }
  }
  if (splits == 1) {
      return;
  }
  __threadfence();
  __syncthreads();
  __shared__ bool is_last;
  u32* counter = counters + row * gridDim.y + blockIdx.y;
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counter, 1u) == static_cast<u32>(splits) - 1;
  }
  __syncthreads();
  if (!is_last) {
    return;
  }
  __threadfence();
  for (int i = threadIdx.x; i < GROUP * WIDTH; i += kWarps * 32) {
    int g = i / WIDTH, at = i % WIDTH;
    const float* from_parts = own_parts + static_cast<size_t>(g) * splits * kPart;
    float highest = step.sinks != nullptr ? to_float(step.sinks[first_head + g]) : -kInfinity;
    for (int j = 0; j < splits; ++j) {
      highest = fmaxf(highest, __ldcg(from_parts + j * kPart + WIDTH));
    }
    float all = step.sinks != nullptr ? __expf(to_float(step.sinks[first_head + g]) - highest) : 0.0f, value = 0.0f;
    for (int j = 0; j < splits; ++j) {
      float own = __ldcg(from_parts + j * kPart + WIDTH);
      float weight = own == -kInfinity ? 0.0f : __expf(own - highest);
      all += __ldcg(from_parts + j * kPart + WIDTH + 1) * weight;
      value += __ldcg(from_parts + j * kPart + at) * weight;
    }
    out[(static_cast<size_t>(row) * step.heads + first_head + g) * WIDTH + at] = from_float(all > 0.0f ? value / all : 0.0f);
  }
  if (threadIdx.x == 0) {
    *counter = 0;
  }
}

#ifdef GROUP_HEADS
extern "C" __global__ void __launch_bounds__(128) decode_rows(STEP_ARGS) {
  decode<HEAD_WIDTH, GROUP_HEADS>(STEP, out, parts, counters, alone_only);
}
#endif

#if HEAD_WIDTH <= 128 && !defined(PREFILL_KEYS)
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// 64 query rows, a row being a token and one of the heads that share the key head; each of 4 warps has 16 of them.
template <int WIDTH>
__device__ __forceinline__ void prefill(const Step& step, u16* out) {
  constexpr int kTile = 64, kUnits = WIDTH / 8, kDepth = WIDTH / 32, kBytes = kTile * WIDTH * 2;
  extern __shared__ __align__(128) u8 memory[];
  const u32 base = shared_address(memory);
  let_next_start();
  wait_for_inputs();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, in_tile = lane >> 2;
  const int group = step.heads / step.kv_heads, tokens_each = kTile / group, kv_head = blockIdx.y;
  // Later tiles see more keys: they go first.
  const int first_token = static_cast<int>(gridDim.x - 1 - blockIdx.x) * tokens_each;
  const int last_token = min(first_token + tokens_each, step.rows) - 1;
  int token[2], head[2], sequence[2], position[2];
  bool is_used[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = warp * 16 + h * 8 + in_tile;
    token[h] = first_token + row / group;
    head[h] = kv_head * group + row % group;
    is_used[h] = row < tokens_each * group && token[h] < step.rows;
    token[h] = min(token[h], step.rows - 1);
    is_used[h] = is_used[h] && !is_alone(step, token[h]);
    sequence[h] = is_used[h] ? step.row_sequences[token[h]] : -1;
    position[h] = step.positions[token[h]];
  }
  uint4 query[2][kDepth];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      query[h][d] = *reinterpret_cast<const uint4*>(
          step.q + (static_cast<size_t>(token[h]) * step.heads + head[h]) * WIDTH + d * 32 + quad * 8);
    }
  }
  auto place = [](int row, int unit) { return (row * kUnits + (unit ^ (((row & 1) << 2) | ((row >> 1) & 3)))) * 16; };
  float sums[WIDTH / 8][4] = {};
  float top[2] = {-kInfinity, -kInfinity}, total[2] = {0.0f, 0.0f};
  // Sequences are in order; most tiles have one.
  for (int row = first_token; row <= last_token;) {
    const int own = step.row_sequences[row];
    const bool alone = is_alone(step, row);
    int after = row, highest = 0, lowest = 0x7FFFFFFF;
    while (after <= last_token && step.row_sequences[after] == own) {
      highest = max(highest, step.positions[after]);
      lowest = min(lowest, step.positions[after]);
      ++after;
    }
    row = after;
    if (alone) {
      continue;
    }
    const int begin = step.window > 0 ? max(0, lowest + 1 - step.window) / kTile * kTile : 0, end = highest + 1;
    auto fetch = [&](int start, int stage) {
      if (start < end) {
        for (int i = threadIdx.x; i < kTile * kUnits; i += 128) {
          int key = i / kUnits, unit = i % kUnits, at = start + key;
          bool there = at < end;
          size_t from = (pool_row(step, own, min(at, end - 1)) * step.kv_heads + kv_head) * WIDTH + unit * 8;
          copy_async(base + stage * 2 * kBytes + place(key, unit), step.keys + from, there);
          copy_async(base + stage * 2 * kBytes + kBytes + place(key, unit), step.values + from, there);
        }
      }
      copy_commit();
    };
    __syncthreads();
    fetch(begin, 0);
    int stage = 0;
    for (int start = begin; start < end; start += kTile, stage ^= 1) {
      fetch(start + kTile, stage ^ 1);
      copy_wait<1>();
      __syncthreads();
      const u32 k_tile = base + stage * 2 * kBytes, v_tile = k_tile + kBytes;
      float scores[kTile / 8][4] = {};
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          uint4 k = load_shared(k_tile + place(n * 8 + in_tile, d * 4 + quad));
          mma(scores[n], query[0][d].x, query[1][d].x, query[0][d].y, query[1][d].y, k.x, k.y);
          mma(scores[n], query[0][d].z, query[1][d].z, query[0][d].w, query[1][d].w, k.z, k.w);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float best = top[h];
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            int at = start + n * 8 + quad * 2 + j;
            bool seen = sequence[h] == own && at <= position[h] && (step.window <= 0 || at > position[h] - step.window);
            float& score = scores[n][2 * h + j];
            score = seen ? capped(step, score * step.scale) : -kInfinity;
            best = fmaxf(best, score);
          }
        }
        best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 1));
        best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 2));
        float shrink = best == -kInfinity ? 1.0f : __expf(top[h] - best), own_total = 0.0f;
        top[h] = best;
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& score = scores[n][2 * h + j];
            score = score == -kInfinity ? 0.0f : __expf(score - best);
            own_total += score;
          }
        }
        total[h] = total[h] * shrink + own_total;
#pragma unroll
        for (int d = 0; d < WIDTH / 8; ++d) {
          sums[d][2 * h] *= shrink;
          sums[d][2 * h + 1] *= shrink;
        }
      }
#pragma unroll
      for (int n = 0; n < kTile / 16; ++n) {
        u32 a0 = pack(scores[2 * n][0], scores[2 * n][1]), a1 = pack(scores[2 * n][2], scores[2 * n][3]);
        u32 a2 = pack(scores[2 * n + 1][0], scores[2 * n + 1][1]), a3 = pack(scores[2 * n + 1][2], scores[2 * n + 1][3]);
#pragma unroll
        for (int d = 0; d < WIDTH / 16; ++d) {
          u32 b[4];
          // 4 squares of 8 x 8: keys 0-7 and 8-15, of the first and the second 8 features.
          int key = n * 16 + (lane & 7) + (lane & 8), unit = d * 2 + (lane >> 4);
          load_transposed(b, v_tile + place(key, unit));
          mma(sums[2 * d], a0, a1, a2, a3, b[0], b[1]);
          mma(sums[2 * d + 1], a0, a1, a2, a3, b[2], b[3]);
        }
      }
      __syncthreads();
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float all = total[h];
    all += __shfl_xor_sync(0xFFFFFFFFu, all, 1);
    all += __shfl_xor_sync(0xFFFFFFFFu, all, 2);
    float factor = 1.0f;
    if (step.sinks != nullptr) {
      float sink = to_float(step.sinks[head[h]]), with = fmaxf(top[h], sink);
      factor = top[h] == -kInfinity ? 0.0f : __expf(top[h] - with);
      all = all * factor + __expf(sink - with);
    }
    factor = all > 0.0f ? factor / all : 0.0f;
    if (is_used[h]) {
      u32* to = reinterpret_cast<u32*>(out + (static_cast<size_t>(token[h]) * step.heads + head[h]) * WIDTH);
#pragma unroll
      for (int d = 0; d < WIDTH / 8; ++d) {
        to[d * 4 + quad] = pack(sums[d][2 * h] * factor, sums[d][2 * h + 1] * factor);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) prefill_rows(STEP_ARGS) {
  prefill<HEAD_WIDTH>(STEP, out);
}
#endif
