// Products of the experts of a mixture: each row of x by the matrices that were chosen for it. Weights are stacks [E, n, k]. Follows
// `few.cuh`.

// Rows of x and of the result: the result has a row for every pair of a row and an expert.
struct Sorted {
  // Row of x for every pair; null: pair p is of row p / chosen.
  const u32* rows;
  int first;
  int chosen;
  __device__ __forceinline__ size_t from(int row) const {
    return rows == nullptr ? (first + row) / chosen : rows[first + row];
  }
  __device__ __forceinline__ size_t to(int row) const { return first + row; }
};
// Which expert a block works for, and on which pairs.
struct Work {
  int expert;
  int first;
  int count;
};
// Without groups every pair is for itself. `count` is 0 where there is nothing to do.
__device__ __forceinline__ Work work_of(const u32* experts, const uint4* groups, const u32* group_count, int n_experts) {
  if (groups == nullptr) {
    return Work{static_cast<int>(min(experts[blockIdx.y], static_cast<u32>(n_experts - 1))), static_cast<int>(blockIdx.y), 1};
  }
  // Both at once: there is room for as many groups as there are blocks.
  const uint4 group = groups[blockIdx.y];
  const bool is_there = blockIdx.y < *group_count;
  return Work{static_cast<int>(group.x), static_cast<int>(group.y), is_there ? static_cast<int>(group.z) : 0};
}

// A stack of matrices.
struct Stack {
  const u8* w;
  const u16* scales;
  const u16* biases;
};
struct Matrix {
  const u8* w;
  Quant quant;
};
__device__ __forceinline__ Matrix matrix_of(const Stack& stack, int expert, int n, int k) {
  const int groups = k / GROUP_SIZE;
  const size_t rows = static_cast<size_t>(expert) * n;
  return Matrix{stack.w + rows * (static_cast<size_t>(k) * WEIGHT_BITS / 8),
                Quant{stack.scales + rows * groups, stack.biases + rows * groups, groups}};
}

// both[pair] = f(gate x) * (up x). Groups have 8 pairs at most.
extern "C" __global__ void __launch_bounds__(256) experts_gated(
    Stack gate, Stack up, const u16* x, u16* both, const u32* experts, const uint4* groups, const u32* group_count, const u32* rows,
    int chosen, int n_experts, int n, int k, int kind) {
  let_next_start();
  wait_for_inputs();
  const Work work = work_of(experts, groups, group_count, n_experts);
  if (work.count == 0) {
    return;
  }
  const Matrix a = matrix_of(gate, work.expert, n, k), b = matrix_of(up, work.expert, n, k);
  Pair pair{b.w, b.quant, nullptr, both, kind};
  few_rows<WEIGHT_BITS, 2, 2, 8, true>(
      a.w, a.quant, x, nullptr, n, k, work.count, blockIdx.x * 16, Around{}, pair, Sorted{rows, work.first, chosen});
}

// out[pair] = w x[rows[pair]].
extern "C" __global__ void __launch_bounds__(256) experts_product(
    Stack stack, const u16* x, u16* out, const u32* experts, const uint4* groups, const u32* group_count, const u32* rows, int n_experts,
    int n, int k) {
  let_next_start();
  wait_for_inputs();
  const Work work = work_of(experts, groups, group_count, n_experts);
  if (work.count == 0) {
    return;
  }
  const Matrix a = matrix_of(stack, work.expert, n, k);
  few_rows<WEIGHT_BITS, 1, 4, 8>(
      a.w, a.quant, x, out, n, k, work.count, blockIdx.x * 16, Around{}, Pair{}, Sorted{rows, work.first, 1});
}

// out[row] = residual[row] + the weighted sum of its experts' products, one warp an expert. x has a row for every pair.
extern "C" __global__ void __launch_bounds__(256) experts_summed(
    Stack stack, const u16* x, u16* out, const u32* experts, const u16* weights, const u16* residual, int chosen, int n_experts, int n,
    int k) {
  constexpr int kWarps = 8, kUnroll = WEIGHT_BITS == 16 ? 4 : 6;
  constexpr int kOwn = Form<WEIGHT_BITS>::kOwn, kChunk = Form<WEIGHT_BITS>::kChunk;
  __shared__ float parts[kWarps][16];
  let_next_start();
  wait_for_inputs();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, in_tile = lane >> 2;
  const int first = blockIdx.x * 16, row = blockIdx.y;
  float total[2] = {};
  for (int c = warp; c < chosen; c += kWarps) {
    const int at = row * chosen + c;
    const int expert = min(experts[at], static_cast<u32>(n_experts - 1));
    const float weight = to_float(weights[at]);
    const Matrix m = matrix_of(stack, expert, n, k);
    const u8* own[2];
    const u16 *own_scales[2], *own_biases[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      size_t line = min(first + t * 8 + in_tile, n - 1);
      own[t] = m.w + line * (static_cast<size_t>(k) * WEIGHT_BITS / 8);
      own_scales[t] = m.quant.scales + line * m.quant.groups;
      own_biases[t] = m.quant.biases + line * m.quant.groups;
    }
    const u16* own_x = x + static_cast<size_t>(at) * k;
    float sums[1][4] = {};
    for (int start = 0; start < k; start += kChunk * kUnroll) {
      add_products<WEIGHT_BITS, 1, kUnroll>(
          sums, own, own_scales, own_biases, own_x, in_tile == 0, k, start + quad * kOwn, kChunk, Around{}, 1.0f);
    }
    // Column 0 of the product is in the first of each four threads.
    total[0] += weight * sums[0][0];
    total[1] += weight * sums[0][2];
  }
  if (quad == 0) {
    parts[warp][in_tile] = total[0];
    parts[warp][in_tile + 8] = total[1];
  }
  __syncthreads();
  if (threadIdx.x < 16 && first + threadIdx.x < n) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      sum += parts[i][threadIdx.x];
    }
    const size_t at = static_cast<size_t>(row) * n + first + threadIdx.x;
    out[at] = with_residual(sum, residual, at);
  }
}
