//! Log probabilities of the drawn token and its alternatives.

use super::row::Row;
use super::select::{self, Candidate, by_rank, keep_best};

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
    let mut list = Vec::new();
    let softmax = Row::new(logits, &mut list).softmax();
    let logprob = |logit: f32| softmax.log_p(logit) as f32;
    select::best_of(logits, top, &mut list);
    list.sort_unstable_by(by_rank);
    let best = list.iter().map(|best| (best.token, logprob(best.logit)));
    let mut best: Vec<(u32, f32)> = best.collect();
    // Where more are wanted than can be drawn, the impossible ones follow.
    let missing = top.saturating_sub(best.len());
    let impossible = (0u32..)
        .zip(logits)
        .filter(|(_, logit)| **logit == f32::NEG_INFINITY);
    best.extend(
        impossible
            .take(missing)
            .map(|(id, _)| (id, f32::NEG_INFINITY)),
    );
    let drawn = logits.get(token as usize).copied();
    Logprobs {
        token: logprob(drawn.unwrap_or(f32::NEG_INFINITY)),
        top: best,
    }
}

/// Of the candidates, whose probabilities are those of `logit * scale`.
pub(super) fn of_candidates(list: &[Candidate], scale: f64, token: u32, top: usize) -> Logprobs {
    let scaled = |candidate: &Candidate| f64::from(candidate.logit) * scale;
    let max = list.iter().map(scaled).fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = list
        .iter()
        .map(|candidate| (scaled(candidate) - max).exp())
        .sum();
    let logprob = |candidate: &Candidate| (scaled(candidate) - max - total.ln()) as f32;
    let drawn = list.iter().find(|candidate| candidate.token == token);
    let mut best = Vec::new();
    if top > 0 {
        best.extend_from_slice(list);
        keep_best(&mut best, top);
        best.sort_unstable_by(by_rank);
    }
    Logprobs {
        token: drawn.map_or(f32::NEG_INFINITY, logprob),
        top: best
            .iter()
            .map(|best| (best.token, logprob(best)))
            .collect(),
    }
}
