// One token for every row of logits; the rules are those of the operation table. A block has a row.
//
// A logit and its place are one number of 64 bits, larger for higher logits and for lower places among equals, 0 for what is never
// taken. Each thread finds the highest of its share; the k-th of these is a bound that at least k logits reach, so one more pass
// gathers a few more than k, which are sorted. Where they are too many, the bound is found by halving. Follows `cluster.cuh`.

#if LOGITS_F32
typedef float Logit;
__device__ __forceinline__ float as_float(float v) { return v; }
#else
typedef u16 Logit;
__device__ __forceinline__ float as_float(u16 v) { return to_float(v); }
#endif

constexpr int kThreads = 1024, kMost = 4096, kMostK = 256;

__device__ __forceinline__ u64 key_of(float logit, int at) {
  u32 bits = __float_as_uint(logit);
  if (bits == 0x80000000u) {
    bits = 0;  // -0 is 0
  }
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return logit == -kInfinity ? 0 : static_cast<u64>(bits) << 32 | (0xFFFFFFFFu - static_cast<u32>(at));
}
__device__ __forceinline__ float logit_of(u64 key) {
  u32 bits = static_cast<u32>(key >> 32);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7FFFFFFFu : ~bits);
}
__device__ __forceinline__ u32 place_of(u64 key) {
  return 0xFFFFFFFFu - static_cast<u32>(key);
}

// Highest first; `n` is a power of two.
__device__ __forceinline__ void sort(u64* keys, int n) {
  for (int size = 2; size <= n; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < n / 2; i += kThreads) {
        int low = i / step * step * 2 + i % step, high = low + step;
        u64 a = keys[low], b = keys[high];
        if ((a < b) == ((low & size) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// Those from `begin` to before `end`.
template <typename F>
__device__ __forceinline__ void each_logit(const Logit* row, int begin, int end, F f) {
  constexpr int kOwn = 16 / sizeof(Logit), kTogether = 4;
  int done = begin;
  if (reinterpret_cast<u64>(row + begin) % 16 == 0) {
    const int units = (end - begin) / kOwn;
    const uint4* from = reinterpret_cast<const uint4*>(row + begin);
    for (int first = threadIdx.x; first < units; first += kThreads * kTogether) {
      uint4 v[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (first + u * kThreads < units) {
          v[u] = from[first + u * kThreads];
        }
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const Logit* own = reinterpret_cast<const Logit*>(&v[u]);
        if (first + u * kThreads < units) {
#pragma unroll
          for (int j = 0; j < kOwn; ++j) {
            f(as_float(own[j]), begin + (first + u * kThreads) * kOwn + j);
          }
        }
      }
    }
    done += units * kOwn;
  }
  for (int i = done + threadIdx.x; i < end; i += kThreads) {
    f(as_float(row[i]), i);
  }
}

// Sum of a warp's numbers up to each lane's.
__device__ __forceinline__ float running(float v, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    float other = __shfl_up_sync(0xFFFFFFFFu, v, step);
    v = lane >= step ? v + other : v;
  }
  return v;
}

// Of `n` weights in order, 8 to a lane: the first place where the sum of all up to it passes that share of the total (reaches it, when
// `reaches`).
__device__ __forceinline__ int passes(const float (&weights)[8], int n, float share, bool reaches, int lane) {
  float own = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    own += weights[j];
  }
  float sum = running(own, lane), total = __shfl_sync(0xFFFFFFFFu, sum, 31), least = share * total;
  int found = n - 1;
  sum -= own;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    sum += weights[j];
    int at = lane * 8 + j;
    if (at < found && (reaches ? sum >= least : sum > least)) {
      found = at;
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    found = min(found, __shfl_xor_sync(0xFFFFFFFFu, found, step));
  }
  return found;
}

// The highest of a warp's.
__device__ __forceinline__ u64 highest_of(u64 key) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    u64 other = __shfl_xor_sync(0xFFFFFFFFu, key, step);
    key = other > key ? other : key;
  }
  return key;
}

// Blocks of a cluster share the first look at a row; where more than the highest logit may be chosen, the first goes on alone.
template <int CLUSTER>
__device__ __forceinline__ void choose(
    const Logit* logits, const int* top_k, const float* top_p, const float* min_p, const float* temperature, const float* uniform,
    u32* out, int width) {
  __shared__ u64 keys[kMost];
  __shared__ u64 found_here[2];
  __shared__ int count;
  let_next_start();
  wait_for_inputs();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, index = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const Logit* row = logits + static_cast<size_t>(index) * width;
  const int k = min(max(top_k[index], 1), kMostK);
  const int share = (width + CLUSTER * 8 - 1) / (CLUSTER * 8) * 8, begin = min(width, rank * share), end = min(width, begin + share);
  u64 best = 0;
  bool is_bad = false;
  auto look = [&](float v, int at) {
    is_bad = is_bad || !(v < kInfinity);
    u64 key = key_of(v, at);
    best = key > best ? key : best;
  };
  each_logit(row, begin, end, look);
  is_bad = __syncthreads_or(is_bad);
  u64 first = highest_of(best);
  if (lane == 0) {
    keys[warp] = first;
  }
  __syncthreads();
  if (warp == 0) {
    first = highest_of(keys[lane]);
    if (lane == 0) {
      found_here[0] = first, found_here[1] = is_bad;
    }
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
    u64 of_other = 0, bad_other = 0;
    if (rank == 0 && lane < CLUSTER) {
      of_other = of_block(found_here, lane);
      bad_other = of_block(found_here + 1, lane);
    }
    first = highest_of(of_other);
    is_bad = __any_sync(0xFFFFFFFFu, bad_other != 0);
    cluster_arrive();
    cluster_wait();
    if (rank != 0) {
      return;
    }
  }
#endif
  if (is_bad || k == 1) {
    if (threadIdx.x == 0) {
      out[index] = is_bad || first == 0 ? 0xFFFFFFFFu : place_of(first);
    }
    return;
  }
  if constexpr (CLUSTER > 1) {
    each_logit(row, end, width, look);
  } else {
    __syncthreads();
  }
  keys[threadIdx.x] = best;
  sort(keys, kThreads);
  // At least k reach the bound, where there are so many at all.
  u64 bound = keys[k - 1] > 0 ? keys[k - 1] : 1;
  // Too many reach the one, too few the other.
  u64 low = 0, high = 0xFFFFFFFFFFFFFFFFull;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      count = 0;
    }
    __syncthreads();
    each_logit(row, 0, width, [&](float v, int at) {
      u64 key = key_of(v, at);
      if (key >= bound) {
        int place = atomicAdd(&count, 1);
        if (place < kMost) {
          keys[place] = key;
        }
      }
    });
    __syncthreads();
    const int found = count;
    if (found > kMost) {
      low = bound;
    } else if (found < k && low > 0) {
      high = bound;
    } else {
      break;
    }
    // All keys differ, so that some bound between gives just k.
    bound = low + (high - low) / 2;
  }
  int n = 1;
  while (n < count) {
    n *= 2;
  }
  for (int i = count + threadIdx.x; i < n; i += kThreads) {
    keys[i] = 0;
  }
  sort(keys, n);
  if (warp > 0) {
    return;
  }
  int kept = min(count, k);
  if (kept == 0) {
    if (lane == 0) {
      out[index] = 0xFFFFFFFFu;
    }
    return;
  }
  const float highest = logit_of(keys[0]);
  float own[8], weights[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    int at = lane * 8 + j;
    own[j] = at < kept ? logit_of(keys[at]) - highest : -kInfinity;
    weights[j] = expf(own[j]);
  }
  const float p = top_p[index], least = min_p[index];
  if (p < 1.0f) {
    kept = passes(weights, kept, p, true, lane) + 1;
  }
  if (least > 0.0f) {
    const float bound_of = logf(least);
    int above_it = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      above_it += lane * 8 + j < kept && own[j] >= bound_of;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      above_it += __shfl_xor_sync(0xFFFFFFFFu, above_it, step);
    }
    kept = max(above_it, 1);
  }
  const float t = temperature[index];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    weights[j] = lane * 8 + j < kept ? expf(own[j] / t) : 0.0f;
  }
  const int chosen = passes(weights, kept, uniform[index], false, lane);
  if (lane == 0) {
    out[index] = place_of(keys[chosen]);
  }
}

#define SAMPLE_ARGS                                                                                                    \
  const Logit *logits, const int *top_k, const float *top_p, const float *min_p, const float *temperature, const float *uniform, \
      u32 *out, int width

extern "C" __global__ void __launch_bounds__(kThreads) sample_rows(SAMPLE_ARGS) {
  choose<1>(logits, top_k, top_p, min_p, temperature, uniform, out, width);
}
#if __CUDA_ARCH__ >= 900
// With so many blocks to a row.
extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(kThreads) sample_rows_8(SAMPLE_ARGS) {
  choose<8>(logits, top_k, top_p, min_p, temperature, uniform, out, width);
}
#endif
