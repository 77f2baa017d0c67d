//! Log probabilities of the drawn token and its alternatives.

use super::filter::Candidate;

/// Which distribution is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogprobStage {
    /// The model's own, before bias, penalties, filters and temperature.
    #[default]
    Model,
    /// The one that the token was drawn from.
    Drawn,
}

/// A wish for log probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogprobsRequest {
    /// How many of the likeliest tokens to report beside the drawn one.
    pub top: usize,
    /// Of which distribution.
    pub stage: LogprobStage,
}

/// Log probabilities at one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// Of the drawn token.
    pub token: f32,
    /// The likeliest tokens, likeliest first, lower id first among equals.
    pub top: Vec<(u32, f32)>,
}

/// Of the model's distribution.
pub(super) fn of_logits(logits: &[f32], token: u32, top: usize) -> Logprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits
        .iter()
        .map(|&logit| f64::from(logit - max).exp())
        .sum();
    let log_total = f64::from(max) + total.ln();
    let logprob = |logit: f32| (f64::from(logit) - log_total) as f32;
    let mut list: Vec<(u32, f32)> = logits
        .iter()
        .zip(0u32..)
        .map(|(&logit, id)| (id, logit))
        .collect();
    best(&mut list, top);
    Logprobs {
        token: logits
            .get(token as usize)
            .map_or(f32::NEG_INFINITY, |&logit| logprob(logit)),
        top: list
            .into_iter()
            .map(|(id, logit)| (id, logprob(logit)))
            .collect(),
    }
}

/// Of the candidates at `temperature`.
pub(super) fn of_candidates(
    candidates: &[Candidate],
    temperature: f64,
    token: u32,
    top: usize,
) -> Logprobs {
    let scaled = |candidate: &Candidate| f64::from(candidate.logit) / temperature;
    let max = candidates
        .iter()
        .map(scaled)
        .fold(f64::NEG_INFINITY, f64::max);
    let log_total = max
        + candidates
            .iter()
            .map(|candidate| (scaled(candidate) - max).exp())
            .sum::<f64>()
            .ln();
    let logprob = |candidate: &Candidate| (scaled(candidate) - log_total) as f32;
    let drawn = candidates
        .iter()
        .find(|candidate| candidate.token == token)
        .map_or(f32::NEG_INFINITY, logprob);
    let mut list: Vec<(u32, f32)> = candidates
        .iter()
        .map(|candidate| (candidate.token, logprob(candidate)))
        .collect();
    best(&mut list, top);
    Logprobs {
        token: drawn,
        top: list,
    }
}

/// Keeps the `count` largest, largest first.
fn best(list: &mut Vec<(u32, f32)>, count: usize) {
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count == 0 {
        list.clear();
    } else if count < list.len() {
        list.select_nth_unstable_by(count - 1, order);
        list.truncate(count);
    }
    list.sort_unstable_by(order);
}
