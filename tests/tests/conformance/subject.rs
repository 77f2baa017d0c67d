//! A backend opened in this process through its entry table.

use std::sync::{Mutex, MutexGuard, PoisonError};

use mlxcel_abi::backend::{BackendTable, OpenArgs};
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, Str, Table};
use mlxcel_sdk::Backend;

/// Figures and limits of memory are those of the process, so backends that share a library take
/// turns.
pub fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closed when it is dropped, on the thread that opened it.
pub struct Opened {
    table: BackendTable,
    ops: *const BackendOps,
}

impl Opened {
    /// Opens the first device with these options.
    pub fn new(table: *const BackendTable, options: &str) -> Self {
        // SAFETY: entry tables live as long as the process.
        let table = unsafe { BackendTable::import(table) };
        let args = OpenArgs {
            options: Str::new(options),
            ..OpenArgs::default()
        };
        let (mut ops, mut err) = (std::ptr::null(), std::ptr::null_mut());
        // SAFETY: arguments and places are live.
        let opened = unsafe {
            let code = (table.open)(table.ctx, &args, &mut ops, &mut err);
            AbiError::check(code, err)
        };
        if let Err(error) = opened {
            panic!("the backend does not open: {error}");
        }
        Self { table, ops }
    }

    /// Its operations; they must not be used after the value is dropped.
    pub fn backend(&self) -> Backend {
        // SAFETY: the table is open and this is the thread that opened it.
        unsafe { Backend::from_raw(self.ops) }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened once by `new`.
        let code = unsafe { (self.table.close)(self.table.ctx, self.ops, std::ptr::null_mut()) };
        if !std::thread::panicking() {
            assert_eq!(code, 0, "the backend does not close");
        }
    }
}
