//! The answers to one request while they are generated, as a stream that a connection reads at its own pace.
//!
//! Nothing here waits for the engine and the engine waits for nothing here: events come through a bounded channel. A
//! reader that is slower than the channel is long loses the answer, with an error. Dropping it cancels what still runs.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::{Interval, MissedTickBehavior, interval_at};

use crate::engine::runner::PAGE_SIZE;
use crate::engine::{CancelToken, EngineError, Event, FinishReason, GenerateRequest};
use crate::sampling::SamplingParams;
use crate::text::{DetokenizerOptions, StopMatcher, StreamStart};

use super::app::{App, Live};
use super::choice::{Choice, End, Piece};
use super::error::{ApiError, Kind};
use super::metrics::{Answered, Outcome};
use super::room::Place;
use super::served::Served;
use super::sink::{ChoiceSink, Message};
use super::slots::Slot;

/// Events of one answer that may wait for its reader.
const WAITING_EVENTS: usize = 8192;

/// How often a silent stream is looked after.
const TICK: Duration = Duration::from_millis(250);

/// What is to be generated.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Prompts, checked already.
    pub prompts: Vec<Vec<u32>>,
    /// Answers to each.
    pub answers: usize,
    /// The name under which they were asked for.
    pub answers_name: &'static str,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens of an answer.
    pub max_tokens: Option<usize>,
    /// Texts that end an answer.
    pub stops: StopMatcher,
    /// What the answer follows.
    pub start: StreamStart,
    /// Whether the model's own ends do not end it.
    pub ignore_eos: bool,
    /// Whose cached prefixes may be used.
    pub namespace: String,
    /// Lower is more urgent.
    pub priority: i32,
    /// For the whole answer.
    pub limit: Duration,
    /// Of generation, after which an answer ends at a line break.
    pub predict_limit: Option<Duration>,
    /// When the request came.
    pub arrived: Instant,
}

/// What a generation reports.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// A part of a prompt is done.
    Prompt {
        /// Which answer.
        choice: usize,
        /// Tokens done, cached ones included.
        processed: usize,
    },
    /// Text, never empty.
    Text {
        /// Which answer.
        choice: usize,
        /// It.
        piece: Piece,
    },
    /// An answer is complete.
    End {
        /// Which answer.
        choice: usize,
        /// How.
        end: Box<End>,
    },
    /// Nothing happened for a while.
    Tick,
}

/// Answers in work.
pub struct Generation {
    app: Arc<App>,
    events: Receiver<Message>,
    choices: Vec<Choice>,
    open: usize,
    waiting: VecDeque<Output>,
    tick: Interval,
    is_overrun: Arc<AtomicBool>,
    arrived: Instant,
    limit: Duration,
    has_failed: bool,
    /// Answers that wait for the first token of the first answer to their prompt.
    followers: Vec<Follower>,
    _live: Live,
}

/// An answer that begins where another one's prompt has been computed.
struct Follower {
    /// The answer that is waited for.
    leader: usize,
    request: GenerateRequest,
    cancel: CancelToken,
    sink: Box<ChoiceSink>,
}

impl Generation {
    /// Hands the plan to the engine. There is a place for each answer.
    pub fn start(
        served: &Served,
        plan: &Plan,
        places: Vec<Place>,
        live: Live,
    ) -> Result<Self, ApiError> {
        let app = Arc::clone(live.app());
        let count = plan.prompts.len() * plan.answers;
        let (sender, events) = channel(WAITING_EVENTS * count.max(1));
        let mut generation = Self {
            app: Arc::clone(&app),
            events,
            choices: Vec::with_capacity(count),
            open: count,
            waiting: VecDeque::new(),
            tick: interval_at(tokio::time::Instant::now() + TICK, TICK),
            is_overrun: Arc::default(),
            arrived: plan.arrived,
            limit: plan.limit,
            has_failed: false,
            followers: Vec::new(),
            _live: live,
        };
        generation
            .tick
            .set_missed_tick_behavior(MissedTickBehavior::Delay);
        let eos: Vec<u32> = served.text.eos.ids().collect();
        let prompts = plan
            .prompts
            .iter()
            .flat_map(|prompt| (0..plan.answers).map(move |answer| (prompt, answer)));
        for (choice, ((prompt, answer), queued)) in prompts.zip(places).enumerate() {
            // Prompts of several answers are computed once, where there is a page to share.
            let is_shared = plan.answers > 1 && prompt.len() > PAGE_SIZE;
            let mut sampling = plan.sampling.clone();
            // The first answer is what the seed gives to a request for one.
            sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(answer as u64));
            let tokenizer = served.text.tokenizer.clone();
            let detokenizer = tokenizer.detokenizer(DetokenizerOptions {
                skip_control: true,
                start: plan.start,
            });
            let state = Choice::new(
                tokenizer,
                detokenizer,
                plan.stops.clone(),
                prompt.len(),
                plan.arrived,
            )
            .with_predict_limit(plan.predict_limit);
            let sink = ChoiceSink {
                watched: Arc::clone(&app.watched),
                sender: sender.clone(),
                is_overrun: Arc::clone(&generation.is_overrun),
                choice,
                arrived: plan.arrived,
                last_token: Cell::new(None),
                slot: Slot {
                    task: Some(app.next_task()),
                    prompt_tokens: prompt.len(),
                    max_tokens: plan.max_tokens,
                    sampling: Some(plan.sampling.clone()),
                    ..Slot::default()
                },
                place: Cell::new(None),
                _queued: queued,
            };
            let request = GenerateRequest {
                prompt: prompt.clone(),
                sampling,
                max_new_tokens: plan.max_tokens,
                eos: if plan.ignore_eos {
                    Vec::new()
                } else {
                    eos.clone()
                },
                namespace: plan.namespace.clone(),
                priority: plan.priority,
                deadline: Some(plan.arrived + plan.limit),
                shares_prompt: is_shared && answer == 0,
                // No route takes features.
                features: None,
            };
            let cancel = state.cancel.clone();
            let sink = Box::new(sink);
            generation.choices.push(state);
            if is_shared && answer > 0 {
                generation.followers.push(Follower {
                    leader: choice - answer,
                    request,
                    cancel,
                    sink,
                });
            } else {
                served.engine.generate_into(request, cancel, sink)?;
            }
        }
        Ok(generation)
    }

    /// When the request came.
    pub fn arrived(&self) -> Instant {
        self.arrived
    }

    /// Number of answers.
    pub fn len(&self) -> usize {
        self.choices.len()
    }

    /// Figures of an answer so far.
    pub fn choice(&self, index: usize) -> Option<&Choice> {
        self.choices.get(index)
    }

    /// The next report; none after the last end. After an error nothing follows.
    pub async fn next(&mut self) -> Option<Result<Output, ApiError>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`Generation::next`].
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Output, ApiError>>> {
        loop {
            if let Some(output) = self.waiting.pop_front() {
                return Poll::Ready(Some(Ok(output)));
            }
            if self.open == 0 || self.has_failed {
                return Poll::Ready(None);
            }
            if let Err(error) = self.app.check_running(self.arrived, self.limit) {
                return Poll::Ready(Some(Err(self.fail(error))));
            }
            match self.events.poll_recv(context) {
                Poll::Ready(Some(message)) => {
                    if let Err(error) = self.take(message) {
                        return Poll::Ready(Some(Err(self.fail(error))));
                    }
                }
                Poll::Ready(None) => {
                    let error = self.lost();
                    return Poll::Ready(Some(Err(self.fail(error))));
                }
                Poll::Pending => {
                    return self.tick.poll_tick(context).map(|_| Some(Ok(Output::Tick)));
                }
            }
        }
    }

    fn take(&mut self, message: Message) -> Result<(), ApiError> {
        let index = message.choice;
        if matches!(message.event, Event::Token { .. } | Event::Done { .. }) {
            self.start_followers(index)?;
        }
        let Some(choice) = self
            .choices
            .get_mut(index)
            .filter(|choice| !choice.is_over())
        else {
            // What was on its way when a stop string ended the answer.
            return Ok(());
        };
        match message.event {
            Event::Prefill { done, total } => {
                let processed = choice.prefill(done, total);
                self.waiting.push_back(Output::Prompt {
                    choice: index,
                    processed,
                });
            }
            Event::Token { id, logprobs } => {
                let (piece, end) = choice.token(id, logprobs, message.at);
                self.waiting.extend(piece.map(|piece| Output::Text {
                    choice: index,
                    piece,
                }));
                if let Some(end) = end {
                    self.finish(index, end);
                }
            }
            Event::Done {
                reason: FinishReason::Cancelled,
                ..
            } => return Err(self.lost()),
            Event::Done { reason, stats } => {
                let (piece, end) = choice.done(reason, stats);
                self.waiting.extend(piece.map(|piece| Output::Text {
                    choice: index,
                    piece,
                }));
                self.finish(index, end);
            }
            // The clock of the engine and the one here say the same; the text is the one clients know.
            Event::Failed(EngineError::DeadlineExceeded { .. }) => {
                return Err(ApiError::answer_timeout(self.limit));
            }
            Event::Failed(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// The prompt of `leader` is in the cache now.
    fn start_followers(&mut self, leader: usize) -> Result<(), ApiError> {
        if self.followers.is_empty() {
            return Ok(());
        }
        let served = self.app.served()?;
        let ready = self
            .followers
            .extract_if(.., |follower| follower.leader == leader);
        for follower in ready {
            let Follower {
                request,
                cancel,
                sink,
                ..
            } = follower;
            served.engine.generate_into(request, cancel, sink)?;
        }
        Ok(())
    }

    fn finish(&mut self, choice: usize, end: End) {
        self.open -= 1;
        let figures = &end.figures;
        self.app.watched.metrics.answered(Answered {
            prompt_tokens: figures.prompt_tokens.saturating_sub(figures.cached_tokens),
            cached_tokens: figures.cached_tokens,
            prompt: figures.prefill,
            predicted_tokens: figures.generated_tokens,
            predicted: figures.decode,
        });
        self.waiting.push_back(Output::End {
            choice,
            end: Box::new(end),
        });
        if self.open == 0 {
            self.app
                .watched
                .metrics
                .ended(Outcome::Completed, self.arrived);
        }
    }

    fn fail(&mut self, error: ApiError) -> ApiError {
        self.has_failed = true;
        self.app
            .watched
            .metrics
            .ended(Outcome::Failed, self.arrived);
        error
    }

    /// Why events stopped coming.
    fn lost(&self) -> ApiError {
        if self.is_overrun.load(Ordering::Acquire) {
            let message =
                format!("the client reads too slowly: {WAITING_EVENTS} tokens were waiting for it");
            return ApiError::new(Kind::Timeout, message).with_code("slow_reader");
        }
        self.app.engine_error()
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        for choice in &self.choices {
            choice.cancel.cancel();
        }
        if self.open > 0 && !self.has_failed {
            self.app
                .watched
                .metrics
                .ended(Outcome::Cancelled, self.arrived);
        }
    }
}
