//! Attention over the paged pool with the norms and the rotation of queries and keys before it.

use core::ffi::c_void;

use mlxcel_abi::fused_args::RotateArgs;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::PagedAttentionArgs;
use mlxcel_abi::{DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::Native;
use mlxcel_cpu_kernels::row;

use super::fused::give;
use super::layers::{norm_rows, norm_weight};
use super::made::Made;
use super::rows::{SERIAL_BELOW, Shared};
use super::{State, attention, floats};

pub(super) fn install(table: &mut BackendOps) {
    table.rotated_paged_attention = rotated_paged_attention;
}

unsafe extern "C" fn rotated_paged_attention(
    ctx: *mut c_void,
    args: *const PagedAttentionArgs,
    rotate: *const RotateArgs,
    out: *mut [Tensor; 3],
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the slot's contract: live arguments, room for three results.
    unsafe {
        give(ctx, out.cast(), err, |native, state| {
            attend(
                native,
                state,
                &PagedAttentionArgs::read(args)?,
                &RotateArgs::read(rotate)?,
            )
        })
    }
}

/// # Safety
/// The caller holds all tensors, and `row_starts` has `n_sequences + 1` values.
unsafe fn attend(
    native: Native<'_>,
    state: &mut State,
    args: &PagedAttentionArgs,
    rotate: &RotateArgs,
) -> Result<Option<Vec<Tensor>>> {
    if args.latent_dim > 0 || args.k.is_none() || args.v.is_none() || !args.selection.is_none() {
        return Ok(None);
    }
    let pool = native.view(args.k_pool)?;
    let kv_heads = match *pool.shape() {
        [_, _, heads, _] if heads > 0 => heads,
        _ => return Ok(None),
    };
    let Some((width, is_flat)) = head_width(&native, args.k, kv_heads)? else {
        return Ok(None);
    };
    if !prepare(native, state, args.positions, rotate, width)? {
        return Ok(None);
    }
    // SAFETY: forwarded to the caller.
    let (q, k) = unsafe {
        (
            turned(native, state, args.q, width, rotate.q_norm, rotate)?,
            turned(native, state, args.k, width, rotate.k_norm, rotate)?,
        )
    };
    let (Some(q), Some(k)) = (q, k) else {
        return Ok(None);
    };
    let v = match *native.view(args.v)?.shape() {
        [rows, all] if all % kv_heads == 0 => {
            native.share(args.v, &[rows, kv_heads, all / kv_heads])?
        }
        [_, _, _] => native.retain(args.v)?,
        _ => return Ok(None),
    };
    let dtype = native.view(args.q)?.dtype;
    let turned = PagedAttentionArgs {
        q: q.tensor(),
        k: k.tensor(),
        v,
        ..*args
    };
    // SAFETY: forwarded to the caller; what was made here lives until the end of the call.
    let made = unsafe { attention::attend(native, state, &turned, dtype) };
    native.release(v)?;
    let Some([result, keys, values]) = made? else {
        return Ok(None);
    };
    let result = match *native.view(result)?.shape() {
        [rows, heads, width] if is_flat => {
            let flat = native.share(result, &[rows, heads * width])?;
            native.release(result)?;
            flat
        }
        _ => result,
    };
    Ok(Some(vec![result, keys, values]))
}

/// Width of a head of keys, and whether heads come flat.
fn head_width(native: &Native<'_>, k: Tensor, kv_heads: i64) -> Result<Option<(usize, bool)>> {
    let found = match *native.view(k)?.shape() {
        [_, all] if all % kv_heads == 0 => Some((all / kv_heads, true)),
        [_, heads, width] if heads == kv_heads => Some((width, false)),
        _ => None,
    };
    Ok(found
        .filter(|(width, _)| *width > 0)
        .map(|(width, flat)| (width as usize, flat)))
}

/// Brings the table of angles up to date. False when the kernels do not take the rotation.
fn prepare(
    native: Native<'_>,
    state: &mut State,
    positions: Tensor,
    rotate: &RotateArgs,
    width: usize,
) -> Result<bool> {
    if rotate.dims == 0 {
        return Ok(true);
    }
    let positions = native.view(positions)?;
    let fits = positions.is_contiguous
        && positions.dtype == DType::I32
        && rotate.dims.is_multiple_of(2)
        && rotate.interleaved <= 1
        && (rotate.base > 0.0 && rotate.base.is_finite())
        && rotate.dims as usize <= width;
    if !fits {
        return Ok(false);
    }
    // SAFETY: a contiguous view of the checked type, of a tensor that the caller holds.
    let positions = unsafe { positions.as_slice::<i32>() };
    if rotate.freqs.is_none() {
        (state.rope).prepare_plain(positions, rotate.base, rotate.dims, rotate.scale);
        return Ok(true);
    }
    match floats(&native, rotate.freqs)? {
        Some(freqs) if freqs.len() == rotate.dims as usize / 2 => {
            // SAFETY: as above.
            let periods = unsafe { freqs.as_slice::<f32>() };
            state.rope.prepare(positions, periods, rotate.scale);
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// Heads of `width` elements, normed and rotated: `[T, heads, width]`.
///
/// # Safety
/// The caller holds the tensors during the call.
unsafe fn turned<'a>(
    native: Native<'a>,
    state: &mut State,
    x: Tensor,
    width: usize,
    norm: Tensor,
    rotate: &RotateArgs,
) -> Result<Option<Made<'a>>> {
    let Some(x) = floats(&native, x)? else {
        return Ok(None);
    };
    let rows = x.shape().first().map_or(0, |n| *n as usize);
    let fits = match *x.shape() {
        [_, all] => all % width as i64 == 0,
        [_, _, own] => own == width as i64,
        _ => false,
    };
    if !fits || rows == 0 {
        return Ok(None);
    }
    // SAFETY: a contiguous f32 view of a tensor that the caller holds.
    let given = unsafe { x.as_slice::<f32>() };
    let heads = given.len() / rows / width;
    let shape = [rows as i64, heads as i64, width as i64];
    let mut normed = None;
    if rotate.normed != 0 {
        // SAFETY: forwarded to the caller.
        let Some(weight) = (unsafe { norm_weight(&native, norm, width) })? else {
            return Ok(None);
        };
        let mut made = Made::new(native, &shape)?;
        if !norm_rows(state, given, (weight, rotate.eps), width, made.slice()) {
            return Err(Native::panicked("rms_norm"));
        }
        if rotate.dims == 0 {
            return Ok(Some(made));
        }
        normed = Some(made);
    }
    let mut made = Made::new(native, &shape)?;
    let input = normed.as_mut().map_or(given, |made| &*made.slice());
    if rotate.dims == 0 {
        made.slice().copy_from_slice(input);
        return Ok(Some(made));
    }
    let (table, interleaved, stride) = (&state.rope, rotate.interleaved != 0, heads * width);
    let out = Shared::new(made.slice());
    let done = state
        .pool
        .split(rows, 1, SERIAL_BELOW / stride + 1, &|range| {
            let elements = range.start * stride..range.end * stride;
            // SAFETY: the pool's ranges are disjoint.
            let out = unsafe { out.part(elements.clone()) };
            let input = &input[elements];
            row::rope(table, range.start, input, heads, width, interleaved, out);
        });
    if !done {
        return Err(Native::panicked("rope"));
    }
    Ok(Some(made))
}
