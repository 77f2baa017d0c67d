// Attention of rows one at a time: a row's keys are split over blocks and warps, and the query heads that share a key head go
// together. Follows `paged.cuh`.

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

extern "C" __global__ void __launch_bounds__(128) decode_rows(STEP_ARGS) {
  decode<HEAD_WIDTH, GROUP_HEADS>(STEP, out, parts, counters, alone_only);
}
