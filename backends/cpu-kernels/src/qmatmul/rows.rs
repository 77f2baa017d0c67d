//! One thread's share of a product: rows of the weight four by four, rows of `x` up to four at a
//! time, so that a weight is read from memory once for all rows of `x`.

use super::codes;
use super::factor::Factor;
use super::prepare::Prepared;
use crate::quantized::QuantizedMatrix;
use crate::simd::Simd;

/// Rows of the weight that share the loads of `x`.
pub(crate) const QUAD: usize = 4;

/// Farthest prefetch, in bytes: long rows are followed by the hardware.
const FARTHEST: usize = 1024;

/// `R` rows of a weight.
pub(crate) struct Rows<K, const R: usize> {
    /// First byte of each row: packed nibbles, or one code a byte.
    pub(crate) bytes: [*const u8; R],
    /// First scale of each row.
    pub(crate) scales: [*const K; R],
    /// Bytes of a row.
    pub(crate) row_bytes: usize,
    /// Groups of a row.
    pub(crate) groups: usize,
    /// Binary logarithm of the elements of a group.
    pub(crate) group_log2: u32,
    /// Distance of the prefetch in bytes.
    pub(crate) ahead: usize,
}

/// The inner loops: sums over lanes are left to the caller.
pub(crate) trait Path {
    /// Vectors of the sums.
    type F: Simd;
    /// 4 bits. Rows `first..first + M` of `x`.
    unsafe fn nibbles<K: Factor, const R: usize, const M: usize>(
        t: &Rows<K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[Self::F; M]; R];
    /// One code a byte; `SMALL` says that codes are below 128.
    unsafe fn bytes<K: Factor, const R: usize, const M: usize, const SMALL: bool>(
        t: &Rows<K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[Self::F; M]; R];
}

/// `y[m, row] for row in first..last`.
#[derive(Clone, Copy)]
pub(crate) struct Share<'a> {
    pub(crate) w: &'a QuantizedMatrix<'a>,
    pub(crate) x: &'a Prepared,
    pub(crate) first: usize,
    pub(crate) last: usize,
    /// `[m, stride]`; the weight's row 0 writes to column 0.
    pub(crate) y: *mut f32,
    pub(crate) stride: usize,
}

/// Runs a share with scales of type `K`.
///
/// # Safety
/// The CPU has the path's instruction set; rows `first..last` exist and belong to this thread; `x`
/// was prepared for this form of weight; `y` has a column for each row.
#[inline(always)]
pub(crate) unsafe fn run<P: Path, K: Factor>(
    share: &Share<'_>,
    scales: *const K,
    biases: *const K,
) {
    let w = share.w;
    let bits = w.bits();
    let mut scratch = if matches!(bits, 4 | 8) {
        Vec::new()
    } else {
        vec![0u8; QUAD * w.columns()]
    };
    let packed_bytes = w.columns() * bits / 8;
    let mut row = share.first;
    while row < share.last {
        let n = (share.last - row).min(QUAD);
        // SAFETY: rows `row..row + n` exist.
        unsafe {
            let packed = w.words().as_ptr().cast::<u8>().add(row * packed_bytes);
            let (bytes, row_bytes, ahead) = if scratch.is_empty() {
                (packed, packed_bytes, (QUAD * packed_bytes).min(FARTHEST))
            } else {
                for (r, out) in scratch.chunks_exact_mut(w.columns()).enumerate().take(n) {
                    P::F::prefetch(packed.wrapping_add((r + QUAD) * packed_bytes));
                    codes::expand::<P::F>(packed.add(r * packed_bytes), bits, out);
                }
                (scratch.as_ptr(), w.columns(), 0)
            };
            let at = Quad {
                share,
                row,
                bytes,
                row_bytes,
                ahead,
                scales: scales.add(row * w.groups()),
                biases: biases.add(row * w.groups()),
            };
            if n == QUAD {
                at.rows_of_x::<P, QUAD>(0);
            } else {
                for r in 0..n {
                    at.rows_of_x::<P, 1>(r);
                }
            }
        }
        row += n;
    }
}

/// Up to four rows of the weight.
struct Quad<'a, K> {
    share: &'a Share<'a>,
    row: usize,
    bytes: *const u8,
    row_bytes: usize,
    ahead: usize,
    scales: *const K,
    biases: *const K,
}

impl<K: Factor> Quad<'_, K> {
    #[inline(always)]
    unsafe fn rows_of_x<P: Path, const R: usize>(&self, skip: usize) {
        let m = self.share.x.m;
        let mut first = 0;
        // SAFETY: forwarded to the caller of `run`.
        unsafe {
            while first + 4 <= m {
                self.products::<P, R, 4>(skip, first);
                first += 4;
            }
            match m - first {
                3 => self.products::<P, R, 3>(skip, first),
                2 => self.products::<P, R, 2>(skip, first),
                1 => self.products::<P, R, 1>(skip, first),
                _ => {}
            }
        }
    }

    #[inline(always)]
    unsafe fn products<P: Path, const R: usize, const M: usize>(&self, skip: usize, first: usize) {
        let (w, x) = (self.share.w, self.share.x);
        let groups = w.groups();
        let mut rows = Rows {
            bytes: [self.bytes; R],
            scales: [self.scales; R],
            row_bytes: self.row_bytes,
            groups,
            group_log2: w.group().trailing_zeros(),
            ahead: self.ahead,
        };
        // SAFETY: rows `row + skip..row + skip + R` exist; see `run` for the rest.
        unsafe {
            for r in 0..R {
                rows.bytes[r] = self.bytes.add((skip + r) * self.row_bytes);
                rows.scales[r] = self.scales.add((skip + r) * groups);
                P::F::prefetch(rows.scales[r].wrapping_add(QUAD * groups).cast());
                let biases = self.biases.wrapping_add((skip + r + QUAD) * groups);
                P::F::prefetch(biases.cast());
            }
            let mut acc = match w.bits() {
                4 => P::nibbles::<K, R, M>(&rows, x, first),
                8 => P::bytes::<K, R, M, false>(&rows, x, first),
                _ => P::bytes::<K, R, M, true>(&rows, x, first),
            };
            let lanes = P::F::LANES;
            let mut g = 0;
            while g < groups {
                let n = (groups - g).min(lanes);
                let mut sums = [P::F::zero(); M];
                for m in 0..M {
                    let from = x.sums(w.group(), first + m).as_ptr().add(g);
                    sums[m] = if n == lanes {
                        P::F::load(from)
                    } else {
                        P::F::load_first(from, n)
                    };
                }
                for r in 0..R {
                    let from = self.biases.add((skip + r) * groups + g);
                    let bias = K::load::<P::F>(from, n);
                    for m in 0..M {
                        acc[r][m] = bias.mul_add(sums[m], acc[r][m]);
                    }
                }
                g += lanes;
            }
            for m in 0..M {
                let y = self
                    .share
                    .y
                    .add((first + m) * self.share.stride + self.row + skip);
                if R == 4 {
                    let four = P::F::sum4([acc[0][m], acc[R / 3][m], acc[R / 2][m], acc[R - 1][m]]);
                    y.cast::<[f32; 4]>().write_unaligned(four);
                } else {
                    for (r, acc) in acc.iter().enumerate() {
                        *y.add(r) = acc[m].sum();
                    }
                }
            }
        }
    }
}
