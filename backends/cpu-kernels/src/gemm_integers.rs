//! Products with many rows and activations of 8 or 16 bits: `y = x @ w.T`.
//!
//! A panel is as many rows of the weight as a vector (or two) has lanes, its codes laid out so that a lane
//! holds neighbours of one row: four bytes, or two and two as 16-bit words. A step broadcasts as many
//! neighbours of `x` to all lanes, so that sums never cross lanes. Integers within [`QUANT_GROUP`]
//! elements (in 16 bits at most 32 * 255 * 2^15 < 2^28), f32 beyond.

#![allow(
    clippy::needless_range_loop,
    reason = "rows and columns of register tiles are indices into several arrays at once"
)]

mod joint;

use std::sync::Mutex;

use crate::Isa;
use crate::aligned::Aligned;
use crate::isa::dispatch_bytes;
use crate::pool::Pool;
use crate::qmatmul::{self, Activation, Precision, Prepared, QUANT_GROUP, Target, row_codes};
use crate::quantized::QuantizedMatrix;
use crate::simd::Simd;
use crate::simd::bytes::Bytes;
pub use joint::matmul_all;

/// Scratch of one thread, kept between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    /// `[LANES][columns]` codes.
    rows: Vec<u32>,
    /// `[LANES][groups]` scales, then as many biases.
    factors: Vec<f32>,
    /// `[columns / 4][LANES]` words of four codes; for 16 bits `[columns / 2][LANES]` words of two.
    panel: Aligned<u32>,
    /// `[groups][LANES]`, groups rounded up to 8.
    scales: Aligned<f32>,
    biases: Aligned<f32>,
    /// Whether every bias is what the middle of the codes stands for, with its sign turned.
    centred: bool,
}

/// A panel's product with all rows of `x`.
#[derive(Clone, Copy)]
struct Job<'a> {
    isa: Isa,
    w: &'a QuantizedMatrix<'a>,
    x: &'a Prepared,
    /// First row of the weight.
    first: usize,
    /// Rows of the weight, at most the lanes of a panel's vectors.
    n: usize,
    /// `[m, rows]`.
    y: *mut f32,
}

impl Scratch {
    /// Lays out the rows of a job, vector by vector; lanes beyond its last row are 0.
    #[inline(always)]
    unsafe fn fill<B: Bytes, C: Panel>(&mut self, job: &Job<'_>) {
        let (w, lanes) = (job.w, B::F::LANES);
        let all = job.n.next_multiple_of(lanes);
        let (columns, groups) = (w.columns(), w.groups());
        let (row_words, row_groups) = (columns / 4, groups.next_multiple_of(8));
        self.rows.resize(row_words * all, 0);
        self.factors.resize(2 * row_groups * all, 0.0);
        self.panel.set_len(C::WORDS * row_words * all);
        self.scales.set_len(row_groups * all);
        self.biases.set_len(row_groups * all);
        if job.n < all {
            self.rows[job.n * row_words..].fill(0);
            self.factors.fill(0.0);
        }
        let (scales, biases) = self.factors.split_at_mut(row_groups * all);
        let rows = self.rows.chunks_exact_mut(row_words);
        let factors = scales
            .chunks_exact_mut(row_groups)
            .zip(biases.chunks_exact_mut(row_groups));
        for (row, (codes, (scales, biases))) in rows.zip(factors).enumerate().take(job.n) {
            let packed = w.row_words(job.first + row).as_ptr().cast();
            w.row_scales(job.first + row, &mut scales[..groups]);
            w.row_biases(job.first + row, &mut biases[..groups]);
            // Behind them is what an earlier matrix left, which would say whether this one is centred.
            scales[groups..].fill(0.0);
            biases[groups..].fill(0.0);
            // SAFETY: the words of a row hold its codes; bytes may be seen as words.
            unsafe {
                let codes = core::slice::from_raw_parts_mut(codes.as_mut_ptr().cast(), columns);
                row_codes(job.isa, w, packed, codes);
            }
        }
        let middle = -(middle(w) as f32);
        self.centred = scales
            .iter()
            .zip(&*biases)
            .all(|(scale, bias)| scale * middle == *bias);
        for vector in 0..all / lanes {
            // SAFETY: columns are multiples of 32, so that words of a row and groups as they are
            // here are multiples of 8; the panels have been made large enough.
            unsafe {
                let from = self.rows.as_ptr().add(vector * lanes * row_words);
                let to = self.panel.as_mut_ptr();
                let to = to.add(vector * C::WORDS * row_words * lanes);
                for k in (0..row_words).step_by(8) {
                    let to = to.add(C::WORDS * k * lanes);
                    B::transpose(from.add(k), row_words, to);
                    C::spread::<B>(to.cast());
                }
                let at = vector * row_groups * lanes;
                for (from, to) in [(&*scales, &mut self.scales), (&*biases, &mut self.biases)] {
                    let (from, to) = (from.as_ptr().add(at), to.as_mut_ptr().add(at));
                    for k in (0..row_groups).step_by(8) {
                        let to = to.add(k * lanes);
                        B::transpose(from.add(k).cast(), row_groups, to.cast());
                    }
                }
            }
        }
    }
}

/// What a panel looks like for activations of a type.
trait Panel: Activation {
    /// Words of a lane for four codes.
    const WORDS: usize;
    /// Spreads eight vectors of bytes at `panel` to what the dots take.
    unsafe fn spread<B: Bytes>(panel: *mut u8);
    /// Adds the products of a vector with a word of activations in all lanes.
    unsafe fn dot_all<B: Bytes>(acc: B::I, w: B::V, x: B::V, small: bool) -> B::I;
}

impl Panel for i8 {
    const WORDS: usize = 1;
    #[inline(always)]
    unsafe fn spread<B: Bytes>(_panel: *mut u8) {}
    #[inline(always)]
    unsafe fn dot_all<B: Bytes>(acc: B::I, w: B::V, x: B::V, small: bool) -> B::I {
        // SAFETY: forwarded to the caller.
        unsafe { B::dot(acc, w, x, small) }
    }
}

impl Panel for i16 {
    const WORDS: usize = 2;
    #[inline(always)]
    unsafe fn spread<B: Bytes>(panel: *mut u8) {
        let vector = 4 * B::F::LANES;
        // SAFETY: the caller vouches for sixteen vectors. From the last on, so that none is
        // overwritten before it is read.
        unsafe {
            for i in (0..8).rev() {
                let v = B::load(panel.add(i * vector));
                B::store(B::even_words(v), panel.add(2 * i * vector));
                B::store(B::odd_words(v), panel.add((2 * i + 1) * vector));
            }
        }
    }
    #[inline(always)]
    unsafe fn dot_all<B: Bytes>(acc: B::I, w: B::V, x: B::V, _small: bool) -> B::I {
        // SAFETY: forwarded to the caller.
        unsafe { B::dot_words(acc, w, x) }
    }
}

/// The code that stands for 0 where weights are centred.
fn middle(w: &QuantizedMatrix<'_>) -> i32 {
    match w.bias_factor() {
        middle if middle < 0.0 => -middle as i32,
        // Many a file has biases that say as much.
        _ => 1 << (w.bits() - 1),
    }
}

#[inline(always)]
unsafe fn kernel<B: Bytes, C: Panel>(job: Job<'_>, scratch: &mut Scratch) {
    // SAFETY: rows `first..first + n` exist; tiles cover the rows of `x` once.
    unsafe {
        scratch.fill::<B, C>(&job);
        if job.n > B::F::LANES {
            tiles::<B, C, 2>(&job, scratch);
        } else {
            tiles::<B, C, 1>(&job, scratch);
        }
    }
}

#[inline(always)]
unsafe fn tiles<B: Bytes, C: Panel, const N: usize>(job: &Job<'_>, scratch: &Scratch) {
    let halves = job.w.group() < QUANT_GROUP;
    let mut row = 0;
    while row < job.x.m {
        macro_rules! tile {
            ($size:literal) => {
                // SAFETY: forwarded to the caller.
                unsafe {
                    match (halves, scratch.centred) {
                        (false, true) => tile::<B, C, $size, N, false, true>(job, scratch, row),
                        (false, false) => tile::<B, C, $size, N, false, false>(job, scratch, row),
                        (true, true) => tile::<B, C, $size, N, true, true>(job, scratch, row),
                        (true, false) => tile::<B, C, $size, N, true, false>(job, scratch, row),
                    }
                    $size
                }
            };
        }
        row += match job.x.m - row {
            6.. if !halves => tile!(6),
            4.. => tile!(4),
            2.. => tile!(2),
            _ => tile!(1),
        };
    }
}

/// Products of `M` rows of `x` with `N` vectors of the panel. With `HALVES` weights have a scale for 16 elements.
///
/// What is the same for a whole weight stays out of the sums of f32: where weights are `CENTRED`, sums of integers begin
/// with what the middle of the codes takes away.
#[inline(always)]
unsafe fn tile<
    B: Bytes,
    C: Panel,
    const M: usize,
    const N: usize,
    const HALVES: bool,
    const CENTRED: bool,
>(
    job: &Job<'_>,
    scratch: &Scratch,
    row: usize,
) {
    let lanes = B::F::LANES;
    let columns = job.w.columns();
    let n_scales = columns / QUANT_GROUP;
    let (group, groups) = (job.w.group(), job.w.groups());
    let factors_stride = groups.next_multiple_of(8) * lanes;
    let halves = if HALVES { 2 } else { 1 };
    // SAFETY: the panel has all columns, the factors all groups; `x` has the rows.
    unsafe {
        let mut at = Part {
            panel: scratch.panel.as_ptr().cast::<u8>(),
            panel_stride: 4 * C::WORDS * (columns / 4) * lanes,
            x: C::codes(job.x).panel.as_ptr().add(row * columns),
            x_stride: columns,
            starts: job.x.factors.starts.as_ptr().add(row * n_scales * halves),
            starts_stride: n_scales * halves,
            small: job.w.bits() < 8,
        };
        let scales = job.x.factors.panel.as_ptr().add(row * n_scales);
        let sums = job.x.sums(group, row).as_ptr();
        let mut acc = [[B::F::zero(); N]; M];
        for i in 0..n_scales {
            let g = i * QUANT_GROUP / group;
            let factors = |of: &[f32], g: usize| {
                let of = of.as_ptr().wrapping_add(g * lanes);
                core::array::from_fn(|n| B::F::load(of.add(n * factors_stride)))
            };
            let weight_scales: [B::F; N] = factors(&scratch.scales, g);
            if HALVES {
                let mut parts = [[B::F::zero(); N]; M];
                let dots = at.dots::<B, M, N, 4, CENTRED>();
                for m in 0..M {
                    for n in 0..N {
                        parts[m][n] = B::to_f32(dots[m][n]).mul(weight_scales[n]);
                    }
                }
                let weight_scales: [B::F; N] = factors(&scratch.scales, g + 1);
                let dots = at.dots::<B, M, N, 4, CENTRED>();
                for m in 0..M {
                    let scale = B::F::splat(*scales.add(m * n_scales + i));
                    for n in 0..N {
                        let part = B::to_f32(dots[m][n]).mul_add(weight_scales[n], parts[m][n]);
                        acc[m][n] = part.mul_add(scale, acc[m][n]);
                    }
                }
            } else {
                let dots = at.dots::<B, M, N, 8, CENTRED>();
                for m in 0..M {
                    let scale = B::F::splat(*scales.add(m * n_scales + i));
                    for n in 0..N {
                        let scale = weight_scales[n].mul(scale);
                        acc[m][n] = B::to_f32(dots[m][n]).mul_add(scale, acc[m][n]);
                    }
                }
            }
            if CENTRED || !(i * QUANT_GROUP).is_multiple_of(group.max(QUANT_GROUP)) {
                continue;
            }
            for g in g..g + halves {
                let biases: [B::F; N] = factors(&scratch.biases, g);
                for m in 0..M {
                    let sum = B::F::splat(*sums.add(m * groups + g));
                    for n in 0..N {
                        acc[m][n] = biases[n].mul_add(sum, acc[m][n]);
                    }
                }
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            let to = job.y.add((row + m) * job.w.rows() + job.first);
            for (n, acc) in acc.iter().enumerate() {
                let left = job.n - n * lanes;
                if left >= lanes {
                    acc.store(to.add(n * lanes));
                } else {
                    acc.store_first(to.add(n * lanes), left);
                }
            }
        }
    }
}

/// Columns that have one scale.
struct Part<C> {
    panel: *const u8,
    /// Bytes between the vectors of a panel.
    panel_stride: usize,
    x: *const C,
    x_stride: usize,
    /// What sums of centred weights begin with.
    starts: *const i32,
    starts_stride: usize,
    small: bool,
}

impl<C: Panel> Part<C> {
    /// Products of `4 * FOURS` columns, which it goes past. Rows and vectors in turn, so that no sum waits for itself.
    #[inline(always)]
    unsafe fn dots<
        B: Bytes,
        const M: usize,
        const N: usize,
        const FOURS: usize,
        const CENTRED: bool,
    >(
        &mut self,
    ) -> [[B::I; N]; M] {
        // SAFETY: forwarded to the caller.
        unsafe {
            let mut dots = [[B::zero(); N]; M];
            if CENTRED {
                for m in 0..M {
                    let start = B::broadcast_sum(self.starts.add(m * self.starts_stride));
                    dots[m] = [start; N];
                }
            }
            for step in 0..FOURS * C::WORDS {
                let panel = self.panel.add(step * 4 * B::F::LANES);
                let w: [B::V; N] =
                    core::array::from_fn(|n| B::load(panel.add(n * self.panel_stride)));
                for m in 0..M {
                    let x = self.x.add(m * self.x_stride + 4 / C::WORDS * step);
                    let x = B::broadcast(x.cast());
                    for n in 0..N {
                        dots[m][n] = C::dot_all::<B>(dots[m][n], w[n], x, self.small);
                    }
                }
            }
            self.panel = self.panel.wrapping_add(FOURS * C::WORDS * 4 * B::F::LANES);
            self.x = self.x.wrapping_add(4 * FOURS);
            self.starts = self.starts.wrapping_add(1);
            dots
        }
    }
}

dispatch_bytes! {
    unsafe fn run[C: Panel][C](job: Job<'_>, scratch: &mut Scratch) = kernel
}

/// Rows of a panel.
fn panel_rows(isa: Isa, precision: Precision) -> usize {
    let vectors = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => crate::simd::bytes::Avx512VnniBytes::TILE_VECTORS,
        _ => 1,
    };
    qmatmul::lanes(isa, precision) * vectors
}

/// `y[m, rows] = x[m, columns] @ w.T` with rounded activations. False when a kernel panicked.
///
/// # Panics
/// When a slice is shorter than its shape, `precision` is exact, or `scratch` has fewer entries than
/// the pool threads.
#[must_use]
#[allow(
    clippy::too_many_arguments,
    reason = "operands, result and what is kept between calls"
)]
pub fn matmul(
    isa: Isa,
    precision: Precision,
    pool: &mut Pool,
    x: &[f32],
    w: &QuantizedMatrix<'_>,
    y: &mut [f32],
    prepared: &mut Prepared,
    scratch: &[Mutex<Scratch>],
) -> bool {
    matmul_all(
        (isa, precision),
        pool,
        x,
        &mut [Target { w: *w, y }],
        prepared,
        scratch,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmatmul::Target;
    use crate::quantized::testing::*;

    #[test]
    fn many_rows_give_what_few_rows_give() {
        let mut numbers = Numbers(41);
        let mut pool = Pool::new(2).unwrap();
        let scratch: Vec<Mutex<Scratch>> = (0..2).map(|_| Mutex::default()).collect();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (m, rows, columns, bits, group) in [
                (1, 1, 32, 4, 32),
                (13, 33, 96, 8, 32),
                (16, 16, 128, 4, 64),
                (9, 40, 256, 5, 128),
                (11, 17, 64, 2, 32),
                (10, 23, 192, 3, 64),
                (8, 19, 96, 6, 32),
                (7, 21, 96, 6, 16),
                (10, 35, 160, 3, 16),
                (15, 70, 544, 8, 16),
                (16, 32, 160, 4, 32),
            ] {
                for precision in [Precision::Int8, Precision::Int16] {
                    let parts = parts(&mut numbers, rows, columns, bits, group);
                    let w = parts.matrix(rows, columns, bits, group);
                    let x = numbers.floats(m * columns);
                    let (mut many, mut few) = (vec![f32::NAN; m * rows], vec![f32::NAN; m * rows]);
                    let mut prepared = Prepared::default();
                    assert!(matmul(
                        isa,
                        precision,
                        &mut pool,
                        &x,
                        &w,
                        &mut many,
                        &mut prepared,
                        &scratch
                    ));
                    let mut targets = [Target { w, y: &mut few }];
                    assert!(qmatmul::matmul(
                        isa,
                        precision,
                        &mut pool,
                        &x,
                        &mut targets,
                        &mut prepared
                    ));
                    for (a, b) in many.iter().zip(&few) {
                        let size = columns as f32 * f32::from(1u16 << bits);
                        assert!(
                            (a - b).abs() <= 1e-6 * size,
                            "{} {m} {rows} {bits}: {a} {b}",
                            isa.name()
                        );
                    }
                }
            }
        }
    }

    /// Centred weights with and without biases that say so, and weights that are centred but for one bias, of every size,
    /// with activations that rounding leaves as they are.
    #[test]
    fn centred_weights_match_f64() {
        let mut numbers = Numbers(47);
        let mut pool = Pool::new(2).unwrap();
        let scratch: Vec<Mutex<Scratch>> = (0..2).map(|_| Mutex::default()).collect();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (m, rows, columns, bits, group, exponent) in [
                (17, 70, 96, 5, 32, 0),
                (21, 33, 288, 6, 16, -60),
                (9, 40, 256, 8, 64, 60),
                (6, 31, 160, 3, 16, 40),
                (14, 64, 128, 4, 128, -40),
                (3, 5, 32, 2, 32, 0),
            ] {
                let size = 2f32.powi(exponent);
                let mut parts = parts(&mut numbers, rows, columns, bits, group);
                let middle = -((1 << (bits - 1)) as f32);
                parts.scales.iter_mut().for_each(|scale| *scale /= size);
                parts.biases = parts.scales.iter().map(|scale| scale * middle).collect();
                let scales = crate::Scales::F32(&parts.scales);
                let centred =
                    QuantizedMatrix::centred(&parts.words, scales, rows, columns, bits, group);
                let mut one_other = parts.biases.clone();
                one_other[rows * columns / group / 2] *= 1.5;
                let mut x: Vec<f32> = (0..m * columns)
                    .map(|_| (numbers.next() % 255) as f32 - 127.0)
                    .collect();
                x.chunks_exact_mut(QUANT_GROUP)
                    .for_each(|group| group[7] = 127.0);
                x.iter_mut().for_each(|x| *x *= size);
                for (how, w) in [
                    ("biases", parts.matrix(rows, columns, bits, group)),
                    ("none", centred.unwrap()),
                    ("one other", {
                        let biases = crate::Scales::F32(&one_other);
                        let words = &parts.words;
                        QuantizedMatrix::new(words, scales, biases, rows, columns, bits, group)
                            .unwrap()
                    }),
                ] {
                    let mut expanded = vec![0.0; rows * columns];
                    let mut factors = vec![0.0; 2 * columns / group];
                    for (row, out) in expanded.chunks_exact_mut(columns).enumerate() {
                        w.expand_row(row, &mut factors, out);
                    }
                    for (precision, error) in [(Precision::Int8, 1e-6), (Precision::Int16, 2e-5)] {
                        let mut y = vec![f32::NAN; m * rows];
                        let mut prepared = Prepared::default();
                        assert!(matmul(
                            isa,
                            precision,
                            &mut pool,
                            &x,
                            &w,
                            &mut y,
                            &mut prepared,
                            &scratch
                        ));
                        for (i, y) in y.iter().enumerate() {
                            let x = &x[i / rows * columns..][..columns];
                            let w = &expanded[i % rows * columns..][..columns];
                            let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                            let (want, sizes) =
                                terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                            let got = f64::from(*y);
                            assert!(
                                (got - want).abs() <= error * sizes.max(1.0),
                                "{} {precision:?} {how} {rows}x{columns} {bits}/{group}: {got} {want}",
                                isa.name()
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn not_a_number_and_infinity_stay_in_their_rows() {
        let mut numbers = Numbers(43);
        let mut pool = Pool::new(1).unwrap();
        let parts = parts(&mut numbers, 40, 64, 4, 32);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for precision in [Precision::Int8, Precision::Int16] {
                let mut x = numbers.floats(19 * 64);
                (x[3 * 64 + 40], x[17 * 64]) = (f32::NAN, f32::NEG_INFINITY);
                let mut y = vec![0.0; 19 * 40];
                assert!(matmul(
                    isa,
                    precision,
                    &mut pool,
                    &x,
                    &parts.matrix(40, 64, 4, 32),
                    &mut y,
                    &mut Prepared::default(),
                    &[Mutex::default()]
                ));
                for (row, y) in y.chunks_exact(40).enumerate() {
                    let is_bad = matches!(row, 3 | 17);
                    assert!(y.iter().all(|y| y.is_nan() == is_bad), "{row}");
                }
            }
        }
    }
}
