// Attention of many query rows on the tensor cores of any generation. Follows `paged.cuh`.

#if HEAD_WIDTH <= 128
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
  for (int row = first_token; row <= last_token;) {
    const Run run = run_of(step, row, last_token);
    const int own = run.sequence;
    row = run.after;
    if (run.is_alone) {
      continue;
    }
    const int begin = step.window > 0 ? max(0, run.lowest + 1 - step.window) / kTile * kTile : 0, end = run.highest + 1;
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
