//! Weights in mxfp4: 4-bit floats (e2m1) with an exponent of 8 bits (e8m0) for 32 of them, as the OCP
//! Microscaling Formats specification 1.0 has them.
//!
//! Twice an e2m1 is a whole number from -12 to 12, so that `w = 2^(e - 128) * (code - 12)` with codes up to 24: an
//! affine weight of one code a byte. A permutation makes the codes of nibbles, in registers where rows are read in
//! pairs of vectors (`pairs`), and else into memory that stays in the nearest cache, row by row.

use super::rows::{self, QUAD, Share};
use super::{Precision, run as run_affine};
use crate::Isa;
use crate::factor::E8m0;
use crate::quantized::{QuantizedMatrix, Scales};

/// Elements that share an exponent.
pub const GROUP: usize = 32;

/// What stands for 0 among the codes.
pub(crate) const ZERO: f32 = 12.0;

/// The code of every nibble: sign, two exponent bits of bias 1, one mantissa bit.
pub(crate) const CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Exponents whose half scales are normal numbers.
pub(crate) const NORMAL: core::ops::RangeInclusive<u8> = 2..=254;

/// Rows whose exponents are looked at in one go.
const ROWS_A_LOOK: usize = 64;

/// Half of `2^(e - 127)`; 255 is no number.
pub(crate) fn half_scale(exponent: u8) -> f32 {
    match exponent {
        255 => f32::NAN,
        // Subnormal numbers.
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        e => f32::from_bits(u32::from(e - 1) << 23),
    }
}

/// Expands the words of a row.
pub(crate) fn expand_row(words: &[u32], half_scales: &[f32], out: &mut [f32]) {
    let groups = words.chunks_exact(GROUP / 8).zip(half_scales);
    for ((words, scale), out) in groups.zip(out.chunks_exact_mut(GROUP)) {
        for (word, out) in words.iter().zip(out.chunks_exact_mut(8)) {
            for (i, out) in out.iter_mut().enumerate() {
                let code = CODES[(word >> (4 * i)) as usize & 15];
                *out = scale * (f32::from(code) - ZERO);
            }
        }
    }
}

/// Codes of `out.len()` nibbles, which are a multiple of 32, in order.
///
/// # Safety
/// So many nibbles are readable at `from`.
pub(crate) unsafe fn spread_codes(isa: Isa, from: *const u8, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if isa != Isa::Portable && std::arch::is_x86_feature_detected!("ssse3") {
        // SAFETY: the feature is there; the rest is the caller's promise.
        unsafe { spread_by_shuffles(from, out) };
        return;
    }
    let _ = isa;
    for (i, out) in out.chunks_exact_mut(2).enumerate() {
        // SAFETY: the caller's promise.
        let byte = unsafe { *from.add(i) } as usize;
        out[0] = CODES[byte & 15];
        out[1] = CODES[byte >> 4];
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "ssse3")]
unsafe fn spread_by_shuffles(from: *const u8, out: &mut [u8]) {
    use core::arch::x86_64::*;
    for (i, to) in out.chunks_exact_mut(GROUP).enumerate() {
        // SAFETY: 16 bytes of the caller's are read, 32 are written.
        unsafe {
            let table = _mm_loadu_si128(CODES.as_ptr().cast());
            let low_bits = _mm_set1_epi8(15);
            let packed = _mm_loadu_si128(from.add(i * GROUP / 2).cast());
            let low = _mm_shuffle_epi8(table, _mm_and_si128(packed, low_bits));
            let high = _mm_and_si128(_mm_srli_epi16::<4>(packed), low_bits);
            let high = _mm_shuffle_epi8(table, high);
            let to: *mut __m128i = to.as_mut_ptr().cast();
            _mm_storeu_si128(to, _mm_unpacklo_epi8(low, high));
            _mm_storeu_si128(to.add(1), _mm_unpackhi_epi8(low, high));
        }
    }
}

/// Whether kernels make the codes in registers.
pub(crate) fn in_registers(isa: Isa, precision: Precision) -> bool {
    #[cfg(target_arch = "x86_64")]
    return super::pairs::takes(isa, precision);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (isa, precision);
        false
    }
}

/// Runs a share.
///
/// # Safety
/// As for [`rows::run`].
pub(crate) unsafe fn run(isa: Isa, precision: Precision, share: &Share<'_>, exponents: &[u8]) {
    let groups = share.w.groups();
    let mut first = share.first;
    while first < share.last {
        let last = share.last.min(first + ROWS_A_LOOK);
        let part = Share {
            first,
            last,
            ..*share
        };
        let own = &exponents[first * groups..last * groups];
        let least = own.iter().fold(u8::MAX, |least, e| least.min(*e));
        let most = own.iter().fold(0, |most, e| most.max(*e));
        // SAFETY: forwarded to the caller; `E8m0` is transparent over a byte.
        unsafe {
            if NORMAL.contains(&least) && NORMAL.contains(&most) {
                let exponents = exponents.as_ptr().cast::<E8m0>();
                rows::run(isa, precision, &part, exponents, exponents);
            } else {
                run_spread(isa, precision, &part);
            }
        }
        first = last;
    }
}

/// Runs a share some of whose scales are no numbers or subnormal ones.
unsafe fn run_spread(isa: Isa, precision: Precision, share: &Share<'_>) {
    let w = share.w;
    let (columns, groups) = (w.columns(), w.groups());
    let mut codes = vec![0u32; QUAD * columns / 4];
    let mut scales = vec![0.0; QUAD * groups];
    for first in (share.first..share.last).step_by(QUAD) {
        let n = (share.last - first).min(QUAD);
        for row in 0..n {
            w.row_scales(first + row, &mut scales[row * groups..(row + 1) * groups]);
            let packed = w.row_words(first + row).as_ptr().cast();
            let codes = codes[row * columns / 4..(row + 1) * columns / 4].as_mut_ptr();
            // SAFETY: the words of a row hold its nibbles; words may be seen as bytes.
            unsafe {
                let codes = core::slice::from_raw_parts_mut(codes.cast(), columns);
                spread_codes(isa, packed, codes);
            }
        }
        let (codes, scales) = (&codes[..n * columns / 4], &scales[..n * groups]);
        let scales = Scales::F32(scales);
        let Some(w) = QuantizedMatrix::around(codes, scales, n, columns, 8, GROUP, ZERO) else {
            return;
        };
        let part = Share {
            w: &w,
            first: 0,
            last: n,
            // SAFETY: `first` is a column of `y`.
            y: unsafe { share.y.add(first) },
            ..*share
        };
        // SAFETY: forwarded to the caller.
        unsafe { run_affine(isa, precision, &part) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Prepared, Target, matmul};
    use super::*;
    use crate::pool::Pool;
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
        let matrix =
            |exponents, columns| QuantizedMatrix::mxfp4(&parts.words, exponents, 5, columns);
        let w = matrix(&parts.exponents, 96).unwrap();
        let part = w.rows_from(2, 3).unwrap();
        assert!(w.rows_from(3, 3).is_none());
        let (mut factors, mut out) = (vec![0.0; 6], vec![0.0; 96]);
        for row in 0..3 {
            part.expand_row(row, &mut factors, &mut out);
            let exact = (0..96).map(|column| parts.element(row + 2, column));
            assert!(out.iter().zip(exact).all(|(a, b)| f64::from(*a) == b));
        }
        assert!(matrix(&parts.exponents, 48).is_none());
        assert!(matrix(&parts.exponents[1..], 96).is_none());
        let scales = Scales::E8m0(&parts.exponents);
        assert!(QuantizedMatrix::new(&parts.words, scales, scales, 5, 96, 4, 32).is_none());
    }

    /// `x @ w.T`.
    fn product(how: (Isa, Precision), x: &[f32], parts: &Parts, rows: usize) -> Vec<f32> {
        let columns = parts.columns;
        let w = QuantizedMatrix::mxfp4(&parts.words, &parts.exponents, rows, columns).unwrap();
        let mut pool = Pool::new(2).unwrap();
        let mut y = vec![f32::NAN; x.len() / columns * rows];
        let mut targets = [Target { w, y: &mut y }];
        let mut prepared = Prepared::default();
        let (isa, precision) = how;
        let done = matmul(isa, precision, &mut pool, x, &mut targets, &mut prepared);
        assert!(done);
        y
    }

    const PRECISIONS: [(Precision, f64); 3] = [
        (Precision::Exact, 1e-6),
        (Precision::Int16, 2e-5),
        (Precision::Int8, 5e-3),
    ];

    #[test]
    fn products_match_f64_in_every_precision_and_instruction_set() {
        let mut numbers = Numbers(52);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (precision, error) in PRECISIONS {
                for (m, rows, columns) in [
                    (1, 9, 32),
                    (3, 70, 96),
                    (16, 5, 544),
                    (2, 131, 1024),
                    (1, 70, 256),
                    (9, 6, 768),
                    (1, 6, 6144),
                ] {
                    let parts = parts(&mut numbers, rows, columns);
                    let x = numbers.floats(m * columns);
                    let found = product((isa, precision), &x, &parts, rows);
                    for i in 0..m {
                        let x = &x[i * columns..(i + 1) * columns];
                        let size: f64 = x.iter().map(|x| f64::from(x.abs()) * 24.0 * 4.0).sum();
                        for j in 0..rows {
                            let terms = x.iter().enumerate();
                            let terms = terms.map(|(k, x)| f64::from(*x) * parts.element(j, k));
                            let (want, got) = (terms.sum::<f64>(), f64::from(found[i * rows + j]));
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

    #[test]
    fn scales_are_exact_and_what_is_no_number_stays_in_its_row() {
        let (rows, columns) = (256, 64);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (precision, _) in PRECISIONS {
                // One element of each row is 1.5, its scale that of the row's number; the others are 0.
                let mut parts = Parts {
                    words: vec![0; rows * columns / 8],
                    exponents: vec![127; rows * columns / GROUP],
                    columns,
                };
                for row in 0..rows {
                    parts.words[row * columns / 8 + 2] = 3;
                    parts.exponents[row * columns / GROUP] = row as u8;
                }
                let mut x = vec![0.0; columns];
                x[16] = 1.0;
                let found = product((isa, precision), &x, &parts, rows);
                // Beyond, codes times scales leave the range of f32, or scales of both sides do.
                for (row, found) in found.iter().enumerate().take(250).skip(20) {
                    let exact = 1.5 * 2f64.powi(row as i32 - 127);
                    let off = f64::from(*found) / exact - 1.0;
                    assert!(
                        off.abs() < 5e-3,
                        "{} {precision:?} {row}: {found}",
                        isa.name()
                    );
                }
                assert!(found[0].abs() < 2e-38 && found[1].abs() < 2e-38 && found[255].is_nan());
            }
        }
    }
}
