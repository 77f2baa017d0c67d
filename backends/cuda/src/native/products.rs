//! Products with plain and quantised weights.
//!
//! Which kernel takes a product is in `plan.rs`; where there is none for so many rows, a quantised weight is expanded
//! (`expansion.rs`) for a dense product (`dense.rs`).

use mlxcel_abi::kinds::quant;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::{QuantizedMatmulArgs, QuantizedWeight};
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::Device;

use super::expansion::{through_expansion, through_mlx_expansion};
use super::plan::{Plan, is_small};
use super::{State, is_half, is_plain, refuse_gaps, slot, small};
use crate::driver::{Arguments, MOST_ACROSS, Shape};
use crate::kernels::Text;

/// Rows that `few_rows` takes.
pub(super) const FEW_ROWS: usize = 8;
/// Rows up to which `many_rows` is faster than a dense product, by bits of the weight.
const MOST_ROWS: usize = 128;
const MOST_ROWS_PLAIN: usize = 64;
/// For the text of plain products, which does not use it.
pub(super) const PLAIN_GROUP_SIZE: u32 = 64;

pub(super) fn install(table: &mut BackendOps) {
    table.quantized_matmul = quantized_matmul;
    table.gather_quantized_matmul = gather_quantized_matmul;
    table.matmul = matmul;
}

slot!(join quantized_matmul(args: *const QuantizedMatmulArgs) |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    quantized(device, state, &unsafe { QuantizedMatmulArgs::read(args) }?)
});
slot!(gather_quantized_matmul(args: *const QuantizedMatmulArgs) |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    chosen(device, state, &unsafe { QuantizedMatmulArgs::read(args) }?)
});
slot!(join matmul(a: Tensor, b: Tensor) |device, state| plain(device, state, a, b));

/// A weight that the kernels take, all leading axes as rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Weight {
    pub(super) words: usize,
    pub(super) scales: usize,
    pub(super) biases: usize,
    pub(super) bits: u32,
    pub(super) group_size: u32,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Weight {
    pub(super) fn text(&self) -> Text {
        Text::Product {
            bits: self.bits,
            group_size: self.group_size,
        }
    }

    /// One that is nowhere, for how products are divided.
    #[cfg(test)]
    pub(super) fn shaped(bits: u32, rows: usize, columns: usize) -> Self {
        Self {
            words: 0,
            scales: 0,
            biases: 0,
            bits,
            group_size: PLAIN_GROUP_SIZE,
            rows,
            columns,
        }
    }

    /// For a stack of such weights.
    pub(super) fn experts_text(&self) -> Text {
        Text::Experts {
            bits: self.bits,
            group_size: self.group_size,
        }
    }

    /// The kernels' `Stack`.
    pub(super) fn addresses(&self) -> [u64; 3] {
        [self.words, self.scales, self.biases].map(|address| address as u64)
    }
}

pub(super) fn weight(
    device: &Device<'_>,
    state: &State,
    w: &QuantizedWeight,
    dtype: DType,
) -> Result<Option<(Weight, View)>> {
    let known = w.spec.mode == quant::AFFINE
        && matches!(w.spec.bits, 4 | 8)
        && matches!(w.spec.group_size, 32 | 64 | 128)
        && !w.biases.is_none();
    if !known {
        return Ok(None);
    }
    let (words, scales, biases) = (
        state.input(device, w.weight)?,
        state.input(device, w.scales)?,
        state.input(device, w.biases)?,
    );
    let rank = words.shape().len();
    let fits = words.dtype == DType::U32
        && [scales.dtype, biases.dtype] == [dtype; 2]
        && is_plain(&words, 16)
        && is_plain(&scales, 4)
        && is_plain(&biases, 4)
        && rank >= 2
        && scales.shape().len() == rank
        && scales.shape() == biases.shape()
        && scales.shape().get(..rank - 1) == words.shape().get(..rank - 1);
    if !fits {
        return Ok(None);
    }
    let groups = scales.shape().last().map_or(0, |n| *n as usize);
    let columns = groups * w.spec.group_size as usize;
    let packed = words.shape().last().map_or(0, |n| *n as usize);
    if packed * 32 != columns * w.spec.bits as usize {
        return Ok(None);
    }
    let found = Weight {
        words: words.data as usize,
        scales: scales.data as usize,
        biases: biases.data as usize,
        bits: w.spec.bits,
        group_size: w.spec.group_size,
        rows: words.len() / packed,
        columns,
    };
    Ok(Some((found, words)))
}

/// Half-typed activations whose last axis has `columns` elements.
fn activations(
    device: &Device<'_>,
    state: &State,
    x: Tensor,
    columns: usize,
) -> Result<Option<View>> {
    let view = state.input(device, x)?;
    refuse_gaps(state, &[&view])?;
    let fits = is_half(view.dtype)
        && is_plain(&view, 16)
        && view.shape().last() == Some(&(columns as i64));
    Ok(fits.then_some(view))
}

pub(super) fn with_last(shape: &[i64], last: usize) -> Vec<i64> {
    let mut shape = shape.to_vec();
    if let Some(end) = shape.last_mut() {
        *end = last as i64;
    }
    shape
}

pub(super) fn quantized(
    device: Device<'_>,
    state: &mut State,
    args: &QuantizedMatmulArgs,
) -> Result<Option<Tensor>> {
    state.settle(
        &device,
        &[args.x, args.w.weight, args.w.scales, args.w.biases],
    )?;
    let (x, _) = device.view(args.x)?;
    if args.transpose != 1 || !is_half(x.dtype) {
        return through_mlx_expansion(&device, state, args);
    }
    let Some((w, words)) = weight(&device, state, &args.w, x.dtype)? else {
        return through_mlx_expansion(&device, state, args);
    };
    let Some(x) = activations(&device, state, args.x, w.columns)? else {
        return Ok(None);
    };
    let m = x.len() / w.columns;
    if words.shape().len() != 2 {
        return Ok(None);
    }
    if state.keeps_rows_apart {
        return match state.takes_apart(&w) {
            true => apart(&device, state, &x, &w, m).map(Some),
            false => Ok(None),
        };
    }
    if state.is_dense(&w, m) {
        state.flush(&device)?;
        return through_expansion(device, state, (args.x, &x), &w);
    }
    let held = [args.x, args.w.weight, args.w.scales, args.w.biases];
    multiply(&device, state, &x, &w, m, &held).map(Some)
}

/// A plain weight, given as the transposed view of its rows.
pub(super) fn plain_weight(
    device: &Device<'_>,
    state: &State,
    b: Tensor,
    dtype: DType,
) -> Result<Option<Weight>> {
    let b = state.input(device, b)?;
    let (&[columns, rows], &[1, stride]) = (b.shape(), b.strides()) else {
        return Ok(None);
    };
    let fits = b.dtype == dtype
        && is_half(dtype)
        && stride == columns
        && columns % 8 == 0
        && rows > 0
        && (b.data as usize).is_multiple_of(16);
    Ok(fits.then_some(Weight {
        words: b.data as usize,
        scales: 0,
        biases: 0,
        bits: 16,
        group_size: PLAIN_GROUP_SIZE,
        rows: rows as usize,
        columns: columns as usize,
    }))
}

/// `a @ b` where `b` is the transposed view of a row-major weight.
pub(super) fn plain(
    device: Device<'_>,
    state: &mut State,
    a: Tensor,
    b: Tensor,
) -> Result<Option<Tensor>> {
    state.settle(&device, &[a, b])?;
    let (view, _) = device.view(a)?;
    let Some(w) = plain_weight(&device, state, b, view.dtype)? else {
        return Ok(None);
    };
    let Some(x) = activations(&device, state, a, w.columns)? else {
        return Ok(None);
    };
    let m = x.len() / w.columns;
    if state.takes_apart(&w) && x.shape().len() >= 2 {
        return apart(&device, state, &x, &w, m).map(Some);
    }
    if state.keeps_rows_apart || x.shape().len() < 2 {
        return Ok(None);
    }
    if state.is_dense(&w, m) {
        return state.multiply_dense(&device, &x, &w, 0);
    }
    multiply(&device, state, &x, &w, m, &[a, b]).map(Some)
}

impl State {
    /// Whether no kernel of ours makes a product of `m` rows.
    pub(super) fn is_dense(&self, w: &Weight, m: usize) -> bool {
        let most = if w.bits == 16 {
            MOST_ROWS_PLAIN
        } else {
            MOST_ROWS
        };
        let takes = (m <= most || is_small(w, m)) && has_room(self, w, m);
        self.way(w, m).is_none() && !takes
    }
}

/// Whether `many_rows` has room for so many rows: shared memory, and blocks along them.
fn has_room(state: &State, w: &Weight, m: usize) -> bool {
    let plan = Plan::of(w, m, state.processors);
    plan.shared_bytes <= state.most_shared_bytes && plan.tiles.1 <= MOST_ACROSS
}

/// A product whose rows do not depend on each other.
fn apart(device: &Device<'_>, state: &mut State, x: &View, w: &Weight, m: usize) -> Result<Tensor> {
    state.flush(device)?;
    let (t, out) = state.output(device, x.dtype, &with_last(x.shape(), w.rows))?;
    state.multiply_apart(w, (x.data as usize, m, x.dtype), out)?;
    Ok(t)
}

fn multiply(
    device: &Device<'_>,
    state: &mut State,
    x: &View,
    w: &Weight,
    m: usize,
    held: &[Tensor],
) -> Result<Tensor> {
    let (t, out) = state.output(device, x.dtype, &with_last(x.shape(), w.rows))?;
    if let Some(way) = state.way(w, m) {
        state.defer_product(device, x, w, (way, m), (t, out), held)?;
        return Ok(t);
    }
    state.flush(device)?;
    let plan = Plan::of(w, m, state.processors);
    state.submit_many(w, (x.data as usize, m, x.dtype), out, &plan)?;
    Ok(t)
}

/// One row of activations for every product: decode steps of a mixture of experts.
fn chosen(
    device: Device<'_>,
    state: &mut State,
    args: &QuantizedMatmulArgs,
) -> Result<Option<Tensor>> {
    /// Beyond these, products of the same expert should share its weight.
    const MOST_PAIRS: usize = 512;
    let (x, _) = device.view(args.x)?;
    if args.transpose != 1
        || args.rhs_indices.is_none()
        || args.lhs_indices.is_none()
        || !is_half(x.dtype)
    {
        return Ok(None);
    }
    let (lhs, _) = device.view(args.lhs_indices)?;
    let rank = x.shape().len();
    let is_one_row = rank >= 2 && x.shape().get(rank - 2) == Some(&1);
    let most_pairs = if state.keeps_rows_apart {
        MOST_ACROSS
    } else {
        MOST_PAIRS
    };
    if !is_one_row || lhs.len() > most_pairs {
        return Ok(None);
    }
    let Some((w, words)) = weight(&device, state, &args.w, x.dtype)? else {
        return Ok(None);
    };
    let &[experts, n, _] = words.shape() else {
        return Ok(None);
    };
    let Some(x) = activations(&device, state, args.x, w.columns)? else {
        return Ok(None);
    };
    let (lhs, rhs) = (
        state.input(&device, args.lhs_indices)?,
        state.input(&device, args.rhs_indices)?,
    );
    let fits = [lhs.dtype, rhs.dtype] == [DType::U32; 2]
        && lhs.shape() == rhs.shape()
        && is_plain(&lhs, 4)
        && is_plain(&rhs, 4)
        && experts > 0;
    let (Some(n), Some(experts), true) = (small(n), small(experts), fits) else {
        return Ok(None);
    };
    let shape: Vec<i64> = lhs
        .shape()
        .iter()
        .copied()
        .chain([1, i64::from(n)])
        .collect();
    let (t, out) = state.output(&device, x.dtype, &shape)?;
    let arguments = Arguments::new()
        .record(&w.addresses())
        .wide(x.data as usize)
        .wide(out)
        .wide(rhs.data as usize)
        .wide(0)
        .wide(0)
        .wide(lhs.data as usize)
        .int(experts)
        .int(n)
        .int(w.columns as i32);
    let launch = Shape {
        grid: [(n as u32).div_ceil(16), lhs.len() as u32, 1],
        threads: 256,
        shared_bytes: 0,
    };
    let text = w.experts_text();
    // SAFETY: indices of rows come from the family, which keeps them in range as for MLX's own operation.
    unsafe { state.launch(text, x.dtype, "experts_product", &launch, 0, arguments) }?;
    Ok(Some(t))
}
