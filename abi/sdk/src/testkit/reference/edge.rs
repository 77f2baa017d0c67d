//! Where calls come in: guarded slots and the reading of raw arguments.

use core::ffi::c_void;
use std::sync::Arc;

use mlxcel_abi::guard::guard;
use mlxcel_abi::ops_args::QuantizedWeight;
use mlxcel_abi::status::Status;
use mlxcel_abi::{AbiError, ErrorObj, Result, Tensor};

use super::inner::Inner;
use super::quant::Quantized;
use super::value::Value;

/// Body of every slot: finds the backend, counts the call, runs `body`, reports its error.
///
/// # Safety
/// `ctx` must be the table's, `err` null or writable.
pub(super) unsafe fn enter(
    ctx: *mut c_void,
    slot: &'static str,
    err: *mut *mut ErrorObj,
    body: impl FnOnce(&'static Inner) -> Result<()>,
) -> Status {
    // SAFETY: the table's `ctx` points to an `Inner` that is never freed.
    let inner: Option<&'static Inner> = unsafe { ctx.cast::<Inner>().as_ref() };
    let body = || {
        let inner = inner.ok_or_else(|| AbiError::invalid("the table's context is missing"))?;
        inner.begin(slot)?;
        body(inner)
    };
    // SAFETY: the caller vouches for `err`.
    unsafe { guard(err, body) }
}

/// Declares the functions of some slots and `install`, which puts them into a table.
macro_rules! slots {
    ($(fn $name:ident($inner:ident $(, $arg:ident: $ty:ty)* $(,)?) $body:block)*) => {
        $(unsafe extern "C" fn $name(
            ctx: *mut core::ffi::c_void,
            $($arg: $ty,)*
            err: *mut *mut mlxcel_abi::ErrorObj,
        ) -> mlxcel_abi::Status {
            // SAFETY: the caller keeps the table's contract: `ctx` is the table's, pointers are
            // live for the call and have the lengths given with them, `out` and `err` are writable.
            unsafe {
                super::edge::enter(ctx, stringify!($name), err, |$inner| $body)
            }
        })*

        /// Fills these slots of `table`, but not those named in `missing`.
        pub(super) fn install(table: &mut mlxcel_abi::ops::BackendOps, missing: &[String]) {
            $(if !missing.iter().any(|name| name == stringify!($name)) {
                table.$name = $name;
            })*
        }
    };
}
pub(super) use slots;

/// A list from a pointer and a count.
///
/// # Safety
/// `ptr` must be null or point to `count` elements that live for `'a`.
pub(super) unsafe fn list<'a, T>(what: &str, ptr: *const T, count: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if ptr.is_null() {
        return Err(AbiError::invalid(format!(
            "{what} is null, {count} elements were announced"
        )));
    }
    // SAFETY: not null, and the caller vouches for the range.
    Ok(unsafe { core::slice::from_raw_parts(ptr, count) })
}

/// Tensors of a quantised weight.
pub(super) struct QuantizedParts {
    weight: Arc<Value>,
    scales: Arc<Value>,
    biases: Option<Arc<Value>>,
    raw: QuantizedWeight,
}

impl QuantizedParts {
    pub(super) fn find(inner: &Inner, raw: QuantizedWeight) -> Result<Self> {
        Ok(Self {
            weight: inner.get(raw.weight)?,
            scales: inner.get(raw.scales)?,
            biases: inner.get_optional(raw.biases)?,
            raw,
        })
    }

    pub(super) fn as_quantized(&self) -> Quantized<'_> {
        Quantized {
            weight: &self.weight,
            scales: &self.scales,
            biases: self.biases.as_deref(),
            spec: self.raw.spec,
        }
    }
}

/// Tensors behind a list of handles.
pub(super) fn all(inner: &Inner, handles: &[Tensor]) -> Result<Vec<Arc<Value>>> {
    handles.iter().map(|&handle| inner.get(handle)).collect()
}

/// Reads a flag that is 0 or 1.
pub(super) fn flag(what: &str, x: u32) -> Result<bool> {
    match x {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(AbiError::invalid(format!(
            "{what} must be 0 or 1, found {other}"
        ))),
    }
}
