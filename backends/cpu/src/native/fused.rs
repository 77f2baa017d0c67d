//! Fused operations: products of one input in one hand-over to the threads, with the norm before and
//! biases, residuals and the gated activation after them. Sums are made in the order of the parts,
//! so that a fused operation of f32 gives the very bits that its parts give; in half types these round in between.
//!
//! There are no slots of MLX behind these. What a kernel does not take is refused as unimplemented,
//! and the SDK composes it.

use core::ffi::c_void;
use core::ops::Range;

use mlxcel_abi::error::report;
use mlxcel_abi::fused_args::{GatedMlpArgs, ProjectArgs};
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::Native;
use mlxcel_cpu_kernels::qmatmul::{self, Division, Precision};
use mlxcel_cpu_kernels::{QuantizedMatrix, gemm_integers, row};

use super::layers::{Input, Layer, Weight, layer, norm_weight, rows_of};
use super::made::Made;
use super::products::{packed_product, plain_product};
use super::rows::{SERIAL_BELOW, Shared, gate_of};
use super::{Outcome, State, attempt, floats, joint};

pub(super) fn install(table: &mut BackendOps) {
    table.project = project;
    table.gated_mlp = gated_mlp;
    table.add_rms_norm = add_rms_norm;
}

/// Runs `kernel` and writes its results to `out`. `Ok(None)` is a call that it does not take.
///
/// # Safety
/// `ctx` and `err` as for every slot; `out` has room for what the kernel makes.
pub(super) unsafe fn give(
    ctx: *mut c_void,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
    kernel: impl FnOnce(Native<'_>, &mut State) -> Result<Option<Vec<Tensor>>>,
) -> Status {
    let mut failure = None;
    let body = |native: Native<'_>, state: &mut State| match kernel(native, state) {
        Ok(Some(made)) if !out.is_null() => {
            // SAFETY: not null, and the caller vouches for the room.
            unsafe { core::ptr::copy_nonoverlapping(made.as_ptr(), out, made.len()) };
            Ok(Outcome::Done)
        }
        Ok(_) => Ok(Outcome::Pass),
        Err(error) => {
            failure = Some(error);
            Ok(Outcome::Pass)
        }
    };
    // SAFETY: forwarded to the caller.
    match unsafe { attempt(ctx, err, body) } {
        Ok(status) => status,
        Err(_) => {
            let error = failure.unwrap_or_else(|| {
                AbiError::unimplemented("the cpu backend has no kernel for these operands")
            });
            // SAFETY: forwarded to the caller.
            unsafe { report(err, error) }
        }
    }
}

unsafe extern "C" fn project(
    ctx: *mut c_void,
    args: *const ProjectArgs,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract: live arguments, room for a result of every layer.
    unsafe {
        give(ctx, out, err, |native, state| {
            projected(native, state, &ProjectArgs::read(args)?)
        })
    }
}

unsafe extern "C" fn gated_mlp(
    ctx: *mut c_void,
    args: *const GatedMlpArgs,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract: live arguments, room for one result.
    unsafe {
        give(ctx, out, err, |native, state| {
            mlp(native, state, &GatedMlpArgs::read(args)?)
        })
    }
}

unsafe extern "C" fn add_rms_norm(
    ctx: *mut c_void,
    x: Tensor,
    residual: Tensor,
    w: Tensor,
    eps: f32,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract: room for two results.
    unsafe {
        give(ctx, out.cast(), err, |native, state| {
            added_and_normed(native, state, [x, residual, w], eps)
        })
    }
}

/// Adds a layer's bias and a residual to columns of a result of `m` rows, whose parts `part` gives.
fn finish<'a>(
    part: impl Fn(Range<usize>) -> &'a mut [f32],
    (m, width): (usize, usize),
    columns: Range<usize>,
    bias: Option<&[f32]>,
    residual: Option<&[f32]>,
) {
    if bias.is_none() && residual.is_none() {
        return;
    }
    for row in 0..m {
        let range = row * width + columns.start..row * width + columns.end;
        let part = part(range.clone());
        if let Some(bias) = bias {
            let bias = &bias[columns.clone()];
            part.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
        if let Some(residual) = residual {
            let residual = &residual[range];
            part.iter_mut().zip(residual).for_each(|(y, x)| *y += x);
        }
    }
}

/// [`finish`] for all of a layer's result. False when a thread panicked.
fn finish_rows(
    state: &mut State,
    m: usize,
    layer: &Layer<'_>,
    out: &mut [f32],
    residual: Option<&[f32]>,
) -> bool {
    let (width, out) = (layer.rows(), Shared::new(out));
    (layer.bias.is_none() && residual.is_none())
        || state.pool.split(m, 1, SERIAL_BELOW / width + 1, &|rows| {
            for row in rows {
                let residual = residual.map(|x| &x[row * width..(row + 1) * width]);
                // SAFETY: the pool's ranges are disjoint.
                let part = |_| unsafe { out.part(row * width..(row + 1) * width) };
                finish(part, (1, width), 0..width, layer.bias, residual);
            }
        })
}

/// Whether kernels for panels of rounded activations take a product of `m` rows.
fn goes_in_panels(state: &State, m: usize, w: &QuantizedMatrix<'_>) -> bool {
    let is_rounded = state.precision != Precision::Exact && w.has_one_type();
    is_rounded && !state.keeps_rows_apart && !state.joins(m, w)
}

/// `x` `[m, columns]` through every layer into `outs`. False when a kernel panicked.
fn products(
    state: &mut State,
    x: &[f32],
    layers: &[Layer<'_>],
    outs: Vec<&mut [f32]>,
    residual: Option<&[f32]>,
) -> bool {
    let m = x.len() / layers.first().map_or(1, Layer::columns);
    let (mut targets, mut joined) = (Vec::new(), Vec::new());
    let (mut panels, mut panel_layers) = (Vec::new(), Vec::new());
    for (layer, out) in layers.iter().zip(outs) {
        let is_joining = matches!(&layer.weight, Weight::Packed(w) if state.joins(m, w));
        if let (Weight::Packed(w), true) = (&layer.weight, is_joining) {
            joined.push(layer);
            targets.push(qmatmul::Target { w: *w, y: out });
            continue;
        }
        if let Weight::Packed(w) = &layer.weight
            && goes_in_panels(state, m, w)
        {
            panel_layers.push(layer);
            panels.push(qmatmul::Target { w: *w, y: out });
            continue;
        }
        let done = match &layer.weight {
            Weight::Packed(w) => packed_product(state, x, *w, out),
            Weight::Plain(w, shape) => plain_product(state, x, *w, *shape, out),
        };
        if !done || !finish_rows(state, m, layer, out, residual) {
            return false;
        }
    }
    // One rounding of `x` serves all of them; their results are finished row by row, in the order of memory.
    let done = panels.is_empty()
        || gemm_integers::matmul_all(
            (state.isa, state.precision),
            &mut state.pool,
            x,
            &mut panels,
            &mut state.prepared,
            &state.rounded,
        );
    let mut finished = panel_layers.into_iter().zip(panels);
    if !done || !finished.all(|(layer, t)| finish_rows(state, m, layer, t.y, residual)) {
        return false;
    }
    let joined = &joined;
    qmatmul::matmul_then(
        (state.isa, state.precision),
        &mut state.pool,
        x,
        &mut targets,
        &mut state.prepared,
        Division::InTurn,
        &|results, index, columns| {
            if let Some(layer) = joined.get(index) {
                // SAFETY: columns of this thread, one part at a time.
                let part = |range| unsafe { results.part(index, range) };
                finish(part, (m, layer.rows()), columns, layer.bias, residual);
            }
        },
    )
}

fn projected(
    native: Native<'_>,
    state: &mut State,
    args: &ProjectArgs,
) -> Result<Option<Vec<Tensor>>> {
    if args.n_layers == 0 || args.layers.is_null() {
        return Err(AbiError::invalid("a projection has no layers"));
    }
    if args.n_layers > 1 && !args.residual.is_none() {
        return Err(AbiError::invalid(format!(
            "a residual goes with one layer, found {}",
            args.n_layers
        )));
    }
    // SAFETY: the slot's contract: as many layers as is said.
    let raw = unsafe { core::slice::from_raw_parts(args.layers, args.n_layers as usize) };
    let mut layers = Vec::with_capacity(raw.len());
    for raw in raw {
        // SAFETY: the caller holds the tensors during the call.
        match unsafe { layer(&native, raw) }? {
            Some(layer) => layers.push(layer),
            None => return Ok(None),
        }
    }
    let columns = layers.first().map_or(0, Layer::columns);
    if layers.iter().any(|layer| layer.columns() != columns) {
        return Ok(None);
    }
    // SAFETY: as above.
    let Some(mut input) = (unsafe { Input::new(native, state, args.x, &args.norm, columns) })?
    else {
        return Ok(None);
    };
    let (mut residual, mut added) = (None, None);
    if let (false, [layer]) = (args.residual.is_none(), layers.as_slice()) {
        // SAFETY: as above.
        match unsafe { rows_of(&native, args.residual, layer.rows()) }? {
            Some((x, rows, dtype)) if rows == input.rows => {
                (residual, added) = (Some(x), Some(dtype))
            }
            _ => return Ok(None),
        }
    }
    let mut made = Vec::with_capacity(layers.len());
    for layer in &layers {
        made.push(Made::new(
            native,
            &[input.rows as i64, layer.rows() as i64],
        )?);
    }
    let outs = made.iter_mut().map(Made::slice).collect();
    if !products(state, input.slice(), &layers, outs, residual) {
        return Err(Native::panicked("project"));
    }
    let given = made.into_iter().zip(&layers).map(|(made, layer)| {
        let dtype = layer.result(input.dtype);
        made.rounded(added.map_or(dtype, |added| joint(dtype, added)))
    });
    let given = given.collect::<Result<Vec<_>>>()?;
    Ok(Some(given.into_iter().map(Made::give).collect()))
}

/// `f(gate(x)) * up(x)` into `out`. False when a kernel panicked.
fn gated(
    state: &mut State,
    x: &[f32],
    [gate, up]: [&Layer<'_>; 2],
    kind: row::Gate,
    [gate_out, up_out, out]: [&mut [f32]; 3],
) -> bool {
    let (inner, isa) = (gate.rows(), state.isa);
    let m = out.len() / inner;
    if let (Weight::Packed(g), Weight::Packed(u)) = (&gate.weight, &up.weight)
        && state.joins(m, g)
        && state.joins(m, u)
    {
        let out = Shared::new(out);
        let mut targets = [
            qmatmul::Target { w: *g, y: gate_out },
            qmatmul::Target { w: *u, y: up_out },
        ];
        return qmatmul::matmul_then(
            (isa, state.precision),
            &mut state.pool,
            x,
            &mut targets,
            &mut state.prepared,
            Division::Abreast,
            &|results, _, columns| {
                for (target, bias) in [gate.bias, up.bias].into_iter().enumerate() {
                    // SAFETY: columns of this thread, one part at a time.
                    let part = |range| unsafe { results.part(target, range) };
                    finish(part, (m, inner), columns.clone(), bias, None);
                }
                for row in 0..m {
                    let range = row * inner + columns.start..row * inner + columns.end;
                    // SAFETY: columns of this thread, of three results.
                    let (g, u, out) = unsafe {
                        (
                            &*results.part(0, range.clone()),
                            &*results.part(1, range.clone()),
                            out.part(range),
                        )
                    };
                    row::gated(isa, kind, g, u, out);
                }
            },
        );
    }
    let outs = vec![&mut *gate_out, &mut *up_out];
    if !products(state, x, &[*gate, *up], outs, None) {
        return false;
    }
    let (g, u, out) = (&*gate_out, &*up_out, Shared::new(out));
    state.pool.split(g.len(), 64, SERIAL_BELOW / 4, &|range| {
        // SAFETY: the pool's ranges are disjoint.
        row::gated(isa, kind, &g[range.clone()], &u[range.clone()], unsafe {
            out.part(range)
        });
    })
}

fn mlp(native: Native<'_>, state: &mut State, args: &GatedMlpArgs) -> Result<Option<Vec<Tensor>>> {
    let Some(kind) = gate_of(args.kind) else {
        return Ok(None);
    };
    // SAFETY: the caller holds the tensors during the call.
    let (gate, up, down) = unsafe {
        (
            layer(&native, &args.gate)?,
            layer(&native, &args.up)?,
            layer(&native, &args.down)?,
        )
    };
    let (Some(gate), Some(up), Some(down)) = (gate, up, down) else {
        return Ok(None);
    };
    let (columns, inner) = (gate.columns(), gate.rows());
    if [up.columns(), up.rows(), down.columns()] != [columns, inner, inner] {
        return Ok(None);
    }
    // SAFETY: as above.
    let Some(mut input) = (unsafe { Input::new(native, state, args.x, &args.norm, columns) })?
    else {
        return Ok(None);
    };
    let inner_type = joint(gate.result(input.dtype), up.result(input.dtype));
    let (mut residual, mut dtype) = (None, down.result(inner_type));
    if !args.residual.is_none() {
        // SAFETY: as above.
        match unsafe { rows_of(&native, args.residual, down.rows()) }? {
            Some((x, rows, given)) if rows == input.rows => {
                (residual, dtype) = (Some(x), joint(dtype, given));
            }
            _ => return Ok(None),
        }
    }
    let rows = input.rows as i64;
    let wide = || Made::new(native, &[rows, inner as i64]);
    let (mut gate_out, mut up_out, mut mixed) = (wide()?, wide()?, wide()?);
    let mut made = Made::new(native, &[rows, down.rows() as i64])?;
    let parts = [gate_out.slice(), up_out.slice(), mixed.slice()];
    let done = gated(state, input.slice(), [&gate, &up], kind, parts)
        && products(state, mixed.slice(), &[down], vec![made.slice()], residual);
    if !done {
        return Err(Native::panicked("gated_mlp"));
    }
    Ok(Some(vec![made.rounded(dtype)?.give()]))
}

fn added_and_normed(
    native: Native<'_>,
    state: &mut State,
    [x, residual, w]: [Tensor; 3],
    eps: f32,
) -> Result<Option<Vec<Tensor>>> {
    let (Some(x), Some(residual)) = (floats(&native, x)?, floats(&native, residual)?) else {
        return Ok(None);
    };
    let width = x.shape().last().map_or(0, |n| *n as usize);
    if x.shape() != residual.shape() || width == 0 {
        return Ok(None);
    }
    // SAFETY: the caller holds the tensors during the call.
    let Some(weight) = (unsafe { norm_weight(&native, w, width) })? else {
        return Ok(None);
    };
    let (mut sum, mut normed) = (Made::new(native, x.shape())?, Made::new(native, x.shape())?);
    // SAFETY: contiguous f32 views of tensors that the caller holds.
    let (a, b) = unsafe { (x.as_slice::<f32>(), residual.as_slice::<f32>()) };
    let (isa, rows) = (state.isa, a.len() / width);
    let (sum_out, normed_out) = (Shared::new(sum.slice()), Shared::new(normed.slice()));
    let done = state
        .pool
        .split(rows, 1, SERIAL_BELOW / width + 1, &|range| {
            let range = range.start * width..range.end * width;
            // SAFETY: the pool's ranges are disjoint.
            let (sum, normed) =
                unsafe { (sum_out.part(range.clone()), normed_out.part(range.clone())) };
            row::add(isa, &b[range.clone()], &a[range], sum);
            row::rms_norm(isa, sum, weight, eps, width, normed);
        });
    if !done {
        return Err(Native::panicked("add_rms_norm"));
    }
    let dtype = joint(x.given, residual.given);
    let (sum, normed) = (sum.rounded(dtype)?, normed.rounded(dtype)?);
    Ok(Some(vec![sum.give(), normed.give()]))
}
