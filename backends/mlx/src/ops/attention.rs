//! Attention, dense and over a paged pool.

use core::ffi::c_void;

use mlxcel_abi::kinds::mask;
use mlxcel_abi::ops_args::{AttentionArgs, PagedAttentionArgs};
use mlxcel_abi::{AbiError, ErrorObj, Status, Tensor};

use crate::args::{self, Result};
use crate::bridge::{self, AttentionSpec, PagedSpec};
use crate::fault::Fault;
use crate::slot::{get, make_three, optional, tensor_slots};

/// Refuses combinations of which one part would be ignored.
fn check_mask(args: &AttentionArgs) -> Result<()> {
    match args.mask_kind {
        mask::NONE | mask::CAUSAL if !args.mask.is_none() => Err(Fault::invalid(format!(
            "a mask tensor was given with mask kind {}",
            mask::name(args.mask_kind)
        ))),
        mask::TENSOR if args.mask.is_none() => Err(Fault::invalid("mask kind tensor needs a mask")),
        mask::NONE | mask::TENSOR if args.window != 0 => Err(Fault::invalid(format!(
            "a window of {} needs mask kind causal",
            args.window
        ))),
        mask::NONE | mask::CAUSAL | mask::TENSOR => Ok(()),
        other => Err(AbiError::unimplemented(format!("mask kind {other} is not known")).into()),
    }
}

tensor_slots! {
    fn attention(_context, tensors; args: *const AttentionArgs) {
        // SAFETY: the slot's contract.
        let args = unsafe { AttentionArgs::read(args) }?;
        check_mask(&args)?;
        let (mask, sinks) = (optional(tensors, args.mask)?, optional(tensors, args.sinks)?);
        let spec = AttentionSpec {
            q: get(tensors, args.q)?,
            k: get(tensors, args.k)?,
            v: get(tensors, args.v)?,
            mask: mask.as_slice(),
            sinks: sinks.as_slice(),
            scale: args.scale,
            softcap: args.softcap,
            causal: args.mask_kind == mask::CAUSAL,
            window: args.window,
        };
        Ok(bridge::attention(&spec)?)
    }
}

/// # Safety
/// The slot's contract: `ctx` of an open backend, pointers valid for the call.
pub(crate) unsafe extern "C" fn paged_attention(
    ctx: *mut c_void,
    args: *const PagedAttentionArgs,
    out: *mut [Tensor; 3],
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        make_three(ctx, out, err, "paged_attention", |context, tensors| {
            let args = PagedAttentionArgs::read(args)?;
            let starts = if args.row_starts.is_null() {
                &[]
            } else {
                args::values(args.row_starts, args.n_sequences as usize + 1, "row_starts")?
            };
            let sinks = optional(tensors, args.sinks)?;
            let selection = optional(tensors, args.selection)?;
            let (k, v) = (optional(tensors, args.k)?, optional(tensors, args.v)?);
            let v_pool = optional(tensors, args.v_pool)?;
            let slots = optional(tensors, args.slots)?;
            let spec = PagedSpec {
                q: get(tensors, args.q)?,
                k: k.as_slice(),
                v: v.as_slice(),
                k_pool: get(tensors, args.k_pool)?,
                v_pool: v_pool.as_slice(),
                slots: slots.as_slice(),
                row_sequences: get(tensors, args.row_sequences)?,
                positions: get(tensors, args.positions)?,
                page_table: get(tensors, args.page_table)?,
                sinks: sinks.as_slice(),
                row_starts: starts,
                window: args.window,
                chunk: args.chunk,
                scale: args.scale,
                softcap: args.softcap,
                selection: selection.as_slice(),
                latent_dim: args.latent_dim,
                read_only: args::flag(args.read_only, "read_only")?,
            };
            let mut memo = context.memo.borrow_mut();
            let memo = memo
                .as_mut()
                .ok_or_else(|| AbiError::internal("the backend has no memo"))?;
            Ok(bridge::paged_attention(&spec, memo)?)
        })
    }
}
