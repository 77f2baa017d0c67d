//! Chunks of a streamed native completion. The last object of each answer ends it; there is no `[DONE]`.

use std::time::Instant;

use serde_json::{Map, Value, json};

use super::super::answer::{self, Answer, timings, token_logprobs};
use super::super::choice::{Figures, TokenLogprob};
use super::super::generation::{Generation, Output};
use super::super::sse::{Encoder, Events};
use super::completion::Shape;

/// Writes chunks.
pub struct NativeStream {
    shape: Shape,
    arrived: Instant,
}

impl NativeStream {
    /// For a response of this shape.
    pub fn new(shape: Shape, arrived: Instant) -> Self {
        Self { shape, arrived }
    }

    fn chunk(
        &self,
        index: usize,
        text: &str,
        tokens: &[u32],
        figures: &Figures,
    ) -> Map<String, Value> {
        let object = json!({
            "index": index,
            "content": text,
            "tokens": tokens,
            "stop": false,
            "id_slot": -1,
            "tokens_predicted": figures.generated_tokens,
            "tokens_evaluated": figures.prompt_tokens,
        });
        match object {
            Value::Object(mut map) => {
                if self.shape.settings.timings_per_token {
                    map.insert("timings".to_owned(), timings(figures));
                }
                map
            }
            _ => Map::new(),
        }
    }

    fn with_probabilities(&self, mut chunk: Map<String, Value>, list: &[TokenLogprob]) -> Value {
        if let Some(form) = self.shape.probability().filter(|_| !list.is_empty()) {
            chunk.insert(
                "completion_probabilities".to_owned(),
                json!(token_logprobs(list, form)),
            );
        }
        Value::Object(chunk)
    }
}

impl Encoder for NativeStream {
    fn begin(&mut self, _events: &mut Events) {}

    fn output(&mut self, output: Output, generation: &Generation, events: &mut Events) {
        match output {
            Output::Text { choice, piece } => {
                let Some(state) = generation.choice(choice) else {
                    return;
                };
                let chunk = self.chunk(choice, &piece.text, &piece.tokens, state.figures());
                events.json(&self.with_probabilities(chunk, &piece.logprobs));
            }
            Output::Prompt { choice, processed } => {
                let Some(state) = generation
                    .choice(choice)
                    .filter(|_| self.shape.settings.return_progress)
                else {
                    return;
                };
                let mut chunk = self.chunk(choice, "", &[], state.figures());
                let progress = answer::progress(state.figures(), processed, self.arrived.elapsed());
                chunk.insert("prompt_progress".to_owned(), progress);
                events.json(&Value::Object(chunk));
            }
            Output::End { choice, end } => {
                let mut answer = Answer::default();
                answer.end(*end);
                let mut last = self.shape.last(choice, &answer);
                if let Some(form) = self
                    .shape
                    .probability()
                    .filter(|_| !answer.logprobs.is_empty())
                {
                    last.insert(
                        "completion_probabilities".to_owned(),
                        json!(token_logprobs(&answer.logprobs, form)),
                    );
                }
                events.json(&self.shape.chosen(last));
            }
            Output::Tick => {}
        }
    }

    fn end(&mut self, _events: &mut Events) {}
}
