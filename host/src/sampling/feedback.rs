//! Samplers that learn from what was drawn: mirostat and adaptive-p.
//!
//! Their state is of one request and changes with its own draws alone, so an answer still does not depend on the batch.

use super::params::{Mirostat, SamplingParams};
use super::row::{Row, Softmax};

/// Width of the bell around the target, its height as a logit, and how fast it falls, as llama.cpp has them.
const BELL_WIDTH: f64 = 0.3;
const BELL_HEIGHT: f64 = 5.0;
const BELL_SLOPE: f64 = 10.0;

/// What was learnt so far.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Feedback {
    /// Mirostat: the surprise in bits that a token may have.
    pub(super) mu: f64,
    /// Adaptive-p: sums over the draws of probability and of weight, the last draw with weight one.
    probabilities: f64,
    weights: f64,
}

impl Feedback {
    /// Before the first draw.
    pub(super) fn new(params: &SamplingParams) -> Self {
        let memory = 1.0 - f64::from(params.adaptive_decay);
        Self {
            mu: 2.0 * f64::from(params.mirostat_tau),
            probabilities: f64::from(params.adaptive_target.max(0.0)) / memory,
            weights: 1.0 / memory,
        }
    }

    /// After a draw by mirostat. `p` is the token's probability among those that mirostat had left.
    pub(super) fn surprised(&mut self, p: f64, params: &SamplingParams) {
        if params.mirostat != Mirostat::Off {
            let error = -p.log2() - f64::from(params.mirostat_tau);
            self.mu -= f64::from(params.mirostat_eta) * error;
        }
    }

    /// Turns a row into the distribution that adaptive-p draws from. Gives the one from before, which it learns from.
    pub(super) fn adapt(&self, row: &mut Row<'_>, target: f64) -> Softmax {
        let softmax = row.softmax();
        // What was too likely so far is made up for by what is less likely now.
        let aim = (2.0 * target - self.probabilities / self.weights).clamp(0.0, 1.0);
        row.replace(|logit| {
            let distance = (softmax.p(logit) - aim).abs() / BELL_WIDTH;
            BELL_HEIGHT - BELL_SLOPE * distance * distance / (1.0 + distance)
        });
        softmax
    }

    /// After a draw by adaptive-p. `p` is the token's probability before [`Self::adapt`].
    pub(super) fn adapted(&mut self, p: f64, decay: f64) {
        self.probabilities = p + decay * self.probabilities;
        self.weights = 1.0 + decay * self.weights;
    }
}
