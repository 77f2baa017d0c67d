//! The host's caches as a family sees them during one step.

use std::ffi::c_void;

pub use mlxcel_abi::family::AttendArgs;
use mlxcel_abi::family::KvApi;
use mlxcel_abi::guard::guard;
use mlxcel_abi::{AbiError, ErrorObj, Status, Table, Tensor};

use super::device::DeviceTensor;

/// The caches of one step. Implemented by the engine, called by families through the ABI.
pub trait KvSource {
    /// Appends the keys and values in `args` to the cache of `layer` and attends, each row over its own
    /// sequence. Result `[T, H, Dv]`. The handles in `args` are borrowed.
    fn attend(&self, layer: u32, args: &AttendArgs) -> Result<DeviceTensor, AbiError>;
}

/// Runs `body` with a table over `source`, valid for the duration of the call.
pub(super) fn with_kv<T>(source: &dyn KvSource, body: impl FnOnce(&KvApi) -> T) -> T {
    let slot: &dyn KvSource = source;
    let api = KvApi {
        ctx: (&raw const slot).cast_mut().cast::<c_void>(),
        attend,
        ..KvApi::stubs()
    };
    body(&api)
}

unsafe extern "C" fn attend(
    ctx: *mut c_void,
    layer: u32,
    args: *const AttendArgs,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        if ctx.is_null() || out.is_null() {
            return Err(AbiError::invalid("attend: ctx or out is null"));
        }
        // SAFETY: `ctx` is the one of `with_kv`, whose body is running; `args` is the family's struct
        // with a truthful size.
        let (source, args) = unsafe { (*ctx.cast::<&dyn KvSource>(), AttendArgs::read(args)?) };
        let tensor = source.attend(layer, &args)?;
        // SAFETY: not null, and the family's to write to; it releases the handle.
        unsafe { out.write(tensor.into_handle()) };
        Ok(())
    };
    // SAFETY: `err` is null or the caller's slot.
    unsafe { guard(err, body) }
}
