//! A complete answer, and the objects about it that several dialects share.

use serde_json::{Map, Value, json};

use crate::engine::FinishReason;
use crate::sampling::{LogprobStage, LogprobsRequest};

use super::choice::{End, Figures, Piece, TokenLogprob};

/// A complete answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Ids of its tokens, those of a stop string left out.
    pub tokens: Vec<u32>,
    /// Log probabilities of them.
    pub logprobs: Vec<TokenLogprob>,
    /// Why it ended.
    pub reason: Option<FinishReason>,
    /// The stop string that ended it.
    pub stop: Option<String>,
    /// Figures.
    pub figures: Figures,
}

impl Answer {
    /// Adds text.
    pub fn add(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        self.tokens.extend(piece.tokens);
        self.logprobs.extend(piece.logprobs);
    }

    /// Notes the end.
    pub fn end(&mut self, end: End) {
        self.add(end.rest);
        self.reason = Some(end.reason);
        self.stop = end.stop;
        self.figures = end.figures;
    }
}

/// OpenAI's word for why an answer ended.
pub fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Eos | FinishReason::StopText | FinishReason::Cancelled => "stop",
        FinishReason::MaxTokens | FinishReason::ContextFull => "length",
    }
}

/// OpenAI's count of tokens. With several answers to a prompt the prompt counts once.
pub fn usage<'a>(figures: impl Iterator<Item = &'a Figures>, answers_per_prompt: usize) -> Value {
    let (mut prompt, mut cached, mut completion) = (0, 0, 0);
    for (index, figures) in figures.enumerate() {
        if index % answers_per_prompt.max(1) == 0 {
            prompt += figures.prompt_tokens;
            cached += figures.cached_tokens;
        }
        completion += figures.generated_tokens;
    }
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

/// llama-server's account of time.
pub fn timings(figures: &Figures) -> Value {
    let ms = |duration: std::time::Duration| duration.as_secs_f64() * 1000.0;
    let over = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    let computed = figures.prompt_tokens.saturating_sub(figures.cached_tokens);
    // The first token comes with the prompt.
    let steps = figures.generated_tokens.saturating_sub(1);
    let (prompt_ms, predicted_ms) = (ms(figures.prefill), ms(figures.decode));
    json!({
        "cache_n": figures.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": over(prompt_ms, computed as f64),
        "prompt_per_second": over(computed as f64 * 1000.0, prompt_ms),
        "predicted_n": figures.generated_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": over(predicted_ms, steps as f64),
        "predicted_per_second": over(steps as f64 * 1000.0, predicted_ms),
    })
}

/// llama-server's report of progress on a prompt.
pub fn progress(figures: &Figures, processed: usize, elapsed: std::time::Duration) -> Value {
    json!({
        "total": figures.prompt_tokens,
        "cache": figures.cached_tokens,
        "processed": processed,
        "time_ms": elapsed.as_millis() as u64,
    })
}

/// Which number is reported of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probability {
    /// Its log probability.
    Log,
    /// Its probability after the samplers.
    AfterSampling,
}

impl Probability {
    /// What a request asks for.
    pub fn of(request: LogprobsRequest) -> Self {
        match request.stage {
            LogprobStage::Model => Self::Log,
            LogprobStage::Drawn => Self::AfterSampling,
        }
    }
}

/// The list items of `logprobs.content` and `completion_probabilities`.
pub fn token_logprobs(list: &[TokenLogprob], form: Probability) -> Vec<Value> {
    list.iter()
        .map(|token| {
            let mut item = token_item(token.id, &token.bytes, token.logprob, form);
            let top = token
                .top
                .iter()
                .map(|(id, bytes, logprob)| Value::Object(token_item(*id, bytes, *logprob, form)));
            let name = match form {
                Probability::Log => "top_logprobs",
                Probability::AfterSampling => "top_probs",
            };
            item.insert(name.to_owned(), top.collect());
            Value::Object(item)
        })
        .collect()
}

fn token_item(id: u32, bytes: &[u8], logprob: f32, form: Probability) -> Map<String, Value> {
    let mut item = Map::new();
    item.insert("id".to_owned(), json!(id));
    item.insert("token".to_owned(), json!(String::from_utf8_lossy(bytes)));
    item.insert("bytes".to_owned(), json!(bytes));
    match form {
        // JSON has no infinity.
        Probability::Log => item.insert("logprob".to_owned(), json!(logprob.max(f32::MIN))),
        Probability::AfterSampling => item.insert("prob".to_owned(), json!(logprob.exp())),
    };
    item
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn figures() -> Figures {
        Figures {
            prompt_tokens: 40,
            cached_tokens: 32,
            generated_tokens: 5,
            prefill: Duration::from_millis(80),
            decode: Duration::from_millis(200),
            has_new_line: false,
        }
    }

    #[test]
    fn the_first_token_belongs_to_the_prompt() {
        let timings = timings(&figures());
        let figure = |name: &str| timings[name].as_f64().unwrap();
        assert_eq!(
            [
                figure("cache_n"),
                figure("prompt_n"),
                figure("prompt_per_second")
            ],
            [32.0, 8.0, 100.0]
        );
        assert_eq!(
            [
                figure("predicted_n"),
                figure("predicted_per_token_ms"),
                figure("predicted_per_second")
            ],
            [5.0, 50.0, 20.0]
        );
        assert_eq!(
            super::timings(&Figures::default())["predicted_per_second"],
            0.0
        );
    }

    #[test]
    fn a_prompt_with_two_answers_counts_once() {
        let all = [figures(), figures(), figures(), figures()];
        insta::assert_snapshot!(
            usage(all.iter(), 2).to_string(),
            @r#"{"prompt_tokens":80,"completion_tokens":20,"total_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}"#
        );
    }

    #[test]
    fn probabilities_have_the_names_of_their_kind() {
        let token = TokenLogprob {
            id: 7,
            bytes: vec![0xe2],
            logprob: 0.0,
            top: vec![(8, b"x".to_vec(), f32::NEG_INFINITY)],
        };
        let json =
            |form| Value::Array(token_logprobs(std::slice::from_ref(&token), form)).to_string();
        assert!(
            json(Probability::AfterSampling).contains(
                r#""prob":1.0,"top_probs":[{"id":8,"token":"x","bytes":[120],"prob":0.0}]"#
            )
        );
        assert!(
            json(Probability::Log)
                .contains(r#""token":"�","bytes":[226],"logprob":0.0,"top_logprobs":[{"id":8"#)
        );
    }
}
