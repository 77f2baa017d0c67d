//! Products with many rows: `y = x @ w.T`, weights expanded panel by panel.
//!
//! A panel is a strip of output columns whose weights are expanded to f32 and laid out so that the
//! register tile reads them in order (Goto and van de Geijn 2008, without the blocking along K: a
//! panel of a transformer's K fits into the second-level cache). The cost of expanding is spread
//! over the rows of `x`. Panels are handed out to threads one by one.

use crate::Isa;
use crate::isa::dispatch;
use crate::pool::Pool;
use crate::quantized::QuantizedMatrix;
use crate::simd::Simd;

/// A weight `[rows, columns]` of any storage.
#[derive(Debug, Clone, Copy)]
pub enum Weight<'a> {
    /// Quantised.
    Quantized(QuantizedMatrix<'a>),
    /// f32, row-major.
    F32(&'a [f32]),
    /// Bits of f16, row-major.
    F16(&'a [u16]),
    /// Bits of bf16, row-major.
    Bf16(&'a [u16]),
}

impl Weight<'_> {
    /// Expands one row.
    fn expand_row(&self, row: usize, columns: usize, factors: &mut [f32], out: &mut [f32]) {
        let range = row * columns..(row + 1) * columns;
        match self {
            Self::Quantized(matrix) => matrix.expand_row(row, factors, out),
            Self::F32(w) => out.copy_from_slice(&w[range]),
            Self::F16(w) => crate::Scales::F16(&w[range]).read(0, out),
            Self::Bf16(w) => crate::Scales::Bf16(&w[range]).read(0, out),
        }
    }
}

/// Operands of a register tile: `c[m, n] = a[m, k] @ b[k, n]`, n at most two vectors wide.
#[derive(Clone, Copy)]
pub struct Tile {
    /// First element of a row-major matrix.
    pub a: *const f32,
    /// Row stride of `a`.
    pub lda: usize,
    /// First element of a row-major matrix.
    pub b: *const f32,
    /// Row stride of `b`.
    pub ldb: usize,
    /// Inner size.
    pub k: usize,
    /// Result.
    pub c: *mut f32,
    /// Row stride of `c`.
    pub ldc: usize,
    /// Columns, 1 to `2 * LANES`.
    pub n: usize,
    /// Adds to `c` instead of writing it.
    pub accumulate: bool,
}

/// Columns of a panel for an instruction set.
pub fn panel_width(isa: Isa) -> usize {
    match isa {
        Isa::Avx512 | Isa::Avx512Vnni => 32,
        _ => 16,
    }
}

#[inline(always)]
unsafe fn tile<S: Simd, const M: usize, const FULL: bool>(t: &Tile) {
    let first = if FULL { S::LANES } else { t.n.min(S::LANES) };
    let second = if FULL { S::LANES } else { t.n - first };
    // SAFETY: the caller vouches for M rows of `a` and `c`, k rows of `b` and n columns; partial
    // loads and stores touch n columns only.
    unsafe {
        let mut acc = [[S::zero(); 2]; M];
        for k in 0..t.k {
            let row = t.b.add(k * t.ldb);
            let (b0, b1) = if FULL {
                (S::load(row), S::load(row.add(S::LANES)))
            } else if second == 0 {
                (S::load_first(row, first), S::zero())
            } else {
                (S::load(row), S::load_first(row.add(S::LANES), second))
            };
            for (m, acc) in acc.iter_mut().enumerate() {
                let a = S::splat(*t.a.add(m * t.lda + k));
                acc[0] = a.mul_add(b0, acc[0]);
                acc[1] = a.mul_add(b1, acc[1]);
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            let row = t.c.add(m * t.ldc);
            for (half, (value, n)) in acc.iter().zip([first, second]).enumerate() {
                if n == 0 {
                    continue;
                }
                let to = row.add(half * S::LANES);
                if n == S::LANES {
                    let value = if t.accumulate {
                        value.add(S::load(to))
                    } else {
                        *value
                    };
                    value.store(to);
                } else {
                    let value = if t.accumulate {
                        value.add(S::load_first(to, n))
                    } else {
                        *value
                    };
                    value.store_first(to, n);
                }
            }
        }
    }
}

/// Runs tiles over `m` rows.
#[inline(always)]
pub(crate) unsafe fn rows_of_tiles<S: Simd>(t: Tile, m: usize) {
    let mut row = 0;
    while row < m {
        // SAFETY: rows `row..row + step` exist; the rest is the caller's business.
        unsafe {
            let at = Tile {
                a: t.a.add(row * t.lda),
                c: t.c.add(row * t.ldc),
                ..t
            };
            let full = t.n == 2 * S::LANES;
            macro_rules! sizes {
                ($($size:literal),*) => {
                    match (m - row).min(S::TILE_ROWS) {
                        $($size if full => { tile::<S, $size, true>(&at); $size })*
                        $($size => { tile::<S, $size, false>(&at); $size })*
                        _ => { tile::<S, 1, false>(&at); 1 }
                    }
                };
            }
            row += sizes!(12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2);
        }
    }
}

dispatch! {
    /// `c = a @ b` for a strip of at most two vectors of columns and any number of rows.
    ///
    /// # Safety
    /// The CPU has `isa`; `a` has `m` rows of `k`, `b` has `k` rows of `n`, `c` has `m` rows of `n`.
    pub unsafe fn strip(t: Tile, m: usize) = rows_of_tiles
}

/// Scratch of one thread, kept between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    rows: Vec<f32>,
    panel: Vec<f32>,
    factors: Vec<f32>,
}

/// Expands rows `first..first + n` of a weight into `scratch.panel`, `[columns, width]`.
fn fill_panel(
    weight: &Weight<'_>,
    first: usize,
    n: usize,
    columns: usize,
    width: usize,
    scratch: &mut Scratch,
) {
    let Scratch {
        rows,
        panel,
        factors,
    } = scratch;
    rows.resize(n * columns, 0.0);
    panel.resize(columns * width, 0.0);
    // Scales and biases of groups of 16 or more.
    factors.resize(columns / 16 * 2, 0.0);
    for (r, row) in rows.chunks_exact_mut(columns).enumerate() {
        weight.expand_row(first + r, columns, factors, row);
    }
    // Sixteen columns at a time, so that the lines being written stay in the first-level cache.
    for k0 in (0..columns).step_by(16) {
        let k1 = (k0 + 16).min(columns);
        for (r, row) in rows.chunks_exact(columns).enumerate() {
            for (k, x) in (k0..k1).zip(&row[k0..k1]) {
                panel[k * width + r] = *x;
            }
        }
    }
}

struct SendPtr(*mut f32);
// SAFETY: threads write disjoint columns of the result.
unsafe impl Sync for SendPtr {}

/// Operands of `y[m, rows] = x[m, columns] @ w.T`.
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    /// `[m, columns]`.
    pub x: &'a [f32],
    /// `[rows, columns]`.
    pub weight: Weight<'a>,
    /// Rows of the weight, columns of the result.
    pub rows: usize,
    /// Columns of both.
    pub columns: usize,
}

/// Computes a product into `y[m, rows]`. False when a kernel panicked.
///
/// # Panics
/// When a slice is shorter than its shape, or `scratch` has fewer entries than the pool threads.
#[must_use]
pub fn matmul(
    isa: Isa,
    pool: &mut Pool,
    product: &Product<'_>,
    y: &mut [f32],
    scratch: &[std::sync::Mutex<Scratch>],
) -> bool {
    let Product {
        x,
        weight,
        rows,
        columns,
    } = *product;
    let m = x.len() / columns.max(1);
    assert!(x.len() == m * columns && y.len() == m * rows && scratch.len() >= pool.threads());
    let width = panel_width(isa);
    let out = SendPtr(y.as_mut_ptr());
    let out = &out;
    pool.share(rows.div_ceil(width), &|thread, index| {
        let first = index * width;
        let n = width.min(rows - first);
        let mut scratch = scratch[thread]
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        fill_panel(&weight, first, n, columns, width, &mut scratch);
        let tile = Tile {
            a: x.as_ptr(),
            lda: columns,
            b: scratch.panel.as_ptr(),
            ldb: width,
            k: columns,
            // SAFETY: `first < rows`, so the pointer is inside `y`.
            c: unsafe { out.0.add(first) },
            ldc: rows,
            n,
            accumulate: false,
        };
        // SAFETY: `isa` was detected; shapes were checked above; columns of different panels are
        // disjoint.
        unsafe { strip(isa, tile, m) };
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::testing::*;
    use std::sync::Mutex;

    #[test]
    fn products_match_f64_on_ragged_shapes() {
        let mut numbers = Numbers(3);
        let scratch: Vec<Mutex<Scratch>> = (0..2).map(|_| Mutex::default()).collect();
        let mut pool = Pool::new(2).unwrap();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for (m, rows, columns, bits) in [
                (1, 1, 32, 4),
                (5, 17, 64, 4),
                (13, 33, 96, 8),
                (29, 70, 128, 3),
                (3, 5, 32, 6),
            ] {
                let parts = parts(&mut numbers, rows, columns, bits, 32);
                let weight = Weight::Quantized(parts.matrix(rows, columns, bits, 32));
                let x = numbers.floats(m * columns);
                let mut y = vec![f32::NAN; m * rows];
                assert!(matmul(
                    isa,
                    &mut pool,
                    &Product {
                        x: &x,
                        weight,
                        rows,
                        columns,
                    },
                    &mut y,
                    &scratch
                ));
                for i in 0..m {
                    for j in 0..rows {
                        let terms = (0..columns).map(|k| {
                            f64::from(x[i * columns + k]) * parts.element(j, k, columns, bits, 32)
                        });
                        let (want, scale) =
                            terms.fold((0.0, 0.0f64), |(s, a), t| (s + t, a + t.abs()));
                        let got = f64::from(y[i * rows + j]);
                        assert!(
                            (got - want).abs() <= 1e-5 * scale,
                            "{} {m}x{rows}x{columns}: {got} {want}",
                            isa.name()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn plain_weights_of_every_float_type_agree() {
        let mut numbers = Numbers(4);
        let scratch = [Mutex::default()];
        let mut pool = Pool::new(1).unwrap();
        let (m, rows, columns) = (4, 19, 40);
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
        let x = numbers.floats(m * columns);
        let results: Vec<Vec<f32>> = [Weight::F32(&w), Weight::F16(&f16), Weight::Bf16(&bf16)]
            .into_iter()
            .map(|weight| {
                let mut y = vec![0.0; m * rows];
                assert!(matmul(
                    Isa::best(),
                    &mut pool,
                    &Product {
                        x: &x,
                        weight,
                        rows,
                        columns,
                    },
                    &mut y,
                    &scratch
                ));
                y
            })
            .collect();
        assert_eq!(results[0], results[1]);
        assert_eq!(results[0], results[2]);
    }

    #[test]
    fn not_a_number_and_infinity_stay_in_their_rows() {
        let mut pool = Pool::new(1).unwrap();
        let w = vec![1.0f32; 20 * 32];
        let mut x = vec![1.0f32; 3 * 32];
        (x[5], x[32 + 7]) = (f32::NAN, f32::INFINITY);
        let mut y = vec![0.0; 3 * 20];
        assert!(matmul(
            Isa::best(),
            &mut pool,
            &Product {
                x: &x,
                weight: Weight::F32(&w),
                rows: 20,
                columns: 32
            },
            &mut y,
            &[Mutex::default()]
        ));
        assert!(y[..20].iter().all(|v| v.is_nan()));
        assert!(y[20..40].iter().all(|v| *v == f32::INFINITY));
        assert!(y[40..].iter().all(|v| *v == 32.0));
    }
}
