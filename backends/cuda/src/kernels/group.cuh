// Products of a warpgroup (wgmma): d is 64 rows by twice as many columns as it has numbers a thread. `adds` is 0 where d is new.
// b, and a where it is not in registers, lie in shared memory with K along rows of 128 bytes.

#if F16
#define MMA_TYPE_3 "f32.f16.f16"
#else
#define MMA_TYPE_3 "f32.bf16.bf16"
#endif

__device__ __forceinline__ void group_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void group_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All warps of the groups, without the one that has the copy engine bring things.
template <int TEAMS>
__device__ __forceinline__ void meet_teams() {
  asm volatile("bar.sync 1, %0;" ::"n"(128 * TEAMS) : "memory");
}
template <int N>
__device__ __forceinline__ void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Rows of 128 bytes, swizzled, in blocks of 8.
__device__ __forceinline__ u64 rows_descriptor(u32 address) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Numbers of d from the first on, as operands and as they are named in the text.
#define NUMBERS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NUMBERS_8(d, i) NUMBERS_4(d, i), NUMBERS_4(d, i + 4)
#define NUMBERS_16(d, i) NUMBERS_8(d, i), NUMBERS_8(d, i + 8)
#define NUMBERS_32(d, i) NUMBERS_16(d, i), NUMBERS_16(d, i + 16)
#define NUMBERS_64(d, i) NUMBERS_32(d, i), NUMBERS_32(d, i + 32)
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                              \
  NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
           ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// With N numbers a thread for COLUMNS columns: a in registers, then in shared memory. A to F name the operands that follow d's.
#define MULTIPLY(N, COLUMNS, A, B, C, D, E, F)                                                                                       \
  __device__ __forceinline__ void multiply(float (&d)[N], const u32 (&a)[4], u64 b, int adds) {                                      \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" F ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16." MMA_TYPE_3 " {" NAMES_##N "}, {%" A ", %" B ", %" C ", %" D      \
                 "}, %" E ", p, 1, 1, 0;}\n"                                                                                         \
                 : NUMBERS_##N(d, 0)                                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                                                   \
  }                                                                                                                                  \
  __device__ __forceinline__ void multiply(float (&d)[N], u64 a, u64 b, int adds) {                                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" C ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16." MMA_TYPE_3 " {" NAMES_##N "}, %" A ", %" B ", p, 1, 1, 0, 0;}\n" \
                 : NUMBERS_##N(d, 0)                                                                                                 \
                 : "l"(a), "l"(b), "r"(adds));                                                                                       \
  }
MULTIPLY(4, "8", "4", "5", "6", "7", "8", "9")
MULTIPLY(8, "16", "8", "9", "10", "11", "12", "13")
MULTIPLY(16, "32", "16", "17", "18", "19", "20", "21")
MULTIPLY(32, "64", "32", "33", "34", "35", "36", "37")
MULTIPLY(64, "128", "64", "65", "66", "67", "68", "69")

// Rows of K with 64 columns each in 128 bytes, swizzled; further columns `further` bytes on.
__device__ __forceinline__ u64 columns_descriptor(u32 address, u32 further) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(further >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
// d += a b with b's columns along rows.
#define MULTIPLY_ACROSS(N, COLUMNS, A, B, C, D, E)                                                                              \
  __device__ __forceinline__ void multiply_across(float (&d)[N], const u32 (&a)[4], u64 b) {                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16." MMA_TYPE_3 " {" NAMES_##N "}, {%" A ", %" B ", %" C ", %" D \
                 "}, %" E ", 1, 1, 1, 1;\n"                                                                                     \
                 : NUMBERS_##N(d, 0)                                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
  }
MULTIPLY_ACROSS(32, "64", "32", "33", "34", "35", "36")
MULTIPLY_ACROSS(64, "128", "64", "65", "66", "67", "68")
