//! AVX2 with FMA and F16C: eight lanes.

use core::arch::x86_64::*;

use super::bytes::transpose_eight;
use super::{Simd, up_to_four};

/// Eight f32 in a 256-bit register.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Avx2(__m256);

impl Avx2 {
    /// From the register.
    #[inline(always)]
    pub(crate) fn from_raw(v: __m256) -> Self {
        Self(v)
    }
}

/// Spreads four values over the lanes.
#[inline(always)]
unsafe fn spread_four(four: __m128, places: __m256i) -> Avx2 {
    // SAFETY: only called with AVX2 (trait contract).
    unsafe {
        Avx2(_mm256_permutevar8x32_ps(
            _mm256_castps128_ps256(four),
            places,
        ))
    }
}

/// The first `n` of eight halves, the rest is 0.
#[inline(always)]
unsafe fn first_eight(from: *const u16, n: usize) -> __m128i {
    // SAFETY: only called with AVX2; the caller vouches for n elements.
    unsafe {
        let low = up_to_four(from, n);
        let high = up_to_four(from.wrapping_add(4), n.saturating_sub(4));
        _mm_set_epi64x(high as i64, low as i64)
    }
}

/// Lanes below n are all ones.
#[inline(always)]
unsafe fn mask(n: usize) -> __m256i {
    // SAFETY: only called with AVX2 (trait contract).
    unsafe {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lanes)
    }
}

// SAFETY of every block below: the trait's contract gives AVX2, FMA and F16C, and vouches for the
// elements behind pointers.
impl Simd for Avx2 {
    const LANES: usize = 8;
    const TILE_ROWS: usize = 6;
    type Places = __m256i;

    #[inline(always)]
    unsafe fn places(groups: usize) -> __m256i {
        // SAFETY: see above.
        unsafe {
            match groups {
                4 => _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3),
                2 => _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1),
                _ => _mm256_setzero_si256(),
            }
        }
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_setzero_ps()) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        // SAFETY: see above; masked lanes are not touched.
        unsafe { Self(_mm256_maskload_ps(from, mask(n))) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            Self(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(
                from.cast(),
            ))))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        // SAFETY: see above; masked lanes are not touched.
        unsafe { _mm256_maskstore_ps(to, mask(n), self.0) }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_castsi256_ps(_mm256_loadu_si256(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn nibble<const INDEX: u32>(words: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let shifted = _mm256_srl_epi32(
                _mm256_castps_si256(words.0),
                _mm_cvtsi32_si128(4 * INDEX as i32),
            );
            Self(_mm256_cvtepi32_ps(_mm256_and_si256(
                shifted,
                _mm256_set1_epi32(15),
            )))
        }
    }
    #[inline(always)]
    unsafe fn float_nibble<const INDEX: u32>(words: Self) -> Self {
        // A permutation by index looks at the low three bits, and the fourth is the sign.
        // SAFETY: see above.
        unsafe {
            let sizes = _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0);
            let shifted = _mm256_srl_epi32(
                _mm256_castps_si256(words.0),
                _mm_cvtsi32_si128(4 * INDEX as i32),
            );
            let sign = _mm256_and_si256(
                _mm256_slli_epi32::<28>(shifted),
                _mm256_set1_epi32(i32::MIN),
            );
            let size = _mm256_permutevar8x32_ps(sizes, shifted);
            Self(_mm256_or_ps(size, _mm256_castsi256_ps(sign)))
        }
    }
    #[inline(always)]
    unsafe fn spread(of: *const f32, places: __m256i) -> Self {
        // SAFETY: see above.
        unsafe { spread_four(_mm_loadu_ps(of), places) }
    }
    #[inline(always)]
    unsafe fn spread_f16(four: u64, places: __m256i) -> Self {
        // SAFETY: see above.
        unsafe { spread_four(_mm_cvtph_ps(_mm_cvtsi64_si128(four as i64)), places) }
    }
    #[inline(always)]
    unsafe fn spread_bf16(four: u64, places: __m256i) -> Self {
        // SAFETY: see above.
        unsafe {
            let four = _mm_cvtepu16_epi32(_mm_cvtsi64_si128(four as i64));
            spread_four(_mm_castsi128_ps(_mm_slli_epi32::<16>(four)), places)
        }
    }
    #[inline(always)]
    unsafe fn load_first_f16(from: *const u16, n: usize) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_cvtph_ps(first_eight(from, n))) }
    }
    #[inline(always)]
    unsafe fn load_first_bf16(from: *const u16, n: usize) -> Self {
        // SAFETY: see above.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(first_eight(from, n));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: see above.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)))
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
        unsafe { Self(_mm256_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_add_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_sub_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_mul_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_div_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_max_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_min_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: see above.
        unsafe {
            Self(_mm256_round_ps::<
                { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
            >(self.0))
        }
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        // SAFETY: see above.
        unsafe {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(n)))
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let four = _mm_add_ps(
                _mm256_castps256_ps128(self.0),
                _mm256_extractf128_ps::<1>(self.0),
            );
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    unsafe fn sum4(of: [Self; 4]) -> [f32; 4] {
        // SAFETY: see above.
        unsafe {
            let ab = _mm256_hadd_ps(of[0].0, of[1].0);
            let cd = _mm256_hadd_ps(of[2].0, of[3].0);
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
        unsafe {
            let four = _mm_max_ps(
                _mm256_castps256_ps128(self.0),
                _mm256_extractf128_ps::<1>(self.0),
            );
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}
