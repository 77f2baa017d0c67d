//! AVX-512 VNNI: rows of the weight that are no packed nibbles beside activations of 8 bits, in the blocks of `order`.
//!
//! The four vectors of two halves (`pairs`), taken apart by words of 64 bits, have sums of the same lanes: one conversion
//! and one scale of the weight and of `x` for 16 elements of a lane. These and the dot products share the same units, and
//! with 8 bits a dot product takes four elements. Groups of 16 keep the first two vectors from the others.

#![allow(
    clippy::needless_range_loop,
    reason = "rows and columns of register tiles are indices into several arrays at once"
)]

use core::arch::x86_64::*;

use super::order::{BLOCK, HALF, SCALES, Tile};
use super::pairs::{self, Source};
use super::prepare::{Precision, Prepared};
use super::rows::{self, Path, Quad, Rows};
use crate::Isa;
use crate::factor::Factor;
use crate::simd::Simd;
use crate::simd::avx512::Avx512;
use crate::simd::bytes::{Avx512VnniBytes, Bytes};

/// Most bytes of `x` beside which rows of the weight are read one after the other: `x` is loaded again for every row, so it
/// must stay in the first cache.
const MOST_IN_ORDER: usize = 20 << 10;

/// Whether products of codes that are not nibbles are made here.
pub(crate) fn takes(isa: Isa, precision: Precision) -> bool {
    pairs::takes(isa, precision) && precision == Precision::Int8
}

/// `R` rows of the weight from `skip` on with `M` rows of `x` from `first` on, where a tile of `M` begins or `M` is 1.
///
/// # Safety
/// As for [`rows::run`], on a processor that [`takes`] names.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
pub(crate) unsafe fn products<K: Factor, const R: usize, const M: usize>(
    quad: &Quad<'_, K>,
    skip: usize,
    first: usize,
) {
    // SAFETY: forwarded to the caller.
    unsafe { rows::products::<Quads, K, false, R, M>(quad, skip, first) }
}

pub(crate) struct Quads;

impl Path for Quads {
    type F = Avx512;

    /// Nibbles do not come here (see [`rows`]).
    #[inline(always)]
    unsafe fn nibbles<K: Factor, const R: usize, const M: usize>(
        _t: &Rows<'_, K, R>,
        _x: &Prepared,
        _first: usize,
    ) -> [[Avx512; M]; R] {
        // SAFETY: only called with AVX-512.
        [[unsafe { Avx512::splat(f32::NAN) }; M]; R]
    }

    #[inline(always)]
    unsafe fn bytes<K: Factor, const R: usize, const M: usize>(
        t: &Rows<'_, K, R>,
        x: &Prepared,
        first: usize,
    ) -> [[Avx512; M]; R] {
        let x = Activations::of(x, first);
        // SAFETY: forwarded to the caller; who has an unpacker for this set asked for VBMI.
        unsafe {
            match (t.unpacker, t.group_log2) {
                _ if t.floats => all::<K, R, M, false>(t, &x, Source::Floats),
                (Some(unpacker), 4) => all::<K, R, M, true>(t, &x, Source::Packed(unpacker)),
                (Some(unpacker), _) => all::<K, R, M, false>(t, &x, Source::Packed(unpacker)),
                (None, 4) => all::<K, R, M, true>(t, &x, Source::Bytes),
                (None, _) => all::<K, R, M, false>(t, &x, Source::Bytes),
            }
        }
    }
}

/// Rows of activations in the blocks of `order`.
struct Activations {
    /// Of the first row in the first block.
    codes: *const i8,
    scales: *const f32,
    /// The same in the first half by itself.
    halves: *const i8,
    /// Rows that take turns.
    rows: usize,
}

impl Activations {
    /// Row `first` and those behind it in its tile.
    #[inline(always)]
    fn of(x: &Prepared, first: usize) -> Self {
        let (tile, sizes) = (Tile::of(first, x.m), x.sizes);
        let index = first - tile.first;
        let codes = x.int8.bytes.as_ptr();
        let codes = codes.wrapping_add(tile.first * sizes.padded);
        let scales = x.factors.bytes.as_ptr();
        let scales = scales.wrapping_add(tile.first * sizes.scales);
        let whole = sizes.columns / BLOCK * BLOCK;
        Self {
            codes: codes.wrapping_add(index * BLOCK),
            scales: scales.wrapping_add(index * SCALES),
            halves: codes.wrapping_add(whole * tile.rows + index * HALF),
            rows: tile.rows,
        }
    }
}

/// Sums over whole rows, all abreast or one after the other.
#[inline(always)]
unsafe fn all<K: Factor, const R: usize, const M: usize, const HALVES: bool>(
    t: &Rows<'_, K, R>,
    x: &Activations,
    source: Source<'_>,
) -> [[Avx512; M]; R] {
    // SAFETY: forwarded to the caller.
    unsafe {
        let mut acc = [[Avx512::zero(); M]; R];
        if M * (t.groups << t.group_log2) <= MOST_IN_ORDER {
            for r in 0..R {
                [acc[r]] = sums::<K, 1, M, HALVES>(&t.row(r), x, source);
            }
        } else {
            acc = sums::<K, R, M, HALVES>(t, x, source);
        }
        acc
    }
}

/// Which lane of the scales of a block, or of a half by itself, each lane takes; see `order`.
#[inline(always)]
unsafe fn places(of_block: bool, group_log2: u32) -> __m512i {
    // SAFETY: only called with AVX-512.
    unsafe {
        let runs = match of_block {
            true => _mm512_setr_epi32(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7),
            false => _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
        };
        let shift = _mm_cvtsi32_si128(group_log2 as i32);
        _mm512_srl_epi32(_mm512_slli_epi32::<5>(runs), shift)
    }
}

// What a part of a row is.
const WHOLE_BLOCK: u8 = 0;
const WHOLE_HALF: u8 = 1;
const RAGGED_HALF: u8 = 2;

/// Sums over whole rows, abreast.
#[inline(always)]
unsafe fn sums<K: Factor, const R: usize, const M: usize, const HALVES: bool>(
    t: &Rows<'_, K, R>,
    x: &Activations,
    source: Source<'_>,
) -> [[Avx512; M]; R] {
    // SAFETY: see `row`.
    unsafe {
        let columns = t.groups << t.group_log2;
        let mut acc = [[Avx512::zero(); M]; R];
        let mut own = (x.codes, x.scales);
        let mut at = 0;
        let block = places(true, t.group_log2);
        while at + BLOCK <= columns {
            part::<K, R, M, HALVES, WHOLE_BLOCK>(t, own, source, block, at, &mut acc);
            at += BLOCK;
            own.0 = own.0.wrapping_add(x.rows * BLOCK);
            own.1 = own.1.wrapping_add(x.rows * SCALES);
        }
        own.0 = x.halves;
        let half = places(false, t.group_log2);
        if at + HALF <= columns {
            part::<K, R, M, HALVES, WHOLE_HALF>(t, own, source, half, at, &mut acc);
            at += HALF;
            own.0 = own.0.wrapping_add(x.rows * HALF);
            own.1 = own.1.wrapping_add(x.rows * SCALES);
        }
        if at < columns {
            part::<K, R, M, HALVES, RAGGED_HALF>(t, own, source, half, at, &mut acc);
        }
        acc
    }
}

/// The part from `at` on of `R` rows of the weight.
#[inline(always)]
unsafe fn part<K: Factor, const R: usize, const M: usize, const HALVES: bool, const PART: u8>(
    t: &Rows<'_, K, R>,
    x: (*const i8, *const f32),
    source: Source<'_>,
    places: __m512i,
    at: usize,
    acc: &mut [[Avx512; M]; R],
) {
    macro_rules! rows {
        ($($r:literal),*) => {$(
            if $r < R {
                let w = Weight {
                    bytes: t.bytes[$r % R],
                    scales: t.scales[$r % R],
                    columns: t.groups << t.group_log2,
                    group_log2: t.group_log2,
                    // What is read in order at the speed of memory, the processor fetches by itself.
                    ahead: if R * M > 1 { Some(t.ahead) } else { None },
                };
                row::<K, M, HALVES, PART>(&w, x, source, places, at, &mut acc[$r % R]);
                if R > 1 {
                    // What is loaded of `x` is loaded again: for all rows it would not fit into registers.
                    core::arch::asm!("", options(nostack, preserves_flags));
                }
            }
        )*};
    }
    // By hand, so that sums are registers whatever the compiler thinks of the size of the loop.
    // SAFETY: forwarded to the caller.
    unsafe {
        rows!(0, 1, 2, 3);
    }
}

/// A row of the weight.
struct Weight<K> {
    bytes: *const u8,
    scales: *const K,
    columns: usize,
    group_log2: u32,
    /// Distance of the prefetch in bytes.
    ahead: Option<usize>,
}

/// A part of one row of the weight with `M` rows of `x`, which are at hand one behind the other.
#[inline(always)]
unsafe fn row<K: Factor, const M: usize, const HALVES: bool, const PART: u8>(
    t: &Weight<K>,
    (codes, own_scales): (*const i8, *const f32),
    source: Source<'_>,
    places: __m512i,
    at: usize,
    acc: &mut [Avx512; M],
) {
    type B = Avx512VnniBytes;
    let elements = if PART == WHOLE_BLOCK { BLOCK } else { HALF };
    let vectors = elements / 64;
    let n = if PART == RAGGED_HALF {
        t.columns - at
    } else {
        elements
    };
    // Plain loops: a closure has none of the instruction set.
    // SAFETY: what is whole is inside its row, and of another half the codes that are left are loaded, the rest is 0; so it
    // is with scales.
    unsafe {
        let from = t.bytes.add(source.bytes(at));
        if let Some(ahead) = t.ahead {
            let mut line = 0;
            while line < source.bytes(n) {
                Avx512::prefetch(from.wrapping_add(ahead + line));
                line += 64;
            }
        }
        let first = source.vectors(from, if PART == RAGGED_HALF { n } else { HALF });
        let w = if PART == WHOLE_BLOCK {
            let second = source.vectors(from.add(source.bytes(HALF)), HALF);
            [
                _mm512_unpacklo_epi64(first[0], second[0]),
                _mm512_unpackhi_epi64(first[0], second[0]),
                _mm512_unpacklo_epi64(first[1], second[1]),
                _mm512_unpackhi_epi64(first[1], second[1]),
            ]
        } else {
            [first[0], first[1], first[0], first[1]]
        };
        let scales = K::load::<Avx512>(t.scales.add(at >> t.group_log2), n >> t.group_log2);
        let first_scales = scales.permuted(places);
        let last_scales = if HALVES {
            scales.permuted(_mm512_add_epi32(places, _mm512_set1_epi32(1)))
        } else {
            first_scales
        };
        for m in 0..M {
            let codes = codes.add(m * elements).cast::<u8>();
            let own = Avx512::load(own_scales.add(m * SCALES));
            let mut dots = [B::zero(); 2];
            for vector in 0..vectors {
                let half = usize::from(HALVES && vector >= vectors / 2);
                let codes = B::load(codes.add(64 * vector));
                dots[half] = B::dot(dots[half], w[vector], codes, false);
            }
            acc[m] = if HALVES {
                let first = B::to_f32(dots[0]).mul(first_scales);
                let both = B::to_f32(dots[1]).mul_add(last_scales, first);
                both.mul_add(own, acc[m])
            } else {
                B::to_f32(dots[0]).mul_add(first_scales.mul(own), acc[m])
            };
        }
    }
}
