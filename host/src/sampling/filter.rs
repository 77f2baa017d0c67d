//! Filters: which tokens may be drawn. All look at the distribution without temperature.

use std::cmp::Ordering;

use super::params::SamplingParams;

/// A token that may be drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub(super) token: u32,
    pub(super) logit: f32,
}

/// Likelier first, lower id first among equals.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// Fills `out` with the tokens that all filters leave. `logits` holds no NaN and no +infinity.
pub(super) fn candidates(logits: &[f32], params: &SamplingParams, out: &mut Vec<Candidate>) {
    out.clear();
    let alive = logits
        .iter()
        .zip(0u32..)
        .filter(|(logit, _)| **logit > f32::NEG_INFINITY);
    out.extend(alive.map(|(&logit, token)| Candidate { token, logit }));
    let min_keep = params.min_keep.max(1);
    top_n_sigma(out, params.top_n_sigma, min_keep);
    top_k(out, params.top_k as usize, min_keep);
    typical(out, f64::from(params.typical_p), min_keep);
    top_p(out, f64::from(params.top_p), min_keep);
    min_p(out, f64::from(params.min_p), min_keep);
}

/// Keeps the `count` best, best first.
fn keep_best(list: &mut Vec<Candidate>, count: usize) {
    if count == 0 || count >= list.len() {
        list.sort_unstable_by(by_rank);
        return;
    }
    list.select_nth_unstable_by(count - 1, by_rank);
    list.truncate(count);
    list.sort_unstable_by(by_rank);
}

/// Keeps what satisfies `keep`, and the best others if that is fewer than `min_keep`.
fn keep_where(list: &mut Vec<Candidate>, min_keep: usize, keep: impl Fn(&Candidate) -> bool) {
    let count = list.iter().filter(|candidate| keep(candidate)).count();
    if count >= min_keep {
        list.retain(keep);
    } else {
        keep_best(list, min_keep);
    }
}

fn max_logit(list: &[Candidate]) -> f64 {
    list.iter()
        .map(|candidate| f64::from(candidate.logit))
        .fold(f64::NEG_INFINITY, f64::max)
}

/// Tang et al., "Top-nsigma: not all logits are you need", 2024.
fn top_n_sigma(list: &mut Vec<Candidate>, sigmas: f32, min_keep: usize) {
    if sigmas <= 0.0 || list.len() < 2 {
        return;
    }
    let count = list.len() as f64;
    let mean = list
        .iter()
        .map(|candidate| f64::from(candidate.logit))
        .sum::<f64>()
        / count;
    let variance = list
        .iter()
        .map(|candidate| (f64::from(candidate.logit) - mean).powi(2))
        .sum::<f64>()
        / count;
    let threshold = max_logit(list) - f64::from(sigmas) * variance.sqrt();
    keep_where(list, min_keep, |candidate| {
        f64::from(candidate.logit) >= threshold
    });
}

fn top_k(list: &mut Vec<Candidate>, count: usize, min_keep: usize) {
    if count > 0 && count < list.len() {
        keep_best(list, count.max(min_keep));
    }
}

/// Meister et al., "Locally typical sampling", 2022.
fn typical(list: &mut Vec<Candidate>, mass: f64, min_keep: usize) {
    if mass >= 1.0 || list.len() < 2 {
        return;
    }
    let max = max_logit(list);
    let total: f64 = list
        .iter()
        .map(|candidate| (f64::from(candidate.logit) - max).exp())
        .sum();
    let log_p = |candidate: &Candidate| f64::from(candidate.logit) - max - total.ln();
    let entropy: f64 = list
        .iter()
        .map(|candidate| -log_p(candidate).exp() * log_p(candidate))
        .sum();
    let distance = |candidate: &Candidate| (-log_p(candidate) - entropy).abs();
    list.sort_by(|a, b| distance(a).total_cmp(&distance(b)).then(by_rank(a, b)));
    let mut sum = 0.0;
    let mut kept = 0;
    for candidate in list.iter() {
        kept += 1;
        sum += log_p(candidate).exp();
        if sum > mass && kept >= min_keep {
            break;
        }
    }
    list.truncate(kept);
}

/// Holtzman et al., "The curious case of neural text degeneration", 2019: the smallest set of the likeliest tokens
/// whose probability reaches `mass`.
fn top_p(list: &mut Vec<Candidate>, mass: f64, min_keep: usize) {
    if mass >= 1.0 || list.len() < 2 {
        return;
    }
    let max = max_logit(list);
    let weight = |candidate: &Candidate| (f64::from(candidate.logit) - max).exp();
    let wanted = mass * list.iter().map(weight).sum::<f64>();
    // The set is nearly always small, so growing heads of the list are sorted instead of the whole vocabulary.
    let mut sorted = 0;
    let mut sum = 0.0;
    let mut kept = 0;
    while kept < list.len() {
        if kept == sorted {
            let head = (sorted * 8).max(128).min(list.len());
            let rest = list.get_mut(sorted..).unwrap_or_default();
            if head < sorted + rest.len() {
                rest.select_nth_unstable_by(head - sorted, by_rank);
            }
            list.get_mut(sorted..head)
                .unwrap_or_default()
                .sort_unstable_by(by_rank);
            sorted = head;
        }
        sum += list.get(kept).map_or(0.0, weight);
        kept += 1;
        if sum >= wanted && kept >= min_keep {
            break;
        }
    }
    list.truncate(kept);
}

/// Nguyen et al., "Turning up the heat: min-p sampling", 2024.
fn min_p(list: &mut Vec<Candidate>, ratio: f64, min_keep: usize) {
    if ratio <= 0.0 || list.len() < 2 {
        return;
    }
    let threshold = max_logit(list) + ratio.ln();
    keep_where(list, min_keep, |candidate| {
        f64::from(candidate.logit) >= threshold
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kept(probabilities: &[f64], params: SamplingParams) -> Vec<u32> {
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
        let mut out = Vec::new();
        candidates(&logits, &params, &mut out);
        let mut tokens: Vec<u32> = out.iter().map(|candidate| candidate.token).collect();
        tokens.sort_unstable();
        tokens
    }

    const P: [f64; 5] = [0.1, 0.4, 0.05, 0.3, 0.15];

    #[test]
    fn each_filter_alone() {
        let off = SamplingParams::cli;
        assert_eq!(kept(&P, off()), [0, 1, 2, 3, 4]);
        assert_eq!(kept(&P, SamplingParams { top_k: 2, ..off() }), [1, 3]);
        assert_eq!(
            kept(
                &P,
                SamplingParams {
                    top_p: 0.69,
                    ..off()
                }
            ),
            [1, 3]
        );
        assert_eq!(
            kept(
                &P,
                SamplingParams {
                    top_p: 0.71,
                    ..off()
                }
            ),
            [1, 3, 4]
        );
        assert_eq!(
            kept(
                &P,
                SamplingParams {
                    top_p: 0.0,
                    ..off()
                }
            ),
            [1]
        );
        assert_eq!(
            kept(
                &P,
                SamplingParams {
                    min_p: 0.26,
                    ..off()
                }
            ),
            [1, 3, 4]
        );
        assert_eq!(
            kept(
                &P,
                SamplingParams {
                    min_p: 1.0,
                    ..off()
                }
            ),
            [1]
        );
        // Entropy 1.39: surprises are 2.3, 0.92, 3.0, 1.2, 1.9, so 3, 1 and then 4 are the most typical.
        assert_eq!(
            kept(
                &P,
                SamplingParams {
                    typical_p: 0.25,
                    ..off()
                }
            ),
            [3]
        );
        assert_eq!(
            kept(
                &P,
                SamplingParams {
                    typical_p: 0.75,
                    ..off()
                }
            ),
            [1, 3, 4]
        );
        // Standard deviation of the logits 0.72: 0.3 is 0.29 below the best, 0.15 is 0.98.
        assert_eq!(
            kept(
                &P,
                SamplingParams {
                    top_n_sigma: 1.0,
                    ..off()
                }
            ),
            [1, 3]
        );
    }

    #[test]
    fn filters_see_what_the_one_before_left() {
        // Of the two that top-k leaves, the first has 0.57 of the probability.
        let params = SamplingParams {
            top_k: 2,
            top_p: 0.56,
            ..SamplingParams::cli()
        };
        assert_eq!(kept(&P, params), [1]);
    }

    #[test]
    fn min_keep_is_kept() {
        let params = SamplingParams {
            top_k: 1,
            top_p: 0.0,
            min_p: 1.0,
            typical_p: 0.0,
            top_n_sigma: 0.01,
            min_keep: 3,
            ..SamplingParams::cli()
        };
        assert_eq!(kept(&P, params).len(), 3);
    }

    #[test]
    fn equal_logits_are_kept_by_lowest_id() {
        assert_eq!(
            kept(
                &[0.25; 4],
                SamplingParams {
                    top_k: 2,
                    ..SamplingParams::cli()
                }
            ),
            [0, 1]
        );
        assert_eq!(
            kept(
                &[0.25; 4],
                SamplingParams {
                    top_p: 0.5,
                    ..SamplingParams::cli()
                }
            ),
            [0, 1]
        );
    }

    proptest! {
        #[test]
        fn top_p_equals_a_full_sort(logits in prop::collection::vec(-8.0f32..8.0, 1..2000), mass in 0.0f64..1.0) {
            let mut fast: Vec<Candidate> = logits.iter().zip(0..).map(|(&logit, token)| Candidate { token, logit }).collect();
            let mut slow = fast.clone();
            slow.sort_by(by_rank);
            let weights: Vec<f64> = slow.iter().map(|c| (f64::from(c.logit) - f64::from(slow[0].logit)).exp()).collect();
            let wanted = mass * fast.iter().map(|c| (f64::from(c.logit) - f64::from(slow[0].logit)).exp()).sum::<f64>();
            let mut sum = 0.0;
            let mut count = 0;
            for weight in weights {
                sum += weight;
                count += 1;
                if sum >= wanted {
                    break;
                }
            }
            top_p(&mut fast, mass, 1);
            prop_assert_eq!(fast, slow[..count].to_vec());
        }
    }
}
