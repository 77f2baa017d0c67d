//! A family whose every entry can be made to fail.
//!
//! A test copies the library and writes the name of one fault into it (see `fault`); without one it is a healthy
//! family of one architecture, `faulty`, whose model answers every row with token 0.

#![expect(
    clippy::panic,
    clippy::exit,
    clippy::print_stdout,
    reason = "to do wrong is the purpose"
)]

mod entries;
mod fault;

use std::sync::OnceLock;

use mlxcel_abi::envelope::{HostHello, PluginHello};
use mlxcel_abi::{AbiError, Result, kinds, status, version};

mlxcel_abi::embed_plugin_record! {
    const PLUGIN = { kind: "family", name: "faulty", version: env!("CARGO_PKG_VERSION"), vendor: "mlxcel", needs_minor: 0, extra: "" }
}

mlxcel_abi::embed_record! {
    const ARCH = &[
        "{\"arch\":{\"id\":\"faulty\",\"display_name\":\"Faulty\",\"category\":\"dense\",",
        "\"task\":\"text-generation\",\"model_types\":[\"faulty\"],\"gguf\":[\"faulty\"],\"aliases\":[],",
        "\"runtimes\":[\"generate\"],\"modalities_in\":[\"text\"],\"output\":\"tokens\",\"backends\":{},",
        "\"tensor_parallel\":false,\"pipeline_parallel\":false,\"drafters\":[],\"kv_modes\":[\"fp16\"]}}\n",
    ]
}

/// Runs while the library is being opened, before any check of the host.
extern "C" fn constructor() {
    match fault::name() {
        // SAFETY: none; this is the crash that the test wants, an access the compiler cannot see through.
        "crash_constructor" => unsafe {
            std::ptr::without_provenance_mut::<u8>(std::hint::black_box(8)).write_volatile(1);
        },
        "abort_constructor" => std::process::abort(),
        "exit_constructor" => std::process::exit(7),
        // Longer than any test waits; the host's time limit ends it.
        "sleep_constructor" => std::thread::sleep(std::time::Duration::from_secs(3600)),
        "noisy_constructor" => print!("mlxcel-probe-answer: not an answer\nand no line break"),
        _ => {}
    }
}

#[used]
#[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
#[cfg_attr(target_os = "macos", unsafe(link_section = "__DATA,__mod_init_func"))]
static CONSTRUCTOR: extern "C" fn() = constructor;

fn records() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    match fault::name() {
        "panic_metadata" => panic!("metadata was told to panic"),
        "garbage_metadata" => "{\"plugin\":",
        _ => TEXT.get_or_init(|| format!("{PLUGIN}{ARCH}")),
    }
}

fn greet(host: &HostHello) -> Result<PluginHello> {
    let mut hello = PluginHello {
        abi_minor: version::ABI_MINOR,
        needs_minor: 0,
        kind: kinds::plugin::FAMILY,
        table: entries::table().cast(),
        reserved: [0; 8],
    };
    match fault::name() {
        "panic_open" => panic!("open was told to panic"),
        "error_open" => {
            let text = format!("no licence for {}", host.product);
            return Err(AbiError::new(status::UNAVAILABLE, text));
        }
        "hello_minor" => hello.abi_minor += 7,
        "hello_needs" => (hello.abi_minor, hello.needs_minor) = (900, 900),
        "hello_kind" => hello.kind = kinds::plugin::BACKEND,
        "null_table" => hello.table = std::ptr::null(),
        "small_table" => hello.table = entries::small_table(),
        _ => {}
    }
    Ok(hello)
}

fn extension(_name: &str) -> usize {
    match fault::name() {
        "panic_query" => panic!("query was told to panic"),
        _ => 0,
    }
}

mlxcel_abi::export_plugin_root! { metadata: records, open: greet, query: extension }
