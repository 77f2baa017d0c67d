//! Portable implementation: eight lanes in an array, which compilers vectorise as they can.

use super::Simd;

/// Eight f32; words are kept as their bits.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Scalar8([f32; 8]);

impl Scalar8 {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (x, y) in out.iter_mut().zip(b.0) {
            *x = f(*x, y);
        }
        Self(out)
    }

    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Self(self.0.map(f))
    }
}

impl Simd for Scalar8 {
    const LANES: usize = 8;
    const TILE_ROWS: usize = 4;
    type Places = usize;

    #[inline(always)]
    unsafe fn places(groups: usize) -> usize {
        groups
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; 8])
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for LANES readable elements.
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        let mut out = [0.0; 8];
        for (i, x) in out.iter_mut().enumerate().take(n) {
            // SAFETY: the caller vouches for n readable elements.
            *x = unsafe { *from.add(i) };
        }
        Self(out)
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for LANES readable elements.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        Self(bits.map(|b| half::f16::from_bits(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: the caller vouches for LANES readable elements.
        let bytes = unsafe { from.cast::<[u8; 8]>().read_unaligned() };
        Self(bytes.map(f32::from))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for LANES writable elements.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) };
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        for (i, x) in self.0.iter().enumerate().take(n) {
            // SAFETY: the caller vouches for n writable elements.
            unsafe { *to.add(i) = *x };
        }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> Self {
        // SAFETY: the caller vouches for LANES readable words.
        let words = unsafe { from.cast::<[u32; 8]>().read_unaligned() };
        Self(words.map(f32::from_bits))
    }
    #[inline(always)]
    unsafe fn nibble<const INDEX: u32>(words: Self) -> Self {
        words.map(|w| ((w.to_bits() >> (4 * INDEX)) & 15) as f32)
    }
    #[inline(always)]
    unsafe fn float_nibble<const INDEX: u32>(words: Self) -> Self {
        words.map(|w| f32::from(super::E2M1[(w.to_bits() >> (4 * INDEX)) as usize & 15]))
    }
    #[inline(always)]
    unsafe fn spread(of: *const f32, groups: usize) -> Self {
        let mut out = [0.0; 8];
        for (i, x) in out.iter_mut().enumerate() {
            // SAFETY: the caller vouches for four readable elements.
            *x = unsafe { *of.add((i * groups / 8) & 3) };
        }
        Self(out)
    }
    #[inline(always)]
    unsafe fn spread_f16(four: u64, groups: usize) -> Self {
        let four: [f32; 4] =
            core::array::from_fn(|i| half::f16::from_bits((four >> (16 * i)) as u16).to_f32());
        // SAFETY: four elements are there.
        unsafe { Self::spread(four.as_ptr(), groups) }
    }
    #[inline(always)]
    unsafe fn spread_bf16(four: u64, groups: usize) -> Self {
        let four: [f32; 4] =
            core::array::from_fn(|i| f32::from_bits(((four >> (16 * i)) as u32) << 16));
        // SAFETY: four elements are there.
        unsafe { Self::spread(four.as_ptr(), groups) }
    }
    #[inline(always)]
    unsafe fn load_first_f16(from: *const u16, n: usize) -> Self {
        let mut bits = [0u16; 8];
        for (i, b) in bits.iter_mut().enumerate().take(n) {
            // SAFETY: the caller vouches for n readable elements.
            *b = unsafe { *from.add(i) };
        }
        // SAFETY: eight elements are there.
        unsafe { Self::load_f16(bits.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_first_bf16(from: *const u16, n: usize) -> Self {
        let mut bits = [0u16; 8];
        for (i, b) in bits.iter_mut().enumerate().take(n) {
            // SAFETY: the caller vouches for n readable elements.
            *b = unsafe { *from.add(i) };
        }
        // SAFETY: eight elements are there.
        unsafe { Self::load_bf16(bits.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for LANES readable elements.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        Self(bits.map(|b| f32::from_bits(u32::from(b) << 16)))
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
    unsafe fn prefetch(_at: *const u8) {}
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // Two roundings: a fused multiply-add without hardware is a slow library call.
        self.zip(b, |x, y| x * y).zip(c, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, |x, y| x - y)
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, |x, y| x * y)
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        self.zip(b, |x, y| x / y)
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        self.zip(b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        self.zip(b, |x, y| if x < y { x } else { y })
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        self.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        self.map(|x| f32::from_bits(((x as i32 + 127) << 23) as u32))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
    #[inline(always)]
    unsafe fn sum4(of: [Self; 4]) -> [f32; 4] {
        // SAFETY: nothing is required here.
        of.map(|v| unsafe { v.sum() })
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        self.0
            .into_iter()
            .fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }
}
