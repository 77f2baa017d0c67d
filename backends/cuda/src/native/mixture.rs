//! Gated blocks of a mixture of experts.
//!
//! Three ways, by how many pairs of a row and an expert there are. With few, each pair is for itself, and one kernel gates and
//! another sums (`pairs.rs`). With more, pairs are put in order of experts (`grouped.rs`), and rings bring their weights
//! (`flow.rs`) or rows are brought together.

use mlxcel_abi::fused_args::{LinearWeight, MixtureArgs};
use mlxcel_abi::kinds::glu as glu_kind;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::stream::Device;

use super::fused::rows_of;
use super::grouped::{MOST_GROUPS, Order};
use super::products::{PLAIN_GROUP_SIZE, Weight, weight};
use super::routing::MOST_EXPERTS;
use super::{State, is_half, is_plain, slot, small};
use crate::driver::{Arguments, Shape};

/// Pairs up to which each is for itself: where rings bring the experts of pairs in order, and where they do not.
const MOST_SINGLE_BESIDE_FLOW: usize = 16;
const MOST_SINGLE: usize = 64;
/// Values of K that the kernels for quantised stacks take at a time.
const PIECE: usize = 256;

pub(super) fn install(table: &mut BackendOps) {
    table.mixture = mixture;
}

slot!(mixture(args: *const MixtureArgs) |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    mixed(device, state, &unsafe { MixtureArgs::read(args) }?)
});

/// A stack of matrices `[E, rows, columns]`; `whole` has all of their rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stack {
    pub(super) whole: Weight,
    pub(super) experts: usize,
    pub(super) rows: usize,
}

impl Stack {
    /// As one of the matrices is wide, for kernels that find the others behind it.
    pub(super) fn single(&self, words: usize) -> Weight {
        Weight {
            words,
            rows: self.rows,
            ..self.whole
        }
    }

    /// Whether the kernels that take quantised values as they are can read the stack.
    pub(super) fn is_in_pieces(&self) -> bool {
        let w = &self.whole;
        w.bits == 4
            && matches!(w.group_size, 64 | 128)
            && w.columns.is_multiple_of(PIECE)
            && (w.scales | w.biases).is_multiple_of(16)
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
pub(super) struct Mixture {
    pub(super) x: usize,
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) chosen: usize,
    /// Addresses of the choice and of its weights.
    pub(super) experts: usize,
    pub(super) weights: usize,
    pub(super) residual: usize,
    pub(super) gate: Stack,
    pub(super) up: Stack,
    pub(super) down: Stack,
    pub(super) kind: i32,
    pub(super) out: usize,
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
pub(super) struct Held(Vec<(usize, usize)>);

impl Held {
    pub(super) fn take(&mut self, state: &State, bytes: usize) -> Result<usize> {
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

impl Mixture {
    pub(super) fn pairs(&self) -> usize {
        self.rows * self.chosen
    }

    pub(super) fn bytes(&self, rows: usize, columns: usize) -> usize {
        rows * columns * self.dtype.size_bytes()
    }

    fn submit(&self, state: &mut State, held: &mut Held) -> Result<()> {
        // A launch has room for so many, each pair being its own group in the worst case.
        let most_rows = (MOST_GROUPS / self.chosen.max(1)).max(1);
        if state.keeps_rows_apart {
            return (0..self.rows)
                .step_by(most_rows)
                .try_for_each(|first| self.part(first, most_rows).submit_single(state, held));
        }
        if self.rows > most_rows && self.tile_rows(state).is_none() {
            return (0..self.rows)
                .step_by(most_rows)
                .try_for_each(|first| self.part(first, most_rows).submit(state, held));
        }
        let most_single = match self.flows(state) {
            Some(_) => MOST_SINGLE_BESIDE_FLOW,
            None => MOST_SINGLE,
        };
        if self.pairs() <= most_single {
            return self.submit_single(state, held);
        }
        self.submit_grouped(state, held)
    }

    /// At most `count` rows from `first` on.
    fn part(&self, first: usize, count: usize) -> Self {
        let x = first * self.gate.whole.columns * self.dtype.size_bytes();
        let pairs = first * self.chosen;
        Self {
            x: self.x + x,
            rows: count.min(self.rows - first),
            experts: self.experts + pairs * size_of::<u32>(),
            weights: self.weights + pairs * self.dtype.size_bytes(),
            residual: match self.residual {
                0 => 0,
                residual => residual + x,
            },
            out: self.out + x,
            ..*self
        }
    }

    /// `f(gate x) * up x` of every pair, in the order that there is.
    pub(super) fn gated(
        &self,
        state: &mut State,
        held: &mut Held,
        order: Option<&Order>,
    ) -> Result<usize> {
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
    pub(super) fn most_shared(state: &State, shape: &Shape) -> u32 {
        match shape.shared_bytes {
            0 => 0,
            _ => state.most_shared_bytes,
        }
    }

    /// `each` columns of the result a block.
    pub(super) fn by_groups(
        columns: usize,
        each: usize,
        groups: usize,
        shared_bytes: u32,
    ) -> Shape {
        Shape {
            grid: [columns.div_ceil(each) as u32, groups as u32, 1],
            threads: 256,
            shared_bytes,
        }
    }
}
