//! What the server counts: requests, tokens, and how long they took. No text of a request ever gets here.

mod histogram;
mod page;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use histogram::Histogram;
pub use page::{Scrape, page};

/// How a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// With its last token.
    Completed,
    /// The client went away.
    Cancelled,
    /// With an error.
    Failed,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

/// Tokens and time between two scrapes.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    prompt_tokens: u64,
    prompt: Duration,
    predicted_tokens: u64,
    predicted: Duration,
}

/// All counters.
#[derive(Debug, Default)]
pub struct Metrics {
    /// From the request to its first token.
    pub first_token: Histogram,
    /// From one token to the next.
    pub inter_token: Histogram,
    /// From the request to its end.
    pub request: Histogram,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    prompt_us: AtomicU64,
    predicted_tokens: AtomicU64,
    predicted_us: AtomicU64,
    refused_full: AtomicU64,
    window: Mutex<Window>,
    outcomes: Mutex<BTreeMap<Outcome, u64>>,
    /// By route and status: as many as there are routes, since unknown paths are one.
    responses: Mutex<BTreeMap<(String, u16), u64>>,
}

/// Figures of one finished answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Answered {
    /// Tokens of the prompt that were computed.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were in the cache.
    pub cached_tokens: usize,
    /// From the request to the first token.
    pub prompt: Duration,
    /// Tokens generated.
    pub predicted_tokens: usize,
    /// From the first token to the last.
    pub predicted: Duration,
}

impl Metrics {
    /// Counts an answer.
    pub fn answered(&self, answer: Answered) {
        let add = |counter: &AtomicU64, more: u64| counter.fetch_add(more, Ordering::Relaxed);
        add(&self.prompt_tokens, answer.prompt_tokens as u64);
        add(&self.cached_tokens, answer.cached_tokens as u64);
        add(&self.prompt_us, answer.prompt.as_micros() as u64);
        add(&self.predicted_tokens, answer.predicted_tokens as u64);
        add(&self.predicted_us, answer.predicted.as_micros() as u64);
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        window.prompt_tokens += answer.prompt_tokens as u64;
        window.prompt += answer.prompt;
        window.predicted_tokens += answer.predicted_tokens as u64;
        window.predicted += answer.predicted;
    }

    /// Counts the end of a request that reached the engine.
    pub fn ended(&self, outcome: Outcome, arrived: Instant) {
        self.request.observe(arrived.elapsed());
        *self
            .outcomes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(outcome)
            .or_default() += 1;
    }

    /// Counts a request that found no room in the queue.
    pub fn refused(&self) {
        self.refused_full.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a response.
    pub fn responded(&self, route: &str, status: u16) {
        let mut responses = self
            .responses
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *responses.entry((route.to_owned(), status)).or_default() += 1;
    }

    /// Takes what came since the last call.
    fn take_window(&self) -> Window {
        std::mem::take(&mut *self.window.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
