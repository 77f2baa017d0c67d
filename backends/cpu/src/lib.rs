//! The CPU backend plugin: MLX's CPU device behind the operation table.
//!
//! Owns the probe of the processor and the plugin's entry; everything else is `mlxcel-backend-mlx`.

mod native;
mod processor;

use mlxcel_abi::backend::BackendTable;
use mlxcel_abi::envelope::{HostHello, PluginHello};
use mlxcel_abi::kinds::plugin;
use mlxcel_abi::version::ABI_MINOR;
use mlxcel_abi::{Result, embed_plugin_record, export_plugin_root};
use mlxcel_backend_mlx::collectives::{self, Transport};
use mlxcel_backend_mlx::serde_json::{Map, Value};
use mlxcel_backend_mlx::{Backend, Description, DeviceKind, DeviceReport, Probe};

/// Oldest host minor that this plugin works with.
const NEEDS_MINOR: u32 = 0;

/// More than any processor has.
const MOST_THREADS: u32 = 1024;

/// Lower than any GPU's: the processor is what is left when there is none.
const SCORE: u32 = 10;

embed_plugin_record! {
    pub const RECORD = {
        kind: "backend",
        name: "cpu",
        version: env!("CARGO_PKG_VERSION"),
        vendor: "mlxcel",
        needs_minor: NEEDS_MINOR,
        extra: r#","mlx_version":"0.32.4","providers":[{"name":"this plugin's package","libraries":["libmlx.so","@rpath/libmlx.dylib"],"get":"copy the whole folder, with mlx beside the plugin's file"}]"#,
    }
}

static BACKEND: Backend = Backend::new(Description {
    name: "cpu",
    device: DeviceKind::Cpu,
    most_threads: MOST_THREADS,
    rounds_activations: true,
    keeps_rows_apart: true,
    probe,
    kernels: Some(native::KERNELS),
});

/// The plugin's entry table, for use in the same process: tests, and builds without plugin files.
pub fn backend_table() -> *const BackendTable {
    BACKEND.table()
}

fn probe() -> Result<Probe> {
    let (total_bytes, free_bytes) = mlxcel_backend_mlx::host_memory();
    let cores = processor::cores();
    let features = processor::features();
    let description = processor::name()?;
    let mut details = Map::new();
    details.insert(
        "mlx_version".to_owned(),
        Value::from(mlxcel_backend_mlx::mlx_version()),
    );
    details.insert("physical_cores".to_owned(), Value::from(cores.physical));
    details.insert("logical_cores".to_owned(), Value::from(cores.logical));
    details.insert("compute_threads".to_owned(), Value::from(cores.physical));
    details.insert(
        "kernels".to_owned(),
        Value::from(mlxcel_cpu_kernels::Isa::best().name()),
    );
    // Kernels compute in f32; half types are widened before and rounded after them.
    details.insert("preferred_dtype".to_owned(), Value::from("f32"));
    details.insert(
        "preferred_precision".to_owned(),
        Value::from(native::preferred_precision()),
    );
    // Attention converts what it reads of the caches on its way to the products.
    details.insert(
        "kv_dtypes".to_owned(),
        Value::from(vec!["f32", "f16", "bf16", "q8_0", "q4_0"]),
    );
    // Half the bytes that attention reads, and rounding that no perplexity shows (docs/OPERATIONS.md).
    details.insert("preferred_kv_dtype".to_owned(), Value::from("f16"));
    details.insert("centred_forms".to_owned(), native::centred_forms());
    details.insert("isa".to_owned(), Value::from(features));
    Ok(Probe {
        score: SCORE,
        reason: "MLX's CPU device runs on every processor".to_owned(),
        devices: vec![DeviceReport {
            name: "cpu".to_owned(),
            description,
            total_bytes,
            free_bytes,
        }],
        details,
    })
}

fn hello(_host: &HostHello) -> Result<PluginHello> {
    Ok(PluginHello {
        abi_minor: ABI_MINOR,
        needs_minor: NEEDS_MINOR,
        kind: plugin::BACKEND,
        table: backend_table().cast(),
        reserved: [0; 8],
    })
}

export_plugin_root! {
    metadata: || RECORD,
    open: hello,
    query: |name: &str| collectives::query(name, Transport::Ring),
}
