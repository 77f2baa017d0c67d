//! One request from prompt to last token.

use std::sync::mpsc::SyncSender;
use std::time::Instant;

use crate::sampling::Sampler;

use super::error::EngineError;
use super::request::{CancelToken, Event, FinishReason, GenerateRequest, GenerateStats};
use super::runner::{PREFILL_CHUNK, Runner};
use super::sequence::Sequence;

/// A running request.
pub struct Generation<'a> {
    /// The model.
    pub runner: &'a mut Runner,
    /// The retained sequence.
    pub sequence: &'a mut Sequence,
    /// Where events go.
    pub events: &'a SyncSender<Event>,
    /// Set when the caller wants no more.
    pub cancel: &'a CancelToken,
}

enum Prefilled {
    Logits(Vec<f32>),
    Cancelled,
}

impl Generation<'_> {
    /// Runs the request and reports its end.
    pub fn run(mut self, request: &GenerateRequest) {
        let last = match self.generate(request) {
            Ok((reason, stats)) => Event::Done { reason, stats },
            Err(error) => Event::Failed(error),
        };
        // A reader that has gone does not need it.
        let _ = self.events.send(last);
    }

    fn send(&self, event: Event) {
        if self.events.send(event).is_err() {
            self.cancel.cancel();
        }
    }

    fn generate(&mut self, request: &GenerateRequest) -> Result<(FinishReason, GenerateStats), EngineError> {
        let started = Instant::now();
        let mut sampler = Sampler::new(&request.sampling, &request.prompt)?;
        let mut stats = GenerateStats { prompt_tokens: request.prompt.len(), ..GenerateStats::default() };
        stats.cached_tokens = reuse(self.runner, self.sequence, &request.prompt)?;
        let prefilled = self.prefill(&request.prompt, stats.cached_tokens)?;
        stats.prefill = started.elapsed();
        let Prefilled::Logits(mut logits) = prefilled else {
            return Ok((FinishReason::Cancelled, stats));
        };
        let decode_started = Instant::now();
        let reason = loop {
            let token = sampler.sample(&mut logits)?.token;
            stats.generated_tokens += 1;
            stats.decode = decode_started.elapsed();
            if request.eos.contains(&token) {
                break FinishReason::Eos;
            }
            self.send(Event::Token { id: token });
            if request.max_new_tokens.is_some_and(|most| stats.generated_tokens >= most) {
                break FinishReason::MaxTokens;
            }
            if self.sequence.len() >= self.runner.context_tokens() {
                break FinishReason::ContextFull;
            }
            if self.cancel.is_cancelled() {
                break FinishReason::Cancelled;
            }
            logits = self.step(&[token])?;
        };
        Ok((reason, stats))
    }

    fn step(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        self.runner.extend(self.sequence, tokens, true)?.ok_or_else(no_logits)
    }

    fn prefill(&mut self, prompt: &[u32], cached: usize) -> Result<Prefilled, EngineError> {
        let todo = prompt.get(cached..).unwrap_or_default();
        let mut done = 0;
        loop {
            if self.cancel.is_cancelled() {
                return Ok(Prefilled::Cancelled);
            }
            let chunk_len = PREFILL_CHUNK.min(todo.len() - done);
            let chunk = todo.get(done..done + chunk_len).unwrap_or_default();
            done += chunk_len;
            let is_last = done == todo.len();
            let logits = self.runner.extend(self.sequence, chunk, is_last)?;
            self.send(Event::Prefill { done, total: todo.len() });
            if is_last {
                return logits.map(Prefilled::Logits).ok_or_else(no_logits);
            }
        }
    }
}

fn no_logits() -> EngineError {
    EngineError::Internal { message: "a step that wanted logits gave none".to_owned() }
}

/// Checks that a prompt can run and keeps what the retained sequence shares with it, but never
/// all of it: the last token has to run again to give logits.
fn reuse(runner: &mut Runner, sequence: &mut Sequence, prompt: &[u32]) -> Result<usize, EngineError> {
    if prompt.is_empty() {
        return Err(EngineError::EmptyPrompt);
    }
    let context_tokens = runner.context_tokens();
    if prompt.len() > context_tokens {
        return Err(EngineError::PromptTooLong { prompt_tokens: prompt.len(), context_tokens });
    }
    let keep = sequence.common_prefix(prompt).min(prompt.len() - 1);
    runner.truncate(sequence, keep);
    Ok(keep)
}

/// Logits after the last token of a text.
pub fn score(runner: &mut Runner, sequence: &mut Sequence, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
    let cached = reuse(runner, sequence, tokens)?;
    let mut logits = None;
    let todo = tokens.get(cached..).unwrap_or_default();
    let chunks = todo.len().div_ceil(PREFILL_CHUNK);
    for (index, chunk) in todo.chunks(PREFILL_CHUNK).enumerate() {
        logits = runner.extend(sequence, chunk, index + 1 == chunks)?;
    }
    logits.ok_or_else(no_logits)
}
