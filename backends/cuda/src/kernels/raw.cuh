// Values of 4 bits as they are on the tensor cores, and a thread's part of them in registers. Nothing for other forms.
//
// As in `streamed`: a value of few bits as the lowest bits of a bf16 is that number times 2^-133, so values go to the tensor core as
// they are and x is scaled by 2^64 (2^60 where values stand four bits higher); f16 has 2^10 plus the value, and the 2^10 is taken
// off at the start of each sum (`clustered`, `lines.cuh`) or by a product of its own. Follows `few.cuh`.

#if WEIGHT_BITS == 4 && GROUP_SIZE >= 64
#if F16
#define SCALE_PLAIN 0x3C003C00u
#define SCALE_HIGH 0x2C002C00u
#define ONE_PLAIN 0x3C003C00u
#define ONE_HIGH 0x4C004C00u
#define MINUS_BASE 0xE400E400u
constexpr float kUndo = 1.0f;
#else
#define SCALE_PLAIN 0x5F805F80u
#define SCALE_HIGH 0x5D805D80u
#define ONE_PLAIN 0x1F801F80u
#define ONE_HIGH 0x21802180u
constexpr float kUndo = 0x1p69f;
#endif

// Exact where the second is a power of two; sums with -0 keep every sign.
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  return fma2(a, b, 0x80008000u);
}
__device__ __forceinline__ uint2 load_pair_once(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// Eight neighbouring values of a row of x as the tensor core takes them with the words of a weight.
__device__ __forceinline__ uint4 in_order(const uint4& v) {
  u32 p[4];
  pairs_of<4>(v, 0, p);
  return make_uint4(times(p[0], SCALE_PLAIN), times(p[1], SCALE_HIGH), times(p[2], SCALE_PLAIN), times(p[3], SCALE_HIGH));
}
// Lanes that have a group's values side by side, eight each; sums of these in x and, in f16, in x as it is in order.
#define GROUP_LANES (GROUP_SIZE / 8)
struct GroupSums {
  float x;
  float ordered;
};
__device__ __forceinline__ GroupSums sums_of_group(const uint4& v, const uint4& ordered) {
  float sum = low_float(v.x) + high_float(v.x) + low_float(v.y) + high_float(v.y);
  sum += low_float(v.z) + high_float(v.z) + low_float(v.w) + high_float(v.w);
  float start = 0.0f;
#if F16
  start = low_float(ordered.x) + high_float(ordered.x) + low_float(ordered.y) + high_float(ordered.y);
  start += low_float(ordered.z) + high_float(ordered.z) + low_float(ordered.w) + high_float(ordered.w);
#endif
#pragma unroll
  for (int step = 1; step < GROUP_LANES; step *= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
#if F16
    start += __shfl_xor_sync(0xFFFFFFFFu, start, step);
#endif
  }
  return GroupSums{sum, start};
}

// 256 values of K of two rows, a thread's part.
constexpr int kPiece = 256, kPieceBlocks = 4, kPieceGroups = kPiece / GROUP_SIZE;
struct Piece {
  uint2 words[2][kPieceBlocks];
  u32 scales[2][kPieceGroups / 2];
  u32 biases[2][kPieceGroups / 2];
};
struct Rows {
  const u8* words[2];
  const u16* scales[2];
  const u16* biases[2];
};
__device__ __forceinline__ void load_groups(u32 (&to)[kPieceGroups / 2], const u16* from) {
  if constexpr (kPieceGroups == 4) {
    uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = __ldg(reinterpret_cast<const u32*>(from));
  }
}
__device__ __forceinline__ void load_piece(Piece& piece, const Rows& rows, int at, int quad) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < kPieceBlocks; ++block) {
      piece.words[half][block] = load_pair_once(rows.words[half] + at * (kPiece / 2) + block * 32 + quad * 8);
    }
    load_groups(piece.scales[half], rows.scales[half] + at * kPieceGroups);
    load_groups(piece.biases[half], rows.biases[half] + at * kPieceGroups);
  }
}
__device__ __forceinline__ float group_of(const u32* from, int g) {
  return g % 2 ? high_float(from[g / 2]) : low_float(from[g / 2]);
}

// Adds the products of a piece. `x_at` is the thread's place in rows of x in order: [64 values of K][word][row][quad], `x_step` bytes
// from a word to the next. Sums of x, which biases are multiplied with, come from a product with ones.
__device__ __forceinline__ void add_piece(float (&sums)[4], const Piece& piece, u32 x_at, u32 x_step) {
#pragma unroll
  for (int g = 0; g < kPieceGroups; ++g) {
    float acc[4] = {}, of_x[4] = {};
#pragma unroll
    for (int i = 0; i < GROUP_SIZE / 64; ++i) {
      const int block = g * (GROUP_SIZE / 64) + i;
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const uint4 v = load_shared(x_at + (block * 2 + word) * x_step);
        u32 a = word ? piece.words[0][block].y : piece.words[0][block].x, b = word ? piece.words[1][block].y : piece.words[1][block].x;
        mma(acc, RAW(a, 0x000F000Fu), RAW(b, 0x000F000Fu), RAW(a, 0x00F000F0u), RAW(b, 0x00F000F0u), v.x, v.y);
        a >>= 8, b >>= 8;
        mma(acc, RAW(a, 0x000F000Fu), RAW(b, 0x000F000Fu), RAW(a, 0x00F000F0u), RAW(b, 0x00F000F0u), v.z, v.w);
        mma(of_x, ONE_PLAIN, ONE_PLAIN, ONE_HIGH, ONE_HIGH, v.x, v.y);
        mma(of_x, ONE_PLAIN, ONE_PLAIN, ONE_HIGH, ONE_HIGH, v.z, v.w);
#if F16
        mma(acc, MINUS_BASE, MINUS_BASE, MINUS_BASE, MINUS_BASE, v.x, v.y);
        mma(acc, MINUS_BASE, MINUS_BASE, MINUS_BASE, MINUS_BASE, v.z, v.w);
#endif
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2;
      sums[i] = fmaf(acc[i], group_of(piece.scales[half], g) * kUndo, fmaf(of_x[i], group_of(piece.biases[half], g), sums[i]));
    }
  }
}
#endif
