//! The edge to the `tokenizers` crate: its panics on hostile files become errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::TextError;

/// Runs `body`, turning both a library error and a panic into a [`TextError`].
///
/// Nothing that `body` may leave half-changed is used afterwards: callers either build a new object or only read.
pub(crate) fn guarded<T>(
    stage: &'static str,
    body: impl FnOnce() -> Result<T, Box<dyn std::error::Error + Send + Sync>>,
) -> Result<T, TextError> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(TextError::Tokenizers {
            stage,
            detail: error.to_string(),
        }),
        Err(payload) => Err(TextError::Panicked {
            stage,
            detail: message(payload.as_ref()),
        }),
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "no message".to_owned()
    }
}
