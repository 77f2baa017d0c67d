//! The services that the host lends to every plugin: the log, and the query for extensions.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::OnceLock;

use mlxcel_abi::collectives::COLLECTIVES;
use mlxcel_abi::guard::guard;
use mlxcel_abi::host::HostApi;
use mlxcel_abi::kinds::log;
use mlxcel_abi::{AbiError, ErrorObj, Status, Str, Table};

/// A table that is never written after it was made.
struct Fixed(HostApi);

// SAFETY: the only pointer inside is `ctx`, which stays null; the functions touch no shared state.
unsafe impl Send for Fixed {}
// SAFETY: as above.
unsafe impl Sync for Fixed {}

/// The host's services; they live as long as the process.
pub(super) fn host_api() -> &'static HostApi {
    static API: OnceLock<Fixed> = OnceLock::new();
    &API.get_or_init(|| {
        Fixed(HostApi {
            log: write_log,
            query: query_extension,
            ..HostApi::stubs()
        })
    })
    .0
}

unsafe extern "C" fn write_log(
    _ctx: *mut c_void,
    level: u32,
    target: Str,
    message: Str,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        let invalid = |_| AbiError::invalid("log text is not UTF-8");
        // SAFETY: a `Str` argument is valid for the call.
        let (plugin, text) = unsafe { (target.as_str(), message.as_str()) };
        let (plugin, text) = (plugin.map_err(invalid)?, text.map_err(invalid)?);
        // Levels are part of an event's static description, hence one call site for each.
        match level {
            log::ERROR => tracing::error!(target: "mlxcel::plugin", plugin, "{text}"),
            log::WARN => tracing::warn!(target: "mlxcel::plugin", plugin, "{text}"),
            log::INFO => tracing::info!(target: "mlxcel::plugin", plugin, "{text}"),
            log::DEBUG => tracing::debug!(target: "mlxcel::plugin", plugin, "{text}"),
            log::TRACE => tracing::trace!(target: "mlxcel::plugin", plugin, "{text}"),
            other => return Err(AbiError::invalid(format!("unknown log level {other}"))),
        }
        Ok(())
    };
    // SAFETY: `err` is null or the caller's slot, as for every table function.
    unsafe { guard(err, body) }
}

thread_local! {
    /// Table of the collectives while this thread loads a part of a model; 0 while it does not.
    static COLLECTIVES_LENT: Cell<usize> = const { Cell::new(0) };
}

/// Families that this thread calls are answered with the collectives for as long as this lives.
#[derive(Debug)]
pub struct Lent(());

/// Lends the table at `address`.
pub(super) fn lend(address: usize) -> Lent {
    COLLECTIVES_LENT.set(address);
    Lent(())
}

impl Drop for Lent {
    fn drop(&mut self) {
        COLLECTIVES_LENT.set(0);
    }
}

/// The one extension there is: the collectives, on a thread that loads a part of a model. 0 says that there is none.
unsafe extern "C" fn query_extension(
    _ctx: *mut c_void,
    name: Str,
    out: *mut usize,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        if out.is_null() {
            return Err(AbiError::invalid("query: out is null"));
        }
        // SAFETY: a `Str` argument is valid for the call.
        let name = unsafe { name.as_str() };
        let found = match name {
            Ok(COLLECTIVES) => COLLECTIVES_LENT.get(),
            _ => 0,
        };
        // SAFETY: not null, and the caller's to write to.
        unsafe { *out = found };
        Ok(())
    };
    // SAFETY: `err` is null or the caller's slot, as for every table function.
    unsafe { guard(err, body) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlxcel_abi::status;

    fn log_status(level: u32, message: Str) -> Status {
        let api = host_api();
        // SAFETY: the texts live for the call; no error text is asked for.
        unsafe {
            (api.log)(
                api.ctx,
                level,
                Str::new("test"),
                message,
                std::ptr::null_mut(),
            )
        }
    }

    #[test]
    fn every_level_is_taken_and_nonsense_is_an_error() {
        for (level, name) in log::ALL {
            assert_eq!(log_status(*level, Str::new(name)), status::OK);
        }
        assert_eq!(log_status(99, Str::new("x")), status::INVALID_ARGUMENT);
        let broken = [0xff_u8, 0xfe];
        let broken = Str {
            ptr: broken.as_ptr(),
            len: broken.len(),
        };
        assert_eq!(log_status(log::INFO, broken), status::INVALID_ARGUMENT);
    }

    #[test]
    fn unknown_extensions_are_not_there() {
        let api = host_api();
        let name = Str::new("mlxcel.ext.nothing/1");
        let mut out = 7_usize;
        let query = |out: *mut usize| {
            // SAFETY: `out` is null or ours; no error text is asked for.
            unsafe { (api.query)(api.ctx, name, out, std::ptr::null_mut()) }
        };
        let (good, bad) = (query(&raw mut out), query(std::ptr::null_mut()));
        assert_eq!((good, out, bad), (status::OK, 0, status::INVALID_ARGUMENT));
    }

    #[test]
    fn collectives_are_there_while_they_are_lent_and_on_that_thread_alone() {
        fn found() -> usize {
            let api = host_api();
            let mut out = 7_usize;
            let name = Str::new(COLLECTIVES);
            // SAFETY: `out` is ours; no error text is asked for.
            let code = unsafe { (api.query)(api.ctx, name, &raw mut out, std::ptr::null_mut()) };
            assert_eq!(code, status::OK);
            out
        }
        assert_eq!(found(), 0);
        let lent = lend(64);
        assert_eq!(found(), 64);
        assert_eq!(std::thread::spawn(found).join().unwrap(), 0);
        drop(lent);
        assert_eq!(found(), 0);
    }
}
