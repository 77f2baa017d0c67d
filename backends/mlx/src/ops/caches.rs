//! Operations over recurrent states and index keys.

use core::ffi::c_void;

use mlxcel_abi::cache_args::{GatedDeltaPoolArgs, ShortConvPoolArgs, SparseIndexArgs, StateRows};
use mlxcel_abi::{ErrorObj, Status, Tensor};

use crate::args::{self, Result};
use crate::bridge::{self, GatedDeltaSpec, ShortConvSpec, SparseIndexSpec, StateRowsSpec};
use crate::context::Tensors;
use crate::slot::{get, make_two, optional};

/// # Safety
/// `host_row_starts` must have `n_sequences + 1` readable values for `'a`.
unsafe fn rows_of<'a>(tensors: &'a Tensors, rows: &StateRows) -> Result<StateRowsSpec<'a>> {
    Ok(StateRowsSpec {
        sources: get(tensors, rows.sources)?,
        targets: get(tensors, rows.targets)?,
        row_sequences: get(tensors, rows.row_sequences)?,
        row_starts: get(tensors, rows.row_starts)?,
        // SAFETY: forwarded to the caller.
        starts: unsafe {
            args::values(
                rows.host_row_starts,
                rows.n_sequences as usize + 1,
                "row_starts",
            )
        }?,
    })
}

/// # Safety
/// The slot's contract: `ctx` of an open backend, pointers valid for the call.
pub(crate) unsafe extern "C" fn short_conv(
    ctx: *mut c_void,
    args: *const ShortConvPoolArgs,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        make_two(ctx, out, err, "short_conv", |_, tensors| {
            let args = ShortConvPoolArgs::read(args)?;
            let bias = optional(tensors, args.bias)?;
            let spec = ShortConvSpec {
                x: get(tensors, args.x)?,
                weight: get(tensors, args.weight)?,
                bias: bias.as_slice(),
                pool: get(tensors, args.pool)?,
                rows: rows_of(tensors, &args.rows)?,
                activation: args.activation,
            };
            Ok(bridge::short_conv(&spec)?)
        })
    }
}

/// # Safety
/// As for [`short_conv`].
pub(crate) unsafe extern "C" fn gated_delta(
    ctx: *mut c_void,
    args: *const GatedDeltaPoolArgs,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        make_two(ctx, out, err, "gated_delta", |_, tensors| {
            let args = GatedDeltaPoolArgs::read(args)?;
            let spec = GatedDeltaSpec {
                q: get(tensors, args.q)?,
                k: get(tensors, args.k)?,
                v: get(tensors, args.v)?,
                g: get(tensors, args.g)?,
                beta: get(tensors, args.beta)?,
                pool: get(tensors, args.pool)?,
                rows: rows_of(tensors, &args.rows)?,
            };
            Ok(bridge::gated_delta(&spec)?)
        })
    }
}

/// # Safety
/// As for [`short_conv`].
pub(crate) unsafe extern "C" fn sparse_index(
    ctx: *mut c_void,
    args: *const SparseIndexArgs,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        make_two(ctx, out, err, "sparse_index", |_, tensors| {
            let args = SparseIndexArgs::read(args)?;
            let spec = SparseIndexSpec {
                q: get(tensors, args.q)?,
                k: get(tensors, args.k)?,
                weights: get(tensors, args.weights)?,
                pool: get(tensors, args.pool)?,
                slots: get(tensors, args.slots)?,
                positions: get(tensors, args.positions)?,
                page_table: get(tensors, args.page_table)?,
                starts: args::values(args.row_starts, args.n_sequences as usize + 1, "row_starts")?,
                top_k: args.top_k,
                scale: args.scale,
            };
            Ok(bridge::sparse_index(&spec)?)
        })
    }
}
