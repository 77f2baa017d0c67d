//! Products with weights in mxfp4: 4-bit floats (e2m1) with an exponent of 8 bits (e8m0) for 32 of them, as the OCP
//! Microscaling Formats specification 1.0 has them.
//!
//! Twice an e2m1 is a whole number from -12 to 12, so that `w = 2^(e - 128) * (code - 12)` with codes up to 24: an
//! affine weight. A few rows at a time are spread to such codes of a byte, which stay in the nearest cache, and
//! meet the activations in the kernels of 8-bit weights.

use super::rows::{QUAD, Share};
use super::{MAX_ROWS, Needs, Precision, Prepared, SendPtr, run};
use crate::Isa;
use crate::pool::Pool;
use crate::quantized::{QuantizedMatrix, Scales};

/// Elements that share an exponent.
pub const GROUP: usize = 32;

/// What stands for 0 among the codes.
const ZERO: f32 = 12.0;

/// The code of every nibble: sign, two exponent bits of bias 1, one mantissa bit.
const CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// A matrix `[rows, columns]` of mxfp4.
#[derive(Debug, Clone, Copy)]
pub struct Mxfp4<'a> {
    words: &'a [u32],
    exponents: &'a [u8],
    rows: usize,
    columns: usize,
}

/// Half of `2^(e - 127)`; 255 is no number.
fn half_scale(exponent: u8) -> f32 {
    match exponent {
        255 => f32::NAN,
        // Subnormal numbers.
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        e => f32::from_bits(u32::from(e - 1) << 23),
    }
}

impl<'a> Mxfp4<'a> {
    /// Checks the parts against each other.
    pub fn new(words: &'a [u32], exponents: &'a [u8], rows: usize, columns: usize) -> Option<Self> {
        let elements = rows.checked_mul(columns)?;
        let fits = columns > 0
            && columns.is_multiple_of(GROUP)
            && words.len() == elements / 8
            && exponents.len() == elements / GROUP;
        fits.then_some(Self {
            words,
            exponents,
            rows,
            columns,
        })
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Rows `[start, start + count)`; none when they are not there.
    pub fn rows_from(&self, start: usize, count: usize) -> Option<Self> {
        let end = start.checked_add(count).filter(|end| *end <= self.rows)?;
        let (words, groups) = (self.columns / 8, self.columns / GROUP);
        Some(Self {
            words: self.words.get(start * words..end * words)?,
            exponents: self.exponents.get(start * groups..end * groups)?,
            rows: count,
            columns: self.columns,
        })
    }

    /// Codes and half scales of whole rows from `first` on, as many as `spread` has room for.
    fn spread(&self, isa: Isa, first: usize, spread: &mut Spread, rows: usize) {
        let (words, groups) = (self.columns / 8, self.columns / GROUP);
        let packed = &self.words[first * words..(first + rows) * words];
        spread.codes.resize(rows * self.columns / 4, 0);
        spread_codes(isa, packed, &mut spread.codes);
        let exponents = &self.exponents[first * groups..(first + rows) * groups];
        spread.scales.clear();
        spread
            .scales
            .extend(exponents.iter().map(|e| half_scale(*e)));
    }

    /// Expands a row.
    pub fn expand_row(&self, row: usize, out: &mut [f32]) {
        let (words, groups) = (self.columns / 8, self.columns / GROUP);
        let packed = &self.words[row * words..(row + 1) * words];
        let exponents = &self.exponents[row * groups..(row + 1) * groups];
        let groups = packed.chunks_exact(GROUP / 8).zip(exponents);
        for ((packed, exponent), out) in groups.zip(out.chunks_exact_mut(GROUP)) {
            let scale = half_scale(*exponent);
            for (word, out) in packed.iter().zip(out.chunks_exact_mut(8)) {
                for (i, out) in out.iter_mut().enumerate() {
                    let code = CODES[(word >> (4 * i)) as usize & 15];
                    *out = scale * (f32::from(code) - ZERO);
                }
            }
        }
    }
}

/// Rows as an affine weight of 8 bits. Kept between calls for its memory.
#[derive(Debug, Default)]
pub struct Spread {
    codes: Vec<u32>,
    scales: Vec<f32>,
}

impl Spread {
    fn matrix(&self, rows: usize, columns: usize) -> Option<QuantizedMatrix<'_>> {
        let scales = Scales::F32(&self.scales);
        QuantizedMatrix::around(&self.codes, scales, rows, columns, 8, GROUP, ZERO)
    }

    /// A whole matrix, for products with many rows.
    pub fn whole(&mut self, isa: Isa, w: &Mxfp4<'_>) -> Option<QuantizedMatrix<'_>> {
        w.spread(isa, 0, self, w.rows);
        self.matrix(w.rows, w.columns)
    }
}

/// Codes of nibbles in order, four to a word.
fn spread_codes(isa: Isa, packed: &[u32], out: &mut [u32]) {
    #[cfg(target_arch = "x86_64")]
    if isa != Isa::Portable && std::arch::is_x86_feature_detected!("ssse3") {
        // SAFETY: the feature is there.
        unsafe { spread_by_shuffles(packed, out) };
        return;
    }
    let _ = isa;
    for (word, out) in packed.iter().zip(out.chunks_exact_mut(2)) {
        let code = |i: usize| CODES[(word >> (4 * i)) as usize & 15];
        out[0] = u32::from_le_bytes([code(0), code(1), code(2), code(3)]);
        out[1] = u32::from_le_bytes([code(4), code(5), code(6), code(7)]);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "ssse3")]
unsafe fn spread_by_shuffles(packed: &[u32], out: &mut [u32]) {
    use core::arch::x86_64::*;
    // Rows are multiples of 32 elements, which are four words.
    for (from, to) in packed.chunks_exact(4).zip(out.chunks_exact_mut(8)) {
        // SAFETY: four words are read, eight are written.
        unsafe {
            let table = _mm_loadu_si128(CODES.as_ptr().cast());
            let low_bits = _mm_set1_epi8(15);
            let packed = _mm_loadu_si128(from.as_ptr().cast());
            let low = _mm_shuffle_epi8(table, _mm_and_si128(packed, low_bits));
            let high = _mm_and_si128(_mm_srli_epi16::<4>(packed), low_bits);
            let high = _mm_shuffle_epi8(table, high);
            let to: *mut __m128i = to.as_mut_ptr().cast();
            _mm_storeu_si128(to, _mm_unpacklo_epi8(low, high));
            _mm_storeu_si128(to.add(1), _mm_unpackhi_epi8(low, high));
        }
    }
}

/// A weight and where its product goes: `[m, rows]`.
#[derive(Debug)]
pub struct Mxfp4Target<'a> {
    /// The weight.
    pub w: Mxfp4<'a>,
    /// `x @ w.T`.
    pub y: &'a mut [f32],
}

/// `y = x @ w.T` for several weights of one `x[m, columns]`, m up to [`MAX_ROWS`]. False when a kernel panicked.
///
/// # Panics
/// When shapes do not fit.
#[must_use]
pub fn matmul_mxfp4(
    isa: Isa,
    precision: Precision,
    pool: &mut Pool,
    x: &[f32],
    targets: &mut [Mxfp4Target<'_>],
    prepared: &mut Prepared,
) -> bool {
    let Some(columns) = targets.first().map(|t| t.w.columns) else {
        return true;
    };
    let m = x.len() / columns;
    assert!((1..=MAX_ROWS).contains(&m) && x.len() == m * columns);
    let mut total = 0;
    for t in targets.iter() {
        assert!(t.w.columns == columns && t.y.len() == m * t.w.rows);
        total += t.w.rows.next_multiple_of(QUAD);
    }
    let mut needs = Needs::default();
    needs.add(false, GROUP);
    if !prepared.fill(isa, precision, pool, x, columns, needs) {
        return false;
    }
    let outs: Vec<SendPtr> = targets
        .iter_mut()
        .map(|t| SendPtr(t.y.as_mut_ptr()))
        .collect();
    let (outs, targets, prepared) = (&outs, &*targets, &*prepared);
    let serial_below = 40_000 / columns + 1;
    pool.split(total, QUAD, serial_below, &|range| {
        let mut spread = Spread::default();
        let mut start = 0;
        for (t, out) in targets.iter().zip(outs) {
            let rows = t.w.rows;
            let last = range.end.saturating_sub(start).min(rows);
            let mut first = range.start.saturating_sub(start).min(rows);
            while first < last {
                let n = (last - first).min(QUAD);
                t.w.spread(isa, first, &mut spread, n);
                if let Some(w) = spread.matrix(n, columns) {
                    let share = Share {
                        w: &w,
                        x: prepared,
                        first: 0,
                        last: n,
                        // SAFETY: `first` is a column of `y`.
                        y: unsafe { out.0.add(first) },
                        stride: rows,
                    };
                    // SAFETY: `isa` was detected; shapes were checked; ranges of threads are disjoint.
                    unsafe { run(isa, precision, &share) };
                }
                first += n;
            }
            start += rows.next_multiple_of(QUAD);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::testing::Numbers;

    struct Parts {
        words: Vec<u32>,
        exponents: Vec<u8>,
        columns: usize,
    }

    fn parts(numbers: &mut Numbers, rows: usize, columns: usize) -> Parts {
        let word = |numbers: &mut Numbers| numbers.next() ^ (numbers.next() << 11);
        Parts {
            words: (0..rows * columns / 8).map(|_| word(numbers)).collect(),
            exponents: (0..rows * columns / GROUP)
                .map(|_| 124 + (numbers.next() % 6) as u8)
                .collect(),
            columns,
        }
    }

    /// The definition: sign, exponent of bias 1, mantissa.
    fn e2m1(nibble: u32) -> f64 {
        let (exponent, mantissa) = (nibble >> 1 & 3, f64::from(nibble & 1));
        let size = match exponent {
            0 => mantissa / 2.0,
            e => (1.0 + mantissa / 2.0) * f64::from(1 << (e - 1)),
        };
        if nibble & 8 == 0 { size } else { -size }
    }

    impl Parts {
        fn element(&self, row: usize, column: usize) -> f64 {
            let i = row * self.columns + column;
            let scale = 2f64.powi(i32::from(self.exponents[i / GROUP]) - 127);
            scale * e2m1(self.words[i / 8] >> (4 * (i % 8)) & 15)
        }
    }

    #[test]
    fn exponents_are_exact_over_their_whole_range() {
        for e in 0..255u8 {
            let exact = 2f64.powi(i32::from(e) - 128);
            assert_eq!(f64::from(half_scale(e)), exact, "{e}");
        }
        assert!(half_scale(255).is_nan());
    }

    #[test]
    fn rows_expand_as_they_are_defined() {
        let mut numbers = Numbers(51);
        let parts = parts(&mut numbers, 5, 96);
        let w = Mxfp4::new(&parts.words, &parts.exponents, 5, 96).unwrap();
        let part = w.rows_from(2, 3).unwrap();
        assert!(w.rows_from(3, 3).is_none());
        let mut out = vec![0.0; 96];
        for row in 0..3 {
            part.expand_row(row, &mut out);
            let exact = (0..96).map(|column| parts.element(row + 2, column));
            assert!(out.iter().zip(exact).all(|(a, b)| f64::from(*a) == b));
        }
        assert!(Mxfp4::new(&parts.words, &parts.exponents, 5, 48).is_none());
        assert!(Mxfp4::new(&parts.words, &parts.exponents[1..], 5, 96).is_none());
    }

    #[test]
    fn products_match_f64_in_every_precision_and_instruction_set() {
        let mut numbers = Numbers(52);
        let mut pool = Pool::new(2).unwrap();
        let mut prepared = Prepared::default();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (precision, error) in [
                (Precision::Exact, 1e-6),
                (Precision::Int16, 2e-5),
                (Precision::Int8, 5e-3),
            ] {
                for (m, rows, columns) in [(1, 9, 32), (3, 70, 96), (16, 5, 544), (2, 131, 1024)] {
                    let parts = parts(&mut numbers, rows, columns);
                    let w = Mxfp4::new(&parts.words, &parts.exponents, rows, columns).unwrap();
                    let x = numbers.floats(m * columns);
                    let (mut few, mut again) = (vec![f32::NAN; m * rows], vec![f32::NAN; m * rows]);
                    let mut targets = [
                        Mxfp4Target { w, y: &mut few },
                        Mxfp4Target { w, y: &mut again },
                    ];
                    assert!(matmul_mxfp4(
                        isa,
                        precision,
                        &mut pool,
                        &x,
                        &mut targets,
                        &mut prepared
                    ));
                    assert_eq!(few, again);
                    let mut spread = Spread::default();
                    let whole = spread.whole(isa, &w).unwrap();
                    let mut wide = vec![f32::NAN; m * rows];
                    let mut targets = [super::super::Target {
                        w: whole,
                        y: &mut wide,
                    }];
                    assert!(super::super::matmul(
                        isa,
                        precision,
                        &mut pool,
                        &x,
                        &mut targets,
                        &mut prepared
                    ));
                    assert_eq!(few, wide);
                    for i in 0..m {
                        let x = &x[i * columns..(i + 1) * columns];
                        let size: f64 = x.iter().map(|x| f64::from(x.abs()) * 24.0 * 4.0).sum();
                        for j in 0..rows {
                            let terms = x.iter().enumerate();
                            let terms = terms.map(|(k, x)| f64::from(*x) * parts.element(j, k));
                            let (want, got) = (terms.sum::<f64>(), f64::from(few[i * rows + j]));
                            assert!(
                                (got - want).abs() <= error * size,
                                "{} {precision:?} {m}x{rows}x{columns}: {got} {want}",
                                isa.name()
                            );
                        }
                    }
                }
            }
        }
    }
}
