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
use super::room::{Shared, room};
use super::runner::{PAGE_SIZE, Runner};
use super::schedule::Budget;
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
    /// Whether an answer may depend on nothing but its request.
    pub deterministic: bool,
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
    /// Bounds of a step.
    pub steps: Budget,
    /// Compute threads of a rank; none where nobody asked for any and the backend does not say.
    pub threads: Option<usize>,
    /// How far products round; none where nobody asked and the backend does not say.
    pub precision: Option<Precision>,
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
    check_task(&opened.desc)?;
    let ranks = match &options.ranks {
        Some(_) => Failure::possible(),
        None => Failure::default(),
    };
    let parallel = options.limits.parallel;
    let budget = step_budget(&options, &backend);
    EngineHandle::start(parallel, budget, ranks.clone(), move || {
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
        deterministic: options.deterministic,
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
    let shared = Shared::of(split.as_ref());
    let device = selected
        .report
        .devices
        .first()
        .map(|device| device.description.clone())
        .unwrap_or_default();
    let room = room(
        &desc,
        selected,
        options,
        (kv_type, dtype),
        (weights_bytes, shared),
    );
    // What all requests together could use, within the budget.
    let wanted = context_tokens.saturating_mul(options.limits.parallel.max(1));
    // The pool has one page in any case.
    let tokens = match options.kv_budget_bytes {
        None => room.tokens.max(PAGE_SIZE),
        Some(_) => room.tokens,
    };
    let (kv_tokens, checkpoints) = (wanted.min(tokens), room.checkpoints);
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
        steps: step_budget(options, selected),
        threads: Some(settled.threads)
            .filter(|threads| *threads > 0)
            .or_else(|| default_threads(selected)),
        precision: options.precision.or_else(|| preferred_precision(selected)),
        load: started.elapsed(),
    };
    let page_bytes = desc.kv_bytes_per_token(kv_type) * PAGE_SIZE;
    let runner = Runner::new(model, desc, context_tokens, kv_tokens, kv_type, dtype)
        .with_encoders(options.limits.parallel.max(1))
        .with_ranks(ranks)
        .with_lookahead(options.lookahead, is_asynchronous(selected))
        .with_states(options.limits.parallel.max(1), checkpoints)
        .with_prefix_limits(options.prefix.limits(page_bytes));
    let runner = match &options.prefix.disk {
        None => runner,
        Some(disk) => runner.with_disk(open_disk(
            opened,
            selected,
            disk,
            (options.precision, options.deterministic),
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
    (precision, deterministic): (Option<Precision>, bool),
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
        fingerprint.add([u8::from(deterministic)]);
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

/// Rows of a step of prompts that the backend says it wants to be busy.
pub fn prefill_rows(selected: &SelectedBackend) -> Option<usize> {
    let rows = selected.report.details.get("prefill_rows")?.as_u64()?;
    usize::try_from(rows).ok().filter(|rows| *rows > 0)
}

/// Bounds of a step: those asked for, else the backend's, else the engine's.
pub fn step_budget(options: &LoadOptions, selected: &SelectedBackend) -> Budget {
    options.limits.budget.or(prefill_rows(selected))
}

/// Threads that the backend says it computes on where nobody asks for a number.
pub(super) fn default_threads(selected: &SelectedBackend) -> Option<usize> {
    let threads = selected.report.details.get("compute_threads")?.as_u64()?;
    usize::try_from(threads).ok().filter(|threads| *threads > 0)
}

/// What the backend says it takes where nobody asks for a precision.
fn preferred_precision(selected: &SelectedBackend) -> Option<Precision> {
    let word = selected.report.details.get("preferred_precision")?;
    Precision::from_name(word.as_str()?)
}

/// What can be said of the options before anything is read but headers, and is not a matter of memory.
pub fn check_options(
    opened: &OpenedModel,
    selected: &SelectedBackend,
    options: &LoadOptions,
) -> Result<(), EngineError> {
    check_task(&opened.desc)?;
    context_tokens(opened.desc.context_length, options.ctx_size)?;
    match &options.ranks {
        None => Ok(()),
        Some(plan) => Split::new(plan, opened, selected, options).map(|_| ()),
    }
}

fn check_task(desc: &ModelDesc) -> Result<(), EngineError> {
    match desc.task.as_str() {
        "text-generation" => Ok(()),
        task => Err(EngineError::WrongTask {
            arch: desc.arch.clone(),
            task: task.to_owned(),
        }),
    }
}

/// The context that is asked for, which must be one the model has.
pub(super) fn context_tokens(model: usize, asked: usize) -> Result<usize, EngineError> {
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
