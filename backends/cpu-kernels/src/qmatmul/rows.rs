//! One thread's share of a product: rows of the weight four by four, rows of `x` up to four at a
//! time, so that a weight is read from memory once for all rows of `x`.

#![allow(
    clippy::needless_range_loop,
    reason = "rows and columns of register tiles are indices into several arrays at once"
)]

use super::codes::Unpacker;
use super::exact::Exact;
use super::integers::{Activation, Integers};
use super::mxfp4;
use super::prepare::{Precision, Prepared};
use super::row_codes;
#[cfg(target_arch = "x86_64")]
use super::{pairs, quads};
use crate::Isa;
use crate::factor::Factor;
use crate::isa::{dispatch, dispatch_bytes};
use crate::quantized::QuantizedMatrix;
use crate::simd::Simd;
use crate::simd::bytes::Bytes;

/// Rows of the weight that share the loads of `x`.
pub(crate) const QUAD: usize = 4;

/// `R` rows of a weight.
pub(crate) struct Rows<'a, K, const R: usize> {
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
    /// Whether codes are below 128.
    pub(crate) small: bool,
    /// Distance of the prefetch in bytes.
    pub(crate) ahead: usize,
    /// Whether a row of four scales or more lies behind these.
    pub(crate) has_next: bool,
    /// For codes that are neither nibbles nor bytes and come out of their packed form in registers.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "other processors have none")
    )]
    pub(crate) unpacker: Option<&'a Unpacker>,
    /// Whether codes are of mxfp4 and come out of their nibbles in registers.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "other processors have none")
    )]
    pub(crate) floats: bool,
}

impl<K, const R: usize> Rows<'_, K, R> {
    /// One of them.
    #[inline(always)]
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn row(&self, r: usize) -> Rows<'_, K, 1> {
        Rows {
            bytes: [self.bytes[r]],
            scales: [self.scales[r]],
            row_bytes: self.row_bytes,
            groups: self.groups,
            group_log2: self.group_log2,
            small: self.small,
            ahead: self.ahead,
            has_next: self.has_next || (r + 1 < R && self.groups >= 4),
            unpacker: self.unpacker,
            floats: self.floats,
        }
    }

    /// Bytes of a row, of `a_byte` codes each, in leading vectors of `vector` bytes that are whole and whose first scale
    /// has three more behind it, be they of the next row.
    #[inline(always)]
    pub(crate) fn whole(&self, row_bytes: usize, vector: usize, a_byte: usize) -> usize {
        let whole = row_bytes / vector * vector;
        if self.has_next {
            return whole;
        }
        if self.groups < 4 {
            return 0;
        }
        let by_scales = ((self.groups - 4) << self.group_log2) / a_byte / vector * vector + vector;
        by_scales.min(whole)
    }
}

/// The inner loops: sums over lanes are left to the caller.
pub(crate) trait Path {
    /// Vectors of the sums.
    type F: Simd;
    /// 4 bits. Rows `first..first + M` of `x`.
    unsafe fn nibbles<K: Factor, const R: usize, const M: usize>(
        t: &Rows<'_, K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[Self::F; M]; R];
    /// One code a byte.
    unsafe fn bytes<K: Factor, const R: usize, const M: usize>(
        t: &Rows<'_, K, R>,
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
/// The CPU has `isa`; rows `first..last` exist and belong to this thread; `x` was prepared for this
/// form of weight, instruction set and precision; `y` has a column for each row.
pub(crate) unsafe fn run<K: Factor>(
    isa: Isa,
    precision: Precision,
    share: &Share<'_>,
    scales: *const K,
    biases: *const K,
) {
    let w = share.w;
    let bits = w.bits();
    let floats = w.is_mxfp4() && mxfp4::in_registers(isa, precision);
    let has_nibbles = w.reads_nibbles(precision);
    let is_plain = has_nibbles || bits == 8 || floats;
    let unpacker = match precision {
        Precision::Exact => None,
        _ if is_plain || w.is_mxfp4() => None,
        _ => Unpacker::in_registers(isa, bits),
    };
    let mut scratch = if is_plain || unpacker.is_some() {
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
                (packed, packed_bytes, QUAD * packed_bytes)
            } else {
                // The codes of the next rows come from memory while these are computed with.
                for line in (0..QUAD * packed_bytes).step_by(64) {
                    prefetch(isa, packed.wrapping_add(QUAD * packed_bytes + line));
                }
                for (r, out) in scratch.chunks_exact_mut(w.columns()).enumerate().take(n) {
                    row_codes(isa, w, packed.add(r * packed_bytes), out);
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
                unpacker,
                floats,
            };
            if has_nibbles {
                at.all::<true>(isa, precision, n);
            } else {
                at.all::<false>(isa, precision, n);
            }
        }
        row += n;
    }
}

/// Up to four rows of the weight.
pub(crate) struct Quad<'a, K> {
    share: &'a Share<'a>,
    row: usize,
    bytes: *const u8,
    row_bytes: usize,
    ahead: usize,
    scales: *const K,
    biases: *const K,
    unpacker: Option<&'a Unpacker>,
    floats: bool,
}

impl<K: Factor> Quad<'_, K> {
    /// Products of `n` rows with all rows of `x`.
    unsafe fn all<const NIBBLES: bool>(&self, isa: Isa, precision: Precision, n: usize) {
        let m = self.share.x.m;
        // SAFETY: forwarded to the caller of `run`.
        unsafe {
            if n < QUAD {
                for (r, first) in (0..n).flat_map(|r| (0..m).map(move |first| (r, first))) {
                    self.some::<NIBBLES, 1, 1>(isa, precision, r, first);
                }
                return;
            }
            let mut first = 0;
            #[cfg(target_arch = "x86_64")]
            while !NIBBLES && quads::takes(isa, precision) && first + 8 <= m {
                quads::products::<K, 2, 8>(self, 0, first);
                quads::products::<K, 2, 8>(self, 2, first);
                first += 8;
            }
            while first + 4 <= m {
                self.some::<NIBBLES, QUAD, 4>(isa, precision, 0, first);
                first += 4;
            }
            if first + 2 <= m {
                self.some::<NIBBLES, QUAD, 2>(isa, precision, 0, first);
                first += 2;
            }
            if first < m {
                self.some::<NIBBLES, QUAD, 1>(isa, precision, 0, first);
            }
        }
    }

    #[inline]
    unsafe fn some<const NIBBLES: bool, const R: usize, const M: usize>(
        &self,
        isa: Isa,
        precision: Precision,
        skip: usize,
        first: usize,
    ) {
        // SAFETY: forwarded to the caller of `run`.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if !NIBBLES && pairs::takes(isa, precision) {
                match precision {
                    Precision::Int8 => quads::products::<K, R, M>(self, skip, first),
                    _ => pairs::products::<K, i16, R, M>(self, skip, first),
                }
                return;
            }
            match precision {
                Precision::Exact => exact::<K, NIBBLES, R, M>(isa, self, skip, first),
                Precision::Int16 => integers::<K, i16, NIBBLES, R, M>(isa, self, skip, first),
                Precision::Int8 => integers::<K, i8, NIBBLES, R, M>(isa, self, skip, first),
            }
        }
    }
}

#[inline(always)]
unsafe fn prefetch_kernel<S: Simd>(at: *const u8) {
    // SAFETY: forwarded to the caller.
    unsafe { S::prefetch(at) }
}
dispatch! {
    unsafe fn prefetch(at: *const u8) = prefetch_kernel
}

dispatch! {
    unsafe fn exact[K: Factor, const NIBBLES: bool, const R: usize, const M: usize][K, NIBBLES, R, M](
        quad: &Quad<'_, K>, skip: usize, first: usize
    ) = exact_products
}
dispatch_bytes! {
    unsafe fn integers[K: Factor, C: Activation, const NIBBLES: bool, const R: usize, const M: usize][K, C, NIBBLES, R, M](
        quad: &Quad<'_, K>, skip: usize, first: usize
    ) = integer_products
}

#[inline(always)]
unsafe fn exact_products<S: Simd, K: Factor, const N: bool, const R: usize, const M: usize>(
    quad: &Quad<'_, K>,
    skip: usize,
    first: usize,
) {
    // SAFETY: forwarded to the caller.
    unsafe { products::<Exact<S>, K, N, R, M>(quad, skip, first) }
}

#[inline(always)]
unsafe fn integer_products<B, K, C, const N: bool, const R: usize, const M: usize>(
    quad: &Quad<'_, K>,
    skip: usize,
    first: usize,
) where
    B: Bytes,
    K: Factor,
    C: Activation,
{
    // SAFETY: forwarded to the caller.
    unsafe { products::<Integers<B, C>, K, N, R, M>(quad, skip, first) }
}

/// `R` rows of the weight from `skip` on with `M` rows of `x` from `first` on.
#[inline(always)]
pub(crate) unsafe fn products<
    P: Path,
    K: Factor,
    const NIBBLES: bool,
    const R: usize,
    const M: usize,
>(
    quad: &Quad<'_, K>,
    skip: usize,
    first: usize,
) {
    let (w, x) = (quad.share.w, quad.share.x);
    let groups = w.groups();
    let mut rows = Rows {
        bytes: [quad.bytes; R],
        scales: [quad.scales; R],
        groups,
        group_log2: w.group().trailing_zeros(),
        small: w.bits() < 8,
        row_bytes: quad.row_bytes,
        ahead: quad.ahead,
        has_next: groups >= 4 && quad.row + skip + R < w.rows(),
        unpacker: quad.unpacker,
        floats: quad.floats,
    };
    // SAFETY: rows `row + skip..row + skip + R` exist; see `run` for the rest.
    unsafe {
        for r in 0..R {
            rows.bytes[r] = quad.bytes.add((skip + r) * quad.row_bytes);
            rows.scales[r] = quad.scales.add((skip + r) * groups);
            P::F::prefetch(rows.scales[r].wrapping_add(QUAD * groups).cast());
            let biases = quad.biases.wrapping_add((skip + r + QUAD) * groups);
            P::F::prefetch(biases.cast());
        }
        let mut acc = if NIBBLES {
            P::nibbles::<K, R, M>(&rows, x, first)
        } else {
            P::bytes::<K, R, M>(&rows, x, first)
        };
        let lanes = P::F::LANES;
        let factor = P::F::splat(w.bias_factor());
        // Nibbles that are numbers have their signs.
        let mut g = if NIBBLES && K::IS_OF_FLOATS {
            groups
        } else {
            0
        };
        while g < groups {
            let n = (groups - g).min(lanes);
            let mut sums = [P::F::zero(); M];
            for m in 0..M {
                let from = x.sums(w.group(), first + m).as_ptr().add(g);
                sums[m] = <f32 as Factor>::load::<P::F>(from, n);
            }
            for r in 0..R {
                let bias = K::load::<P::F>(quad.biases.add((skip + r) * groups + g), n).mul(factor);
                for m in 0..M {
                    acc[r][m] = bias.mul_add(sums[m], acc[r][m]);
                }
            }
            g += lanes;
        }
        if R == 2 && M.is_multiple_of(2) {
            // As below, so that a row gives the same in any company.
            for m in (0..M).step_by(2) {
                let of = [acc[0][m], acc[R - 1][m], acc[0][m + 1], acc[R - 1][m + 1]];
                let [a, b, c, d] = P::F::sum4(of);
                for (m, two) in [(m, [a, b]), (m + 1, [c, d])] {
                    let y = quad.share.y.add((first + m) * quad.share.stride);
                    let y = y.add(quad.row + skip);
                    y.cast::<[f32; 2]>().write_unaligned(two);
                }
            }
            return;
        }
        for m in 0..M {
            let y = quad
                .share
                .y
                .add((first + m) * quad.share.stride + quad.row + skip);
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
