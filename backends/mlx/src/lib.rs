//! The operation table over MLX, shared by every backend plugin.
//!
//! Owns the C++ shim, the arrays behind the handles, and the whole implementation of
//! [`mlxcel_abi::ops::BackendOps`]. A backend crate adds its name, its probe and the plugin's entry
//! ([`Backend`]). Knows nothing of models, of the host's scheduling or of how plugins are found.

mod apart;
mod args;
mod backend;
mod blocks;
mod bridge;
pub mod collectives;
mod context;
mod device;
mod entry;
mod fault;
pub mod native;
mod ops;
mod options;
mod slot;
pub mod stream;

pub use backend::{Backend, Description, KernelPrecision, KernelSettings, Kernels};
pub use device::{DeviceKind, DeviceReport, Probe, device_count, host_memory, properties};
pub use serde_json;

/// The table before any backend is opened: its slots report what is wrong with a context.
pub fn plain_table() -> mlxcel_abi::ops::BackendOps {
    ops::table()
}

/// Version of MLX whose headers the shim was compiled with.
pub fn mlx_version() -> String {
    bridge::header_version()
}

/// Nanoseconds that one `add` of two scalars takes when C++ calls MLX directly: what the table's
/// own cost is measured against. Builds graph nodes only; nothing is evaluated.
pub fn direct_add_ns(iterations: u64) -> mlxcel_abi::Result<f64> {
    bridge::direct_add_ns(iterations)
        .map_err(|error| fault::Fault::from(error).named("direct_add_ns"))
}
