//! Gated blocks of a mixture of experts.
//!
//! Three ways, by how many pairs of a row and an expert there are. With few, each pair is for itself, and one kernel gates and
//! another sums. With more, pairs are put in order of experts, so that a weight is read once for up to eight of them. With many,
//! rows are brought together and go through `tiled`, in groups of one expert. How many groups there are is known on the device
//! alone: launches are as large as it can be, and blocks without work end at once.

use mlxcel_abi::fused_args::{LinearWeight, MixtureArgs};
use mlxcel_abi::kinds::glu as glu_kind;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::stream::Device;

use super::fused::rows_of;
use super::maps::Reader;
use super::plan::{Tiles, divides};
use super::products::{PLAIN_GROUP_SIZE, Weight, weight};
use super::routing::MOST_EXPERTS;
use super::rows::pairs as line_of_pairs;
use super::submit::weights;
use super::{State, is_half, is_plain, slot, small};
use crate::driver::{Arguments, Element, Shape, Tiling};
use crate::kernels::{GROUP_ARCHITECTURE, TILE_TEAMS, Text};

/// Pairs up to which each is for itself.
const MOST_SINGLE: usize = 64;
/// Pairs of an expert that `experts_gated` takes at a time.
const SMALL_GROUP: usize = 8;
/// Values of K that the kernels of groups take at a time, and most bytes of the rows of a group.
const GROUPED_PIECE: usize = 256;
const MOST_ROW_BYTES: usize = 64 << 10;
/// Pairs an expert, on the average, from which on `tiled` is the better.
const TILED_FROM: usize = 8;
/// Blocks along the second dimension of a launch.
const MOST_GROUPS: usize = 65_535;

pub(super) fn install(table: &mut BackendOps) {
    table.mixture = mixture;
}

slot!(mixture(args: *const MixtureArgs) |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    mixed(device, state, &unsafe { MixtureArgs::read(args) }?)
});

/// A stack of matrices `[E, rows, columns]`; `whole` has all of their rows.
#[derive(Debug, Clone, Copy)]
struct Stack {
    whole: Weight,
    experts: usize,
    rows: usize,
}

impl Stack {
    /// As one of the matrices is wide, for kernels that find the others behind it.
    fn single(&self, words: usize) -> Weight {
        Weight {
            words,
            rows: self.rows,
            ..self.whole
        }
    }
}

fn stack(
    device: &Device<'_>,
    state: &State,
    layer: &LinearWeight,
    dtype: DType,
) -> Result<Option<Stack>> {
    if !layer.bias.is_none() {
        return Ok(None);
    }
    if layer.plain.is_none() {
        let Some((whole, words)) = weight(device, state, &layer.quantized, dtype)? else {
            return Ok(None);
        };
        let &[experts, rows, _] = words.shape() else {
            return Ok(None);
        };
        let (experts, rows) = (experts as usize, rows as usize);
        return Ok(Some(Stack {
            whole,
            experts,
            rows,
        }));
    }
    let b = state.input(device, layer.plain)?;
    let (&[experts, columns, rows], &[apart, 1, stride]) = (b.shape(), b.strides()) else {
        return Ok(None);
    };
    let fits = b.dtype == dtype
        && is_half(dtype)
        && stride == columns
        && apart == rows * columns
        && columns % 8 == 0
        && rows > 0
        && experts > 0
        && (b.data as usize).is_multiple_of(16);
    let whole = Weight {
        words: b.data as usize,
        scales: 0,
        biases: 0,
        bits: 16,
        group_size: PLAIN_GROUP_SIZE,
        rows: (experts * rows) as usize,
        columns: columns as usize,
    };
    Ok(fits.then_some(Stack {
        whole,
        experts: experts as usize,
        rows: rows as usize,
    }))
}

/// One call, with what was found in it.
struct Mixture {
    x: usize,
    dtype: DType,
    rows: usize,
    chosen: usize,
    /// Addresses of the choice and of its weights.
    experts: usize,
    weights: usize,
    residual: usize,
    gate: Stack,
    up: Stack,
    down: Stack,
    kind: i32,
    out: usize,
}

fn mixed(device: Device<'_>, state: &mut State, args: &MixtureArgs) -> Result<Option<Tensor>> {
    let Some((x, rows)) = rows_of(&device, state, args.x)? else {
        return Ok(None);
    };
    let (Some(gate), Some(up), Some(down)) = (
        stack(&device, state, &args.gate, x.dtype)?,
        stack(&device, state, &args.up, x.dtype)?,
        stack(&device, state, &args.down, x.dtype)?,
    ) else {
        return Ok(None);
    };
    let (experts, weights) = (
        state.input(&device, args.experts)?,
        state.input(&device, args.weights)?,
    );
    let &[_, chosen] = experts.shape() else {
        return Ok(None);
    };
    let form = |stack: &Stack| (stack.whole.bits, stack.whole.group_size);
    let columns = gate.whole.columns;
    let fits = (glu_kind::SILU..=glu_kind::RELU).contains(&args.kind)
        && form(&gate) == form(&up)
        && [up.experts, down.experts] == [gate.experts; 2]
        && (up.rows, up.whole.columns) == (gate.rows, columns)
        && (down.rows, down.whole.columns) == (columns, gate.rows)
        && gate.experts as i64 <= MOST_EXPERTS
        && x.len() == rows * columns
        && columns.is_multiple_of(2)
        && gate.rows.is_multiple_of(8)
        && matches!(experts.dtype, DType::U32 | DType::I32)
        && is_plain(&experts, 4)
        && experts.shape() == [rows as i64, chosen]
        && weights.dtype == x.dtype
        && is_plain(&weights, 2)
        && weights.shape() == experts.shape()
        && small((rows as i64).saturating_mul(chosen)).is_some();
    if !fits {
        return Ok(None);
    }
    let residual = match args.residual.is_none() {
        true => 0,
        false => {
            let view = state.input(&device, args.residual)?;
            if view.dtype != x.dtype || !is_plain(&view, 4) || view.shape() != x.shape() {
                return Ok(None);
            }
            view.data as usize
        }
    };
    let (t, out) = state.output(&device, x.dtype, x.shape())?;
    let mixture = Mixture {
        x: x.data as usize,
        dtype: x.dtype,
        rows,
        chosen: chosen as usize,
        experts: experts.data as usize,
        weights: weights.data as usize,
        residual,
        gate,
        up,
        down,
        kind: args.kind as i32,
        out,
    };
    let mut held = Held::default();
    let submitted = mixture.submit(state, &mut held);
    held.give_back(state);
    submitted?;
    Ok(Some(t))
}

/// Blocks that kernels of one call need between them: whoever is given their memory comes after these.
#[derive(Default)]
struct Held(Vec<(usize, usize)>);

impl Held {
    fn take(&mut self, state: &State, bytes: usize) -> Result<usize> {
        let block = state.pool.take(state.driver, bytes)?;
        self.0.push(block);
        Ok(block.0)
    }

    fn give_back(self, state: &State) {
        for (address, size) in self.0 {
            state.pool.put(address, size);
        }
    }
}

/// Pairs in order of experts; addresses on the device.
#[derive(Debug, Clone, Copy, Default)]
struct Order {
    groups: usize,
    count: usize,
    /// Row of x for every place in the order.
    rows: usize,
    /// Place of every pair.
    places: usize,
    /// Groups at most.
    most_groups: usize,
}

impl Mixture {
    fn pairs(&self) -> usize {
        self.rows * self.chosen
    }

    fn bytes(&self, rows: usize, columns: usize) -> usize {
        rows * columns * self.dtype.size_bytes()
    }

    fn submit(&self, state: &mut State, held: &mut Held) -> Result<()> {
        if self.pairs() <= MOST_SINGLE {
            let both = self.gated(state, held, None)?;
            return self.summed(state, both);
        }
        if let Some(size) = self.tile_rows(state) {
            return self.tiled(state, held, size);
        }
        let order = self.ordered(state, held, self.group_size(state))?;
        let both = self.gated(state, held, Some(&order))?;
        let y = self.product(state, held, both, &order)?;
        self.sum_of_pairs(state, y, &order)
    }

    /// Pairs of a group that the kernels have room for.
    fn group_size(&self, state: &State) -> usize {
        let room = |stack: &Stack| match self.shared_bytes(state, stack) {
            Some(each) => (MOST_ROW_BYTES / each as usize).min(SMALL_GROUP),
            None => SMALL_GROUP,
        };
        room(&self.gate).min(room(&self.down)).max(1)
    }

    /// Shared memory that a row of x takes, if a stack is one that the kernels of groups take.
    fn shared_bytes(&self, state: &State, stack: &Stack) -> Option<u32> {
        let w = &stack.whole;
        let row_bytes = (2 * w.columns) as u32;
        let takes = w.bits == 4
            && matches!(w.group_size, 64 | 128)
            && w.columns.is_multiple_of(GROUPED_PIECE)
            && (w.scales | w.biases).is_multiple_of(16)
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

    /// `f(gate x) * up x` of every pair, in the order that there is.
    fn gated(&self, state: &mut State, held: &mut Held, order: Option<&Order>) -> Result<usize> {
        let both = held.take(state, self.bytes(self.pairs(), self.gate.rows))?;
        let found = order.copied().unwrap_or_default();
        let arguments = Arguments::new()
            .record(&self.gate.whole.addresses())
            .record(&self.up.whole.addresses())
            .wide(self.x)
            .wide(both)
            .wide(self.experts)
            .wide(found.groups)
            .wide(found.count)
            .wide(found.rows)
            .int(self.chosen as i32)
            .int(self.gate.experts as i32)
            .int(self.gate.rows as i32)
            .int(self.gate.whole.columns as i32)
            .int(self.kind);
        let text = self.gate.whole.experts_text();
        let (name, shape) = match (order, self.shared_bytes(state, &self.gate)) {
            (Some(order), Some(each)) => {
                // A warp has 8 columns of the result.
                let bytes = each * self.group_size(state) as u32;
                let shape = Self::by_groups(self.gate.rows, 64, order.most_groups, bytes);
                ("grouped_gated", shape)
            }
            (order, _) => {
                let groups = order.map_or(self.pairs(), |order| order.most_groups);
                (
                    "experts_gated",
                    Self::by_groups(self.gate.rows, 16, groups, 0),
                )
            }
        };
        let most = Self::most_shared(state, &shape);
        // SAFETY: the stacks' matrices are found by their sizes, which were compared; experts outside are the last one.
        unsafe { state.launch(text, self.dtype, name, &shape, most, arguments) }?;
        Ok(both)
    }

    /// What a kernel is allowed to be given: those of single pairs have their shared memory fixed.
    fn most_shared(state: &State, shape: &Shape) -> u32 {
        match shape.shared_bytes {
            0 => 0,
            _ => state.most_shared_bytes,
        }
    }

    /// `each` columns of the result a block.
    fn by_groups(columns: usize, each: usize, groups: usize, shared_bytes: u32) -> Shape {
        Shape {
            grid: [columns.div_ceil(each) as u32, groups as u32, 1],
            threads: 256,
            shared_bytes,
        }
    }

    /// The result from gated activations of pairs that are in no order.
    fn summed(&self, state: &mut State, both: usize) -> Result<()> {
        let arguments = Arguments::new()
            .record(&self.down.whole.addresses())
            .wide(both)
            .wide(self.out)
            .wide(self.experts)
            .wide(self.weights)
            .wide(self.residual)
            .int(self.chosen as i32)
            .int(self.down.experts as i32)
            .int(self.down.rows as i32)
            .int(self.down.whole.columns as i32);
        let shape = Self::by_groups(self.down.rows, 16, self.rows, 0);
        let text = self.down.whole.experts_text();
        // SAFETY: as for `gated`; the residual is as large as the result, or null.
        unsafe { state.launch(text, self.dtype, "experts_summed", &shape, 0, arguments) }
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
    fn tile_rows(&self, state: &State) -> Option<usize> {
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
