//! Percentiles of what was measured.

use serde_json::{Value, json};

/// The value that `percent` of the values do not exceed, by nearest rank; none of none.
pub fn percentile(sorted: &[f64], percent: f64) -> Option<f64> {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

/// The middle value.
pub fn median(values: &[f64]) -> Option<f64> {
    percentile(&sorted(values), 50.0)
}

/// In order.
pub fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Count, mean and percentiles; the figures are null when there is nothing.
pub fn summary(values: &[f64]) -> Value {
    let sorted = sorted(values);
    let of = |percent| percentile(&sorted, percent);
    let mean = (!sorted.is_empty()).then(|| sorted.iter().sum::<f64>() / sorted.len() as f64);
    json!({
        "count": sorted.len(),
        "mean": mean,
        "p50": of(50.0),
        "p95": of(95.0),
        "p99": of(99.0),
        "max": sorted.last(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_by_nearest_rank() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&values, 50.0), Some(50.0));
        assert_eq!(percentile(&values, 95.0), Some(95.0));
        assert_eq!(percentile(&values, 100.0), Some(100.0));
        assert_eq!(percentile(&[7.0], 0.0), Some(7.0));
        assert_eq!(percentile(&[], 50.0), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
    }

    #[test]
    fn a_summary_of_nothing_has_no_figures() {
        let summary = summary(&[]);
        assert_eq!(summary["count"], 0);
        assert!(summary["p95"].is_null());
    }
}
