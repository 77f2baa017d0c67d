//! Integer dot products of unsigned weight codes with signed 8-bit activations, four neighbours to
//! a 32-bit lane, beside the f32 vectors of [`Simd`].
//!
//! AVX-512 VNNI and AVX-VNNI have one instruction for it; AVX2 multiplies pairs into 16 bits
//! first, which cannot overflow while codes stay below 128 (2 * 127 * 127 < 2^15). Codes of 8 bits
//! are split into nibbles there.

use super::Simd;

/// Vectors of `4 * LANES` bytes.
///
/// # Safety
/// As for [`Simd`]: the CPU has the instruction set, pointers the stated number of elements.
#[allow(
    clippy::missing_safety_doc,
    reason = "the trait's own contract covers every method"
)]
pub trait Bytes: Copy + 'static {
    /// The f32 vectors that go with it.
    type F: Simd;
    /// `4 * LANES` bytes.
    type V: Copy;
    /// `LANES` i32.
    type I: Copy;

    /// Loads `4 * LANES` bytes.
    unsafe fn load(from: *const u8) -> Self::V;
    /// Loads the first `n` bytes, a multiple of four; the rest is 0.
    unsafe fn load_first(from: *const u8, n: usize) -> Self::V;
    /// The four bytes at `from` in every lane.
    unsafe fn broadcast(from: *const i8) -> Self::V;
    /// Low nibbles.
    unsafe fn low(v: Self::V) -> Self::V;
    /// High nibbles.
    unsafe fn high(v: Self::V) -> Self::V;
    /// All lanes 0.
    unsafe fn zero() -> Self::I;
    /// Adds the products of codes below 128 with signed bytes.
    unsafe fn dot_small(acc: Self::I, codes: Self::V, x: Self::V) -> Self::I;
    /// The same for any codes; `small` says that they are below 128.
    unsafe fn dot(acc: Self::I, codes: Self::V, x: Self::V, small: bool) -> Self::I;
    /// Converts.
    unsafe fn to_f32(i: Self::I) -> Self::F;
}

/// Portable: 32 bytes in an array.
#[derive(Clone, Copy)]
pub struct PortableBytes;

impl Bytes for PortableBytes {
    type F = super::scalar::Scalar8;
    type V = [u8; 32];
    type I = [i32; 8];

    #[inline(always)]
    unsafe fn load(from: *const u8) -> [u8; 32] {
        // SAFETY: the caller vouches for 32 readable bytes.
        unsafe { from.cast::<[u8; 32]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const u8, n: usize) -> [u8; 32] {
        let mut out = [0; 32];
        for (i, x) in out.iter_mut().enumerate().take(n) {
            // SAFETY: the caller vouches for n readable bytes.
            *x = unsafe { *from.add(i) };
        }
        out
    }
    #[inline(always)]
    unsafe fn broadcast(from: *const i8) -> [u8; 32] {
        // SAFETY: the caller vouches for 4 readable bytes.
        let four = unsafe { from.cast::<[u8; 4]>().read_unaligned() };
        core::array::from_fn(|i| four[i % 4])
    }
    #[inline(always)]
    unsafe fn low(v: [u8; 32]) -> [u8; 32] {
        v.map(|b| b & 15)
    }
    #[inline(always)]
    unsafe fn high(v: [u8; 32]) -> [u8; 32] {
        v.map(|b| b >> 4)
    }
    #[inline(always)]
    unsafe fn zero() -> [i32; 8] {
        [0; 8]
    }
    #[inline(always)]
    unsafe fn dot_small(acc: [i32; 8], codes: [u8; 32], x: [u8; 32]) -> [i32; 8] {
        let mut out = acc;
        for (i, (c, x)) in codes.iter().zip(x).enumerate() {
            out[i / 4] += i32::from(*c) * i32::from(x as i8);
        }
        out
    }
    #[inline(always)]
    unsafe fn dot(acc: [i32; 8], codes: [u8; 32], x: [u8; 32], _small: bool) -> [i32; 8] {
        // SAFETY: nothing is required here.
        unsafe { Self::dot_small(acc, codes, x) }
    }
    #[inline(always)]
    unsafe fn to_f32(i: [i32; 8]) -> Self::F {
        // SAFETY: eight elements are there.
        unsafe { Self::F::load(i.map(|x| x as f32).as_ptr()) }
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2Bytes, Avx512VnniBytes};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::*;

    use super::Bytes;
    use crate::simd::{avx2::Avx2, avx512::Avx512};

    /// AVX2: 32 bytes.
    #[derive(Clone, Copy)]
    pub struct Avx2Bytes;

    // SAFETY of every block below: the trait's contract gives the instruction set, and vouches for
    // the elements behind pointers.
    impl Bytes for Avx2Bytes {
        type F = Avx2;
        type V = __m256i;
        type I = __m256i;

        #[inline(always)]
        unsafe fn load(from: *const u8) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_loadu_si256(from.cast()) }
        }
        #[inline(always)]
        unsafe fn load_first(from: *const u8, n: usize) -> __m256i {
            // SAFETY: see above; masked words are not touched.
            unsafe {
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32((n / 4) as i32), lanes);
                _mm256_maskload_epi32(from.cast(), mask)
            }
        }
        #[inline(always)]
        unsafe fn broadcast(from: *const i8) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_set1_epi32(from.cast::<i32>().read_unaligned()) }
        }
        #[inline(always)]
        unsafe fn low(v: __m256i) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_and_si256(v, _mm256_set1_epi8(15)) }
        }
        #[inline(always)]
        unsafe fn high(v: __m256i) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_and_si256(_mm256_srli_epi16::<4>(v), _mm256_set1_epi8(15)) }
        }
        #[inline(always)]
        unsafe fn zero() -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_setzero_si256() }
        }
        #[inline(always)]
        unsafe fn dot_small(acc: __m256i, codes: __m256i, x: __m256i) -> __m256i {
            // SAFETY: see above.
            unsafe {
                let pairs = _mm256_maddubs_epi16(codes, x);
                _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        }
        #[inline(always)]
        unsafe fn dot(acc: __m256i, codes: __m256i, x: __m256i, small: bool) -> __m256i {
            // SAFETY: see above.
            unsafe {
                if small {
                    return Self::dot_small(acc, codes, x);
                }
                let ones = _mm256_set1_epi16(1);
                let low = _mm256_maddubs_epi16(Self::low(codes), x);
                let high = _mm256_maddubs_epi16(Self::high(codes), x);
                let high = _mm256_slli_epi32::<4>(_mm256_madd_epi16(high, ones));
                _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(low, ones), high))
            }
        }
        #[inline(always)]
        unsafe fn to_f32(i: __m256i) -> Avx2 {
            // SAFETY: see above.
            unsafe { Avx2::from_raw(_mm256_cvtepi32_ps(i)) }
        }
    }

    /// AVX-512 with VNNI: 64 bytes.
    #[derive(Clone, Copy)]
    pub struct Avx512VnniBytes;

    // SAFETY of every block below: as above.
    impl Bytes for Avx512VnniBytes {
        type F = Avx512;
        type V = __m512i;
        type I = __m512i;

        #[inline(always)]
        unsafe fn load(from: *const u8) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_loadu_si512(from.cast()) }
        }
        #[inline(always)]
        unsafe fn load_first(from: *const u8, n: usize) -> __m512i {
            // SAFETY: see above; masked words are not touched.
            unsafe {
                let mask = if n >= 64 {
                    0xffff
                } else {
                    (1u16 << (n / 4)) - 1
                };
                _mm512_maskz_loadu_epi32(mask, from.cast())
            }
        }
        #[inline(always)]
        unsafe fn broadcast(from: *const i8) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_set1_epi32(from.cast::<i32>().read_unaligned()) }
        }
        #[inline(always)]
        unsafe fn low(v: __m512i) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_and_si512(v, _mm512_set1_epi8(15)) }
        }
        #[inline(always)]
        unsafe fn high(v: __m512i) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(v), _mm512_set1_epi8(15)) }
        }
        #[inline(always)]
        unsafe fn zero() -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_setzero_si512() }
        }
        #[inline(always)]
        unsafe fn dot_small(acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_dpbusd_epi32(acc, codes, x) }
        }
        #[inline(always)]
        unsafe fn dot(acc: __m512i, codes: __m512i, x: __m512i, _small: bool) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_dpbusd_epi32(acc, codes, x) }
        }
        #[inline(always)]
        unsafe fn to_f32(i: __m512i) -> Avx512 {
            // SAFETY: see above.
            unsafe { Avx512::from_raw(_mm512_cvtepi32_ps(i)) }
        }
    }
}
