//! Slots of the table that try a kernel of ours first.

use core::ffi::c_void;
use std::rc::Rc;

use mlxcel_abi::error::report;
use mlxcel_abi::guard::catch;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, ErrorObj, Result, Status, status};
use mlxcel_backend_mlx::stream::Device;

use super::{STATES, State};

/// What a kernel made of a call.
pub(super) enum Outcome {
    /// It was submitted.
    Done,
    /// The call is not for it.
    Pass,
}

/// Runs `kernel`; gives the replaced slot's table when the call is not for it, or its status. What is pending is submitted
/// before, unless the kernel `joins` it.
///
/// # Safety
/// `ctx` and `err` as for every slot of the table.
pub(super) unsafe fn attempt(
    ctx: *mut c_void,
    err: *mut *mut ErrorObj,
    joins: bool,
    kernel: impl FnOnce(Device<'_>, &mut State) -> Result<Outcome>,
) -> core::result::Result<Status, Rc<BackendOps>> {
    // Where there is no state, this is not the backend's thread; any table's slot says so.
    let mut fallback = None;
    let outcome = catch(|| {
        STATES.with(|states| {
            let mut states = states
                .try_borrow_mut()
                .map_err(|_| AbiError::internal("a kernel was called from within a kernel"))?;
            let Some(state) = states.iter_mut().find(|state| state.ctx == ctx as usize) else {
                return Ok(Outcome::Pass);
            };
            fallback = Some(Rc::clone(&state.mlx));
            // SAFETY: the slot's contract.
            let device = unsafe { Device::from_raw(ctx) }?;
            state.made.get_mut().clear();
            let flushed = if joins { Ok(()) } else { state.flush(&device) };
            let outcome = flushed.and_then(|()| kernel(device, state));
            match &outcome {
                Ok(Outcome::Done) => {}
                Ok(Outcome::Pass) => {
                    for t in state.made.take() {
                        let _ = device.release(t);
                    }
                }
                Err(error) => state.abandon(&device, error),
            }
            outcome
        })
    });
    match (outcome, fallback) {
        (Ok(Outcome::Done), _) => Ok(status::OK),
        // SAFETY: the slot's contract.
        (Err(error), _) if !is_of_the_call(&error) => Ok(unsafe { report(err, error) }),
        // Anything else that is wrong with a call is for the replaced slot to say.
        (_, Some(mlx)) => Err(mlx),
        (_, None) => Err(Rc::new(mlxcel_backend_mlx::plain_table())),
    }
}

/// Whether an error says that the call is wrong, which the replaced slot says better. Others, such as memory that is used up, are
/// told as they are: kernels that waited may be lost with them, so that nothing else may take their place.
fn is_of_the_call(error: &AbiError) -> bool {
    matches!(
        error.code,
        status::INVALID_ARGUMENT
            | status::NOT_FOUND
            | status::FAILED_PRECONDITION
            | status::UNIMPLEMENTED
    )
}

/// A slot that tries a kernel and falls back to the slot it replaces. The result is a tensor, unless it says otherwise. `join slot`
/// leaves what is pending to the kernel.
macro_rules! slot {
    (join $name:ident($($arg:ident : $ty:ty),* $(,)?) $(-> $out:ty)? |$device:ident, $state:ident| $body:expr) => {
        $crate::native::slot!(@ true, $name($($arg : $ty),*) ($($out)?) |$device, $state| $body);
    };
    ($name:ident($($arg:ident : $ty:ty),* $(,)?) $(-> $out:ty)? |$device:ident, $state:ident| $body:expr) => {
        $crate::native::slot!(@ false, $name($($arg : $ty),*) ($($out)?) |$device, $state| $body);
    };
    (@ $joins:literal, $name:ident($($arg:ident : $ty:ty),*) () |$device:ident, $state:ident| $body:expr) => {
        $crate::native::slot!(@ $joins, $name($($arg : $ty),*) (mlxcel_abi::Tensor) |$device, $state| $body);
    };
    (@ $joins:literal, $name:ident($($arg:ident : $ty:ty),*) ($out:ty) |$device:ident, $state:ident| $body:expr) => {
        unsafe extern "C" fn $name(
            ctx: *mut core::ffi::c_void,
            $($arg: $ty,)*
            out: *mut $out,
            err: *mut *mut mlxcel_abi::ErrorObj,
        ) -> mlxcel_abi::Status {
            let kernel = |$device: mlxcel_backend_mlx::stream::Device<'_>, $state: &mut $crate::native::State| {
                if out.is_null() {
                    return Ok($crate::native::Outcome::Pass);
                }
                let made: mlxcel_abi::Result<Option<$out>> = $body;
                match made? {
                    Some(made) => {
                        // SAFETY: not null, and the caller's to write.
                        unsafe { out.write(made) };
                        Ok($crate::native::Outcome::Done)
                    }
                    None => Ok($crate::native::Outcome::Pass),
                }
            };
            // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
            unsafe {
                match $crate::native::attempt(ctx, err, $joins, kernel) {
                    Ok(status) => status,
                    Err(mlx) => (mlx.$name)(ctx, $($arg,)* out, err),
                }
            }
        }
    };
}
pub(super) use slot;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_wrong_with_a_call_is_left_to_the_replaced_slot() {
        for code in [
            status::RESOURCE_EXHAUSTED,
            status::INTERNAL,
            status::UNAVAILABLE,
        ] {
            assert!(!is_of_the_call(&AbiError::new(code, "")), "{code}");
        }
        for error in [AbiError::invalid(""), AbiError::unimplemented("")] {
            assert!(is_of_the_call(&error));
        }
    }
}
