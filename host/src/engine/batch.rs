//! Continuous batching: requests join and leave between steps, prompts and answers share each step.

use std::time::Instant;

use super::active::Active;
use super::encoder;
use super::error::EngineError;
use super::figures::EngineFigures;
use super::flight::{Flight, FlightRow};
use super::pace::Pace;
use super::pack::{Span, Wants};
use super::queue::Queue;
use super::request::FinishReason;
use super::runner::{EncodeError, PAGE_SIZE, Runner, Spilled};
use super::schedule::{AskedBudget, Budget, Demand, Need, plan};

/// Bounds of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Most requests in a step.
    pub parallel: usize,
    /// Rows of a step.
    pub budget: AskedBudget,
}

impl Default for BatchLimits {
    fn default() -> Self {
        Self {
            parallel: 1,
            budget: AskedBudget::default(),
        }
    }
}

/// Running and waiting requests of one model.
pub struct Batch {
    runner: Runner,
    /// Most requests in a step.
    parallel: usize,
    budget: Budget,
    running: Vec<Active>,
    waiting: Queue<Active>,
    /// The step whose tokens are not read yet.
    flight: Option<Flight>,
    /// Requests so far.
    numbered: u64,
    pace: Pace,
    /// When the last step was over.
    over_at: Option<Instant>,
    /// Somebody stepped back for lack of pages and none was given back since.
    is_short_of_pages: bool,
    /// Counters alone; what is held is read when it is asked for.
    counters: EngineFigures,
}

impl Batch {
    /// An empty batch.
    pub fn new(runner: Runner, parallel: usize, budget: Budget) -> Self {
        Self {
            runner,
            parallel,
            budget,
            running: Vec::new(),
            waiting: Queue::default(),
            flight: None,
            numbered: 0,
            pace: Pace::default(),
            over_at: None,
            is_short_of_pages: false,
            counters: EngineFigures::default(),
        }
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.flight.is_none()
    }

    /// Requests running and waiting.
    pub fn load(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// What was done so far and is held now.
    pub fn figures(&self) -> EngineFigures {
        let (pages_in_use, pages_total) = self.runner.pages();
        let (prefix, prefix_pages) = self.runner.prefix();
        let kv_bytes = self.runner.kv_bytes();
        EngineFigures {
            pages_in_use,
            pages_total,
            page_tokens: PAGE_SIZE,
            encoder_pages_in_use: self.runner.cross_pages_in_use(),
            kv_bytes,
            prefix_pages,
            prefix,
            prefix_max_pages: self.runner.prefix_limits().max_pages.min(pages_total),
            disk: self.runner.disk_stats(),
            live_tensors: self.runner.live_tensors(),
            is_poisoned: self.runner.is_poisoned(),
            ..self.counters
        }
    }

    /// Empties the prefix cache.
    pub fn clear_prefix(&mut self) {
        self.runner.clear_prefix();
    }

    /// Writes a page of the prefix cache to the disk, if one waits for that.
    pub fn spill(&mut self) -> Spilled {
        self.runner.spill()
    }

    /// The model and its caches.
    pub fn runner(&self) -> &Runner {
        &self.runner
    }

    /// Takes a request, or refuses it at once when it could never run.
    pub fn add(&mut self, mut active: Active) {
        let (prompt_tokens, context_tokens) =
            (active.request.prompt.len(), self.runner.context_tokens());
        let problem = if prompt_tokens == 0 {
            Some(EngineError::EmptyPrompt)
        } else if prompt_tokens > context_tokens {
            Some(EngineError::PromptTooLong {
                prompt_tokens,
                context_tokens,
            })
        } else {
            let features = active.request.features.as_ref();
            let checked = self.runner.check_tokens(&active.request.prompt);
            checked
                .and_then(|()| encoder::check(self.runner.desc(), features))
                .err()
        };
        match problem {
            Some(error) => active.fail(error),
            None => {
                let rank = active.rank();
                self.numbered += 1;
                active.id = self.numbered;
                active.context_tokens = context_tokens;
                self.waiting.push(active, rank);
            }
        }
    }

    /// Submits a step and takes what the one before it gave. Where the tokens of a step are chosen on the
    /// device, it stays in flight until the next one was submitted.
    pub fn step(&mut self) {
        self.drop_cancelled();
        self.admit();
        let before = self.flight.take();
        let submitted = self.submit(before.as_ref());
        let refused = match submitted {
            Ok(flight) => {
                self.flight = flight;
                None
            }
            Err(error) => Some(error),
        };
        let failed = before.and_then(|before| self.complete(before).err());
        if let Some(error) = failed.or(refused) {
            return self.fail_all(error);
        }
        let stays =
            self.runner.looks_ahead() && self.flight.as_ref().is_some_and(Flight::is_followable);
        if !stays
            && let Some(flight) = self.flight.take()
            && let Err(error) = self.complete(flight)
        {
            return self.fail_all(error);
        }
        if self.is_idle() {
            self.runner.rest();
        }
    }

    /// Submits the next step; none when there is nothing to run, or nothing without the tokens of the step
    /// `before`.
    fn submit(&mut self, before: Option<&Flight>) -> Result<Option<Flight>, EngineError> {
        let Some(rows) = self.plan(before.is_some()) else {
            return Ok(None);
        };
        if rows.iter().all(|rows| *rows == 0) {
            return Ok(None);
        }
        let mut spans = Vec::with_capacity(rows.len());
        for (active, rows) in self
            .running
            .iter()
            .zip(&rows)
            .filter(|(_, rows)| **rows > 0)
        {
            let follows = match (active.follows(), before) {
                (false, _) => None,
                (true, before) => {
                    Some(before.and_then(|b| b.token_of(active.id)).ok_or_else(|| {
                        EngineError::Internal {
                            message: "a request waits for a token that no step gives".to_owned(),
                        }
                    })?)
                }
            };
            let draw = active
                .row_draw()
                .filter(|draw| self.runner.takes_draw(draw));
            spans.push(Span {
                sequence: &active.sequence,
                start: active.sequence.len(),
                tokens: match follows {
                    Some(_) => &[0],
                    None => active.todo().get(..*rows).unwrap_or_default(),
                },
                wants: match draw {
                    _ if !active.is_complete_with(*rows) => Wants::Nothing,
                    Some(draw) => Wants::Token(draw),
                    None => Wants::Logits,
                },
                follows,
            });
        }
        let is_any = |wanted: fn(&Wants) -> bool| spans.iter().any(|span| wanted(&span.wants));
        // Something must be there to wait for, or steps would pile up.
        let may_stay = self.runner.looks_ahead()
            && is_any(|wants| matches!(wants, Wants::Token(_)))
            && !is_any(|wants| matches!(wants, Wants::Logits));
        let wants: Vec<bool> = spans
            .iter()
            .map(|span| span.wants != Wants::Nothing)
            .collect();
        let began_at = Instant::now();
        let step = self
            .runner
            .submit(&spans, before.map(|before| &before.step), !may_stay)?;
        drop(spans);
        let [answer_rows, prompt_rows] = self.count(&rows);
        let mut flight = Flight {
            step,
            began_at,
            answer_rows,
            prompt_rows,
            rows: Vec::with_capacity(wants.len()),
        };
        let running = self.running.iter_mut().zip(rows);
        for ((active, rows), wants) in running.filter(|(_, rows)| *rows > 0).zip(wants) {
            flight.rows.push(FlightRow {
                id: active.id,
                wants,
                progress: active.submitted(rows, wants),
            });
        }
        Ok(Some(flight))
    }

    /// Waits for a step and hands out what it gave. Requests that have left meanwhile get nothing.
    fn complete(&mut self, flight: Flight) -> Result<(), EngineError> {
        let mut outcomes = self.runner.finish(flight.step)?.into_iter();
        // A step in flight begins when the one before it is over.
        let now = Instant::now();
        let began_at = self
            .over_at
            .map_or(flight.began_at, |over| over.max(flight.began_at));
        self.pace
            .note(flight.answer_rows, flight.prompt_rows, now - began_at);
        self.over_at = Some(now);
        self.counters.failed_in_a_row = 0;
        for row in flight.rows {
            let outcome = if row.wants { outcomes.next() } else { None };
            let found = self.running.iter().position(|active| active.id == row.id);
            let Some((index, active)) =
                found.and_then(|index| Some((index, self.running.get_mut(index)?)))
            else {
                continue;
            };
            if let Some(progress) = row.progress {
                active.report(progress);
            }
            let Some(outcome) = outcome else { continue };
            if active.request.shares_prompt && row.progress.is_some() {
                let namespace = active.cache_namespace().to_owned();
                self.runner.share(&namespace, &mut active.sequence);
            }
            let is_followed = active.is_followed();
            match active.take(outcome) {
                Ok(None) => {}
                Ok(Some(reason)) => {
                    if is_followed {
                        active.sequence.overrun();
                    }
                    self.end(index, reason);
                }
                Err(error) => {
                    let mut active = self.running.remove(index);
                    self.runner.forget(&mut active.sequence);
                    self.counters.ended += 1;
                    self.is_short_of_pages = false;
                    active.fail(error);
                }
            }
        }
        Ok(())
    }

    /// Counts a step. Gives its rows of answers and of prompts.
    fn count(&mut self, rows: &[usize]) -> [usize; 2] {
        let (mut prefill, mut decode, mut busy) = (0u64, 0u64, 0u64);
        for (active, rows) in self.running.iter().zip(rows).filter(|(_, rows)| **rows > 0) {
            busy += 1;
            match active.need() {
                Need::Decode => decode += 1,
                Need::Prefill(_) => prefill += *rows as u64,
            }
            let tokens = (active.sequence.len() + rows) as u64;
            self.counters.longest_tokens = self.counters.longest_tokens.max(tokens);
        }
        self.counters.steps += 1;
        self.counters.mixed_steps += u64::from(prefill > 0 && decode > 0);
        self.counters.prefill_rows += prefill;
        self.counters.decode_rows += decode;
        self.counters.busy_sequences += busy;
        [decode as usize, prefill as usize]
    }

    /// Ends what nobody wants any more, and what has had its time, whether it runs or waits.
    fn drop_cancelled(&mut self) {
        let now = Instant::now();
        let is_over =
            |active: &Active| active.cancel.is_cancelled() || active.overdue(now).is_some();
        for active in self.waiting.take_if(is_over) {
            self.counters.expired += u64::from(!active.cancel.is_cancelled());
            // One that stepped back has begun.
            self.counters.ended += u64::from(active.has_begun());
            match active
                .overdue(now)
                .filter(|_| !active.cancel.is_cancelled())
            {
                Some(error) => active.fail(error),
                None => active.finish(FinishReason::Cancelled),
            }
        }
        let mut index = 0;
        while let Some(active) = self.running.get(index) {
            if active.cancel.is_cancelled() {
                self.end(index, FinishReason::Cancelled);
            } else if let Some(error) = active.overdue(now) {
                self.counters.expired += 1;
                let active = self.leave(index);
                active.fail(error);
            } else {
                index += 1;
            }
        }
    }

    fn admit(&mut self) {
        while self.running.len() < self.parallel && self.may_admit() {
            let Some(mut active) = self.waiting.pop() else {
                break;
            };
            let sequence = self.runner.begin(active.cache_namespace(), active.tokens());
            self.counters.started += u64::from(!active.has_begun());
            active.begin_with(sequence);
            if let Some(active) = self.encode(active) {
                self.running.push(active);
            }
        }
    }

    /// Runs the encoder of a request that has one. None when that failed, which the request was told.
    fn encode(&mut self, mut active: Active) -> Option<Active> {
        let Some(features) = active.request.features.clone() else {
            return Some(active);
        };
        let error = match self.runner.encode(&mut active.sequence, &features) {
            Ok(()) => return Some(active),
            Err(error) => error,
        };
        self.runner.forget(&mut active.sequence);
        match error {
            EncodeError::Own(error) => {
                self.counters.failed_steps += 1;
                self.counters.failed_in_a_row += 1;
                self.counters.ended += 1;
                active.fail(error);
            }
            EncodeError::Everybody(error) => {
                self.running.push(active);
                self.fail_all(error);
            }
        }
        None
    }

    /// While pages are short, only one that is more urgent than somebody who runs: it will take their place.
    fn may_admit(&self) -> bool {
        let least = self
            .running
            .iter()
            .map(|active| active.request.priority)
            .max();
        match (least, self.waiting.next_urgency()) {
            (_, None) => false,
            (Some(least), Some(next)) if self.is_short_of_pages => next < least,
            _ => true,
        }
    }

    /// Rows of every running request, with pages reserved for them. Where pages run out, the least
    /// urgent requests, the youngest before others, step back and are computed again later; a request
    /// that is alone and finds no room fails. Nobody steps back beside a step in flight: none then.
    fn plan(&mut self, is_in_flight: bool) -> Option<Vec<usize>> {
        'again: loop {
            let demands: Vec<_> = self.running.iter().map(Active::demand).collect();
            let mut rows = plan(&demands, self.budget(&demands));
            for index in 0..rows.len() {
                let (Some(active), Some(rows)) = (self.running.get_mut(index), rows.get_mut(index))
                else {
                    break;
                };
                if *rows == 0 {
                    continue;
                }
                *rows = self.runner.cut(&active.sequence, *rows);
                let Err(error) = self.runner.reserve(&mut active.sequence, *rows) else {
                    continue;
                };
                if is_in_flight {
                    return None;
                }
                if self.running.len() > 1 {
                    self.preempt();
                } else if let Some(mut active) = self.running.pop() {
                    self.runner.forget(&mut active.sequence);
                    self.counters.ended += 1;
                    active.fail(error);
                }
                continue 'again;
            }
            return Some(rows);
        }
    }

    /// Bounds of the next step: fewer rows of prompts where answers would wait for long.
    fn budget(&self, demands: &[Demand]) -> Budget {
        let is_answer = |demand: &&Demand| demand.need == Need::Decode;
        let answers = demands.iter().filter(is_answer).count();
        let budget = self.budget;
        Budget {
            prefill_rows_beside_decode: self
                .pace
                .prompt_rows(answers, budget.prefill_rows_beside_decode),
            ..budget
        }
    }

    fn preempt(&mut self) {
        let victim = self
            .running
            .iter()
            .enumerate()
            .max_by_key(|(_, active)| (active.request.priority, std::cmp::Reverse(active.age())))
            .map(|(index, _)| index);
        let Some(index) = victim else { return };
        self.counters.preemptions += 1;
        self.is_short_of_pages = true;
        let mut active = self.running.remove(index);
        let sequence = std::mem::take(&mut active.sequence);
        // Its pages stay in the cache as long as there is room, so that little is computed twice.
        self.runner.end(active.cache_namespace(), sequence);
        let rank = active.rank();
        self.waiting.put_back(active, rank);
    }

    fn end(&mut self, index: usize, reason: FinishReason) {
        let active = self.leave(index);
        active.finish(reason);
    }

    /// Takes a request out of the batch; what it has computed stays in the cache.
    fn leave(&mut self, index: usize) -> Active {
        let mut active = self.running.remove(index);
        if active.is_kept() {
            let sequence = std::mem::take(&mut active.sequence);
            self.runner.end(active.cache_namespace(), sequence);
        } else {
            self.runner.forget(&mut active.sequence);
        }
        self.counters.ended += 1;
        self.is_short_of_pages = false;
        active
    }

    /// After a failed step nothing in the pool is to be trusted: everyone in the step is told, the
    /// waiting ones are not touched.
    pub fn fail_all(&mut self, error: EngineError) {
        let message = error.to_string();
        let is_exhausted = error.is_exhausted();
        let mut first = Some(error);
        self.flight = None;
        self.counters.failed_steps += 1;
        self.counters.failed_in_a_row += 1;
        self.counters.ended += self.running.len() as u64;
        for mut active in std::mem::take(&mut self.running) {
            self.runner.forget(&mut active.sequence);
            let own = first.take().unwrap_or_else(|| EngineError::StepFailed {
                message: message.clone(),
                is_exhausted,
            });
            active.fail(own);
        }
        self.is_short_of_pages = false;
        self.runner.reset();
    }

    /// Ends everything, because the engine stops.
    pub fn stop(&mut self, reason: &str) {
        if let Some(flight) = self.flight.take() {
            // Its tokens come too late for anybody, but the device has to be done with it.
            drop(self.runner.finish(flight.step));
        }
        for active in self.running.drain(..).chain(self.waiting.drain()) {
            active.fail(EngineError::Stopped {
                reason: reason.to_owned(),
            });
        }
    }
}
