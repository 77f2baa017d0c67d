// Attention of many query rows on the tensor cores of compute capability 9.0. Follows `paged.cuh`, `engine.cuh` and `group.cuh`.
//
// A block makes 64 query rows a warpgroup, a row being a token and one of the heads that share a key head. One warp has the copy
// engine bring pages of keys and values; a tile's scores stay in registers, where they are the first operand of the second product.

constexpr int kTeams = PREFILL_TEAMS, kKeys = PREFILL_KEYS, kStages = PREFILL_STAGES;
constexpr int kRows = 64 * kTeams, kHalves = HEAD_WIDTH / 64, kThreads = 128 * kTeams + 32;
constexpr int kQueryBytes = kRows * HEAD_WIDTH * 2, kTileBytes = kKeys * HEAD_WIDTH * 2;

// Queries, keys, values by stage, barriers.
extern "C" __global__ void __launch_bounds__(kThreads, 1) prefill_tiles(
    const __grid_constant__ Map key_map, const __grid_constant__ Map value_map, STEP_ARGS) {
  const Step step = STEP;
  extern __shared__ __align__(1024) u8 memory[];
  const u32 queries = shared_address(memory), tiles = queries + kQueryBytes, barriers = tiles + kStages * 2 * kTileBytes;
  const u32 full_keys = barriers, full_values = barriers + kStages * 8, empty = barriers + kStages * 16;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int group = heads / kv_heads, tokens_each = kRows / group, kv_head = blockIdx.y;
  // Later tiles see more keys: they go first.
  const int first_token = static_cast<int>(gridDim.x - 1 - blockIdx.x) * tokens_each;
  const int last_token = min(first_token + tokens_each, rows) - 1;
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(full_keys + i * 8, 1);
      init_barrier(full_values + i * 8, 1);
      init_barrier(empty + i * 8, kTeams);
    }
    fence_barriers();
  }
  __syncthreads();
  wait_for_inputs();
  int stage = 0;
  u32 parity = 0;
  const bool fetches = warp == 4 * kTeams;
  const int team = warp / 4, quad = lane & 3, in_tile = lane >> 2;
  const int box = min(1 << page_shift, kKeys);
  float sums[HEAD_WIDTH / 2], top[2] = {-kInfinity, -kInfinity}, total[2] = {0.0f, 0.0f};
  int token[2], head[2], sequence[2], position[2];
  bool is_used[2];
  if (!fetches) {
    for (int i = threadIdx.x; i < kRows * HEAD_WIDTH / 8; i += 128 * kTeams) {
      int row = i / (HEAD_WIDTH / 8), unit = i % (HEAD_WIDTH / 8), at = min(first_token + row / group, rows - 1);
      size_t from = (static_cast<size_t>(at) * heads + kv_head * group + row % group) * HEAD_WIDTH + unit * 8;
      uint4 v = *reinterpret_cast<const uint4*>(q + from);
      *reinterpret_cast<uint4*>(memory + unit / 8 * (kRows * 128) + row * 128 + ((unit ^ row) & 7) * 16) = v;
    }
    fence_shared();
    meet_teams<kTeams>();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = team * 64 + warp % 4 * 16 + h * 8 + in_tile;
      token[h] = first_token + row / group;
      head[h] = kv_head * group + row % group;
      is_used[h] = row < tokens_each * group && token[h] < rows;
      token[h] = min(token[h], rows - 1);
      is_used[h] = is_used[h] && !is_alone(step, token[h]);
      sequence[h] = is_used[h] ? row_sequences[token[h]] : -1;
      position[h] = positions[token[h]];
    }
#pragma unroll
    for (int i = 0; i < HEAD_WIDTH / 2; ++i) {
      sums[i] = 0.0f;
    }
  }
  const float log2_e = 1.44269504f, factor = softcap > 0.0f ? log2_e : scale * log2_e;
  u32 uses = 0;
  for (int row = first_token; row <= last_token;) {
    const Run run = run_of(step, row, last_token);
    const int own = run.sequence, highest = run.highest, lowest = run.lowest;
    const bool is_only = row == first_token && run.after > last_token;
    row = run.after;
    if (run.is_alone) {
      continue;
    }
    const int begin = window > 0 ? max(0, lowest + 1 - window) / kKeys * kKeys : 0, end = highest + 1;
    if (fetches) {
      for (int start = begin; start < end; start += kKeys, ++uses) {
        if (uses >= kStages) {
          wait_barrier(empty + stage * 8, parity ^ 1);
        }
        const u32 keys_at = tiles + stage * 2 * kTileBytes;
        if (lane == 0) {
          expect_bytes(full_keys + stage * 8, kTileBytes);
          expect_bytes(full_values + stage * 8, kTileBytes);
        }
        __syncwarp();
        const int boxes = kKeys / box;
        for (int i = lane; i < boxes * kHalves; i += 32) {
          int at = i % boxes * box, half = i / boxes;
          int place = static_cast<int>(pool_row(step, own, start + at)), x = kv_head * HEAD_WIDTH + half * 64;
          u32 to = keys_at + half * kKeys * 128 + at * 128;
          fetch_box_2(to, &key_map, x, place, full_keys + stage * 8);
          fetch_box_2(to + kTileBytes, &value_map, x, place, full_values + stage * 8);
        }
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
      continue;
    }
    for (int start = begin; start < end; start += kKeys) {
      const u32 keys_at = tiles + stage * 2 * kTileBytes, values_at = keys_at + kTileBytes;
      float scores[kKeys / 2];
      wait_barrier(full_keys + stage * 8, parity);
      group_begin();
#pragma unroll
      for (int i = 0; i < HEAD_WIDTH / 16; ++i) {
        multiply(scores, rows_descriptor(queries + i / 4 * (kRows * 128) + team * 8192 + i % 4 * 32),
                 rows_descriptor(keys_at + i / 4 * (kKeys * 128) + i % 4 * 32), i > 0);
      }
      group_commit();
      group_wait<0>();
      const bool sees_all = is_only && window <= 0 && start + kKeys <= lowest + 1;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (softcap > 0.0f) {
#pragma unroll
          for (int i = 0; i < kKeys / 4; ++i) {
            float& score = scores[i / 2 * 4 + h * 2 + i % 2];
            score = softcap * tanhf(score * scale / softcap);
          }
        }
        float best = top[h];
        if (!sees_all) {
          const bool is_own = sequence[h] == own;
          const int most = is_own ? position[h] : -1, least = window > 0 ? position[h] - window : -1;
#pragma unroll
          for (int i = 0; i < kKeys / 4; ++i) {
            int at = start + i / 2 * 8 + quad * 2 + i % 2;
            float& score = scores[i / 2 * 4 + h * 2 + i % 2];
            score = at <= most && at > least ? score : -kInfinity;
          }
        }
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) {
          best = fmaxf(best, scores[i / 2 * 4 + h * 2 + i % 2]);
        }
        best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 1));
        best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 2));
        const float base = best == -kInfinity ? 0.0f : best * factor;
        const float shrink = exp2_fast(top[h] * factor - base);
        float own_total = 0.0f;
        top[h] = best;
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) {
          float& score = scores[i / 2 * 4 + h * 2 + i % 2];
          score = exp2_fast(fmaf(score, factor, -base));
          own_total += score;
        }
        total[h] = total[h] * shrink + own_total;
#pragma unroll
        for (int i = 0; i < HEAD_WIDTH / 8; ++i) {
          sums[4 * i + 2 * h] *= shrink;
          sums[4 * i + 2 * h + 1] *= shrink;
        }
      }
      u32 weights[kKeys / 16][4];
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        weights[i / 4][i % 4] = pack(scores[2 * i], scores[2 * i + 1]);
      }
      wait_barrier(full_values + stage * 8, parity);
      if (start + kKeys > end) {
        // What lies behind the last key is not ours, and may be no number at all.
        for (int i = threadIdx.x + (end - start) * 8; i < kKeys * 8; i += 128 * kTeams) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            *reinterpret_cast<uint4*>(memory + (values_at - queries) + half * kKeys * 128 + i * 16) = make_uint4(0, 0, 0, 0);
          }
        }
        fence_shared();
        meet_teams<kTeams>();
      }
      group_begin();
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) {
        multiply_across(sums, weights[i], columns_descriptor(values_at + i * 2048, kKeys * 128));
      }
      group_commit();
      group_wait<0>();
      if ((threadIdx.x & 127) == 0) {
        arrive(empty + stage * 8);
      }
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
  if (fetches) {
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float all = total[h];
    all += __shfl_xor_sync(0xFFFFFFFFu, all, 1);
    all += __shfl_xor_sync(0xFFFFFFFFu, all, 2);
    float own_factor = 1.0f;
    if (sinks != nullptr) {
      const float unit = softcap > 0.0f ? 1.0f : scale;
      float sink = to_float(sinks[head[h]]), highest = top[h] * unit, with = fmaxf(highest, sink);
      own_factor = top[h] == -kInfinity ? 0.0f : __expf(highest - with);
      all = all * own_factor + __expf(sink - with);
    }
    own_factor = all > 0.0f ? own_factor / all : 0.0f;
    if (is_used[h]) {
      u32* to = reinterpret_cast<u32*>(out + (static_cast<size_t>(token[h]) * heads + head[h]) * HEAD_WIDTH);
#pragma unroll
      for (int i = 0; i < HEAD_WIDTH / 8; ++i) {
        to[i * 4 + quad] = pack(sums[4 * i + 2 * h] * own_factor, sums[4 * i + 2 * h + 1] * own_factor);
      }
    }
  }
}
