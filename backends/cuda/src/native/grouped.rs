//! A mixture's pairs in order of experts.
//!
//! Kernels of groups read a weight once for up to eight pairs: through the copy engine (`flow.rs`) where it is there. With many
//! pairs, rows are brought together and go through `tiled`, in groups of one expert. How many groups there are is known on the
//! device alone: launches are as large as it can be, and blocks without work end at once.

use mlxcel_abi::Result;

use super::State;
use super::maps::Reader;
use super::mixture::{Held, Mixture, Stack};
use super::plan::{Tiles, divides};
use super::rows::pairs as line_of_pairs;
use super::submit::weights;
use crate::driver::{Arguments, Element, MOST_ACROSS, Shape, Tiling};
use crate::kernels::{GROUP_ARCHITECTURE, TILE_TEAMS, Text};

/// Pairs of an expert that `experts_gated` takes at a time.
pub(super) const SMALL_GROUP: usize = 8;
/// Most bytes of the rows of a group.
const MOST_ROW_BYTES: usize = 64 << 10;
/// Pairs an expert, on the average, from which on `tiled` is the better.
const TILED_FROM: usize = 8;
/// Groups that a launch has blocks for.
pub(super) const MOST_GROUPS: usize = MOST_ACROSS;

/// Pairs in order of experts; addresses on the device.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Order {
    pub(super) groups: usize,
    pub(super) count: usize,
    /// Row of x for every place in the order.
    pub(super) rows: usize,
    /// Place of every pair.
    pub(super) places: usize,
    /// Groups at most.
    pub(super) most_groups: usize,
}

/// Ranges of pairs that `group_pairs` has a warp each for, and its shared memory: a number for each of them and each expert.
fn parts(experts: usize, most_shared_bytes: u32) -> (u32, u32) {
    const MOST: u32 = 32;
    let each = (experts * size_of::<u32>()) as u32;
    let parts = (most_shared_bytes / each.max(1)).clamp(1, MOST);
    (parts, parts * each)
}

impl Mixture {
    pub(super) fn submit_grouped(&self, state: &mut State, held: &mut Held) -> Result<()> {
        if let Some(size) = self.tile_rows(state) {
            return self.tiled(state, held, size);
        }
        if let Some((wide, narrow)) = self.flows(state) {
            let order = self.ordered(state, held, SMALL_GROUP)?;
            let y = self.flow_through(state, held, [wide, narrow], &order)?;
            return self.sum_of_pairs(state, y, &order);
        }
        let order = self.ordered(state, held, self.group_size(state))?;
        let both = self.gated(state, held, Some(&order))?;
        let y = self.product(state, held, both, &order)?;
        self.sum_of_pairs(state, y, &order)
    }

    /// Pairs of a group that the kernels have room for.
    pub(super) fn group_size(&self, state: &State) -> usize {
        let room = |stack: &Stack| match self.shared_bytes(state, stack) {
            Some(each) => (MOST_ROW_BYTES / each as usize).min(SMALL_GROUP),
            None => SMALL_GROUP,
        };
        room(&self.gate).min(room(&self.down)).max(1)
    }

    /// Shared memory that a row of x takes, if a stack is one that the kernels of groups take.
    pub(super) fn shared_bytes(&self, state: &State, stack: &Stack) -> Option<u32> {
        let w = &stack.whole;
        let row_bytes = (2 * w.columns) as u32;
        let takes = stack.is_in_pieces()
            && row_bytes as usize <= MOST_ROW_BYTES
            && row_bytes <= state.most_shared_bytes;
        takes.then_some(row_bytes)
    }

    /// Most groups of up to `size` pairs.
    pub(super) fn most_groups(&self, size: usize) -> usize {
        self.pairs()
            .min(self.gate.experts + self.pairs() / size)
            .min(MOST_GROUPS)
    }

    fn ordered(&self, state: &mut State, held: &mut Held, size: usize) -> Result<Order> {
        const COUNT_BYTES: usize = 16;
        let most_groups = self.most_groups(size);
        let (group_bytes, pair_bytes) = (16 * most_groups, 4 * self.pairs());
        let count = held.take(state, COUNT_BYTES + group_bytes + 2 * pair_bytes)?;
        let groups = count + COUNT_BYTES;
        let order = Order {
            groups,
            count,
            rows: groups + group_bytes,
            places: groups + group_bytes + pair_bytes,
            most_groups,
        };
        let arguments = Arguments::new()
            .wide(self.experts)
            .wide(order.groups)
            .wide(order.count)
            .wide(order.rows)
            .wide(order.places)
            .int(self.pairs() as i32)
            .int(self.gate.experts as i32)
            .int(self.chosen as i32)
            .int(size as i32);
        let (parts, shared_bytes) = parts(self.gate.experts, state.most_shared_bytes);
        let shape = Shape {
            shared_bytes,
            ..Shape::line(1, 1024)
        };
        let (text, most) = (Text::Choice { is_full: false }, state.most_shared_bytes);
        let arguments = arguments.int(parts as i32);
        // SAFETY: room for all groups that there can be and for two numbers a pair, and for a number of each part and expert.
        unsafe { state.launch(text, self.dtype, "group_pairs", &shape, most, arguments) }?;
        Ok(order)
    }

    /// The last product of every pair, in order of experts.
    fn product(
        &self,
        state: &mut State,
        held: &mut Held,
        both: usize,
        order: &Order,
    ) -> Result<usize> {
        let y = held.take(state, self.bytes(self.pairs(), self.down.rows))?;
        let arguments = Arguments::new()
            .record(&self.down.whole.addresses())
            .wide(both)
            .wide(y)
            .wide(self.experts)
            .wide(order.groups)
            .wide(order.count)
            .wide(0)
            .int(self.down.experts as i32)
            .int(self.down.rows as i32)
            .int(self.down.whole.columns as i32);
        let text = self.down.whole.experts_text();
        let groups = order.most_groups;
        let (name, shape) = match self.shared_bytes(state, &self.down) {
            Some(each) => {
                let bytes = each * self.group_size(state) as u32;
                (
                    "grouped_product",
                    Self::by_groups(self.down.rows, 128, groups, bytes),
                )
            }
            None => (
                "experts_product",
                Self::by_groups(self.down.rows, 16, groups, 0),
            ),
        };
        let most = Self::most_shared(state, &shape);
        // SAFETY: as for `gated`.
        unsafe { state.launch(text, self.dtype, name, &shape, most, arguments) }?;
        Ok(y)
    }

    fn sum_of_pairs(&self, state: &mut State, y: usize, order: &Order) -> Result<()> {
        let words = self.down.rows / 2;
        let arguments = Arguments::new()
            .wide(y)
            .wide(order.places)
            .wide(self.weights)
            .wide(self.residual)
            .wide(self.out)
            .int(self.chosen as i32)
            .int(words as i32);
        let shape = Shape {
            grid: [self.rows as u32, words.div_ceil(512).clamp(1, 64) as u32, 1],
            threads: 256,
            shared_bytes: 0,
        };
        let text = Text::Choice { is_full: false };
        // SAFETY: a row of `y` for every pair; weights and places of as many.
        unsafe { state.launch(text, self.dtype, "sum_pairs", &shape, 0, arguments) }
    }

    /// Rows that a group of `tiled` has at most, if that is the way.
    pub(super) fn tile_rows(&self, state: &State) -> Option<usize> {
        let each = self.pairs() / self.gate.experts;
        let takes = state.architecture == GROUP_ARCHITECTURE
            && each >= TILED_FROM
            && divides(&self.gate.whole)
            && divides(&self.up.whole)
            && divides(&self.down.whole);
        // Groups that most experts fill.
        let size = match each {
            ..=12 => 16,
            13..=24 => 32,
            25..=48 => 64,
            _ => 128,
        };
        let tiles = 2 * self.gate.rows.max(self.down.rows).div_ceil(Tiles::ROWS);
        let groups = self.most_groups(size);
        let counted = Tiles::grouped(&self.gate.whole, size, tiles, groups, state.processors);
        (takes && counted.is_some() && groups < MOST_GROUPS).then_some(size)
    }

    fn tiled(&self, state: &mut State, held: &mut Held, size: usize) -> Result<()> {
        let order = self.ordered(state, held, size)?;
        let (pairs, width, inner) = (self.pairs(), self.gate.whole.columns, self.gate.rows);
        let sorted = held.take(state, self.bytes(pairs, width))?;
        let units = width / 2;
        let arguments = Arguments::new()
            .wide(self.x)
            .wide(order.rows)
            .wide(sorted)
            .int(units as i32)
            .int(self.rows as i32)
            .int(0);
        let shape = Shape {
            grid: [pairs as u32, units.div_ceil(512).clamp(1, 64) as u32, 1],
            threads: 128,
            shared_bytes: 0,
        };
        // SAFETY: a row for every pair; rows of x are below their number.
        unsafe { state.launch(Text::Rows, self.dtype, "take_words", &shape, 0, arguments) }?;
        let made = self.bytes(pairs, inner);
        let (gate, up) = (held.take(state, made)?, held.take(state, made)?);
        let items = [(self.gate, gate), (self.up, up)];
        self.grouped_product(state, sorted, &items, &order, size)?;
        let both = held.take(state, made)?;
        let n = pairs * inner / 2;
        let arguments = Arguments::new()
            .wide(gate)
            .wide(up)
            .wide(both)
            .wide(n)
            .int(self.kind);
        // SAFETY: three arrays of `n` pairs of values.
        unsafe {
            state.launch(
                Text::Rows,
                self.dtype,
                "glu",
                &line_of_pairs(n),
                0,
                arguments,
            )
        }?;
        let y = held.take(state, self.bytes(pairs, width))?;
        self.grouped_product(state, both, &[(self.down, y)], &order, size)?;
        self.sum_of_pairs(state, y, &order)
    }

    /// Products of rows in order of experts by the kernel that has groups of warps.
    fn grouped_product(
        &self,
        state: &mut State,
        x: usize,
        items: &[(Stack, usize)],
        order: &Order,
        size: usize,
    ) -> Result<()> {
        let Some((first, _)) = items.first().copied() else {
            return Ok(());
        };
        let mut singles = Vec::with_capacity(items.len());
        for (stack, out) in items {
            let map = state.maps_of(&stack.whole, Reader::Tiles)?;
            singles.push((stack.single(map), *out));
        }
        let (record, tiles) = weights(&singles, Tiles::ROWS);
        let w = first.whole;
        let groups = order.most_groups;
        let plan = Tiles::grouped(&w, size, tiles as usize, groups, state.processors)
            .ok_or_else(|| mlxcel_abi::AbiError::internal("a mixture with too many tiles"))?;
        let map = state.driver.tiles(&Tiling {
            element: Element::Half,
            address: x,
            rows: self.pairs(),
            columns: w.columns,
            row_bytes: 2 * w.columns,
            tile_rows: plan.columns as u32,
            tile_columns: 64,
            is_swizzled: true,
        })?;
        let scratch = state.scratch(plan.scratch_bytes)?;
        let arguments = Arguments::new()
            .record(&record)
            .record(&map.0)
            .wide(scratch)
            .wide(state.counters)
            .int(w.columns as i32)
            .int(self.pairs() as i32)
            .int(tiles as i32)
            .int(0)
            .wide(order.groups)
            .wide(order.count);
        let shape = Shape {
            grid: [plan.blocks as u32, 1, 1],
            threads: 128 * TILE_TEAMS as u32 + 32,
            shared_bytes: plan.shared_bytes,
        };
        let text = Text::Tiled {
            bits: w.bits,
            group_size: w.group_size,
            is_grouped: true,
        };
        let most = state.most_shared_bytes;
        // SAFETY: the maps are those of the stacks and of x; the scratch holds two parts of every block, the counters one number
        // for every tile of every group.
        unsafe { state.launch(text, self.dtype, plan.name, &shape, most, arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::parts;
    use crate::native::routing::MOST_EXPERTS;

    #[test]
    fn parts_of_pairs_fit_a_block() {
        assert_eq!(parts(128, 225 << 10), (32, 16 << 10));
        assert_eq!(parts(MOST_EXPERTS as usize, 225 << 10), (32, 128 << 10));
        // As much as compute capability 8.6 has.
        let (count, bytes) = parts(MOST_EXPERTS as usize, 97 << 10);
        assert_eq!(count, 24);
        assert!(bytes <= 97 << 10);
    }
}
