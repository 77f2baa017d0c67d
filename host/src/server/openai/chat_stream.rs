//! Chunks of a streamed chat answer.

use std::time::Instant;

use serde_json::{Value, json};

use super::super::answer::{self, Probability, finish_reason, timings, token_logprobs};
use super::super::ask::Settings;
use super::super::choice::{Figures, TokenLogprob};
use super::super::generation::{Generation, Output};
use super::super::sse::{Encoder, Events};
use super::{Head, with};

/// Writes chunks.
pub struct ChatStream {
    head: Head,
    answers: usize,
    /// The form of log probabilities, where they are wanted.
    form: Option<Probability>,
    timings_per_token: bool,
    return_progress: bool,
    includes_usage: bool,
    arrived: Instant,
    figures: Vec<(usize, Figures)>,
}

impl ChatStream {
    /// For a request with these settings.
    pub fn new(head: Head, settings: &Settings, includes_usage: bool, arrived: Instant) -> Self {
        Self {
            head,
            answers: settings.answers,
            form: settings.sampling.logprobs.map(Probability::of),
            timings_per_token: settings.timings_per_token,
            return_progress: settings.return_progress,
            includes_usage,
            arrived,
            figures: Vec::new(),
        }
    }

    fn chunk(&self, choices: Value) -> Value {
        let chunk = self.head.object("chat.completion.chunk", choices);
        match self.includes_usage {
            true => with(chunk, "usage", Value::Null),
            false => chunk,
        }
    }

    fn choice(
        &self,
        index: usize,
        delta: Value,
        logprobs: &[TokenLogprob],
        finish_reason: Option<&str>,
    ) -> Value {
        let form = self.form.filter(|_| !logprobs.is_empty());
        let logprobs =
            form.map(|form| json!({"content": token_logprobs(logprobs, form), "refusal": null}));
        self.chunk(json!([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}]))
    }
}

impl Encoder for ChatStream {
    fn begin(&mut self, events: &mut Events) {
        for index in 0..self.answers {
            events.json(&self.choice(
                index,
                json!({"role": "assistant", "content": ""}),
                &[],
                None,
            ));
        }
    }

    fn output(&mut self, output: Output, generation: &Generation, events: &mut Events) {
        match output {
            Output::Text { choice, piece } => {
                let chunk = self.choice(
                    choice,
                    json!({"content": piece.text}),
                    &piece.logprobs,
                    None,
                );
                let figures = generation
                    .choice(choice)
                    .filter(|_| self.timings_per_token)
                    .map(|choice| choice.figures());
                events.json(&match figures {
                    Some(figures) => with(chunk, "timings", timings(figures)),
                    None => chunk,
                });
            }
            Output::Prompt { choice, processed } => {
                if let Some(choice) = generation.choice(choice).filter(|_| self.return_progress) {
                    let progress =
                        answer::progress(choice.figures(), processed, self.arrived.elapsed());
                    events.json(&with(self.chunk(json!([])), "prompt_progress", progress));
                }
            }
            Output::End { choice, end } => {
                let chunk = self.choice(
                    choice,
                    json!({}),
                    &end.rest.logprobs,
                    Some(finish_reason(end.reason)),
                );
                events.json(&with(chunk, "timings", timings(&end.figures)));
                self.figures.push((choice, end.figures));
            }
            Output::Tick => {}
        }
    }

    fn end(&mut self, events: &mut Events) {
        if self.includes_usage {
            self.figures.sort_by_key(|(choice, _)| *choice);
            let usage = answer::usage(
                self.figures.iter().map(|(_, figures)| figures),
                self.answers,
            );
            events.json(&with(self.chunk(json!([])), "usage", usage));
        }
        events.done();
    }
}
