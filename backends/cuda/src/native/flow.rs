//! Products of pairs in order of experts, for which rings in shared memory bring the weights: `experts_streamed.cu`.

use mlxcel_abi::{DType, Result};

use super::State;
use super::grouped::{Order, SMALL_GROUP};
use super::maps::Reader;
use super::mixture::{Held, Mixture, Stack};
use super::products::Weight;
use crate::driver::{Arguments, Shape, pair};
use crate::kernels::ENGINE_ARCHITECTURE;

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
    /// The last product of every pair, in order of experts.
    pub(super) fn flow_through(
        &self,
        state: &mut State,
        held: &mut Held,
        [wide, narrow]: [Flow; 2],
        order: &Order,
    ) -> Result<usize> {
        let both = held.take(state, self.bytes(self.pairs(), self.gate.rows))?;
        let y = held.take(state, self.bytes(self.pairs(), self.down.rows))?;
        let stacks = [self.gate, self.up];
        self.flow(
            state,
            &wide,
            stacks,
            (self.x, both),
            order,
            "streamed_gated",
        )?;
        let stacks = [self.down, self.down];
        self.flow(state, &narrow, stacks, (both, y), order, "streamed_product")?;
        Ok(y)
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
