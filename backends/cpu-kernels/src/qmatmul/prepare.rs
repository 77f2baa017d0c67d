//! Rows of activations in the layouts that the kernels read, made once per product.

use crate::Isa;
use crate::isa::dispatch;
use crate::simd::Simd;

/// How activations meet quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Activations stay f32.
    #[default]
    Exact,
    /// Activations are rounded to 8 bits with one scale per [`QUANT_GROUP`] elements; products are
    /// integers, sums are f32.
    Int8,
}

/// Activations that share a scale in [`Precision::Int8`].
pub const QUANT_GROUP: usize = 32;

/// Group sizes of weights, for each of which the sums of `x` are kept.
const GROUPS: [usize; 3] = [32, 64, 128];

/// Lanes of the f32 vectors of an instruction set.
pub(crate) fn lanes(isa: Isa, precision: Precision) -> usize {
    match (isa, precision) {
        (Isa::Avx512Vnni, _) | (Isa::Avx512, Precision::Exact) => 16,
        _ => 8,
    }
}

/// Which layouts a set of weights needs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Needs {
    /// Nibbles.
    pub(crate) four: bool,
    /// Codes of a byte each.
    pub(crate) bytes: bool,
    /// Sums per group, by index into `GROUPS`.
    pub(crate) sums: [bool; 3],
}

impl Needs {
    pub(crate) fn add(&mut self, bits: usize, group: usize) {
        self.four |= bits == 4;
        self.bytes |= bits != 4;
        for (need, size) in self.sums.iter_mut().zip(GROUPS) {
            *need |= size == group;
        }
    }
}

/// Rows of `x` prepared for the kernels. Kept between calls for its memory.
#[derive(Debug, Default)]
pub struct Prepared {
    pub(crate) m: usize,
    pub(crate) columns: usize,
    /// Exact, nibbles: `[m][block][8][LANES]`, block = 8 * LANES elements.
    pub(crate) x4: Vec<f32>,
    /// Exact, bytes: `[m][columns]`.
    pub(crate) x: Vec<f32>,
    /// Int8, nibbles: `[m][block]` of evens then odds.
    pub(crate) q4: Vec<i8>,
    /// Int8, nibbles: scale of every lane, `[m][block][LANES]`.
    pub(crate) s4: Vec<f32>,
    /// Int8, bytes: `[m][columns]`, padded to whole vectors.
    pub(crate) q: Vec<i8>,
    /// Int8, bytes: scale of every lane, block = 4 * LANES elements.
    pub(crate) s: Vec<f32>,
    /// Columns rounded up to whole blocks of nibbles and of bytes.
    pub(crate) padded4: usize,
    pub(crate) padded: usize,
    /// `[m][columns / group]` for each group size.
    sums: [Vec<f32>; 3],
    codes: Vec<i8>,
    scales: Vec<f32>,
}

impl Prepared {
    /// Sums of row `m` for weights in groups of `group`.
    pub(crate) fn sums(&self, group: usize, m: usize) -> &[f32] {
        let index = GROUPS.iter().position(|size| *size == group).unwrap_or(0);
        let n = self.columns / group;
        &self.sums[index][m * n..(m + 1) * n]
    }

    /// Rounded activations, `[m, columns]`, after [`Prepared::round`].
    pub(crate) fn codes(&self) -> &[i8] {
        &self.codes
    }

    /// Their scales, `[m, columns / QUANT_GROUP]`.
    pub(crate) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Rounds `[m, columns]` and sums groups of `group`, with no other layout.
    pub(crate) fn round(&mut self, isa: Isa, x: &[f32], columns: usize, group: usize) {
        let sums = GROUPS.map(|size| size == group);
        let needs = Needs {
            sums,
            ..Needs::default()
        };
        self.fill(isa, Precision::Int8, x, columns, needs);
    }

    /// Lays out `[m, columns]`.
    pub(crate) fn fill(
        &mut self,
        isa: Isa,
        precision: Precision,
        x: &[f32],
        columns: usize,
        needs: Needs,
    ) {
        let lanes = lanes(isa, precision);
        self.m = x.len() / columns;
        self.columns = columns;
        self.padded4 = columns.next_multiple_of(8 * lanes);
        self.padded = columns;
        match precision {
            Precision::Exact => self.fill_exact(x, lanes, needs),
            Precision::Int8 => {
                self.padded = columns.next_multiple_of(4 * lanes);
                self.fill_int8(isa, x, lanes, needs);
            }
        }
    }

    fn fill_exact(&mut self, x: &[f32], lanes: usize, needs: Needs) {
        for ((sums, group), _) in self
            .sums
            .iter_mut()
            .zip(GROUPS)
            .zip(needs.sums)
            .filter(|(_, n)| *n)
        {
            sums.clear();
            // Rows that are no multiple of a group have no weights of that group.
            sums.extend(x.chunks_exact(group).map(|g| g.iter().sum::<f32>()));
        }
        if needs.bytes {
            self.x.clear();
            self.x.extend_from_slice(x);
        }
        if needs.four {
            let block = 8 * lanes;
            self.x4.clear();
            self.x4.resize(self.m * self.padded4, 0.0);
            let rows = x.chunks_exact(self.columns);
            for (row, out) in rows.zip(self.x4.chunks_exact_mut(self.padded4)) {
                for (x, out) in row.chunks(block).zip(out.chunks_exact_mut(block)) {
                    for (lane, x) in x.chunks_exact(8).enumerate() {
                        for (nibble, x) in x.iter().enumerate() {
                            out[nibble * lanes + lane] = *x;
                        }
                    }
                }
            }
        }
    }

    fn fill_int8(&mut self, isa: Isa, x: &[f32], lanes: usize, needs: Needs) {
        let n_scales = self.columns / QUANT_GROUP;
        self.codes.resize(x.len(), 0);
        self.scales.resize(self.m * n_scales, 0.0);
        // SAFETY: `isa` was detected; the lengths are those of `x`.
        unsafe { run_round(isa, x, &mut self.codes, &mut self.scales) };
        for ((sums, group), _) in self
            .sums
            .iter_mut()
            .zip(GROUPS)
            .zip(needs.sums)
            .filter(|(_, n)| *n)
        {
            // The sums of what is multiplied, not of what was given: otherwise the error of the
            // rounding meets the codes instead of the weights.
            sums.clear();
            let parts = self.codes.chunks_exact(group);
            let scales = self.scales.chunks_exact(group / QUANT_GROUP);
            sums.extend(parts.zip(scales).map(|(codes, scales)| {
                let parts = codes.chunks_exact(QUANT_GROUP).zip(scales);
                let part = |(codes, scale): (&[i8], &f32)| {
                    codes.iter().map(|c| i32::from(*c)).sum::<i32>() as f32 * scale
                };
                parts.map(part).sum::<f32>()
            }));
        }
        if needs.bytes {
            self.q.clear();
            self.q.resize(self.m * self.padded, 0);
            let rows = self.codes.chunks_exact(self.columns);
            for (row, out) in rows.zip(self.q.chunks_exact_mut(self.padded)) {
                out[..row.len()].copy_from_slice(row);
            }
            spread_scales(&self.scales, n_scales, self.padded / 4, 4, &mut self.s);
        }
        if needs.four {
            let block = 8 * lanes;
            self.q4.clear();
            self.q4.resize(self.m * self.padded4, 0);
            let rows = self.codes.chunks_exact(self.columns);
            for (row, out) in rows.zip(self.q4.chunks_exact_mut(self.padded4)) {
                for (codes, out) in row.chunks(block).zip(out.chunks_exact_mut(block)) {
                    let (even, odd) = out.split_at_mut(block / 2);
                    let places = even.iter_mut().zip(odd);
                    for (pair, (even, odd)) in codes.chunks_exact(2).zip(places) {
                        (*even, *odd) = (pair[0], pair[1]);
                    }
                }
            }
            spread_scales(&self.scales, n_scales, self.padded4 / 8, 8, &mut self.s4);
        }
    }
}

/// Gives every lane its scale: rows of `n_scales` become rows of `lanes_a_row` lanes, each of which
/// holds `elements_a_lane` elements. Lanes behind a row's last scale are 0.
fn spread_scales(
    scales: &[f32],
    n_scales: usize,
    lanes_a_row: usize,
    elements_a_lane: usize,
    out: &mut Vec<f32>,
) {
    out.clear();
    out.resize(scales.len() / n_scales * lanes_a_row, 0.0);
    let rows = scales.chunks_exact(n_scales);
    for (row, out) in rows.zip(out.chunks_exact_mut(lanes_a_row)) {
        let lanes = out.chunks_exact_mut(QUANT_GROUP / elements_a_lane);
        for (scale, lanes) in row.iter().zip(lanes) {
            lanes.fill(*scale);
        }
    }
}

/// Rounds groups of `x` to 8 bits. A group with NaN or infinity gets a NaN scale, so that it makes
/// every product NaN instead of something plausible.
#[inline(always)]
unsafe fn round_kernel<S: Simd>(x: &[f32], codes: &mut [i8], scales: &mut [f32]) {
    let groups = x
        .chunks_exact(QUANT_GROUP)
        .zip(codes.chunks_exact_mut(QUANT_GROUP))
        .zip(scales);
    for ((x, codes), scale) in groups {
        let mut rounded = [0.0f32; QUANT_GROUP];
        // SAFETY: chunks have QUANT_GROUP elements, a multiple of the lanes.
        unsafe {
            let mut largest = S::zero();
            let mut check = S::zero();
            let mut i = 0;
            while i < QUANT_GROUP {
                let v = S::load(x.as_ptr().add(i));
                largest = v.max(S::zero().sub(v)).max(largest);
                check = v.mul_add(S::zero(), check);
                i += S::LANES;
            }
            let largest = largest.max_lane();
            let finite = check.sum() == 0.0;
            *scale = if finite { largest / 127.0 } else { f32::NAN };
            let inverse = if finite && largest > 0.0 {
                // A subnormal group would overflow the quotient; its products are below any use.
                (127.0 / largest).min(f32::MAX)
            } else {
                0.0
            };
            let inverse = S::splat(inverse);
            let mut i = 0;
            while i < QUANT_GROUP && finite {
                let v = S::load(x.as_ptr().add(i)).mul(inverse).round();
                v.store(rounded.as_mut_ptr().add(i));
                i += S::LANES;
            }
        }
        for (code, x) in codes.iter_mut().zip(rounded) {
            *code = x as i8;
        }
    }
}

dispatch! {
    unsafe fn run_round(x: &[f32], codes: &mut [i8], scales: &mut [f32]) = round_kernel
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::testing::Numbers;

    #[test]
    fn rounding_is_within_half_a_step_and_never_plausible_for_nan() {
        let mut numbers = Numbers(31);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for size in [1.0f32, 1e-30, 1e-42, 1e30] {
                let x: Vec<f32> = numbers.floats(64).iter().map(|x| x * size).collect();
                let (mut codes, mut scales) = (vec![0; 64], vec![0.0; 2]);
                // SAFETY: available; lengths fit.
                unsafe { run_round(isa, &x, &mut codes, &mut scales) };
                for (i, x) in x.iter().enumerate() {
                    let got = f32::from(codes[i]) * scales[i / 32];
                    let step = scales[i / 32].max(1e-38);
                    assert!((got - x).abs() <= 0.502 * step, "{} {got} {x}", isa.name());
                }
            }
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = numbers.floats(64);
                x[40] = bad;
                let (mut codes, mut scales) = (vec![0; 64], vec![0.0; 2]);
                // SAFETY: available; lengths fit.
                unsafe { run_round(isa, &x, &mut codes, &mut scales) };
                assert!(scales[0].is_finite() && scales[1].is_nan());
            }
        }
    }
}
