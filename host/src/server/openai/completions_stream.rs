//! Chunks of a streamed completion.

use std::time::Instant;

use serde_json::{Value, json};

use super::super::answer::{self, finish_reason, timings};
use super::super::ask::Settings;
use super::super::choice::{Figures, TokenLogprob};
use super::super::generation::{Generation, Output};
use super::super::sse::{Encoder, Events};
use super::completions::legacy_logprobs;
use super::{Head, with};

/// Writes chunks.
pub struct CompletionStream {
    head: Head,
    answers: usize,
    wants_logprobs: bool,
    timings_per_token: bool,
    return_progress: bool,
    includes_usage: bool,
    /// Prompts that come before their answers.
    echoed: Vec<String>,
    arrived: Instant,
    /// Characters of each answer so far.
    offsets: Vec<usize>,
    figures: Vec<(usize, Figures)>,
}

impl CompletionStream {
    /// For a request with these settings.
    pub fn new(
        head: Head,
        settings: &Settings,
        includes_usage: bool,
        echoed: Vec<String>,
        arrived: Instant,
    ) -> Self {
        Self {
            head,
            answers: settings.answers,
            wants_logprobs: settings.sampling.logprobs.is_some(),
            timings_per_token: settings.timings_per_token,
            return_progress: settings.return_progress,
            includes_usage,
            echoed,
            arrived,
            offsets: Vec::new(),
            figures: Vec::new(),
        }
    }

    fn chunk(&self, choices: Value) -> Value {
        let chunk = self.head.object("text_completion", choices);
        match self.includes_usage {
            true => with(chunk, "usage", Value::Null),
            false => chunk,
        }
    }

    fn choice(
        &mut self,
        index: usize,
        text: &str,
        logprobs: &[TokenLogprob],
        finish_reason: Option<&str>,
    ) -> Value {
        if self.offsets.len() <= index {
            self.offsets.resize(index + 1, 0);
        }
        let logprobs = match self.offsets.get_mut(index) {
            Some(offset) if self.wants_logprobs && !logprobs.is_empty() => {
                Some(legacy_logprobs(logprobs, offset))
            }
            _ => None,
        };
        self.chunk(json!([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}]))
    }
}

impl Encoder for CompletionStream {
    fn begin(&mut self, events: &mut Events) {
        for (prompt, text) in std::mem::take(&mut self.echoed)
            .into_iter()
            .enumerate()
            .filter(|(_, text)| !text.is_empty())
        {
            for answer in 0..self.answers {
                events.json(&self.choice(prompt * self.answers + answer, &text, &[], None));
            }
        }
    }

    fn output(&mut self, output: Output, generation: &Generation, events: &mut Events) {
        match output {
            Output::Text { choice, piece } => {
                let chunk = self.choice(choice, &piece.text, &piece.logprobs, None);
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
                    "",
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
