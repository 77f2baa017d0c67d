// Products x w^T with weights of WEIGHT_BITS bits a value (4, 8 or 16), for few rows of x. Scales and biases are of GROUP_SIZE values.
//
// A product does not depend on the order of its sums, so each thread takes 16 neighbouring bytes of a weight row as its part of
// a tensor-core operand, and the activations are read in the same order. A quantised weight is expanded to the activations' type
// in registers: 2^7 (bf16) or 2^10 (f16) with the value in its lowest bits is that power plus the value, exactly.

template <int BITS>
struct Form {
  // Values in the 16 bytes of one thread, and in those of the four threads that share a row.
  static constexpr int kOwn = 128 / BITS;
  static constexpr int kChunk = 4 * kOwn;
};

struct Quant {
  const u16* scales;
  const u16* biases;
  int groups;
};

// One word of a row, as the pairs that the tensor core takes. The second parameter of `quantised` forms are scale and bias, each
// twice in a word.
template <int BITS>
struct Words;

template <>
struct Words<4> {
  static constexpr int kPairs = 4;
  __device__ static __forceinline__ void expand(u32 w, u32 scale, u32 bias, u32 (&out)[4]) {
#if F16
    const u32 magic = 0x64006400u, minus = 0xE400E400u;
#else
    const u32 magic = 0x43004300u, minus = 0xC300C300u;
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 q = ((w >> (4 * i)) & 0x000F000Fu) | magic;
      out[i] = fma2(fma2(q, ONE_TWICE, minus), scale, bias);
    }
  }
};

template <>
struct Words<8> {
  static constexpr int kPairs = 2;
  __device__ static __forceinline__ void expand(u32 w, u32 scale, u32 bias, u32 (&out)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#if F16
      u32 q = ((w >> (8 * i)) & 0x00FF00FFu) | 0x64006400u;
      out[i] = fma2(fma2(q, ONE_TWICE, 0xE400E400u), scale, bias);
#else
      // bf16 holds whole numbers up to 256, but not beside a power of two.
      float low = __uint_as_float(0x4B000000u | ((w >> (8 * i)) & 0xFFu)) - 8388608.0f;
      float high = __uint_as_float(0x4B000000u | ((w >> (8 * i + 16)) & 0xFFu)) - 8388608.0f;
      float s = low_float(scale), b = low_float(bias);
      out[i] = pack(fmaf(low, s, b), fmaf(high, s, b));
#endif
    }
  }
};

// Activations that belong to word `i` of the weights: 8 values for 4 bits, 4 for 8 bits. `v` holds the 8 values around it.
template <int BITS>
__device__ __forceinline__ void pairs_of(const uint4& v, int half, u32 (&p)[4]) {
  if constexpr (BITS == 4) {
    p[0] = __byte_perm(v.x, v.z, 0x5410);
    p[1] = __byte_perm(v.x, v.z, 0x7632);
    p[2] = __byte_perm(v.y, v.w, 0x5410);
    p[3] = __byte_perm(v.y, v.w, 0x7632);
  } else if constexpr (BITS == 8) {
    u32 a = half ? v.z : v.x, b = half ? v.w : v.y;
    p[0] = __byte_perm(a, b, 0x5410);
    p[1] = __byte_perm(a, b, 0x7632);
  } else {
    p[0] = v.x, p[1] = v.y, p[2] = v.z, p[3] = v.w;
  }
}

__device__ __forceinline__ u32 twice(u16 v) {
  return __byte_perm(v, 0, 0x1010);
}

// A second weight of the same shape, whose columns a block makes beside the first's, and what is made of both.
struct Pair {
  const u8* w;
  Quant quant;
  u16* out;
  u16* both;
  int kind;
};

// UNROLL pieces of a thread's rows of the weight.
template <int BITS, int TILES, int UNROLL>
struct Pieces {
  uint4 q[UNROLL][2 * TILES];
  u16 s[UNROLL][2 * TILES], b[UNROLL][2 * TILES];
};

// Those from `k_first` on and `k_step` apart.
template <int BITS, int TILES, int UNROLL>
__device__ __forceinline__ void load_pieces(
    Pieces<BITS, TILES, UNROLL>& held, const u8* const (&own)[2 * TILES], const u16* const (&own_scales)[2 * TILES],
    const u16* const (&own_biases)[2 * TILES], int k_total, int k_first, int k_step) {
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    int k = k_first + u * k_step;
    bool there = k < k_total;
#pragma unroll
    for (int t = 0; t < 2 * TILES; ++t) {
      held.q[u][t] = there ? load_once(own[t] + static_cast<size_t>(k) * BITS / 8) : make_uint4(0, 0, 0, 0);
      if constexpr (BITS < 16) {
        held.s[u][t] = there ? __ldg(own_scales[t] + k / GROUP_SIZE) : 0;
        held.b[u][t] = there ? __ldg(own_biases[t] + k / GROUP_SIZE) : 0;
      }
    }
  }
}

// Times the same pieces of the thread's row of x.
template <int BITS, int TILES, int UNROLL>
__device__ __forceinline__ void multiply_pieces(
    float (&sums)[TILES][4], const Pieces<BITS, TILES, UNROLL>& held, const u16* own_x, bool has_x, int k_total, int k_first, int k_step,
    const Around& around, float factor) {
  constexpr int kOwn = Form<BITS>::kOwn;
  const auto& q = held.q;
  const auto& s = held.s;
  const auto& b = held.b;
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    int k = k_first + u * k_step;
    bool there = has_x && k < k_total;
#pragma unroll
    for (int i = 0; i < kOwn / 8; ++i) {
      uint4 v = there ? *reinterpret_cast<const uint4*>(own_x + k + 8 * i) : make_uint4(0, 0, 0, 0);
      if (around.normed && there) {
        v = normed_values(v, around, factor, k + 8 * i);
      }
      if constexpr (BITS == 16) {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          mma(sums[t], q[u][2 * t].x, q[u][2 * t + 1].x, q[u][2 * t].y, q[u][2 * t + 1].y, v.x, v.y);
          mma(sums[t], q[u][2 * t].z, q[u][2 * t + 1].z, q[u][2 * t].w, q[u][2 * t + 1].w, v.z, v.w);
        }
      } else {
        constexpr int kWords = BITS == 4 ? 1 : 2;
#pragma unroll
        for (int h = 0; h < kWords; ++h) {
          u32 p[4];
          pairs_of<BITS>(v, h, p);
#pragma unroll
          for (int t = 0; t < TILES; ++t) {
            u32 upper[Words<BITS>::kPairs], lower[Words<BITS>::kPairs];
            int word = i * kWords + h;
            Words<BITS>::expand(word_of(q[u][2 * t], word), twice(s[u][2 * t]), twice(b[u][2 * t]), upper);
            Words<BITS>::expand(word_of(q[u][2 * t + 1], word), twice(s[u][2 * t + 1]), twice(b[u][2 * t + 1]), lower);
            mma(sums[t], upper[0], lower[0], upper[1], lower[1], p[0], p[1]);
            if constexpr (BITS == 4) {
              mma(sums[t], upper[2], lower[2], upper[3], lower[3], p[2], p[3]);
            }
          }
        }
      }
    }
  }
}

template <int BITS, int TILES, int UNROLL>
__device__ __forceinline__ void add_products(
    float (&sums)[TILES][4], const u8* const (&own)[2 * TILES], const u16* const (&own_scales)[2 * TILES],
    const u16* const (&own_biases)[2 * TILES], const u16* own_x, bool has_x, int k_total, int k_first, int k_step, const Around& around,
    float factor) {
  Pieces<BITS, TILES, UNROLL> held;
  load_pieces(held, own, own_scales, own_biases, k_total, k_first, k_step);
  // A quantised weight does not depend on the launch before, and a plain one is not launched early. This also keeps the loads
  // above together: without it the compiler spreads them over what follows.
  wait_for_inputs();
  multiply_pieces(sums, held, own_x, has_x, k_total, k_first, k_step, around, factor);
}

// Which row of x is the `row`-th, and which of the result.
struct InOrder {
  __device__ __forceinline__ size_t from(int row) const { return row; }
  __device__ __forceinline__ size_t to(int row) const { return row; }
};

// Up to 8 rows of x. A block makes 16 * TILES columns of the result from `first` on; its warps share the sum over K. With PAIR,
// half of the columns are those of a gate and half the same ones of what it gates.
template <int BITS, int TILES, int UNROLL, int WARPS, bool PAIR = false, typename Places = InOrder>
__device__ __forceinline__ void few_rows(
    const u8* w, Quant quant, const u16* x, u16* out, int n_total, int k_total, int rows, int first,
    const Around& around, Pair pair = {}, Places places = {}) {
  constexpr int kOwn = Form<BITS>::kOwn, kChunk = Form<BITS>::kChunk, kHalves = 2 * TILES;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int quad = lane & 3, in_tile = lane >> 2;
  const size_t row_bytes = static_cast<size_t>(k_total) * BITS / 8;
  const u8* own[kHalves];
  const u16 *own_scales[kHalves], *own_biases[kHalves];
#pragma unroll
  for (int t = 0; t < kHalves; ++t) {
    bool second = PAIR && t >= 2;
    size_t row = min(first + (second ? t - 2 : t) * 8 + in_tile, n_total - 1);
    own[t] = (second ? pair.w : w) + row * row_bytes;
    own_scales[t] = (second ? pair.quant.scales : quant.scales) + row * quant.groups;
    own_biases[t] = (second ? pair.quant.biases : quant.biases) + row * quant.groups;
  }
  float sums[TILES][4] = {};
  const bool has_x = in_tile < rows;
  const u16* own_x = x + (has_x ? places.from(in_tile) : 0) * k_total;
  float factor = 1.0f;
  if (around.normed) {
    // Rows are short where this is asked for: each block sums the squares itself, a warp a row.
    __shared__ float factors[8];
    wait_for_inputs();
    if (warp < rows) {
      float sum = 0.0f;
      for (int i = lane; i < k_total / 8; i += 32) {
        sum += sum_of_squares(*reinterpret_cast<const uint4*>(x + static_cast<size_t>(warp) * k_total + i * 8));
      }
      factors[warp] = rsqrtf(sum_of_warp(sum) / k_total + around.eps);
    }
    __syncthreads();
    factor = factors[min(in_tile, rows - 1)];
  }
  for (int start = warp * kChunk; start < k_total; start += WARPS * kChunk * UNROLL) {
    add_products<BITS, TILES, UNROLL>(
        sums, own, own_scales, own_biases, own_x, has_x, k_total, start + quad * kOwn, WARPS * kChunk, around, factor);
  }
  __shared__ float parts[WARPS][TILES * 16][9];
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    parts[warp][t * 16 + in_tile][quad * 2] = sums[t][0];
    parts[warp][t * 16 + in_tile][quad * 2 + 1] = sums[t][1];
    parts[warp][t * 16 + in_tile + 8][quad * 2] = sums[t][2];
    parts[warp][t * 16 + in_tile + 8][quad * 2 + 1] = sums[t][3];
  }
  __syncthreads();
  // For warps that had no part of the sum.
  wait_for_inputs();
  if constexpr (PAIR) {
    for (int i = threadIdx.x; i < 16 * rows; i += WARPS * 32) {
      int column = i % 16, row = i / 16;
      float g = 0.0f, u = 0.0f;
#pragma unroll
      for (int part = 0; part < WARPS; ++part) {
        g += parts[part][column][row];
        u += parts[part][16 + column][row];
      }
      if (first + column < n_total) {
        size_t at = places.to(row) * n_total + first + column;
        u16 gate = from_float(g), up = from_float(u);
        if (out != nullptr) {
          out[at] = gate;
          pair.out[at] = up;
        }
        pair.both[at] = from_float(gated(to_float(gate), to_float(up), pair.kind));
      }
    }
    return;
  }
  for (int i = threadIdx.x; i < TILES * 16 * rows; i += WARPS * 32) {
    int column = i % (TILES * 16), row = i / (TILES * 16);
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < WARPS; ++part) {
      sum += parts[part][column][row];
    }
    if (first + column < n_total) {
      size_t at = places.to(row) * n_total + first + column;
      out[at] = with_residual(sum, around.residual, at);
    }
  }
}
