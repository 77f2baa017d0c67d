//! A backend on host memory with a dozen operations: enough to move tensors in and out and to run the mock family.
//!
//! Everything else stays a stub, so it also shows what a backend without fused operations looks like. A test can write
//! the name of a fault into a copy of the file; see `fault` and `misstep`. It refuses calls from any other thread than
//! the one that opened it, except `release`.

#![expect(clippy::panic, reason = "one of its faults")]

mod device;
mod fault;
mod misstep;
mod ops;
mod sample;

use std::ffi::c_void;
use std::sync::OnceLock;

use mlxcel_abi::backend::{BackendTable, OpenArgs};
use mlxcel_abi::envelope::{HostHello, PluginHello};
use mlxcel_abi::guard::guard;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{
    AbiError, ErrorObj, OwnedBytes, Result, Status, Str, Table, kinds, status, version,
};

mlxcel_abi::embed_plugin_record! {
    const PLUGIN = { kind: "backend", name: "mock", version: env!("CARGO_PKG_VERSION"), vendor: "mlxcel", needs_minor: 0, extra: "" }
}

fn greet(_host: &HostHello) -> Result<PluginHello> {
    Ok(PluginHello {
        abi_minor: version::ABI_MINOR,
        needs_minor: 0,
        kind: kinds::plugin::BACKEND,
        table: table().cast(),
        reserved: [0; 8],
    })
}

mlxcel_abi::export_plugin_root! { metadata: || PLUGIN, open: greet, query: |_name: &str| 0usize }

struct Fixed(BackendTable);
// SAFETY: function pointers and a null context; never written.
unsafe impl Send for Fixed {}
// SAFETY: as above.
unsafe impl Sync for Fixed {}

fn table() -> *const BackendTable {
    static TABLE: OnceLock<Fixed> = OnceLock::new();
    let fixed = TABLE.get_or_init(|| {
        Fixed(BackendTable {
            probe,
            open,
            close,
            ..BackendTable::stubs()
        })
    });
    &raw const fixed.0
}

unsafe extern "C" fn probe(
    _: *mut c_void,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        let (score, reason) = match fault::name() {
            "panic_probe" => panic!("probe was told to panic"),
            "abort_probe" => std::process::abort(),
            "score_zero" => (0, "driver 550 found, 570 or newer needed"),
            "score_high" => (900, "pretends to be fast"),
            _ => (1, "host memory"),
        };
        let text = format!(
            r#"{{"score":{score},"reason":"{reason}","devices":[{{"name":"mock0","description":"host memory","total_bytes":1024,"free_bytes":512}}],"details":{{}}}}"#
        );
        // SAFETY: `out` is the host's to write to.
        unsafe { out.write(OwnedBytes::from_vec(text.into_bytes())) };
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn open(
    _: *mut c_void,
    args: *const OpenArgs,
    out: *mut *const BackendOps,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the host's struct and texts live for the call.
        let (device, options) = unsafe {
            let args = OpenArgs::read(args)?;
            (utf8(args.device)?, utf8(args.options)?)
        };
        if !matches!(device, "" | "mock0") {
            let text = format!("no device {device}, there is mock0");
            return Err(AbiError::new(status::NOT_FOUND, text));
        }
        if !matches!(options.trim(), "" | "{}") {
            return Err(AbiError::invalid(format!(
                "options: expected none, found {options}"
            )));
        }
        if fault::name() == "null_ops" {
            return Ok(());
        }
        // SAFETY: `out` is the host's to write to.
        unsafe { out.write(ops::open()) };
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn close(
    _: *mut c_void,
    ops: *const BackendOps,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the table came from `open` and is given back once.
        unsafe { ops::close(ops) };
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
    unsafe { guard(err, body) }
}

/// # Safety
/// `text` must be valid for the call.
unsafe fn utf8<'a>(text: Str) -> Result<&'a str> {
    // SAFETY: forwarded to the caller.
    unsafe { text.as_str() }.map_err(|_| AbiError::invalid("a text is not UTF-8"))
}
