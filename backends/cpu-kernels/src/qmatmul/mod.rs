//! Quantised products with few rows (decode): each weight is read once from memory and used for
//! all rows of `x`, without being expanded to memory.
//!
//! Biases enter through the sums of `x` over each group:
//! `y = sum_g scale_g * sum(q x) + bias_g * sum(x)`.

mod codes;
mod exact;
mod grouped;
mod integers;
mod joint;
pub(crate) mod mxfp4;
mod order;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod prepare;
#[cfg(target_arch = "x86_64")]
mod quads;
mod round;
#[cfg(target_arch = "x86_64")]
mod round_avx512;
mod rows;
#[cfg(test)]
mod tests;

use crate::Isa;
use crate::factor::{Bf16, F16};
use crate::pool::Pool;
use crate::quantized::{QuantizedMatrix, Scales};
pub use grouped::{AfterAll, matmul_grouped};
pub(crate) use integers::Activation;
pub use joint::{After, Division, Results, matmul_then};
pub(crate) use prepare::lanes;
pub use prepare::{Precision, Prepared};
pub(crate) use round::Needs;
pub use round::QUANT_GROUP;
use rows::{QUAD, Share};

/// Most rows of `x` that this path takes; beyond them `gemm` is faster.
pub const MAX_ROWS: usize = 16;

/// Runs a share in the type of its scales. The parts of a matrix have one type, or are refused by
/// [`matmul`].
unsafe fn run(isa: Isa, precision: Precision, share: &Share<'_>) {
    // SAFETY: forwarded to the caller; `F16` and `Bf16` are transparent over their bits.
    unsafe {
        match (share.w.scales(), share.w.biases()) {
            (Scales::F16(s), Scales::F16(b)) => {
                let (s, b) = (s.as_ptr().cast::<F16>(), b.as_ptr().cast::<F16>());
                rows::run(isa, precision, share, s, b);
            }
            (Scales::Bf16(s), Scales::Bf16(b)) => {
                let (s, b) = (s.as_ptr().cast::<Bf16>(), b.as_ptr().cast::<Bf16>());
                rows::run(isa, precision, share, s, b);
            }
            (Scales::F32(s), Scales::F32(b)) => {
                rows::run(isa, precision, share, s.as_ptr(), b.as_ptr());
            }
            (Scales::E8m0(exponents), _) => mxfp4::run(isa, precision, share, exponents),
            _ => {}
        }
    }
}

/// A row's codes, a byte each.
///
/// # Safety
/// The row's packed codes are readable at `from`, and the CPU has the instruction set.
pub(crate) unsafe fn row_codes(isa: Isa, w: &QuantizedMatrix<'_>, from: *const u8, out: &mut [u8]) {
    // SAFETY: forwarded to the caller.
    unsafe {
        match w.is_mxfp4() {
            true => mxfp4::spread_codes(isa, from, out),
            false => codes::expand_row(isa, from, w.bits(), out),
        }
    }
}

struct SendPtr(*mut f32);
// SAFETY: threads write disjoint rows of the weight, hence disjoint columns of `y`.
unsafe impl Sync for SendPtr {}

/// Whether this path takes a product of `m` rows with a matrix.
pub fn takes(m: usize, w: &QuantizedMatrix<'_>) -> bool {
    (1..=MAX_ROWS).contains(&m) && w.has_one_type()
}

/// A weight and where its product goes: `[m, rows]`.
#[derive(Debug)]
pub struct Target<'a> {
    /// The weight.
    pub w: QuantizedMatrix<'a>,
    /// `x @ w.T`.
    pub y: &'a mut [f32],
}

/// `y = x @ w.T` for several weights of one `x[m, columns]`, m up to [`MAX_ROWS`], in one go. False
/// when a kernel panicked.
///
/// # Panics
/// When shapes do not fit or a form is not one that [`takes`] says.
#[must_use]
pub fn matmul(
    isa: Isa,
    precision: Precision,
    pool: &mut Pool,
    x: &[f32],
    targets: &mut [Target<'_>],
    prepared: &mut Prepared,
) -> bool {
    let Some(columns) = targets.first().map(|t| t.w.columns()) else {
        return true;
    };
    let m = x.len() / columns;
    let mut needs = Needs::default();
    let mut total = 0;
    for t in targets.iter() {
        assert!(takes(m, &t.w) && t.w.columns() == columns && t.y.len() == m * t.w.rows());
        needs.add(&t.w, precision);
        total += t.w.rows().next_multiple_of(QUAD);
    }
    assert!(x.len() == m * columns);
    if !prepared.fill(isa, precision, pool, x, columns, needs) {
        return false;
    }
    let outs: Vec<SendPtr> = targets
        .iter_mut()
        .map(|t| SendPtr(t.y.as_mut_ptr()))
        .collect();
    let (outs, targets, prepared) = (&outs, &*targets, &*prepared);
    // Below some tens of thousands of weights waking the others costs more than the work.
    let serial_below = 40_000 / columns + 1;
    pool.split(total, QUAD, serial_below, &|range| {
        let mut start = 0;
        for (t, out) in targets.iter().zip(outs) {
            let rows = t.w.rows();
            let share = Share {
                w: &t.w,
                x: prepared,
                first: range.start.saturating_sub(start).min(rows),
                last: range.end.saturating_sub(start).min(rows),
                y: out.0,
                stride: rows,
            };
            start += rows.next_multiple_of(QUAD);
            if share.first >= share.last {
                continue;
            }
            // SAFETY: `isa` was detected; shapes were checked; ranges of threads are disjoint.
            unsafe { run(isa, precision, &share) };
        }
    })
}
