//! Products of several rows with small weights, by clusters of blocks that share the sum.

use mlxcel_abi::{DType, Result};

use super::State;
use super::products::Weight;
use super::submit::{Around, weights};
use crate::driver::{Arguments, Shape};
use crate::kernels::{ENGINE_ARCHITECTURE, Text};

/// Blocks of a cluster, each with such a part of K, in pieces of so many values.
const BLOCKS: usize = 8;
const PIECE: usize = 256;
/// Most columns: what of x a block has in shared memory.
const MOST_COLUMNS: usize = 8192;
/// Rows of the weight in a tile, and most tiles: beyond them there is enough work without sharing sums.
const TILE_ROWS: usize = 128;
const MOST_TILES: usize = 32;
/// Rows of x that the kernels are compiled for, and columns up to which they were measured to be faster than others.
const ROWS: [(usize, usize, &str); 2] =
    [(8, MOST_COLUMNS, "clustered_8"), (16, 2048, "clustered_16")];

fn name_of(rows: usize, columns: usize) -> Option<(usize, &'static str)> {
    ROWS.into_iter()
        .find(|(most, most_columns, _)| rows <= *most && columns <= *most_columns)
        .map(|(most, _, name)| (most, name))
}

/// Whether the kernels take the weight for so many rows.
fn fits(w: &Weight, rows: usize) -> bool {
    w.bits == 4
        && matches!(w.group_size, 64 | 128)
        && w.columns.is_multiple_of(BLOCKS * PIECE)
        && w.columns <= MOST_COLUMNS
        && w.rows.div_ceil(TILE_ROWS) <= MOST_TILES
        && (w.scales | w.biases).is_multiple_of(16)
        && name_of(rows, w.columns).is_some()
}

/// As the kernel lays out its shared memory.
fn shared_bytes(w: &Weight, rows: usize, is_f16: bool) -> usize {
    let (slice, float) = (w.columns / BLOCKS, size_of::<f32>());
    let groups = slice / w.group_size as usize;
    let sums = groups * float * if is_f16 { 2 } else { 1 };
    rows * (2 * slice + sums + TILE_ROWS * float + float)
}

impl State {
    /// Whether `submit_clustered` makes a product.
    pub(super) fn clusters(&self, w: &Weight, rows: usize) -> bool {
        self.architecture >= ENGINE_ARCHITECTURE && fits(w, rows)
    }

    /// Products of one input, which is not normed in f16: norms are made after the product, where x may be too large for it.
    pub(super) fn submit_clustered(
        &mut self,
        (x, rows, dtype): (usize, usize, DType),
        products: &[(Weight, usize)],
        around: Around,
    ) -> Result<()> {
        let Some((first, _)) = products.first() else {
            return Ok(());
        };
        let Some((most_rows, name)) = name_of(rows, first.columns) else {
            return Ok(());
        };
        let (record, tiles) = weights(products, TILE_ROWS);
        let arguments = Arguments::new()
            .record(&record)
            .wide(x)
            .int(first.columns as i32)
            .int(rows as i32)
            .record(&around.words());
        let shape = Shape {
            grid: [tiles * BLOCKS as u32, 1, 1],
            threads: 256,
            shared_bytes: shared_bytes(first, most_rows, dtype == DType::F16) as u32,
        };
        let text = Text::Clustered {
            group_size: first.group_size,
        };
        let most = self.most_shared_bytes;
        // SAFETY: each weight has its rows of k values, x `rows` of k, the results as many columns as weights have rows; what is
        // around the products is as long as their rows.
        unsafe { self.launch(text, dtype, name, &shape, most, arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_weights_of_several_rows_are_shared() {
        assert!(fits(&Weight::shaped(4, 4096, 2048), 16) && fits(&Weight::shaped(4, 512, 4096), 5));
        assert!(
            !fits(&Weight::shaped(4, 4096, 2048), 17) && !fits(&Weight::shaped(4, 4096, 4096), 9)
        );
        assert!(!fits(&Weight::shaped(4, 14336, 4096), 8), "enough tiles");
        assert!(
            !fits(&Weight::shaped(4, 4096, 768), 8),
            "no piece for every block"
        );
        for columns in [2048, 4096, 8192] {
            for (rows, ..) in ROWS {
                for is_f16 in [false, true] {
                    let bytes = shared_bytes(&Weight::shaped(4, 128, columns), rows, is_f16);
                    assert!(bytes <= 100 << 10, "{columns} {rows} {bytes}");
                }
            }
        }
    }
}
