//! Products with many rows and activations of 8 bits: `y = x @ w.T`.
//!
//! A panel is as many rows of the weight as a vector has lanes, its codes laid out so that a lane
//! holds four neighbours of one row. A step broadcasts four neighbours of `x` to all lanes, so that
//! sums never cross lanes. Integers within [`QUANT_GROUP`] elements, f32 beyond.

#![allow(
    clippy::needless_range_loop,
    reason = "rows and columns of register tiles are indices into several arrays at once"
)]

use std::sync::{Mutex, PoisonError};

use crate::Isa;
use crate::isa::dispatch_bytes;
use crate::pool::Pool;
use crate::qmatmul::{self, Precision, Prepared, QUANT_GROUP, expand_codes};
use crate::quantized::QuantizedMatrix;
use crate::simd::Simd;
use crate::simd::bytes::Bytes;

/// Scratch of one thread, kept between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    rows: Vec<u8>,
    /// `[columns / 4][LANES]` words of four codes.
    panel: Vec<u32>,
    /// `[groups][LANES]`.
    scales: Vec<f32>,
    biases: Vec<f32>,
    factors: Vec<f32>,
}

/// A panel's product with all rows of `x`.
struct Job<'a> {
    isa: Isa,
    w: &'a QuantizedMatrix<'a>,
    x: &'a Prepared,
    /// First row of the weight.
    first: usize,
    /// Rows of the weight, at most the lanes.
    n: usize,
    /// `[m, rows]`.
    y: *mut f32,
}

impl Scratch {
    /// Lays out rows `first..first + n` for vectors of `lanes`; lanes beyond `n` are 0.
    #[inline(always)]
    unsafe fn fill<S: Simd>(&mut self, isa: Isa, w: &QuantizedMatrix<'_>, first: usize, n: usize) {
        let (columns, groups, lanes) = (w.columns(), w.groups(), S::LANES);
        self.rows.resize(columns, 0);
        self.panel.clear();
        self.panel.resize(columns / 4 * lanes, 0);
        for factors in [&mut self.scales, &mut self.biases] {
            factors.clear();
            factors.resize(groups * lanes, 0.0);
        }
        self.factors.resize(groups, 0.0);
        for lane in 0..n {
            let row = first + lane;
            let words = w.row_words(row);
            // SAFETY: the words of a row hold its codes.
            unsafe { expand_codes(isa, words.as_ptr().cast(), w.bits(), &mut self.rows) };
            let places = self.panel.iter_mut().skip(lane).step_by(lanes);
            for (four, place) in self.rows.as_chunks::<4>().0.iter().zip(places) {
                *place = u32::from_ne_bytes(*four);
            }
            w.row_scales(row, &mut self.factors);
            let places = self.scales.iter_mut().skip(lane).step_by(lanes);
            places.zip(&self.factors).for_each(|(to, from)| *to = *from);
            w.row_biases(row, &mut self.factors);
            let places = self.biases.iter_mut().skip(lane).step_by(lanes);
            places.zip(&self.factors).for_each(|(to, from)| *to = *from);
        }
    }
}

#[inline(always)]
unsafe fn kernel<B: Bytes>(job: Job<'_>, scratch: &mut Scratch) {
    // SAFETY: rows `first..first + n` exist; tiles cover the rows of `x` once.
    unsafe {
        scratch.fill::<B::F>(job.isa, job.w, job.first, job.n);
        let mut row = 0;
        while row < job.x.m {
            macro_rules! sizes {
                ($($size:literal),*) => {
                    match job.x.m - row {
                        $(left if left >= $size => { tile::<B, $size>(&job, scratch, row); $size })*
                        _ => { tile::<B, 1>(&job, scratch, row); 1 }
                    }
                };
            }
            row += sizes!(8, 4, 2);
        }
    }
}

#[inline(always)]
unsafe fn tile<B: Bytes, const M: usize>(job: &Job<'_>, scratch: &Scratch, row: usize) {
    let lanes = B::F::LANES;
    let columns = job.w.columns();
    let parts = job.w.group() / QUANT_GROUP;
    let n_scales = columns / QUANT_GROUP;
    let (groups, small) = (job.w.groups(), job.w.bits() < 8);
    // SAFETY: the panel has `columns / 4` vectors, the factors `groups`; `x` has the rows.
    unsafe {
        let codes = job.x.codes().as_ptr().add(row * columns);
        let scales = job.x.scales().as_ptr().add(row * n_scales);
        let sums = job.x.sums(job.w.group(), row).as_ptr();
        let panel = scratch.panel.as_ptr().cast::<u8>();
        let mut acc = [B::F::zero(); M];
        for group in 0..groups {
            let scale = B::F::load(scratch.scales.as_ptr().add(group * lanes));
            for part in group * parts..(group + 1) * parts {
                let at = part * QUANT_GROUP;
                let panel = panel.add(at * lanes);
                let w: [B::V; 8] = [
                    B::load(panel),
                    B::load(panel.add(4 * lanes)),
                    B::load(panel.add(8 * lanes)),
                    B::load(panel.add(12 * lanes)),
                    B::load(panel.add(16 * lanes)),
                    B::load(panel.add(20 * lanes)),
                    B::load(panel.add(24 * lanes)),
                    B::load(panel.add(28 * lanes)),
                ];
                for m in 0..M {
                    let x = codes.add(m * columns + at);
                    let mut dot = B::zero();
                    for (j, w) in w.iter().enumerate() {
                        let x = B::broadcast(x.add(4 * j));
                        dot = B::dot(dot, *w, x, small);
                    }
                    let scale = scale.mul(B::F::splat(*scales.add(m * n_scales + part)));
                    acc[m] = B::to_f32(dot).mul_add(scale, acc[m]);
                }
            }
            let bias = B::F::load(scratch.biases.as_ptr().add(group * lanes));
            for m in 0..M {
                acc[m] = bias.mul_add(B::F::splat(*sums.add(m * groups + group)), acc[m]);
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            let to = job.y.add((row + m) * job.w.rows() + job.first);
            if job.n == lanes {
                acc.store(to);
            } else {
                acc.store_first(to, job.n);
            }
        }
    }
}

dispatch_bytes! {
    unsafe fn run(job: Job<'_>, scratch: &mut Scratch) = kernel
}

struct SendPtr(*mut f32);
// SAFETY: panels write disjoint columns of the result.
unsafe impl Sync for SendPtr {}

/// `y[m, rows] = x[m, columns] @ w.T` with activations rounded to 8 bits. False when a kernel panicked.
///
/// # Panics
/// When a slice is shorter than its shape, or `scratch` has fewer entries than the pool threads.
#[must_use]
pub fn matmul(
    isa: Isa,
    pool: &mut Pool,
    x: &[f32],
    w: &QuantizedMatrix<'_>,
    y: &mut [f32],
    prepared: &mut Prepared,
    scratch: &[Mutex<Scratch>],
) -> bool {
    let m = x.len() / w.columns();
    assert!(x.len() == m * w.columns() && y.len() == m * w.rows());
    assert!(scratch.len() >= pool.threads());
    prepared.round(isa, x, w.columns(), w.group());
    let lanes = qmatmul::lanes(isa, Precision::Int8);
    let out = SendPtr(y.as_mut_ptr());
    let (out, prepared) = (&out, &*prepared);
    pool.share(w.rows().div_ceil(lanes), &|thread, index| {
        let first = index * lanes;
        let job = Job {
            isa,
            w,
            x: prepared,
            first,
            n: lanes.min(w.rows() - first),
            y: out.0,
        };
        let mut scratch = scratch[thread]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `isa` was detected; shapes were checked; columns of panels are disjoint.
        unsafe { run(isa, job, &mut scratch) };
    })
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
            ] {
                let parts = parts(&mut numbers, rows, columns, bits, group);
                let w = parts.matrix(rows, columns, bits, group);
                let x = numbers.floats(m * columns);
                let (mut many, mut few) = (vec![f32::NAN; m * rows], vec![f32::NAN; m * rows]);
                let mut prepared = Prepared::default();
                assert!(matmul(
                    isa,
                    &mut pool,
                    &x,
                    &w,
                    &mut many,
                    &mut prepared,
                    &scratch
                ));
                let mut targets = [Target { w, y: &mut few }];
                let precision = Precision::Int8;
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
