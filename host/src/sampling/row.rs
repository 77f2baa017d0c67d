//! The tokens of one row that may still be drawn.
//!
//! A row begins dense: all logits, in the order of ids. The first sampler that drops tokens turns it into a list. The
//! temperature is kept beside the logits as a factor, so that no logit is rounded twice.

use super::exp;
use super::select::{self, Candidate, by_rank, keep_best, keep_where};

/// What is left of a row.
#[derive(Debug)]
pub(super) struct Row<'a> {
    /// All logits, as long as none was dropped.
    dense: Option<&'a [f32]>,
    list: &'a mut Vec<Candidate>,
    /// Probabilities are those of `logit * scale`.
    scale: f64,
}

impl<'a> Row<'a> {
    /// A whole row. `list` is scratch memory. The logits have no NaN and no +infinity.
    pub(super) fn new(logits: &'a [f32], list: &'a mut Vec<Candidate>) -> Self {
        Self {
            dense: Some(logits),
            list,
            scale: 1.0,
        }
    }

    /// The factor.
    pub(super) fn scale(&self) -> f64 {
        self.scale
    }

    /// All logits, where none was dropped yet.
    pub(super) fn dense(&self) -> Option<&'a [f32]> {
        self.dense
    }

    /// The tokens as a list.
    pub(super) fn list(&mut self) -> &mut Vec<Candidate> {
        if let Some(logits) = self.dense.take() {
            select::at_least(logits, f32::NEG_INFINITY, self.list);
        }
        self.list
    }

    /// Divides by a temperature, which is above zero.
    pub(super) fn temper(&mut self, temperature: f64) {
        self.scale /= temperature;
    }

    /// Lets `change` replace logits. The temperature so far is part of what it sees.
    pub(super) fn change(&mut self, change: impl Fn(u32, f32) -> f32) {
        let scale = std::mem::replace(&mut self.scale, 1.0);
        for candidate in self.list().iter_mut() {
            let logit = changed(candidate.logit, |logit| (f64::from(logit) * scale) as f32);
            candidate.logit = changed(logit, |logit| change(candidate.token, logit));
        }
    }

    /// Replaces every logit by what `of` makes of it, and the temperature by one.
    pub(super) fn replace(&mut self, of: impl Fn(f32) -> f64) {
        self.scale = 1.0;
        for candidate in self.list().iter_mut() {
            candidate.logit = changed(candidate.logit, |logit| of(logit) as f32);
        }
    }

    /// Keeps the best token alone.
    pub(super) fn keep_one(&mut self) {
        self.keep_best(1);
    }

    /// Keeps the `count` best.
    pub(super) fn keep_best(&mut self, count: usize) {
        match self.dense.take() {
            Some(logits) => select::best_of(logits, count, self.list),
            None => keep_best(self.list, count),
        }
    }

    /// The `count` best, best first. Nothing is dropped.
    pub(super) fn head(&mut self, count: usize) -> &[Candidate] {
        match self.dense {
            Some(logits) => select::best_of(logits, count, self.list),
            None if count < self.list.len() => {
                self.list.select_nth_unstable_by(count, by_rank);
            }
            None => {}
        }
        let count = count.min(self.list.len());
        let head = self.list.get_mut(..count).unwrap_or_default();
        head.sort_unstable_by(by_rank);
        head
    }

    /// Keeps logits of at least `least`, and the best others if that is fewer than `min_keep`.
    pub(super) fn keep_from(&mut self, least: f64, min_keep: usize) {
        // The nearest float above, so that the comparison is the one with `least` itself.
        let mut floor = least as f32;
        if f64::from(floor) < least {
            floor = floor.next_up();
        }
        let Some(logits) = self.dense.take() else {
            keep_where(self.list, min_keep, |candidate| candidate.logit >= floor);
            return;
        };
        select::at_least(logits, floor, self.list);
        if self.list.len() < min_keep {
            select::best_of(logits, min_keep, self.list);
        }
    }

    /// Every logit that may be drawn.
    pub(super) fn each(&self, mut visit: impl FnMut(f32)) {
        match self.dense {
            Some(logits) => logits
                .iter()
                .copied()
                .filter(|logit| *logit > f32::NEG_INFINITY)
                .for_each(visit),
            None => self
                .list
                .iter()
                .for_each(|candidate| visit(candidate.logit)),
        }
    }

    /// The largest logit, -infinity when there is none.
    pub(super) fn max(&self) -> f64 {
        let best = match self.dense {
            Some(logits) => select::best(logits).map(|best| best.logit),
            None => self
                .list
                .iter()
                .map(|candidate| candidate.logit)
                .max_by(f32::total_cmp),
        };
        f64::from(best.unwrap_or(f32::NEG_INFINITY))
    }

    /// Its distribution.
    pub(super) fn softmax(&self) -> Softmax {
        let (max, scale) = (self.max() as f32, self.scale as f32);
        let total = match self.dense {
            Some(logits) => exp::sum(logits, max, scale),
            None => {
                let weight = |candidate: &Candidate| exp::exp((candidate.logit - max) * scale);
                let weights = self.list.iter().map(weight);
                weights.map(f64::from).sum()
            }
        };
        Softmax {
            max,
            scale: self.scale,
            total,
            log_total: total.ln(),
        }
    }
}

/// A distribution over the tokens of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Softmax {
    max: f32,
    scale: f64,
    /// Of the weights.
    pub(super) total: f64,
    log_total: f64,
}

impl Softmax {
    /// Probability before it is divided by the total; 1 for the best token.
    pub(super) fn weight(&self, logit: f32) -> f64 {
        f64::from(exp::exp((logit - self.max) * self.scale as f32))
    }

    /// Probability.
    pub(super) fn p(&self, logit: f32) -> f64 {
        self.weight(logit) / self.total
    }

    /// Logarithm of the probability.
    pub(super) fn log_p(&self, logit: f32) -> f64 {
        (f64::from(logit) - f64::from(self.max)) * self.scale - self.log_total
    }

    /// The logit whose probability has this logarithm.
    pub(super) fn logit_of(&self, log_p: f64) -> f64 {
        f64::from(self.max) + (log_p + self.log_total) / self.scale
    }

    /// In units of its natural logarithm, from 0 to that of the number of tokens.
    pub(super) fn entropy(&self, row: &Row<'_>) -> f64 {
        let mut entropy = 0.0;
        row.each(|logit| entropy -= self.p(logit) * self.log_p(logit));
        entropy
    }
}

/// A changed logit, which stays a number whatever was done to it. What cannot be drawn stays so.
pub(super) fn changed(logit: f32, change: impl FnOnce(f32) -> f32) -> f32 {
    match logit {
        f32::NEG_INFINITY => logit,
        logit => change(logit).clamp(f32::MIN, f32::MAX),
    }
}
