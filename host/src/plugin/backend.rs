//! A loaded backend plugin: what it found on this machine, and the opening of a device.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use abi_stable::std_types::RStr;
use mlxcel_abi::backend::{BackendTable, OpenArgs};
use mlxcel_abi::collectives::COLLECTIVES;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, Str};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::call::{call, call_json};
use super::device::Backend;
use super::envelope::{Query, import_table};
use super::error::CallError;
use super::host_api::host_api;

pub(super) struct BackendShared {
    pub name: String,
    pub version: String,
    pub path: PathBuf,
    pub table: BackendTable,
    pub query: Query,
}

// SAFETY: the table holds function pointers and the plugin's `ctx`, which is never written here. `probe` may
// run on any thread; `open` makes its caller's thread the backend thread, and what it gives stays there
// because `Backend` is not `Send`; `close` runs where the last owner of a `Backend` is dropped.
unsafe impl Send for BackendShared {}
// SAFETY: as above.
unsafe impl Sync for BackendShared {}

/// A loaded backend plugin. Cheap to clone; lives as long as the process.
#[derive(Clone)]
pub struct BackendPlugin(Arc<BackendShared>);

/// One device of a probe's answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Name to open it by.
    pub name: String,
    /// Text for people.
    #[serde(default)]
    pub description: String,
    /// Memory of the device; 0 when unknown.
    #[serde(default)]
    pub total_bytes: u64,
    /// Free memory at the time of the probe; 0 when unknown.
    #[serde(default)]
    pub free_bytes: u64,
}

/// What a backend says of this machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProbeReport {
    /// 0: cannot run here. The highest wins under `auto`.
    pub score: u32,
    /// Why, for people.
    #[serde(default)]
    pub reason: String,
    /// Devices that can be opened.
    #[serde(default)]
    pub devices: Vec<DeviceReport>,
    /// Whatever else it tells.
    #[serde(default)]
    pub details: Map<String, Value>,
}

/// How a device is opened.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Name from the probe; empty for the first device.
    pub device: String,
    /// `threads`, `memory_limit_bytes`, `cache_limit_bytes` and the backend's own. Unknown keys are
    /// refused by the backend.
    pub options: Map<String, Value>,
}

impl BackendPlugin {
    pub(super) fn new(shared: BackendShared) -> Self {
        Self(Arc::new(shared))
    }

    /// The plugin's name, as given to `--backend`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The plugin's own version.
    pub fn version(&self) -> &str {
        &self.0.version
    }

    /// The plugin's file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Whether it has operations over ranks (`mlxcel.ext.collectives/1`).
    pub fn has_collectives(&self) -> bool {
        self.extension(COLLECTIVES) != 0
    }

    /// Address of an extension table, 0 where the plugin has none of that name.
    pub(super) fn extension(&self, name: &str) -> usize {
        (self.0.query)(RStr::from_str(name))
    }

    fn subject(&self, function: &str) -> String {
        format!("backend {}: {function}", self.0.name)
    }

    /// Asks what the backend finds on this machine.
    pub fn probe(&self) -> Result<ProbeReport, CallError> {
        let table = &self.0.table;
        call_json(
            || self.subject("probe"),
            // SAFETY: the table's contract.
            |out, err| unsafe { (table.probe)(table.ctx, out, err) },
        )
    }

    /// Opens a device. The calling thread becomes its backend thread.
    pub fn open(&self, options: &OpenOptions) -> Result<Backend, CallError> {
        let table = &self.0.table;
        let json = Value::Object(options.options.clone()).to_string();
        let args = OpenArgs {
            device: Str::new(&options.device),
            options: Str::new(&json),
            host: host_api(),
            ..OpenArgs::default()
        };
        let mut raw: *const BackendOps = std::ptr::null();
        // SAFETY: the table's contract; all that `args` points to outlives the call.
        let body = |err| unsafe { (table.open)(table.ctx, &raw const args, &raw mut raw, err) };
        call(|| self.subject("open"), body)?;
        let wrong = |error: AbiError| CallError::new(self.subject("open"), error);
        // SAFETY: the operations live until `close`, which the `Backend` made from them calls at its end.
        let ops = unsafe { import_table(raw) }.map_err(wrong)?;
        Ok(Backend::new(self.clone(), raw, ops))
    }

    pub(super) fn close(&self, raw: *const BackendOps) {
        let table = &self.0.table;
        // SAFETY: `raw` came from this plugin's `open` and is given back once, on the same thread.
        let body = |err| unsafe { (table.close)(table.ctx, raw, err) };
        if let Err(error) = call(|| self.subject("close"), body) {
            tracing::warn!("{error}");
        }
    }
}

impl std::fmt::Debug for BackendPlugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackendPlugin")
            .field("name", &self.0.name)
            .field("path", &self.0.path)
            .finish_non_exhaustive()
    }
}
