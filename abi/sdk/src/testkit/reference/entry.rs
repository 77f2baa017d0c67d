//! The reference backend as a backend plugin's entry table, for tests of hosts.

use core::ffi::c_void;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use mlxcel_abi::backend::{BackendTable, OpenArgs};
use mlxcel_abi::guard::guard;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::status::Status;
use mlxcel_abi::types::OwnedBytes;
use mlxcel_abi::{AbiError, ErrorObj, Result, Table, status};
use serde::Deserialize;

use super::{ReferenceBackend, ReferenceOptions, reference_backend};

/// Options as `OpenArgs` carries them.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    /// Any number: the reference backend computes on the calling thread.
    threads: u32,
    memory_limit_bytes: u64,
    /// Any number: freed memory is never kept.
    cache_limit_bytes: u64,
    shapes_only: bool,
}

/// Backends opened through the table, by the address of their operations.
static OPEN: LazyLock<Mutex<HashMap<usize, ReferenceBackend>>> = LazyLock::new(Mutex::default);

static TABLE: LazyLock<Shared> = LazyLock::new(|| {
    let mut table = BackendTable::stubs();
    (table.probe, table.open, table.close) = (probe, open, close);
    Shared(table)
});

struct Shared(BackendTable);
// SAFETY: the table is never written after its making and its context is null.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// Entry table of a backend called `reference`, which lives as long as the process.
pub fn reference_backend_table() -> *const BackendTable {
    &raw const TABLE.0
}

const PROBE: &str = r#"{"score": 1, "reason": "plain Rust, for tests", "devices": [{"name": "reference", "description": "reference backend", "total_bytes": 0, "free_bytes": 0}], "details": {}}"#;

unsafe extern "C" fn probe(
    _: *mut c_void,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: `out` and `err` are the caller's places (contract of the table).
    unsafe {
        guard(err, || {
            if out.is_null() {
                return Err(AbiError::invalid("there is no place for the result"));
            }
            out.write(OwnedBytes::from_vec(PROBE.as_bytes().to_vec()));
            Ok(())
        })
    }
}

fn options_of(args: &OpenArgs) -> Result<Options> {
    // SAFETY: texts of an argument struct are valid during the call.
    let (device, options) = unsafe { (args.device.as_str(), args.options.as_str()) };
    let not_text = |_| AbiError::invalid("device and options must be UTF-8");
    let (device, options) = (device.map_err(not_text)?, options.map_err(not_text)?);
    if !matches!(device, "" | "reference") {
        return Err(AbiError::new(
            status::NOT_FOUND,
            format!("the only device is \"reference\", found \"{device}\""),
        ));
    }
    if options.is_empty() {
        return Ok(Options::default());
    }
    serde_json::from_str(options).map_err(|error| AbiError::invalid(format!("options: {error}")))
}

unsafe extern "C" fn open(
    _: *mut c_void,
    args: *const OpenArgs,
    out: *mut *const BackendOps,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: pointers are live and writable for the call (contract of the table).
    unsafe {
        guard(err, || {
            let options = options_of(&OpenArgs::read(args)?)?;
            if out.is_null() {
                return Err(AbiError::invalid("there is no place for the result"));
            }
            let backend = reference_backend(ReferenceOptions {
                shapes_only: options.shapes_only,
                memory_limit_bytes: options.memory_limit_bytes,
                ..ReferenceOptions::default()
            });
            let ops = backend.ops();
            OPEN.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(ops as usize, backend);
            out.write(ops);
            Ok(())
        })
    }
}

unsafe extern "C" fn close(
    _: *mut c_void,
    ops: *const BackendOps,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: `err` is the caller's place (contract of the table).
    unsafe {
        guard(err, || {
            let closed = OPEN
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&(ops as usize));
            match closed {
                Some(_) => Ok(()),
                None => Err(AbiError::invalid("this backend is not open")),
            }
        })
    }
}
