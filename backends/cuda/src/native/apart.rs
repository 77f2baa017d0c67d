//! Products whose rows do not depend on how many others there are: what `deterministic` asks for.
//!
//! The kernels of `many_rows` make every row of a tile by itself and order a row's sum in the same way whatever the tile's size, so it is
//! left to divide the sum by the weight's shape alone. Rows come in slabs, of which the counters and the scratch hold one.

use mlxcel_abi::{DType, Result};

use super::plan::Plan;
use super::products::Weight;
use super::{COUNTERS, State};

/// Rows of x that are submitted at a time.
const SLAB_ROWS: usize = 2048;
/// Columns of the result that a block makes.
const TILE: usize = 128;

/// How a weight's products are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Apart {
    splits: usize,
    /// Steps of the sum in a split.
    steps_each: usize,
}

impl Apart {
    /// Enough blocks to be busy with a few rows, by numbers that are the same on every device.
    pub(super) fn of(w: &Weight) -> Self {
        const BLOCKS: usize = 128;
        const MOST_SPLITS: usize = 8;
        const LEAST_STEPS: usize = 4;
        let steps = w.columns.div_ceil(Plan::depth(w)).max(1);
        let wanted = (BLOCKS / w.rows.div_ceil(TILE).max(1))
            .min(steps / LEAST_STEPS)
            .clamp(1, MOST_SPLITS);
        let steps_each = steps.div_ceil(wanted).next_multiple_of(LEAST_STEPS);
        Self {
            splits: steps.div_ceil(steps_each),
            steps_each,
        }
    }
}

impl State {
    /// Whether there is room for such a product on the device.
    pub(super) fn takes_apart(&self, w: &Weight) -> bool {
        self.keeps_rows_apart
            && w.rows.div_ceil(TILE) <= COUNTERS
            && Plan::of(w, SLAB_ROWS, self.processors).shared_bytes <= self.most_shared_bytes
    }

    /// `out = x @ w.T` for `rows` rows; addresses on the device.
    pub(super) fn multiply_apart(
        &mut self,
        w: &Weight,
        (x, rows, dtype): (usize, usize, DType),
        out: usize,
    ) -> Result<()> {
        let Apart { splits, steps_each } = Apart::of(w);
        let tiles = w.rows.div_ceil(TILE);
        let mut first = 0;
        while first < rows {
            let m = (rows - first).min(SLAB_ROWS).min(64 * (COUNTERS / tiles));
            let plan = Plan {
                splits,
                steps_each,
                ..Plan::of(w, m, self.processors)
            };
            let element = dtype.size_bytes();
            let from = x + first * w.columns * element;
            let to = out + first * w.rows * element;
            self.submit_many(w, (from, m, dtype), to, &plan)?;
            first += m;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_divided_by_the_shape_of_the_weight_alone() {
        let of = |rows, columns| Apart::of(&Weight::shaped(4, rows, columns));
        assert_eq!(
            of(4096, 4096),
            Apart {
                splits: 4,
                steps_each: 8
            }
        );
        assert_eq!(
            of(1024, 4096),
            Apart {
                splits: 8,
                steps_each: 4
            }
        );
        assert_eq!(
            of(4096, 14336),
            Apart {
                splits: 4,
                steps_each: 28
            }
        );
        assert_eq!(of(128_256, 4096).splits, 1);
        assert_eq!(of(64, 128).splits, 1);
    }

    #[test]
    fn splits_cover_the_sum() {
        for bits in [4, 8, 16] {
            for rows in [1, 64, 1024, 4096, 128_256] {
                for columns in [8, 64, 576, 4096, 14336] {
                    let w = Weight::shaped(bits, rows, columns);
                    let apart = Apart::of(&w);
                    let steps = columns.div_ceil(Plan::depth(&w));
                    assert!(apart.splits * apart.steps_each >= steps, "{apart:?}");
                    assert!((apart.splits - 1) * apart.steps_each < steps, "{apart:?}");
                }
            }
        }
    }
}
