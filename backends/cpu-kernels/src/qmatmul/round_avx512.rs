//! AVX-512: activations of 8 bits for panels alone, which is what prompts need: as `round` does it, with the sums of
//! integers in place of those of the same numbers as floats, and one look at the bits of the largest for what is no number.

use core::arch::x86_64::*;

use super::round::{Code, GROUPS, Job, QUANT_GROUP};

/// The exponent of infinity and of what is no number.
const INFINITY_BITS: i32 = 0x7f80_0000;

/// Rounds the rows of a job; false, and nothing is done, where it needs more than panels of groups of 32 or more.
///
/// # Safety
/// Every layout that is needed has the job's rows, and nobody else has them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn round_panels(job: &Job<'_, i8>) -> bool {
    let needs = job.needs;
    let mut groups = (0..GROUPS.len()).filter(|i| needs.sums[*i]);
    let (Some(index), None) = (groups.next(), groups.next()) else {
        return false;
    };
    let group = GROUPS[index];
    let columns = job.sizes.columns;
    let is_panel_alone = needs.panel && !needs.four && !needs.bytes;
    if !is_panel_alone || group < QUANT_GROUP || !columns.is_multiple_of(group) {
        return false;
    }
    let (n_scales, n_sums) = (columns / QUANT_GROUP, columns / group);
    let a_sum = group / QUANT_GROUP;
    for row in job.first..job.last {
        for g in 0..n_scales {
            // SAFETY: row and group are inside every layout that is needed.
            unsafe {
                let x = job.x.as_ptr().add(row * columns + g * QUANT_GROUP);
                let (low, high) = (_mm512_loadu_ps(x), _mm512_loadu_ps(x.add(16)));
                let to = job.panel.add(row * columns + g * QUANT_GROUP);
                let (scale, sum) = round_run(low, high, to);
                *job.scales_panel.add(row * n_scales + g) = scale;
                *job.starts.add(row * n_scales + g) = -needs.middle * sum;
                let out = job.sums[index].add(row * n_sums + g / a_sum);
                let sum = sum as f32 * scale;
                *out = if g.is_multiple_of(a_sum) {
                    sum
                } else {
                    *out + sum
                };
            }
        }
    }
    true
}

/// Rounds 32 elements; gives their scale and the sum of their codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn round_run(low: __m512, high: __m512, to: *mut i8) -> (f32, i32) {
    // The order of positive floats is that of their bits, with what is no number on top: the maximum of floats would lose it.
    let bits = _mm512_max_epi32(
        _mm512_castps_si512(_mm512_abs_ps(low)),
        _mm512_castps_si512(_mm512_abs_ps(high)),
    );
    let bits = _mm512_reduce_max_epi32(bits);
    let largest = f32::from_bits(bits as u32);
    if bits >= INFINITY_BITS || bits == 0 {
        // SAFETY: the caller vouches for 32 codes.
        unsafe { to.write_bytes(0, QUANT_GROUP) };
        return (if bits == 0 { 0.0 } else { f32::NAN }, 0);
    }
    // A subnormal group would overflow the quotient; its products are below any use.
    let inverse = _mm512_set1_ps((i8::LIMIT / largest).min(f32::MAX));
    // To the nearest, ties to even.
    let low = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    let high = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    // SAFETY: as above.
    unsafe {
        _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(low));
        _mm_storeu_si128(to.add(16).cast(), _mm512_cvtepi32_epi8(high));
    }
    let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
    (largest / i8::LIMIT, sum)
}

#[cfg(test)]
mod tests {
    use super::super::prepare::{Precision, Prepared};
    use super::super::round::Needs;
    use crate::Isa;
    use crate::pool::Pool;
    use crate::quantized::testing::Numbers;

    /// Panels alone, and panels beside what few rows need.
    #[test]
    fn rounding_for_panels_alone_gives_the_same_bits() {
        let mut numbers = Numbers(61);
        let mut pool = Pool::new(2).unwrap();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (columns, group) in [(32, 32), (192, 64), (896, 32), (640, 128)] {
                let mut x = numbers.floats(37 * columns);
                for (i, x) in x.iter_mut().enumerate() {
                    *x *= 10f32.powi(i as i32 / 32 % 77 - 42);
                }
                x[..32].fill(0.0);
                (x[40], x[3 * columns], x[5 * columns + 9]) =
                    (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
                let [alone, beside] = [false, true].map(|beside| {
                    let mut needs = Needs {
                        panel: true,
                        middle: 16,
                        four: beside,
                        ..Needs::default()
                    };
                    needs.add_sums(group);
                    let mut prepared = Prepared::default();
                    assert!(prepared.fill(isa, Precision::Int8, &mut pool, &x, columns, needs));
                    let bits = |of: &[f32]| of.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    let sums = (0..37).flat_map(|m| bits(prepared.sums(group, m)));
                    (
                        prepared.int8.panel.to_vec(),
                        prepared.factors.starts.to_vec(),
                        bits(&prepared.factors.panel),
                        sums.collect::<Vec<_>>(),
                    )
                });
                assert_eq!(alone, beside, "{} {columns}/{group}", isa.name());
            }
        }
    }
}
