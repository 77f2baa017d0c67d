// Products of experts for pairs that are in order of experts, up to eight to a weight. A warp has 16 rows of the weight (or 8 of a
// gate and the same 8 of what it gates) and all of K; the block's rows of x lie in shared memory in the tensor core's order. Sums of
// x, which biases are multiplied with, come from a product with ones. Follows `raw.cuh` and `experts.cu`.

#if WEIGHT_BITS == 4 && GROUP_SIZE >= 64
template <bool GATED>
__device__ __forceinline__ void grouped(
    const Stack& first_stack, const Stack& second_stack, const u16* x, u16* out, const u32* experts, const uint4* groups,
    const u32* group_count, const u32* rows, int chosen, int n_experts, int n, int k, int kind) {
  extern __shared__ __align__(128) u8 memory[];
  let_next_start();
  wait_for_inputs();
  const Work work = work_of(experts, groups, group_count, n_experts);
  if (work.count == 0) {
    return;
  }
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, in_tile = lane >> 2;
  const Matrix a = matrix_of(first_stack, work.expert, n, k), b = matrix_of(second_stack, work.expert, n, k);
  const int tile = blockIdx.x * 8 + warp;
  const int row[2] = {tile * (GATED ? 8 : 16) + in_tile, tile * (GATED ? 8 : 16) + in_tile + (GATED ? 0 : 8)};
  Rows own;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Matrix& m = GATED && half ? b : a;
    const size_t line = min(row[half], n - 1);
    own.words[half] = m.w + line * (k / 2);
    own.scales[half] = m.quant.scales + line * m.quant.groups;
    own.biases[half] = m.quant.biases + line * m.quant.groups;
  }
  const int pieces = k / kPiece;
  Piece now, next;
  load_piece(now, own, 0, quad);
  // x: [64 values of K][word][row][quad].
  const Sorted places{rows, work.first, chosen};
  const int vectors = k / 8;
  for (int i = threadIdx.x; i < work.count * vectors; i += 256) {
    const int r = i / vectors, at = i % vectors;
    const uint4 v = *reinterpret_cast<const uint4*>(x + places.from(r) * k + at * 8);
    const uint4 to = in_order(v);
    const int block = at / 8, q = at % 8 / 2, word = at % 2;
    *reinterpret_cast<uint4*>(memory + (((block * 2 + word) * work.count + r) * 4 + q) * 16) = to;
  }
  __syncthreads();
  const u32 x_step = work.count * 64, x_at = shared_address(memory) + (min(in_tile, work.count - 1) * 4 + quad) * 16;
  float sums[4] = {};
  for (int piece = 0; piece < pieces; piece += 2) {
    if (piece + 1 < pieces) {
      load_piece(next, own, piece + 1, quad);
    }
    add_piece(sums, now, x_at + piece * kPieceBlocks * 2 * x_step, x_step);
    if (piece + 1 < pieces) {
      if (piece + 2 < pieces) {
        load_piece(now, own, piece + 2, quad);
      }
      add_piece(sums, next, x_at + (piece + 1) * kPieceBlocks * 2 * x_step, x_step);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = quad * 2 + i;
    if (c < work.count) {
      u16* to = out + places.to(c) * n;
      if constexpr (GATED) {
        if (row[0] < n) {
          to[row[0]] = from_float(gated(rounded(sums[i]), rounded(sums[2 + i]), kind));
        }
      } else {
        if (row[0] < n) {
          to[row[0]] = from_float(sums[i]);
        }
        if (row[1] < n) {
          to[row[1]] = from_float(sums[2 + i]);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 3) grouped_gated(
    Stack gate, Stack up, const u16* x, u16* both, const u32* experts, const uint4* groups, const u32* group_count, const u32* rows,
    int chosen, int n_experts, int n, int k, int kind) {
  grouped<true>(gate, up, x, both, experts, groups, group_count, rows, chosen, n_experts, n, k, kind);
}
extern "C" __global__ void __launch_bounds__(256, 3) grouped_product(
    Stack stack, const u16* x, u16* out, const u32* experts, const uint4* groups, const u32* group_count, const u32* rows, int n_experts,
    int n, int k) {
  grouped<false>(stack, stack, x, out, experts, groups, group_count, rows, 1, n_experts, n, k, 0);
}
#endif
