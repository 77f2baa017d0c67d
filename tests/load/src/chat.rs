//! The second turn of a chat beside its first: what a server gains from having seen the history before.

use std::time::Instant;

use serde_json::{Value, json};

use crate::error::LoadError;
use crate::http::{Target, beginning};
use crate::prompts::{text, text_of_tokens};
use crate::random::Random;
use crate::stats::median;

/// What is measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The server.
    pub target: Target,
    /// About how many tokens the first message has.
    pub history_tokens: usize,
    /// Length of both answers.
    pub max_tokens: usize,
    /// Conversations, one after another, each with a history of its own.
    pub rounds: usize,
    /// Makes the texts.
    pub seed: u64,
}

/// One turn.
#[derive(Debug, Clone, PartialEq)]
struct Turn {
    first_ms: f64,
    answer: String,
}

fn turn(target: &Target, messages: &Value, max_tokens: usize) -> Result<Turn, LoadError> {
    let body = json!({
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
    })
    .to_string();
    let began = Instant::now();
    let mut exchange = target
        .send("POST", "/v1/chat/completions", body.as_bytes())?
        .success()?;
    let (mut first_ms, mut answer) = (None, String::new());
    while let Some(data) = exchange.event()? {
        if data == "[DONE]" {
            break;
        }
        let event: Value = serde_json::from_str(&data).map_err(|_| LoadError::Protocol {
            expected: "an event in JSON",
            found: beginning(&data),
        })?;
        if let Some(error) = event.get("error") {
            return Err(LoadError::Failed {
                message: beginning(&error.to_string()),
            });
        }
        let delta = event["choices"][0]["delta"]["content"].as_str();
        if let Some(delta) = delta.filter(|delta| !delta.is_empty()) {
            first_ms.get_or_insert_with(|| began.elapsed().as_secs_f64() * 1e3);
            answer.push_str(delta);
        }
    }
    match first_ms {
        Some(first_ms) => Ok(Turn { first_ms, answer }),
        None => Err(LoadError::Cut { tokens: 0 }),
    }
}

/// Runs the conversations; gives times to the first token of both turns, medians and their ratio.
pub fn run(options: &Options) -> Result<Value, LoadError> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for round in 0..options.rounds.max(1) {
        let mut random = Random::new(options.seed, 1_000_000 + round as u64);
        let history = text_of_tokens(&options.target, &mut random, options.history_tokens)?;
        let mut messages = vec![json!({"role": "user", "content": history})];
        let one = turn(&options.target, &json!(messages), options.max_tokens)?;
        messages.push(json!({"role": "assistant", "content": one.answer}));
        messages.push(json!({"role": "user", "content": text(&mut random, 12)}));
        let two = turn(&options.target, &json!(messages), options.max_tokens)?;
        first.push(one.first_ms);
        second.push(two.first_ms);
    }
    let (one, two) = (median(&first), median(&second));
    let ratio = one.zip(two).map(|(one, two)| one / two.max(1e-9));
    Ok(json!({
        "history_tokens": options.history_tokens,
        "rounds": options.rounds,
        "turn_one_ttft_ms": first,
        "turn_two_ttft_ms": second,
        "turn_one_median_ms": one,
        "turn_two_median_ms": two,
        "ratio": ratio,
    }))
}
