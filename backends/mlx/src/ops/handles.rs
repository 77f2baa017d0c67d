//! Handles: references and descriptions.

use core::ffi::c_void;

use mlxcel_abi::guard::guard;
use mlxcel_abi::{ErrorObj, Status, Tensor, TensorInfo};

use crate::context::Context;
use crate::fault::Fault;
use crate::slot::{check_out, plain_slots};

plain_slots! {
    fn retain(context; t: Tensor) {
        Ok(context.tensors.borrow_mut().retain(t)?)
    }

    fn info(context; t: Tensor, out: *mut TensorInfo) {
        check_out(out)?;
        let tensors = context.tensors.borrow();
        let value = tensors.get(t)?.info()?;
        // SAFETY: not null, and the caller vouches for it.
        unsafe { out.write(value) };
        Ok(())
    }
}

/// The one slot that any thread may call.
///
/// # Safety
/// The slot's contract: `ctx` of an open backend, pointers valid for the call.
pub(crate) unsafe extern "C" fn release(
    ctx: *mut c_void,
    t: Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    let run = || {
        // SAFETY: the caller vouches for the context.
        let context = unsafe { Context::from_raw(ctx) }?;
        if !context.is_owner() {
            context.defer_release(t);
            return Ok(());
        }
        context.drain_deferred();
        context
            .release(t)
            .map_err(|error| Fault::from(error).named("release"))
    };
    // SAFETY: the caller vouches for the error slot.
    unsafe { guard(err, run) }
}
