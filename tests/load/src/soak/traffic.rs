//! Mixed traffic: what people, scripts and broken programs send, each with the answer that it must have.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;

use super::Options;
use crate::error::LoadError;
use crate::http::Target;
use crate::load::ask;
use crate::prompts::{prompt, text};
use crate::random::Random;

/// One kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A short prompt, streamed to its end.
    ShortStream,
    /// A long prompt, streamed to its end.
    LongStream,
    /// A chat that is answered whole.
    Whole,
    /// Two answers to one prompt.
    Two,
    /// A stream that is left in the middle.
    Leave,
    /// A request whose sender is gone before the answer.
    Vanish,
    /// A stream that is read with pauses.
    Slow,
    /// A body that is no JSON.
    BadJson,
    /// A field that does not exist.
    UnknownField,
    /// A prompt longer than any context.
    TooLong,
    /// A route that is not there.
    Embeddings,
    /// Pages that watchers read.
    Watch,
}

impl Kind {
    /// All of them. Those that make the model work come more often.
    pub const MIX: [Kind; 16] = [
        Kind::ShortStream,
        Kind::ShortStream,
        Kind::ShortStream,
        Kind::LongStream,
        Kind::Whole,
        Kind::Whole,
        Kind::Two,
        Kind::Leave,
        Kind::Leave,
        Kind::Vanish,
        Kind::Slow,
        Kind::BadJson,
        Kind::UnknownField,
        Kind::TooLong,
        Kind::Embeddings,
        Kind::Watch,
    ];
}

/// Requests by kind, and those that were not answered as they must be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many of each kind.
    pub sent: BTreeMap<Kind, u64>,
    /// Full queues: an answer that is allowed.
    pub refused: u64,
    /// Wrong answers by their text.
    pub wrong: BTreeMap<String, u64>,
}

impl Tally {
    /// Adds another's counts.
    pub fn add(&mut self, other: Tally) {
        for (kind, count) in other.sent {
            *self.sent.entry(kind).or_insert(0) += count;
        }
        for (text, count) in other.wrong {
            *self.wrong.entry(text).or_insert(0) += count;
        }
        self.refused += other.refused;
    }

    fn count(&mut self, kind: Kind, outcome: Result<(), LoadError>) {
        *self.sent.entry(kind).or_insert(0) += 1;
        match outcome {
            Ok(()) => {}
            Err(LoadError::Status { status: 503, .. }) => self.refused += 1,
            Err(error) => {
                *self.wrong.entry(format!("{kind:?}: {error}")).or_insert(0) += 1;
            }
        }
    }

    /// Requests in all.
    pub fn total(&self) -> u64 {
        self.sent.values().sum()
    }
}

/// Sends until it is over.
pub fn client(options: &Options, client: u64, is_over: &AtomicBool) -> Tally {
    let mut random = Random::new(options.seed, client);
    let mut tally = Tally::default();
    while !is_over.load(Ordering::Relaxed) {
        let index = random.below(Kind::MIX.len());
        let kind = Kind::MIX.get(index).copied().unwrap_or(Kind::Watch);
        tally.count(kind, send(options, kind, &mut random));
    }
    tally
}

/// One request of every kind.
pub fn each_once(options: &Options) -> Tally {
    let mut random = Random::new(options.seed, u64::MAX);
    let mut tally = Tally::default();
    for kind in Kind::MIX {
        if !tally.sent.contains_key(&kind) {
            tally.count(kind, send(options, kind, &mut random));
        }
    }
    tally
}

/// The shortest answer there is.
pub fn one_token(target: &Target) -> Result<(), LoadError> {
    ask(target, &[1], 1).map(|_| ())
}

fn send(options: &Options, kind: Kind, random: &mut Random) -> Result<(), LoadError> {
    let target = &options.target;
    let tokens = 1 + random.below(24);
    match kind {
        Kind::ShortStream => {
            let count = 4 + random.below(60);
            complete(
                ask(target, &prompt(target, random, count)?, tokens)?,
                tokens,
            )
        }
        Kind::LongStream => {
            let count = options.long_tokens / 2 + random.below(options.long_tokens / 2);
            complete(
                ask(target, &prompt(target, random, count)?, tokens)?,
                tokens,
            )
        }
        Kind::Whole => {
            let question = text(random, 8);
            let body =
                json!({"messages": [{"role": "user", "content": question}], "max_tokens": tokens});
            let answer = target.post("/v1/chat/completions", &body)?;
            expect(
                answer["choices"][0]["finish_reason"].is_string(),
                "an answer",
                &answer,
            )
        }
        Kind::Two => {
            let body = json!({"prompt": text(random, 8), "n": 2, "max_tokens": tokens});
            let answer = target.post("/v1/completions", &body)?;
            let count = answer["choices"].as_array().map_or(0, Vec::len);
            expect(count == 2, "two answers", &answer)
        }
        Kind::Leave => leave(target, random, 1 + tokens / 3),
        Kind::Vanish => {
            let body = stream_body(&text(random, 20), 64);
            target.send_and_leave("/completion", body.as_bytes())
        }
        Kind::Slow => slow(target, random),
        Kind::BadJson => refused(target, "/v1/chat/completions", "{\"messages\": [", 400),
        Kind::UnknownField => {
            let body = json!({"messages": [], "colour": "red"}).to_string();
            refused(target, "/v1/chat/completions", &body, 400)
        }
        Kind::TooLong => {
            let body = json!({"prompt": vec![1; 200_000]}).to_string();
            refused(target, "/completion", &body, 400)
        }
        Kind::Embeddings => {
            let body = json!({"input": "x"}).to_string();
            refused(target, "/v1/embeddings", &body, 501)
        }
        Kind::Watch => {
            target.get("/slots")?;
            target.get("/props")?;
            target.get("/v1/models").map(|_| ())
        }
    }
}

fn complete(answer: crate::load::Answer, tokens: usize) -> Result<(), LoadError> {
    if answer.tokens == tokens {
        return Ok(());
    }
    Err(LoadError::Protocol {
        expected: "as many tokens as were asked for",
        found: format!("{} of {tokens}", answer.tokens),
    })
}

fn expect(holds: bool, expected: &'static str, found: &serde_json::Value) -> Result<(), LoadError> {
    if holds {
        return Ok(());
    }
    Err(LoadError::Protocol {
        expected,
        found: crate::http::beginning(&found.to_string()),
    })
}

fn stream_body(prompt: &str, tokens: usize) -> String {
    json!({"prompt": prompt, "n_predict": tokens, "ignore_eos": true, "stream": true}).to_string()
}

fn leave(target: &Target, random: &mut Random, events: usize) -> Result<(), LoadError> {
    let body = stream_body(&text(random, 12), 200);
    let mut exchange = target
        .send("POST", "/completion", body.as_bytes())?
        .success()?;
    for _ in 0..events {
        if exchange.event()?.is_none() {
            return Err(LoadError::Cut { tokens: events });
        }
    }
    Ok(())
}

fn slow(target: &Target, random: &mut Random) -> Result<(), LoadError> {
    let body = stream_body(&text(random, 12), 12);
    let mut exchange = target
        .send("POST", "/completion", body.as_bytes())?
        .success()?;
    while exchange.event()?.is_some() {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn refused(target: &Target, path: &str, body: &str, status: u16) -> Result<(), LoadError> {
    let exchange = target.send("POST", path, body.as_bytes())?;
    let found = exchange.status;
    let text = exchange.text()?;
    if found == status {
        return Ok(());
    }
    Err(LoadError::Status {
        status: found,
        body: format!("{status} was expected: {}", crate::http::beginning(&text)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tallies_are_added() {
        let mut one = Tally::default();
        one.count(Kind::Watch, Ok(()));
        one.count(Kind::Watch, Err(LoadError::Client));
        let full = LoadError::Status {
            status: 503,
            body: String::new(),
        };
        one.count(Kind::Two, Err(full));
        let mut two = one.clone();
        two.add(one);
        assert_eq!((two.total(), two.refused), (6, 2));
        assert_eq!(two.wrong.values().sum::<u64>(), 2);
    }
}
