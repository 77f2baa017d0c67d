//! How far the logits of one setting are from those of another, token by token.

use serde_json::{Value, json};

/// Logarithm of the sum of exponentials, the largest taken out first.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let largest = f64::from(largest);
    let sum: f64 = logits
        .iter()
        .map(|logit| (f64::from(*logit) - largest).exp())
        .sum();
    largest + sum.ln()
}

/// Distances of all rows.
#[derive(Debug, Clone, Default)]
pub struct Distance {
    /// Kullback-Leibler divergence of the second from the first, in nats.
    kl: Vec<f64>,
    /// Largest difference of a logit in each row.
    logit: Vec<f64>,
    /// Sum of the squares of the differences of probabilities of the first's likeliest token.
    probability_squares: f64,
    same_top: usize,
}

fn largest(values: &[f32]) -> usize {
    let mut best = (0, f32::NEG_INFINITY);
    for (index, value) in values.iter().enumerate() {
        if *value > best.1 {
            best = (index, *value);
        }
    }
    best.0
}

impl Distance {
    /// Adds a row: the logits of the first setting and of the second after the same tokens.
    pub fn add(&mut self, first: &[f32], second: &[f32]) {
        let (norm_1, norm_2) = (log_sum_exp(first), log_sum_exp(second));
        let (mut kl, mut logit) = (0.0f64, 0.0f64);
        for (a, b) in first.iter().zip(second) {
            let (a, b) = (f64::from(*a), f64::from(*b));
            let log_p = a - norm_1;
            kl += log_p.exp() * (log_p - (b - norm_2));
            logit = logit.max((a - b).abs());
        }
        let top = largest(first);
        let probability = |logits: &[f32], norm: f64| {
            logits
                .get(top)
                .map_or(0.0, |logit| (f64::from(*logit) - norm).exp())
        };
        let difference = probability(first, norm_1) - probability(second, norm_2);
        self.probability_squares += difference * difference;
        self.same_top += usize::from(top == largest(second));
        // Rounding can make the divergence of equal rows a little less than nothing.
        self.kl.push(kl.max(0.0));
        self.logit.push(logit);
    }

    /// Mean divergence.
    pub fn mean_kl(&self) -> f64 {
        mean(&self.kl)
    }

    /// Largest difference of a logit.
    pub fn max_logit(&self) -> f64 {
        self.logit.iter().copied().fold(0.0, f64::max)
    }

    fn figures(&self) -> [(&'static str, f64); 8] {
        let count = self.kl.len().max(1) as f64;
        [
            ("mean KL divergence, nats", self.mean_kl()),
            ("median KL divergence, nats", percentile(&self.kl, 0.5)),
            (
                "99th percentile of KL divergence, nats",
                percentile(&self.kl, 0.99),
            ),
            ("largest KL divergence, nats", percentile(&self.kl, 1.0)),
            (
                "mean over rows of the largest logit difference",
                mean(&self.logit),
            ),
            ("largest logit difference", self.max_logit()),
            (
                "root mean square difference of the likeliest token's probability",
                (self.probability_squares / count).sqrt(),
            ),
            (
                "share of rows with the same likeliest token",
                self.same_top as f64 / count,
            ),
        ]
    }

    /// For people, and for Markdown.
    pub fn table(&self) -> String {
        let mut text = format!(
            "| second from first, {} rows | |\n|---|---:|\n",
            self.kl.len()
        );
        for (name, value) in self.figures() {
            text.push_str(&format!("| {name} | {value:.6} |\n"));
        }
        text
    }

    /// Everything.
    pub fn json(&self) -> Value {
        let [
            kl,
            kl_median,
            kl_p99,
            kl_max,
            logit_mean,
            logit_max,
            probability,
            top,
        ] = self.figures().map(|(_, value)| value);
        json!({
            "rows": self.kl.len(),
            "kl_mean": kl,
            "kl_median": kl_median,
            "kl_p99": kl_p99,
            "kl_max": kl_max,
            "logit_max_mean": logit_mean,
            "logit_max": logit_max,
            "probability_rms": probability,
            "same_top": top,
        })
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// By nearest rank; 0 of none.
fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_rows_have_no_distance_and_a_constant_is_none() {
        let row = [1.0f32, -2.0, 0.5, 3.0];
        let mut distance = Distance::default();
        distance.add(&row, &row);
        distance.add(&row, &row.map(|logit| logit + 2.0));
        assert!(distance.mean_kl() < 1e-12);
        assert!((distance.max_logit() - 2.0).abs() < 1e-12);
        assert_eq!(distance.json()["same_top"], 1.0);
    }

    #[test]
    fn divergence_of_two_coins() {
        // p = (1/2, 1/2), q = (1/4, 3/4): ln 2 - ln 3 / 2.
        let mut distance = Distance::default();
        distance.add(&[0.0, 0.0], &[0.0, 3.0f32.ln()]);
        let expected = 2.0f64.ln() - 3.0f64.ln() / 2.0;
        assert!((distance.mean_kl() - expected).abs() < 1e-7);
        assert_eq!(distance.json()["same_top"], 0.0);
    }

    #[test]
    fn sums_of_large_exponentials_do_not_overflow() {
        assert!((log_sum_exp(&[1e4, 1e4]) - (1e4 + 2.0f64.ln())).abs() < 1e-9);
        assert!((log_sum_exp(&[f32::NEG_INFINITY, 0.0])).abs() < 1e-12);
    }

    #[test]
    fn percentiles() {
        let values = [3.0, 1.0, 2.0];
        assert_eq!(percentile(&values, 0.5), 2.0);
        assert_eq!(percentile(&values, 1.0), 3.0);
        assert_eq!(percentile(&[], 0.5), 0.0);
    }
}
