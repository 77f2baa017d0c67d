//! Dot products of packed weights with activations of 8 or 16 bits: integers inside a group, f32 sums.

#![allow(
    clippy::needless_range_loop,
    reason = "rows and columns of register tiles are indices into several arrays at once"
)]

use super::prepare::Prepared;
use super::round::{Code, Codes};
use super::rows::{Path, Rows};
use crate::factor::{Factor, spread};
use crate::simd::Simd;
use crate::simd::bytes::Bytes;

/// Activations of type `C`.
pub(crate) struct Integers<B, C>(core::marker::PhantomData<(B, C)>);

/// How a vector of packed weights meets its activations.
pub(crate) trait Activation: Code {
    /// The codes of this type.
    fn codes(x: &Prepared) -> &Codes<Self>;
    /// Plane `plane` of packed nibbles.
    unsafe fn nibbles<B: Bytes>(packed: B::V, plane: usize) -> B::V;
    /// Plane `plane` of bytes.
    unsafe fn bytes<B: Bytes>(packed: B::V, plane: usize) -> B::V;
    /// Adds the products of a plane with one of activations at `x`; `small` says that codes are below
    /// 128.
    unsafe fn dot<B: Bytes>(acc: B::I, w: B::V, x: *const u8, small: bool) -> B::I;
}

impl Activation for i8 {
    #[inline(always)]
    fn codes(x: &Prepared) -> &Codes<i8> {
        &x.int8
    }
    #[inline(always)]
    unsafe fn nibbles<B: Bytes>(packed: B::V, plane: usize) -> B::V {
        // SAFETY: forwarded to the caller, here and below.
        unsafe {
            match plane {
                0 => B::low(packed),
                _ => B::high(packed),
            }
        }
    }
    #[inline(always)]
    unsafe fn bytes<B: Bytes>(packed: B::V, _plane: usize) -> B::V {
        packed
    }
    #[inline(always)]
    unsafe fn dot<B: Bytes>(acc: B::I, w: B::V, x: *const u8, small: bool) -> B::I {
        // SAFETY: as above.
        unsafe { B::dot(acc, w, B::load(x), small) }
    }
}

impl Activation for i16 {
    #[inline(always)]
    fn codes(x: &Prepared) -> &Codes<i16> {
        &x.int16
    }
    #[inline(always)]
    unsafe fn nibbles<B: Bytes>(packed: B::V, plane: usize) -> B::V {
        // SAFETY: as above.
        unsafe {
            match plane {
                0 => B::nibble_words::<0>(packed),
                1 => B::nibble_words::<1>(packed),
                2 => B::nibble_words::<2>(packed),
                _ => B::nibble_words::<3>(packed),
            }
        }
    }
    #[inline(always)]
    unsafe fn bytes<B: Bytes>(packed: B::V, plane: usize) -> B::V {
        // SAFETY: as above.
        unsafe {
            match plane {
                0 => B::even_words(packed),
                _ => B::odd_words(packed),
            }
        }
    }
    #[inline(always)]
    unsafe fn dot<B: Bytes>(acc: B::I, w: B::V, x: *const u8, _small: bool) -> B::I {
        // SAFETY: as above.
        unsafe { B::dot_words(acc, w, B::load(x)) }
    }
}

impl<B: Bytes, C: Activation> Path for Integers<B, C> {
    type F = B::F;

    #[inline(always)]
    unsafe fn nibbles<K: Factor, const R: usize, const M: usize>(
        t: &Rows<'_, K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[B::F; M]; R] {
        let padded = x.sizes.padded4;
        // SAFETY: codes and scales of `x` are padded to whole blocks.
        unsafe {
            let activations = Activations {
                codes: C::codes(x).four.as_ptr().add(first * padded).cast(),
                scales: x.factors.four.as_ptr().add(first * padded / 8),
                stride: padded * size_of::<C>(),
                scale_stride: padded / 8,
            };
            sums::<B, C, K, R, M, true>(t, &activations)
        }
    }

    #[inline(always)]
    unsafe fn bytes<K: Factor, const R: usize, const M: usize>(
        t: &Rows<'_, K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[B::F; M]; R] {
        let padded = x.sizes.padded;
        // SAFETY: as above.
        unsafe {
            let activations = Activations {
                codes: C::codes(x).bytes.as_ptr().add(first * padded).cast(),
                scales: x.factors.bytes.as_ptr().add(first * padded / 4),
                stride: padded * size_of::<C>(),
                scale_stride: padded / 4,
            };
            sums::<B, C, K, R, M, false>(t, &activations)
        }
    }
}

/// Rows of activations; strides in bytes and in scales.
struct Activations {
    codes: *const u8,
    scales: *const f32,
    stride: usize,
    scale_stride: usize,
}

/// Sums over whole rows, abreast.
#[inline(always)]
unsafe fn sums<B, C, K, const R: usize, const M: usize, const NIBBLES: bool>(
    t: &Rows<'_, K, R>,
    x: &Activations,
) -> [[B::F; M]; R]
where
    B: Bytes,
    C: Activation,
    K: Factor,
{
    let (vector, a_byte) = (4 * B::F::LANES, if NIBBLES { 2 } else { 1 });
    // SAFETY: see `block`.
    unsafe {
        let places = B::F::places(((a_byte * vector) >> t.group_log2).max(1));
        let mut acc = [[B::F::zero(); M]; R];
        // Bytes of a row once every code but a nibble has one.
        let row_bytes = (t.groups << t.group_log2) / a_byte;
        let whole = t.whole(row_bytes, vector, a_byte);
        let mut at = 0;
        while at < whole {
            block::<B, C, K, R, M, NIBBLES, true>(t, x, places, at, vector, &mut acc);
            at += vector;
        }
        while at < row_bytes {
            let n = (row_bytes - at).min(vector);
            block::<B, C, K, R, M, NIBBLES, false>(t, x, places, at, n, &mut acc);
            at += vector;
        }
        acc
    }
}

/// A vector of packed codes of `R` rows.
#[inline(always)]
unsafe fn block<
    B: Bytes,
    C: Activation,
    K: Factor,
    const R: usize,
    const M: usize,
    const NIBBLES: bool,
    const WHOLE: bool,
>(
    t: &Rows<'_, K, R>,
    x: &Activations,
    places: <B::F as Simd>::Places,
    at: usize,
    n: usize,
    acc: &mut [[B::F; M]; R],
) {
    let (vector, a_byte) = (4 * B::F::LANES, if NIBBLES { 2 } else { 1 });
    let planes = if NIBBLES {
        C::NIBBLE_PLANES
    } else {
        C::BYTE_PLANES
    };
    // Plain loops: a closure has none of the instruction set.
    // SAFETY: a whole block is inside its row; of another the bytes that are left are loaded.
    unsafe {
        let group = (at * a_byte) >> t.group_log2;
        for r in 0..R {
            let from = t.bytes[r].add(at);
            B::F::prefetch(from.wrapping_add(t.ahead));
            let packed = if WHOLE || n == vector {
                B::load(from)
            } else {
                B::load_first(from, n)
            };
            let scale = spread::<B::F, K, WHOLE>(t.scales[r], group, t.groups, places);
            // Sums of several rows in turn, so that none waits for itself.
            let mut dots = [B::zero(); M];
            for plane in 0..planes {
                let w = if NIBBLES {
                    C::nibbles::<B>(packed, plane)
                } else {
                    C::bytes::<B>(packed, plane)
                };
                for m in 0..M {
                    let codes = x.codes.add(m * x.stride + at * a_byte * size_of::<C>());
                    let codes = codes.add(plane * vector);
                    dots[m] = C::dot::<B>(dots[m], w, codes, NIBBLES || t.small);
                }
            }
            let lanes = at * a_byte / (if NIBBLES { 8 } else { 4 });
            for m in 0..M {
                let scale = scale.mul(B::F::load(x.scales.add(m * x.scale_stride + lanes)));
                acc[r][m] = B::to_f32(dots[m]).mul_add(scale, acc[r][m]);
            }
        }
    }
}
