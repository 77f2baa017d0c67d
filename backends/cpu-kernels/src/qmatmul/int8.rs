//! Dot products of packed weights with activations of 8 bits: integers inside a group, f32 sums.

#![allow(
    clippy::needless_range_loop,
    reason = "rows and columns of register tiles are indices into several arrays at once"
)]

use super::prepare::Prepared;
use super::rows::{Path, Rows};
use crate::factor::{Factor, spread};
use crate::simd::Simd;
use crate::simd::bytes::Bytes;

/// Activations of 8 bits.
pub(crate) struct Int8<B>(core::marker::PhantomData<B>);

impl<B: Bytes> Path for Int8<B> {
    type F = B::F;

    #[inline(always)]
    unsafe fn nibbles<K: Factor, const R: usize, const M: usize>(
        t: &Rows<K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[B::F; M]; R] {
        let vector = 4 * B::F::LANES;
        // SAFETY: codes and scales of `x` are padded to whole blocks; see the blocks for the rest.
        unsafe {
            let activations = Activations {
                codes: x.q4.as_ptr().add(first * x.padded4).cast(),
                scales: x.s4.as_ptr().add(first * x.padded4 / 8),
                stride: x.padded4,
                scale_stride: x.padded4 / 8,
            };
            let places = B::F::places(((2 * vector) >> t.group_log2).max(1));
            let mut acc = [[B::F::zero(); M]; R];
            let whole = whole_bytes(t.groups, t.group_log2, t.row_bytes, vector, 2);
            let mut at = 0;
            while at < whole {
                nibble_block::<B, K, R, M, true>(t, &activations, places, at, &mut acc);
                at += vector;
            }
            while at < t.row_bytes {
                nibble_block::<B, K, R, M, false>(t, &activations, places, at, &mut acc);
                at += vector;
            }
            acc
        }
    }

    #[inline(always)]
    unsafe fn bytes<K: Factor, const R: usize, const M: usize>(
        t: &Rows<K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[B::F; M]; R] {
        let vector = 4 * B::F::LANES;
        // SAFETY: as above, with one code a byte.
        unsafe {
            let activations = Activations {
                codes: x.q.as_ptr().add(first * x.padded).cast(),
                scales: x.s.as_ptr().add(first * x.padded / 4),
                stride: x.padded,
                scale_stride: x.padded / 4,
            };
            let places = B::F::places((vector >> t.group_log2).max(1));
            let mut acc = [[B::F::zero(); M]; R];
            let whole = whole_bytes(t.groups, t.group_log2, t.row_bytes, vector, 1);
            let mut at = 0;
            while at < whole {
                byte_block::<B, K, R, M, true>(t, &activations, places, at, &mut acc);
                at += vector;
            }
            while at < t.row_bytes {
                byte_block::<B, K, R, M, false>(t, &activations, places, at, &mut acc);
                at += vector;
            }
            acc
        }
    }
}

/// Rows of activations.
struct Activations {
    codes: *const u8,
    scales: *const f32,
    stride: usize,
    scale_stride: usize,
}

/// Bytes of the leading vectors that are whole and whose first scale has three more behind it.
#[inline(always)]
fn whole_bytes(
    groups: usize,
    group_log2: u32,
    row_bytes: usize,
    vector: usize,
    per_byte: usize,
) -> usize {
    if groups < 4 {
        return 0;
    }
    let by_scales = ((groups - 4) << group_log2) / per_byte / vector * vector + vector;
    by_scales.min(row_bytes / vector * vector)
}

/// A vector of nibble pairs of `R` rows.
#[inline(always)]
unsafe fn nibble_block<B: Bytes, K: Factor, const R: usize, const M: usize, const WHOLE: bool>(
    t: &Rows<K, R>,
    x: &Activations,
    places: <B::F as Simd>::Places,
    at: usize,
    acc: &mut [[B::F; M]; R],
) {
    let vector = 4 * B::F::LANES;
    // SAFETY: a whole block is inside its row; of another the bytes that are left are loaded.
    unsafe {
        let group = (at * 2) >> t.group_log2;
        for r in 0..R {
            let from = t.bytes[r].add(at);
            B::F::prefetch(from.wrapping_add(t.ahead));
            let packed = if WHOLE || t.row_bytes - at >= vector {
                B::load(from)
            } else {
                B::load_first(from, t.row_bytes - at)
            };
            let (low, high) = (B::low(packed), B::high(packed));
            let scale = spread::<B::F, K, WHOLE>(t.scales[r], group, t.groups, places);
            for m in 0..M {
                let codes = x.codes.add(m * x.stride + at * 2);
                let dot = B::dot_small(B::zero(), low, B::load(codes));
                let dot = B::dot_small(dot, high, B::load(codes.add(vector)));
                let scale = scale.mul(B::F::load(x.scales.add(m * x.scale_stride + at / 4)));
                acc[r][m] = B::to_f32(dot).mul_add(scale, acc[r][m]);
            }
        }
    }
}

/// A vector of codes of `R` rows.
#[inline(always)]
unsafe fn byte_block<B: Bytes, K: Factor, const R: usize, const M: usize, const WHOLE: bool>(
    t: &Rows<K, R>,
    x: &Activations,
    places: <B::F as Simd>::Places,
    at: usize,
    acc: &mut [[B::F; M]; R],
) {
    let vector = 4 * B::F::LANES;
    // SAFETY: as above.
    unsafe {
        for r in 0..R {
            let from = t.bytes[r].add(at);
            B::F::prefetch(from.wrapping_add(t.ahead));
            let w = if WHOLE || t.row_bytes - at >= vector {
                B::load(from)
            } else {
                B::load_first(from, t.row_bytes - at)
            };
            let group = at >> t.group_log2;
            let scale = spread::<B::F, K, WHOLE>(t.scales[r], group, t.groups, places);
            for m in 0..M {
                let codes = B::load(x.codes.add(m * x.stride + at));
                let dot = B::dot(B::zero(), w, codes, t.small);
                let scale = scale.mul(B::F::load(x.scales.add(m * x.scale_stride + at / 4)));
                acc[r][m] = B::to_f32(dot).mul_add(scale, acc[r][m]);
            }
        }
    }
}
