//! What every slot of the table does around its own work: guard, thread, deferred releases, names
//! in errors, storing of results.

use core::ffi::c_void;

use cxx::UniquePtr;
use mlxcel_abi::guard::guard;
use mlxcel_abi::{AbiError, ErrorObj, Status, Tensor};

use crate::args::Result;
use crate::bridge::{Array, Ref};
use crate::context::{Context, Tensors};
use crate::fault::Fault;

/// Runs a slot's body on the backend thread.
///
/// # Safety
/// `ctx` must be the context of an open backend and `err` null or writable.
pub(crate) unsafe fn enter(
    ctx: *mut c_void,
    err: *mut *mut ErrorObj,
    op: &'static str,
    body: impl FnOnce(&Context) -> Result<()>,
) -> Status {
    let run = || {
        // SAFETY: the caller vouches for the context.
        let context = unsafe { Context::from_raw(ctx) }?;
        context
            .check_thread()
            .map_err(|error| Fault::from(error).named(op))?;
        context.drain_deferred();
        body(context).map_err(|fault| fault.named(op))
    };
    // SAFETY: the caller vouches for the error slot.
    unsafe { guard(err, run) }
}

/// Runs the body of a slot that gives one tensor, and stores it.
///
/// # Safety
/// As for [`enter`]; `out` must be null or writable.
pub(crate) unsafe fn make(
    ctx: *mut c_void,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
    op: &'static str,
    body: impl FnOnce(&Context, &Tensors) -> Result<UniquePtr<Array>>,
) -> Status {
    let run = |context: &Context| {
        check_out(out)?;
        let array = {
            let tensors = context.tensors.borrow();
            body(context, &tensors)?
        };
        let handle = context.insert(array)?;
        // SAFETY: not null, and the caller vouches for it.
        unsafe { out.write(handle) };
        Ok(())
    };
    // SAFETY: forwarded to the caller.
    unsafe { enter(ctx, err, op, run) }
}

/// The same for slots that give three, of which the last may be none.
///
/// # Safety
/// As for [`make`].
pub(crate) unsafe fn make_three(
    ctx: *mut c_void,
    out: *mut [Tensor; 3],
    err: *mut *mut ErrorObj,
    op: &'static str,
    body: impl FnOnce(&Context, &Tensors) -> Result<crate::bridge::Three>,
) -> Status {
    let run = |context: &Context| {
        check_out(out)?;
        let three = {
            let tensors = context.tensors.borrow();
            body(context, &tensors)?
        };
        let handles = store_three(context, three)?;
        // SAFETY: not null, and the caller vouches for it.
        unsafe { out.write(handles) };
        Ok(())
    };
    // SAFETY: forwarded to the caller.
    unsafe { enter(ctx, err, op, run) }
}

/// The same for slots that give two.
///
/// # Safety
/// As for [`make`].
pub(crate) unsafe fn make_two(
    ctx: *mut c_void,
    out: *mut [Tensor; 2],
    err: *mut *mut ErrorObj,
    op: &'static str,
    body: impl FnOnce(&Context, &Tensors) -> Result<crate::bridge::Three>,
) -> Status {
    let run = |context: &Context| {
        check_out(out)?;
        let three = {
            let tensors = context.tensors.borrow();
            body(context, &tensors)?
        };
        let [first, second, _] = store_three(context, three)?;
        // SAFETY: not null, and the caller vouches for it.
        unsafe { out.write([first, second]) };
        Ok(())
    };
    // SAFETY: forwarded to the caller.
    unsafe { enter(ctx, err, op, run) }
}

fn store_three(
    context: &Context,
    three: crate::bridge::Three,
) -> core::result::Result<[Tensor; 3], AbiError> {
    let mut handles = [Tensor::NONE; 3];
    let arrays = [
        Some(three.first),
        Some(three.second),
        Some(three.third).filter(|third| !third.is_null()),
    ];
    for (handle, array) in handles.iter_mut().zip(arrays) {
        let Some(array) = array else { continue };
        match context.insert(array) {
            Ok(stored) => *handle = stored,
            Err(error) => {
                // All or nothing: the caller gets no handle, so none may stay.
                for stored in handles.into_iter().filter(|handle| !handle.is_none()) {
                    context.release(stored)?;
                }
                return Err(error);
            }
        }
    }
    Ok(handles)
}

/// Refuses a result pointer that cannot be written.
pub(crate) fn check_out<T>(out: *mut T) -> Result<()> {
    if out.is_null() || !out.is_aligned() {
        return Err(Fault::invalid("the result pointer is null or misaligned"));
    }
    Ok(())
}

/// The array behind a handle.
pub(crate) fn get(tensors: &Tensors, t: Tensor) -> Result<&Array> {
    tensors.get(t)?.array()
}

/// The array behind an optional handle, as a list of none or one.
pub(crate) fn optional(tensors: &Tensors, t: Tensor) -> Result<Option<Ref<'_>>> {
    if t.is_none() {
        return Ok(None);
    }
    Ok(Some(Ref {
        array: get(tensors, t)?,
    }))
}

/// The arrays behind a list of handles.
pub(crate) fn list<'a>(tensors: &'a Tensors, handles: &[Tensor]) -> Result<Vec<Ref<'a>>> {
    handles
        .iter()
        .map(|&t| {
            Ok(Ref {
                array: get(tensors, t)?,
            })
        })
        .collect()
}

/// Declares slots that give one tensor: `fn name(context, tensors; arguments) body`, where the body
/// yields an array. The rest of the contract is added here.
macro_rules! tensor_slots {
    ($(fn $name:ident($context:ident, $tensors:ident; $($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            /// # Safety
            /// The slot's contract: `ctx` of an open backend, pointers valid for the call.
            pub(crate) unsafe extern "C" fn $name(
                ctx: *mut core::ffi::c_void,
                $($arg: $ty,)*
                out: *mut mlxcel_abi::Tensor,
                err: *mut *mut mlxcel_abi::ErrorObj,
            ) -> mlxcel_abi::Status {
                let body = |$context: &$crate::context::Context, $tensors: &$crate::context::Tensors| $body;
                // SAFETY: forwarded to the caller.
                unsafe { $crate::slot::make(ctx, out, err, stringify!($name), body) }
            }
        )*
    };
}

/// Declares slots without a tensor as result: `fn name(context; arguments) body`, where the body
/// yields nothing.
macro_rules! plain_slots {
    ($(fn $name:ident($context:ident; $($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            /// # Safety
            /// The slot's contract: `ctx` of an open backend, pointers valid for the call.
            pub(crate) unsafe extern "C" fn $name(
                ctx: *mut core::ffi::c_void,
                $($arg: $ty,)*
                err: *mut *mut mlxcel_abi::ErrorObj,
            ) -> mlxcel_abi::Status {
                let body = |$context: &$crate::context::Context| $body;
                // SAFETY: forwarded to the caller.
                unsafe { $crate::slot::enter(ctx, err, stringify!($name), body) }
            }
        )*
    };
}

pub(crate) use {plain_slots, tensor_slots};
