//! Which kernel makes a product, and how it is divided.

use super::maps::STREAM_GROUPS;
use super::pending::MOST_PRODUCTS;
use super::products::{FEW_ROWS, Weight};
use super::{COUNTERS, State};
use crate::kernels::{
    ENGINE_ARCHITECTURE, GROUP_ARCHITECTURE, STREAM_WARPS, TILE_BYTES, TILE_TEAMS,
};

/// Rows that `stream_rows` takes, and bytes of them that leave room for two blocks on a multiprocessor.
const STREAM_ROWS: usize = 4;
const STREAM_ROW_BYTES: usize = 64 << 10;
/// Shared memory of a block that two of find on a multiprocessor.
const HALF_SHARED_BYTES: u32 = 112 << 10;
/// Rows up to which `tiled` is faster than expanding the weight for a dense product, and than a dense product with a plain weight.
const TILE_ROWS: usize = 512;
const TILE_ROWS_PLAIN: usize = 128;
/// Multiplications up to which a product with more rows is one kernel of ours: a dense one takes the device some 9 microseconds at least.
const SMALL: usize = 64 << 20;
/// Columns that `tiled` is compiled for.
const TILE_COLUMNS: [(usize, &str); 5] = [
    (8, "tiled_8"),
    (16, "tiled_16"),
    (32, "tiled_32"),
    (64, "tiled_64"),
    (128, "tiled_128"),
];

/// A kernel for products of one input, which several weights may share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// `stream_rows`, `stream_gated`.
    Stream,
    /// `few_rows`, `few_rows_gated`.
    Few,
    /// `tiled`.
    Tiles,
    /// `clustered`.
    Clusters,
}

impl State {
    /// The kernel for `rows` rows of x, or none of these.
    pub(super) fn way(&self, w: &Weight, rows: usize) -> Option<Way> {
        if self.keeps_rows_apart {
            return None;
        }
        if self.architecture >= ENGINE_ARCHITECTURE && self.streams(w, rows) {
            return Some(Way::Stream);
        }
        if self.clusters(w, rows) {
            return Some(Way::Clusters);
        }
        let tiles = self.architecture == GROUP_ARCHITECTURE && tiles(w, rows, self.processors);
        // Expanding weights of 4 bits costs as much for one row as for many, and `few_rows` is the better at hiding it.
        let few = rows <= FEW_ROWS;
        if tiles && !(few && (w.bits == 4 || rows <= STREAM_ROWS)) {
            return Some(Way::Tiles);
        }
        few.then_some(Way::Few)
    }

    fn streams(&self, w: &Weight, rows: usize) -> bool {
        rows <= STREAM_ROWS
            && matches!(w.group_size, 64 | 128)
            && w.columns.is_multiple_of(Stream::piece(w))
            && has_aligned_groups(w)
            && (rows == 1 || rows * w.columns * 2 <= STREAM_ROW_BYTES)
            && Stream::shared_bytes(w, rows, true) <= self.most_shared_bytes
    }
}

/// Scales and biases begin at a multiple of 16 bytes.
fn has_aligned_groups(w: &Weight) -> bool {
    w.bits == 16 || (w.scales | w.biases).is_multiple_of(16)
}

/// Whether `tiled` makes a product, beside others that are as large too.
fn tiles(w: &Weight, rows: usize, processors: u32) -> bool {
    let most = if w.bits == 16 {
        TILE_ROWS_PLAIN
    } else {
        TILE_ROWS
    };
    let together = MOST_PRODUCTS * w.rows.div_ceil(Tiles::ROWS);
    rows <= most && divides(w) && Tiles::of(w, rows, together, processors).is_some()
}

/// Whether a product is too small for a dense one to be worth it.
pub(super) fn is_small(w: &Weight, rows: usize) -> bool {
    rows * w.rows * w.columns <= SMALL
}

/// Whether `tiled` can read the weight.
pub(super) fn divides(w: &Weight) -> bool {
    w.columns.is_multiple_of(tile_piece(w)) && has_aligned_groups(w)
}

/// How `stream_rows` divides a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stream {
    pub(super) stages: u32,
    pub(super) shared_bytes: u32,
    pub(super) blocks: u32,
}

impl Stream {
    /// Values of a row in a piece.
    fn piece(w: &Weight) -> usize {
        if w.bits == 16 {
            128
        } else {
            STREAM_GROUPS * w.group_size as usize
        }
    }

    /// Pieces that a warp has under way.
    fn stages(w: &Weight) -> u32 {
        if w.bits == 16 { 3 } else { 2 }
    }

    /// `tiles` of 16 rows of the weight, or of 8 of each of two.
    pub(super) fn of(w: &Weight, rows: usize, is_f16: bool, tiles: usize, processors: u32) -> Self {
        let shared_bytes = Self::shared_bytes(w, rows, is_f16);
        let each = if shared_bytes <= HALF_SHARED_BYTES {
            2
        } else {
            1
        };
        Self {
            stages: Self::stages(w),
            shared_bytes,
            blocks: (tiles as u32).min(each * processors),
        }
    }

    /// As the kernel lays out its shared memory.
    fn shared_bytes(w: &Weight, rows: usize, is_f16: bool) -> u32 {
        const TILE: usize = 16;
        let (scale_bytes, groups) = if w.bits == 16 {
            (0, 0)
        } else {
            (
                2 * TILE * STREAM_GROUPS * 2,
                w.columns / w.group_size as usize,
            )
        };
        let stage = TILE * Self::piece(w) * w.bits as usize / 8 + scale_bytes + size_of::<u64>();
        let sums = groups * 8 * if is_f16 { 8 } else { 4 };
        let parts = 2 * STREAM_WARPS * TILE * rows * size_of::<f32>();
        let ring = STREAM_WARPS * Self::stages(w) as usize * stage;
        let bytes = ring + rows * w.columns * 2 + sums + parts;
        bytes as u32
    }
}

/// Values of a row in a piece of `tiled`: 128 bytes.
fn tile_piece(w: &Weight) -> usize {
    1024 / w.bits as usize
}

/// How `tiled` divides products of one input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tiles {
    pub(super) name: &'static str,
    /// Rows of x in a tile.
    pub(super) columns: usize,
    pub(super) blocks: usize,
    pub(super) columns_of_tiles: usize,
    pub(super) shared_bytes: u32,
    pub(super) scratch_bytes: usize,
}

impl Tiles {
    /// Rows of the weight in a tile.
    pub(super) const ROWS: usize = 64 * TILE_TEAMS;

    /// `tiles` along the rows of all weights. None where they or their pieces are more than can be counted.
    pub(super) fn of(w: &Weight, rows: usize, tiles: usize, processors: u32) -> Option<Self> {
        const MOST_STAGES: usize = 12;
        let (columns, name) = TILE_COLUMNS
            .into_iter()
            .find(|(columns, _)| rows <= *columns)
            .unwrap_or((128, "tiled_128"));
        let piece = tile_piece(w);
        let stage = Self::ROWS * 128 + columns * piece * 2;
        let stages = (TILE_BYTES / stage).min(MOST_STAGES);
        let columns_of_tiles = rows.div_ceil(columns);
        // All columns of tiles at once, so that they read each weight at about the same time.
        let blocks = (processors as usize / columns_of_tiles)
            .max(1)
            .min(tiles * (w.columns / piece));
        // What a block takes of all pieces is counted in 32 bits.
        let counts = (tiles * (w.columns / piece)).checked_mul(blocks + 1)?;
        let is_counted = columns_of_tiles * tiles <= COUNTERS && u32::try_from(counts).is_ok();
        is_counted.then_some(Self {
            name,
            columns,
            blocks,
            columns_of_tiles,
            shared_bytes: (stages * (stage + 16)) as u32,
            scratch_bytes: columns_of_tiles * blocks * 2 * Self::ROWS * columns * size_of::<f32>(),
        })
    }
}

impl Tiles {
    /// As [`Tiles::of`] for up to `groups` groups of at most `most` rows, each for a matrix with `tiles` tiles.
    pub(super) fn grouped(
        w: &Weight,
        most: usize,
        tiles: usize,
        groups: usize,
        processors: u32,
    ) -> Option<Self> {
        let all = tiles.checked_mul(groups)?;
        if all > COUNTERS {
            return None;
        }
        let one = Self::of(w, most, tiles, processors)?;
        let pieces = all * (w.columns / tile_piece(w));
        let blocks = (processors as usize).min(pieces);
        u32::try_from(pieces.checked_mul(blocks + 1)?).ok()?;
        Some(Self {
            blocks,
            scratch_bytes: blocks * 2 * Self::ROWS * one.columns * size_of::<f32>(),
            ..one
        })
    }
}

/// How `many_rows` divides a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) name: &'static str,
    /// Along the result's columns and rows.
    pub(super) tiles: (usize, usize),
    /// Along the sum.
    pub(super) splits: usize,
    /// Steps of the sum in a split.
    pub(super) steps_each: usize,
    pub(super) shared_bytes: u32,
}

impl Plan {
    /// Values of the sum in a step.
    pub(super) fn depth(w: &Weight) -> usize {
        if w.bits == 16 { 64 } else { 128 }
    }

    /// Enough blocks to fill the device, but each with several steps.
    pub(super) fn of(w: &Weight, m: usize, processors: u32) -> Self {
        const LEAST_STEPS: usize = 4;
        const MOST_SPLITS: usize = 32;
        const PROCESSOR_SHARED_BYTES: usize = 220 << 10;
        let (name, rows_each) = match m {
            0..=16 => ("many_rows_16", 16),
            17..=32 => ("many_rows_32", 32),
            _ => ("many_rows_64", 64),
        };
        let depth = Self::depth(w);
        let bits = w.bits as usize;
        let stage = 128 * depth * bits / 8 + rows_each * depth * 2;
        let stages = if 4 * stage <= 72 << 10 { 4 } else { 3 };
        let shared = (stages * stage).max(rows_each * 132 * 4);
        let at_once = (PROCESSOR_SHARED_BYTES / (shared + 1024)).clamp(1, 8) * processors as usize;
        let tiles = (w.rows.div_ceil(128), m.div_ceil(rows_each));
        let steps = w.columns.div_ceil(depth);
        let count = tiles.0 * tiles.1;
        let wanted = (at_once / count)
            .clamp(1, MOST_SPLITS)
            .min((steps / LEAST_STEPS).max(1));
        let wanted = if count <= COUNTERS { wanted } else { 1 };
        // Scales are read for four steps at a time.
        let together = if w.bits == 16 { 1 } else { 4 };
        let steps_each = steps.div_ceil(wanted).next_multiple_of(together);
        Self {
            name,
            tiles,
            splits: steps.div_ceil(steps_each),
            steps_each,
            shared_bytes: shared as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_cover_the_sum_and_fit_a_processor() {
        for bits in [4, 8, 16] {
            for (rows, columns) in [
                (64, 64),
                (1024, 4096),
                (4096, 14336),
                (128_256, 4096),
                (100, 576),
            ] {
                for m in [9, 16, 17, 33, 64, 128] {
                    let plan = Plan::of(&Weight::shaped(bits, rows, columns), m, 132);
                    let steps = columns.div_ceil(if bits == 16 { 64 } else { 128 });
                    assert!(plan.splits * plan.steps_each >= steps, "{plan:?}");
                    assert!((plan.splits - 1) * plan.steps_each < steps, "{plan:?}");
                    assert!(plan.shared_bytes <= 227 << 10, "{plan:?}");
                    assert!(plan.tiles.0 * 128 >= rows && plan.tiles.1 * 64 >= m.min(64));
                }
            }
        }
    }

    #[test]
    fn tiles_fit_a_processor_and_are_counted() {
        for bits in [4, 8, 16] {
            for (rows, columns) in [(64, 1024), (4096, 14336), (128_256, 4096)] {
                for m in [1, 9, 33, 128, 512] {
                    let count = rows_of_tiles(rows);
                    let plan =
                        Tiles::of(&Weight::shaped(bits, rows, columns), m, count, 132).unwrap();
                    assert!(plan.shared_bytes <= 225 << 10, "{plan:?}");
                    assert!(plan.shared_bytes >= 2 * (128 * 128), "{plan:?}");
                    assert!(plan.columns * plan.columns_of_tiles >= m, "{plan:?}");
                }
            }
        }
    }

    #[test]
    fn products_with_too_many_tiles_are_not_for_tiles() {
        let takes = |bits, rows, columns| tiles(&Weight::shaped(bits, rows, columns), 128, 132);
        assert!(takes(4, 128_256, 4096) && takes(16, 262_144, 8192));
        // More than there are counters for.
        assert!(!takes(4, 16 << 20, 256));
        // Pieces that a block's share of does not fit in 32 bits.
        assert!(!takes(16, 2 << 20, 1 << 20));
        assert!(!takes(4, 128, 128), "less than a piece");
    }

    fn rows_of_tiles(rows: usize) -> usize {
        rows.div_ceil(Tiles::ROWS)
    }

    #[test]
    fn products_of_one_row_leave_room_for_the_next() {
        let of = |bits, tiles| {
            Stream::of(
                &Weight::shaped(bits, 16 * tiles, 4096),
                1,
                false,
                tiles,
                132,
            )
        };
        let small = of(4, 256);
        assert_eq!((small.stages, small.blocks), (2, 256));
        assert!(2 * (small.shared_bytes + 1024) <= 190 << 10, "{small:?}");
        let large = of(4, 1792);
        assert_eq!((large.stages, large.blocks), (2, 264));
        assert_eq!(of(8, 1792).blocks, 132);
        assert_eq!((of(16, 1792).stages, of(16, 1792).blocks), (3, 264));
    }
}
