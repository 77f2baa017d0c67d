//! The load run: so many clients, each of which asks again as soon as it has its answer.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::LoadError;
use crate::http::{Target, beginning};
use crate::prompts::prompt;
use crate::random::Random;
use crate::stats::{percentile, sorted, summary};

/// When a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// After so many requests.
    Requests(usize),
    /// No request begins later than this.
    Time(Duration),
}

/// What a run does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The server.
    pub target: Target,
    /// Clients at a time.
    pub clients: usize,
    /// The end.
    pub until: Until,
    /// Length of every prompt.
    pub prompt_tokens: usize,
    /// Length of every answer; the model cannot end it sooner.
    pub max_tokens: usize,
    /// Makes the prompts.
    pub seed: u64,
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// Tokens, as the server counts them.
    pub tokens: usize,
    /// Milliseconds from the request to the first event with text.
    pub first_ms: f64,
    /// Milliseconds from each such event to the next.
    pub gaps_ms: Vec<f64>,
    /// Milliseconds from the request to the end of the stream.
    pub total_ms: f64,
}

/// What became of a run.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The answers.
    pub answers: Vec<Answer>,
    /// Failures by their text.
    pub failures: BTreeMap<String, usize>,
    /// From the first request to the end of the last.
    pub wall: Duration,
}

fn ms(from: Instant, to: Instant) -> f64 {
    (to - from).as_secs_f64() * 1e3
}

/// One request, streamed.
pub fn ask(target: &Target, prompt: &[u32], max_tokens: usize) -> Result<Answer, LoadError> {
    let body = json!({
        "prompt": prompt,
        "n_predict": max_tokens,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
    })
    .to_string();
    let began = Instant::now();
    let mut exchange = target
        .send("POST", "/completion", body.as_bytes())?
        .success()?;
    let mut answer = Answer::default();
    let mut last_text: Option<Instant> = None;
    let mut is_complete = false;
    while let Some(data) = exchange.event()? {
        let now = Instant::now();
        let event: Value = serde_json::from_str(&data).map_err(|_| LoadError::Protocol {
            expected: "an event in JSON",
            found: beginning(&data),
        })?;
        if let Some(error) = event.get("error") {
            return Err(LoadError::Failed {
                message: beginning(&error.to_string()),
            });
        }
        if event["content"]
            .as_str()
            .is_some_and(|text| !text.is_empty())
        {
            match last_text {
                None => answer.first_ms = ms(began, now),
                Some(last) => answer.gaps_ms.push(ms(last, now)),
            }
            last_text = Some(now);
        }
        if event["stop"] == true {
            answer.tokens = event["tokens_predicted"].as_u64().unwrap_or(0) as usize;
            is_complete = true;
        }
    }
    answer.total_ms = ms(began, Instant::now());
    if !is_complete || last_text.is_none() {
        return Err(LoadError::Cut {
            tokens: answer.gaps_ms.len() + usize::from(last_text.is_some()),
        });
    }
    Ok(answer)
}

/// Runs the clients.
pub fn run(options: &Options) -> Result<Outcome, LoadError> {
    let prepared = match options.until {
        Until::Requests(count) => count,
        // More are made on the way.
        Until::Time(_) => options.clients * 4,
    };
    let prompts: Vec<Vec<u32>> = (0..prepared)
        .map(|index| new_prompt(options, index))
        .collect::<Result<_, _>>()?;
    let next = AtomicUsize::new(0);
    let answers = Mutex::new(Vec::new());
    let failures = Mutex::new(BTreeMap::new());
    let began = Instant::now();
    let client = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let is_over = match options.until {
                Until::Requests(count) => index >= count,
                Until::Time(time) => began.elapsed() >= time,
            };
            if is_over {
                return;
            }
            let outcome = match prompts.get(index) {
                Some(prompt) => ask(&options.target, prompt, options.max_tokens),
                None => new_prompt(options, index)
                    .and_then(|prompt| ask(&options.target, &prompt, options.max_tokens)),
            };
            match outcome {
                Ok(answer) => lock(&answers).push(answer),
                Err(error) => {
                    *lock(&failures).entry(error.to_string()).or_insert(0) += 1;
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..options.clients.max(1))
            .map(|_| scope.spawn(client))
            .collect();
        clients
            .into_iter()
            .try_for_each(|client| client.join().map_err(|_| LoadError::Client))
    })?;
    Ok(Outcome {
        wall: began.elapsed(),
        answers: answers.into_inner().unwrap_or_else(PoisonError::into_inner),
        failures: failures
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner),
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn new_prompt(options: &Options, index: usize) -> Result<Vec<u32>, LoadError> {
    let mut random = Random::new(options.seed, index as u64);
    prompt(&options.target, &mut random, options.prompt_tokens)
}

impl Outcome {
    /// Tokens of all answers in a second.
    pub fn tokens_per_second(&self) -> f64 {
        let tokens: usize = self.answers.iter().map(|answer| answer.tokens).sum();
        tokens as f64 / self.wall.as_secs_f64().max(1e-9)
    }

    /// Everything, for programs.
    pub fn json(&self, options: &Options) -> Value {
        let all = |of: fn(&Answer) -> f64| self.answers.iter().map(of).collect::<Vec<_>>();
        let gaps: Vec<f64> = self
            .answers
            .iter()
            .flat_map(|a| a.gaps_ms.clone())
            .collect();
        json!({
            "clients": options.clients,
            "prompt_tokens": options.prompt_tokens,
            "max_tokens": options.max_tokens,
            "answers": self.answers.len(),
            "tokens": self.answers.iter().map(|answer| answer.tokens).sum::<usize>(),
            "failed": self.failures.values().sum::<usize>(),
            "failures": self.failures,
            "wall_s": self.wall.as_secs_f64(),
            "tokens_per_second": self.tokens_per_second(),
            "ttft_ms": summary(&all(|answer| answer.first_ms)),
            "inter_token_ms": summary(&gaps),
            "request_ms": summary(&all(|answer| answer.total_ms)),
        })
    }

    /// Everything, for people.
    pub fn text(&self, options: &Options) -> String {
        let first: Vec<f64> = sorted(&self.answers.iter().map(|a| a.first_ms).collect::<Vec<_>>());
        let gaps: Vec<f64> = self
            .answers
            .iter()
            .flat_map(|a| a.gaps_ms.clone())
            .collect();
        let gaps = sorted(&gaps);
        let three = |values: &[f64]| {
            let of = |percent| percentile(values, percent).unwrap_or(f64::NAN);
            format!(
                "p50 {:.1} ms, p95 {:.1} ms, p99 {:.1} ms",
                of(50.0),
                of(95.0),
                of(99.0)
            )
        };
        let mut text = format!(
            "{} clients, {} answers, {} failed, {:.2} s, {:.1} tokens/s\nfirst token: {}\nbetween tokens: {}\n",
            options.clients,
            self.answers.len(),
            self.failures.values().sum::<usize>(),
            self.wall.as_secs_f64(),
            self.tokens_per_second(),
            three(&first),
            three(&gaps)
        );
        for (failure, count) in &self.failures {
            text.push_str(&format!("{count} times: {failure}\n"));
        }
        text
    }
}
