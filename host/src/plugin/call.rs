//! Calling a table function: status and error object become a `Result`, bytes become JSON.

use mlxcel_abi::{AbiError, ErrorObj, OwnedBytes, Status};
use serde::de::DeserializeOwned;

use super::error::CallError;

/// Largest JSON answer that is accepted.
const ANSWER_CAP_BYTES: usize = 16 << 20;

/// Runs `body` with an error slot. `subject` names the function and is only built for an error.
pub(super) fn call(
    subject: impl FnOnce() -> String,
    body: impl FnOnce(*mut *mut ErrorObj) -> Status,
) -> Result<(), CallError> {
    let mut error = std::ptr::null_mut();
    let status = body(&raw mut error);
    // SAFETY: the slot started as null, so it holds null or what the plugin wrote for this call.
    unsafe { AbiError::check(status, error) }.map_err(|error| CallError::new(subject(), error))
}

/// Runs `body`, which gives JSON, and reads it as `T`.
pub(super) fn call_json<T: DeserializeOwned>(
    subject: impl Fn() -> String,
    body: impl FnOnce(*mut OwnedBytes, *mut *mut ErrorObj) -> Status,
) -> Result<T, CallError> {
    let mut out = OwnedBytes::EMPTY;
    call(&subject, |error| body(&raw mut out, error))?;
    let malformed = |text: String| CallError::new(subject(), AbiError::internal(text));
    if out.len > ANSWER_CAP_BYTES {
        let len = out.len;
        return Err(malformed(format!(
            "the answer has {len} bytes, the limit is {ANSWER_CAP_BYTES}"
        )));
    }
    // SAFETY: written by the plugin in this call, or still the empty value; taken once.
    let bytes = unsafe { out.take() };
    serde_json::from_slice(&bytes)
        .map_err(|error| malformed(format!("the answer is not the JSON expected: {error}")))
}
