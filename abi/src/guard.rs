//! Panic guards. A panic must never leave an `extern "C"` function: the runtime would abort the
//! process, because each cdylib has its own copy of the standard library.

use core::cell::RefCell;
use core::panic::AssertUnwindSafe;
use std::panic;
use std::sync::Once;

use crate::error::{AbiError, ErrorObj, Result, report};
use crate::status::{self, Status};

#[cfg(panic = "abort")]
compile_error!(
    "mlxcel plugins and hosts must be built with panic = \"unwind\": a panic has to be caught at the plugin boundary"
);

thread_local! {
    static GUARD: RefCell<(u32, String)> = const { RefCell::new((0, String::new())) };
}

/// Installs, once per copy of this crate, a panic hook that keeps the location of a guarded panic
/// and stays silent for it; panics outside a guard go to the previous hook.
fn install_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let guarded = GUARD.try_with(|guard| {
                let mut guard = guard.borrow_mut();
                if guard.0 > 0 {
                    guard.1 = info.location().map(ToString::to_string).unwrap_or_default();
                }
                guard.0 > 0
            });
            if guarded != Ok(true) {
                previous(info);
            }
        }));
    });
}

fn text_of(payload: &(dyn core::any::Any + Send)) -> &str {
    if let Some(text) = payload.downcast_ref::<&str>() {
        text
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text
    } else {
        "a panic without a text"
    }
}

/// Runs `body` and turns a panic into [`status::INTERNAL`] with the panic's text and location.
pub fn catch<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    install_hook();
    GUARD.with(|guard| guard.borrow_mut().0 += 1);
    let outcome = panic::catch_unwind(AssertUnwindSafe(body));
    let location = GUARD.with(|guard| {
        let mut guard = guard.borrow_mut();
        guard.0 -= 1;
        core::mem::take(&mut guard.1)
    });
    match outcome {
        Ok(result) => result,
        Err(payload) => {
            let message = format!("panicked: {}", text_of(&*payload));
            // The payload's own drop may panic; leaking it is the lesser evil.
            let _ = core::mem::ManuallyDrop::new(payload);
            Err(AbiError {
                code: status::INTERNAL,
                message,
                location,
            })
        }
    }
}

/// Body of a table function: runs `body`, reports its error or panic through `err`.
///
/// # Safety
/// `err` must be null or point to a writable pointer.
pub unsafe fn guard(err: *mut *mut ErrorObj, body: impl FnOnce() -> Result<()>) -> Status {
    match catch(body) {
        Ok(()) => status::OK,
        // SAFETY: the caller vouches for the slot.
        Err(error) => unsafe { report(err, error) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_internal_error_with_its_place() {
        let error = catch::<()>(|| panic!("index {} out of range", 7)).unwrap_err();
        assert_eq!(error.code, status::INTERNAL);
        assert_eq!(error.message, "panicked: index 7 out of range");
        assert!(error.location.contains("guard.rs"), "{}", error.location);
    }

    #[test]
    fn guards_nest_and_leave_no_state_behind() {
        let outer = catch(|| {
            let inner = catch::<()>(|| panic!("inner"));
            assert!(inner.is_err());
            Ok(5)
        });
        assert_eq!(outer, Ok(5));
        assert!(GUARD.with(|guard| guard.borrow().1.is_empty()));
    }
}
