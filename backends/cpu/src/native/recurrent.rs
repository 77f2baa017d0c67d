//! Short convolution and gated delta rule over pools of states, which are written in place.

use core::ffi::c_void;

use mlxcel_abi::cache_args::{GatedDeltaPoolArgs, ShortConvPoolArgs, StateRows};
use mlxcel_abi::kinds::unary;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::{Native, View};
use mlxcel_cpu_kernels::recurrent::{Conv, Delta, States, gated_delta, short_conv};

use super::operands::integers;
use super::{Outcome, State, attempt, filled, floats};

pub(super) fn install(table: &mut BackendOps) {
    table.short_conv = short_conv_slot;
    table.gated_delta = gated_delta_slot;
}

/// What is written, and so is not a copy.
fn in_place(native: &Native<'_>, t: Tensor) -> Result<Option<View>> {
    let view = native.view(t)?;
    Ok((view.is_contiguous && view.dtype == DType::F32 && !view.is_empty()).then_some(view))
}

/// The step's states; none when they are not for a kernel.
///
/// # Safety
/// The caller holds the tensors for `'a`, and `host_row_starts` has `n_sequences + 1` values.
unsafe fn states<'a>(
    native: &Native<'_>,
    rows: &StateRows,
    pool: &View,
) -> Result<Option<States<'a>>> {
    let (Some(sources), Some(targets)) = (
        integers(native, rows.sources)?,
        integers(native, rows.targets)?,
    ) else {
        return Ok(None);
    };
    let n = rows.n_sequences as usize;
    if rows.host_row_starts.is_null() || n == 0 || [sources.len(), targets.len()] != [n; 2] {
        return Ok(None);
    }
    // SAFETY: contiguous views of the checked type; the caller vouches for the boundaries.
    unsafe {
        Ok(Some(States {
            sources: sources.as_slice(),
            targets: targets.as_slice(),
            row_starts: core::slice::from_raw_parts(rows.host_row_starts, n + 1),
            slots: pool.shape().first().copied().unwrap_or_default() as usize,
        }))
    }
}

/// # Safety
/// The caller holds all tensors, and `host_row_starts` has `n_sequences + 1` values.
unsafe fn convolve(
    native: Native<'_>,
    state: &mut State,
    args: &ShortConvPoolArgs,
) -> Result<Option<[Tensor; 2]>> {
    if args.activation != 0 && args.activation != unary::SILU {
        return Ok(None);
    }
    let (Some(x), Some(weight), Some(pool)) = (
        floats(&native, args.x)?,
        floats(&native, args.weight)?,
        in_place(&native, args.pool)?,
    ) else {
        return Ok(None);
    };
    let bias = if args.bias.is_none() {
        None
    } else {
        Some(floats(&native, args.bias)?)
    };
    let (&[rows, channels], &[w_channels, taps], &[_, before, p_channels]) =
        (x.shape(), weight.shape(), pool.shape())
    else {
        return Ok(None);
    };
    if [w_channels, p_channels] != [channels; 2] || before + 1 != taps || matches!(bias, Some(None))
    {
        return Ok(None);
    }
    // SAFETY: the slot's contract.
    let Some(states) = (unsafe { states(&native, &args.rows, &pool) })? else {
        return Ok(None);
    };
    // SAFETY: contiguous f32 views; the pool is the caller's to give, and nothing else reads it now.
    let (conv, held) = unsafe {
        let conv = Conv {
            x: x.as_slice(),
            weight: weight.as_slice(),
            bias: bias.flatten().map_or(&[], |bias| bias.as_slice()),
            states,
            channels: channels as usize,
            taps: taps as usize,
            silu: args.activation == unary::SILU,
        };
        (conv, pool.as_mut_slice::<f32>())
    };
    if !conv.is_valid(held.len()) {
        return Ok(None);
    }
    let result = filled(&native, x.given, &[rows, channels], "short_conv", |out| {
        short_conv(state.isa, &mut state.pool, &conv, held, out)
    })?;
    let Some(result) = result else {
        return Ok(None);
    };
    Ok(Some([result, native.retain(args.pool)?]))
}

/// # Safety
/// As for [`convolve`].
unsafe fn step(
    native: Native<'_>,
    state: &mut State,
    args: &GatedDeltaPoolArgs,
) -> Result<Option<[Tensor; 2]>> {
    let (Some(q), Some(k), Some(v), Some(g), Some(beta), Some(pool)) = (
        floats(&native, args.q)?,
        floats(&native, args.k)?,
        floats(&native, args.v)?,
        floats(&native, args.g)?,
        floats(&native, args.beta)?,
        in_place(&native, args.pool)?,
    ) else {
        return Ok(None);
    };
    let (&[rows, key_heads, key_dim], &[_, heads, dim], &[_, p_heads, p_key_dim, p_dim]) =
        (k.shape(), v.shape(), pool.shape())
    else {
        return Ok(None);
    };
    let g_fits = g.shape() == [rows, heads] || g.shape() == [rows, heads, key_dim];
    let fits = q.shape() == k.shape()
        && v.shape() == [rows, heads, dim]
        && beta.shape() == [rows, heads]
        && g_fits
        && [p_heads, p_key_dim, p_dim] == [heads, key_dim, dim];
    if !fits {
        return Ok(None);
    }
    // SAFETY: the slot's contract.
    let Some(states) = (unsafe { states(&native, &args.rows, &pool) })? else {
        return Ok(None);
    };
    // SAFETY: as in `convolve`.
    let (delta, held) = unsafe {
        let delta = Delta {
            q: q.as_slice(),
            k: k.as_slice(),
            v: v.as_slice(),
            g: g.as_slice(),
            beta: beta.as_slice(),
            states,
            key_heads: key_heads as usize,
            heads: heads as usize,
            key_dim: key_dim as usize,
            dim: dim as usize,
        };
        (delta, pool.as_mut_slice::<f32>())
    };
    if !delta.is_valid(held.len()) {
        return Ok(None);
    }
    let result = filled(
        &native,
        v.given,
        &[rows, heads, dim],
        "gated_delta",
        |out| gated_delta(state.isa, &mut state.pool, &delta, held, out),
    )?;
    let Some(result) = result else {
        return Ok(None);
    };
    Ok(Some([result, native.retain(args.pool)?]))
}

/// Writes what a kernel made.
///
/// # Safety
/// `out` must be null or writable.
unsafe fn give(made: Option<[Tensor; 2]>, out: *mut [Tensor; 2]) -> Outcome {
    match made {
        Some(made) if !out.is_null() => {
            // SAFETY: not null, and the caller's to write.
            unsafe { out.write(made) };
            Outcome::Done
        }
        _ => Outcome::Pass,
    }
}

unsafe extern "C" fn short_conv_slot(
    ctx: *mut c_void,
    args: *const ShortConvPoolArgs,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |native: Native<'_>, state: &mut State| {
        // SAFETY: the slot's contract: a live argument struct, tensors and boundaries held.
        unsafe {
            let args = ShortConvPoolArgs::read(args)?;
            Ok(give(convolve(native, state, &args)?, out))
        }
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.short_conv)(ctx, args, out, err),
        }
    }
}

unsafe extern "C" fn gated_delta_slot(
    ctx: *mut c_void,
    args: *const GatedDeltaPoolArgs,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |native: Native<'_>, state: &mut State| {
        // SAFETY: as for `short_conv_slot`.
        unsafe {
            let args = GatedDeltaPoolArgs::read(args)?;
            Ok(give(step(native, state, &args)?, out))
        }
    };
    // SAFETY: as for `short_conv_slot`.
    unsafe {
        match attempt(ctx, err, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.gated_delta)(ctx, args, out, err),
        }
    }
}
