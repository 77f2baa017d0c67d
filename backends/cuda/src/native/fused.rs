//! Whole layers of a decoder in one call: with very few rows as one or two kernels that norm their input and add to their result,
//! else as the calls that they stand for.

use core::ffi::c_void;

use mlxcel_abi::fused_args::{GatedMlpArgs, InputNorm, LinearWeight, ProjectArgs};
use mlxcel_abi::kinds::{binary as binary_kind, glu as glu_kind};
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::QuantizedMatmulArgs;
use mlxcel_abi::{DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::View;
use mlxcel_backend_mlx::stream::Device;

use super::expansion::in_full;
use super::pending::let_go;
use super::plan::Way;
use super::products::{Weight, plain, plain_weight, quantized, weight};
use super::rows::{gated, norm, pairwise};
use super::submit::Around;
use super::{Outcome, State, attempt, is_half, is_plain, refuse_gaps, slot};

/// Layers of one input that go together at most.
const MOST_LAYERS: usize = 3;

pub(super) fn install(table: &mut BackendOps) {
    table.project = project;
    table.gated_mlp = gated_mlp;
    table.add_rms_norm = add_rms_norm;
}

slot!(gated_mlp(args: *const GatedMlpArgs) |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    feed_forward(device, state, &unsafe { GatedMlpArgs::read(args) }?)
});

unsafe extern "C" fn project(
    ctx: *mut c_void,
    args: *const ProjectArgs,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |device: Device<'_>, state: &mut State| {
        // SAFETY: the slot's contract: a live argument struct.
        let read = unsafe { ProjectArgs::read(args) }?;
        if out.is_null() || read.layers.is_null() {
            return Ok(Outcome::Pass);
        }
        // SAFETY: the slot's contract: as many layers as it says.
        let layers = unsafe { core::slice::from_raw_parts(read.layers, read.n_layers as usize) };
        let Some(made) = projections(device, state, &read, layers)? else {
            return Ok(Outcome::Pass);
        };
        for (i, t) in made.into_iter().enumerate() {
            // SAFETY: the caller's to write, one for each layer.
            unsafe { out.add(i).write(t) };
        }
        Ok(Outcome::Done)
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, false, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.project)(ctx, args, out, err),
        }
    }
}

slot!(join add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: f32) -> [Tensor; 2] |device, state| {
    let (a, b) = (state.input(&device, x)?, state.input(&device, residual)?);
    if !is_half(a.dtype) || a.shape() != b.shape() {
        return Ok(Outcome::Pass);
    }
    let Some(sum) = pairwise(device, state, binary_kind::ADD, residual, x)? else {
        return Ok(Outcome::Pass);
    };
    // Where there is no norm the sum is given back with all else that was made.
    Ok(norm(device, state, sum, w, eps)?.map(|normed| [sum, normed]))
});

/// A layer's weight in our kernels' form. Layers with a bias are left to their parts.
fn layer(
    device: &Device<'_>,
    state: &State,
    layer: &LinearWeight,
    dtype: DType,
) -> Result<Option<Weight>> {
    if !layer.bias.is_none() {
        return Ok(None);
    }
    if !layer.plain.is_none() {
        return plain_weight(device, state, layer.plain, dtype);
    }
    let found = weight(device, state, &layer.quantized, dtype)?;
    Ok(found.and_then(|(w, words)| (words.shape().len() == 2).then_some(w)))
}

/// The kernel that makes all of these products with what is around them, or none.
fn common_way(state: &State, weights: &[Weight], rows: usize) -> Option<Way> {
    /// Values of a row that each block of `few_rows` can norm for itself.
    const SHORT_ROW: usize = 2048;
    let way = state.way(weights.first()?, rows)?;
    let fits = weights
        .iter()
        .all(|w| state.way(w, rows) == Some(way) && (way != Way::Few || w.columns <= SHORT_ROW));
    (fits && way != Way::Tiles).then_some(way)
}

/// Addresses of what is around a product, or none where a kernel cannot take it.
fn around(
    device: &Device<'_>,
    state: &State,
    x: &View,
    norm: &InputNorm,
    residual: Tensor,
    columns: usize,
) -> Result<Option<Around>> {
    let mut around = Around {
        is_normed: norm.normed == 1,
        eps: norm.eps,
        ..Around::default()
    };
    if around.is_normed && !norm.weight.is_none() {
        let w = state.input(device, norm.weight)?;
        if w.dtype != x.dtype || !is_plain(&w, 16) || w.shape().last() != x.shape().last() {
            return Ok(None);
        }
        around.norm = w.data as usize;
    }
    if !residual.is_none() {
        let view = state.input(device, residual)?;
        let rows = x.shape().first().copied().unwrap_or(0);
        if view.dtype != x.dtype || !is_plain(&view, 2) || view.shape() != [rows, columns as i64] {
            return Ok(None);
        }
        around.residual = view.data as usize;
    }
    Ok(Some(around))
}

/// A half-typed `[T, K]`.
pub(super) fn rows_of(
    device: &Device<'_>,
    state: &State,
    x: Tensor,
) -> Result<Option<(View, usize)>> {
    let view = state.input(device, x)?;
    refuse_gaps(state, &[&view])?;
    let fits = is_half(view.dtype) && is_plain(&view, 16) && view.shape().len() == 2;
    let rows = view.shape().first().map_or(0, |n| *n as usize);
    Ok(fits.then_some((view, rows)))
}

fn projections(
    device: Device<'_>,
    state: &mut State,
    args: &ProjectArgs,
    layers: &[LinearWeight],
) -> Result<Option<Vec<Tensor>>> {
    let Some((x, rows)) = rows_of(&device, state, args.x)? else {
        return Ok(None);
    };
    let is_known =
        (1..=MOST_LAYERS).contains(&layers.len()) && (args.residual.is_none() || layers.len() == 1);
    if !is_known {
        return Ok(None);
    }
    let mut weights = Vec::with_capacity(layers.len());
    for given in layers {
        match layer(&device, state, given, x.dtype)? {
            Some(w) if x.len() == rows * w.columns => weights.push(w),
            _ => return Ok(None),
        }
    }
    let Some(first) = weights.first().copied() else {
        return Ok(None);
    };
    let form = |w: &Weight| (w.bits, w.group_size);
    let one = weights.iter().all(|w| form(w) == form(&first));
    let way = one.then(|| common_way(state, &weights, rows)).flatten();
    // Clusters norm after the product, where x may be too large for f16.
    let norms = way != Some(Way::Clusters) || args.norm.normed != 1 || x.dtype == DType::BF16;
    if norms
        && let Some(way) = way
        && let Some(around) = around(&device, state, &x, &args.norm, args.residual, first.rows)?
    {
        let mut made = Vec::with_capacity(weights.len());
        let mut items = Vec::with_capacity(weights.len());
        for w in &weights {
            let (t, out) = state.output(&device, x.dtype, &[rows as i64, w.rows as i64])?;
            made.push(t);
            items.push((*w, out));
        }
        state.submit_around(way, (x.data as usize, rows, x.dtype), &items, None, around)?;
        return Ok(Some(made));
    }
    let mut own = Own::default();
    let made = one_by_one(device, state, args, (layers, &weights), &mut own);
    own.give_back(&device, state)?;
    made
}

/// Tensors that last as long as a call.
#[derive(Default)]
struct Own(Vec<Tensor>);

impl Own {
    fn keep(&mut self, t: Tensor) -> Tensor {
        self.0.push(t);
        t
    }

    /// Gives all of them back; a call that is not for our kernels after all must not do so again.
    fn give_back(self, device: &Device<'_>, state: &State) -> Result<()> {
        state
            .made
            .borrow_mut()
            .retain(|made| !self.0.contains(made));
        let_go(device, &self.0)
    }
}

/// The norm of `x`, or `x`.
fn normed(
    device: Device<'_>,
    state: &mut State,
    x: Tensor,
    by: &InputNorm,
    own: &mut Own,
) -> Result<Option<Tensor>> {
    if by.normed != 1 {
        return Ok(Some(x));
    }
    Ok(norm(device, state, x, by.weight, by.eps)?.map(|t| own.keep(t)))
}

fn multiplied(
    device: Device<'_>,
    state: &mut State,
    x: Tensor,
    layer: &LinearWeight,
) -> Result<Option<Tensor>> {
    if layer.plain.is_none() {
        let args = QuantizedMatmulArgs {
            x,
            w: layer.quantized,
            ..QuantizedMatmulArgs::default()
        };
        return quantized(device, state, &args);
    }
    match plain(device, state, x, layer.plain)? {
        Some(made) => Ok(Some(made)),
        None => {
            state.flush(&device)?;
            super::expansion::multiply_plain(state, x, layer.plain)
        }
    }
}

/// `residual + x @ w.T` by one product of many rows, or none where there is no residual or no such product.
fn with_residual(
    device: Device<'_>,
    state: &mut State,
    x: Tensor,
    w: &Weight,
    residual: Tensor,
) -> Result<Option<Tensor>> {
    let Some((x, rows)) = rows_of(&device, state, x)? else {
        return Ok(None);
    };
    let takes = !residual.is_none() && !state.keeps_rows_apart && state.is_dense(w, rows);
    if !takes || !state.has_dense(&device) {
        return Ok(None);
    }
    let none = InputNorm::default();
    let Some(around) = around(&device, state, &x, &none, residual, w.rows)? else {
        return Ok(None);
    };
    state.flush(&device)?;
    let full = match w.bits {
        16 => Some(*w),
        _ => in_full(state, w, x.dtype)?,
    };
    match full {
        Some(full) => state.multiply_dense(&device, &x, &full, around.residual),
        None => Ok(None),
    }
}

fn one_by_one(
    device: Device<'_>,
    state: &mut State,
    args: &ProjectArgs,
    (layers, weights): (&[LinearWeight], &[Weight]),
    own: &mut Own,
) -> Result<Option<Vec<Tensor>>> {
    let Some(x) = normed(device, state, args.x, &args.norm, own)? else {
        return Ok(None);
    };
    if let [w] = weights
        && let Some(sum) = with_residual(device, state, x, w, args.residual)?
    {
        return Ok(Some(vec![sum]));
    }
    let mut made = Vec::with_capacity(layers.len());
    for layer in layers {
        let Some(t) = multiplied(device, state, x, layer)? else {
            made.into_iter().for_each(|t| {
                own.keep(t);
            });
            return Ok(None);
        };
        made.push(t);
    }
    if args.residual.is_none() {
        return Ok(Some(made));
    }
    let Some(product) = made.pop() else {
        return Ok(None);
    };
    own.keep(product);
    let sum = pairwise(device, state, binary_kind::ADD, args.residual, product)?;
    Ok(sum.map(|sum| vec![sum]))
}

fn feed_forward(
    device: Device<'_>,
    state: &mut State,
    args: &GatedMlpArgs,
) -> Result<Option<Tensor>> {
    let Some((x, rows)) = rows_of(&device, state, args.x)? else {
        return Ok(None);
    };
    if !(glu_kind::SILU..=glu_kind::RELU).contains(&args.kind) {
        return Ok(None);
    }
    let (Some(gate), Some(up), Some(down)) = (
        layer(&device, state, &args.gate, x.dtype)?,
        layer(&device, state, &args.up, x.dtype)?,
        layer(&device, state, &args.down, x.dtype)?,
    ) else {
        return Ok(None);
    };
    let fits = gate.columns == up.columns
        && gate.rows == up.rows
        && down.columns == gate.rows
        && x.len() == rows * gate.columns;
    if !fits {
        return Ok(None);
    }
    let one = (gate.bits, gate.group_size) == (up.bits, up.group_size);
    let ways = (
        common_way(state, &[gate, up], rows),
        common_way(state, &[down], rows),
    );
    if one
        && let (Some(wide), Some(narrow)) = ways
        && wide != Way::Clusters
        && let Some(first) = around(&device, state, &x, &args.norm, Tensor::NONE, gate.rows)?
        && let Some(last) = around(
            &device,
            state,
            &x,
            &InputNorm::default(),
            args.residual,
            down.rows,
        )?
    {
        let (t, out) = state.output(&device, x.dtype, &[rows as i64, down.rows as i64])?;
        // The activation is needed by the next kernel alone: whoever is given its memory comes after that.
        let bytes = rows * gate.rows * x.dtype.size_bytes();
        let (inner, size) = state.pool.take(state.driver, bytes)?;
        let items = [(gate, 0), (up, 0)];
        let gated = Some((inner, args.kind as i32));
        let from = (x.data as usize, rows, x.dtype);
        let submitted = state
            .submit_around(wide, from, &items, gated, first)
            .and_then(|()| {
                state.submit_around(narrow, (inner, rows, x.dtype), &[(down, out)], None, last)
            });
        state.pool.put(inner, size);
        submitted?;
        return Ok(Some(t));
    }
    let mut own = Own::default();
    let made = by_parts(device, state, args, &down, &mut own);
    own.give_back(&device, state)?;
    made
}

fn by_parts(
    device: Device<'_>,
    state: &mut State,
    args: &GatedMlpArgs,
    down: &Weight,
    own: &mut Own,
) -> Result<Option<Tensor>> {
    let Some(x) = normed(device, state, args.x, &args.norm, own)? else {
        return Ok(None);
    };
    let Some(gate) = multiplied(device, state, x, &args.gate)? else {
        return Ok(None);
    };
    own.keep(gate);
    let Some(up) = multiplied(device, state, x, &args.up)? else {
        return Ok(None);
    };
    own.keep(up);
    let Some(inner) = gated(device, state, args.kind, gate, up)? else {
        return Ok(None);
    };
    own.keep(inner);
    if let Some(sum) = with_residual(device, state, inner, down, args.residual)? {
        return Ok(Some(sum));
    }
    let Some(product) = multiplied(device, state, inner, &args.down)? else {
        return Ok(None);
    };
    if args.residual.is_none() {
        return Ok(Some(product));
    }
    own.keep(product);
    pairwise(device, state, binary_kind::ADD, args.residual, product)
}
