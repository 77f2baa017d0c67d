//! From an opened checkpoint to a running engine.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::plugin::{DType, SelectedBackend};

use super::batch::BatchLimits;
use super::desc::ModelDesc;
use super::detect::OpenedModel;
use super::error::EngineError;
use super::fingerprint::Fingerprint;
use super::flight::Lookahead;
use super::kv_types::{KvType, KvTypes};
use super::part::{Part, Settled, load_part};
use super::prefix::PrefixLimits;
use super::prefix_disk::{DiskOptions, DiskTier};
use super::ranks::{Failure, RankPlan, Split};
use super::runner::{PAGE_SIZE, Runner, cross_dtype};
use super::thread::EngineHandle;

/// How a model is loaded.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Float type of activations; none lets the backend and the checkpoint decide.
    pub dtype: Option<DType>,
    /// Types of keys and values.
    pub kv_types: KvTypes,
    /// Longest sequence in tokens; 0 is the model's own limit.
    pub ctx_size: usize,
    /// Compute threads; 0 lets the backend decide.
    pub threads: usize,
    /// How products are computed; none lets the backend decide.
    pub precision: Option<Precision>,
    /// Bounds of the batch.
    pub limits: BatchLimits,
    /// Bytes for keys and values; none is most of what the device has left beside the weights.
    pub kv_budget_bytes: Option<u64>,
    /// What is kept of finished sequences.
    pub prefix: PrefixOptions,
    /// Whether steps are submitted before the tokens of the ones before them are known.
    pub lookahead: Lookahead,
    /// How the model is split over processes; none is whole in this one.
    pub ranks: Option<RankPlan>,
}

/// How a backend computes products, where it has a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// In the type of the activations.
    Exact,
    /// With activations rounded so that nothing is lost that matters.
    High,
    /// With activations rounded to what is fastest.
    Fast,
}

impl Precision {
    /// As the backends' option has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::High => "high",
            Self::Fast => "fast",
        }
    }

    /// The one called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Exact, Self::High, Self::Fast];
        all.into_iter().find(|precision| precision.name() == name)
    }
}

/// What is kept of finished sequences.
#[derive(Debug, Clone, Default)]
pub struct PrefixOptions {
    /// Bytes on the device; none is what requests leave free, 0 keeps nothing.
    pub max_bytes: Option<u64>,
    /// How long pages stay that nobody asks for; none is for ever.
    pub ttl: Option<Duration>,
    /// Pages that outlive the process.
    pub disk: Option<DiskOptions>,
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
    /// Float type of activations.
    pub dtype: DType,
    /// Type of keys and values.
    pub kv_type: KvType,
    /// Longest sequence, in tokens.
    pub context_tokens: usize,
    /// Tokens that fit into the KV pool, over all sequences.
    pub kv_tokens: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Bytes of the weights, from headers.
    pub weights_bytes: u64,
    /// Processes that the model is split over; 1 is whole.
    pub ranks: usize,
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
    let ranks = match &options.ranks {
        Some(_) => Failure::possible(),
        None => Failure::default(),
    };
    EngineHandle::start(options.limits, ranks.clone(), move || {
        load_runner(&opened, &backend, &options, ranks, &progress)
    })
}

/// Loads the model on this thread, which owns the backend from then on. `failure` is told what becomes of the other ranks
/// where there are any.
pub fn load_runner(
    opened: &OpenedModel,
    selected: &SelectedBackend,
    options: &LoadOptions,
    failure: Failure,
    progress: &dyn Fn(usize, usize),
) -> Result<(Runner, EngineFacts), EngineError> {
    let started = Instant::now();
    let dtype = options
        .dtype
        .unwrap_or_else(|| preferred_dtype(opened, selected));
    let kv_type = options
        .kv_types
        .resolve(dtype, options.precision, selected, &opened.desc)?;
    let context_tokens = context_tokens(opened.desc.context_length, options.ctx_size)?;
    let split = options.ranks.as_ref();
    let split = split
        .map(|plan| Split::new(plan, opened, selected, options))
        .transpose()?;
    let settled = Settled {
        dtype,
        kv_type,
        precision: options.precision,
        threads: split
            .as_ref()
            .map_or(options.threads, |split| split.threads(options.threads)),
        context_tokens,
        device: split
            .as_ref()
            .map_or_else(String::new, |split| split.device(0)),
    };
    let mut ranks = split
        .as_ref()
        .map(|split| split.start(&settled, failure))
        .transpose()?;
    let part = ranks.as_ref().map(|ranks| Part {
        rank: 0,
        addresses: ranks.addresses(),
    });
    let (model, weights_bytes) = load_part(opened, selected, &settled, part, progress)?;
    if let Some(ranks) = &mut ranks {
        ranks.wait_until_ready()?;
    }
    let desc = match &split {
        None => opened.desc.clone(),
        Some(split) => split.desc.clone(),
    };
    let shared = Shared {
        weights: split.as_ref().map_or(1, |split| split.size()),
        device: split.as_ref().map_or(1, |split| split.sharing()),
    };
    let device = selected
        .report
        .devices
        .first()
        .map(|device| device.description.clone())
        .unwrap_or_default();
    let (kv_tokens, checkpoints) = cache_sizes(
        &desc,
        selected,
        options,
        (kv_type, dtype),
        context_tokens,
        (weights_bytes, shared),
    );
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
        kv_type,
        context_tokens,
        kv_tokens,
        vocab_size: opened.desc.vocab_size,
        weights_bytes,
        ranks: split.as_ref().map_or(1, |split| split.size()),
        load: started.elapsed(),
    };
    let page_bytes = desc.kv_bytes_per_token(kv_type) * PAGE_SIZE;
    let lookahead = match split {
        None => options.lookahead,
        // The other ranks need to know the tokens.
        Some(_) => Lookahead::Off,
    };
    let runner = Runner::new(model, desc, context_tokens, kv_tokens, kv_type, dtype)
        .with_encoders(options.limits.parallel.max(1))
        .with_ranks(ranks)
        .with_lookahead(lookahead, is_asynchronous(selected))
        .with_states(options.limits.parallel.max(1), checkpoints)
        .with_prefix_limits(options.prefix.limits(page_bytes));
    let runner = match &options.prefix.disk {
        None => runner,
        Some(disk) => runner.with_disk(open_disk(
            opened,
            selected,
            disk,
            options.precision,
            &facts,
        )?),
    };
    Ok((runner, facts))
}

impl PrefixOptions {
    fn limits(&self, page_bytes: usize) -> PrefixLimits {
        let pages = |bytes: u64| match bytes {
            0 => 0,
            bytes => (bytes / page_bytes.max(1) as u64).max(1),
        };
        PrefixLimits {
            max_pages: self.max_bytes.map_or(usize::MAX, |bytes| {
                usize::try_from(pages(bytes)).unwrap_or(usize::MAX)
            }),
            ttl: self.ttl,
        }
    }
}

/// Opens the folder of the prefix cache for this model, these plugins, and this layout of the caches.
fn open_disk(
    opened: &OpenedModel,
    selected: &SelectedBackend,
    options: &DiskOptions,
    precision: Option<Precision>,
    facts: &EngineFacts,
) -> Result<DiskTier, EngineError> {
    let open = || {
        let mut fingerprint = Fingerprint::new();
        fingerprint.add_checkpoint(opened.checkpoint.path())?;
        fingerprint.add_content(opened.family.path())?;
        fingerprint.add_content(selected.plugin.path())?;
        fingerprint.add(format!("{:?}", opened.desc));
        fingerprint.add(facts.dtype.name());
        fingerprint.add(facts.kv_type.name());
        fingerprint.add(precision.map_or("", Precision::name));
        // Scaled rotations may depend on the context that was asked for.
        fingerprint.add(facts.context_tokens.to_le_bytes());
        DiskTier::open(options.clone(), fingerprint.finish(), PAGE_SIZE)
    };
    open().map_err(|source| EngineError::PrefixDir {
        dir: options.dir.clone(),
        source,
    })
}

/// Float type of activations when nobody asks for one: the backend's preference, else what
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

/// Whether the backend says that it goes on working after a submission.
fn is_asynchronous(selected: &SelectedBackend) -> bool {
    let word = selected.report.details.get("asynchronous");
    word.and_then(Value::as_bool).unwrap_or(false)
}

/// Share of the free memory that keys and values may take when nobody says otherwise; the rest is for
/// activations and for others.
const KV_SHARE: f64 = 0.8;

/// Share of the budget that states left for later requests may take when nobody says otherwise, and
/// most of them: they are looked through one by one.
const CHECKPOINT_SHARE: u64 = 8;
const MOST_CHECKPOINTS: u64 = 256;

/// Among how many processes weights and the device are.
#[derive(Clone, Copy)]
struct Shared {
    weights: usize,
    device: usize,
}

/// Tokens whose keys and values may be held at a time: what all requests together could use, within
/// the budget. Recurrent states and what encoders give come first, since a request without them cannot run;
/// also gives how many states may be kept for later requests.
fn cache_sizes(
    desc: &ModelDesc,
    selected: &SelectedBackend,
    options: &LoadOptions,
    (kv_type, dtype): (KvType, DType),
    context_tokens: usize,
    (weights_bytes, shared): (u64, Shared),
) -> (usize, usize) {
    let parallel = options.limits.parallel.max(1);
    let wanted = context_tokens.saturating_mul(parallel);
    let per_token = desc.kv_bytes_per_token(kv_type).max(1) as u64;
    let free_bytes = selected
        .report
        .devices
        .first()
        .map_or(0, |device| device.free_bytes / shared.device as u64);
    let left_bytes = free_bytes.saturating_sub(weights_bytes / shared.weights as u64);
    let budget_bytes = match options.kv_budget_bytes {
        Some(bytes) => bytes,
        // The device does not tell: the requests' own bound is all there is.
        None if free_bytes == 0 => u64::MAX,
        None => (left_bytes as f64 * KV_SHARE) as u64,
    };
    let state_bytes = desc.state_bytes_per_sequence() as u64;
    let most_bytes = options
        .prefix
        .max_bytes
        .unwrap_or(budget_bytes / CHECKPOINT_SHARE);
    let checkpoints = (most_bytes.checked_div(state_bytes).unwrap_or(0)).min(MOST_CHECKPOINTS);
    // Two for every request, one that a step reads and one that it writes.
    let states = 2 * parallel as u64 + checkpoints;
    let cross_element_bytes = cross_dtype(kv_type, dtype).size_bytes();
    let cross_bytes = desc.cross_bytes_per_sequence(cross_element_bytes) as u64;
    let kv_bytes = budget_bytes
        .saturating_sub(state_bytes.saturating_mul(states))
        .saturating_sub(cross_bytes.saturating_mul(parallel as u64));
    let tokens = usize::try_from(kv_bytes / per_token).unwrap_or(usize::MAX);
    (wanted.min(tokens), checkpoints as usize)
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
