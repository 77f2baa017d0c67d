//! The Metal backend plugin: MLX on Apple's GPUs behind the operation table.
//!
//! Owns the probe; everything else is `mlxcel-backend-mlx`. MLX finds its kernels (`mlx.metallib`) beside its own library, which
//! is in this plugin's package, so neither the working directory nor links on the way matter. Everywhere but on macOS the probe
//! refuses, so that the crate is compiled and tested on every machine.

mod probe;

use mlxcel_abi::backend::BackendTable;
use mlxcel_abi::envelope::{HostHello, PluginHello};
use mlxcel_abi::kinds::plugin;
use mlxcel_abi::version::ABI_MINOR;
use mlxcel_abi::{Result, embed_plugin_record, export_plugin_root};
use mlxcel_backend_mlx::{Backend, Description, DeviceKind};

/// Oldest host minor that this plugin works with.
const NEEDS_MINOR: u32 = 0;

embed_plugin_record! {
    pub const RECORD = {
        kind: "backend",
        name: "metal",
        version: env!("CARGO_PKG_VERSION"),
        vendor: "mlxcel",
        needs_minor: NEEDS_MINOR,
        extra: r#","mlx_version":"0.32.4","providers":[{"name":"this plugin's package","libraries":["libmlx.so","@rpath/libmlx.dylib"],"get":"copy the whole folder, with mlx beside the plugin's file"}]"#,
    }
}

static BACKEND: Backend = Backend::new(Description {
    name: "metal",
    device: DeviceKind::Gpu,
    // Operations run on the device; threads of the host are none of this backend's affair.
    most_threads: 0,
    rounds_activations: false,
    keeps_rows_apart: false,
    probe: probe::probe,
    kernels: None,
});

/// The plugin's entry table, for use in the same process: tests, and builds without plugin files.
pub fn backend_table() -> *const BackendTable {
    BACKEND.table()
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
    query: |_: &str| 0_usize,
}
