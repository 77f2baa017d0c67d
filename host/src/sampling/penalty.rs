//! Bias and penalties: changes to single logits.

use super::history::History;
use super::params::{LogitBias, SamplingParams};
use super::row::{Row, changed};

/// Adds the biases. A token that is named twice gets both.
pub(super) fn add_bias(logits: &mut [f32], biases: &[LogitBias]) {
    for bias in biases {
        if let Some(logit) = logits.get_mut(bias.token as usize) {
            *logit = match bias.bias {
                f32::NEG_INFINITY => f32::NEG_INFINITY,
                bias => changed(*logit, |logit| logit + bias),
            };
        }
    }
}

/// What a logit becomes when its token is `count` times in the window.
///
/// Repetition: Keskar et al., "CTRL", 2019, with the sign rule of `transformers` and llama.cpp (a negative logit is
/// multiplied, or the penalty would be a reward). Frequency and presence: OpenAI's API, `count * frequency + presence`.
fn penalised(logit: f32, count: u32, params: &SamplingParams) -> f32 {
    let repeated = if logit > 0.0 {
        logit / params.repetition_penalty
    } else {
        logit * params.repetition_penalty
    };
    repeated - (count as f32 * params.frequency_penalty + params.presence_penalty)
}

/// Penalties on whole rows, where every logit is at the place of its id.
pub(super) fn penalise(logits: &mut [f32], history: &History, params: &SamplingParams) {
    for (&token, &count) in history.counts() {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = changed(*logit, |logit| penalised(logit, count, params));
        }
    }
}

/// Penalties on what another sampler has left.
pub(super) fn penalise_row(row: &mut Row<'_>, history: &History, params: &SamplingParams) {
    row.change(|token, logit| match history.counts().get(&token) {
        Some(&count) => penalised(logit, count, params),
        None => logit,
    });
}

#[cfg(test)]
mod tests {
    use super::super::history::Window;
    use super::*;

    fn run(params: SamplingParams, ids: &[u32]) -> Vec<f32> {
        let mut history = History::new(Window::of(params.repeat_last_n), false);
        history.extend(ids);
        let mut logits = vec![2.0, -2.0, 4.0, 0.0, f32::NEG_INFINITY];
        let mut list = Vec::new();
        let whole = logits.clone();
        let mut row = Row::new(&whole, &mut list);
        penalise_row(&mut row, &history, &params);
        penalise(&mut logits, &history, &params);
        let left: Vec<f32> = row.list().iter().map(|candidate| candidate.logit).collect();
        assert_eq!(left, logits[..4]);
        assert_eq!(logits.pop(), Some(f32::NEG_INFINITY));
        logits
    }

    #[test]
    fn penalties_follow_their_formulas() {
        let base = SamplingParams::cli;
        let repetition = SamplingParams {
            repetition_penalty: 2.0,
            ..base()
        };
        assert_eq!(
            run(repetition.clone(), &[0, 1, 1, 3, 4, 99]),
            [1.0, -4.0, 4.0, 0.0]
        );
        let frequency = SamplingParams {
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            ..base()
        };
        assert_eq!(run(frequency, &[1, 1, 2]), [2.0, -3.25, 3.25, 0.0]);
        let all = SamplingParams {
            frequency_penalty: 1.0,
            ..repetition
        };
        assert_eq!(run(all, &[0]), [0.0, -2.0, 4.0, 0.0]);
    }

    #[test]
    fn the_window_counts_from_the_end() {
        let last = |repeat_last_n| {
            let params = SamplingParams {
                frequency_penalty: 1.0,
                repeat_last_n,
                ..SamplingParams::cli()
            };
            run(params, &[0, 0, 2])
        };
        assert_eq!(last(1), [2.0, -2.0, 3.0, 0.0]);
        assert_eq!(last(2), [1.0, -2.0, 3.0, 0.0]);
        assert_eq!(last(-1), [0.0, -2.0, 3.0, 0.0]);
        assert_eq!(last(0), [2.0, -2.0, 4.0, 0.0]);
    }

    #[test]
    fn biases_add_up_and_stay_numbers() {
        let mut logits = vec![1.0, 1.0, f32::MAX, f32::MIN];
        let bias = |token, bias| LogitBias { token, bias };
        add_bias(
            &mut logits,
            &[
                bias(0, 2.0),
                bias(0, -0.5),
                bias(1, f32::NEG_INFINITY),
                bias(2, f32::MAX),
                bias(3, f32::MIN),
                bias(9, 1.0),
            ],
        );
        assert_eq!(logits, [2.5, f32::NEG_INFINITY, f32::MAX, f32::MIN]);
    }
}
