//! Vectors of f32: the few operations that the kernels are written in.
//!
//! Methods are `#[inline(always)]`, and kernels generic over [`Simd`] are instantiated inside
//! functions that enable the instruction set (`isa.rs`), so that everything is inlined there.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod bytes;
#[cfg(target_arch = "aarch64")]
mod bytes_neon;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod scalar;

/// Twice the numbers of e2m1: a sign, two bits of an exponent of bias 1, one of a mantissa.
pub(crate) const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A vector of `LANES` f32.
///
/// # Safety
/// Every method requires that the CPU has the implementation's instruction set, and pointer
/// methods that the stated number of elements is readable or writable.
#[allow(
    clippy::missing_safety_doc,
    reason = "the trait's own contract covers every method"
)]
pub trait Simd: Copy + 'static {
    /// Lanes of a vector, a power of two from 4 to 16.
    const LANES: usize;
    /// Where each lane of [`Simd::spread`] comes from.
    type Places: Copy;
    /// Rows of the product's register tile.
    const TILE_ROWS: usize;

    /// All lanes 0.
    unsafe fn zero() -> Self;
    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self;
    /// Loads `LANES` elements.
    unsafe fn load(from: *const f32) -> Self;
    /// Loads the first `n` elements, the rest is 0.
    unsafe fn load_first(from: *const f32, n: usize) -> Self;
    /// Loads `LANES` f16.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Loads `LANES` unsigned bytes.
    unsafe fn load_u8(from: *const u8) -> Self;
    /// Stores `LANES` elements.
    unsafe fn store(self, to: *mut f32);
    /// Stores the first `n` elements.
    unsafe fn store_first(self, to: *mut f32, n: usize);
    /// Stores whole numbers that fit as bytes.
    #[inline(always)]
    unsafe fn store_bytes(self, to: *mut i8) {
        // SAFETY: the caller upholds the trait's contract, and vouches for the numbers.
        unsafe {
            let mut all = [0.0f32; 16];
            self.store(all.as_mut_ptr());
            for (i, x) in all.iter().enumerate().take(Self::LANES) {
                *to.add(i) = x.to_int_unchecked::<i32>() as i8;
            }
        }
    }
    /// The same as words of 16 bits.
    #[inline(always)]
    unsafe fn store_words(self, to: *mut i16) {
        // SAFETY: as above.
        unsafe {
            let mut all = [0.0f32; 16];
            self.store(all.as_mut_ptr());
            for (i, x) in all.iter().enumerate().take(Self::LANES) {
                *to.add(i) = x.to_int_unchecked::<i32>() as i16;
            }
        }
    }
    /// The `LANES` packed words at `from`, opaque, for [`Simd::nibble`].
    unsafe fn load_words(from: *const u32) -> Self;
    /// Nibble `INDEX` (0 to 7) of every word, as f32.
    unsafe fn nibble<const INDEX: u32>(words: Self) -> Self;
    /// The same as a number of e2m1, twice: `E2M1`.
    unsafe fn float_nibble<const INDEX: u32>(words: Self) -> Self;
    /// Lane i from element `i * groups / LANES`, for 1, 2 or 4 groups.
    unsafe fn places(groups: usize) -> Self::Places;
    /// Four elements spread over the lanes.
    unsafe fn spread(of: *const f32, places: Self::Places) -> Self;
    /// The same from four f16 packed into a word.
    unsafe fn spread_f16(four: u64, places: Self::Places) -> Self;
    /// The same from four bf16.
    unsafe fn spread_bf16(four: u64, places: Self::Places) -> Self;
    /// Loads `LANES` bf16.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Loads the first `n` f16, the rest is 0.
    unsafe fn load_first_f16(from: *const u16, n: usize) -> Self;
    /// Loads the first `n` bf16, the rest is 0.
    unsafe fn load_first_bf16(from: *const u16, n: usize) -> Self;
    /// Puts successive bits into the bits that `mask` has set.
    unsafe fn deposit(bits: u64, mask: u64) -> u64;
    /// Asks for the cache line at `at`, which need not be readable.
    unsafe fn prefetch(at: *const u8);
    /// `self * b + c`.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// Sum.
    unsafe fn add(self, b: Self) -> Self;
    /// Difference.
    unsafe fn sub(self, b: Self) -> Self;
    /// Product.
    unsafe fn mul(self, b: Self) -> Self;
    /// Quotient.
    unsafe fn div(self, b: Self) -> Self;
    /// Larger of two; the second when the first is NaN.
    unsafe fn max(self, b: Self) -> Self;
    /// Smaller of two; the second when the first is NaN.
    unsafe fn min(self, b: Self) -> Self;
    /// Nearest integer, ties to even.
    unsafe fn round(self) -> Self;
    /// `2^n` for lanes that hold integers from -126 to 127.
    unsafe fn exp2_int(self) -> Self;
    /// Sum of the lanes.
    unsafe fn sum(self) -> f32;
    /// Sums of four vectors.
    unsafe fn sum4(of: [Self; 4]) -> [f32; 4];
    /// Largest lane.
    unsafe fn max_lane(self) -> f32;
    /// Transposes eight rows of eight: `to[k * to_stride + r] = from[r * stride + k]`.
    #[inline(always)]
    unsafe fn turn_eight(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller vouches for both blocks.
        unsafe {
            for (k, r) in (0..8).flat_map(|k| (0..8).map(move |r| (k, r))) {
                *to.add(k * to_stride + r) = *from.add(r * stride + k);
            }
        }
    }

    /// `e^x`, relative error below 2e-7 in the normal range; 0 below about -87, infinity above about 88.
    ///
    /// Cody and Waite reduction by ln 2 in two parts, degree-6 polynomial (Cephes expf).
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // SAFETY: the caller upholds the trait's contract.
        unsafe {
            let x = self.min(Self::splat(88.722_83)).max(Self::splat(-87.3));
            let n = x.mul(Self::splat(core::f32::consts::LOG2_E)).round();
            let n = n.min(Self::splat(127.0));
            let r = n.mul_add(Self::splat(-0.693_359_4), x);
            let r = n.mul_add(Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.987_569_1e-4);
            for c in [
                1.398_199_9e-3,
                8.333_452e-3,
                4.166_579_6e-2,
                1.666_666_5e-1,
                0.5,
            ] {
                p = p.mul_add(r, Self::splat(c));
            }
            let p = p.mul_add(r.mul(r), r.add(Self::splat(1.0)));
            p.mul(n.exp2_int())
        }
    }
}

/// Up to four halves at `from` in a word, without reading behind them.
#[inline(always)]
pub(crate) unsafe fn up_to_four(from: *const u16, n: usize) -> u64 {
    // SAFETY: the caller vouches for n elements.
    unsafe {
        match n {
            0 => 0,
            1 => u64::from(*from),
            2 => u64::from(from.cast::<u32>().read_unaligned()),
            3 => u64::from(from.cast::<u32>().read_unaligned()) | u64::from(*from.add(2)) << 32,
            _ => from.cast::<u64>().read_unaligned(),
        }
    }
}
