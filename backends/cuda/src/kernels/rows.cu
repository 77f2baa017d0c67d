// Operations row by row: norm, rotary embedding, gated activations, sums, gathered rows, conversions, keys and values into the pool.

template <int THREADS>
__device__ __forceinline__ float sum_of_block(float v) {
  __shared__ float warps[THREADS / 32];
  v = sum_of_warp(v);
  if ((threadIdx.x & 31) == 0) {
    warps[threadIdx.x / 32] = v;
  }
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) {
    sum += warps[i];
  }
  return sum;
}

// x / rms(x) * w; `width` is even. Rows of up to 16,384 stay in registers. With `added`, x is the sum of two, which is given too.
extern "C" __global__ void __launch_bounds__(256) rms_norm(
    const u32* x, const u32* added, const u32* w, u32* total, u32* out, int width, float eps) {
  constexpr int kThreads = 256, kHeld = 32;
  let_next_start();
  wait_for_inputs();
  const int pairs = width / 2;
  const u32* row = x + static_cast<size_t>(blockIdx.x) * pairs;
  u32* to = out + static_cast<size_t>(blockIdx.x) * pairs;
  const size_t first = static_cast<size_t>(blockIdx.x) * pairs;
  auto value = [&](int at) {
    u32 v = row[at];
    if (added != nullptr) {
      u32 other = added[first + at];
      v = pack(low_float(v) + low_float(other), high_float(v) + high_float(other));
      total[first + at] = v;
    }
    return v;
  };
  u32 held[kHeld];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    int at = i * kThreads + threadIdx.x;
    held[i] = at < pairs ? value(at) : 0;
    float a = low_float(held[i]), b = high_float(held[i]);
    sum += a * a + b * b;
  }
  for (int at = kHeld * kThreads + threadIdx.x; at < pairs; at += kThreads) {
    u32 v = value(at);
    float a = low_float(v), b = high_float(v);
    sum += a * a + b * b;
  }
  float factor = rsqrtf(sum_of_block<kThreads>(sum) / width + eps);
  auto scaled = [&](u32 v, int at) {
    float a = low_float(v) * factor, b = high_float(v) * factor;
    if (w != nullptr) {
      a *= low_float(w[at]);
      b *= high_float(w[at]);
    }
    return pack(a, b);
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    int at = i * kThreads + threadIdx.x;
    if (at < pairs) {
      to[at] = scaled(held[i], at);
    }
  }
  for (int at = kHeld * kThreads + threadIdx.x; at < pairs; at += kThreads) {
    to[at] = scaled(added == nullptr ? row[at] : total[first + at], at);
  }
}

// The same for many short rows of up to 512: a warp a row.
extern "C" __global__ void __launch_bounds__(256) rms_norm_short(const u32* x, const u32* w, u32* out, int rows, int width, float eps) {
  constexpr int kHeld = 8;
  let_next_start();
  wait_for_inputs();
  const int pairs = width / 2, lane = threadIdx.x & 31, row = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (row >= rows) {
    return;
  }
  const size_t first = static_cast<size_t>(row) * pairs;
  u32 held[kHeld];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    int at = i * 32 + lane;
    held[i] = at < pairs ? x[first + at] : 0;
    float a = low_float(held[i]), b = high_float(held[i]);
    sum += a * a + b * b;
  }
  const float factor = rsqrtf(sum_of_warp(sum) / width + eps);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    int at = i * 32 + lane;
    if (at < pairs) {
      float a = low_float(held[i]) * factor, b = high_float(held[i]) * factor;
      if (w != nullptr) {
        a *= low_float(w[at]);
        b *= high_float(w[at]);
      }
      out[first + at] = pack(a, b);
    }
  }
}

// What happens to a head before it turns.
struct HeadNorm {
  // Null for a norm without a weight.
  const u16* weight;
  // The reciprocal of the head's root mean square.
  float factor;
  bool is_normed;
  __device__ __forceinline__ float value(const u16* from, int at) const {
    const float v = to_float(from[at]);
    if (!is_normed) {
      return v;
    }
    return rounded(v * factor * (weight == nullptr ? 1.0f : to_float(weight[at])));
  }
};

// By how much a pair turns.
struct Turn {
  float sine, cosine;
};

// `inverse`: the table holds a period instead of a frequency.
__device__ __forceinline__ Turn turn_of(float entry, int inverse, float position) {
  Turn turn;
  sincosf(inverse ? position / entry : position * entry, &turn.sine, &turn.cosine);
  return turn;
}

__device__ __forceinline__ void rotate(
    const u16* from, u16* to, u16* also, int at, int dims, Turn turn, int interleaved, const HeadNorm& norm) {
  const int half = dims / 2;
  auto put = [&](int place, float v) {
    const u16 rounded = from_float(v);
    to[place] = rounded;
    if (also != nullptr) {
      also[place] = rounded;
    }
  };
  if (at >= half) {
    put(half + at, norm.value(from, half + at));
    return;
  }
  int first = interleaved ? 2 * at : at, second = interleaved ? 2 * at + 1 : at + half;
  float a = norm.value(from, first), b = norm.value(from, second);
  put(first, a * turn.cosine - b * turn.sine);
  put(second, a * turn.sine + b * turn.cosine);
}

// How a head's norm is made: 0 not at all.
struct HeadNorms {
  const u16* q;
  const u16* k;
  float eps;
  int normed;
};

// Norms and rotates queries and keys of a step, and puts keys and values into the pools. A warp a head; the heads of a block turn by the
// same angles, whose sines take longer than all else.
extern "C" __global__ void __launch_bounds__(256) rope_append(
    const u16* q, const u16* k, const u16* v, const int* positions, const float* table, u16* q_out, u16* k_out, u16* key_pool,
    u16* value_pool, const int* slots, int heads, int kv_heads, int width, int dims, int interleaved, int inverse, float scale,
    int pool_rows, HeadNorms norms) {
  let_next_start();
  wait_for_inputs();
  extern __shared__ Turn turns[];
  const int half = dims / 2, own = width - half, row = blockIdx.x, slot = slots[row];
  const int lane = threadIdx.x & 31, item = blockIdx.y * 8 + (threadIdx.x >> 5);
  const float position = positions[row] * scale;
  for (int at = threadIdx.x; at < half; at += blockDim.x) {
    turns[at] = turn_of(table[at], inverse, position);
  }
  __syncthreads();
  if (item >= heads + 2 * kv_heads) {
    return;
  }
  const bool has_slot = slot >= 0 && slot < pool_rows, is_q = item < heads, is_k = !is_q && item < heads + kv_heads;
  const int head = is_q ? item : is_k ? item - heads : item - heads - kv_heads;
  const size_t place = (static_cast<size_t>(row) * (is_q ? heads : kv_heads) + head) * width;
  const size_t in_pool = (static_cast<size_t>(has_slot ? slot : 0) * kv_heads + head) * width;
  if (!is_q && !is_k) {
    if (has_slot) {
      for (int i = lane; i < width; i += 32) {
        value_pool[in_pool + i] = v[place + i];
      }
    }
    return;
  }
  const u16* from = (is_q ? q : k) + place;
  HeadNorm norm{is_q ? norms.q : norms.k, 1.0f, norms.normed != 0};
  if (norm.is_normed) {
    float sum = 0.0f;
    for (int i = lane; i < width; i += 32) {
      const float f = to_float(from[i]);
      sum += f * f;
    }
    norm.factor = rsqrtf(sum_of_warp(sum) / width + norms.eps);
  }
  u16* also = is_q || !has_slot ? nullptr : key_pool + in_pool;
  for (int at = lane; at < own; at += 32) {
    rotate(from, (is_q ? q_out : k_out) + place, also, at, dims, at < half ? turns[at] : Turn{}, interleaved, norm);
  }
}

// One thread a pair, the heads of a row in a block.
extern "C" __global__ void __launch_bounds__(256) rope(
    const u16* x, const int* positions, const float* table, u16* out, int heads, int width, int dims, int interleaved,
    int inverse, float scale) {
  let_next_start();
  wait_for_inputs();
  const int half = dims / 2, own = width - half;
  const size_t row = static_cast<size_t>(blockIdx.x) * heads * width;
  const float position = positions[blockIdx.x] * scale;
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < heads * own; i += gridDim.y * blockDim.x) {
    int head = i / own, at = i % own;
    size_t place = row + static_cast<size_t>(head) * width;
    const Turn turn = at < half ? turn_of(table[at], inverse, position) : Turn{};
    rotate(x + place, out + place, nullptr, at, dims, turn, interleaved, HeadNorm{});
  }
}

template <typename F>
__device__ __forceinline__ void each_pair(const u32* a, const u32* b, u32* out, u64 pairs, u64 period, F f) {
  let_next_start();
  wait_for_inputs();
  for (u64 i = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; i < pairs; i += static_cast<u64>(gridDim.x) * blockDim.x) {
    u32 x = a[i], y = b[period == pairs ? i : i % period];
    out[i] = pack(f(low_float(x), low_float(y)), f(high_float(x), high_float(y)));
  }
}

extern "C" __global__ void glu(const u32* gate, const u32* up, u32* out, u64 pairs, int kind) {
  each_pair(gate, up, out, pairs, pairs, [kind](float g, float u) { return gated(g, u, kind); });
}

// Kinds: 0 sum, 1 difference, 2 product. `b` has `period` pairs, which are used again and again.
extern "C" __global__ void combine(const u32* a, const u32* b, u32* out, u64 pairs, u64 period, int kind) {
  each_pair(a, b, out, pairs, period, [kind](float x, float y) { return kind == 0 ? x + y : kind == 1 ? x - y : x * y; });
}

extern "C" __global__ void widen(const u32* x, float2* out, u64 pairs) {
  let_next_start();
  wait_for_inputs();
  for (u64 i = blockIdx.x * static_cast<u64>(blockDim.x) + threadIdx.x; i < pairs; i += static_cast<u64>(gridDim.x) * blockDim.x) {
    out[i] = make_float2(low_float(x[i]), high_float(x[i]));
  }
}

// Rows of a table, in units of T. Indices outside it give the nearest row: the host has checked those of tokens.
template <typename T>
__device__ __forceinline__ void take(const T* table, const u32* indices, T* out, int units, int table_rows, int is_signed) {
  let_next_start();
  wait_for_inputs();
  long long index = is_signed ? static_cast<int>(indices[blockIdx.x]) : static_cast<long long>(indices[blockIdx.x]);
  if (index < 0) {
    index += table_rows;
  }
  index = min(max(index, 0LL), static_cast<long long>(table_rows) - 1);
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < units; i += gridDim.y * blockDim.x) {
    out[static_cast<size_t>(blockIdx.x) * units + i] = table[static_cast<size_t>(index) * units + i];
  }
}
extern "C" __global__ void take_words(const u32* table, const u32* indices, u32* out, int units, int table_rows, int is_signed) {
  take(table, indices, out, units, table_rows, is_signed);
}
extern "C" __global__ void take_halves(const u16* table, const u32* indices, u16* out, int units, int table_rows, int is_signed) {
  take(table, indices, out, units, table_rows, is_signed);
}

// Keys and values of a step into the pools: rows of `key_words` and `value_words` words of 4 bytes.
extern "C" __global__ void append(
    const u32* keys, const u32* values, u32* key_pool, u32* value_pool, const int* slots, int key_words, int value_words,
    int pool_rows) {
  let_next_start();
  wait_for_inputs();
  int row = blockIdx.x, slot = slots[row];
  if (slot >= 0 && slot < pool_rows) {
    for (int i = threadIdx.x; i < key_words; i += blockDim.x) {
      key_pool[static_cast<size_t>(slot) * key_words + i] = keys[static_cast<size_t>(row) * key_words + i];
    }
    for (int i = threadIdx.x; i < value_words; i += blockDim.x) {
      value_pool[static_cast<size_t>(slot) * value_words + i] = values[static_cast<size_t>(row) * value_words + i];
    }
  }
}
