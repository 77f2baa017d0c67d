//! Errors of the engine.

use std::path::PathBuf;

use crate::plugin::{CallError, DetectFailure, SelectError};

/// Why a model cannot be loaded or a request cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A function of a family or backend failed.
    #[error(transparent)]
    Call(CallError),
    /// No family runs the checkpoint.
    #[error(transparent)]
    Detect(#[from] DetectFailure),
    /// No family runs the GGUF file.
    #[error(transparent)]
    Decide(#[from] mlxcel_registry::arch::DetectError),
    /// No backend can be used.
    #[error(transparent)]
    Backend(#[from] SelectError),
    /// A GGUF file cannot become a checkpoint.
    #[error("{}: {message}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The folder of the prefix cache cannot be used.
    #[error("the folder of the prefix cache {}: {source}", dir.display())]
    PrefixDir {
        /// The folder.
        dir: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] mlxcel_registry::checkpoint::CheckpointError),
    /// A family's description of a model is not usable.
    #[error("the family's description of the model is not usable: {message}")]
    Description {
        /// What is wrong.
        message: String,
    },
    /// The prompt does not fit. It is never cut.
    #[error(
        "the prompt has {prompt_tokens} tokens and the context holds {context_tokens}: shorten it, or raise --ctx-size if the model allows"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens that fit, one generated token included.
        context_tokens: usize,
    },
    /// A longer context than the model's.
    #[error(
        "--ctx-size {asked_tokens} is beyond the model's {model_tokens} tokens: ask for at most that"
    )]
    ContextTooLong {
        /// Asked for.
        asked_tokens: usize,
        /// The model's.
        model_tokens: usize,
    },
    /// A budget for keys and values without use.
    #[error(
        "--kv-cache-budget of {budget_bytes} bytes holds no page of {page_tokens} tokens, which takes {page_bytes}{}: give at least {least_bytes}, or auto",
        beside(*fixed_bytes)
    )]
    KvBudgetTooSmall {
        /// Asked for.
        budget_bytes: u64,
        /// Tokens of a page.
        page_tokens: usize,
        /// Bytes of a page.
        page_bytes: u64,
        /// Bytes that come before any page.
        fixed_bytes: u64,
        /// A budget that will do.
        least_bytes: u64,
    },
    /// The device has nothing left for keys and values.
    #[error(
        "the device has {room_bytes} bytes left for keys and values beside the weights, and a page of {page_tokens} tokens takes {page_bytes}{}: free memory of the device, take a smaller quantisation, or give caches a smaller type with --cache-type-k and --cache-type-v",
        beside(*fixed_bytes)
    )]
    NoRoomForKv {
        /// What is left.
        room_bytes: u64,
        /// Tokens of a page.
        page_tokens: usize,
        /// Bytes of a page.
        page_bytes: u64,
        /// Bytes that come before any page.
        fixed_bytes: u64,
    },
    /// Keys of one type and values of another.
    #[error(
        "keys would be kept in {keys} and values in {values}: give --cache-type-k and --cache-type-v the same type"
    )]
    KvTypesDiffer {
        /// Of keys.
        keys: &'static str,
        /// Of values.
        values: &'static str,
    },
    /// A type of keys and values that the backend does not attend to.
    #[error(
        "backend {backend} does not keep keys and values in {asked} beside activations in {activations}: leave --cache-type-k and --cache-type-v out, or set --dtype {asked}"
    )]
    KvTypeUnsupported {
        /// Asked for.
        asked: &'static str,
        /// Type of the activations.
        activations: &'static str,
        /// The backend.
        backend: String,
    },
    /// A quantised type of keys and values that the backend does not attend to.
    #[error(
        "backend {backend} does not keep keys and values in {asked}: leave --cache-type-k and --cache-type-v out, or choose a backend that lists {asked}"
    )]
    KvTypeQuantised {
        /// Asked for.
        asked: &'static str,
        /// The backend.
        backend: String,
    },
    /// A type that keys and values of this model cannot have.
    #[error(
        "{arch} cannot keep its caches in {asked}: {obstacle}; leave --cache-type-k and --cache-type-v out, or ask for a float type"
    )]
    KvTypeForModel {
        /// Asked for.
        asked: &'static str,
        /// Architecture id.
        arch: String,
        /// Which layer, and why.
        obstacle: String,
    },
    /// The KV pool has no room.
    #[error(
        "the KV pool has {available_pages} free pages and {wanted_pages} are needed: shorten the conversation or allow more memory for keys and values"
    )]
    KvPoolFull {
        /// Pages wanted.
        wanted_pages: usize,
        /// Pages that are left.
        available_pages: usize,
    },
    /// A model with an encoder, and a request without anything for it.
    #[error("{arch} reads features with its encoder and the request has none")]
    FeaturesMissing {
        /// Architecture id.
        arch: String,
    },
    /// Features for a model without an encoder.
    #[error("{arch} has no encoder, and the request brings features for one")]
    FeaturesUnexpected {
        /// Architecture id.
        arch: String,
    },
    /// Features of another shape than the encoder reads.
    #[error(
        "the encoder of {arch} reads up to {most_rows} rows of {wanted_width} values, the request has {rows} of {width}"
    )]
    FeaturesDoNotFit {
        /// Architecture id.
        arch: String,
        /// Rows of the request.
        rows: usize,
        /// Values in them.
        width: usize,
        /// Most rows.
        most_rows: usize,
        /// Values that a row has to have.
        wanted_width: usize,
    },
    /// An empty prompt.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// A token id that the model does not have.
    #[error(
        "token {token} is outside the model's vocabulary of {vocab_size}: tokenizer and checkpoint do not belong together"
    )]
    TokenOutOfRange {
        /// The token.
        token: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The request's time is over.
    #[error(
        "the request did not end within its time of {limit_s:.1} s: {generated_tokens} tokens were generated"
    )]
    DeadlineExceeded {
        /// From the request to its deadline, in seconds.
        limit_s: f64,
        /// Tokens of its answer by then.
        generated_tokens: usize,
    },
    /// The step that the request was in failed.
    #[error("{message}")]
    StepFailed {
        /// What failed.
        message: String,
        /// Whether for lack of memory.
        is_exhausted: bool,
    },
    /// Sampling failed.
    #[error(transparent)]
    Sampling(#[from] crate::sampling::SamplingError),
    /// The engine thread is gone.
    #[error("the engine has stopped: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },
    /// The other ranks of a model that is split are gone.
    #[error(
        "{reason}: the ranks that the model is split over go on together or not at all, start again"
    )]
    Ranks {
        /// What ended them.
        reason: String,
    },
    /// A model that cannot be split as asked.
    #[error("--tensor-parallel {ranks}: {arch} cannot be split: {reason}")]
    CannotSplit {
        /// Architecture.
        arch: String,
        /// Ranks that were asked for.
        ranks: usize,
        /// Why not.
        reason: String,
    },
    /// An option that goes with whole models only.
    #[error("--tensor-parallel does not go with {option}: {reason}")]
    NotWithRanks {
        /// The option.
        option: &'static str,
        /// Why not.
        reason: &'static str,
    },
    /// The backend does not know the model's kind of cache.
    #[error(
        "{arch} needs caches of plugin ABI 1.{needs_minor}, backend {backend} was built at 1.{minor}: update the backend"
    )]
    BackendTooOld {
        /// Architecture.
        arch: String,
        /// The backend.
        backend: String,
        /// Oldest minor that will do.
        needs_minor: u32,
        /// The backend's.
        minor: u32,
    },
    /// The model does something else.
    #[error("{arch} is a model for {task}, this command needs text-generation")]
    WrongTask {
        /// Architecture.
        arch: String,
        /// Its task.
        task: String,
    },
    /// A bug in the host.
    #[error("internal error: {message}")]
    Internal {
        /// What is wrong.
        message: String,
    },
}

/// What recurrent states and outputs of encoders take, where there are any.
fn beside(fixed_bytes: u64) -> String {
    match fixed_bytes {
        0 => String::new(),
        bytes => format!(" beside {bytes} of the states of all answers"),
    }
}

impl EngineError {
    /// Whether the device's memory is used up, which may be otherwise in a moment.
    pub fn is_exhausted(&self) -> bool {
        match self {
            Self::Call(error) => error.is_exhausted(),
            Self::StepFailed { is_exhausted, .. } => *is_exhausted,
            _ => false,
        }
    }
}
