//! From an opened checkpoint to a running engine.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::plugin::{DType, ModelRequest, OpenOptions, SelectedBackend};

use super::batch::BatchLimits;
use super::detect::OpenedModel;
use super::error::EngineError;
use super::runner::Runner;
use super::thread::EngineHandle;
use super::weight_source::CheckpointWeights;

/// How a model is loaded.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Float type of activations; none lets the backend and the checkpoint decide.
    pub dtype: Option<DType>,
    /// Longest sequence in tokens; 0 is the model's own limit.
    pub ctx_size: usize,
    /// Compute threads; 0 lets the backend decide.
    pub threads: usize,
    /// Bounds of the batch.
    pub limits: BatchLimits,
    /// Bytes for keys and values; none is most of what the device has left beside the weights.
    pub kv_budget_bytes: Option<u64>,
}

/// What became of the options: facts for people, logs and tests.
#[derive(Debug, Clone)]
pub struct EngineFacts {
    /// Architecture id.
    pub arch: String,
    /// Family plugin and its version.
    pub family: (String, String),
    /// Backend plugin and its version.
    pub backend: (String, String),
    /// What the backend says of the device.
    pub device: String,
    /// Float type of activations and caches.
    pub dtype: DType,
    /// Longest sequence, in tokens.
    pub context_tokens: usize,
    /// Tokens that fit into the KV pool, over all sequences.
    pub kv_tokens: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Bytes of the weights, from headers.
    pub weights_bytes: u64,
    /// From the start of loading to readiness.
    pub load: Duration,
}

/// Loads the model on a new engine thread. `progress` is called there with tensors loaded and
/// tensors in all.
pub fn start_engine(
    opened: OpenedModel,
    backend: SelectedBackend,
    options: LoadOptions,
    progress: impl Fn(usize, usize) + Send + 'static,
) -> Result<(EngineHandle, EngineFacts), EngineError> {
    if opened.desc.task != "text-generation" {
        return Err(EngineError::WrongTask {
            arch: opened.desc.arch,
            task: opened.desc.task,
        });
    }
    EngineHandle::start(options.limits, move || {
        load(&opened, &backend, &options, &progress)
    })
}

fn load(
    opened: &OpenedModel,
    selected: &SelectedBackend,
    options: &LoadOptions,
    progress: &dyn Fn(usize, usize),
) -> Result<(Runner, EngineFacts), EngineError> {
    let started = Instant::now();
    let dtype = options
        .dtype
        .unwrap_or_else(|| preferred_dtype(opened, selected));
    let context_tokens = context_tokens(opened.desc.context_length, options.ctx_size)?;
    let mut open = OpenOptions::default();
    if options.threads > 0 {
        open.options
            .insert("threads".to_owned(), Value::from(options.threads));
    }
    let backend = selected.plugin.open(&open)?;
    let config = opened.checkpoint.config().to_string();
    let request = ModelRequest {
        arch: &opened.decision.arch,
        config: &config,
        compute_dtype: dtype,
        context_length: context_tokens as u32,
    };
    let weights = CheckpointWeights::new(&opened.checkpoint, &backend, dtype, progress);
    let model = opened.family.load(&backend, request, &weights)?;
    let device = selected
        .report
        .devices
        .first()
        .map(|device| device.description.clone())
        .unwrap_or_default();
    let kv_tokens = kv_tokens(opened, selected, options, dtype, context_tokens);
    let facts = EngineFacts {
        arch: opened.decision.arch.clone(),
        family: (
            opened.family.name().to_owned(),
            opened.family.version().to_owned(),
        ),
        backend: (
            selected.plugin.name().to_owned(),
            selected.plugin.version().to_owned(),
        ),
        device,
        dtype,
        context_tokens,
        kv_tokens,
        vocab_size: opened.desc.vocab_size,
        weights_bytes: opened.checkpoint.weights_bytes(),
        load: started.elapsed(),
    };
    Ok((
        Runner::new(model, opened.desc.clone(), context_tokens, kv_tokens, dtype),
        facts,
    ))
}

/// Float type of activations and caches when nobody asks for one: the backend's preference, else what
/// the checkpoint was saved in, else f16.
pub fn preferred_dtype(opened: &OpenedModel, selected: &SelectedBackend) -> DType {
    let named = |value: Option<&Value>| {
        let dtype = match value?.as_str()? {
            "float32" => DType::F32,
            "float16" => DType::F16,
            "bfloat16" => DType::BF16,
            name => DType::from_name(name)?,
        };
        matches!(dtype, DType::F32 | DType::F16 | DType::BF16).then_some(dtype)
    };
    let config = opened.checkpoint.config();
    named(selected.report.details.get("preferred_dtype"))
        .or_else(|| named(config.get("dtype").or_else(|| config.get("torch_dtype"))))
        .unwrap_or(DType::F16)
}

/// Share of the free memory that keys and values may take when nobody says otherwise; the rest is for
/// activations and for others.
const KV_SHARE: f64 = 0.8;

/// Tokens whose keys and values may be held at a time: what all requests together could use, within
/// the budget.
fn kv_tokens(
    opened: &OpenedModel,
    selected: &SelectedBackend,
    options: &LoadOptions,
    dtype: DType,
    context_tokens: usize,
) -> usize {
    let wanted = context_tokens.saturating_mul(options.limits.parallel.max(1));
    let per_token = opened.desc.kv_bytes_per_token(dtype.size_bytes()).max(1) as u64;
    let free_bytes = selected
        .report
        .devices
        .first()
        .map_or(0, |device| device.free_bytes);
    let left_bytes = free_bytes.saturating_sub(opened.checkpoint.weights_bytes());
    let budget_bytes = match options.kv_budget_bytes {
        Some(bytes) => bytes,
        // The device does not tell: the requests' own bound is all there is.
        None if free_bytes == 0 => u64::MAX,
        None => (left_bytes as f64 * KV_SHARE) as u64,
    };
    wanted.min(usize::try_from(budget_bytes / per_token).unwrap_or(usize::MAX))
}

/// The context that is asked for, which must be one the model has.
fn context_tokens(model: usize, asked: usize) -> Result<usize, EngineError> {
    match asked {
        0 => Ok(model),
        asked if asked <= model => Ok(asked),
        asked => Err(EngineError::ContextTooLong {
            asked_tokens: asked,
            model_tokens: model,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_beyond_the_models_is_refused_with_both_numbers() {
        assert_eq!(context_tokens(2048, 0).unwrap(), 2048);
        assert_eq!(context_tokens(2048, 512).unwrap(), 512);
        let text = context_tokens(2048, 4096).unwrap_err().to_string();
        assert!(text.contains("4096") && text.contains("2048"), "{text}");
    }
}
