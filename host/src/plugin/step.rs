//! The host's caches as a family sees them during one step.

use std::ffi::c_void;

use mlxcel_abi::family::KvApi;
pub use mlxcel_abi::family::{AttendArgs, GatedDeltaArgs, IndexArgs, ShortConvArgs};
pub use mlxcel_abi::fused_args::RotateArgs;
use mlxcel_abi::guard::guard;
use mlxcel_abi::{AbiError, ErrorObj, Status, Table, Tensor};

use super::device::DeviceTensor;

/// The caches of one step. Implemented by the engine, called by families through the ABI. Handles in
/// arguments are borrowed. What a source leaves out is not implemented, for which families have a
/// fallback.
pub trait KvSource {
    /// Appends the keys and values in `args` to the cache of `layer` and attends, each row over its own
    /// sequence. Result `[T, H, Dv]`.
    fn attend(&self, layer: u32, args: &AttendArgs) -> Result<DeviceTensor, AbiError>;

    /// As `attend`, of queries and keys that are normed and rotated first.
    fn attend_rotated(
        &self,
        _layer: u32,
        _args: &AttendArgs,
        _rotate: &RotateArgs,
    ) -> Result<DeviceTensor, AbiError> {
        Err(missing("attend_rotated"))
    }

    /// Appends index keys and chooses positions for every row: `[T, top_k]` i32.
    fn index(&self, _layer: u32, _args: &IndexArgs) -> Result<DeviceTensor, AbiError> {
        Err(missing("index"))
    }

    /// Convolves each row with those before it: `[T, C]`.
    fn short_conv(
        &self,
        _layer: u32,
        _state: u32,
        _args: &ShortConvArgs,
    ) -> Result<DeviceTensor, AbiError> {
        Err(missing("short_conv"))
    }

    /// Runs the gated delta rule: `[T, Hv, Dv]`.
    fn gated_delta(
        &self,
        _layer: u32,
        _state: u32,
        _args: &GatedDeltaArgs,
    ) -> Result<DeviceTensor, AbiError> {
        Err(missing("gated_delta"))
    }

    /// State of every sequence before the step: `[S, shape..]`.
    fn state_read(&self, _layer: u32, _state: u32) -> Result<DeviceTensor, AbiError> {
        Err(missing("state_read"))
    }

    /// Sets the state of every sequence after the step.
    fn state_write(&self, _layer: u32, _state: u32, _value: Tensor) -> Result<(), AbiError> {
        Err(missing("state_write"))
    }

    /// Sets the keys and values of a layer of cross-attention: `[P, H, K]` and `[P, H, V]`.
    fn cross_write(&self, _layer: u32, _k: Tensor, _v: Tensor) -> Result<(), AbiError> {
        Err(missing("cross_write"))
    }

    /// `[S + 1]` i32.
    fn row_starts(&self) -> Result<DeviceTensor, AbiError> {
        Err(missing("row_starts"))
    }

    /// `[T]` i32.
    fn row_sequences(&self) -> Result<DeviceTensor, AbiError> {
        Err(missing("row_sequences"))
    }

    /// Appends index keys and gives those of every sequence: `[S, L, D]`.
    fn index_keys(&self, _layer: u32, _k: Tensor) -> Result<DeviceTensor, AbiError> {
        Err(missing("index_keys"))
    }
}

fn missing(slot: &str) -> AbiError {
    AbiError::unimplemented(format!("these caches have no {slot}"))
}

/// Runs `body` with a table over `source`, valid for the duration of the call.
pub(super) fn with_kv<T>(source: &dyn KvSource, body: impl FnOnce(&KvApi) -> T) -> T {
    let slot: &dyn KvSource = source;
    let api = KvApi {
        ctx: (&raw const slot).cast_mut().cast::<c_void>(),
        attend,
        index,
        short_conv,
        gated_delta,
        state_read,
        state_write,
        row_starts,
        row_sequences,
        index_keys,
        attend_rotated,
        cross_write,
        ..KvApi::stubs()
    };
    body(&api)
}

/// Runs the body of a slot.
///
/// # Safety
/// `ctx` must be null or the one of `with_kv`, whose body is running; `err` null or the caller's slot.
unsafe fn enter(
    ctx: *mut c_void,
    err: *mut *mut ErrorObj,
    body: impl FnOnce(&dyn KvSource) -> Result<(), AbiError>,
) -> Status {
    let run = || {
        if ctx.is_null() {
            return Err(AbiError::invalid("the caches' ctx is null"));
        }
        // SAFETY: not null, and the caller vouches for it.
        body(unsafe { *ctx.cast::<&dyn KvSource>() })
    };
    // SAFETY: forwarded to the caller.
    unsafe { guard(err, run) }
}

/// Declares slots that give one tensor: `fn name(source; arguments) body`.
macro_rules! tensor_slots {
    ($(fn $name:ident($source:ident; $($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        unsafe extern "C" fn $name(
            ctx: *mut c_void,
            $($arg: $ty,)*
            out: *mut Tensor,
            err: *mut *mut ErrorObj,
        ) -> Status {
            let body = |$source: &dyn KvSource| {
                if out.is_null() {
                    return Err(AbiError::invalid(concat!(stringify!($name), ": out is null")));
                }
                let tensor: DeviceTensor = $body;
                // SAFETY: not null, and the family's to write to; it releases the handle.
                unsafe { out.write(tensor.into_handle()) };
                Ok(())
            };
            // SAFETY: `ctx` is the one of `with_kv`; `err` is null or the caller's slot.
            unsafe { enter(ctx, err, body) }
        }
    )*};
}

tensor_slots! {
    fn attend(source; layer: u32, args: *const AttendArgs) {
        // SAFETY: the family's struct with a truthful size.
        source.attend(layer, &unsafe { AttendArgs::read(args) }?)?
    }

    fn attend_rotated(source; layer: u32, args: *const AttendArgs, rotate: *const RotateArgs) {
        // SAFETY: as for `attend`, both structs.
        let (args, rotate) = unsafe { (AttendArgs::read(args)?, RotateArgs::read(rotate)?) };
        source.attend_rotated(layer, &args, &rotate)?
    }

    fn index(source; layer: u32, args: *const IndexArgs) {
        // SAFETY: as for `attend`.
        source.index(layer, &unsafe { IndexArgs::read(args) }?)?
    }

    fn short_conv(source; layer: u32, state: u32, args: *const ShortConvArgs) {
        // SAFETY: as for `attend`.
        source.short_conv(layer, state, &unsafe { ShortConvArgs::read(args) }?)?
    }

    fn gated_delta(source; layer: u32, state: u32, args: *const GatedDeltaArgs) {
        // SAFETY: as for `attend`.
        source.gated_delta(layer, state, &unsafe { GatedDeltaArgs::read(args) }?)?
    }

    fn state_read(source; layer: u32, state: u32) {
        source.state_read(layer, state)?
    }

    fn row_starts(source;) {
        source.row_starts()?
    }

    fn row_sequences(source;) {
        source.row_sequences()?
    }

    fn index_keys(source; layer: u32, k: Tensor) {
        source.index_keys(layer, k)?
    }
}

unsafe extern "C" fn state_write(
    ctx: *mut c_void,
    layer: u32,
    state: u32,
    value: Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: `ctx` is the one of `with_kv`; `err` is null or the caller's slot.
    unsafe { enter(ctx, err, |source| source.state_write(layer, state, value)) }
}

unsafe extern "C" fn cross_write(
    ctx: *mut c_void,
    layer: u32,
    k: Tensor,
    v: Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: `ctx` is the one of `with_kv`; `err` is null or the caller's slot.
    unsafe { enter(ctx, err, |source| source.cross_write(layer, k, v)) }
}
