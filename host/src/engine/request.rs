//! What the engine is asked for and what it answers: plain data, safe to send between threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::sampling::{Logprobs, SamplingParams};

use super::encoder::Features;
use super::error::EngineError;

/// A request to continue a prompt.
#[derive(Debug, Clone, Default)]
pub struct GenerateRequest {
    /// Prompt, special tokens included.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens to generate; none is until the end of the context.
    pub max_new_tokens: Option<usize>,
    /// Tokens that end the answer.
    pub eos: Vec<u32>,
    /// Whose cached prefixes may be used: requests of different namespaces never share any.
    pub namespace: String,
    /// Lower is more urgent; 0 for those that do not say.
    pub priority: i32,
    /// When it fails if it has not ended by then; none waits for ever.
    pub deadline: Option<Instant>,
    /// Whether others with the same prompt follow, so that the cache gets it as soon as it was computed.
    pub shares_prompt: bool,
    /// What the encoder reads, for models that have one.
    pub features: Option<Features>,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended it.
    Eos,
    /// `max_new_tokens` was reached.
    MaxTokens,
    /// The context is full.
    ContextFull,
    /// A stop string ended it.
    StopText,
    /// The caller cancelled.
    Cancelled,
}

/// Figures of one request.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GenerateStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of them, found in the cache.
    pub cached_tokens: usize,
    /// Tokens generated, the ending one included.
    pub generated_tokens: usize,
    /// From the request to the first token's logits.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// What a running request reports.
#[derive(Debug)]
pub enum Event {
    /// A part of the prompt is done.
    Prefill {
        /// Tokens done.
        done: usize,
        /// Tokens to do.
        total: usize,
    },
    /// A token was chosen.
    Token {
        /// Its id.
        id: u32,
        /// Its log probability and its alternatives, if they were asked for.
        logprobs: Option<Box<Logprobs>>,
    },
    /// The answer is complete; nothing follows.
    Done {
        /// Why.
        reason: FinishReason,
        /// Figures.
        stats: GenerateStats,
    },
    /// The request failed; nothing follows. The engine lives on.
    Failed(EngineError),
}

/// Where the events of a request go when no thread waits for them.
///
/// Called on the engine thread between steps: it must not wait, and it bounds what it keeps.
pub trait EventSink: Send {
    /// Takes an event. False says that nobody wants more, which cancels the request.
    fn send(&self, event: Event) -> bool;
}

/// Shared flag by which a caller ends a request between two steps.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Asks for the end.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether the end was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
