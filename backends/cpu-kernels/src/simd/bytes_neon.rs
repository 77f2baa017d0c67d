//! Integer dot products of aarch64: with the `dotprod` extension one instruction for four
//! neighbours, without it products of 16 bits that are added in pairs.

use core::arch::aarch64::*;
use core::marker::PhantomData;

use super::bytes::Bytes;
use super::neon::Neon;

/// How four neighbours are multiplied and added.
///
/// # Safety
/// The CPU has the instruction.
pub unsafe trait Quads: Copy + 'static {
    /// `acc[i] + sum of a[4i..4i + 4] * b[4i..4i + 4]`, both signed.
    unsafe fn dot(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t;
}

/// The `dotprod` extension.
#[derive(Clone, Copy)]
pub struct DotProduct;

// SAFETY: chosen where the extension was detected.
unsafe impl Quads for DotProduct {
    #[inline(always)]
    unsafe fn dot(mut acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // The intrinsic is not stable yet, the instruction is.
        // SAFETY: registers only, and the instruction exists (trait contract).
        unsafe {
            core::arch::asm!(
                ".arch_extension dotprod",
                "sdot {acc:v}.4s, {a:v}.16b, {b:v}.16b",
                acc = inout(vreg) acc, a = in(vreg) a, b = in(vreg) b,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        acc
    }
}

/// Plain NEON.
#[derive(Clone, Copy)]
pub struct Widening;

// SAFETY: NEON belongs to every aarch64 target of the compiler.
unsafe impl Quads for Widening {
    #[inline(always)]
    unsafe fn dot(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: registers only.
        unsafe {
            let low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
            let high = vpaddlq_s16(vmull_high_s8(a, b));
            vaddq_s32(acc, vpaddq_s32(low, high))
        }
    }
}

/// 32 bytes in two registers.
#[derive(Clone, Copy)]
pub struct NeonBytes<Q>(PhantomData<Q>);

// SAFETY of every block below: the trait's contract gives the instruction set, and vouches for the
// elements behind pointers.
impl<Q: Quads> Bytes for NeonBytes<Q> {
    type F = Neon;
    type V = [uint8x16_t; 2];
    type I = [int32x4_t; 2];

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self::V {
        // SAFETY: see above.
        unsafe { [vld1q_u8(from), vld1q_u8(from.add(16))] }
    }
    #[inline(always)]
    unsafe fn store(v: Self::V, to: *mut u8) {
        // SAFETY: see above.
        unsafe {
            vst1q_u8(to, v[0]);
            vst1q_u8(to.add(16), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const u8, n: usize) -> Self::V {
        let mut all = [0u8; 32];
        // SAFETY: n bytes are readable, and 32 are there.
        unsafe {
            core::ptr::copy_nonoverlapping(from, all.as_mut_ptr(), n.min(32));
            Self::load(all.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn broadcast(from: *const i8) -> Self::V {
        // SAFETY: see above.
        unsafe {
            let four = vreinterpretq_u8_u32(vdupq_n_u32(from.cast::<u32>().read_unaligned()));
            [four, four]
        }
    }
    #[inline(always)]
    unsafe fn low(v: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { v.map(|v| vandq_u8(v, vdupq_n_u8(15))) }
    }
    #[inline(always)]
    unsafe fn high(v: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { v.map(|v| vshrq_n_u8::<4>(v)) }
    }
    #[inline(always)]
    unsafe fn zero() -> Self::I {
        // SAFETY: see above.
        unsafe { [vdupq_n_s32(0); 2] }
    }
    #[inline(always)]
    unsafe fn broadcast_sum(from: *const i32) -> Self::I {
        // SAFETY: see above.
        unsafe { [vdupq_n_s32(*from); 2] }
    }
    #[inline(always)]
    unsafe fn dot_small(acc: Self::I, codes: Self::V, x: Self::V) -> Self::I {
        // Codes below 128 are the same number as signed bytes.
        // SAFETY: see above.
        unsafe {
            core::array::from_fn(|i| {
                Q::dot(
                    acc[i],
                    vreinterpretq_s8_u8(codes[i]),
                    vreinterpretq_s8_u8(x[i]),
                )
            })
        }
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::I, codes: Self::V, x: Self::V, small: bool) -> Self::I {
        // SAFETY: see above.
        unsafe {
            if small {
                return Self::dot_small(acc, codes, x);
            }
            // code = low seven bits + 128 * highest bit
            let acc = Self::dot_small(acc, codes.map(|c| vandq_u8(c, vdupq_n_u8(127))), x);
            let top = Self::dot_small(Self::zero(), codes.map(|c| vshrq_n_u8::<7>(c)), x);
            core::array::from_fn(|i| vaddq_s32(acc[i], vshlq_n_s32::<7>(top[i])))
        }
    }
    #[inline(always)]
    unsafe fn nibble_words<const INDEX: u32>(v: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe {
            let right = vdupq_n_s16(-4 * INDEX as i16);
            v.map(|v| {
                let shifted = vshlq_u16(vreinterpretq_u16_u8(v), right);
                vreinterpretq_u8_u16(vandq_u16(shifted, vdupq_n_u16(15)))
            })
        }
    }
    #[inline(always)]
    unsafe fn even_words(v: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { v.map(|v| vandq_u8(v, vreinterpretq_u8_u16(vdupq_n_u16(255)))) }
    }
    #[inline(always)]
    unsafe fn odd_words(v: Self::V) -> Self::V {
        // SAFETY: see above.
        unsafe { v.map(|v| vreinterpretq_u8_u16(vshrq_n_u16::<8>(vreinterpretq_u16_u8(v)))) }
    }
    #[inline(always)]
    unsafe fn dot_words(acc: Self::I, codes: Self::V, x: Self::V) -> Self::I {
        // SAFETY: see above.
        unsafe {
            core::array::from_fn(|i| {
                let (a, b) = (vreinterpretq_s16_u8(codes[i]), vreinterpretq_s16_u8(x[i]));
                let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
                vaddq_s32(acc[i], vpaddq_s32(low, vmull_high_s16(a, b)))
            })
        }
    }
    #[inline(always)]
    unsafe fn to_f32(i: Self::I) -> Neon {
        // SAFETY: see above.
        unsafe { Neon::from_raw(vcvtq_f32_s32(i[0]), vcvtq_f32_s32(i[1])) }
    }
}
