// Sums over keys that are weighted with the exponentials of their scores, made key by key and added part by part (`decode.cu`).

// A score that is no key's, and the highest score where there is no key: far from each other, so that what is relative to them is 0.
constexpr float kUnseen = -3e38f, kNone = -1e30f;

__device__ __forceinline__ float exponential(float v) {
  return exp2_fast(v * 1.44269504f);
}
__device__ __forceinline__ float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// What a lane has of the sums: `top` the highest score so far, which the others are relative to.
template <int GROUP>
struct Sums {
  float query[GROUP][8], sum[GROUP][8], top[GROUP], total[GROUP];
};

// N keys for each group of lanes; those not `seen` count for nothing.
template <int LANES, int GROUP, int N, typename K, typename V>
__device__ __forceinline__ void absorb(Sums<GROUP>& all, float softcap, K key_of, V value_of, const bool (&seen)[N]) {
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
      float s = score[u][g];
      if (softcap > 0.0f) {
        // tanh x = 1 - 2 / (e^2x + 1)
        s = softcap - 2.0f * softcap * reciprocal(exponential(s * (2.0f * reciprocal(softcap))) + 1.0f);
      }
      score[u][g] = seen[u] ? s : kUnseen;
      highest = fmaxf(highest, score[u][g]);
    }
    const float shrink = exponential(all.top[g] - highest);
    all.top[g] = highest;
    all.total[g] *= shrink;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      all.sum[g][i] *= shrink;
    }
#pragma unroll
    for (int u = 0; u < N; ++u) {
      score[u][g] = exponential(score[u][g] - highest);
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
  const float with = fmaxf(highest, top), a = exponential(highest - with), b = exponential(top - with);
  all = all * a + total * b;
  value = value * a + sum * b;
  highest = with;
}
