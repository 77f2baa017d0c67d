//! The family table, each entry with its fault.

use std::ffi::c_void;
use std::sync::OnceLock;

use mlxcel_abi::family::{FamilyTable, LoadArgs, StepArgs, StepOutput};
use mlxcel_abi::guard::guard;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, DType, ErrorObj, OwnedBytes, Result, Status, Str, Table, Tensor};

use crate::fault;

/// Panics when this copy was told to.
fn trap(entry: &str) {
    assert!(fault::name() != entry, "{entry} as told");
}

struct Fixed<T>(T);
// SAFETY: what is kept in it is never written: function pointers and a null context, or numbers.
unsafe impl<T> Send for Fixed<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Fixed<T> {}

/// The table.
pub fn table() -> *const FamilyTable {
    static TABLE: OnceLock<Fixed<FamilyTable>> = OnceLock::new();
    let fixed = TABLE.get_or_init(|| {
        Fixed(FamilyTable {
            probe,
            describe,
            adapt_gguf,
            load,
            forward,
            unload,
            ..FamilyTable::stubs()
        })
    });
    &raw const fixed.0
}

/// A table that says it has 8 bytes.
pub fn small_table() -> *const () {
    static SMALL: Fixed<[usize; 16]> = Fixed([8; 16]);
    (&raw const SMALL.0).cast()
}

/// Answers with JSON.
///
/// # Safety
/// `out` must be writable and `err` null or writable.
unsafe fn answer(
    entry: &'static str,
    text: &str,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        trap(entry);
        let text = match fault::name() {
            "garbage_answers" => "{not json",
            "error_answers" => return Err(AbiError::invalid("hidden_size: expected 64, found 63")),
            _ => text,
        };
        // SAFETY: the caller vouches for `out`.
        unsafe { out.write(OwnedBytes::from_vec(text.as_bytes().to_vec())) };
        Ok(())
    };
    // SAFETY: the caller vouches for `err`.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn probe(
    _: *mut c_void,
    _config: Str,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    let text = r#"[{"arch":"faulty","score":100,"why":"always"}]"#;
    // SAFETY: the host's pointers.
    unsafe { answer("panic_probe", text, out, err) }
}

unsafe extern "C" fn describe(
    _: *mut c_void,
    _arch: Str,
    _config: Str,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the host's pointers.
    unsafe { answer("panic_describe", r#"{"arch":"faulty"}"#, out, err) }
}

unsafe extern "C" fn adapt_gguf(
    _: *mut c_void,
    _arch: Str,
    _summary: Str,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: the host's pointers.
    unsafe { answer("panic_adapt_gguf", "{}", out, err) }
}

struct Model {
    ops: BackendOps,
}

unsafe extern "C" fn load(
    _: *mut c_void,
    args: *const LoadArgs,
    out: *mut *mut c_void,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        trap("panic_load");
        if fault::name() == "null_model" {
            return Ok(());
        }
        // SAFETY: the host's struct and table live for the call; the table outlives the model.
        let ops = unsafe { BackendOps::import(LoadArgs::read(args)?.ops) };
        // SAFETY: `out` is the host's to write to.
        unsafe { out.write(Box::into_raw(Box::new(Model { ops })).cast()) };
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn forward(
    _: *mut c_void,
    model: *mut c_void,
    step: *const StepArgs,
    out: *mut StepOutput,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        trap("panic_forward");
        if fault::name() == "no_logits" {
            return Ok(());
        }
        // SAFETY: the model came from `load`; the step lives for the call.
        let (model, step) = unsafe { (&*model.cast::<Model>(), StepArgs::read(step)?) };
        let logits = zeros(&model.ops, i64::from(step.n_rows))?;
        // SAFETY: `out` is the host's to write to.
        unsafe { (*out).logits = logits };
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
    unsafe { guard(err, body) }
}

fn zeros(ops: &BackendOps, rows: i64) -> Result<Tensor> {
    let dims = [rows, 2];
    let mut out = Tensor::NONE;
    let mut error = std::ptr::null_mut();
    // SAFETY: the backend's table, on its thread; all pointers live for the call.
    unsafe {
        let code = (ops.full)(
            ops.ctx,
            0.0,
            DType::F32,
            dims.as_ptr(),
            2,
            &raw mut out,
            &raw mut error,
        );
        AbiError::check(code, error)?;
    }
    Ok(out)
}

unsafe extern "C" fn unload(_: *mut c_void, model: *mut c_void, err: *mut *mut ErrorObj) -> Status {
    let body = || {
        // SAFETY: the model came from `load` and is given back once.
        drop(unsafe { Box::from_raw(model.cast::<Model>()) });
        trap("panic_unload");
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
    unsafe { guard(err, body) }
}
