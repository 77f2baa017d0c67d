//! AVX-512 VNNI: rows whose codes are bytes or packed to a width other than nibbles, two vectors of codes at a time.
//!
//! A block is 128 elements. Quarter `q` of its first vector holds the first 16 elements of the block's 32 number `q`,
//! the same quarter of its second vector the others, so that sums of both are of the same lanes: one conversion and
//! one scale for eight elements of a lane. Groups of 16 keep the vectors apart. Activations of 16 bits lie in the same
//! order (`round`), whatever the weights; with those of 8 bits `quads` takes two blocks at a time.

#![allow(
    clippy::needless_range_loop,
    reason = "rows and columns of register tiles are indices into several arrays at once"
)]

use core::arch::x86_64::*;

use super::codes::Unpacker;
use super::integers::{Activation, Integers};
use super::mxfp4;
use super::prepare::{Precision, Prepared};
use super::rows::{self, Path, Quad, Rows};
use crate::Isa;
use crate::factor::{Factor, spread};
use crate::simd::Simd;
use crate::simd::avx512::Avx512;
use crate::simd::bytes::{Avx512VnniBytes, Bytes};

/// Elements of a block.
pub(crate) const BLOCK: usize = 128;

/// Most elements of `x` beside which rows are read in order: memory read in order comes faster than four short rows
/// abreast (ADR 7), but `x` is loaded again for every row, so it must stay in the first cache.
pub(super) const MOST_IN_ORDER: usize = 5120;

/// Whether codes that are not nibbles come by pairs of vectors: beside activations of 16 bits here, and else in `quads`.
pub(crate) fn takes(isa: Isa, precision: Precision) -> bool {
    isa == Isa::Avx512Vnni && precision != Precision::Exact
}

/// `R` rows of the weight from `skip` on with `M` rows of `x` from `first` on.
///
/// # Safety
/// As for [`rows::run`], on a processor that [`takes`] names.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
pub(crate) unsafe fn products<K: Factor, C: Activation, const R: usize, const M: usize>(
    quad: &Quad<'_, K>,
    skip: usize,
    first: usize,
) {
    // SAFETY: forwarded to the caller.
    unsafe { rows::products::<Pairs<C>, K, false, R, M>(quad, skip, first) }
}

/// Activations of type `C`.
pub(crate) struct Pairs<C>(core::marker::PhantomData<C>);

/// Where the codes of a block are: a byte each, packed, or in nibbles of mxfp4.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    Bytes,
    Packed(&'a Unpacker),
    Floats,
}

impl Source<'_> {
    /// Bytes of so many codes, a multiple of 8.
    #[inline(always)]
    pub(super) fn bytes(self, codes: usize) -> usize {
        match self {
            Source::Bytes => codes,
            Source::Packed(unpacker) => codes / 8 * unpacker.bits,
            Source::Floats => codes / 2,
        }
    }

    /// The two vectors of a block of which `n` codes are there; the rest is 0.
    #[inline(always)]
    pub(super) unsafe fn vectors(self, from: *const u8, n: usize) -> [__m512i; 2] {
        // SAFETY: the caller vouches for n codes; none behind them is loaded.
        unsafe {
            match self {
                Source::Bytes => load(from, n),
                Source::Packed(unpacker) => unpack(from, unpacker, n),
                Source::Floats => floats(from, n),
            }
        }
    }
}

impl<C: Activation> Path for Pairs<C> {
    type F = Avx512;

    #[inline(always)]
    unsafe fn nibbles<K: Factor, const R: usize, const M: usize>(
        t: &Rows<'_, K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[Avx512; M]; R] {
        // SAFETY: forwarded to the caller.
        unsafe { Integers::<Avx512VnniBytes, C>::nibbles(t, x, first) }
    }

    #[inline(always)]
    unsafe fn bytes<K: Factor, const R: usize, const M: usize>(
        t: &Rows<'_, K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[Avx512; M]; R] {
        let padded = x.sizes.padded;
        // SAFETY: codes and scales of `x` are padded to whole blocks.
        let x = unsafe {
            Activations {
                codes: C::codes(x).bytes.as_ptr().add(first * padded),
                scales: x.factors.bytes.as_ptr().add(first * padded / 8),
                padded,
            }
        };
        // SAFETY: forwarded to the caller; who has an unpacker for this set asked for VBMI.
        unsafe {
            match (t.unpacker, t.group_log2) {
                _ if t.floats => all::<C, K, R, M, false>(t, &x, Source::Floats),
                (Some(unpacker), 4) => all::<C, K, R, M, true>(t, &x, Source::Packed(unpacker)),
                (Some(unpacker), _) => all::<C, K, R, M, false>(t, &x, Source::Packed(unpacker)),
                (None, 4) => all::<C, K, R, M, true>(t, &x, Source::Bytes),
                (None, _) => all::<C, K, R, M, false>(t, &x, Source::Bytes),
            }
        }
    }
}

/// Rows of activations, `padded` codes and `padded / 8` scales each.
struct Activations<C> {
    codes: *const C,
    scales: *const f32,
    padded: usize,
}

/// Sums over whole rows, all abreast or one after the other.
#[inline(always)]
unsafe fn all<C: Activation, K: Factor, const R: usize, const M: usize, const HALVES: bool>(
    t: &Rows<'_, K, R>,
    x: &Activations<C>,
    source: Source<'_>,
) -> [[Avx512; M]; R] {
    // SAFETY: forwarded to the caller.
    unsafe {
        let mut acc = [[Avx512::zero(); M]; R];
        if M * (t.groups << t.group_log2) <= MOST_IN_ORDER {
            for r in 0..R {
                [acc[r]] = sums::<C, K, 1, M, HALVES>(&t.row(r), x, source);
            }
        } else {
            acc = sums::<C, K, R, M, HALVES>(t, x, source);
        }
        acc
    }
}

/// Sums over whole rows, abreast.
#[inline(always)]
unsafe fn sums<C: Activation, K: Factor, const R: usize, const M: usize, const HALVES: bool>(
    t: &Rows<'_, K, R>,
    x: &Activations<C>,
    source: Source<'_>,
) -> [[Avx512; M]; R] {
    // SAFETY: see `block`.
    unsafe {
        let places = Avx512::places((BLOCK >> t.group_log2).max(1));
        let columns = t.groups << t.group_log2;
        let whole = t.whole(columns, BLOCK, 1);
        let mut acc = [[Avx512::zero(); M]; R];
        let mut at = 0;
        while at < whole {
            block::<C, K, R, M, HALVES, true>(t, x, source, places, at, BLOCK, &mut acc);
            at += BLOCK;
        }
        while at < columns {
            let n = (columns - at).min(BLOCK);
            block::<C, K, R, M, HALVES, false>(t, x, source, places, at, n, &mut acc);
            at += BLOCK;
        }
        acc
    }
}

/// The `n` elements from `at` on of `R` rows of the weight.
#[inline(always)]
unsafe fn block<
    C: Activation,
    K: Factor,
    const R: usize,
    const M: usize,
    const HALVES: bool,
    const WHOLE: bool,
>(
    t: &Rows<'_, K, R>,
    x: &Activations<C>,
    source: Source<'_>,
    places: __m512i,
    at: usize,
    n: usize,
    acc: &mut [[Avx512; M]; R],
) {
    type B = Avx512VnniBytes;
    let planes = C::BYTE_PLANES;
    let vector = 64 / size_of::<C>();
    // Plain loops: a closure has none of the instruction set.
    // SAFETY: a whole block is inside its row, and of another the codes that are left are loaded, the rest is 0.
    unsafe {
        let group = at >> t.group_log2;
        for r in 0..R {
            let from = t.bytes[r].add(source.bytes(at));
            // What is read in order at the speed of memory, the processor fetches by itself.
            if R > 1 || M > 1 {
                Avx512::prefetch(from.wrapping_add(t.ahead));
                Avx512::prefetch(from.wrapping_add(t.ahead + 64));
            }
            let [first, second] = source.vectors(from, if WHOLE { BLOCK } else { n });
            let mut w = [_mm512_setzero_si512(); 4];
            for plane in 0..planes {
                w[plane] = C::bytes::<B>(first, plane);
                w[planes + plane] = C::bytes::<B>(second, plane);
            }
            let scales = if HALVES {
                let left = if WHOLE { 8 } else { (t.groups - group).min(8) };
                every_second(K::load::<Avx512>(t.scales[r].add(group), left))
            } else {
                let scale = spread::<Avx512, K, WHOLE>(t.scales[r], group, t.groups, places);
                [scale, scale]
            };
            for m in 0..M {
                let codes = x.codes.add(m * x.padded + at);
                let own = Avx512::load(x.scales.add(m * (x.padded / 8) + at / 8));
                let mut dots = [B::zero(); 2];
                for plane in 0..2 * planes {
                    let half = usize::from(HALVES && plane >= planes);
                    let codes = codes.add(plane * vector).cast();
                    dots[half] = C::dot::<B>(dots[half], w[plane], codes, t.small);
                }
                acc[r][m] = B::to_f32(dots[0]).mul_add(scales[0].mul(own), acc[r][m]);
                if HALVES {
                    acc[r][m] = B::to_f32(dots[1]).mul_add(scales[1].mul(own), acc[r][m]);
                }
            }
        }
    }
}

/// Eight scales of groups of 16: those of the first vector's quarters and those of the second's.
#[inline(always)]
unsafe fn every_second(eight: Avx512) -> [Avx512; 2] {
    // SAFETY: only called with AVX-512.
    unsafe {
        let first = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(1));
        [first, second].map(|places| eight.permuted(places))
    }
}

/// The two vectors of a block of `n` bytes.
#[inline(always)]
unsafe fn load(from: *const u8, n: usize) -> [__m512i; 2] {
    // SAFETY: the caller vouches for n bytes; none behind them is loaded.
    unsafe {
        let (low, high) = if n == BLOCK {
            (
                Avx512VnniBytes::load(from),
                Avx512VnniBytes::load(from.add(64)),
            )
        } else {
            (
                some(from, n),
                some(from.wrapping_add(64), n.saturating_sub(64)),
            )
        };
        [
            _mm512_shuffle_i64x2::<0b10_00_10_00>(low, high),
            _mm512_shuffle_i64x2::<0b11_01_11_01>(low, high),
        ]
    }
}

/// Up to 64 bytes, the rest is 0.
#[inline(always)]
unsafe fn some(from: *const u8, n: usize) -> __m512i {
    let mask = if n == 0 {
        0
    } else {
        u64::MAX >> (64 - n.min(64))
    };
    // SAFETY: masked bytes are not touched.
    unsafe { _mm512_maskz_loadu_epi8(mask, from.cast()) }
}

/// The two vectors of a block of `n` packed codes.
#[inline(always)]
unsafe fn unpack(from: *const u8, unpacker: &Unpacker, n: usize) -> [__m512i; 2] {
    let (bytes, all) = (n * unpacker.bits / 8, unpacker.block_bytes());
    // SAFETY: the caller vouches for n codes, none behind them is loaded, and for VBMI.
    unsafe {
        let low = some(from, bytes);
        let ones = _mm512_set1_epi8(unpacker.ones as i8);
        let shifts = Avx512VnniBytes::load(unpacker.shifts.as_ptr());
        let [first, second] =
            [0, 1].map(|i| Avx512VnniBytes::load(unpacker.block_places[i].as_ptr()));
        let lanes = if all <= 64 {
            [permute(low, first), permute(low, second)]
        } else {
            // The last 64 bytes of a whole block.
            let skip = all - 64;
            let high = some(from.wrapping_add(skip), bytes.saturating_sub(skip));
            [
                permute_two(first, low, high),
                permute_two(second, low, high),
            ]
        };
        [
            _mm512_and_si512(shift(lanes[0], shifts), ones),
            _mm512_and_si512(shift(lanes[1], shifts), ones),
        ]
    }
}

/// The two vectors of a block of `n` nibbles of mxfp4: a quarter of the packed vector is a run of 32 elements.
#[inline(always)]
unsafe fn floats(from: *const u8, n: usize) -> [__m512i; 2] {
    // SAFETY: the caller vouches for n nibbles; none behind them is loaded.
    unsafe {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(mxfp4::CODES.as_ptr().cast()));
        let low_bits = _mm512_set1_epi8(15);
        let packed = if n == BLOCK {
            Avx512VnniBytes::load(from)
        } else {
            some(from, n / 2)
        };
        let low = _mm512_shuffle_epi8(table, _mm512_and_si512(packed, low_bits));
        let high = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), low_bits);
        let high = _mm512_shuffle_epi8(table, high);
        // What is not there is 0 as for other codes.
        let there = if n == BLOCK {
            u64::MAX
        } else {
            u64::MAX >> (64 - n / 2)
        };
        [
            _mm512_maskz_unpacklo_epi8(there, low, high),
            _mm512_maskz_unpackhi_epi8(there, low, high),
        ]
    }
}

// As assembly because not every processor with VNNI has VBMI, and functions that enable it could not be inlined.

/// `vpermb`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn permute(bytes: __m512i, places: __m512i) -> __m512i {
    let mut out;
    // SAFETY: registers only, and the caller vouches for the instruction, here and below.
    unsafe {
        core::arch::asm!(
            "vpermb {out}, {places}, {bytes}",
            out = lateout(zmm_reg) out, places = in(zmm_reg) places, bytes = in(zmm_reg) bytes,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    out
}

/// `vpermi2b`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn permute_two(mut places: __m512i, low: __m512i, high: __m512i) -> __m512i {
    // SAFETY: see above.
    unsafe {
        core::arch::asm!(
            "vpermi2b {places}, {low}, {high}",
            places = inout(zmm_reg) places, low = in(zmm_reg) low, high = in(zmm_reg) high,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    places
}

/// `vpmultishiftqb`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn shift(lanes: __m512i, shifts: __m512i) -> __m512i {
    let mut out;
    // SAFETY: see above.
    unsafe {
        core::arch::asm!(
            "vpmultishiftqb {out}, {shifts}, {lanes}",
            out = lateout(zmm_reg) out, shifts = in(zmm_reg) shifts, lanes = in(zmm_reg) lanes,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    out
}
