//! Draws that need nothing but a row of logits and a few numbers, so that a device can make them.

use super::order::SamplerKind;
use super::params::{Mirostat, SamplingParams};

/// Most tokens that a draw by rank chooses from.
pub const MAX_RANKED: u32 = 256;

/// One draw: of the `top_k` highest logits the fewest whose probability reaches `top_p`, of those the ones within
/// `ln(min_p)` of the highest; then the first, from the highest down and the lower id first among equals, at which the
/// running sum of the probabilities at `temperature` exceeds `uniform`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowDraw {
    /// From 1 to [`MAX_RANKED`]. 1 is the highest logit, whatever the rest says.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// Above 0.
    pub temperature: f32,
    /// From 0 to below 1.
    pub uniform: f32,
}

impl RowDraw {
    /// The highest logit.
    pub const GREEDY: Self = Self {
        top_k: 1,
        top_p: 1.0,
        min_p: 0.0,
        temperature: 1.0,
        uniform: 0.0,
    };

    /// Whether it is the highest logit.
    pub fn is_greedy(&self) -> bool {
        self.top_k == 1
    }

    /// The draw that `params` ask for, if it is one of this kind; without the random number.
    pub(super) fn of(params: &SamplingParams) -> Option<Self> {
        let needs_more = params.penalises()
            || params.looks_for_repetitions()
            || !params.logit_bias.is_empty()
            || params.logprobs.is_some();
        if needs_more {
            return None;
        }
        if params.is_greedy() {
            return Some(Self::GREEDY);
        }
        let is_ranked =
            params.mirostat == Mirostat::Off && params.draws_by_rank() && params.min_keep <= 1;
        is_ranked.then(|| Self::in_order(params)).flatten()
    }

    /// The numbers of the samplers that do anything, provided that they come in the one order.
    fn in_order(params: &SamplingParams) -> Option<Self> {
        let mut draw = Self {
            top_k: 0,
            ..Self::GREEDY
        };
        // A sampler that does nothing may be anywhere.
        let mut place = 0;
        for kind in params.samplers.kinds() {
            let own = match kind {
                SamplerKind::TopK => {
                    draw.top_k = params.top_k;
                    1
                }
                SamplerKind::TopP if params.top_p < 1.0 => {
                    draw.top_p = params.top_p;
                    2
                }
                SamplerKind::MinP if params.min_p > 0.0 => {
                    draw.min_p = params.min_p;
                    3
                }
                SamplerKind::Temperature
                    if params.temperature != 1.0 || params.dynatemp_range > 0.0 =>
                {
                    // Next to nothing leaves the highest logit alone, which is no division.
                    let is_plain =
                        params.dynatemp_range <= 0.0 && params.temperature >= f32::MIN_POSITIVE;
                    draw.temperature = is_plain.then_some(params.temperature)?;
                    4
                }
                SamplerKind::TypicalP if params.typical_p < 1.0 => return None,
                SamplerKind::TopNSigma if params.top_n_sigma > 0.0 => return None,
                SamplerKind::Xtc if params.xtc_probability > 0.0 => return None,
                _ => continue,
            };
            if own <= place {
                return None;
            }
            place = own;
        }
        Some(draw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{LogitBias, LogprobStage, LogprobsRequest, Sampler, SamplerOrder};

    fn of(change: impl FnOnce(&mut SamplingParams)) -> Option<RowDraw> {
        let mut params = SamplingParams::server();
        change(&mut params);
        RowDraw::of(&params)
    }

    #[test]
    fn the_servers_defaults_and_greedy_requests_are_of_this_kind() {
        let expected = RowDraw {
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            temperature: 0.8,
            uniform: 0.0,
        };
        assert_eq!(of(|_| ()), Some(expected));
        assert_eq!(RowDraw::of(&SamplingParams::cli()), Some(RowDraw::GREEDY));
        assert_eq!(of(|p| p.temperature = 0.0), Some(RowDraw::GREEDY));
        let warm = of(|p| p.temperature = 1.0).unwrap();
        assert_eq!((warm.temperature, warm.top_k), (1.0, 40));
        // Orders that differ only in what is off.
        let order = |letters: &str| SamplerOrder::from_letters(letters).unwrap();
        assert_eq!(of(|p| p.samplers = order("kpmt")), Some(expected));
        let no_p = of(|p| p.samplers = order("kmt")).unwrap();
        assert_eq!((no_p.top_p, no_p.min_p), (1.0, 0.05));
    }

    #[test]
    fn whatever_needs_more_is_not() {
        let order = |letters: &str| SamplerOrder::from_letters(letters).unwrap();
        type Change = Box<dyn FnOnce(&mut SamplingParams)>;
        let cases: Vec<Change> = vec![
            Box::new(|p| p.top_k = 0),
            Box::new(|p| p.top_k = MAX_RANKED + 1),
            Box::new(|p| p.min_keep = 2),
            Box::new(|p| p.presence_penalty = 0.1),
            Box::new(|p| p.dry_multiplier = 0.1),
            Box::new(|p| p.typical_p = 0.9),
            Box::new(|p| p.top_n_sigma = 1.0),
            Box::new(|p| p.xtc_probability = 0.1),
            Box::new(|p| p.dynatemp_range = 0.1),
            Box::new(|p| p.mirostat = Mirostat::V2),
            Box::new(|p| p.adaptive_target = 0.5),
            Box::new(|p| {
                p.logit_bias.push(LogitBias {
                    token: 1,
                    bias: 1.0,
                })
            }),
            Box::new(|p| {
                p.logprobs = Some(LogprobsRequest {
                    top: 0,
                    stage: LogprobStage::Model,
                })
            }),
            Box::new(move |p| p.samplers = order("pkmt")),
            Box::new(move |p| p.samplers = order("kptm")),
            Box::new(move |p| p.samplers = order("pmt")),
        ];
        for (index, case) in cases.into_iter().enumerate() {
            assert_eq!(of(case), None, "case {index}");
        }
    }

    #[test]
    fn every_token_has_its_own_number_and_a_look_ahead_finds_it() {
        let params = SamplingParams {
            seed: Some(7),
            ..SamplingParams::server()
        };
        let mut sampler = Sampler::new(&params, &[1]).unwrap();
        let ahead: Vec<f32> = (0..4)
            .map(|ahead| sampler.row_draw(ahead).unwrap().uniform)
            .collect();
        for (step, expected) in ahead.iter().enumerate() {
            assert_eq!(sampler.row_draw(0).unwrap().uniform, *expected, "{step}");
            sampler.accept(3);
        }
        assert!(ahead.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
