//! Quantised products with few rows (decode): each weight is read once from memory and used for
//! all rows of `x`, without being expanded to memory.
//!
//! 4 bits: a vector of words holds eight nibbles a lane, so the rows of `x` are laid out once per
//! call as `[block][nibble][lane]`, and every step is shift, table look-up, multiply-add. 8 bits:
//! bytes are converted in order. Biases enter through the sums of `x` over each group:
//! `y = sum_g scale_g * sum(q x) + bias_g * sum(x)`.

use crate::Isa;
use crate::isa::dispatch;
use crate::pool::Pool;
use crate::quantized::QuantizedMatrix;
use crate::simd::Simd;

/// Most rows of `x` that this path takes; beyond them `gemm` is faster.
pub const MAX_ROWS: usize = 8;

/// Rows of the weight that share the loads of `x`.
const QUAD: usize = 4;

/// Rows of `x` prepared for the kernel, and its scratch.
#[derive(Debug, Default)]
pub struct Prepared {
    /// 4 bits: `[m][block][8][LANES]`; 8 bits: as given.
    x: Vec<f32>,
    /// `[m][groups]`.
    sums: Vec<f32>,
    padded: usize,
    m: usize,
}

fn lanes(isa: Isa) -> usize {
    match isa {
        Isa::Avx512 => 16,
        _ => 8,
    }
}

impl Prepared {
    /// Lays out `[m, columns]` for a matrix of this form.
    fn fill(&mut self, isa: Isa, x: &[f32], columns: usize, bits: usize, group: usize) {
        let lanes = lanes(isa);
        self.m = x.len() / columns;
        self.sums.clear();
        self.sums
            .extend(x.chunks_exact(group).map(|g| g.iter().sum::<f32>()));
        self.x.clear();
        if bits != 4 {
            self.padded = columns;
            self.x.extend_from_slice(x);
            return;
        }
        let block = 8 * lanes;
        self.padded = columns.next_multiple_of(block);
        self.x.resize(self.m * self.padded, 0.0);
        for (row, out) in x
            .chunks_exact(columns)
            .zip(self.x.chunks_exact_mut(self.padded))
        {
            for (x, out) in row.chunks(block).zip(out.chunks_exact_mut(block)) {
                for (i, x) in x.iter().enumerate() {
                    out[(i % 8) * lanes + i / 8] = *x;
                }
            }
        }
    }
}

/// Arguments of the kernel: `y[i, row] for row in first..last`, one thread's share.
#[derive(Clone, Copy)]
struct Job<'a> {
    w: &'a QuantizedMatrix<'a>,
    x: &'a Prepared,
    first: usize,
    last: usize,
    y: *mut f32,
}

/// Dot products of `R` weight rows with `M` rows of `x`, 4 bits.
#[inline(always)]
unsafe fn rows4<S: Simd, const R: usize, const M: usize>(
    job: &Job<'_>,
    row: usize,
    scales: &[f32],
    stride: usize,
) -> [[f32; M]; R] {
    let (w, x) = (job.w, job.x);
    let block = 8 * S::LANES;
    let per_block = (block / w.group()).max(1);
    let words: [&[u32]; R] = core::array::from_fn(|r| w.row_words(row + r));
    let n_words = words[0].len();
    // SAFETY: full loads stay inside a row; the last, partial block loads the words that are left;
    // `x` is padded to whole blocks and `scales` by four values.
    unsafe {
        let mut acc = [[S::zero(); M]; R];
        let mut at = 0;
        while at < n_words {
            let left = n_words - at;
            let packed: [S; R] = core::array::from_fn(|r| {
                let from = words[r].as_ptr().add(at);
                if left >= S::LANES {
                    S::load_words(from)
                } else {
                    S::load_first(from.cast(), left)
                }
            });
            let mut part = [[S::zero(); M]; R];
            macro_rules! nibbles {
                ($($j:literal)*) => {$(
                    let xs: [S; M] = core::array::from_fn(|m| S::load(x.x.as_ptr().add(m * x.padded + at * 8 + $j * S::LANES)));
                    for r in 0..R {
                        let q = S::nibble::<$j>(packed[r]);
                        for m in 0..M {
                            part[r][m] = q.mul_add(xs[m], part[r][m]);
                        }
                    }
                )*};
            }
            nibbles!(0 1 2 3 4 5 6 7);
            let group = at * 8 / w.group();
            for r in 0..R {
                let scale = S::spread(scales.as_ptr().add(r * stride + group), per_block);
                for m in 0..M {
                    acc[r][m] = part[r][m].mul_add(scale, acc[r][m]);
                }
            }
            at += S::LANES;
        }
        acc.map(|row| row.map(|v| v.sum()))
    }
}

/// The same for 8 bits.
#[inline(always)]
unsafe fn rows8<S: Simd, const R: usize, const M: usize>(
    job: &Job<'_>,
    row: usize,
    scales: &[f32],
    stride: usize,
) -> [[f32; M]; R] {
    let (w, x) = (job.w, job.x);
    let bytes: [*const u8; R] = core::array::from_fn(|r| w.row_words(row + r).as_ptr().cast());
    // SAFETY: groups are multiples of 32 elements, hence of every vector's lanes.
    unsafe {
        let mut acc = [[S::zero(); M]; R];
        for group in 0..w.groups() {
            let first = group * w.group();
            let mut part = [[S::zero(); M]; R];
            for at in (first..first + w.group()).step_by(S::LANES) {
                let xs: [S; M] =
                    core::array::from_fn(|m| S::load(x.x.as_ptr().add(m * x.padded + at)));
                for r in 0..R {
                    let q = S::load_u8(bytes[r].add(at));
                    for m in 0..M {
                        part[r][m] = q.mul_add(xs[m], part[r][m]);
                    }
                }
            }
            for r in 0..R {
                let scale = S::splat(*scales.as_ptr().add(r * stride + group));
                for m in 0..M {
                    acc[r][m] = part[r][m].mul_add(scale, acc[r][m]);
                }
            }
        }
        acc.map(|row| row.map(|v| v.sum()))
    }
}

/// Sum of products of two rows of groups.
#[inline(always)]
unsafe fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let n = a.len().min(b.len());
    // SAFETY: the caller upholds the trait's contract, and loads stay below n.
    unsafe {
        let mut acc = S::zero();
        let mut i = 0;
        while i + S::LANES <= n {
            acc = S::load(a.as_ptr().add(i)).mul_add(S::load(b.as_ptr().add(i)), acc);
            i += S::LANES;
        }
        if i < n {
            acc = S::load_first(a.as_ptr().add(i), n - i)
                .mul_add(S::load_first(b.as_ptr().add(i), n - i), acc);
        }
        acc.sum()
    }
}

#[inline(always)]
unsafe fn share_of<S: Simd, const M: usize>(job: &Job<'_>) {
    let groups = job.w.groups();
    // Four spare values behind each row of scales: `spread` reads four.
    let stride = groups + 4;
    let mut scales = vec![0.0f32; QUAD * stride];
    let mut biases = vec![0.0f32; groups];
    let mut row = job.first;
    while row < job.last {
        let quad = (job.last - row).min(QUAD);
        for r in 0..quad {
            job.w
                .row_scales(row + r, &mut scales[r * stride..r * stride + groups]);
        }
        let mut sums = [[0.0f32; M]; QUAD];
        // SAFETY: rows `row..row + quad` exist; the kernels' own conditions hold for a checked matrix.
        unsafe {
            let four = job.w.bits() == 4;
            if quad == QUAD {
                sums = if four {
                    rows4::<S, QUAD, M>(job, row, &scales, stride)
                } else {
                    rows8::<S, QUAD, M>(job, row, &scales, stride)
                };
            } else {
                for r in 0..quad {
                    let at = &scales[r * stride..];
                    let one = if four {
                        rows4::<S, 1, M>(job, row + r, at, stride)
                    } else {
                        rows8::<S, 1, M>(job, row + r, at, stride)
                    };
                    sums[r] = one[0];
                }
            }
            for (r, sums) in sums.iter().enumerate().take(quad) {
                job.w.row_biases(row + r, &mut biases);
                for (m, sum) in sums.iter().enumerate() {
                    let bias = dot::<S>(&biases, &job.x.sums[m * groups..(m + 1) * groups]);
                    *job.y.add(m * job.w.rows() + row + r) = sum + bias;
                }
            }
        }
        row += quad;
    }
}

#[inline(always)]
unsafe fn kernel<S: Simd>(job: Job<'_>) {
    // SAFETY: forwarded to the caller.
    unsafe {
        match job.x.m {
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
// SAFETY: threads write disjoint rows of the weight, hence disjoint columns of `y`.
unsafe impl Sync for SendPtr {}

/// Whether this path takes a product of `m` rows with a matrix of this form.
pub fn takes(m: usize, bits: usize) -> bool {
    (1..=MAX_ROWS).contains(&m) && matches!(bits, 4 | 8)
}

/// `y[m, rows] = x[m, columns] @ w.T` for m up to [`MAX_ROWS`], 4 or 8 bits. False when a kernel
/// panicked.
///
/// # Panics
/// When shapes do not fit or the form is not one that [`takes`] says.
#[must_use]
pub fn matmul(
    isa: Isa,
    pool: &mut Pool,
    x: &[f32],
    w: &QuantizedMatrix<'_>,
    y: &mut [f32],
    prepared: &mut Prepared,
) -> bool {
    let m = x.len() / w.columns();
    assert!(takes(m, w.bits()) && x.len() == m * w.columns() && y.len() == m * w.rows());
    prepared.fill(isa, x, w.columns(), w.bits(), w.group());
    let out = SendPtr(y.as_mut_ptr());
    let (out, prepared) = (&out, &*prepared);
    // Below some tens of thousands of weights waking the others costs more than the work.
    let serial_below = 40_000 / w.columns() + 1;
    pool.split(w.rows(), QUAD, serial_below, &|range| {
        let job = Job {
            w,
            x: prepared,
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
    use crate::quantized::testing::*;

    #[test]
    fn products_match_f64_for_every_row_count_form_and_instruction_set() {
        let mut numbers = Numbers(9);
        let mut pool = Pool::new(2).unwrap();
        let mut prepared = Prepared::default();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for m in 1..=MAX_ROWS {
                for (rows, columns, bits, group) in [
                    (9, 32, 4, 32),
                    (6, 576, 4, 32),
                    (5, 192, 4, 64),
                    (4, 384, 4, 128),
                    (7, 96, 8, 32),
                    (3, 256, 8, 128),
                ] {
                    let parts = parts(&mut numbers, rows, columns, bits, group);
                    let w = parts.matrix(rows, columns, bits, group);
                    let x = numbers.floats(m * columns);
                    let mut y = vec![f32::NAN; m * rows];
                    assert!(matmul(isa, &mut pool, &x, &w, &mut y, &mut prepared));
                    for i in 0..m {
                        for j in 0..rows {
                            let terms = (0..columns).map(|k| {
                                f64::from(x[i * columns + k])
                                    * parts.element(j, k, columns, bits, group)
                            });
                            let want: f64 = terms.sum();
                            // Scale and bias are split apart, so the error is relative to their sums.
                            let size: f64 = (0..columns)
                                .map(|k| f64::from(x[i * columns + k]).abs())
                                .sum::<f64>()
                                * f64::from(1u32 << bits);
                            let got = f64::from(y[i * rows + j]);
                            assert!(
                                (got - want).abs() <= 2e-6 * size,
                                "{} {m} {rows}x{columns} {bits}/{group}: {got} {want}",
                                isa.name()
                            );
                        }
                    }
                }
            }
        }
    }
}
