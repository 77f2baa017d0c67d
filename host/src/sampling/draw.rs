//! The draw from what the filters left.
//!
//! Long rows: the token with the largest `logit * scale + noise`, the Gumbel-max trick. Equal to a draw from the softmax
//! (Gumbel, "Statistical theory of extreme values", 1954), and every token's noise is a function of seed, step and id
//! alone, so that nothing is sorted. Short lists: by rank with one random number, which is what a device does too.

use super::rng::{MAX_GUMBEL, StepNoise};
use super::row::Row;
use super::select::{self, Candidate, by_rank};

struct Best {
    score: f64,
    token: u32,
}

impl Best {
    fn offer(&mut self, candidate: Candidate, scale: f64, noise: &mut StepNoise) {
        let scaled = f64::from(candidate.logit) * scale;
        // No noise could lift this token over the best one.
        if scaled + MAX_GUMBEL < self.score {
            return;
        }
        let word = noise.word(candidate.token);
        if scaled + StepNoise::most(word) < self.score {
            return;
        }
        let score = scaled + StepNoise::gumbel(word);
        if score > self.score || (score == self.score && candidate.token < self.token) {
            *self = Self {
                score,
                token: candidate.token,
            };
        }
    }
}

/// Draws a token. None when there is none.
pub(super) fn draw(row: &mut Row<'_>, noise: &mut StepNoise) -> Option<u32> {
    let scale = row.scale();
    let mut best = Best {
        score: f64::NEG_INFINITY,
        token: u32::MAX,
    };
    if let Some(logits) = row.dense() {
        // With the likeliest token as the first to beat, most others are passed by without their noise.
        best.offer(select::best(logits)?, scale, noise);
        for (token, &logit) in (0u32..).zip(logits) {
            if logit > f32::NEG_INFINITY {
                best.offer(Candidate { token, logit }, scale, noise);
            }
        }
        return Some(best.token);
    }
    for candidate in row.list().iter() {
        best.offer(*candidate, scale, noise);
    }
    (best.token != u32::MAX).then_some(best.token)
}

/// Draws from a short list: the first token, from the likeliest down, at which the running sum of probabilities exceeds
/// `uniform`, which is below 1. None when there is none.
pub(super) fn draw_by_rank(row: &mut Row<'_>, uniform: f32) -> Option<u32> {
    row.list().sort_unstable_by(by_rank);
    let softmax = row.softmax();
    let limit = f64::from(uniform) * softmax.total;
    let mut sum = 0.0;
    let exceeds = |candidate: &&Candidate| {
        sum += softmax.weight(candidate.logit);
        sum > limit
    };
    row.list().iter().find(exceeds).map(|found| found.token)
}
