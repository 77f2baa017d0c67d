// Values of 4 bits as they are on the tensor cores, and a thread's part of them in registers. Nothing for other forms.
//
// As in `streamed`: a value of few bits as the lowest bits of a bf16 is that number times 2^-133, so values go to the tensor core as
// they are and x is scaled by 2^64 (2^60 where values stand four bits higher); f16 has 2^10 plus the value, and the 2^10 is taken
// off by a product of its own.

#if WEIGHT_BITS == 4 && GROUP_SIZE >= 64
#if F16
#define RAW(w, mask) (((w) & (mask)) | 0x64006400u)
#define SCALE_PLAIN 0x3C003C00u
#define SCALE_HIGH 0x2C002C00u
#define ONE_PLAIN 0x3C003C00u
#define ONE_HIGH 0x4C004C00u
#define MINUS_BASE 0xE400E400u
constexpr float kUndo = 1.0f;
#else
#define RAW(w, mask) ((w) & (mask))
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
#endif
