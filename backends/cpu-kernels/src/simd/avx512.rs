//! AVX-512 (F, BW, DQ, VL) with F16C: sixteen lanes.

use core::arch::x86_64::*;

use super::Simd;
use super::bytes::transpose_eight;

/// Sixteen f32 in a 512-bit register.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Avx512(__m512);

impl Avx512 {
    /// From the register.
    #[inline(always)]
    pub(crate) fn from_raw(v: __m512) -> Self {
        Self(v)
    }

    /// The lanes that `places` name.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(always)]
    pub(crate) unsafe fn permuted(self, places: __m512i) -> Self {
        // SAFETY: the caller vouches for the set.
        unsafe { Self(_mm512_permutexvar_ps(places, self.0)) }
    }
}

/// Sum of the halves.
#[inline(always)]
unsafe fn halved(v: __m512) -> __m256 {
    // SAFETY: only called with AVX-512 (trait contract).
    unsafe { _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)) }
}

/// Spreads four values over the lanes.
#[inline(always)]
unsafe fn spread_four(four: __m128, places: __m512i) -> Avx512 {
    // SAFETY: only called with AVX-512 (trait contract).
    unsafe { Avx512(_mm512_permutexvar_ps(places, _mm512_castps128_ps512(four))) }
}

#[inline(always)]
fn mask(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1u16 << n) - 1 }
}

// SAFETY of every block below: the trait's contract gives the instruction set, and vouches for the
// elements behind pointers.
impl Simd for Avx512 {
    const LANES: usize = 16;
    const TILE_ROWS: usize = 12;
    type Places = __m512i;

    #[inline(always)]
    unsafe fn places(groups: usize) -> __m512i {
        // SAFETY: see above.
        unsafe {
            match groups {
                4 => _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                2 => _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                _ => _mm512_setzero_si512(),
            }
        }
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        // SAFETY: see above; masked lanes are not touched.
        unsafe { Self(_mm512_maskz_loadu_ps(mask(n), from)) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, to: *mut i8) {
        // SAFETY: see above.
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0))) }
    }
    #[inline(always)]
    unsafe fn store_words(self, to: *mut i16) {
        // SAFETY: see above.
        unsafe {
            let words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(self.0));
            _mm256_storeu_si256(to.cast(), words);
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            Self(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(
                from.cast(),
            ))))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        // SAFETY: see above; masked lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(to, mask(n), self.0) }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_castsi512_ps(_mm512_loadu_si512(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn nibble<const INDEX: u32>(words: Self) -> Self {
        // A permutation by index looks at the low four bits only, so a table of 0 to 15 turns a
        // nibble into f32 without masking or conversion.
        // SAFETY: see above.
        unsafe {
            let table = _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0,
                15.0,
            );
            let shifted = _mm512_srl_epi32(
                _mm512_castps_si512(words.0),
                _mm_cvtsi32_si128(4 * INDEX as i32),
            );
            Self(_mm512_permutexvar_ps(shifted, table))
        }
    }
    #[inline(always)]
    unsafe fn float_nibble<const INDEX: u32>(words: Self) -> Self {
        // As above.
        // SAFETY: see above.
        unsafe {
            let table = _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0,
                -12.0,
            );
            let shifted = _mm512_srl_epi32(
                _mm512_castps_si512(words.0),
                _mm_cvtsi32_si128(4 * INDEX as i32),
            );
            Self(_mm512_permutexvar_ps(shifted, table))
        }
    }
    #[inline(always)]
    unsafe fn spread(of: *const f32, places: __m512i) -> Self {
        // SAFETY: see above.
        unsafe { spread_four(_mm_loadu_ps(of), places) }
    }
    #[inline(always)]
    unsafe fn spread_f16(four: u64, places: __m512i) -> Self {
        // SAFETY: see above.
        unsafe { spread_four(_mm_cvtph_ps(_mm_cvtsi64_si128(four as i64)), places) }
    }
    #[inline(always)]
    unsafe fn spread_bf16(four: u64, places: __m512i) -> Self {
        // SAFETY: see above.
        unsafe {
            let four = _mm_cvtepu16_epi32(_mm_cvtsi64_si128(four as i64));
            spread_four(_mm_castsi128_ps(_mm_slli_epi32::<16>(four)), places)
        }
    }
    #[inline(always)]
    unsafe fn load_first_f16(from: *const u16, n: usize) -> Self {
        // SAFETY: see above; masked lanes are not touched.
        unsafe {
            Self(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(
                mask(n),
                from.cast(),
            )))
        }
    }
    #[inline(always)]
    unsafe fn load_first_bf16(from: *const u16, n: usize) -> Self {
        // SAFETY: see above; masked lanes are not touched.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask(n), from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: see above.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
        }
    }
    #[inline(always)]
    unsafe fn deposit(bits: u64, mask: u64) -> u64 {
        // SAFETY: see above; BMI2 is part of the set.
        unsafe { _pdep_u64(bits, mask) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_add_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_sub_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_mul_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_div_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_max_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_min_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_roundscale_ps::<0>(self.0)) }
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        // SAFETY: see above.
        unsafe {
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(n)))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn sum4(of: [Self; 4]) -> [f32; 4] {
        // SAFETY: see above.
        unsafe {
            let (a, b) = (halved(of[0].0), halved(of[1].0));
            let (c, d) = (halved(of[2].0), halved(of[3].0));
            let (ab, cd) = (_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let all = _mm256_hadd_ps(ab, cd);
            let sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
            core::mem::transmute::<__m128, [f32; 4]>(sums)
        }
    }
    #[inline(always)]
    unsafe fn turn_eight(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: see above; AVX2 is part of the set.
        unsafe { transpose_eight(from.cast(), stride, to.cast(), to_stride) }
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
}
