// Which experts a row goes to, pairs of rows and experts in order of experts, and the sum of what experts gave.

__device__ __forceinline__ float logit(const void* from, size_t at) {
#if LOGITS_F32
  return static_cast<const float*>(from)[at];
#else
  return to_float(static_cast<const u16*>(from)[at]);
#endif
}

// Keys are in the order of the numbers, NaN before all of them, and 0 is none.
__device__ __forceinline__ u32 key_of(float v) {
  const u32 bits = __float_as_uint(v);
  return v != v ? 1 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(u32 key) {
  return key == 1 ? -kInfinity : __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// The `chosen` highest of a row, which a warp holds: its lane has those at i * 32 + lane, 32 at most are chosen. NaN comes after
// all other numbers, and the first of equals first.
template <int kHeld>
__device__ __forceinline__ void choose(
    const float (&held)[kHeld], int n, int chosen, int renormalised, int lane, u32* experts, void* weights) {
  float most = -kInfinity;
  u32 keys[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    keys[i] = i * 32 + lane < n ? key_of(held[i]) : 0;
    most = fmaxf(most, i * 32 + lane < n ? held[i] : -kInfinity);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
  }
  float total = 0.0f;
  if (!renormalised) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      total += i * 32 + lane < n ? __expf(held[i] - most) : 0.0f;
    }
    total = sum_of_warp(total);
  }
  // Lane c keeps the c-th choice.
  u32 own_expert = 0;
  float own_logit = -kInfinity;
  for (int c = 0; c < chosen; ++c) {
    u32 best = 0, at = 0;
#pragma unroll
    for (int i = kHeld - 1; i >= 0; --i) {
      const bool is_better = keys[i] >= best;
      best = is_better ? keys[i] : best, at = is_better ? i * 32 + lane : at;
    }
    const u32 highest = __reduce_max_sync(0xFFFFFFFFu, best);
    const u32 first = __reduce_min_sync(0xFFFFFFFFu, best == highest ? at : 0xFFFFFFFFu);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      keys[i] = first == i * 32 + lane ? 0 : keys[i];
    }
    if (lane == c) {
      own_expert = first, own_logit = number_of(highest);
    }
  }
  float share = lane < chosen ? __expf(own_logit - most) : 0.0f;
  if (renormalised) {
    total = sum_of_warp(share);
  }
  if (lane < chosen) {
    experts[lane] = own_expert;
#if LOGITS_F32
    static_cast<float*>(weights)[lane] = share / total;
#else
    static_cast<u16*>(weights)[lane] = from_float(share / total);
#endif
  }
}

// A warp a row, up to 32 * HELD experts.
template <int kHeld>
__device__ __forceinline__ void route(const void* logits, u32* experts, void* weights, int rows, int n, int chosen, int renormalised) {
  let_next_start();
  wait_for_inputs();
  const int lane = threadIdx.x & 31, row = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (row >= rows) {
    return;
  }
  float held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    int at = i * 32 + lane;
    held[i] = at < n ? logit(logits, static_cast<size_t>(row) * n + at) : -kInfinity;
  }
  const size_t first = static_cast<size_t>(row) * chosen;
  choose(held, n, chosen, renormalised, lane, experts + first, static_cast<u8*>(weights) + first * (LOGITS_F32 ? 4 : 2));
}

#define ROUTE(HELD)                                                                                     \
  extern "C" __global__ void __launch_bounds__(256) route_##HELD(                                       \
      const void* logits, u32* experts, void* weights, int rows, int n, int chosen, int renormalised) { \
    route<HELD>(logits, experts, weights, rows, n, chosen, renormalised);                               \
  }
ROUTE(4)
ROUTE(8)
ROUTE(32)

// Adds what a warp's pairs, from `first` to `end`, are to `own`, a number for each expert. Where `places` are given, what `own` held before
// is where the next pair of the expert comes.
__device__ __forceinline__ void count_pairs(
    const u32* experts, u32* own, u32* rows, u32* places, int first, int end, int n_experts, int chosen, int lane) {
  constexpr int kAhead = 4;
  for (; first < end; first += 32 * kAhead) {
    u32 next[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int p = first + 32 * i + lane;
      next[i] = p < end ? min(experts[p], static_cast<u32>(n_experts - 1)) : 0xFFFFFFFFu;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int p = first + 32 * i + lane;
      const u32 same = __match_any_sync(0xFFFFFFFFu, next[i]);
      const u32 before_it = __popc(same & ((1u << lane) - 1));
      const u32 start = p < end ? own[next[i]] : 0;
      __syncwarp();
      if (p < end) {
        if (before_it == 0) {
          own[next[i]] = start + __popc(same);
        }
        if (places != nullptr) {
          rows[start + before_it] = p / chosen;
          places[p] = start + before_it;
        }
      }
      __syncwarp();
    }
  }
}

// Pairs in order of experts, in groups of up to `most` pairs of one expert. One block. `group_count` is a number; `rows` has the
// row of x of every place in the order, `places` the place of every pair. Pairs of an expert keep their order: the group that a pair comes
// into decides how its sums are divided, so that a run would differ from the one before in the last bits. So each of `parts` warps has a
// range of pairs, counts those of each expert, and knows then where its own begin.
extern "C" __global__ void __launch_bounds__(1024) group_pairs(
    const u32* experts, uint4* groups, u32* group_count, u32* rows, u32* places, int pairs, int n_experts, int chosen, int most, int parts) {
  constexpr int kMost = 1024;
  // By part and expert.
  extern __shared__ u32 counts[];
  __shared__ u32 warp_sums[2][32];
  let_next_start();
  wait_for_inputs();
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  for (int i = t; i < parts * n_experts; i += kMost) {
    counts[i] = 0;
  }
  __syncthreads();
  const int each = ((pairs + parts - 1) / parts + 31) & ~31;
  const int first = warp < parts ? warp * each : pairs, end = min(pairs, first + each);
  u32* own = counts + warp * n_experts;
  count_pairs(experts, own, nullptr, nullptr, first, end, n_experts, chosen, lane);
  __syncthreads();
  // Running sums of pairs and of groups; a thread has an expert.
  u32 count = 0;
  for (int i = t; t < n_experts && i < parts * n_experts; i += n_experts) {
    count += counts[i];
  }
  const u32 own_groups = (count + most - 1) / most;
  u32 sum = count, group_sum = own_groups;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    u32 a = __shfl_up_sync(0xFFFFFFFFu, sum, step), b = __shfl_up_sync(0xFFFFFFFFu, group_sum, step);
    if (lane >= step) {
      sum += a, group_sum += b;
    }
  }
  if (lane == 31) {
    warp_sums[0][warp] = sum;
    warp_sums[1][warp] = group_sum;
  }
  __syncthreads();
  u32 before = 0, groups_before = 0;
  for (int i = 0; i < warp; ++i) {
    before += warp_sums[0][i];
    groups_before += warp_sums[1][i];
  }
  const u32 start = before + sum - count, group_start = groups_before + group_sum - own_groups;
  if (t == kMost - 1) {
    *group_count = groups_before + group_sum;
  }
  for (u32 i = 0; i < own_groups; ++i) {
    const u32 at = i * most;
    groups[group_start + i] = make_uint4(t, start + at, min(count - at, static_cast<u32>(most)), 0);
  }
  u32 next = start;
  for (int i = t; t < n_experts && i < parts * n_experts; i += n_experts) {
    const u32 of_part = counts[i];
    counts[i] = next;
    next += of_part;
  }
  __syncthreads();
  count_pairs(experts, own, rows, places, first, end, n_experts, chosen, lane);
}

// out[row] = residual[row] + the weighted sum of y at its pairs' places. Two values a thread.
extern "C" __global__ void __launch_bounds__(256) sum_pairs(
    const u32* y, const u32* places, const u16* weights, const u32* residual, u32* out, int chosen, int words) {
  let_next_start();
  wait_for_inputs();
  const size_t row = blockIdx.x;
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < words; i += gridDim.y * blockDim.x) {
    float low = 0.0f, high = 0.0f;
    for (int c = 0; c < chosen; ++c) {
      const float weight = to_float(weights[row * chosen + c]);
      const u32 v = y[static_cast<size_t>(places[row * chosen + c]) * words + i];
      low = fmaf(weight, low_float(v), low);
      high = fmaf(weight, high_float(v), high);
    }
    u32 sum = pack(low, high);
    if (residual != nullptr) {
      const u32 r = residual[row * words + i];
      sum = pack(low_float(sum) + low_float(r), high_float(sum) + high_float(r));
    }
    out[row * words + i] = sum;
  }
}
