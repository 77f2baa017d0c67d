// A step of decoding: every row is alone in its sequence. Rotary embedding, append and attention in one kernel.
//
// Blocks share the keys of a row, units of a few keys going round among their warps. A warp's units come to shared memory without
// waiting, each lane copying what it will use itself. Blocks of a cluster add what they have through each other's shared memory;
// clusters, where a row has several, through `parts`, and the last one makes the result.
//
// Before it may use what the launch before wrote, a block already asks for the first keys to come to the second cache. The numbers
// that it finds them by may not be there yet: they are kept within their arrays, out of the first cache, and read again afterwards.
// The key of the row itself comes from its product: one block norms and rotates it, uses it, and puts it into the pool.

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

__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
__device__ __forceinline__ void unpack(const uint4& v, float (&f)[8]) {
  f[0] = low_float(v.x), f[1] = high_float(v.x), f[2] = low_float(v.y), f[3] = high_float(v.y);
  f[4] = low_float(v.z), f[5] = high_float(v.z), f[6] = low_float(v.w), f[7] = high_float(v.w);
}

// How a lane's 8 features turn.
struct Turn {
  float cosine[8], sine[8];
  // Where the other features of the pairs are; 0 where they are among these.
  int partner;
  int turned;
};

__device__ __forceinline__ Turn turn_of(const Decode& step, int first, float position) {
  Turn turn;
  const int half = step.dims / 2;
  turn.turned = min(max(step.dims - first, 0), 8);
  turn.partner = step.interleaved || turn.turned == 0 ? 0 : first < half ? half : -half;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    turn.cosine[i] = 1.0f, turn.sine[i] = 0.0f;
    if (i < turn.turned) {
      int at = step.interleaved ? (first + i) / 2 : first < half ? first + i : first + i - half;
      float by = step.table[at];
      sincosf(step.inverse ? position / by : position * by, &turn.sine[i], &turn.cosine[i]);
    }
  }
  return turn;
}

// A norm's weights for a lane's features and for those of their partners.
struct OfNorm {
  uint4 own, partners;
};
__device__ __forceinline__ OfNorm of_norm(const u16* weight, const Turn& turn, int first) {
  const uint4 ones = make_uint4(ONE_TWICE, ONE_TWICE, ONE_TWICE, ONE_TWICE);
  OfNorm found{ones, ones};
  if (weight != nullptr) {
    found.own = *reinterpret_cast<const uint4*>(weight + first);
    found.partners = *reinterpret_cast<const uint4*>(weight + first + turn.partner);
  }
  return found;
}

// Eight features at `from`, normed over the head's LANES lanes if that is asked for, turned and rounded.
template <int LANES>
__device__ __forceinline__ uint4 turned(const u16* from, const Turn& turn, const OfNorm& norm, const Decode& step) {
  const int interleaved = step.interleaved;
  uint4 v = *reinterpret_cast<const uint4*>(from);
  uint4 w = *reinterpret_cast<const uint4*>(from + turn.partner);
  if (step.normed) {
    float sum = sum_of_squares(v);
#pragma unroll
    for (int s = LANES / 2; s > 0; s /= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, s);
    }
    const float factor = rsqrtf(sum / (LANES * 8) + step.eps);
    v = scaled_by(v, norm.own, factor);
    w = scaled_by(w, norm.partners, factor);
  }
  if (turn.turned == 0) {
    return v;
  }
  float a[8], b[8];
  unpack(v, a);
  unpack(w, b);
  float r[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float other = interleaved ? a[i ^ 1] : b[i];
    float sine = (interleaved ? i % 2 == 0 : turn.partner > 0) ? -turn.sine[i] : turn.sine[i];
    r[i] = i < turn.turned ? a[i] * turn.cosine[i] + other * sine : a[i];
  }
  return make_uint4(pack(r[0], r[1]), pack(r[2], r[3]), pack(r[4], r[5]), pack(r[6], r[7]));
}

// What a lane has of the sums: `top` the highest score so far, which the others are relative to.
template <int GROUP>
struct Sums {
  float query[GROUP][8], sum[GROUP][8], top[GROUP], total[GROUP];
};

// N keys for each group of lanes; those not `seen` count for nothing.
template <int LANES, int GROUP, int N, typename K, typename V>
__device__ __forceinline__ void absorb(Sums<GROUP>& all, const Decode& step, K key_of, V value_of, const bool (&seen)[N]) {
  float score[N][GROUP];
#pragma unroll
  for (int u = 0; u < N; ++u) {
    float key[8];
    unpack(key_of(u), key);
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        dot = fmaf(all.query[g][i], key[i], dot);
      }
      score[u][g] = dot;
    }
  }
#pragma unroll
  for (int s = LANES / 2; s > 0; s /= 2) {
#pragma unroll
    for (int u = 0; u < N; ++u) {
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        score[u][g] += __shfl_xor_sync(0xFFFFFFFFu, score[u][g], s);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    float highest = all.top[g];
#pragma unroll
    for (int u = 0; u < N; ++u) {
      float s = step.softcap > 0.0f ? step.softcap * tanhf(score[u][g] / step.softcap) : score[u][g];
      score[u][g] = seen[u] ? s : -kInfinity;
      highest = fmaxf(highest, score[u][g]);
    }
    float shrink = highest == -kInfinity ? 1.0f : __expf(all.top[g] - highest);
    all.top[g] = highest;
    all.total[g] *= shrink;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      all.sum[g][i] *= shrink;
    }
#pragma unroll
    for (int u = 0; u < N; ++u) {
      score[u][g] = highest == -kInfinity ? 0.0f : __expf(score[u][g] - highest);
      all.total[g] += score[u][g];
    }
  }
#pragma unroll
  for (int u = 0; u < N; ++u) {
    float value[8];
    unpack(value_of(u), value);
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        all.sum[g][i] = fmaf(score[u][g], value[i], all.sum[g][i]);
      }
    }
  }
}

// Adds `sum` and `total`, relative to `top`, to what is relative to `highest`.
__device__ __forceinline__ void add_part(float& highest, float& all, float& value, float top, float total, float sum) {
  float with = fmaxf(highest, top);
  float a = highest == -kInfinity ? 0.0f : __expf(highest - with), b = top == -kInfinity ? 0.0f : __expf(top - with);
  all = all * a + total * b;
  value = value * a + sum * b;
  highest = with;
}

template <int WIDTH, int GROUP, int CLUSTER>
__device__ __forceinline__ void decode(const Decode& step) {
  constexpr int kLanes = WIDTH / 8, kKeys = 32 / kLanes, kUnroll = GROUP > 4 ? 2 : 4, kUnit = kKeys * kUnroll;
  constexpr int kSlots = 2 * kUnroll, kSlice = GROUP * WIDTH / CLUSTER;
  extern __shared__ __align__(16) u8 memory[];
  __shared__ float tops[kWarps][GROUP], totals[kWarps][GROUP];
  __shared__ float own_sums[GROUP * WIDTH], own_top[GROUP], own_total[GROUP];
  let_next_start();
  const int row = blockIdx.z, splits = gridDim.x;
  // Several blocks in y when more heads share a key head than GROUP.
  const int groups = step.heads / step.kv_heads / GROUP;
  const int kv_head = blockIdx.y / groups, first_head = blockIdx.y * GROUP;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = lane % kLanes, key_of_warp = lane / kLanes;
  const int first = blockIdx.x + warp * splits, stride = splits * kWarps;
  bool is_early = true;
  auto read = [&](const int* p) { return is_early ? __ldcg(p) : *p; };
  int position, from, units, next, pages[kUnroll];
  const int* own_pages;
  auto page_of = [&](int at) { return read(own_pages + min(max(at, 0) >> step.page_shift, step.table_width - 1)); };
  auto place_of = [&](int page, int at) {
    page = min(max(page, 0), step.pages - 1);
    size_t pool_row = (static_cast<size_t>(page) << step.page_shift) + (max(at, 0) & ((1 << step.page_shift) - 1));
    return (pool_row * step.kv_heads + kv_head) * WIDTH + part * 8;
  };
  auto key_at = [&](int unit, int u) { return from + unit * kUnit + u * kKeys + key_of_warp; };
  // The pages of the unit to be copied next are read while others are under way.
  auto read_pages = [&]() {
    if (next < units) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        pages[u] = page_of(min(key_at(next, u), position - 1));
      }
    }
  };
  auto begin = [&]() {
    const int sequence = min(max(read(step.row_sequences + row), 0), step.sequences - 1);
    position = read(step.positions + row);
    own_pages = step.page_table + static_cast<size_t>(sequence) * step.table_width;
    from = step.window > 0 ? max(0, position + 1 - step.window) : 0;
    units = (position - from + kUnit - 1) / kUnit;
    next = first;
    read_pages();
  };
  begin();
  if (next < units && part % 2 == 0) {
    // Two lanes have 32 bytes, the least that memory gives.
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      size_t place = place_of(pages[u], min(key_at(next, u), position - 1));
      prefetch(step.keys + place);
      prefetch(step.values + place);
    }
  }
  wait_for_inputs();
  is_early = false;
  begin();
  const u32 ring = shared_address(memory) + (warp * kStages * kSlots * 32 + lane) * 16;
  auto copy = [&](int stage) {
    if (next < units) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        int at = key_at(next, u);
        size_t place = place_of(pages[u], min(at, position - 1));
        copy_async(ring + (stage * kSlots + u) * 512, step.keys + place, at < position);
        copy_async(ring + (stage * kSlots + kUnroll + u) * 512, step.values + place, at < position);
      }
      next += stride;
      read_pages();
    }
    copy_commit();
  };
  for (int stage = 0; stage < kStages; ++stage) {
    copy(stage);
  }
  const int slot = step.slots[row];
  const Turn turn = turn_of(step, part * 8, position * step.turn_scale);
  // The row's own key belongs to the warp that has the fewest others.
  const bool has_own = blockIdx.x == splits - 1 && warp == kWarps - 1, has_slot = slot >= 0 && slot < step.pages << step.page_shift;
  uint4 own_key = make_uint4(0, 0, 0, 0), own_value = own_key;
  if (has_own) {
    size_t at = (static_cast<size_t>(row) * step.kv_heads + kv_head) * WIDTH + part * 8;
    if (has_slot) {
      own_key = turned<kLanes>(step.k + at, turn, of_norm(step.k_norm, turn, part * 8), step);
      own_value = *reinterpret_cast<const uint4*>(step.v + at);
    } else {
      size_t place = place_of(page_of(position), position);
      own_key = *reinterpret_cast<const uint4*>(step.keys + place);
      own_value = *reinterpret_cast<const uint4*>(step.values + place);
    }
  }
  Sums<GROUP> all;
  const OfNorm q_norm = of_norm(step.q_norm, turn, part * 8);
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    const u16* query = step.q + (static_cast<size_t>(row) * step.heads + first_head + g) * WIDTH + part * 8;
    unpack(turned<kLanes>(query, turn, q_norm, step), all.query[g]);
    all.top[g] = -kInfinity;
    all.total[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      all.query[g][i] *= step.scale;
      all.sum[g][i] = 0.0f;
    }
  }
  if (has_own) {
    if (has_slot && key_of_warp == 0 && blockIdx.y % groups == 0) {
      size_t to = (static_cast<size_t>(slot) * step.kv_heads + kv_head) * WIDTH + part * 8;
      *reinterpret_cast<uint4*>(step.keys + to) = own_key;
      *reinterpret_cast<uint4*>(step.values + to) = own_value;
    }
    bool seen[1] = {key_of_warp == 0};
    absorb<kLanes, GROUP, 1>(all, step, [&](int) { return own_key; }, [&](int) { return own_value; }, seen);
  }
  int stage = 0;
  for (int unit = first; unit < units; unit += stride) {
    copy_wait<kStages - 1>();
    bool seen[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      seen[u] = key_at(unit, u) < position;
    }
    const u32 keys = ring + stage * kSlots * 512, values = keys + kUnroll * 512;
    absorb<kLanes, GROUP, kUnroll>(
        all, step, [&](int u) { return load_shared(keys + u * 512); }, [&](int u) { return load_shared(values + u * 512); }, seen);
    copy(stage);
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
      float a = highest == -kInfinity ? 1.0f : __expf(all.top[g] - highest), b = highest == -kInfinity ? 1.0f : __expf(other_top - highest);
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
    float highest = -kInfinity, total = 0.0f, value = 0.0f;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) {
      highest = fmaxf(highest, tops[j][g]);
    }
#pragma unroll
    for (int j = 0; j < kWarps; ++j) {
      float weight = tops[j][g] == -kInfinity ? 0.0f : __expf(tops[j][g] - highest);
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
    highest[e] = -kInfinity, total[e] = 0.0f, value[e] = 0.0f;
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
          float weight = t[j] == -kInfinity ? 0.0f : __expf(t[j] - highest[e]);
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
        highest[e] = -kInfinity, total[e] = 0.0f, value[e] = 0.0f;
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
            from_float(total[e] > 0.0f ? value[e] / total[e] : 0.0f);
      }
    }
  }
  if constexpr (CLUSTER > 1) {
    cluster_wait();
  }
}

#define DECODE(N)                                                                                             \
  extern "C" __global__ void __cluster_dims__(N, 1, 1) __launch_bounds__(kWarps * 32, GROUP_HEADS > 4 ? 1 : 2) \
      decode_##N(const __grid_constant__ Decode step) {                                                       \
    decode<HEAD_WIDTH, GROUP_HEADS, N>(step);                                                                 \
  }
DECODE(1)
DECODE(2)
DECODE(4)
DECODE(8)
