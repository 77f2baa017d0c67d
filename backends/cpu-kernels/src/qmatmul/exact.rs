//! Dot products of packed weights with f32 activations.
//!
//! A vector of words holds eight nibbles a lane, so the activations are laid out as
//! `[block][nibble][lane]`, and every step is shift, table look-up, multiply-add.

#![allow(
    clippy::needless_range_loop,
    reason = "rows and columns of register tiles are indices into several arrays at once"
)]

use super::prepare::Prepared;
use super::rows::{Path, Rows};
use crate::factor::{Factor, spread};
use crate::simd::Simd;

/// f32 activations.
pub(crate) struct Exact<S>(core::marker::PhantomData<S>);

impl<S: Simd> Path for Exact<S> {
    type F = S;

    #[inline(always)]
    unsafe fn nibbles<K: Factor, const R: usize, const M: usize>(
        t: &Rows<'_, K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[S; M]; R] {
        let n_words = t.row_bytes / 4;
        // SAFETY: `x` is padded to whole blocks; see `block` for the weights.
        unsafe {
            let places = S::places(((8 * S::LANES) >> t.group_log2).max(1));
            let x4 = x.x4.as_ptr().add(first * x.sizes.padded4);
            let mut acc = [[S::zero(); M]; R];
            // Blocks that are whole and have four scales to read.
            let whole = whole_words(t.groups, t.group_log2, n_words, S::LANES);
            let mut at = 0;
            while at < whole {
                block::<S, K, R, M, true>(t, x4, x.sizes.padded4, places, at, n_words, &mut acc);
                at += S::LANES;
            }
            while at < n_words {
                block::<S, K, R, M, false>(t, x4, x.sizes.padded4, places, at, n_words, &mut acc);
                at += S::LANES;
            }
            acc
        }
    }

    #[inline(always)]
    unsafe fn bytes<K: Factor, const R: usize, const M: usize>(
        t: &Rows<'_, K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[S; M]; R] {
        let columns = x.sizes.columns;
        // SAFETY: groups are multiples of 16 elements, hence of every vector's lanes.
        unsafe {
            let places = S::places(1);
            let x = x.x.as_ptr().add(first * columns);
            let mut acc = [[S::zero(); M]; R];
            for group in 0..t.groups {
                let start = group << t.group_log2;
                let mut part = [[S::zero(); M]; R];
                for at in (start..start + (1 << t.group_log2)).step_by(S::LANES) {
                    for r in 0..R {
                        let from = t.bytes[r].add(at);
                        S::prefetch(from.wrapping_add(t.ahead));
                        let q = S::load_u8(from);
                        for m in 0..M {
                            part[r][m] = q.mul_add(S::load(x.add(m * columns + at)), part[r][m]);
                        }
                    }
                }
                for r in 0..R {
                    let scale = spread::<S, K, false>(t.scales[r], group, t.groups, places);
                    for m in 0..M {
                        acc[r][m] = part[r][m].mul_add(scale, acc[r][m]);
                    }
                }
            }
            acc
        }
    }
}

/// Eight nibbles of every lane of `R` rows.
#[inline(always)]
unsafe fn block<S: Simd, K: Factor, const R: usize, const M: usize, const WHOLE: bool>(
    t: &Rows<'_, K, R>,
    x: *const f32,
    stride: usize,
    places: S::Places,
    at: usize,
    n_words: usize,
    acc: &mut [[S; M]; R],
) {
    // SAFETY: a whole block is inside its row; of another the words that are left are loaded.
    unsafe {
        let x = x.add(at * 8);
        let group = (at * 8) >> t.group_log2;
        let mut packed = [S::zero(); R];
        let mut scales = [S::zero(); R];
        for r in 0..R {
            let from = t.bytes[r].cast::<u32>().add(at);
            S::prefetch(from.cast::<u8>().wrapping_add(t.ahead));
            packed[r] = if WHOLE || n_words - at >= S::LANES {
                S::load_words(from)
            } else {
                S::load_first(from.cast(), n_words - at)
            };
            scales[r] = spread::<S, K, WHOLE>(t.scales[r], group, t.groups, places);
        }
        let mut part = [[S::zero(); M]; R];
        macro_rules! nibbles {
            ($($j:literal)*) => {$(
                let mut xs = [S::zero(); M];
                for m in 0..M {
                    xs[m] = S::load(x.add(m * stride + $j * S::LANES));
                }
                for r in 0..R {
                    let q = if K::IS_OF_FLOATS {
                        S::float_nibble::<$j>(packed[r])
                    } else {
                        S::nibble::<$j>(packed[r])
                    };
                    if M <= 2 {
                        for m in 0..M {
                            part[r][m] = q.mul_add(xs[m], part[r][m]);
                        }
                    } else {
                        // With many rows it is cheaper to scale the weight.
                        let w = q.mul(scales[r]);
                        for m in 0..M {
                            acc[r][m] = w.mul_add(xs[m], acc[r][m]);
                        }
                    }
                }
            )*};
        }
        nibbles!(0 1 2 3 4 5 6 7);
        if M <= 2 {
            for r in 0..R {
                for m in 0..M {
                    acc[r][m] = part[r][m].mul_add(scales[r], acc[r][m]);
                }
            }
        }
    }
}

/// Words of the leading blocks of `step` words that are whole and whose first scale has three more
/// behind it.
#[inline(always)]
fn whole_words(groups: usize, group_log2: u32, n_words: usize, step: usize) -> usize {
    if groups < 4 {
        return 0;
    }
    let by_scales = ((groups - 4) << group_log2) / 8 / step * step + step;
    by_scales.min(n_words / step * step)
}
