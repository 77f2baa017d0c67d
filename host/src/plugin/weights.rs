//! The checkpoint's tensors as a family sees them while a model is loaded.

use std::ffi::c_void;

use mlxcel_abi::guard::guard;
use mlxcel_abi::host::WeightsApi;
use mlxcel_abi::ops_args::QuantSpec;
use mlxcel_abi::{AbiError, ErrorObj, Status, Str, Table, Tensor, TensorInfo};

use super::device::DeviceTensor;

/// Named tensors of a checkpoint. Implemented by the engine, called by families through the ABI.
pub trait WeightSource {
    /// Number of tensors.
    fn count(&self) -> usize;

    /// Name of the `index`-th tensor, in sorted order.
    fn name(&self, index: usize) -> Option<&str>;

    /// Shape and stored dtype.
    fn info(&self, name: &str) -> Result<TensorInfo, AbiError>;

    /// The tensor on the backend, in its stored dtype.
    fn load(&self, name: &str) -> Result<DeviceTensor, AbiError>;

    /// How the module at `path` is quantised; `None` when it is not.
    fn quant(&self, path: &str) -> Result<Option<QuantSpec>, AbiError>;
}

/// Runs `body` with a table over `source`, valid for the duration of the call.
pub(super) fn with_weights<T>(source: &dyn WeightSource, body: impl FnOnce(&WeightsApi) -> T) -> T {
    // A reference to a trait object is two words, so `ctx` points to one that lives here.
    let slot: &dyn WeightSource = source;
    let api = WeightsApi {
        ctx: (&raw const slot).cast_mut().cast::<c_void>(),
        count,
        name,
        info,
        load,
        quant,
        ..WeightsApi::stubs()
    };
    body(&api)
}

/// # Safety
/// `ctx` must be the one of a table made by [`with_weights`] whose `body` is still running.
unsafe fn source<'a>(ctx: *mut c_void) -> Result<&'a dyn WeightSource, AbiError> {
    if ctx.is_null() {
        return Err(AbiError::invalid("weights: ctx is null"));
    }
    // SAFETY: the caller vouches for `ctx`.
    Ok(unsafe { *ctx.cast::<&dyn WeightSource>() })
}

/// # Safety
/// `text` must be valid for the call.
unsafe fn text<'a>(text: Str) -> Result<&'a str, AbiError> {
    // SAFETY: forwarded to the caller.
    unsafe { text.as_str() }.map_err(|_| AbiError::invalid("weights: a name is not UTF-8"))
}

/// # Safety
/// `out` must be null or writable.
unsafe fn put<T>(out: *mut T, value: T) -> Result<(), AbiError> {
    if out.is_null() {
        return Err(AbiError::invalid("weights: out is null"));
    }
    // SAFETY: not null, and the caller vouches for it.
    unsafe { out.write(value) };
    Ok(())
}

unsafe extern "C" fn count(ctx: *mut c_void, out: *mut u64, err: *mut *mut ErrorObj) -> Status {
    // SAFETY: the family passes back what it was given, during `load` (contract of `WeightsApi`).
    unsafe { guard(err, || put(out, source(ctx)?.count() as u64)) }
}

unsafe extern "C" fn name(
    ctx: *mut c_void,
    index: u64,
    out: *mut Str,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the family passes back what it was given, during `load`.
        let source = unsafe { source(ctx) }?;
        let name = usize::try_from(index)
            .ok()
            .and_then(|index| source.name(index));
        let name = name.ok_or_else(|| {
            AbiError::invalid(format!(
                "weights: no tensor {index}, there are {}",
                source.count()
            ))
        })?;
        // SAFETY: `out` is the family's to write to.
        unsafe { put(out, Str::new(name)) }
    };
    // SAFETY: `err` is null or the caller's slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn info(
    ctx: *mut c_void,
    name: Str,
    out: *mut TensorInfo,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the family passes back what it was given, during `load`, with its own text and slots.
    unsafe { guard(err, || put(out, source(ctx)?.info(text(name)?)?)) }
}

unsafe extern "C" fn load(
    ctx: *mut c_void,
    name: Str,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the family passes back what it was given, during `load`, with its own text.
        let tensor = unsafe { source(ctx)?.load(text(name)?) }?;
        let handle = tensor.handle();
        // SAFETY: `out` is the family's to write to.
        unsafe { put(out, handle) }?;
        // Only now is the reference the family's to release.
        tensor.into_handle();
        Ok(())
    };
    // SAFETY: `err` is null or the caller's slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn quant(
    ctx: *mut c_void,
    path: Str,
    out: *mut QuantSpec,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the family passes back what it was given, during `load`, with its own text.
        let spec = unsafe { source(ctx)?.quant(text(path)?) }?.unwrap_or_default();
        write_sized(out, spec)
    };
    // SAFETY: `err` is null or the caller's slot.
    unsafe { guard(err, body) }
}

/// `QuantSpec` is frozen, so a family's is as large as ours.
fn write_sized(out: *mut QuantSpec, spec: QuantSpec) -> Result<(), AbiError> {
    // SAFETY: `out` is null or the family's to write to.
    unsafe { put(out, spec) }
}
