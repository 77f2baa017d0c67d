// Sums over the ranks of one machine: the same launch on a device of each, which meet in memory that all of them can write to (a
// window a rank). Nobody reads another's memory: what is for others is written there, and everybody waits at home.
//
// Each block meets the blocks of its number on the other ranks and no others. How often they have met is counted in the rank's own
// window, so that a launch is the same each time. Places take turns by that number: who writes for the third time has heard from the
// others for the second, and they had read what came first before they said so. Parts are added in the order of the ranks, so that
// all get the same bits.
//
// RANKS, SMALL_THREADS, SMALL_BLOCKS, LARGE_BLOCKS, LARGE_UNITS and where the parts of a window are (..._AT) come with the text.

struct Ranks {
  // From this rank's on, which is its own memory: that of rank r comes (r - rank) mod RANKS later.
  u8* windows[8];
  // Memory of the host: not 0 when a rank is gone, and nobody should wait any more.
  const u32* gone;
  int rank;
  int unused;
};

__device__ __forceinline__ void write_packet(u8* to, u32 a, u32 b, u32 number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(a), "r"(number), "r"(b), "r"(number) : "memory");
}
__device__ __forceinline__ uint4 read_fresh(const u8* from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ u32 read_word(const u32* from) {
  u32 v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
// Everything that this block wrote before its last barrier is there for whoever reads the number.
__device__ __forceinline__ void publish(u32* to, u32 number) {
  asm volatile("fence.acq_rel.sys;\n\tst.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(number) : "memory");
}
__device__ __forceinline__ u32 acquire(const u32* from) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// Looks at the host's word once in a while.
__device__ __forceinline__ bool is_over(const u32* gone, u32& looks) {
  return (++looks & 255) == 0 && read_word(gone) != 0;
}

// 0 is what was never written.
__device__ __forceinline__ u32 after(u32 number) {
  return number + 1 == 0 ? 2 : number + 1;
}

__device__ __forceinline__ void add_pair(float (&sum)[2], u32 pair) {
  sum[0] += low_float(pair);
  sum[1] += high_float(pair);
}

__device__ __forceinline__ u32 pair_sum(u32 a, u32 b) {
  return pack(low_float(a) + low_float(b), high_float(a) + high_float(b));
}

// A few rows: each thread sends four elements in a packet of 16 bytes, whose halves say by themselves that they have come (8 bytes
// are always written whole), so that nothing has to be waited for but the packets. With `residual`, its sum with the result is
// `total`.
extern "C" __global__ void __launch_bounds__(SMALL_THREADS) sum_small(
    Ranks ranks, const uint2* x, const uint2* residual, uint2* out, uint2* total, int units) {
  let_next_start();
  wait_for_inputs();
  u32* const counter = reinterpret_cast<u32*>(ranks.windows[0] + SMALL_COUNTERS_AT) + blockIdx.x;
  const u32 number = after(read_word(counter));
  __syncthreads();
  if (threadIdx.x == 0) {
    *counter = number;
  }
  const int at = blockIdx.x * SMALL_THREADS + threadIdx.x;
  if (at >= units) {
    return;
  }
  const size_t place = static_cast<size_t>((number & 1) * SMALL_BLOCKS + blockIdx.x) * RANKS;
  auto packet = [&](u8* window, int source) {
    return window + ((place + source) * SMALL_THREADS + threadIdx.x) * 16;
  };
  const uint2 own = x[at];
#pragma unroll
  for (int i = 1; i < RANKS; ++i) {
    write_packet(packet(ranks.windows[i], ranks.rank), own.x, own.y, number);
  }
  uint2 base = make_uint2(0, 0);
  if (residual != nullptr) {
    base = residual[at];
  }
  float low[2] = {0.0f, 0.0f}, high[2] = {0.0f, 0.0f};
  u32 looks = 0;
#pragma unroll
  for (int source = 0; source < RANKS; ++source) {
    uint2 part = own;
    if (source != ranks.rank) {
      const u8* from = packet(ranks.windows[0], source);
      uint4 v;
      do {
        v = read_fresh(from);
      } while ((v.y != number || v.w != number) && !is_over(ranks.gone, looks));
      part = make_uint2(v.x, v.z);
    }
    add_pair(low, part.x);
    add_pair(high, part.y);
  }
  const uint2 sum = make_uint2(pack(low[0], low[1]), pack(high[0], high[1]));
  out[at] = sum;
  if (residual != nullptr) {
    total[at] = make_uint2(pair_sum(base.x, sum.x), pair_sum(base.y, sum.y));
  }
}

// Many rows, in two halves: each rank is sent the others' parts of what it is to add, and sends them the sum. A block takes
// RANKS * LARGE_UNITS units of 16 bytes at a time.
extern "C" __global__ void __launch_bounds__(512) sum_large(
    Ranks ranks, const uint4* x, const uint4* residual, uint4* out, uint4* total, u64 units) {
  let_next_start();
  wait_for_inputs();
  const int rank = ranks.rank;
  u8* const home = ranks.windows[0];
  u32* const counter = reinterpret_cast<u32*>(home + LARGE_COUNTERS_AT) + blockIdx.x;
  u32 number = read_word(counter);
  // What others say to this block: first that their parts are here, then that their sums are.
  auto said = [&](u8* window, int half, int source) {
    return reinterpret_cast<u32*>(window + SAID_AT) + (blockIdx.x * 2 + half) * RANKS + source;
  };
  // The rank that comes `i` after this one.
  auto next = [&](int i) { return rank + i < RANKS ? rank + i : rank + i - RANKS; };
  // Says something to all others, and waits for all of them to have said it. False when one of them is gone.
  auto meet = [&](int half) {
    __syncthreads();
    bool over = false;
    // A warp each, so that none waits before another has spoken.
#pragma unroll
    for (int i = 1; i < RANKS; ++i) {
      if (threadIdx.x != 32 * i) {
        continue;
      }
      publish(said(ranks.windows[i], half, rank), number);
      const u32* here = said(home, half, next(i));
      u32 looks = 0;
      // One that is ahead has said it.
      while (static_cast<int>(acquire(here) - number) < 0 && !over) {
        over = is_over(ranks.gone, looks);
      }
    }
    return __syncthreads_or(over) == 0;
  };
  auto finish = [&](u64 at, uint4 sum) {
    out[at] = sum;
    if (residual != nullptr) {
      const uint4 base = residual[at];
      total[at] = make_uint4(pair_sum(base.x, sum.x), pair_sum(base.y, sum.y), pair_sum(base.z, sum.z), pair_sum(base.w, sum.w));
    }
  };
  constexpr u64 kAtOnce = static_cast<u64>(RANKS) * LARGE_UNITS;
  for (u64 first = blockIdx.x * kAtOnce; first < units; first += gridDim.x * kAtOnce) {
    number = after(number);
    const size_t place = static_cast<size_t>((number & 1) * LARGE_BLOCKS + blockIdx.x) * RANKS;
    auto buffer = [&](u8* window, size_t part, int source) {
      return window + part + (place + source) * LARGE_UNITS * 16;
    };
    // Units of what rank `of` adds.
    auto count = [&](int of) {
      const u64 begin = first + static_cast<u64>(of) * LARGE_UNITS;
      return begin >= units ? 0 : static_cast<int>(min(static_cast<u64>(LARGE_UNITS), units - begin));
    };
#pragma unroll
    for (int i = 1; i < RANKS; ++i) {
      const uint4* from = x + first + static_cast<u64>(next(i)) * LARGE_UNITS;
      uint4* to = reinterpret_cast<uint4*>(buffer(ranks.windows[i], PARTS_AT, rank));
      const int n = count(next(i));
      for (int at = threadIdx.x; at < n; at += blockDim.x) {
        to[at] = from[at];
      }
    }
    if (!meet(0)) {
      return;
    }
    const int own = count(rank);
    const u64 begin = first + static_cast<u64>(rank) * LARGE_UNITS;
    for (int at = threadIdx.x; at < own; at += blockDim.x) {
      uint4 parts[RANKS];
#pragma unroll
      for (int source = 0; source < RANKS; ++source) {
        parts[source] = source == rank ? x[begin + at] : read_fresh(buffer(home, PARTS_AT, source) + at * 16);
      }
      float a[2] = {0.0f, 0.0f}, b[2] = {0.0f, 0.0f}, c[2] = {0.0f, 0.0f}, d[2] = {0.0f, 0.0f};
#pragma unroll
      for (int source = 0; source < RANKS; ++source) {
        add_pair(a, parts[source].x);
        add_pair(b, parts[source].y);
        add_pair(c, parts[source].z);
        add_pair(d, parts[source].w);
      }
      const uint4 sum = make_uint4(pack(a[0], a[1]), pack(b[0], b[1]), pack(c[0], c[1]), pack(d[0], d[1]));
#pragma unroll
      for (int i = 1; i < RANKS; ++i) {
        reinterpret_cast<uint4*>(buffer(ranks.windows[i], SUMS_AT, rank))[at] = sum;
      }
      finish(begin + at, sum);
    }
    if (!meet(1)) {
      return;
    }
#pragma unroll
    for (int i = 1; i < RANKS; ++i) {
      const int n = count(next(i));
      for (int at = threadIdx.x; at < n; at += blockDim.x) {
        finish(first + static_cast<u64>(next(i)) * LARGE_UNITS + at, read_fresh(buffer(home, SUMS_AT, next(i)) + at * 16));
      }
    }
  }
  if (threadIdx.x == 0) {
    *counter = number;
  }
}
