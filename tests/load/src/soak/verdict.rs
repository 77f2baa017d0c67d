//! Whether all came back to where it was, and whether memory grew.

use super::{Sample, Tally};
use crate::stats::median;

/// What is still no growth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Share of the resident memory.
    pub growth_share: f64,
    /// And so many bytes.
    pub growth_bytes: u64,
    /// Threads that a runtime may keep for a while.
    pub threads: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            growth_share: 0.02,
            growth_bytes: 8 << 20,
            threads: 8,
        }
    }
}

/// What the run showed.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// Median resident memory of the second quarter of the run, when it is warm.
    pub early_rss_bytes: u64,
    /// And of the last.
    pub late_rss_bytes: u64,
    /// What is not as it must be; empty is good.
    pub problems: Vec<String>,
}

impl Verdict {
    /// Of the look before the traffic, those during it, and the one after it.
    pub fn of(
        baseline: &Sample,
        samples: &[Sample],
        last: &Sample,
        tally: &Tally,
        limits: Limits,
    ) -> Self {
        let quarter = samples.len() / 4;
        let rss = |from: usize, to: usize| {
            let part: Vec<f64> = samples
                .get(from..to)
                .unwrap_or(samples)
                .iter()
                .map(|sample| sample.rss_bytes as f64)
                .collect();
            median(&part).unwrap_or_default() as u64
        };
        let early_rss_bytes = rss(quarter, (quarter * 2).max(quarter + 1));
        let late_rss_bytes = rss(quarter * 3, samples.len());
        let mut problems = Vec::new();
        // The pool grows by doubling up to its bound, and the old one may stay with the process as free memory.
        let pool = |sample: Option<&Sample>| sample.map_or(0, |sample| sample.pool_bytes);
        let pool_growth = pool(samples.last()).saturating_sub(pool(samples.get(quarter)));
        let allowed = limits.growth_bytes
            + (early_rss_bytes as f64 * limits.growth_share) as u64
            + 2 * pool_growth;
        if late_rss_bytes > early_rss_bytes + allowed {
            problems.push(format!(
                "resident memory grew from {early_rss_bytes} to {late_rss_bytes} bytes between the second and the last quarter, {allowed} are allowed"
            ));
        }
        let counts = [
            ("open files and sockets", baseline.handles, last.handles, 0),
            ("threads", baseline.threads, last.threads, limits.threads),
            ("connections", baseline.connections, last.connections, 0),
            ("pages in use", baseline.pages, last.pages, 0),
            ("tensors", baseline.tensors, last.tensors, 0),
            ("running requests", 0, last.running, 0),
            ("waiting requests", 0, last.waiting, 0),
            ("unfinished requests", 0, last.unfinished, 0),
        ];
        for (what, before, after, more) in counts {
            if after > before + more {
                problems.push(format!(
                    "{what}: {before} before the traffic, {after} after it"
                ));
            }
        }
        let ill = samples.iter().filter(|sample| !sample.is_healthy).count();
        if ill > 0 || !last.is_healthy {
            problems.push(format!("not healthy in {ill} looks during the traffic"));
        }
        if last.tokens <= baseline.tokens {
            problems.push("no token was generated".to_owned());
        }
        for (text, count) in &tally.wrong {
            problems.push(format!("{count} times: {text}"));
        }
        Self {
            early_rss_bytes,
            late_rss_bytes,
            problems,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(rss_bytes: u64) -> Sample {
        Sample {
            rss_bytes,
            tokens: 1,
            is_healthy: true,
            ..Sample::default()
        }
    }

    fn verdict(rss: &[u64], last: Sample) -> Verdict {
        let samples: Vec<Sample> = rss.iter().map(|bytes| sample(*bytes)).collect();
        let baseline = Sample {
            tokens: 0,
            ..sample(0)
        };
        Verdict::of(
            &baseline,
            &samples,
            &last,
            &Tally::default(),
            Limits::default(),
        )
    }

    #[test]
    fn growth_while_warm_is_a_problem_and_growth_before_is_none() {
        let m = 1 << 20;
        let warm = [
            10 * m,
            400 * m,
            401 * m,
            400 * m,
            402 * m,
            400 * m,
            401 * m,
            400 * m,
        ];
        assert_eq!(verdict(&warm, sample(0)).problems, [""; 0]);
        let growing: Vec<u64> = (0..16).map(|i| (400 + 10 * i) * m).collect();
        let problems = verdict(&growing, sample(0)).problems;
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains("memory grew"), "{problems:?}");
    }

    #[test]
    fn a_pool_that_grows_is_no_leak() {
        let m = 1 << 20;
        let mut samples = vec![sample(400 * m); 16];
        for sample in samples.iter_mut().skip(8) {
            sample.rss_bytes += 150 * m;
            sample.pool_bytes = 80 * m;
        }
        let baseline = Sample {
            tokens: 0,
            ..sample(0)
        };
        let tally = Tally::default();
        let problems =
            Verdict::of(&baseline, &samples, &sample(0), &tally, Limits::default()).problems;
        assert_eq!(problems, [""; 0]);
    }

    #[test]
    fn what_does_not_come_back_is_named() {
        let last = Sample {
            pages: 3,
            handles: 1,
            unfinished: 2,
            is_healthy: false,
            ..sample(0)
        };
        let problems = verdict(&[1, 1], last).problems.join("\n");
        for part in [
            "pages in use: 0",
            "sockets: 0",
            "unfinished requests",
            "not healthy",
        ] {
            assert!(problems.contains(part), "{part}: {problems}");
        }
    }

    #[test]
    fn a_run_of_one_look_has_a_verdict() {
        assert_eq!(verdict(&[5], sample(0)).late_rss_bytes, 5);
        assert_eq!(verdict(&[], sample(0)).late_rss_bytes, 0);
    }
}
