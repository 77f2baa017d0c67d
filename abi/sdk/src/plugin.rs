//! The export macro of a family and the guarded entries behind it.

use core::ffi::c_void;
use std::sync::OnceLock;

use mlxcel_abi::family::{EncodeArgs, FamilyTable, LoadArgs, StepArgs, StepOutput};
use mlxcel_abi::guard::guard;
use mlxcel_abi::{AbiError, DType, ErrorObj, OwnedBytes, Status, Str, Table};
use serde_json::{Value, json};

use crate::arch::{ARCHITECTURES, find};
use crate::gguf_names::own_names;
use crate::{Backend, Config, Encode, Error, GgufSummary, Model, Ranks, Step, Weights};

type AbiResult<T> = mlxcel_abi::Result<T>;

/// A loaded model with the backend it lives on. The model is dropped before its backend.
struct Loaded {
    model: Box<dyn Model>,
    backend: Backend,
}

/// # Safety
/// `text` must be valid for the call.
unsafe fn utf8<'a>(text: Str, what: &str) -> AbiResult<&'a str> {
    // SAFETY: forwarded to the caller.
    unsafe { text.as_str() }.map_err(|e| AbiError::invalid(format!("{what} is not UTF-8: {e}")))
}

fn parse(text: &str, what: &str) -> AbiResult<Value> {
    serde_json::from_str(text).map_err(|e| AbiError::invalid(format!("{what} is not JSON: {e}")))
}

fn give(value: &Value) -> OwnedBytes {
    OwnedBytes::from_vec(value.to_string().into_bytes())
}

/// Writes through an out pointer that must not be null.
///
/// # Safety
/// `out` must be null or writable.
unsafe fn put<T>(out: *mut T, value: T) -> AbiResult<()> {
    if out.is_null() {
        return Err(AbiError::invalid("the output pointer is null"));
    }
    // SAFETY: not null, and the caller vouches for the rest.
    unsafe { out.write(value) };
    Ok(())
}

unsafe extern "C" fn probe(
    _: *mut c_void,
    config: Str,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the host's text is valid for the call.
        let value = parse(unsafe { utf8(config, "config") }?, "config")?;
        let config = Config::root(&value)?;
        let model_type = config.opt_str("model_type")?.unwrap_or_default();
        let mut fits: Vec<(u32, Value)> = ARCHITECTURES
            .iter()
            .filter(|entry| entry.model_types.contains(&model_type))
            .map(|entry| {
                let probe = entry.implementation.probe(&config);
                (
                    probe.score,
                    json!({"arch": entry.id, "score": probe.score, "why": probe.why}),
                )
            })
            .collect();
        fits.sort_by_key(|(score, _)| core::cmp::Reverse(*score));
        let list: Vec<Value> = fits.into_iter().map(|(_, value)| value).collect();
        // SAFETY: the host's out pointer.
        unsafe { put(out, give(&Value::Array(list))) }
    };
    // SAFETY: the host's error slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn describe(
    _: *mut c_void,
    arch: Str,
    config: Str,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the host's texts are valid for the call.
        let (arch, config) = unsafe { (utf8(arch, "architecture")?, utf8(config, "config")?) };
        let value = parse(config, "config")?;
        let desc = find(arch)?
            .implementation
            .describe(&Config::root(&value)?)
            .map_err(|error| own_names(&value, error))?;
        let json = serde_json::to_value(desc).map_err(|e| AbiError::internal(e.to_string()))?;
        // SAFETY: the host's out pointer.
        unsafe { put(out, give(&json)) }
    };
    // SAFETY: the host's error slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn adapt_gguf(
    _: *mut c_void,
    arch: Str,
    summary: Str,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the host's texts are valid for the call.
        let (arch, summary) =
            unsafe { (utf8(arch, "architecture")?, utf8(summary, "GGUF summary")?) };
        let summary: GgufSummary = serde_json::from_str(summary)
            .map_err(|e| AbiError::invalid(format!("GGUF summary: {e}")))?;
        let adapter = find(arch)?
            .implementation
            .adapt_gguf(&summary)?
            .with_names()?;
        let json = serde_json::to_value(adapter).map_err(|e| AbiError::internal(e.to_string()))?;
        // SAFETY: the host's out pointer.
        unsafe { put(out, give(&json)) }
    };
    // SAFETY: the host's error slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn load(
    _: *mut c_void,
    args: *const LoadArgs,
    out: *mut *mut c_void,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the host's arguments are live for the call.
        let args = unsafe { LoadArgs::read(args) }?;
        if args.ops.is_null() || args.weights.is_null() {
            return Err(AbiError::invalid(
                "load needs an operation table and weights",
            ));
        }
        if !matches!(args.compute_dtype, DType::F16 | DType::BF16 | DType::F32) {
            return Err(AbiError::invalid(format!(
                "compute dtype {} is not f16, bf16 or f32",
                args.compute_dtype.name()
            )));
        }
        // SAFETY: as above.
        let (arch, config) = unsafe {
            (
                utf8(args.arch, "architecture")?,
                utf8(args.config, "config")?,
            )
        };
        let value = parse(config, "config")?;
        let entry = find(arch)?;
        // SAFETY: LoadArgs promises that the operations outlive the model, that the weights live
        // during this call, and that this is the backend thread.
        let (backend, weights) = unsafe {
            let backend = Backend::from_raw(args.ops);
            let weights = Weights::from_raw(
                args.weights,
                &backend,
                args.compute_dtype,
                args.context_length as usize,
            )?;
            (backend, weights)
        };
        // SAFETY: LoadArgs promises that the host's services outlive the model.
        if let Some(ranks) = unsafe { Ranks::from_host(args.host, &backend) }? {
            if !entry.tensor_parallel {
                return Err(Error::Unsupported {
                    what: format!("splitting {arch} over {} ranks", ranks.size()),
                    supported: "this architecture runs whole only".to_owned(),
                }
                .into());
            }
            weights.split_over(ranks);
        }
        let model = entry
            .implementation
            .load(&Config::root(&value)?, &weights)
            .map_err(|error| own_names(&value, error))?;
        weights.finish().map_err(|error| own_names(&value, error))?;
        let loaded = Box::into_raw(Box::new(Loaded { model, backend }));
        // SAFETY: the host's out pointer.
        unsafe { put(out, loaded.cast()) }.inspect_err(|_| {
            // SAFETY: made two lines above and given to nobody.
            drop(unsafe { Box::from_raw(loaded) });
        })
    };
    // SAFETY: the host's error slot.
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
        if model.is_null() || out.is_null() {
            return Err(AbiError::invalid("forward needs a model and an output"));
        }
        // SAFETY: `model` comes from `load` and has not been unloaded.
        let loaded = unsafe { &*model.cast::<Loaded>() };
        // SAFETY: the host's step is live for the call.
        let step = unsafe { Step::from_raw(step, &loaded.backend) }?;
        let logits = loaded.model.forward(&step)?;
        // SAFETY: `out` is writable and starts with its own size; only fields that the host's
        // build has are written.
        unsafe {
            if (*out).struct_size < size_of::<usize>() + size_of::<mlxcel_abi::Tensor>() {
                return Err(AbiError::invalid("the step output is too small for logits"));
            }
            (*out).logits = logits.into_handle()?;
        }
        Ok(())
    };
    // SAFETY: the host's error slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn encode(
    _: *mut c_void,
    model: *mut c_void,
    args: *const EncodeArgs,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        if model.is_null() {
            return Err(AbiError::invalid("encode needs a model"));
        }
        // SAFETY: `model` comes from `load` and has not been unloaded.
        let loaded = unsafe { &*model.cast::<Loaded>() };
        // SAFETY: the host's arguments are live for the call.
        let encode = unsafe { Encode::from_raw(args, &loaded.backend) }?;
        Ok(loaded.model.encode(&encode)?)
    };
    // SAFETY: the host's error slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn unload(_: *mut c_void, model: *mut c_void, err: *mut *mut ErrorObj) -> Status {
    let body = || {
        if !model.is_null() {
            // SAFETY: comes from `load`, and the host unloads once.
            drop(unsafe { Box::from_raw(model.cast::<Loaded>()) });
        }
        Ok(())
    };
    // SAFETY: the host's error slot.
    unsafe { guard(err, body) }
}

struct Shared(FamilyTable);

// SAFETY: the table holds function pointers and a null context; it is never written.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// The table of this plugin, for the export macro and for tests in process.
pub fn family_table() -> *const FamilyTable {
    static TABLE: OnceLock<Shared> = OnceLock::new();
    let shared = TABLE.get_or_init(|| {
        Shared(FamilyTable {
            probe,
            describe,
            adapt_gguf,
            load,
            forward,
            unload,
            encode,
            ..FamilyTable::stubs()
        })
    });
    &raw const shared.0
}

/// All records, as embedded in the file.
pub fn records(plugin: &'static str) -> &'static str {
    static RECORDS: OnceLock<String> = OnceLock::new();
    RECORDS.get_or_init(|| {
        let mut text = plugin.to_owned();
        ARCHITECTURES
            .iter()
            .for_each(|entry| text.push_str(entry.record));
        text
    })
}

/// Exports the family plugin. Once per crate, in `lib.rs`.
///
/// ```ignore
/// mlxcel_sdk::export_family! { name: "llama", vendor: "mlxcel" }
/// ```
#[macro_export]
macro_rules! export_family {
    (name: $name:literal, vendor: $vendor:literal $(,)?) => {
        $crate::abi::embed_plugin_record! {
            pub(crate) const PLUGIN_RECORD = {
                kind: "family",
                name: $name,
                version: env!("CARGO_PKG_VERSION"),
                vendor: $vendor,
                needs_minor: 0,
                extra: "",
            }
        }

        /// The family's table, for tests in process.
        pub fn family_table() -> *const $crate::abi::family::FamilyTable {
            $crate::plugin::family_table()
        }

        $crate::abi::export_plugin_root! {
            metadata: || $crate::plugin::records(PLUGIN_RECORD),
            open: |_hello: &$crate::abi::envelope::HostHello| {
                Ok($crate::abi::envelope::PluginHello {
                    abi_minor: $crate::abi::version::ABI_MINOR,
                    needs_minor: 0,
                    kind: $crate::abi::kinds::plugin::FAMILY,
                    table: family_table().cast(),
                    reserved: [0; 8],
                })
            },
            query: |_name: &str| 0usize,
        }
    };
}
