//! Errors at the boundary: a status code, plus an optional object with the text.
//!
//! The object is allocated by the side that failed and freed by the same side through its own
//! `free`, so the two allocators never meet.

use crate::layout::slot_message;
use crate::status::{self, Status};
use crate::types::Str;

/// What went wrong, as plain Rust on either side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbiError {
    /// One of [`crate::status`].
    pub code: Status,
    /// What was expected, what was found, what to do.
    pub message: String,
    /// `file:line` where it arose, when known.
    pub location: String,
}

/// Result of this crate's own functions.
pub type Result<T> = core::result::Result<T, AbiError>;

impl AbiError {
    /// An error without a location.
    pub fn new(code: Status, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            location: String::new(),
        }
    }

    /// An argument is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(status::INVALID_ARGUMENT, message)
    }

    /// Something is a bug.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(status::INTERNAL, message)
    }

    /// The variant is not there; the caller may have a fallback.
    pub fn unimplemented(message: impl Into<String>) -> Self {
        Self::new(status::UNIMPLEMENTED, message)
    }
}

impl core::fmt::Display for AbiError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.message)?;
        if !self.location.is_empty() {
            write!(f, " (at {})", self.location)?;
        }
        Ok(())
    }
}

impl std::error::Error for AbiError {}

/// The error as it crosses the boundary. Read the texts, then call `free` once.
#[repr(C)]
pub struct ErrorObj {
    /// `size_of` this struct in the build that made it.
    pub struct_size: usize,
    /// One of [`crate::status`].
    pub code: Status,
    /// Zero.
    pub reserved: u32,
    /// Text, valid until `free`.
    pub message: Str,
    /// `file:line`, or empty; valid until `free`.
    pub location: Str,
    /// Frees the object and its texts.
    pub free: unsafe extern "C" fn(*mut ErrorObj),
}

#[repr(C)]
struct OwnedErrorObj {
    public: ErrorObj,
    message: String,
    location: String,
}

unsafe extern "C" fn free_error(object: *mut ErrorObj) {
    if !object.is_null() {
        // SAFETY: `object` was made by `into_raw` below, whose first field is the public part.
        drop(unsafe { Box::from_raw(object.cast::<OwnedErrorObj>()) });
    }
}

impl AbiError {
    /// Moves the error to the heap for the other side.
    pub fn into_raw(self) -> *mut ErrorObj {
        let mut owned = Box::new(OwnedErrorObj {
            public: ErrorObj {
                struct_size: size_of::<ErrorObj>(),
                code: self.code,
                reserved: 0,
                message: Str::EMPTY,
                location: Str::EMPTY,
                free: free_error,
            },
            message: self.message,
            location: self.location,
        });
        owned.public.message = Str::new(&owned.message);
        owned.public.location = Str::new(&owned.location);
        Box::into_raw(owned).cast()
    }

    /// Reads and frees an error that the other side made.
    ///
    /// # Safety
    /// `object` must be null or come unread from the other side of the boundary.
    pub unsafe fn from_raw(code: Status, object: *mut ErrorObj) -> Self {
        if object.is_null() {
            return Self::new(code, status::name(code));
        }
        // SAFETY: not null, and the maker keeps it valid until `free`.
        let (message, location, free) = unsafe {
            (
                crate::layout::lossy((*object).message),
                crate::layout::lossy((*object).location),
                (*object).free,
            )
        };
        // SAFETY: freed once, by its maker's function.
        unsafe { free(object) };
        Self {
            code,
            message,
            location,
        }
    }

    /// Turns a status and its error slot into a `Result`.
    ///
    /// # Safety
    /// As for [`AbiError::from_raw`].
    pub unsafe fn check(code: Status, object: *mut ErrorObj) -> Result<()> {
        if code == status::OK {
            return Ok(());
        }
        // SAFETY: forwarded to the caller.
        Err(unsafe { Self::from_raw(code, object) })
    }
}

/// Writes `error` to the caller's slot, when there is one, and returns its code.
///
/// # Safety
/// `err` must be null or point to a writable pointer.
pub unsafe fn report(err: *mut *mut ErrorObj, error: AbiError) -> Status {
    let code = if error.code == status::OK {
        status::INTERNAL
    } else {
        error.code
    };
    if !err.is_null() {
        // SAFETY: the caller vouches for the slot.
        unsafe { *err = error.into_raw() };
    }
    code
}

/// What every stub does. Allocates only when the caller asked for the text.
///
/// # Safety
/// As for [`report`].
pub unsafe fn report_unimplemented(
    err: *mut *mut ErrorObj,
    table: &'static str,
    slot: &'static str,
) -> Status {
    if !err.is_null() {
        let error = AbiError::unimplemented(slot_message(table, slot));
        // SAFETY: the caller vouches for the slot.
        unsafe { *err = error.into_raw() };
    }
    status::UNIMPLEMENTED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_survives_the_crossing() {
        let mut sent = AbiError::invalid("expected 3 dims, found 4");
        sent.location = "model.rs:12".to_owned();
        let raw = sent.clone().into_raw();
        // SAFETY: made on the line above.
        let received = unsafe { AbiError::from_raw(sent.code, raw) };
        assert_eq!(received, sent);
        assert_eq!(
            received.to_string(),
            "expected 3 dims, found 4 (at model.rs:12)"
        );
    }

    #[test]
    fn a_missing_object_still_names_the_status() {
        // SAFETY: null is allowed.
        let error =
            unsafe { AbiError::from_raw(status::RESOURCE_EXHAUSTED, core::ptr::null_mut()) };
        assert_eq!(error.message, "resource exhausted");
    }
}
