//! From a path to an opened checkpoint with the family that will run it. Reads headers only.

use std::path::Path;

use mlxcel_abi::status;
use mlxcel_registry::arch::{ArchIndex, Decision, Query, decide};
use mlxcel_registry::checkpoint::{Adapter, Checkpoint, CheckpointError, GgufFile};
use mlxcel_registry::plugin::{Catalogue, PluginKind};
use mlxcel_registry::{quoted, shown};
use serde_json::Value;

use crate::plugin::{CallError, Family, Loader};

use super::desc::ModelDesc;
use super::error::EngineError;

/// An opened checkpoint, its family and the family's description of it.
#[derive(Debug)]
pub struct OpenedModel {
    /// Headers, configuration, and bytes on demand.
    pub checkpoint: Checkpoint,
    /// The family.
    pub family: Family,
    /// Which of its architectures, and why.
    pub decision: Decision,
    /// What the host needs to know.
    pub desc: ModelDesc,
    /// Whether the architecture says that it can be split over ranks.
    pub is_splittable: bool,
}

/// Opens a directory or a GGUF file. `pin` is the family that the caller insists on.
pub fn open_model(
    path: &Path,
    catalogue: &Catalogue,
    loader: &Loader,
    pin: Option<&str>,
) -> Result<OpenedModel, EngineError> {
    let index = ArchIndex::build(catalogue, pin);
    let (checkpoint, family, decision) = if path.is_dir() {
        open_directory(path, &index, loader)?
    } else {
        open_gguf(path, &index, loader)?
    };
    let described = family.describe(&decision.arch, &checkpoint.config().to_string());
    let description = described.map_err(|error| match checkpoint.gguf() {
        // A plugin names the file's keys where it left them in the configuration that it made.
        Some(_) => EngineError::Gguf {
            path: path.to_owned(),
            message: match checkpoint.config().get("gguf_names").is_some() {
                true => error.to_string(),
                false => format!(
                    "{error} (in config.json's names, for which the plugin read the file's metadata)"
                ),
            },
        },
        None => error.into(),
    })?;
    let desc = ModelDesc::parse(&description.to_string())?;
    let record = catalogue.find(PluginKind::Family, &decision.plugin);
    let archs = record.map_or(&[][..], |record| record.archs());
    let arch = archs.iter().find(|arch| arch.id == decision.arch);
    Ok(OpenedModel {
        is_splittable: arch.is_some_and(|arch| arch.tensor_parallel),
        checkpoint,
        family,
        decision,
        desc,
    })
}

fn open_directory(
    path: &Path,
    index: &ArchIndex<'_>,
    loader: &Loader,
) -> Result<(Checkpoint, Family, Decision), EngineError> {
    let checkpoint = Checkpoint::open_dir(path)?;
    let config = checkpoint.config();
    let query = match config.get("model_type") {
        None | Some(Value::Null) => Query::Untyped,
        Some(Value::String(model_type)) if !model_type.is_empty() => Query::ModelType(model_type),
        Some(other) => {
            let error = CheckpointError::Key {
                path: path.join("config.json"),
                key: "model_type",
                found: shown(other),
                expected: "the name of a kind of model: `mlxcel arch` lists those that are known",
            };
            return Err(error.into());
        }
    };
    let detected = loader.detect(index, query, &config.to_string())?;
    Ok((checkpoint, detected.family, detected.decision))
}

/// A proposal of one family for a GGUF file.
struct Proposal {
    family: Family,
    arch: String,
    adapter: serde_json::Value,
}

/// Why architectures do not take a file.
#[derive(Default)]
struct Refusals {
    /// Something is wrong with the file.
    wrong: Vec<String>,
    /// It is of a kind that another architecture may take.
    unsupported: Vec<String>,
}

impl Refusals {
    fn add(&mut self, arch: &str, error: &CallError) {
        let list = match error.error.code {
            status::UNIMPLEMENTED => &mut self.unsupported,
            _ => &mut self.wrong,
        };
        list.push(format!("{arch}: {}", error.error.message));
    }

    /// What is wrong, from those who would take the file if it were right, else what is not supported.
    fn text(&self) -> String {
        match self.wrong.is_empty() {
            true => self.unsupported.join("; "),
            false => self.wrong.join("; "),
        }
    }
}

fn open_gguf(
    path: &Path,
    index: &ArchIndex<'_>,
    loader: &Loader,
) -> Result<(Checkpoint, Family, Decision), EngineError> {
    let file: GgufFile = Checkpoint::open_gguf(path)?;
    let broken = |error: &dyn std::fmt::Display| EngineError::Gguf {
        path: path.to_owned(),
        message: error.to_string(),
    };
    let arch = file.architecture()?.to_owned();
    let summary = file.summary_json().map_err(|e| broken(&e))?.to_string();
    let query = Query::Gguf(&arch);
    let mut proposals = Vec::new();
    let mut scores = Vec::new();
    let mut refusals = Refusals::default();
    for candidate in index.candidates(query) {
        let family = match loader.load_family(candidate.plugin) {
            Ok(family) => family,
            Err(error) => {
                refusals.wrong.push(error.to_string());
                continue;
            }
        };
        for record in candidate
            .archs
            .iter()
            .filter(|record| query.is_claimed_by(record))
        {
            // Each architecture that claims the file says whether it can take it and as what.
            let adapter = match family.adapt_gguf(&record.id, &summary) {
                Ok(adapter) => adapter,
                Err(error) => {
                    refusals.add(&record.id, &error);
                    continue;
                }
            };
            let config = adapter
                .get("config")
                .cloned()
                .unwrap_or_default()
                .to_string();
            scores.extend(
                family
                    .probe(&config)?
                    .into_iter()
                    .filter(|score| score.arch == record.id),
            );
            proposals.push(Proposal {
                family: family.clone(),
                arch: record.id.clone(),
                adapter,
            });
        }
    }
    let refusals = refusals.text();
    if proposals.is_empty() && !refusals.is_empty() {
        return Err(EngineError::Gguf {
            path: path.to_owned(),
            message: format!(
                "no plugin can take this file of architecture {}: {refusals}",
                quoted(&arch)
            ),
        });
    }
    let decision = decide(index, query, &scores)?;
    let chosen = proposals
        .into_iter()
        .find(|p| p.arch == decision.arch && p.family.name() == decision.plugin);
    let Some(Proposal {
        family, adapter, ..
    }) = chosen
    else {
        return Err(EngineError::Internal {
            message: format!("{} was chosen and had proposed nothing", decision.arch),
        });
    };
    let adapter = Adapter::from_json(adapter.to_string().as_bytes()).map_err(|e| broken(&e))?;
    Ok((file.into_checkpoint(adapter)?, family, decision))
}

/// The error of a function of a plugin, in the engine's terms.
impl From<CallError> for EngineError {
    fn from(error: CallError) -> Self {
        Self::Call(error)
    }
}
