//! A mixture's pairs in order of experts.
//!
//! Kernels of groups read a weight once for up to eight pairs: through the copy engine (`flow`) where it is there. With many pairs, rows are brought together and go through `tiled`, in
//! groups of one expert. How many groups there are is known on the device alone: launches are as large as it can be, and blocks
//! without work end at once.

use mlxcel_abi::{DType, Result};

use super::State;
use super::maps::Reader;
use super::mixture::{Held, Mixture, Stack};
use super::plan::{Tiles, divides};
use super::products::Weight;
use super::rows::pairs as line_of_pairs;
use super::submit::weights;
use crate::driver::{Arguments, Element, MOST_ACROSS, Shape, Tiling, pair};
use crate::kernels::{ENGINE_ARCHITECTURE, GROUP_ARCHITECTURE, TILE_TEAMS, Text};

/// Pairs of an expert that `experts_gated` takes at a time.
const SMALL_GROUP: usize = 8;
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

/// How `streamed_gated` and `streamed_product` divide a stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Flow {
    warps: usize,
    /// Values of K in a part, and parts that a warp has under way.
    part: usize,
    stages: usize,
    /// Pairs that a block has at a time.
    room: usize,
    shared_bytes: u32,
}

impl Flow {
    fn of(w: &Weight, is_f16: bool, most_bytes: usize) -> Option<Self> {
        const MOST_ROOM: usize = 64;
        const STAGES: usize = 2;
        let groups = w.columns / w.group_size as usize;
        let part = [768, 512, 256]
            .into_iter()
            .find(|part| w.columns.is_multiple_of(*part))?;
        // What columns beyond those of the last pair are read from.
        let behind = 2 * 8 * size_of::<f32>();
        let pair = 2 * w.columns + groups * size_of::<f32>() * if is_f16 { 2 } else { 1 };
        [12, 8, 4].into_iter().find_map(|warps| {
            // Parts, their barriers, and scales and biases of two tiles.
            let fixed = warps * (STAGES * (8 * part + 8) + 2 * 4 * 8 * groups * 2) + behind;
            let room = (most_bytes.checked_sub(fixed)? / pair).min(MOST_ROOM);
            (room >= SMALL_GROUP).then_some(Self {
                warps,
                part,
                stages: STAGES,
                room,
                shared_bytes: (fixed + room * pair) as u32,
            })
        })
    }
}

impl Mixture {
    pub(super) fn submit_grouped(&self, state: &mut State, held: &mut Held) -> Result<()> {
        if let Some(size) = self.tile_rows(state) {
            return self.tiled(state, held, size);
        }
        if let Some((wide, narrow)) = self.flows(state) {
            let order = self.ordered(state, held, SMALL_GROUP)?;
            let both = held.take(state, self.bytes(self.pairs(), self.gate.rows))?;
            let y = held.take(state, self.bytes(self.pairs(), self.down.rows))?;
            let stacks = [self.gate, self.up];
            self.flow(
                state,
                &wide,
                stacks,
                (self.x, both),
                &order,
                "streamed_gated",
            )?;
            let stacks = [self.down, self.down];
            self.flow(
                state,
                &narrow,
                stacks,
                (both, y),
                &order,
                "streamed_product",
            )?;
            return self.sum_of_pairs(state, y, &order);
        }
        let order = self.ordered(state, held, self.group_size(state))?;
        let both = self.gated(state, held, Some(&order))?;
        let y = self.product(state, held, both, &order)?;
        self.sum_of_pairs(state, y, &order)
    }

    /// How the copy engine brings the stacks, if it can.
    pub(super) fn flows(&self, state: &State) -> Option<(Flow, Flow)> {
        /// Groups that a block can meet.
        const MOST_MET: usize = 64;
        let met = self.most_groups(SMALL_GROUP) / state.processors as usize + 2;
        let takes = state.architecture >= ENGINE_ARCHITECTURE
            && met <= MOST_MET
            && [self.gate, self.up, self.down]
                .iter()
                .all(Stack::is_in_pieces)
            && self.down.rows.is_multiple_of(16);
        let of = |stack: &Stack| {
            let is_f16 = self.dtype == DType::F16;
            Flow::of(&stack.whole, is_f16, state.most_shared_bytes as usize)
        };
        takes.then(|| Some((of(&self.gate)?, of(&self.down)?)))?
    }

    /// A product of every pair, in order of experts: gated of the two stacks, or of the first alone.
    fn flow(
        &self,
        state: &mut State,
        flow: &Flow,
        stacks: [Stack; 2],
        (x, out): (usize, usize),
        order: &Order,
        name: &'static str,
    ) -> Result<()> {
        let [first, second] = stacks;
        let maps = [
            state.maps_of(&first.whole, Reader::Flow)?,
            state.maps_of(&second.whole, Reader::Flow)?,
        ];
        let is_gated = x == self.x;
        let numbers = |first: usize, second: usize| pair(first as u32, second as u32);
        let record = [
            maps[0] as u64,
            maps[1] as u64,
            first.whole.scales as u64,
            second.whole.scales as u64,
            first.whole.biases as u64,
            second.whole.biases as u64,
            x as u64,
            out as u64,
            order.groups as u64,
            order.count as u64,
            if is_gated { order.rows as u64 } else { 0 },
            numbers(first.rows, first.whole.columns),
            numbers(flow.part, flow.stages),
            numbers(flow.room, self.kind as usize),
        ];
        let shape = Shape {
            grid: [state.processors, 1, 1],
            threads: 32 * flow.warps as u32,
            shared_bytes: flow.shared_bytes,
        };
        let text = first.whole.experts_text();
        let (most, arguments) = (state.most_shared_bytes, Arguments::new().record(&record));
        // SAFETY: the maps are those of the stacks; groups are below the most that were made room for, and their rows those of x.
        unsafe { state.launch(text, self.dtype, name, &shape, most, arguments) }
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
    fn most_groups(&self, size: usize) -> usize {
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
        let shape = Shape::line(1, 1024);
        let text = Text::Choice { is_full: false };
        // SAFETY: room for all groups that there can be and for two numbers a pair.
        unsafe { state.launch(text, self.dtype, "group_pairs", &shape, 0, arguments) }?;
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
    use super::*;

    #[test]
    fn rings_and_a_group_of_pairs_find_room() {
        const MOST: usize = 225 << 10;
        for is_f16 in [false, true] {
            for columns in [256, 768, 1536, 2048, 4096, 7168] {
                let weight = Weight {
                    words: 0,
                    scales: 0,
                    biases: 0,
                    bits: 4,
                    group_size: 64,
                    rows: 1024,
                    columns,
                };
                let flow = Flow::of(&weight, is_f16, MOST).unwrap();
                assert!(flow.shared_bytes as usize <= MOST, "{flow:?}");
                assert!(flow.room >= SMALL_GROUP, "{flow:?}");
                assert!(
                    flow.stages <= columns.div_ceil(flow.part) + 1,
                    "{columns}: {flow:?}"
                );
            }
        }
    }
}
