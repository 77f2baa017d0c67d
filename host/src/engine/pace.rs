//! How many rows of prompts fit into a step beside answers, so that these do not wait long for their next token.
//!
//! From measured times: what a step of answers takes, and what a row of a prompt adds. Rows are padded to a bucket, so
//! that as many as fill one cost nothing.

use std::time::Duration;

use super::bucket;

/// How long a step with running answers may take.
const TARGET_S: f64 = 0.15;

/// Rows that a prompt gets however slow the device is, so that it begins at all.
const LEAST_ROWS: usize = 16;

/// Weight of the newest measurement.
const NEWEST: f64 = 0.2;

/// Times of steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// Seconds of a step of answers alone.
    answers_s: Option<f64>,
    /// Seconds that a row of a prompt adds.
    row_s: Option<f64>,
}

/// Moves an average towards a measurement.
fn moved(average: Option<f64>, measured: f64) -> Option<f64> {
    Some(average.map_or(measured, |old| old + (measured - old) * NEWEST))
}

impl Pace {
    /// Notes what a step with so many rows took.
    pub fn note(&mut self, answer_rows: usize, prompt_rows: usize, took: Duration) {
        let took_s = took.as_secs_f64();
        if prompt_rows == 0 {
            self.answers_s = moved(self.answers_s, took_s);
        } else if prompt_rows >= LEAST_ROWS {
            let beside_s = match answer_rows {
                0 => 0.0,
                _ => self.answers_s.unwrap_or(0.0),
            };
            let row_s = (took_s - beside_s).max(0.0) / prompt_rows as f64;
            self.row_s = moved(self.row_s, row_s);
        }
    }

    /// Rows of prompts for the next step beside `answer_rows`, at most `most`.
    pub fn prompt_rows(&self, answer_rows: usize, most: usize) -> usize {
        let room_s = TARGET_S - self.answers_s.unwrap_or(0.0);
        let wanted = match self.row_s {
            Some(row_s) if row_s > 0.0 => (room_s / row_s) as usize,
            _ => most,
        };
        let least = LEAST_ROWS.min(most);
        let wanted = wanted.clamp(least, most.max(least));
        let filled = bucket::rows_within(answer_rows + wanted);
        match filled.saturating_sub(answer_rows) {
            rows if rows >= least => rows,
            _ => wanted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_fast_device_gets_all_and_a_slow_one_what_it_has_time_for() {
        let mut pace = Pace::default();
        // Nothing is known yet; 16 and 112 fill a bucket of 128.
        assert_eq!(pace.prompt_rows(16, 128), 112);
        for _ in 0..50 {
            pace.note(16, 0, MS(30));
            pace.note(16, 112, MS(254));
        }
        // 2 ms a row beside 30 ms: 60 fit, of which 48 fill a bucket of 64.
        assert_eq!(pace.prompt_rows(16, 128), 48);
        for _ in 0..50 {
            pace.note(16, 48, MS(32));
        }
        assert_eq!(pace.prompt_rows(16, 128), 112);
        for _ in 0..50 {
            pace.note(16, 0, MS(400));
        }
        assert_eq!(pace.prompt_rows(16, 128), 16);
    }

    proptest! {
        #[test]
        fn prompts_always_go_on_and_never_get_more_than_the_most(
            notes in proptest::collection::vec((0usize..40, 0usize..600, 0u64..2000), 0..30),
            answers in 1usize..600,
            most in 1usize..600,
        ) {
            let mut pace = Pace::default();
            for (answer_rows, prompt_rows, ms) in notes {
                pace.note(answer_rows, prompt_rows, MS(ms));
            }
            let rows = pace.prompt_rows(answers, most);
            prop_assert!((1..=most).contains(&rows));
            prop_assert!(rows >= most.min(LEAST_ROWS));
        }
    }
}
