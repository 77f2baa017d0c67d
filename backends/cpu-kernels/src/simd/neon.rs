//! NEON of aarch64: eight lanes in two registers, so that layouts are those of AVX2.

use core::arch::aarch64::*;

use super::{Simd, up_to_four};

/// Eight f32 in two 128-bit registers.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Neon(float32x4_t, float32x4_t);

impl Neon {
    /// From the registers.
    #[inline(always)]
    pub(crate) fn from_raw(low: float32x4_t, high: float32x4_t) -> Self {
        Self(low, high)
    }
}

/// Eight f16 in a register.
#[inline(always)]
unsafe fn from_halves(halves: uint16x8_t) -> Neon {
    // SAFETY: only called with NEON (trait contract).
    unsafe {
        Neon(
            vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves))),
            vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(halves))),
        )
    }
}

/// Eight bf16 in a register.
#[inline(always)]
unsafe fn from_brain(halves: uint16x8_t) -> Neon {
    // SAFETY: only called with NEON (trait contract).
    unsafe {
        Neon(
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(halves))),
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(halves))),
        )
    }
}

/// The first `n` of eight halves, the rest is 0.
#[inline(always)]
unsafe fn first_eight(from: *const u16, n: usize) -> uint16x8_t {
    // SAFETY: only called with NEON; the caller vouches for n elements.
    unsafe {
        let low = up_to_four(from, n);
        let high = up_to_four(from.wrapping_add(4), n.saturating_sub(4));
        vcombine_u16(vcreate_u16(low), vcreate_u16(high))
    }
}

/// Spreads four values over eight lanes, for 1, 2 or 4 groups.
#[inline(always)]
unsafe fn spread_four(four: float32x4_t, groups: usize) -> Neon {
    // SAFETY: only called with NEON (trait contract).
    unsafe {
        match groups {
            4 => Neon(vzip1q_f32(four, four), vzip2q_f32(four, four)),
            2 => Neon(vdupq_laneq_f32::<0>(four), vdupq_laneq_f32::<1>(four)),
            _ => {
                let first = vdupq_laneq_f32::<0>(four);
                Neon(first, first)
            }
        }
    }
}

// SAFETY of every block below: NEON belongs to every aarch64 target of the compiler, and the trait's
// contract vouches for the elements behind pointers.
impl Simd for Neon {
    const LANES: usize = 8;
    // 6 rows of 16 columns are 24 of the 32 registers.
    const TILE_ROWS: usize = 6;
    type Places = usize;

    #[inline(always)]
    unsafe fn places(groups: usize) -> usize {
        groups
    }
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        unsafe { Self(vdupq_n_f32(0.0), vdupq_n_f32(0.0)) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: see above.
        unsafe { Self(vdupq_n_f32(x), vdupq_n_f32(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: see above.
        unsafe { Self(vld1q_f32(from), vld1q_f32(from.add(4))) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        let mut out = [0.0; 8];
        for (i, x) in out.iter_mut().enumerate().take(n) {
            // SAFETY: the caller vouches for n readable elements.
            *x = unsafe { *from.add(i) };
        }
        // SAFETY: eight elements are there.
        unsafe { Self::load(out.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: see above.
        unsafe { from_halves(vld1q_u16(from)) }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let wide = vmovl_u8(vld1_u8(from));
            Self(
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))),
                vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide))),
            )
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe {
            vst1q_f32(to, self.0);
            vst1q_f32(to.add(4), self.1);
        }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        let mut all = [0.0f32; 8];
        // SAFETY: eight elements fit; the caller vouches for n writable ones.
        unsafe {
            self.store(all.as_mut_ptr());
            for (i, x) in all.iter().enumerate().take(n) {
                *to.add(i) = *x;
            }
        }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> Self {
        // SAFETY: see above.
        unsafe {
            Self(
                vreinterpretq_f32_u32(vld1q_u32(from)),
                vreinterpretq_f32_u32(vld1q_u32(from.add(4))),
            )
        }
    }
    #[inline(always)]
    unsafe fn nibble<const INDEX: u32>(words: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let (right, mask) = (vdupq_n_s32(-4 * INDEX as i32), vdupq_n_u32(15));
            let one = |words| {
                let shifted = vshlq_u32(vreinterpretq_u32_f32(words), right);
                vcvtq_f32_u32(vandq_u32(shifted, mask))
            };
            Self(one(words.0), one(words.1))
        }
    }
    #[inline(always)]
    unsafe fn float_nibble<const INDEX: u32>(words: Self) -> Self {
        // Bytes above a nibble are 0, and so is what the table has for them.
        // SAFETY: see above.
        unsafe {
            let (right, mask) = (vdupq_n_s32(-4 * INDEX as i32), vdupq_n_u32(15));
            let table = vld1q_s8(super::E2M1.as_ptr());
            let one = |words| {
                let shifted = vshlq_u32(vreinterpretq_u32_f32(words), right);
                let nibbles = vreinterpretq_u8_u32(vandq_u32(shifted, mask));
                let low = vreinterpretq_s32_s8(vqtbl1q_s8(table, nibbles));
                vcvtq_f32_s32(vshrq_n_s32::<24>(vshlq_n_s32::<24>(low)))
            };
            Self(one(words.0), one(words.1))
        }
    }
    #[inline(always)]
    unsafe fn spread(of: *const f32, groups: usize) -> Self {
        // SAFETY: see above.
        unsafe { spread_four(vld1q_f32(of), groups) }
    }
    #[inline(always)]
    unsafe fn spread_f16(four: u64, groups: usize) -> Self {
        // SAFETY: see above.
        unsafe {
            spread_four(
                vcvt_f32_f16(vreinterpret_f16_u16(vcreate_u16(four))),
                groups,
            )
        }
    }
    #[inline(always)]
    unsafe fn spread_bf16(four: u64, groups: usize) -> Self {
        // SAFETY: see above.
        unsafe {
            let wide = vshll_n_u16::<16>(vcreate_u16(four));
            spread_four(vreinterpretq_f32_u32(wide), groups)
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: see above.
        unsafe { from_brain(vld1q_u16(from)) }
    }
    #[inline(always)]
    unsafe fn load_first_f16(from: *const u16, n: usize) -> Self {
        // SAFETY: see above.
        unsafe { from_halves(first_eight(from, n)) }
    }
    #[inline(always)]
    unsafe fn load_first_bf16(from: *const u16, n: usize) -> Self {
        // SAFETY: see above.
        unsafe { from_brain(first_eight(from, n)) }
    }
    #[inline(always)]
    unsafe fn deposit(mut bits: u64, mut mask: u64) -> u64 {
        let mut out = 0;
        while mask != 0 {
            let lowest = mask & mask.wrapping_neg();
            out |= lowest * (bits & 1);
            bits >>= 1;
            mask ^= lowest;
        }
        out
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch never faults, and nothing is written.
        unsafe {
            core::arch::asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(vfmaq_f32(c.0, self.0, b.0), vfmaq_f32(c.1, self.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(vaddq_f32(self.0, b.0), vaddq_f32(self.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(vsubq_f32(self.0, b.0), vsubq_f32(self.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(vmulq_f32(self.0, b.0), vmulq_f32(self.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(vdivq_f32(self.0, b.0), vdivq_f32(self.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        // As the x86 instruction: the second operand where the first is not greater, NaN included.
        // SAFETY: see above.
        unsafe {
            Self(
                vbslq_f32(vcgtq_f32(self.0, b.0), self.0, b.0),
                vbslq_f32(vcgtq_f32(self.1, b.1), self.1, b.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            Self(
                vbslq_f32(vcltq_f32(self.0, b.0), self.0, b.0),
                vbslq_f32(vcltq_f32(self.1, b.1), self.1, b.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: see above.
        unsafe { Self(vrndnq_f32(self.0), vrndnq_f32(self.1)) }
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        // SAFETY: see above.
        unsafe {
            let one = |x| {
                let n = vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127));
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(n))
            };
            Self(one(self.0), one(self.1))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe { vaddvq_f32(vaddq_f32(self.0, self.1)) }
    }
    #[inline(always)]
    unsafe fn sum4(of: [Self; 4]) -> [f32; 4] {
        // SAFETY: see above.
        unsafe {
            let four = of.map(|v| vaddq_f32(v.0, v.1));
            let sums = vpaddq_f32(vpaddq_f32(four[0], four[1]), vpaddq_f32(four[2], four[3]));
            core::mem::transmute::<float32x4_t, [f32; 4]>(sums)
        }
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        // SAFETY: see above.
        unsafe { vmaxnmvq_f32(vmaxnmq_f32(self.0, self.1)) }
    }
}
