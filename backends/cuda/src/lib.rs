//! The CUDA backend plugin: MLX on NVIDIA devices behind the operation table, with kernels of its own for what is hot.
//!
//! Owns the probe, the kernels' text and how they are compiled and submitted; everything else is `mlxcel-backend-mlx`. Neither a
//! device nor a toolkit is needed to build it: the driver and the run-time compiler are opened when they are asked for, and which
//! build of MLX it runs on is decided by the library in its package.

mod blas;
mod collectives;
mod compiler;
mod driver;
mod kernels;
mod library;
mod marks;
mod memory;
mod native;
mod probe;
mod programs;
mod providers;
mod queue;

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
        name: "cuda",
        version: env!("CARGO_PKG_VERSION"),
        vendor: "mlxcel",
        needs_minor: NEEDS_MINOR,
        extra: providers::EXTRA,
    }
}

static BACKEND: Backend = Backend::new(Description {
    name: "cuda",
    device: DeviceKind::Gpu,
    // Operations run on the device; threads of the host are none of this backend's affair.
    most_threads: 0,
    rounds_activations: false,
    keeps_rows_apart: true,
    probe: probe::probe,
    kernels: Some(native::KERNELS),
});

/// The plugin's entry table, for use in the same process: tests, and builds without plugin files.
pub fn backend_table() -> *const BackendTable {
    BACKEND.table()
}

/// Address of an extension table, 0 where there is none of that name: as [`backend_table`].
pub fn extension(name: &str) -> usize {
    collectives::query(name)
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
    query: extension,
}
