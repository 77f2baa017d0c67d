//! The loading of a model, or of one rank's part of it, on the thread that owns the backend from then on.

use serde_json::Value;

use crate::plugin::{DType, Model, ModelRequest, OpenOptions, RankGroup, SelectedBackend};

use super::detect::OpenedModel;
use super::error::EngineError;
use super::forms::checkpoint_for;
use super::kv_types::KvType;
use super::load::Precision;
use super::weight_source::CheckpointWeights;

/// What the options came to, as far as it decides how a model is loaded: the same on all ranks.
pub struct Settled {
    /// Float type of activations.
    pub dtype: DType,
    /// Type of keys and values.
    pub kv_type: KvType,
    /// How products are computed; none lets the backend decide.
    pub precision: Option<Precision>,
    /// Whether a row's result may depend on nothing but the row.
    pub deterministic: bool,
    /// Compute threads; 0 lets the backend decide.
    pub threads: usize,
    /// Longest sequence, in tokens.
    pub context_tokens: usize,
    /// The device's name; empty for the first.
    pub device: String,
}

/// Which part of a model that is split is loaded.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// Number of this process.
    pub rank: usize,
    /// An address for every rank.
    pub addresses: &'a [String],
}

/// Opens the backend and loads the model on it, or one rank's part. Also gives the bytes of the whole model's weights.
pub fn load_part(
    opened: &OpenedModel,
    selected: &SelectedBackend,
    settled: &Settled,
    part: Option<Part<'_>>,
    progress: &dyn Fn(usize, usize),
) -> Result<(Model, u64), EngineError> {
    let mut open = OpenOptions {
        device: settled.device.clone(),
        ..OpenOptions::default()
    };
    if settled.threads > 0 {
        open.options
            .insert("threads".to_owned(), Value::from(settled.threads));
    }
    if let Some(precision) = settled.precision {
        open.options
            .insert("precision".to_owned(), Value::from(precision.name()));
    }
    if settled.deterministic {
        open.options
            .insert("deterministic".to_owned(), Value::from(true));
    }
    let backend = selected.plugin.open(&open)?;
    let (needs_minor, minor) = (opened.desc.needs_backend_minor(), backend.minor());
    if minor < needs_minor {
        return Err(EngineError::BackendTooOld {
            arch: opened.desc.arch.clone(),
            backend: selected.plugin.name().to_owned(),
            needs_minor,
            minor,
        });
    }
    let group = part.map(|part| RankGroup::join(&backend, part.rank, part.addresses));
    let group = group.transpose()?;
    let config = opened.checkpoint.config().to_string();
    let request = ModelRequest {
        arch: &opened.decision.arch,
        config: &config,
        compute_dtype: settled.dtype,
        context_length: settled.context_tokens as u32,
    };
    let packed = checkpoint_for(opened, selected, settled.dtype)?;
    let checkpoint = packed.as_ref().unwrap_or(&opened.checkpoint);
    let weights = CheckpointWeights::new(checkpoint, &backend, settled.dtype, progress);
    let lent = group.as_ref().map(RankGroup::lend);
    let model = opened.family.load(&backend, request, &weights);
    drop(lent);
    Ok((model?, checkpoint.weights_bytes()))
}
