//! Rows of activations in the layouts that the kernels read, made once per product.

use super::round::{self, Codes, Factors, GROUPS, Layout, Needs, Sizes};
use crate::Isa;
use crate::pool::Pool;

/// How activations meet quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Activations stay f32.
    #[default]
    Exact,
    /// Activations are rounded to 16 bits with one scale per [`round::QUANT_GROUP`] elements: to within
    /// 1.6e-5 of the largest of them. Products are integers, sums are f32.
    Int16,
    /// The same with 8 bits: to within 0.4 % of the largest.
    Int8,
}

/// Lanes of the f32 vectors of an instruction set.
pub(crate) fn lanes(isa: Isa, precision: Precision) -> usize {
    match (isa, precision) {
        (Isa::Avx512Vnni, _) | (Isa::Avx512, Precision::Exact) => 16,
        _ => 8,
    }
}

/// Rows of `x` prepared for the kernels. Kept between calls for its memory.
#[derive(Debug, Default)]
pub struct Prepared {
    pub(crate) m: usize,
    pub(crate) sizes: Sizes,
    /// Exact, nibbles: `[m][block][8][LANES]`, block = 8 * LANES elements.
    pub(crate) x4: Vec<f32>,
    /// Exact, bytes: `[m][columns]`.
    pub(crate) x: Vec<f32>,
    pub(crate) int8: Codes<i8>,
    pub(crate) int16: Codes<i16>,
    /// Of the rounded ones.
    pub(crate) factors: Factors,
}

impl Prepared {
    /// Sums of row `m` for weights in groups of `group`.
    pub(crate) fn sums(&self, group: usize, m: usize) -> &[f32] {
        let index = GROUPS.iter().position(|size| *size == group).unwrap_or(0);
        let n = self.sizes.columns / group;
        &self.factors.sums[index][m * n..(m + 1) * n]
    }

    /// Lays out `[m, columns]`. False when a kernel panicked.
    #[must_use]
    pub(crate) fn fill(
        &mut self,
        isa: Isa,
        precision: Precision,
        pool: &mut Pool,
        x: &[f32],
        columns: usize,
        needs: Needs,
    ) -> bool {
        let lanes = lanes(isa, precision);
        self.m = x.len() / columns;
        let layout = match (isa, precision) {
            (Isa::Avx512Vnni, Precision::Int8) => Layout::Order,
            (Isa::Avx512Vnni, Precision::Int16) => Layout::Pairs,
            _ => Layout::Vectors,
        };
        self.sizes = Sizes::new(columns, lanes, layout);
        let (sizes, factors) = (self.sizes, &mut self.factors);
        match precision {
            Precision::Exact => {
                self.fill_exact(x, needs);
                true
            }
            Precision::Int16 => round::round(isa, pool, x, sizes, needs, &mut self.int16, factors),
            Precision::Int8 => round::round(isa, pool, x, sizes, needs, &mut self.int8, factors),
        }
    }

    fn fill_exact(&mut self, x: &[f32], needs: Needs) {
        let Sizes {
            columns,
            padded4,
            lanes,
            ..
        } = self.sizes;
        for ((sums, group), _) in self
            .factors
            .sums
            .iter_mut()
            .zip(GROUPS)
            .zip(needs.sums)
            .filter(|(_, n)| *n)
        {
            // Rows that are no multiple of a group have no weights of that group.
            sums.set_len(x.len() / group);
            for (sum, x) in sums.iter_mut().zip(x.chunks_exact(group)) {
                *sum = x.iter().sum();
            }
        }
        if needs.bytes {
            self.x.clear();
            self.x.extend_from_slice(x);
        }
        if needs.four {
            let block = 8 * lanes;
            self.x4.clear();
            self.x4.resize(self.m * padded4, 0.0);
            let rows = x.chunks_exact(columns);
            for (row, out) in rows.zip(self.x4.chunks_exact_mut(padded4)) {
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
}
