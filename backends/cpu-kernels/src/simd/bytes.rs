//! Integer dot products of unsigned weight codes with signed activations of 8 or 16 bits, neighbours
//! to a 32-bit lane, beside the f32 vectors of [`Simd`].
//!
//! Activations of 8 bits: AVX-512 VNNI has one instruction for four products; AVX2 multiplies pairs
//! into 16 bits first, which cannot overflow while codes stay below 128 (2 * 127 * 127 < 2^15).
//! Codes of 8 bits are split into nibbles there.
//!
//! Activations of 16 bits: codes are spread to 16 bits, and one instruction (two with AVX2) makes two
//! products. A product is below 255 * 2^15 < 2^23, so a lane may add 256 of them.

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
    /// Vectors that a tile of eight rows has registers for.
    const TILE_VECTORS: usize = 1;

    /// Loads `4 * LANES` bytes.
    unsafe fn load(from: *const u8) -> Self::V;
    /// Stores them.
    unsafe fn store(v: Self::V, to: *mut u8);
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
    /// The number at `from` in every lane.
    unsafe fn broadcast_sum(from: *const i32) -> Self::I;
    /// Adds the products of codes below 128 with signed bytes.
    unsafe fn dot_small(acc: Self::I, codes: Self::V, x: Self::V) -> Self::I;
    /// The same for any codes; `small` says that they are below 128.
    unsafe fn dot(acc: Self::I, codes: Self::V, x: Self::V, small: bool) -> Self::I;
    /// Nibble `INDEX` (0 to 3) of every 16-bit word, as a word.
    unsafe fn nibble_words<const INDEX: u32>(v: Self::V) -> Self::V;
    /// The low byte of every 16-bit word, as a word.
    unsafe fn even_words(v: Self::V) -> Self::V;
    /// The high byte of every 16-bit word, as a word.
    unsafe fn odd_words(v: Self::V) -> Self::V;
    /// Adds the products of words, two to a lane. Sums stay below 2^31 by the caller's count.
    unsafe fn dot_words(acc: Self::I, codes: Self::V, x: Self::V) -> Self::I;
    /// Converts.
    unsafe fn to_f32(i: Self::I) -> Self::F;
    /// Transposes words: `to[k * LANES + lane] = from[lane * stride + k]` for k up to 8.
    unsafe fn transpose(from: *const u32, stride: usize, to: *mut u32) {
        // SAFETY: the caller vouches for `LANES` rows of 8 words and `8 * LANES` words behind `to`.
        unsafe {
            for (lane, k) in (0..Self::F::LANES).flat_map(|lane| (0..8).map(move |k| (lane, k))) {
                *to.add(k * Self::F::LANES + lane) = *from.add(lane * stride + k);
            }
        }
    }
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
    unsafe fn store(v: [u8; 32], to: *mut u8) {
        // SAFETY: the caller vouches for 32 writable bytes.
        unsafe { to.cast::<[u8; 32]>().write_unaligned(v) }
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
    unsafe fn broadcast_sum(from: *const i32) -> [i32; 8] {
        // SAFETY: the caller vouches for the number.
        [unsafe { *from }; 8]
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
    unsafe fn nibble_words<const INDEX: u32>(v: [u8; 32]) -> [u8; 32] {
        let byte = INDEX as usize / 2;
        core::array::from_fn(|i| match i % 2 {
            0 => (v[i + byte] >> (4 * (INDEX % 2))) & 15,
            _ => 0,
        })
    }
    #[inline(always)]
    unsafe fn even_words(v: [u8; 32]) -> [u8; 32] {
        core::array::from_fn(|i| if i % 2 == 0 { v[i] } else { 0 })
    }
    #[inline(always)]
    unsafe fn odd_words(v: [u8; 32]) -> [u8; 32] {
        core::array::from_fn(|i| if i % 2 == 0 { v[i + 1] } else { 0 })
    }
    #[inline(always)]
    unsafe fn dot_words(acc: [i32; 8], codes: [u8; 32], x: [u8; 32]) -> [i32; 8] {
        let word = |of: &[u8; 32], i: usize| i32::from(i16::from_le_bytes([of[i], of[i + 1]]));
        core::array::from_fn(|lane| {
            let (a, b) = (4 * lane, 4 * lane + 2);
            acc[lane] + word(&codes, a) * word(&x, a) + word(&codes, b) * word(&x, b)
        })
    }
    #[inline(always)]
    unsafe fn to_f32(i: [i32; 8]) -> Self::F {
        // SAFETY: eight elements are there.
        unsafe { Self::F::load(i.map(|x| x as f32).as_ptr()) }
    }
}

/// Plain NEON.
#[cfg(target_arch = "aarch64")]
pub type NeonBytes = super::bytes_neon::NeonBytes<super::bytes_neon::Widening>;
/// NEON with the `dotprod` extension.
#[cfg(target_arch = "aarch64")]
pub type NeonDotBytes = super::bytes_neon::NeonBytes<super::bytes_neon::DotProduct>;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::transpose_eight;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2Bytes, Avx512VnniBytes};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::*;

    use super::Bytes;
    use crate::simd::{avx2::Avx2, avx512::Avx512};

    /// Eight rows of eight words, `stride` and `to_stride` apart.
    #[inline(always)]
    pub(in crate::simd) unsafe fn transpose_eight(
        from: *const u32,
        stride: usize,
        to: *mut u32,
        to_stride: usize,
    ) {
        // SAFETY: only called with AVX2; the caller vouches for both blocks.
        unsafe {
            let row = |i: usize| _mm256_loadu_si256(from.add(i * stride).cast());
            let pairs = |a, b| (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let (a0, a1) = pairs(row(0), row(1));
            let (b0, b1) = pairs(row(2), row(3));
            let (c0, c1) = pairs(row(4), row(5));
            let (d0, d1) = pairs(row(6), row(7));
            let fours = |a, b| (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            let ((e0, e1), (e2, e3)) = (fours(a0, b0), fours(a1, b1));
            let ((f0, f1), (f2, f3)) = (fours(c0, d0), fours(c1, d1));
            for (k, (e, f)) in [(e0, f0), (e1, f1), (e2, f2), (e3, f3)]
                .into_iter()
                .enumerate()
            {
                let (low, high) = (to.add(k * to_stride), to.add((k + 4) * to_stride));
                _mm256_storeu_si256(low.cast(), _mm256_permute2x128_si256::<0x20>(e, f));
                _mm256_storeu_si256(high.cast(), _mm256_permute2x128_si256::<0x31>(e, f));
            }
        }
    }

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
        unsafe fn store(v: __m256i, to: *mut u8) {
            // SAFETY: see above.
            unsafe { _mm256_storeu_si256(to.cast(), v) }
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
        unsafe fn broadcast_sum(from: *const i32) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_set1_epi32(*from) }
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
        unsafe fn nibble_words<const INDEX: u32>(v: __m256i) -> __m256i {
            // SAFETY: see above.
            unsafe {
                let shifted = _mm256_srl_epi16(v, _mm_cvtsi32_si128(4 * INDEX as i32));
                if INDEX == 3 {
                    return shifted;
                }
                _mm256_and_si256(shifted, _mm256_set1_epi16(15))
            }
        }
        #[inline(always)]
        unsafe fn even_words(v: __m256i) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_and_si256(v, _mm256_set1_epi16(255)) }
        }
        #[inline(always)]
        unsafe fn odd_words(v: __m256i) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_srli_epi16::<8>(v) }
        }
        #[inline(always)]
        unsafe fn dot_words(acc: __m256i, codes: __m256i, x: __m256i) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_add_epi32(acc, _mm256_madd_epi16(codes, x)) }
        }
        #[inline(always)]
        unsafe fn transpose(from: *const u32, stride: usize, to: *mut u32) {
            // SAFETY: see above.
            unsafe { transpose_eight(from, stride, to, 8) }
        }
        #[inline(always)]
        unsafe fn to_f32(i: __m256i) -> Avx2 {
            // SAFETY: see above.
            unsafe { Avx2::from_raw(_mm256_cvtepi32_ps(i)) }
        }
    }

    // The compiler splits the intrinsics into product and sum, which shortens a chain of them; here the processor has other
    // chains to work on, and two instructions take twice the time.

    /// `vpdpwssd`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn dpwssd(mut acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        // SAFETY: registers only, and the caller vouches for the instruction, here and below.
        unsafe {
            core::arch::asm!(
                "vpdpwssd {acc}, {codes}, {x}",
                acc = inout(zmm_reg) acc, codes = in(zmm_reg) codes, x = in(zmm_reg) x,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        acc
    }

    /// `vpdpbusd`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn dpbusd(mut acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe {
            core::arch::asm!(
                "vpdpbusd {acc}, {codes}, {x}",
                acc = inout(zmm_reg) acc, codes = in(zmm_reg) codes, x = in(zmm_reg) x,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        acc
    }

    /// AVX-512 with VNNI: 64 bytes.
    #[derive(Clone, Copy)]
    pub struct Avx512VnniBytes;

    // SAFETY of every block below: as above.
    impl Bytes for Avx512VnniBytes {
        type F = Avx512;
        type V = __m512i;
        type I = __m512i;
        // A load to all lanes takes as long as a dot: two dots a load.
        const TILE_VECTORS: usize = 2;

        #[inline(always)]
        unsafe fn load(from: *const u8) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_loadu_si512(from.cast()) }
        }
        #[inline(always)]
        unsafe fn store(v: __m512i, to: *mut u8) {
            // SAFETY: see above.
            unsafe { _mm512_storeu_si512(to.cast(), v) }
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
        unsafe fn broadcast_sum(from: *const i32) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_set1_epi32(*from) }
        }
        #[inline(always)]
        unsafe fn dot_small(acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
            // SAFETY: see above.
            unsafe { dpbusd(acc, codes, x) }
        }
        #[inline(always)]
        unsafe fn dot(acc: __m512i, codes: __m512i, x: __m512i, _small: bool) -> __m512i {
            // SAFETY: see above.
            unsafe { dpbusd(acc, codes, x) }
        }
        #[inline(always)]
        unsafe fn nibble_words<const INDEX: u32>(v: __m512i) -> __m512i {
            // SAFETY: see above.
            unsafe {
                let shifted = _mm512_srl_epi16(v, _mm_cvtsi32_si128(4 * INDEX as i32));
                if INDEX == 3 {
                    return shifted;
                }
                _mm512_and_si512(shifted, _mm512_set1_epi16(15))
            }
        }
        #[inline(always)]
        unsafe fn even_words(v: __m512i) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_and_si512(v, _mm512_set1_epi16(255)) }
        }
        #[inline(always)]
        unsafe fn odd_words(v: __m512i) -> __m512i {
            // SAFETY: see above.
            unsafe { _mm512_srli_epi16::<8>(v) }
        }
        #[inline(always)]
        unsafe fn dot_words(acc: __m512i, codes: __m512i, x: __m512i) -> __m512i {
            // SAFETY: see above.
            unsafe { dpwssd(acc, codes, x) }
        }
        #[inline(always)]
        unsafe fn transpose(from: *const u32, stride: usize, to: *mut u32) {
            // SAFETY: see above.
            unsafe {
                transpose_eight(from, stride, to, 16);
                transpose_eight(from.add(8 * stride), stride, to.add(8), 16);
            }
        }
        #[inline(always)]
        unsafe fn to_f32(i: __m512i) -> Avx512 {
            // SAFETY: see above.
            unsafe { Avx512::from_raw(_mm512_cvtepi32_ps(i)) }
        }
    }
}
