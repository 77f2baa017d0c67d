//! A loaded family plugin: its pure functions, and the building of a model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mlxcel_abi::family::{FamilyTable, LoadArgs};
use mlxcel_abi::{AbiError, DType, Str};
use mlxcel_registry::arch::ProbeScore;
use serde::Deserialize;
use serde_json::Value;

use super::call::{call, call_json};
use super::device::Backend;
use super::error::CallError;
use super::host_api::host_api;
use super::model::Model;
use super::weights::{WeightSource, with_weights};

pub(super) struct FamilyShared {
    pub name: String,
    pub version: String,
    pub path: PathBuf,
    pub table: FamilyTable,
}

// SAFETY: the table holds function pointers and the plugin's `ctx`, which is never written here. The ABI
// allows `probe`, `describe` and `adapt_gguf` on any thread; `load`, `forward` and `unload` are reached only
// with a `Backend` or a `Model`, which cannot leave the backend thread.
unsafe impl Send for FamilyShared {}
// SAFETY: as above.
unsafe impl Sync for FamilyShared {}

/// A loaded family. Cheap to clone; lives as long as the process.
#[derive(Clone)]
pub struct Family(Arc<FamilyShared>);

/// What a model is built from, apart from its weights.
#[derive(Debug, Clone, Copy)]
pub struct ModelRequest<'a> {
    /// Architecture, as the probe named it.
    pub arch: &'a str,
    /// The checkpoint's configuration, a JSON object.
    pub config: &'a str,
    /// Float type of activations and of unquantised parameters.
    pub compute_dtype: DType,
    /// Longest sequence that will be run, in tokens; 0 is the model's own limit.
    pub context_length: u32,
}

#[derive(Deserialize)]
struct ProbeEntry {
    arch: String,
    score: u32,
    #[serde(default)]
    why: String,
}

impl Family {
    pub(super) fn new(shared: FamilyShared) -> Self {
        Self(Arc::new(shared))
    }

    /// The plugin's name.
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

    fn subject(&self, function: &str) -> String {
        format!("family {}: {function}", self.0.name)
    }

    /// Which of the family's architectures fit `config`, a JSON object.
    pub fn probe(&self, config: &str) -> Result<Vec<ProbeScore>, CallError> {
        let table = &self.0.table;
        let entries: Vec<ProbeEntry> = call_json(
            || self.subject("probe"),
            // SAFETY: the table's contract; the text outlives the call.
            |out, err| unsafe { (table.probe)(table.ctx, Str::new(config), out, err) },
        )?;
        let scores = entries.into_iter().map(|entry| ProbeScore {
            plugin: self.0.name.clone(),
            arch: entry.arch,
            score: entry.score,
            why: entry.why,
        });
        Ok(scores.collect())
    }

    /// What the host must know of a model with this configuration; also validates it.
    pub fn describe(&self, arch: &str, config: &str) -> Result<Value, CallError> {
        let table = &self.0.table;
        call_json(
            || self.subject("describe"),
            // SAFETY: the table's contract; the texts outlive the call.
            |out, err| unsafe {
                (table.describe)(table.ctx, Str::new(arch), Str::new(config), out, err)
            },
        )
    }

    /// How a GGUF file with this summary maps to the architecture.
    pub fn adapt_gguf(&self, arch: &str, summary: &str) -> Result<Value, CallError> {
        let table = &self.0.table;
        call_json(
            || self.subject("adapt_gguf"),
            // SAFETY: the table's contract; the texts outlive the call.
            |out, err| unsafe {
                (table.adapt_gguf)(table.ctx, Str::new(arch), Str::new(summary), out, err)
            },
        )
    }

    /// Builds a model on `backend` from the tensors of `weights`.
    pub fn load(
        &self,
        backend: &Backend,
        request: ModelRequest<'_>,
        weights: &dyn WeightSource,
    ) -> Result<Model, CallError> {
        let table = &self.0.table;
        let mut raw = std::ptr::null_mut();
        with_weights(weights, |api| {
            let args = LoadArgs {
                arch: Str::new(request.arch),
                config: Str::new(request.config),
                // The backend's own table and not our import of it: a family newer than this host
                // may know slots that this host does not.
                ops: backend.raw_ops(),
                weights: api,
                host: host_api(),
                compute_dtype: request.compute_dtype,
                context_length: request.context_length,
                ..LoadArgs::default()
            };
            // SAFETY: on the backend thread, since `Backend` is not `Send`. All that `args` points to
            // outlives the call, and the operations outlive the model, which holds the backend.
            let body = |err| unsafe { (table.load)(table.ctx, &raw const args, &raw mut raw, err) };
            call(|| self.subject("load"), body)
        })?;
        if raw.is_null() {
            let error = AbiError::internal("success was reported but no model was given");
            return Err(CallError::new(self.subject("load"), error));
        }
        Ok(Model::new(self.clone(), backend.clone(), raw))
    }

    pub(super) fn table(&self) -> &FamilyTable {
        &self.0.table
    }
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Family")
            .field("name", &self.0.name)
            .field("path", &self.0.path)
            .finish_non_exhaustive()
    }
}
