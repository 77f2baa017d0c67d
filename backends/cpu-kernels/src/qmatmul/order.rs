//! AVX-512 VNNI: in which order activations of 8 bits meet codes that are not nibbles.
//!
//! Blocks of 256 elements are two halves of 128 (`pairs`), whose runs of 32 lie beside each other: of every run a vector
//! holds eight codes in two lanes, in the order that the vectors of two halves have once their neighbouring words of 64
//! bits are taken apart (`quads`). What is left at the end of a row are one or two halves by themselves, with four lanes
//! for a run. Every block and every such half has a scale for each of its 16 lanes.
//!
//! Rows that are multiplied at a time (`Tile`) take turns: a block of each, then the next of each.

use super::round::{Code, QUANT_GROUP};

/// Elements of a block.
pub(crate) const BLOCK: usize = 256;

/// Elements of half a block.
pub(crate) const HALF: usize = 128;

/// Scales of a block, or of a half by itself.
pub(crate) const SCALES: usize = 16;

/// Elements of a row of `columns`, rounded up to halves.
pub(crate) fn padded(columns: usize) -> usize {
    columns.next_multiple_of(HALF)
}

/// Scales of a row.
pub(crate) fn scales(columns: usize) -> usize {
    (columns / BLOCK + (columns % BLOCK).div_ceil(HALF)) * SCALES
}

/// Elements and scales before the half that is not full.
pub(crate) fn full(columns: usize) -> (usize, usize) {
    let full = columns / HALF * HALF;
    (full, scales(full))
}

/// Rows that are multiplied at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tile {
    pub(crate) first: usize,
    /// 8, 4, 2 or 1.
    pub(crate) rows: usize,
}

impl Tile {
    /// The one from a row on where it begins a tile of `m` rows.
    pub(crate) fn from(first: usize, m: usize) -> Self {
        let rows = match m - first {
            8.. => 8,
            4.. => 4,
            2.. => 2,
            _ => 1,
        };
        Self { first, rows }
    }

    /// The one with a row of `m`.
    pub(crate) fn of(row: usize, m: usize) -> Self {
        let mut tile = Self::from(row / 8 * 8, m);
        while tile.first + tile.rows <= row {
            tile = Self::from(tile.first + tile.rows, m);
        }
        tile
    }

    /// All of `m` rows.
    pub(crate) fn all(m: usize) -> impl Iterator<Item = Self> {
        let next = move |tile: &Self| {
            let first = tile.first + tile.rows;
            (first < m).then(|| Self::from(first, m))
        };
        core::iter::successors((m > 0).then(|| Self::from(0, m)), next)
    }
}

/// Where a row is.
pub(crate) struct Row<C> {
    /// Of its tile.
    pub(crate) codes: *mut C,
    pub(crate) scales: *mut f32,
    pub(crate) tile: Tile,
    pub(crate) row: usize,
    pub(crate) columns: usize,
}

impl<C: Code> Row<C> {
    /// Writes a run's codes and scale.
    ///
    /// # Safety
    /// The tile has so many codes and scales as [`padded`] and [`scales`] say, and `at` is a multiple of 32 inside the row.
    #[inline(always)]
    pub(crate) unsafe fn write(&self, run: &[C; QUANT_GROUP], scale: f32, at: usize) {
        let (rows, index) = (self.tile.rows, self.row - self.tile.first);
        let whole = self.columns / BLOCK * BLOCK;
        // SAFETY: forwarded to the caller.
        unsafe {
            if at >= whole {
                let half = (at - whole) / HALF;
                let codes = self.codes.add(whole * rows + (half * rows + index) * HALF);
                let lane = at % HALF / QUANT_GROUP * 4;
                pieces::<C, 16>(run, lane, codes);
                let half = (whole / BLOCK + half) * rows + index;
                let scales = self.scales.add(half * SCALES + lane);
                scales.cast::<[f32; 4]>().write_unaligned([scale; 4]);
                return;
            }
            let block = at / BLOCK * rows + index;
            let codes = self.codes.add(block * BLOCK);
            let run_of_block = at % BLOCK / QUANT_GROUP;
            let lane = run_of_block % 4 * 4 + run_of_block / 4 * 2;
            pieces::<C, 8>(run, lane, codes);
            let scales = self.scales.add(block * SCALES + lane);
            scales.cast::<[f32; 2]>().write_unaligned([scale; 2]);
        }
    }
}

/// Writes `PIECE` codes to each vector, from a lane on.
#[inline(always)]
unsafe fn pieces<C: Code, const PIECE: usize>(run: &[C; QUANT_GROUP], lane: usize, codes: *mut C) {
    for (vector, piece) in run.chunks_exact(PIECE).enumerate() {
        // SAFETY: the caller vouches for a block.
        unsafe {
            let to = codes.add(vector * 64 + lane * 4);
            core::ptr::copy_nonoverlapping(piece.as_ptr(), to, PIECE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_have_every_row_once() {
        for m in 0..40 {
            let mut next = 0;
            for tile in Tile::all(m) {
                assert_eq!(tile.first, next);
                assert!((tile.first..tile.first + tile.rows).all(|row| Tile::of(row, m) == tile));
                next += tile.rows;
            }
            assert_eq!(next, m);
        }
    }
}
