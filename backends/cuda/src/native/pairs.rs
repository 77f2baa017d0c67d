//! Pairs of a row and an expert that are each for themselves: one kernel gates, another sums.

use mlxcel_abi::Result;

use super::State;
use super::maps::Reader;
use super::mixture::{Held, Mixture};
use super::products::Weight;
use crate::driver::{Arguments, Shape};
use crate::kernels::ENGINE_ARCHITECTURE;

/// Most values of K that `pairs_gated` and `pairs_summed` take.
const MOST_COLUMNS: usize = 8192;

/// How pairs are made each for itself: tiles or warps of a block and shared memory that it takes, by `pairs_gated` and by `pairs_summed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Apart {
    gated_tiles: usize,
    gated_bytes: u32,
    summed_warps: usize,
    summed_bytes: u32,
}

impl Apart {
    /// Warps that share a tile of `pairs_gated`.
    const SPLITS: usize = 4;

    fn of(gate: &Weight, down: &Weight, chosen: usize) -> Option<Self> {
        const MOST_WARPS: usize = 8;
        const MOST_TILES: usize = 4;
        /// Three such blocks find room on a multiprocessor.
        const BLOCK_BYTES: usize = 72 << 10;
        let groups = |w: &Weight| w.columns / w.group_size as usize;
        // As the kernels lay out their shared memory. A tile: its lines, their scales and biases, barriers; x with the sums of its
        // groups, twice for f16.
        let tile = gate.columns * 8 + 4 * 16 * groups(gate) + 8 * (Self::SPLITS + 1);
        let x = 2 * gate.columns + 2 * (4 * groups(gate) + 32) + 8;
        let gated_tiles = (BLOCK_BYTES.saturating_sub(x) / tile).clamp(1, MOST_TILES);
        // A warp: barriers, its rows, their scales and biases, and x.
        let slot = 8 * 8 + 16 * (down.columns / 2 + 32) + 4 * 16 * groups(down) + 2 * down.columns;
        let summed_warps = chosen.min(MOST_WARPS);
        let bytes = |n: usize| u32::try_from(n).ok();
        Some(Self {
            gated_tiles,
            gated_bytes: bytes(gated_tiles * tile + x)?,
            summed_warps,
            summed_bytes: bytes(summed_warps * slot)?,
        })
    }
}

impl Mixture {
    /// Each pair for itself.
    pub(super) fn submit_single(&self, state: &mut State, held: &mut Held) -> Result<()> {
        match self.apart(state) {
            Some(apart) => self.submit_apart(state, held, &apart),
            None => {
                let both = self.gated(state, held, None)?;
                self.summed(state, both)
            }
        }
    }

    /// How each pair is made for itself by the copy engine, if it can be.
    fn apart(&self, state: &State) -> Option<Apart> {
        /// Columns of a tile of the result.
        const COLUMNS: usize = 16;
        let takes = state.architecture >= ENGINE_ARCHITECTURE
            && [self.gate, self.up, self.down]
                .iter()
                .all(|stack| stack.is_in_pieces() && stack.whole.columns <= MOST_COLUMNS)
            && self.down.rows.is_multiple_of(COLUMNS);
        let apart = Apart::of(&self.gate.whole, &self.down.whole, self.chosen)?;
        (takes && apart.gated_bytes.max(apart.summed_bytes) <= state.most_shared_bytes)
            .then_some(apart)
    }

    fn submit_apart(&self, state: &mut State, held: &mut Held, apart: &Apart) -> Result<()> {
        let both = held.take(state, self.bytes(self.pairs(), self.gate.rows))?;
        let text = self.gate.whole.experts_text();
        let most = state.most_shared_bytes;
        let gate_map = state.maps_of(&self.gate.whole, Reader::Flow)?;
        let up_map = state.maps_of(&self.up.whole, Reader::Flow)?;
        let arguments = Arguments::new()
            .wide(gate_map)
            .wide(up_map)
            .record(&self.gate.whole.addresses())
            .record(&self.up.whole.addresses())
            .wide(self.x)
            .wide(both)
            .wide(self.experts)
            .int(self.chosen as i32)
            .int(self.gate.experts as i32)
            .int(self.gate.rows as i32)
            .int(self.gate.whole.columns as i32)
            .int(self.kind);
        // A tile has 8 columns of the result.
        let blocks = self.gate.rows.div_ceil(8 * apart.gated_tiles);
        let shape = Shape {
            grid: [blocks as u32, self.pairs() as u32, 1],
            threads: (32 * Apart::SPLITS * apart.gated_tiles) as u32,
            shared_bytes: apart.gated_bytes,
        };
        // SAFETY: the stacks' matrices are found by their sizes, which were compared; experts outside are the last one.
        unsafe { state.launch(text, self.dtype, "pairs_gated", &shape, most, arguments) }?;
        let arguments = self.of_summed(both);
        let shape = Shape {
            grid: [(self.down.rows / 16) as u32, self.rows as u32, 1],
            threads: 32 * apart.summed_warps as u32,
            shared_bytes: apart.summed_bytes,
        };
        let text = self.down.whole.experts_text();
        // SAFETY: as above, and it comes right after `pairs_gated`; the residual is as large as the result, or null.
        unsafe { state.launch(text, self.dtype, "pairs_summed", &shape, most, arguments) }
    }

    /// The result from gated activations of pairs that are in no order.
    fn summed(&self, state: &mut State, both: usize) -> Result<()> {
        let arguments = self.of_summed(both);
        let shape = Self::by_groups(self.down.rows, 16, self.rows, 0);
        let text = self.down.whole.experts_text();
        // SAFETY: as for `gated`; the residual is as large as the result, or null.
        unsafe { state.launch(text, self.dtype, "experts_summed", &shape, 0, arguments) }
    }

    /// What `pairs_summed` and `experts_summed` take.
    fn of_summed(&self, both: usize) -> Arguments {
        Arguments::new()
            .record(&self.down.whole.addresses())
            .wide(both)
            .wide(self.out)
            .wide(self.experts)
            .wide(self.weights)
            .wide(self.residual)
            .int(self.chosen as i32)
            .int(self.down.experts as i32)
            .int(self.down.rows as i32)
            .int(self.down.whole.columns as i32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_pairs_leave_room_for_others() {
        // Qwen3-30B-A3B.
        let apart = Apart::of(
            &Weight::shaped(4, 128 * 768, 2048),
            &Weight::shaped(4, 128 * 2048, 768),
            8,
        )
        .unwrap();
        assert_eq!((apart.gated_tiles, apart.summed_warps), (3, 8));
        assert_eq!(
            apart.gated_bytes,
            3 * (16_384 + 2048 + 40) + 4096 + 2 * 160 + 8
        );
        assert_eq!(apart.summed_bytes, 8 * (64 + 16 * 416 + 32 * 24 + 1536));
        for columns in [256, 1024, 4096, 8192] {
            let apart = Apart::of(
                &Weight::shaped(4, 256, columns),
                &Weight::shaped(4, columns, 256),
                2,
            )
            .unwrap();
            assert!((1..=4).contains(&apart.gated_tiles), "{apart:?}");
            assert!(apart.gated_bytes <= 100 << 10, "{apart:?}");
        }
    }
}
