// What every kernel file starts with. Compiled at run time without any header: elements of half types are bit patterns, and
// `F16` says which type they are (1: f16, 0: bf16).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define kInfinity __int_as_float(0x7F800000)

#if F16
__device__ __forceinline__ float to_float(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}
__device__ __forceinline__ u16 from_float(float f) {
  u16 v;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Values of few bits for the tensor core as they are: 2^10 with the value in its lowest bits.
#define RAW(w, mask) (((w) & (mask)) | 0x64006400u)
#define MMA_TYPE "f32.f16.f16.f32"
#define ONE_TWICE 0x3C003C00u
#else
__device__ __forceinline__ float to_float(u16 v) {
  return __uint_as_float(static_cast<u32>(v) << 16);
}
__device__ __forceinline__ u16 from_float(float f) {
  u16 v;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// The same: the value in the lowest bits is that number times 2^-133.
#define RAW(w, mask) ((w) & (mask))
#define MMA_TYPE "f32.bf16.bf16.f32"
#define ONE_TWICE 0x3F803F80u
#endif

__device__ __forceinline__ float low_float(u32 pair) {
  return to_float(static_cast<u16>(pair));
}
__device__ __forceinline__ float high_float(u32 pair) {
  return to_float(static_cast<u16>(pair >> 16));
}
__device__ __forceinline__ void unpack(const uint4& v, float (&f)[8]) {
  f[0] = low_float(v.x), f[1] = high_float(v.x), f[2] = low_float(v.y), f[3] = high_float(v.y);
  f[4] = low_float(v.z), f[5] = high_float(v.z), f[6] = low_float(v.w), f[7] = high_float(v.w);
}
__device__ __forceinline__ u32 word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
// As it is where it is stored and read again.
__device__ __forceinline__ float rounded(float v) {
  return to_float(from_float(v));
}
__device__ __forceinline__ float exp2_fast(float v) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v));
  return e;
}

// The same in all lanes of a warp.
__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  }
  return v;
}

// d += a b on the tensor cores: 16 x 16 by 16 x 8.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col." MMA_TYPE " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Read once: kept out of the first cache.
__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 load_pair_shared(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 load_word_shared(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
// Copies 16 bytes to shared memory without waiting; zeros when `there` is false.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool there) {
  int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// The launch before may still run up to here (programmatic dependent launch); without it this is nothing.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// f(gate) * up; kinds as in the operation table: 1 SiLU, 2 GELU, 3 GELU by tanh, 4 ReLU.
__device__ __forceinline__ float gated(float g, float u, int kind) {
  if (kind == 1) {
    return g / (1.0f + __expf(-g)) * u;
  }
  if (kind == 2) {
    return 0.5f * g * (1.0f + erff(g * 0.70710678f)) * u;
  }
  if (kind == 3) {
    return 0.5f * g * (1.0f + tanhf(0.79788456f * (g + 0.044715f * g * g * g))) * u;
  }
  return fmaxf(g, 0.0f) * u;
}

// Up to three weights for the same x, one after another. The host lays it out.
struct Weights {
  // Rows of values; for kernels that the copy engine serves, tensor maps of 128 bytes one after another: of values and, where they are
  // read through maps too, of scales and biases.
  const u8* w[3];
  const u16* scales[3];
  const u16* biases[3];
  u16* out[3];
  int n[3];
  // First tile of each.
  int start[3];
};
// One of three, which of three weights has a tile, and that one's first tile. As functions these give the compiler other code.
#define PICK(from, i) ((i) == 0 ? (from)[0] : (i) == 1 ? (from)[1] : (from)[2])
#define WHICH(all, tile) ((tile) >= (all).start[2] ? 2 : (tile) >= (all).start[1] ? 1 : 0)
#define FIRST_TILE(all, i) ((i) == 0 ? 0 : (i) == 1 ? (all).start[1] : (all).start[2])

// What happens to x before the product and to the result after it.
struct Around {
  // Weight of the norm.
  const u16* norm;
  // Not null: added to the result, one weight alone.
  const u16* residual;
  float eps;
  // 1: normed without a weight; 2: with one.
  int normed;
};

// A result and what is added to it, if anything, each rounded by itself as when they are two operations.
__device__ __forceinline__ u16 with_residual(float v, const u16* residual, size_t at) {
  u16 value = from_float(v);
  if (residual != nullptr) {
    value = from_float(to_float(value) + to_float(residual[at]));
  }
  return value;
}

// Eight values, normed: `factor` is the reciprocal of their row's root mean square.
__device__ __forceinline__ uint4 scaled_by(const uint4& v, const uint4& w, float factor) {
  return make_uint4(
      pack(low_float(v.x) * factor * low_float(w.x), high_float(v.x) * factor * high_float(w.x)),
      pack(low_float(v.y) * factor * low_float(w.y), high_float(v.y) * factor * high_float(w.y)),
      pack(low_float(v.z) * factor * low_float(w.z), high_float(v.z) * factor * high_float(w.z)),
      pack(low_float(v.w) * factor * low_float(w.w), high_float(v.w) * factor * high_float(w.w)));
}
__device__ __forceinline__ uint4 normed_values(const uint4& v, const Around& around, float factor, int at) {
  uint4 w = make_uint4(ONE_TWICE, ONE_TWICE, ONE_TWICE, ONE_TWICE);
  if (around.normed > 1) {
    w = *reinterpret_cast<const uint4*>(around.norm + at);
  }
  return scaled_by(v, w, factor);
}

__device__ __forceinline__ float sum_of_squares(const uint4& v) {
  float sum = low_float(v.x) * low_float(v.x) + high_float(v.x) * high_float(v.x);
  sum += low_float(v.y) * low_float(v.y) + high_float(v.y) * high_float(v.y);
  sum += low_float(v.z) * low_float(v.z) + high_float(v.z) * high_float(v.z);
  return sum + low_float(v.w) * low_float(v.w) + high_float(v.w) * high_float(v.w);
}
