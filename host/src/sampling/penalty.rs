//! Bias and penalties: changes to single logits before any filter.

use std::collections::HashMap;

use super::params::{LogitBias, SamplingParams};

/// Adds the biases. A token that is named twice gets both.
pub(super) fn add_bias(logits: &mut [f32], biases: &[LogitBias]) {
    for bias in biases {
        if let Some(logit) = logits.get_mut(bias.token as usize) {
            *logit += bias.bias;
        }
    }
}

/// Applies the penalties for the ids in the window.
///
/// Repetition: Keskar et al., "CTRL", 2019, with the sign rule of `transformers` and llama.cpp (a negative logit is
/// multiplied, or the penalty would be a reward). Frequency and presence: OpenAI's API, `count * frequency + presence`.
pub(super) fn apply_penalties(logits: &mut [f32], history: &[u32], params: &SamplingParams) {
    if !params.looks_back() {
        return;
    }
    let window = match params.repeat_last_n {
        last if last < 0 => history.len(),
        last => (last as usize).min(history.len()),
    };
    let mut counts: HashMap<u32, u32> = HashMap::new();
    for &token in history.iter().rev().take(window) {
        *counts.entry(token).or_default() += 1;
    }
    for (token, count) in counts {
        let Some(logit) = logits.get_mut(token as usize) else {
            continue;
        };
        if *logit > 0.0 {
            *logit /= params.repetition_penalty;
        } else {
            *logit *= params.repetition_penalty;
        }
        *logit -= count as f32 * params.frequency_penalty + params.presence_penalty;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn penalised(params: SamplingParams, history: &[u32]) -> Vec<f32> {
        let mut logits = vec![2.0, -2.0, 4.0, 0.0];
        apply_penalties(&mut logits, history, &params);
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
            penalised(repetition.clone(), &[0, 1, 1, 3, 99]),
            [1.0, -4.0, 4.0, 0.0]
        );
        let frequency = SamplingParams {
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            ..base()
        };
        assert_eq!(penalised(frequency, &[1, 1, 2]), [2.0, -3.25, 3.25, 0.0]);
        let all = SamplingParams {
            frequency_penalty: 1.0,
            ..repetition
        };
        assert_eq!(penalised(all, &[0]), [0.0, -2.0, 4.0, 0.0]);
    }

    #[test]
    fn the_window_counts_from_the_end() {
        let base = SamplingParams {
            frequency_penalty: 1.0,
            ..SamplingParams::cli()
        };
        let last = |repeat_last_n| {
            penalised(
                SamplingParams {
                    repeat_last_n,
                    ..base.clone()
                },
                &[0, 0, 2],
            )
        };
        assert_eq!(last(1), [2.0, -2.0, 3.0, 0.0]);
        assert_eq!(last(2), [1.0, -2.0, 3.0, 0.0]);
        assert_eq!(last(-1), [0.0, -2.0, 3.0, 0.0]);
        assert_eq!(last(0), [2.0, -2.0, 4.0, 0.0]);
    }

    #[test]
    fn biases_add_up() {
        let mut logits = vec![1.0, 1.0];
        let bias = |token, bias| LogitBias { token, bias };
        add_bias(
            &mut logits,
            &[
                bias(0, 2.0),
                bias(0, -0.5),
                bias(1, f32::NEG_INFINITY),
                bias(9, 1.0),
            ],
        );
        assert_eq!(logits, [2.5, f32::NEG_INFINITY]);
    }
}
