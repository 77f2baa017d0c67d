//! A family of one architecture, `mock`: a table of next-token logits by token, with nothing to learn from.
//!
//! It is real enough to be loaded, probed, described, built from weights and stepped on any backend that has
//! `take`; with `"attend": true` in its configuration it also calls the host's caches once a step. It depends on the
//! ABI alone, so that its archived builds test the ABI and not the SDK.
//!
//! For tests of what stands above it, a configuration may script its steps: `"delay_us"` slows each, and `"fail_at"`,
//! `"panic_at"` and `"hang_at"` name the one that goes wrong, counted from 0; with `"fail_until"` all before that one fail too.

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use mlxcel_abi::envelope::{HostHello, PluginHello};
use mlxcel_abi::family::{AttendArgs, FamilyTable, KvApi, LoadArgs, StepArgs, StepOutput};
use mlxcel_abi::guard::guard;
use mlxcel_abi::host::WeightsApi;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{
    AbiError, ErrorObj, OwnedBytes, Result, Status, Str, Table, Tensor, TensorInfo, kinds, status,
    version,
};

mlxcel_abi::embed_plugin_record! {
    const PLUGIN = { kind: "family", name: "mock", version: env!("CARGO_PKG_VERSION"), vendor: "mlxcel", needs_minor: 0, extra: "" }
}

mlxcel_abi::embed_record! {
    const ARCH = &[
        "{\"arch\":{\"id\":\"mock\",\"display_name\":\"Mock\",\"category\":\"dense\",",
        "\"task\":\"text-generation\",\"model_types\":[\"mock\"],\"gguf\":[\"mock\"],\"aliases\":[],",
        "\"runtimes\":[\"generate\"],\"modalities_in\":[\"text\"],\"output\":\"tokens\",",
        "\"backends\":{\"mock\":\"supported\"},\"tensor_parallel\":false,\"pipeline_parallel\":false,",
        "\"drafters\":[],\"kv_modes\":[\"fp16\"]}}\n",
    ]
}

/// Name of the one weight, `[V, V]`.
const TABLE: &str = "table";

fn records() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| format!("{PLUGIN}{ARCH}"))
}

fn greet(_host: &HostHello) -> Result<PluginHello> {
    Ok(PluginHello {
        abi_minor: version::ABI_MINOR,
        needs_minor: 0,
        kind: kinds::plugin::FAMILY,
        table: table().cast(),
        reserved: [0; 8],
    })
}

mlxcel_abi::export_plugin_root! { metadata: records, open: greet, query: |_name: &str| 0usize }

struct Fixed(FamilyTable);
// SAFETY: function pointers and a null context; never written.
unsafe impl Send for Fixed {}
// SAFETY: as above.
unsafe impl Sync for Fixed {}

fn table() -> *const FamilyTable {
    static TABLE: OnceLock<Fixed> = OnceLock::new();
    let fixed = TABLE.get_or_init(|| {
        Fixed(FamilyTable {
            probe,
            describe,
            load,
            forward,
            unload,
            ..FamilyTable::stubs()
        })
    });
    &raw const fixed.0
}

/// # Safety
/// `text` must be valid for the call.
unsafe fn utf8<'a>(text: Str) -> Result<&'a str> {
    // SAFETY: forwarded to the caller.
    unsafe { text.as_str() }.map_err(|_| AbiError::invalid("a text is not UTF-8"))
}

/// Whether a configuration has this key and value. Enough for configurations that tests write.
fn has(config: &str, key: &str, value: &str) -> bool {
    let dense: String = config.split_whitespace().collect();
    dense.contains(&format!("\"{key}\":{value}"))
}

/// A number of a configuration.
fn number(config: &str, key: &str) -> Option<i64> {
    let dense: String = config.split_whitespace().collect();
    let (_, rest) = dense.split_once(&format!("\"{key}\":"))?;
    let end = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    rest.get(..end)?.parse().ok()
}

unsafe extern "C" fn probe(
    _: *mut c_void,
    config: Str,
    out: *mut OwnedBytes,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the host's text is valid for the call.
        let config = unsafe { utf8(config) }?;
        let answer = if !has(config, "model_type", "\"mock\"") {
            "[]"
        } else if has(config, "variant", "\"odd\"") {
            r#"[{"arch":"mock","score":0,"why":"variant odd is not implemented"}]"#
        } else {
            r#"[{"arch":"mock","score":100,"why":"model_type mock"}]"#
        };
        // SAFETY: `out` is the host's to write to.
        unsafe { out.write(OwnedBytes::from_vec(answer.as_bytes().to_vec())) };
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
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
        let (arch, config) = unsafe { (utf8(arch)?, utf8(config)?) };
        if arch != "mock" {
            return Err(AbiError::new(
                status::NOT_FOUND,
                format!("no architecture {arch}"),
            ));
        }
        let vocab = number(config, "vocab_size")
            .ok_or_else(|| AbiError::invalid("vocab_size: expected an integer, found none"))?;
        let layers = match has(config, "attend", "true") {
            true => format!(r#"[{{"kind":"dense","kv_heads":1,"k_dim":{vocab},"v_dim":{vocab}}}]"#),
            false => r#"[{"kind":"none"}]"#.to_owned(),
        };
        let text = format!(
            r#"{{"arch":"mock","task":"text-generation","vocab_size":{vocab},"hidden_size":{vocab},"context_length":4096,"layers":{layers},"activation_width":{vocab}}}"#
        );
        // SAFETY: `out` is the host's to write to.
        unsafe { out.write(OwnedBytes::from_vec(text.into_bytes())) };
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
    unsafe { guard(err, body) }
}

struct Model {
    ops: BackendOps,
    table: Tensor,
    vocab: i64,
    attends: bool,
    script: Script,
}

/// What a configuration says of the steps.
#[derive(Default)]
struct Script {
    steps: AtomicI64,
    delay_us: Option<i64>,
    fail_at: Option<i64>,
    fail_until: Option<i64>,
    panic_at: Option<i64>,
    hang_at: Option<i64>,
}

impl Script {
    fn of(config: &str) -> Self {
        Self {
            steps: AtomicI64::new(0),
            delay_us: number(config, "delay_us"),
            fail_at: number(config, "fail_at"),
            fail_until: number(config, "fail_until"),
            panic_at: number(config, "panic_at"),
            hang_at: number(config, "hang_at"),
        }
    }

    fn step(&self) -> Result<()> {
        let step = self.steps.fetch_add(1, Ordering::Relaxed);
        if let Some(delay_us) = self.delay_us {
            std::thread::sleep(Duration::from_micros(delay_us.unsigned_abs()));
        }
        assert!(self.panic_at != Some(step), "a step panics as told");
        while self.hang_at == Some(step) {
            std::thread::park();
        }
        let first = self.fail_at.unwrap_or(i64::MAX);
        let last = self.fail_until.map_or(first, |until| until - 1);
        match (first..=last).contains(&step) {
            true => Err(AbiError::new(status::INTERNAL, "a step fails as told")),
            false => Ok(()),
        }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: the operations outlive the model.
        unsafe { (self.ops.release)(self.ops.ctx, self.table, std::ptr::null_mut()) };
    }
}

/// Runs one call with an error slot.
fn check(body: impl FnOnce(*mut *mut ErrorObj) -> Status) -> Result<()> {
    let mut error = std::ptr::null_mut();
    let code = body(&raw mut error);
    // SAFETY: the slot holds null or what the other side wrote.
    unsafe { AbiError::check(code, error) }
}

unsafe extern "C" fn load(
    _: *mut c_void,
    args: *const LoadArgs,
    out: *mut *mut c_void,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the host's struct, tables and texts live for the call.
        let (args, ops, weights, config) = unsafe {
            let args = LoadArgs::read(args)?;
            let config = utf8(args.config)?;
            (
                args,
                BackendOps::import(args.ops),
                WeightsApi::import(args.weights),
                config,
            )
        };
        let vocab = number(config, "vocab_size").unwrap_or_default();
        let mut info = TensorInfo::ZERO;
        let name = Str::new(TABLE);
        // SAFETY: the host's table, during `load`.
        check(|err| unsafe { (weights.info)(weights.ctx, name, &raw mut info, err) })?;
        if info.shape() != [vocab, vocab] {
            let found = info.shape();
            return Err(AbiError::invalid(format!(
                "weight {TABLE}: expected shape [{vocab}, {vocab}], found {found:?}"
            )));
        }
        let mut stored = Tensor::NONE;
        // SAFETY: as above.
        check(|err| unsafe { (weights.load)(weights.ctx, name, &raw mut stored, err) })?;
        let mut table = Tensor::NONE;
        // SAFETY: the backend's table, on its thread.
        let cast = check(|err| unsafe {
            (ops.cast)(ops.ctx, stored, args.compute_dtype, &raw mut table, err)
        });
        // SAFETY: our reference, given back once.
        unsafe { (ops.release)(ops.ctx, stored, std::ptr::null_mut()) };
        cast?;
        let model = Model {
            ops,
            table,
            vocab,
            attends: has(config, "attend", "true"),
            script: Script::of(config),
        };
        // SAFETY: `out` is the host's to write to.
        unsafe { out.write(Box::into_raw(Box::new(model)).cast()) };
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
    unsafe { guard(err, body) }
}

impl Model {
    /// Runs an operation on `held` and releases `held`.
    fn step(
        &self,
        held: Tensor,
        op: impl FnOnce(&BackendOps, Tensor, *mut Tensor, *mut *mut ErrorObj) -> Status,
    ) -> Result<Tensor> {
        let mut out = Tensor::NONE;
        let done = check(|err| op(&self.ops, held, &raw mut out, err));
        // SAFETY: our reference, given back once.
        unsafe { (self.ops.release)(self.ops.ctx, held, std::ptr::null_mut()) };
        done.map(|()| out)
    }

    fn reshaped(&self, held: Tensor, dims: &[i64]) -> Result<Tensor> {
        self.step(held, |ops, held, out, err| {
            // SAFETY: the backend's table, on its thread; `dims` outlives the call.
            unsafe { (ops.reshape)(ops.ctx, held, dims.as_ptr(), dims.len() as u32, out, err) }
        })
    }

    fn forward(&self, step: &StepArgs, kv: &KvApi) -> Result<Tensor> {
        let mut rows = Tensor::NONE;
        // SAFETY: the backend's table, on its thread.
        check(|err| unsafe {
            (self.ops.take)(self.ops.ctx, self.table, step.tokens, 0, &raw mut rows, err)
        })?;
        if self.attends {
            rows = self.reshaped(rows, &[i64::from(step.n_rows), 1, self.vocab])?;
            rows = self.step(rows, |_, held, out, err| {
                let args = AttendArgs {
                    q: held,
                    k: held,
                    v: held,
                    ..AttendArgs::default()
                };
                // SAFETY: the host's table, during the step.
                unsafe { (kv.attend)(kv.ctx, 0, &raw const args, out, err) }
            })?;
            rows = self.reshaped(rows, &[i64::from(step.n_rows), self.vocab])?;
        }
        self.step(rows, |ops, held, out, err| {
            // SAFETY: the backend's table, on its thread.
            unsafe { (ops.take)(ops.ctx, held, step.logit_rows, 0, out, err) }
        })
    }
}

unsafe extern "C" fn forward(
    _: *mut c_void,
    model: *mut c_void,
    step: *const StepArgs,
    out: *mut StepOutput,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = || {
        // SAFETY: the model came from `load`; the host's structs live for the call.
        let (model, step, kv) = unsafe {
            let step = StepArgs::read(step)?;
            (&*model.cast::<Model>(), step, KvApi::import(step.kv))
        };
        model.script.step()?;
        let logits = model.forward(&step, &kv)?;
        // SAFETY: `out` is the host's to write to.
        unsafe { (*out).logits = logits };
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
    unsafe { guard(err, body) }
}

unsafe extern "C" fn unload(_: *mut c_void, model: *mut c_void, err: *mut *mut ErrorObj) -> Status {
    let body = || {
        // SAFETY: the model came from `load` and is given back once.
        drop(unsafe { Box::from_raw(model.cast::<Model>()) });
        Ok(())
    };
    // SAFETY: `err` is the host's slot.
    unsafe { guard(err, body) }
}
