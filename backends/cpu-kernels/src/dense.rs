//! Products of few rows with a plain weight, f32 or half: each weight is read once for all rows of `x`.

use crate::Isa;
use crate::factor::{Bf16, F16, Factor};
use crate::gemm::Weight;
use crate::isa::dispatch;
use crate::pool::Pool;
use crate::simd::Simd;

/// Most rows of `x` that this path takes; beyond them `gemm` is faster.
pub const MAX_ROWS: usize = 8;

struct Job<'a, K> {
    x: &'a [f32],
    w: *const K,
    rows: usize,
    columns: usize,
    first: usize,
    last: usize,
    y: *mut f32,
}

#[inline(always)]
unsafe fn rows_of<S: Simd, K: Factor, const R: usize, const M: usize>(
    job: &Job<'_, K>,
    row: usize,
) {
    let (columns, w, x) = (job.columns, job.w, job.x.as_ptr());
    // SAFETY: rows `row..row + R` and M rows of `x` exist (checked by `matmul`).
    unsafe {
        let mut acc = [[S::zero(); M]; R];
        let mut k = 0;
        while k < columns {
            let left = (columns - k).min(S::LANES);
            let mut xs = [S::zero(); M];
            for (m, xs) in xs.iter_mut().enumerate() {
                *xs = <f32 as Factor>::load(x.add(m * columns + k), left);
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let w = K::load::<S>(w.add((row + r) * columns + k), left);
                for m in 0..M {
                    acc[m] = w.mul_add(xs[m], acc[m]);
                }
            }
            k += S::LANES;
        }
        for (r, acc) in acc.iter().enumerate() {
            for (m, sum) in acc.iter().enumerate() {
                *job.y.add(m * job.rows + row + r) = sum.sum();
            }
        }
    }
}

#[inline(always)]
unsafe fn share_of<S: Simd, K: Factor, const M: usize>(job: &Job<'_, K>) {
    let mut row = job.first;
    // SAFETY: forwarded to the caller.
    unsafe {
        while row + 4 <= job.last {
            rows_of::<S, K, 4, M>(job, row);
            row += 4;
        }
        while row < job.last {
            rows_of::<S, K, 1, M>(job, row);
            row += 1;
        }
    }
}

#[inline(always)]
unsafe fn kernel<S: Simd, K: Factor>(job: &Job<'_, K>) {
    // SAFETY: forwarded to the caller.
    unsafe {
        match job.x.len() / job.columns {
            1 => share_of::<S, K, 1>(job),
            2 => share_of::<S, K, 2>(job),
            3 => share_of::<S, K, 3>(job),
            4 => share_of::<S, K, 4>(job),
            5 => share_of::<S, K, 5>(job),
            6 => share_of::<S, K, 6>(job),
            7 => share_of::<S, K, 7>(job),
            _ => share_of::<S, K, 8>(job),
        }
    }
}

dispatch! {
    unsafe fn run[K: Factor][K](job: &Job<'_, K>) = kernel
}

struct SendPtr(*mut f32);
// SAFETY: threads write disjoint columns of the result.
unsafe impl Sync for SendPtr {}

/// Whether this path takes a product of `m` rows with a weight.
pub fn takes(m: usize, w: &Weight<'_>) -> bool {
    (1..=MAX_ROWS).contains(&m) && !matches!(w, Weight::Quantized(_))
}

/// `y[m, rows] = x[m, columns] @ w.T` for what [`takes`] says. False when a kernel panicked.
///
/// # Panics
/// When shapes do not fit.
#[must_use]
pub fn matmul(
    isa: Isa,
    pool: &mut Pool,
    x: &[f32],
    w: Weight<'_>,
    [rows, columns]: [usize; 2],
    y: &mut [f32],
) -> bool {
    let m = x.len() / columns.max(1);
    let len = match w {
        Weight::F32(w) => w.len(),
        Weight::F16(w) | Weight::Bf16(w) => w.len(),
        Weight::Quantized(_) => 0,
    };
    assert!(takes(m, &w) && x.len() == m * columns && len == rows * columns && y.len() == m * rows);
    let out = SendPtr(y.as_mut_ptr());
    let out = &out;
    pool.split(rows, 4, 20_000 / columns + 1, &|range| {
        macro_rules! share {
            ($w:expr) => {{
                let job = Job {
                    x,
                    w: $w,
                    rows,
                    columns,
                    first: range.start,
                    last: range.end,
                    y: out.0,
                };
                // SAFETY: `isa` was detected; shapes were checked; ranges of threads are disjoint.
                unsafe { run(isa, &job) }
            }};
        }
        match w {
            Weight::F32(w) => share!(w.as_ptr()),
            Weight::F16(w) => share!(w.as_ptr().cast::<F16>()),
            Weight::Bf16(w) => share!(w.as_ptr().cast::<Bf16>()),
            Weight::Quantized(_) => {}
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::testing::Numbers;

    #[test]
    fn products_match_f64_on_ragged_shapes() {
        let mut numbers = Numbers(21);
        let mut pool = Pool::new(2).unwrap();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for m in 1..=MAX_ROWS {
                for (rows, columns) in [(1, 1), (7, 33), (10, 64), (401, 80)] {
                    let x = numbers.floats(m * columns);
                    // Numbers that every type has.
                    let w: Vec<f32> = numbers
                        .floats(rows * columns)
                        .iter()
                        .map(|w| (w * 64.0).round() / 64.0)
                        .collect();
                    let f16: Vec<u16> = w
                        .iter()
                        .map(|w| half::f16::from_f32(*w).to_bits())
                        .collect();
                    let bf16: Vec<u16> = w
                        .iter()
                        .map(|w| half::bf16::from_f32(*w).to_bits())
                        .collect();
                    let mut y = vec![f32::NAN; m * rows];
                    assert!(matmul(
                        isa,
                        &mut pool,
                        &x,
                        Weight::F32(&w),
                        [rows, columns],
                        &mut y
                    ));
                    for half in [Weight::F16(&f16), Weight::Bf16(&bf16)] {
                        let mut same = vec![f32::NAN; m * rows];
                        assert!(matmul(isa, &mut pool, &x, half, [rows, columns], &mut same));
                        assert_eq!(same, y);
                    }
                    for i in 0..m {
                        for j in 0..rows {
                            let want: f64 = (0..columns)
                                .map(|k| {
                                    f64::from(x[i * columns + k]) * f64::from(w[j * columns + k])
                                })
                                .sum();
                            assert!(
                                (f64::from(y[i * rows + j]) - want).abs() < 1e-5 * columns as f64
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn not_a_number_stays_in_its_row() {
        let mut numbers = Numbers(22);
        let mut pool = Pool::new(1).unwrap();
        let w: Vec<u16> = (0..6 * 50)
            .map(|_| half::f16::from_f32(numbers.unit()).to_bits())
            .collect();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let mut x = numbers.floats(3 * 50);
            (x[49], x[120]) = (f32::NAN, f32::INFINITY);
            let mut y = vec![0.0; 3 * 6];
            assert!(matmul(isa, &mut pool, &x, Weight::F16(&w), [6, 50], &mut y));
            assert!(y[..6].iter().all(|y| y.is_nan()));
            assert!(y[6..12].iter().all(|y| y.is_finite()));
            assert!(y[12..].iter().all(|y| y.is_infinite()));
        }
    }
}
