//! Quantised matrices in MLX's layout: packed words along a row, a scale and a bias per group.
//!
//! `w = scale * q + bias`, or `w = scale * (q - 2^(bits - 1))` where it is centred; element i of a row is the `bits` bits at bit `i * bits` of the row's
//! little-endian bit stream. Matrices in mxfp4 (see `qmatmul::mxfp4`) are of this kind, too, once their nibbles are codes.

use crate::qmatmul::{Precision, mxfp4};

/// Scales or biases, one per group of a row.
#[derive(Debug, Clone, Copy)]
pub enum Scales<'a> {
    /// Bits of f16.
    F16(&'a [u16]),
    /// Bits of bf16.
    Bf16(&'a [u16]),
    /// f32.
    F32(&'a [f32]),
    /// Exponents of mxfp4.
    E8m0(&'a [u8]),
}

impl<'a> Scales<'a> {
    fn part(self, start: usize, end: usize) -> Option<Scales<'a>> {
        Some(match self {
            Self::F16(s) => Self::F16(s.get(start..end)?),
            Self::Bf16(s) => Self::Bf16(s.get(start..end)?),
            Self::F32(s) => Self::F32(s.get(start..end)?),
            Self::E8m0(s) => Self::E8m0(s.get(start..end)?),
        })
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F16(s) | Self::Bf16(s) => s.len(),
            Self::F32(s) => s.len(),
            Self::E8m0(s) => s.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Converts `[start, start + out.len())` to f32.
    ///
    /// # Panics
    /// When the range is outside.
    pub fn read(&self, start: usize, out: &mut [f32]) {
        let end = start + out.len();
        match self {
            Self::F32(s) => out.copy_from_slice(&s[start..end]),
            Self::E8m0(s) => {
                for (o, exponent) in out.iter_mut().zip(&s[start..end]) {
                    *o = mxfp4::half_scale(*exponent);
                }
            }
            Self::Bf16(s) => {
                for (o, b) in out.iter_mut().zip(&s[start..end]) {
                    *o = f32::from_bits(u32::from(*b) << 16);
                }
            }
            Self::F16(s) => half::slice::HalfFloatSliceExt::convert_to_f32_slice(
                half::slice::HalfBitsSliceExt::reinterpret_cast::<half::f16>(&s[start..end]),
                out,
            ),
        }
    }
}

/// A matrix `[rows, columns]`.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedMatrix<'a> {
    words: &'a [u32],
    scales: Scales<'a>,
    biases: Scales<'a>,
    rows: usize,
    columns: usize,
    bits: usize,
    group: usize,
    /// Multiplies what is read as biases, which are the scales where it is centred.
    bias_factor: f32,
}

impl<'a> QuantizedMatrix<'a> {
    /// Checks the parts against each other; `None` when they do not fit or the form is not one of
    /// 2, 3, 4, 5, 6, 8 bits in groups of 16, 32, 64 or 128, with whole 32 columns.
    pub fn new(
        words: &'a [u32],
        scales: Scales<'a>,
        biases: Scales<'a>,
        rows: usize,
        columns: usize,
        bits: usize,
        group: usize,
    ) -> Option<Self> {
        let known = matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) && matches!(group, 16 | 32 | 64 | 128);
        let fits = known
            && !matches!(scales, Scales::E8m0(_))
            && columns > 0
            && columns.is_multiple_of(group.max(32))
            && words.len() == rows.checked_mul(columns)?.checked_mul(bits)? / 32
            && scales.len() == rows * columns / group
            && biases.len() == scales.len();
        fits.then_some(Self {
            words,
            scales,
            biases,
            rows,
            columns,
            bits,
            group,
            bias_factor: 1.0,
        })
    }

    /// As [`QuantizedMatrix::new`], without biases: `w = scale * (q - 2^(bits - 1))`.
    pub fn centred(
        words: &'a [u32],
        scales: Scales<'a>,
        rows: usize,
        columns: usize,
        bits: usize,
        group: usize,
    ) -> Option<Self> {
        let zero = (1u32 << bits.checked_sub(1)?) as f32;
        Self::around(words, scales, rows, columns, bits, group, zero)
    }

    /// As [`QuantizedMatrix::centred`], with another code for 0: `w = scale * (q - zero)`.
    pub(crate) fn around(
        words: &'a [u32],
        scales: Scales<'a>,
        rows: usize,
        columns: usize,
        bits: usize,
        group: usize,
        zero: f32,
    ) -> Option<Self> {
        let matrix = Self::new(words, scales, scales, rows, columns, bits, group)?;
        Some(Self {
            bias_factor: -zero,
            ..matrix
        })
    }

    /// A matrix in mxfp4: nibbles, and an exponent for 32 of them.
    pub fn mxfp4(
        words: &'a [u32],
        exponents: &'a [u8],
        rows: usize,
        columns: usize,
    ) -> Option<Self> {
        let elements = rows.checked_mul(columns)?;
        let fits = columns > 0
            && columns.is_multiple_of(mxfp4::GROUP)
            && words.len() == elements / 8
            && exponents.len() == elements / mxfp4::GROUP;
        fits.then_some(Self {
            words,
            scales: Scales::E8m0(exponents),
            biases: Scales::E8m0(exponents),
            rows,
            columns,
            bits: 4,
            group: mxfp4::GROUP,
            bias_factor: -mxfp4::ZERO,
        })
    }

    /// Whether its nibbles are floats, which stand for codes of a byte.
    pub(crate) fn is_mxfp4(&self) -> bool {
        matches!(self.scales, Scales::E8m0(_))
    }

    /// Rows `[start, start + count)`; none when they are not there.
    pub fn rows_from(&self, start: usize, count: usize) -> Option<Self> {
        let end = start.checked_add(count).filter(|end| *end <= self.rows)?;
        let (words, groups) = (self.columns * self.bits / 32, self.groups());
        Some(Self {
            words: self.words.get(start * words..end * words)?,
            scales: self.scales.part(start * groups, end * groups)?,
            biases: self.biases.part(start * groups, end * groups)?,
            rows: count,
            ..*self
        })
    }

    /// Multiplies what [`QuantizedMatrix::biases`] holds.
    pub(crate) fn bias_factor(&self) -> f32 {
        self.bias_factor
    }

    /// Packed words, row after row.
    pub(crate) fn words(&self) -> &'a [u32] {
        self.words
    }

    /// Scales, row after row.
    pub(crate) fn scales(&self) -> Scales<'a> {
        self.scales
    }

    /// Biases, row after row.
    pub(crate) fn biases(&self) -> Scales<'a> {
        self.biases
    }

    /// Whether scales and biases are stored alike.
    pub fn has_one_type(&self) -> bool {
        core::mem::discriminant(&self.scales) == core::mem::discriminant(&self.biases)
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bits of an element.
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// Whether kernels read packed nibbles: they have room for four scales a vector, which is groups
    /// of 32 or more. Other codes are spread to a byte each.
    pub(crate) fn has_nibbles(&self) -> bool {
        self.bits == 4 && self.group >= 32 && !self.is_mxfp4()
    }

    /// Whether kernels for few rows read its packed nibbles. Exact ones have a table of the numbers of mxfp4 at hand.
    pub(crate) fn reads_nibbles(&self, precision: Precision) -> bool {
        self.has_nibbles() || (self.is_mxfp4() && precision == Precision::Exact)
    }

    /// Elements of a group.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.columns / self.group
    }

    /// Packed words of a row.
    pub fn row_words(&self, row: usize) -> &'a [u32] {
        let len = self.columns * self.bits / 32;
        &self.words[row * len..(row + 1) * len]
    }

    /// Scales of a row as f32.
    pub fn row_scales(&self, row: usize, out: &mut [f32]) {
        self.scales.read(row * self.groups(), out);
    }

    /// Biases of a row as f32.
    pub fn row_biases(&self, row: usize, out: &mut [f32]) {
        self.biases.read(row * self.groups(), out);
        out.iter_mut().for_each(|bias| *bias *= self.bias_factor);
    }

    /// Expands a row. `factors` is scratch for `2 * groups()` values.
    pub fn expand_row(&self, row: usize, factors: &mut [f32], out: &mut [f32]) {
        let groups = self.groups();
        let (scales, biases) = factors[..2 * groups].split_at_mut(groups);
        self.row_scales(row, scales);
        self.row_biases(row, biases);
        if self.is_mxfp4() {
            mxfp4::expand_row(self.row_words(row), scales, out);
            return;
        }
        // 32 columns are `bits` words, whatever the width; a group has 16 of them or more.
        let parts = out
            .chunks_exact_mut(32)
            .zip(self.row_words(row).chunks_exact(self.bits));
        for (i, (out, words)) in parts.enumerate() {
            for (half, out) in out.chunks_exact_mut(16).enumerate() {
                let group = (32 * i + 16 * half) / self.group;
                expand_half(words, half, self.bits, scales[group], biases[group], out);
            }
        }
    }
}

/// Expands 16 of the 32 columns that `words` hold.
#[inline(always)]
fn expand_half(words: &[u32], half: usize, bits: usize, scale: f32, bias: f32, out: &mut [f32]) {
    match bits {
        4 => {
            for (word, out) in words[2 * half..].iter().zip(out.chunks_exact_mut(8)) {
                for (i, o) in out.iter_mut().enumerate() {
                    *o = ((word >> (4 * i)) & 15) as f32 * scale + bias;
                }
            }
        }
        8 => {
            for (word, out) in words[4 * half..].iter().zip(out.chunks_exact_mut(4)) {
                for (o, q) in out.iter_mut().zip(word.to_le_bytes()) {
                    *o = f32::from(q) * scale + bias;
                }
            }
        }
        _ => {
            let mask = (1u64 << bits) - 1;
            for (i, o) in out.iter_mut().enumerate() {
                let first = (16 * half + i) * bits;
                let (word, shift) = (first / 32, first % 32);
                let high = words.get(word + 1).copied().unwrap_or(0);
                let pair = u64::from(words[word]) | u64::from(high) << 32;
                *o = ((pair >> shift) & mask) as f32 * scale + bias;
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A small generator, so that tests need no crate for numbers.
    pub(crate) struct Numbers(pub u64);

    impl Numbers {
        pub(crate) fn next(&mut self) -> u32 {
            self.0 = self
                .0
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (self.0 >> 33) as u32
        }

        /// Uniform in [-1, 1).
        pub(crate) fn unit(&mut self) -> f32 {
            self.next() as f32 / (1u32 << 30) as f32 - 1.0
        }

        pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
            (0..n).map(|_| self.unit()).collect()
        }
    }

    /// Parts of a random matrix.
    pub(crate) struct Parts {
        pub words: Vec<u32>,
        pub scales: Vec<f32>,
        pub biases: Vec<f32>,
    }

    pub(crate) fn parts(
        numbers: &mut Numbers,
        rows: usize,
        columns: usize,
        bits: usize,
        group: usize,
    ) -> Parts {
        let groups = rows * columns / group;
        Parts {
            words: (0..rows * columns * bits / 32)
                .map(|_| numbers.next() ^ (numbers.next() << 11))
                .collect(),
            scales: numbers.floats(groups),
            biases: numbers.floats(groups),
        }
    }

    impl Parts {
        pub(crate) fn matrix(
            &self,
            rows: usize,
            columns: usize,
            bits: usize,
            group: usize,
        ) -> QuantizedMatrix<'_> {
            let (scales, biases) = (Scales::F32(&self.scales), Scales::F32(&self.biases));
            QuantizedMatrix::new(&self.words, scales, biases, rows, columns, bits, group).unwrap()
        }

        /// The definition, bit by bit, in f64.
        pub(crate) fn element(
            &self,
            row: usize,
            column: usize,
            columns: usize,
            bits: usize,
            group: usize,
        ) -> f64 {
            let first = row * columns * bits + column * bits;
            let q: u32 = (0..bits)
                .map(|b| ((self.words[(first + b) / 32] >> ((first + b) % 32)) & 1) << b)
                .sum();
            let g = (row * columns + column) / group;
            f64::from(q) * f64::from(self.scales[g]) + f64::from(self.biases[g])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::*;
    use super::*;

    #[test]
    fn rows_expand_as_the_layout_is_defined() {
        let mut numbers = Numbers(1);
        for bits in [2, 3, 4, 5, 6, 8] {
            for group in [16, 32, 64, 128] {
                let (rows, columns) = (3, 2 * group);
                let parts = parts(&mut numbers, rows, columns, bits, group);
                let matrix = parts.matrix(rows, columns, bits, group);
                let (mut out, mut factors) = (vec![0.0; columns], vec![0.0; 2 * matrix.groups()]);
                for row in 0..rows {
                    matrix.expand_row(row, &mut factors, &mut out);
                    for (column, x) in out.iter().enumerate() {
                        let want = parts.element(row, column, columns, bits, group);
                        assert!(
                            (f64::from(*x) - want).abs() < 1e-4 * want.abs().max(1.0),
                            "{bits} {group}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn centred_codes_have_their_middle_at_zero() {
        let mut numbers = Numbers(2);
        for (bits, group) in [(2, 32), (3, 16), (4, 32), (5, 64), (6, 16), (8, 128)] {
            let (rows, columns) = (4, 2 * group);
            let mut parts = parts(&mut numbers, rows, columns, bits, group);
            let scales = Scales::F32(&parts.scales);
            let whole =
                QuantizedMatrix::centred(&parts.words, scales, rows, columns, bits, group).unwrap();
            let part = whole.rows_from(1, 3).unwrap();
            assert!(whole.rows_from(2, 3).is_none() && whole.has_one_type());
            let (mut out, mut factors) = (vec![0.0; columns], vec![0.0; 2 * whole.groups()]);
            let expanded: Vec<Vec<f32>> = (0..3)
                .map(|row| {
                    part.expand_row(row, &mut factors, &mut out);
                    out.clone()
                })
                .collect();
            let middle = -((1 << (bits - 1)) as f32);
            parts.biases = parts.scales.iter().map(|scale| scale * middle).collect();
            for (row, out) in expanded.iter().enumerate() {
                for (column, x) in out.iter().enumerate() {
                    let want = parts.element(row + 1, column, columns, bits, group);
                    assert!((f64::from(*x) - want).abs() < 1e-4 * want.abs().max(1.0));
                }
            }
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let (words, scales) = (vec![0u32; 8], vec![0f32; 2]);
        let s = Scales::F32(&scales);
        assert!(QuantizedMatrix::new(&words, s, s, 2, 32, 4, 32).is_some());
        for (rows, columns, bits, group) in [
            (3, 32, 4, 32),
            (2, 32, 8, 32),
            (2, 48, 4, 32),
            (2, 32, 7, 32),
            (2, 16, 8, 16),
            (2, 32, 4, 8),
            (2, 0, 4, 32),
        ] {
            assert!(QuantizedMatrix::new(&words, s, s, rows, columns, bits, group).is_none());
        }
    }

    #[test]
    fn half_scales_are_read_exactly() {
        let f16 = [
            half::f16::from_f32(1.5).to_bits(),
            half::f16::from_f32(-0.25).to_bits(),
        ];
        let bf16 = [
            half::bf16::from_f32(1.5).to_bits(),
            half::bf16::from_f32(-0.25).to_bits(),
        ];
        for scales in [Scales::F16(&f16), Scales::Bf16(&bf16)] {
            let mut out = [0.0; 1];
            scales.read(1, &mut out);
            assert_eq!(out, [-0.25]);
        }
    }
}
