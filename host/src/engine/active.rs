//! One request while it runs: what it still has to compute, and what becomes of its logits.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use crate::sampling::{RowDraw, Sample, Sampler};

use super::error::EngineError;
use super::queue::Rank;
use super::request::{CancelToken, Event, EventSink, FinishReason, GenerateRequest, GenerateStats};
use super::runner::Outcome;
use super::schedule::{Demand, Need};
use super::sequence::Sequence;

/// Whom a request answers.
pub enum Reply {
    /// A stream of events that a thread reads.
    Events(Sender<Event>),
    /// Whoever took the request.
    Sink(Box<dyn EventSink>),
    /// The logits after the last token, once.
    Logits(Sender<Result<Vec<f32>, EngineError>>),
}

/// A request with its state.
pub struct Active {
    /// Tells it from all others of its batch.
    pub id: u64,
    /// Most tokens that it may have.
    pub context_tokens: usize,
    /// What was asked.
    pub request: GenerateRequest,
    /// Ends it between two steps.
    pub cancel: CancelToken,
    /// What is in the pool.
    pub sequence: Sequence,
    /// Whose cached prefixes it may use, and beside which features.
    cache_namespace: String,
    reply: Reply,
    sampler: Sampler,
    /// Prompt and answer so far; the sequence trails behind.
    tokens: Vec<u32>,
    /// Tokens that steps in flight will give.
    in_flight: usize,
    stats: GenerateStats,
    arrived: Instant,
    first_token: Option<Instant>,
}

/// Progress on a prompt.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    done: usize,
    total: usize,
}

impl Active {
    /// A request that has not begun. None when it cannot be made, which `reply` was told.
    pub fn new(request: GenerateRequest, cancel: CancelToken, reply: Reply) -> Option<Self> {
        let sampler = match Sampler::new(&request.sampling, &request.prompt) {
            Ok(sampler) => sampler,
            Err(error) => {
                fail(&reply, error.into());
                return None;
            }
        };
        let stats = GenerateStats {
            prompt_tokens: request.prompt.len(),
            ..GenerateStats::default()
        };
        let tokens = request.prompt.clone();
        let cache_namespace = match &request.features {
            None => request.namespace.clone(),
            Some(features) => features.namespace(&request.namespace),
        };
        let arrived = Instant::now();
        Some(Self {
            id: 0,
            context_tokens: 0,
            request,
            cancel,
            sequence: Sequence::default(),
            cache_namespace,
            reply,
            sampler,
            tokens,
            in_flight: 0,
            stats,
            arrived,
            first_token: None,
        })
    }

    /// Namespace of what it leaves in the prefix cache and finds there.
    pub fn cache_namespace(&self) -> &str {
        &self.cache_namespace
    }

    /// All tokens that are known: prompt and answer so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that are known and not yet in the pool.
    pub fn todo(&self) -> &[u32] {
        self.tokens.get(self.sequence.len()..).unwrap_or_default()
    }

    /// Its part in the plan of a step.
    pub fn demand(&self) -> Demand {
        Demand {
            need: self.need(),
            priority: self.request.priority,
        }
    }

    /// What it needs from the next step. After a preemption an answer is recomputed like a prompt.
    pub fn need(&self) -> Need {
        match self.todo().len() {
            0 if self.in_flight > 0 && self.goes_on() => Need::Decode,
            1 if self.stats.generated_tokens > 0 => Need::Decode,
            tokens => Need::Prefill(tokens),
        }
    }

    /// Whether the token in flight may be followed by another one.
    fn goes_on(&self) -> bool {
        let generated = self.stats.generated_tokens + self.in_flight;
        let most = self.request.max_new_tokens;
        most.is_none_or(|most| generated < most)
            && self.tokens.len() + self.in_flight <= self.context_tokens
    }

    /// Whether its next row is that of a token which a step in flight will give.
    pub fn follows(&self) -> bool {
        self.in_flight > 0
    }

    /// How a device would choose the token after its next row; none where the host has to.
    pub fn row_draw(&self) -> Option<RowDraw> {
        match self.reply {
            Reply::Logits(_) => None,
            _ => self.sampler.row_draw(self.in_flight as u64),
        }
    }

    /// Whether it has been in a step before.
    pub fn has_begun(&self) -> bool {
        !self.sequence.is_empty() || self.stats.generated_tokens > 0
    }

    /// Notes what the prefix cache had.
    pub fn begin_with(&mut self, sequence: Sequence) {
        if self.stats.generated_tokens == 0 {
            self.stats.cached_tokens = sequence.len();
        }
        self.sequence = sequence;
    }

    /// Whether a step that runs the next `rows` of it gives a token.
    pub fn is_complete_with(&self, rows: usize) -> bool {
        self.follows() || rows == self.todo().len()
    }

    /// Notes that a step with its next `rows` tokens was submitted, and whether it gives a token. Tells the
    /// progress that this is on the prompt.
    pub fn submitted(&mut self, rows: usize, gives_token: bool) -> Option<Progress> {
        // A token that is not known yet is noted when it comes.
        if !self.follows() {
            let ran = self.todo().get(..rows).unwrap_or_default().to_vec();
            self.sequence.append(&ran);
        }
        self.in_flight += usize::from(gives_token);
        let cached = self.stats.cached_tokens;
        let is_prompt = self.stats.generated_tokens == 0 && !self.is_followed();
        is_prompt.then(|| Progress {
            done: self.sequence.len() - cached,
            total: self.tokens.len() - cached,
        })
    }

    /// Whether a step in flight has the row of a token that is not known yet.
    pub fn is_followed(&self) -> bool {
        self.in_flight > 1
    }

    /// Reports progress on the prompt.
    pub fn report(&self, progress: Progress) {
        let Progress { done, total } = progress;
        self.send(Event::Prefill { done, total });
    }

    /// Takes what a step gave after its last token. Gives the reason when it ended.
    pub fn take(&mut self, outcome: Outcome) -> Result<Option<FinishReason>, EngineError> {
        let is_followed = self.is_followed();
        self.in_flight = self.in_flight.saturating_sub(1);
        let sample = match (outcome, &self.reply) {
            (Outcome::Logits(logits), Reply::Logits(reply)) => {
                // A caller that no longer waits needs no answer.
                let _ = reply.send(Ok(logits));
                return Ok(Some(FinishReason::MaxTokens));
            }
            (Outcome::Logits(logits), _) => {
                let sample = self.sampler.sample(&logits)?;
                if is_followed {
                    // What followed ran with another token.
                    return Err(EngineError::Internal {
                        message: "the device chose no token from logits that are sound".to_owned(),
                    });
                }
                sample
            }
            (Outcome::Token(token), _) => {
                self.sampler.accept(token);
                Sample {
                    token,
                    logprobs: None,
                }
            }
        };
        let now = Instant::now();
        let first = *self.first_token.get_or_insert(now);
        let Sample { token, logprobs } = sample;
        self.stats.prefill = first - self.arrived;
        self.stats.decode = now - first;
        self.stats.generated_tokens += 1;
        self.tokens.push(token);
        if self.request.eos.contains(&token) {
            return Ok(Some(FinishReason::Eos));
        }
        self.send(Event::Token {
            id: token,
            logprobs: logprobs.map(Box::new),
        });
        let most = self.request.max_new_tokens;
        if most.is_some_and(|most| self.stats.generated_tokens >= most) {
            return Ok(Some(FinishReason::MaxTokens));
        }
        // The new token needs a place for its own key and value.
        if self.tokens.len() > self.context_tokens {
            return Ok(Some(FinishReason::ContextFull));
        }
        if is_followed {
            self.sequence.append(&[token]);
        }
        Ok(None)
    }

    fn send(&self, event: Event) {
        if !deliver(&self.reply, event) {
            // The reader has gone.
            self.cancel.cancel();
        }
    }

    /// Reports the end.
    pub fn finish(self, reason: FinishReason) {
        deliver(
            &self.reply,
            Event::Done {
                reason,
                stats: self.stats,
            },
        );
    }

    /// Reports a failure.
    pub fn fail(self, error: EngineError) {
        fail(&self.reply, error);
    }

    /// How long it has been here.
    pub fn age(&self) -> Duration {
        self.arrived.elapsed()
    }

    /// Whether what it computes may help others; a measurement leaves nothing behind.
    pub fn is_kept(&self) -> bool {
        !matches!(self.reply, Reply::Logits(_))
    }

    /// What its place in the queue depends on.
    pub fn rank(&self) -> Rank {
        Rank {
            priority: self.request.priority,
            tenant: self.request.namespace.clone(),
        }
    }

    /// Why it has to end although nobody cancelled it.
    pub fn overdue(&self, now: Instant) -> Option<EngineError> {
        let deadline = self.request.deadline.filter(|deadline| now >= *deadline)?;
        let limit = deadline.saturating_duration_since(self.arrived);
        Some(EngineError::DeadlineExceeded {
            limit_s: limit.as_secs_f64(),
            generated_tokens: self.stats.generated_tokens,
        })
    }
}

/// Hands an event over. Whether anybody wants more.
fn deliver(reply: &Reply, event: Event) -> bool {
    match reply {
        Reply::Events(events) => events.send(event).is_ok(),
        Reply::Sink(sink) => sink.send(event),
        Reply::Logits(_) => true,
    }
}

/// Reports a failure to a request that may never have begun. A reader that has gone needs none.
fn fail(reply: &Reply, error: EngineError) {
    match reply {
        Reply::Logits(logits) => drop(logits.send(Err(error))),
        _ => drop(deliver(reply, Event::Failed(error))),
    }
}
