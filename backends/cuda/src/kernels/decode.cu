// A step of decoding: every row is alone in its sequence. Rotary embedding, append and attention in one kernel.
//
// Blocks share the keys of a row, units of a few keys going round among their warps. A warp's units come to shared memory without
// waiting, each lane copying what it will use itself. Blocks of a cluster add what they have through each other's shared memory;
// clusters, where a row has several, through `parts`, and the last one makes the result.
//
// What is known before this step's values are there, a warp looks up before the launch before has ended: where its first keys lie,
// which it asks to come to the second cache, and by how much its features turn. It hardly ever comes from the launch before, but it may:
// it is kept within its arrays, out of the first cache, read again afterwards, and everything is looked up once more where it differs.
// Every block norms and turns the row's own queries and key for itself, a head a warp; one puts the key into the pool.
//
// Most of this text is executed once a launch, so that its length counts: it is kept short, in loops where a loop does. Follows
// `cluster.cuh` and `scores.cuh`.

struct Decode {
  const u16* q;
  const u16* k;
  const u16* v;
  u16* keys;
  u16* values;
  const int* row_sequences;
  const int* positions;
  const int* page_table;
  const int* slots;
  // Frequencies of the rotary embedding, or periods.
  const float* table;
  const u16* sinks;
  // Weights of the norms of heads; null for none.
  const u16* q_norm;
  const u16* k_norm;
  u16* out;
  float* parts;
  u32* counters;
  int heads;
  int kv_heads;
  int page_shift;
  int table_width;
  int pages;
  int window;
  // Features that turn; 0 for none.
  int dims;
  int interleaved;
  int inverse;
  // Rows of the page table.
  int sequences;
  float scale;
  float softcap;
  float turn_scale;
  float eps;
  // 1: heads of queries and keys are normed before they turn.
  int normed;
  int padding;
};

constexpr int kWarps = 8, kStages = DECODE_STAGES;

// Hidden from the compiler, which would make a loop twice for what is the same in all its rounds.
template <typename T>
__device__ __forceinline__ T same_each_time(T v) {
  if constexpr (sizeof(T) == 4) {
    asm volatile("" : "+r"(*reinterpret_cast<u32*>(&v)));
  }
  return v;
}

// Of an angle below 2^22: what is left of it beyond whole turns is exact but for the last bits of a turn, and then below pi.
__device__ __forceinline__ void sine_and_cosine(float angle, float& sine, float& cosine) {
  const float turns = rintf(angle * 0.15915494f);
  angle = fmaf(turns, 1.74845553e-7f, fmaf(turns, -6.28318548f, angle));
  sine = __sinf(angle), cosine = __cosf(angle);
}

template <int WIDTH, int GROUP, int CLUSTER>
__device__ __forceinline__ void decode(const Decode& step) {
  constexpr int kLanes = WIDTH / 8, kKeys = 32 / kLanes, kUnroll = GROUP > 4 ? 2 : 4, kUnit = kKeys * kUnroll;
  constexpr int kSlots = 2 * kUnroll, kSlice = GROUP * WIDTH / CLUSTER;
  extern __shared__ __align__(16) u8 memory[];
  __shared__ float tops[kWarps][GROUP], totals[kWarps][GROUP];
  __shared__ float own_sums[GROUP * WIDTH], own_top[GROUP], own_total[GROUP];
  const int row = blockIdx.z, splits = gridDim.x;
  // Several blocks in y when more heads share a key head than GROUP.
  const int groups = step.heads / step.kv_heads / GROUP;
  const int kv_head = blockIdx.y / groups, first_head = blockIdx.y * GROUP;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = lane % kLanes, key_of_warp = lane / kLanes;
  const int first = blockIdx.x + warp * splits, stride = splits * kWarps;
  auto place_of = [&](int page, int at) {
    page = min(max(page, 0), step.pages - 1);
    size_t pool_row = (static_cast<size_t>(page) << step.page_shift) + (max(at, 0) & ((1 << step.page_shift) - 1));
    return (pool_row * step.kv_heads + kv_head) * WIDTH;
  };
  // Pairs of features: those that turn, then the others.
  constexpr int kPairs = WIDTH / 64;
  int features[kPairs][2];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = lane + 32 * i, half = step.dims / 2;
    const bool is_near = step.interleaved || pair >= half;
    features[i][0] = is_near ? 2 * pair : pair;
    features[i][1] = is_near ? 2 * pair + 1 : pair + half;
  }
  auto rate_of = [&](int i) { return lane + 32 * i < step.dims / 2 ? __ldcg(step.table + lane + 32 * i) : 0.0f; };

  int sequence = __ldcg(step.row_sequences + row), position = __ldcg(step.positions + row), slot = __ldcg(step.slots + row);
  int from, units, pages[kUnroll];
  auto key_at = [&](int unit, int u) { return from + unit * kUnit + u * kKeys + key_of_warp; };
  auto page_at = [&](int at) {
    const int* own = step.page_table + static_cast<size_t>(min(max(sequence, 0), step.sequences - 1)) * step.table_width;
    return __ldcg(own + min(max(at, 0) >> step.page_shift, step.table_width - 1));
  };
  auto read_pages = [&](int unit, int (&of)[kUnroll]) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      of[u] = unit < units ? page_at(min(key_at(unit, u), position)) : 0;
    }
  };
  const u32 ring = shared_address(memory) + (warp * kStages * kSlots * 32 + lane) * 16;
  auto copy = [&](int stage, int unit) {
    if (unit < units) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = key_at(unit, u);
        const size_t lies = place_of(pages[u], min(at, position)) + part * 8;
        copy_async(ring + (stage * kSlots + u) * 512, step.keys + lies, at <= position);
        copy_async(ring + (stage * kSlots + kUnroll + u) * 512, step.values + lies, at <= position);
      }
    }
    copy_commit();
  };
  // Keys, values and queries of the row itself.
  __shared__ __align__(16) u16 own_key[WIDTH], own_value[WIDTH];
  __shared__ __align__(16) float queries[GROUP][WIDTH];
  float sine[kPairs], cosine[kPairs];
  u16 values[kPairs][2], norms[kPairs][2];
  auto load_head = [&](int head) {
    const bool is_key = head == GROUP;
    const u16* of = is_key ? step.k + (static_cast<size_t>(row) * step.kv_heads + kv_head) * WIDTH
                           : step.q + (static_cast<size_t>(row) * step.heads + first_head + head) * WIDTH;
    const u16* norm = is_key ? step.k_norm : step.q_norm;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        values[i][j] = of[features[i][j]];
        norms[i][j] = norm != nullptr ? norm[features[i][j]] : static_cast<u16>(ONE_TWICE);
      }
    }
  };
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    from = step.window > 0 ? max(0, position + 1 - step.window) : 0;
    units = (position - from + kUnit) / kUnit;
    float rates[kPairs];
    read_pages(first, pages);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      rates[i] = rate_of(i);
    }
    if (is_first && first < units && part % 2 == 0) {
      // Two lanes have 32 bytes, the least that memory gives.
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        size_t lies = place_of(pages[u], min(key_at(first, u), position)) + part * 8;
        prefetch(step.keys + lies);
        prefetch(step.values + lies);
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      sine[i] = 0.0f, cosine[i] = 1.0f;
      if (lane + 32 * i < step.dims / 2) {
        const float turned = position * step.turn_scale;
        sine_and_cosine(step.inverse ? __fdiv_rn(turned, rates[i]) : turned * rates[i], sine[i], cosine[i]);
      }
    }
    if (is_first) {
      wait_for_inputs();
      load_head(min(warp, GROUP));
    }
    copy(0, first);
    // Not before: what the next launch reads ahead would keep these keys waiting.
    let_next_start();
    const int found[3] = {__ldcg(step.row_sequences + row), __ldcg(step.positions + row), __ldcg(step.slots + row)};
    bool is_same = found[0] == sequence && found[1] == position && found[2] == slot;
    int now[kUnroll];
    read_pages(first, now);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      is_same = is_same && now[u] == pages[u];
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      is_same = is_same && rate_of(i) == rates[i];
    }
    if (__all_sync(0xFFFFFFFFu, is_same)) {
      break;
    }
    copy_wait<0>();
    sequence = found[0], position = found[1], slot = found[2];
  }
  const bool has_slot = slot >= 0 && slot < step.pages << step.page_shift;
  const bool appends = has_slot && blockIdx.x == 0 && blockIdx.y % groups == 0;
  const size_t appended = (static_cast<size_t>(max(slot, 0)) * step.kv_heads + kv_head) * WIDTH;
#pragma unroll 1
  for (int head = warp; head <= GROUP; head += kWarps) {
    if (head != min(warp, GROUP)) {
      load_head(head);
    }
    const bool is_normed = same_each_time(step.normed) != 0;
    float factor = 1.0f;
    if (is_normed) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        sum += to_float(values[i][0]) * to_float(values[i][0]) + to_float(values[i][1]) * to_float(values[i][1]);
      }
      factor = rsqrtf(sum_of_warp(sum) / WIDTH + step.eps);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      // Rounded after the norm and after turning, as when each is a kernel of its own.
      float a = to_float(values[i][0]), b = to_float(values[i][1]);
      if (is_normed) {
        a = rounded(a * factor * to_float(norms[i][0]));
        b = rounded(b * factor * to_float(norms[i][1]));
      }
      const u16 x = from_float(a * cosine[i] - b * sine[i]), y = from_float(b * cosine[i] + a * sine[i]);
      if (head == GROUP) {
        own_key[features[i][0]] = x, own_key[features[i][1]] = y;
        if (appends) {
          step.keys[appended + features[i][0]] = x, step.keys[appended + features[i][1]] = y;
        }
      } else {
        queries[head][features[i][0]] = to_float(x) * step.scale, queries[head][features[i][1]] = to_float(y) * step.scale;
      }
    }
  }
  if (warp == kWarps - 1) {
    // Without a slot the row's key is in the pool already.
    const size_t lies = place_of(page_at(position), position);
    const u16* of_value = has_slot ? step.v + (static_cast<size_t>(row) * step.kv_heads + kv_head) * WIDTH : step.values + lies;
    for (int i = lane; i < WIDTH / 8; i += 32) {
      const uint4 value = *reinterpret_cast<const uint4*>(of_value + i * 8);
      *reinterpret_cast<uint4*>(own_value + i * 8) = value;
      if (appends) {
        *reinterpret_cast<uint4*>(step.values + appended + i * 8) = value;
      }
    }
  }
  __syncthreads();
  const u32 key_here = has_slot ? shared_address(own_key) + part * 16 : 0, value_here = shared_address(own_value) + part * 16;
  Sums<GROUP> all;
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    const float4 low = *reinterpret_cast<const float4*>(queries[g] + part * 8);
    const float4 high = *reinterpret_cast<const float4*>(queries[g] + part * 8 + 4);
    all.query[g][0] = low.x, all.query[g][1] = low.y, all.query[g][2] = low.z, all.query[g][3] = low.w;
    all.query[g][4] = high.x, all.query[g][5] = high.y, all.query[g][6] = high.z, all.query[g][7] = high.w;
    all.top[g] = kNone;
    all.total[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      all.sum[g][i] = 0.0f;
    }
  }
  // One unit is on its way by now.
  int coming = first + stride, to = 1 % kStages, stage = 0;
#pragma unroll 1
  for (int unit = first - (kStages - 1) * stride; __all_sync(0xFFFFFFFFu, unit < units); unit += stride) {
    if (unit + (kStages - 1) * stride > first) {
      read_pages(coming, pages);
      copy(to, coming);
      coming += stride;
      to = to + 1 == kStages ? 0 : to + 1;
    }
    if (unit < first) {
      continue;
    }
    copy_wait<kStages - 1>();
    bool seen[kUnroll], is_own[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      seen[u] = key_at(unit, u) <= position;
      is_own[u] = key_at(unit, u) == position && has_slot;
    }
    const u32 keys = ring + stage * kSlots * 512, values_at = keys + kUnroll * 512;
    absorb<kLanes, GROUP, kUnroll>(
        all, same_each_time(step.softcap), [&](int u) { return load_shared(is_own[u] ? key_here : keys + u * 512); },
        [&](int u) { return load_shared(is_own[u] ? value_here : values_at + u * 512); }, seen);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  copy_wait<0>();
  __syncwarp();
  // The keys that a warp had at a time, then the warps of the block; a warp's sums lie where its keys were.
  float* const sums = reinterpret_cast<float*>(memory + warp * kStages * kSlots * 512);
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
#pragma unroll
    for (int s = kLanes; s < 32; s *= 2) {
      float other_top = __shfl_xor_sync(0xFFFFFFFFu, all.top[g], s), other_total = __shfl_xor_sync(0xFFFFFFFFu, all.total[g], s);
      float highest = fmaxf(all.top[g], other_top);
      const float a = exponential(all.top[g] - highest), b = exponential(other_top - highest);
      all.total[g] = all.total[g] * a + other_total * b;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        all.sum[g][i] = all.sum[g][i] * a + __shfl_xor_sync(0xFFFFFFFFu, all.sum[g][i], s) * b;
      }
      all.top[g] = highest;
    }
    if (key_of_warp == 0) {
      if (part == 0) {
        tops[warp][g] = all.top[g];
        totals[warp][g] = all.total[g];
      }
      float4* to = reinterpret_cast<float4*>(sums + g * WIDTH + part * 8);
      to[0] = make_float4(all.sum[g][0], all.sum[g][1], all.sum[g][2], all.sum[g][3]);
      to[1] = make_float4(all.sum[g][4], all.sum[g][5], all.sum[g][6], all.sum[g][7]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * WIDTH; i += kWarps * 32) {
    const int g = i / WIDTH;
    float highest = kNone, total = 0.0f, value = 0.0f;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) {
      highest = fmaxf(highest, tops[j][g]);
    }
#pragma unroll
    for (int j = 0; j < kWarps; ++j) {
      const float weight = exponential(tops[j][g] - highest);
      total += totals[j][g] * weight;
      value += reinterpret_cast<const float*>(memory + j * kStages * kSlots * 512)[i] * weight;
    }
    own_sums[i] = value;
    if (i % WIDTH == 0) {
      own_top[g] = highest;
      own_total[g] = total;
    }
  }
  // Then the blocks of the cluster, each of which makes a slice of the result.
  const int rank = blockIdx.x % CLUSTER, clusters = splits / CLUSTER, at = rank * kSlice + threadIdx.x;
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  constexpr int kEach = (kSlice + kWarps * 32 - 1) / (kWarps * 32);
  float highest[kEach], total[kEach], value[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int i = at + e * kWarps * 32, g = i / WIDTH;
    highest[e] = kNone, total[e] = 0.0f, value[e] = 0.0f;
    if (threadIdx.x + e * kWarps * 32 < kSlice) {
      if constexpr (CLUSTER > 1) {
        float t[CLUSTER], n[CLUSTER], s[CLUSTER];
#pragma unroll
        for (int j = 0; j < CLUSTER; ++j) {
          t[j] = of_block(own_top + g, j), n[j] = of_block(own_total + g, j), s[j] = of_block(own_sums + i, j);
        }
#pragma unroll
        for (int j = 0; j < CLUSTER; ++j) {
          highest[e] = fmaxf(highest[e], t[j]);
        }
#pragma unroll
        for (int j = 0; j < CLUSTER; ++j) {
          const float weight = exponential(t[j] - highest[e]);
          total[e] += n[j] * weight;
          value[e] += s[j] * weight;
        }
      } else {
        highest[e] = own_top[g], total[e] = own_total[g], value[e] = own_sums[i];
      }
    }
  }
  if constexpr (CLUSTER > 1) {
    // The others may end when nobody reads their memory any more.
    cluster_arrive();
  }
  // Then the clusters.
  bool is_last = true;
  if (clusters > 1) {
    constexpr int kPart = kSlice + 2 * GROUP;
    const int index = (row * gridDim.y + blockIdx.y) * CLUSTER + rank;
    float* parts = step.parts + static_cast<size_t>(index) * clusters * kPart;
    float* to = parts + blockIdx.x / CLUSTER * kPart;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int own = threadIdx.x + e * kWarps * 32, g = (rank * kSlice + own) / WIDTH;
      if (own < kSlice) {
        to[own] = value[e];
        // Every thread of a head has the same.
        to[kSlice + g] = highest[e];
        to[kSlice + GROUP + g] = total[e];
      }
    }
    __shared__ bool is_last_of_all;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last_of_all = atomicAdd(step.counters + index, 1u) == static_cast<u32>(clusters) - 1;
    }
    __syncthreads();
    is_last = is_last_of_all;
    if (is_last) {
      __threadfence();
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int own = threadIdx.x + e * kWarps * 32, g = (rank * kSlice + own) / WIDTH;
        highest[e] = kNone, total[e] = 0.0f, value[e] = 0.0f;
        if (own < kSlice) {
#pragma unroll 4
          for (int j = 0; j < clusters; ++j) {
            const float* other = parts + j * kPart;
            add_part(highest[e], total[e], value[e], __ldcg(other + kSlice + g), __ldcg(other + kSlice + GROUP + g), __ldcg(other + own));
          }
        }
      }
      if (threadIdx.x == 0) {
        step.counters[index] = 0;
      }
    }
  }
  if (is_last) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int own = threadIdx.x + e * kWarps * 32, i = rank * kSlice + own, head = first_head + i / WIDTH;
      if (own < kSlice) {
        if (step.sinks != nullptr) {
          add_part(highest[e], total[e], value[e], to_float(step.sinks[head]), 1.0f, 0.0f);
        }
        step.out[static_cast<size_t>(row) * step.heads * WIDTH + first_head * WIDTH + i] =
            from_float(total[e] > 0.0f ? __fdividef(value[e], total[e]) : 0.0f);
      }
    }
  }
  if constexpr (CLUSTER > 1) {
    cluster_wait();
  }
}

#define DECODE(N)                                                                                              \
  extern "C" __global__ void __cluster_dims__(N, 1, 1) __launch_bounds__(kWarps * 32, GROUP_HEADS > 4 ? 1 : 2) \
      decode_##N(const __grid_constant__ Decode step) {                                                        \
    decode<HEAD_WIDTH, GROUP_HEADS, N>(step);                                                                  \
  }
DECODE(1)
DECODE(2)
DECODE(4)
DECODE(8)
