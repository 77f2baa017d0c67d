//! A histogram of durations that many threads add to without waiting.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds in seconds of what users feel: from one token of a small model to a long prompt on a slow machine.
pub const SECONDS: [f64; 16] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];

/// Counts of durations by size.
#[derive(Debug, Default)]
pub struct Histogram {
    /// One count a bound, not cumulative, and one for what is beyond.
    counts: [AtomicU64; SECONDS.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    /// Adds one.
    pub fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let at = SECONDS
            .iter()
            .position(|bound| seconds <= *bound)
            .unwrap_or(SECONDS.len());
        if let Some(count) = self.counts.get(at) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.sum_us
            .fetch_add(duration.as_micros() as u64, Ordering::Relaxed);
    }

    /// Writes it as Prometheus expects; `labels` without braces.
    pub fn write(&self, out: &mut String, name: &str, help: &str, labels: &str) {
        // Writing to a text cannot fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut total = 0;
        let bounds = SECONDS
            .iter()
            .map(f64::to_string)
            .chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&self.counts) {
            total += count.load(Ordering::Relaxed);
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {total}");
        }
        let sum_s = Duration::from_micros(self.sum_us.load(Ordering::Relaxed)).as_secs_f64();
        let _ = writeln!(
            out,
            "{name}_sum{{{labels}}} {sum_s}\n{name}_count{{{labels}}} {total}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative() {
        let histogram = Histogram::default();
        for ms in [1, 2, 30, 400_000] {
            histogram.observe(Duration::from_millis(ms));
        }
        let mut text = String::new();
        histogram.write(&mut text, "x", "Time.", "model=\"m\"");
        let count = |bound: &str| {
            let line = text
                .lines()
                .find(|line| line.contains(&format!("le=\"{bound}\"")))
                .unwrap();
            line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
        };
        assert_eq!(
            [
                count("0.001"),
                count("0.0025"),
                count("0.05"),
                count("300"),
                count("+Inf")
            ],
            [1, 2, 3, 3, 4]
        );
        assert!(
            text.ends_with("x_sum{model=\"m\"} 400.033\nx_count{model=\"m\"} 4\n"),
            "{text}"
        );
    }
}
