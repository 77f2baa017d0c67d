//! Products of few rows with a plain f32 weight: each weight is read once for all rows of `x`.

use crate::Isa;
use crate::isa::dispatch;
use crate::pool::Pool;
use crate::simd::Simd;

/// Most rows of `x` that this path takes; beyond them `gemm` is faster.
pub const MAX_ROWS: usize = 8;

#[derive(Clone, Copy)]
struct Job<'a> {
    x: &'a [f32],
    w: &'a [f32],
    rows: usize,
    columns: usize,
    first: usize,
    last: usize,
    y: *mut f32,
}

#[inline(always)]
unsafe fn rows_of<S: Simd, const R: usize, const M: usize>(job: &Job<'_>, row: usize) {
    let (columns, w, x) = (job.columns, job.w.as_ptr(), job.x.as_ptr());
    // SAFETY: rows `row..row + R` and M rows of `x` exist (checked by `matmul`).
    unsafe {
        let mut acc = [[S::zero(); M]; R];
        let mut k = 0;
        while k < columns {
            let left = (columns - k).min(S::LANES);
            let load = |from: *const f32| {
                if left == S::LANES {
                    S::load(from)
                } else {
                    S::load_first(from, left)
                }
            };
            let xs: [S; M] = core::array::from_fn(|m| load(x.add(m * columns + k)));
            for (r, acc) in acc.iter_mut().enumerate() {
                let w = load(w.add((row + r) * columns + k));
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
unsafe fn share_of<S: Simd, const M: usize>(job: &Job<'_>) {
    let mut row = job.first;
    // SAFETY: forwarded to the caller.
    unsafe {
        while row + 4 <= job.last {
            rows_of::<S, 4, M>(job, row);
            row += 4;
        }
        while row < job.last {
            rows_of::<S, 1, M>(job, row);
            row += 1;
        }
    }
}

#[inline(always)]
unsafe fn kernel<S: Simd>(job: Job<'_>) {
    // SAFETY: forwarded to the caller.
    unsafe {
        match job.x.len() / job.columns {
            1 => share_of::<S, 1>(&job),
            2 => share_of::<S, 2>(&job),
            3 => share_of::<S, 3>(&job),
            4 => share_of::<S, 4>(&job),
            5 => share_of::<S, 5>(&job),
            6 => share_of::<S, 6>(&job),
            7 => share_of::<S, 7>(&job),
            _ => share_of::<S, 8>(&job),
        }
    }
}

dispatch! {
    unsafe fn run(job: Job<'_>) = kernel
}

struct SendPtr(*mut f32);
// SAFETY: threads write disjoint columns of the result.
unsafe impl Sync for SendPtr {}

/// `y[m, rows] = x[m, columns] @ w.T` for m up to [`MAX_ROWS`]. False when a kernel panicked.
///
/// # Panics
/// When shapes do not fit.
#[must_use]
pub fn matmul(
    isa: Isa,
    pool: &mut Pool,
    x: &[f32],
    w: &[f32],
    rows: usize,
    columns: usize,
    y: &mut [f32],
) -> bool {
    let m = x.len() / columns.max(1);
    assert!(
        (1..=MAX_ROWS).contains(&m)
            && x.len() == m * columns
            && w.len() == rows * columns
            && y.len() == m * rows
    );
    let out = SendPtr(y.as_mut_ptr());
    let out = &out;
    pool.split(rows, 4, 20_000 / columns + 1, &|range| {
        let job = Job {
            x,
            w,
            rows,
            columns,
            first: range.start,
            last: range.end,
            y: out.0,
        };
        // SAFETY: `isa` was detected; shapes were checked; ranges of threads are disjoint.
        unsafe { run(isa, job) };
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
                    let (x, w) = (numbers.floats(m * columns), numbers.floats(rows * columns));
                    let mut y = vec![f32::NAN; m * rows];
                    assert!(matmul(isa, &mut pool, &x, &w, rows, columns, &mut y));
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
}
