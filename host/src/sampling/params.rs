//! Sampling parameters, their ranges and the two sets of defaults.

use super::breakers::SequenceBreakers;
use super::logprobs::LogprobsRequest;
use super::order::{SamplerKind, SamplerOrder};
use super::row_draw::MAX_RANKED;

/// A number added to the logit of one token. -infinity forbids the token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitBias {
    /// The token.
    pub token: u32,
    /// What is added.
    pub bias: f32,
}

/// Which of the mirostat algorithms chooses, if any. It takes the place of every sampler but the temperature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mirostat {
    /// None.
    #[default]
    Off,
    /// The one with an estimate of the distribution's shape.
    V1,
    /// The one without.
    V2,
}

impl Mirostat {
    /// By its number.
    pub fn of(number: i64) -> Option<Self> {
        match number {
            0 => Some(Self::Off),
            1 => Some(Self::V1),
            2 => Some(Self::V2),
            _ => None,
        }
    }

    /// Its number.
    pub fn number(self) -> u32 {
        match self {
            Self::Off => 0,
            Self::V1 => 1,
            Self::V2 => 2,
        }
    }
}

/// How the next token is chosen. Start from [`SamplingParams::cli`] or [`SamplingParams::server`].
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; larger is more random.
    pub temperature: f32,
    /// The temperature moves by up to this much in both directions with the entropy; 0 is off.
    pub dynatemp_range: f32,
    /// Power of the entropy's share in that.
    pub dynatemp_exponent: f32,
    /// Keep the `top_k` likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the likeliest tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Keep the tokens whose surprise is nearest to the expected one, up to this probability; 1 keeps all.
    pub typical_p: f32,
    /// Keep logits within this many standard deviations of the largest; 0 or less keeps all.
    pub top_n_sigma: f32,
    /// How often, at random, the likeliest tokens are dropped; 0 is never.
    pub xtc_probability: f32,
    /// Then of the tokens with at least this probability all but the least likely go.
    pub xtc_threshold: f32,
    /// The filters leave at least this many tokens. 0 counts as 1.
    pub min_keep: usize,
    /// Divides positive logits of ids seen, multiplies negative ones; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once for every time an id was seen; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted if an id was seen at all; 0 is off.
    pub presence_penalty: f32,
    /// How many of the last ids (prompt and answer) the penalties look at; 0 switches them off, -1 means all.
    pub repeat_last_n: i32,
    /// Penalty for continuing a repetition; 0 is off.
    pub dry_multiplier: f32,
    /// Factor for each further token of the repetition.
    pub dry_base: f32,
    /// Repetitions up to this length cost nothing but the multiplier.
    pub dry_allowed_length: u32,
    /// How many of the last ids (prompt and answer) are searched for repetitions; 0 switches it off, -1 means all.
    pub dry_penalty_last_n: i32,
    /// Where repetitions end.
    pub dry_sequence_breakers: SequenceBreakers,
    /// Mirostat.
    pub mirostat: Mirostat,
    /// Surprise in bits that mirostat aims for.
    pub mirostat_tau: f32,
    /// How fast mirostat learns.
    pub mirostat_eta: f32,
    /// Probability that adaptive-p aims for; below 0 it is off.
    pub adaptive_target: f32,
    /// How much of what it has learnt adaptive-p keeps from draw to draw.
    pub adaptive_decay: f32,
    /// Which of these work, and in which order.
    pub samplers: SamplerOrder,
    /// Added before anything else.
    pub logit_bias: Vec<LogitBias>,
    /// The seed of the draws. Without one, every request draws differently.
    pub seed: Option<u64>,
    /// Which log probabilities to report.
    pub logprobs: Option<LogprobsRequest>,
}

impl Default for SamplingParams {
    /// The command line's.
    fn default() -> Self {
        SamplingParams::cli()
    }
}

impl SamplingParams {
    /// The command line's defaults: greedy, everything off.
    pub fn cli() -> Self {
        SamplingParams {
            temperature: 0.0,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            min_keep: 0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repeat_last_n: 64,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: 0,
            dry_sequence_breakers: SequenceBreakers::default(),
            mirostat: Mirostat::Off,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            adaptive_target: -1.0,
            adaptive_decay: 0.9,
            samplers: SamplerOrder::default(),
            logit_bias: Vec::new(),
            seed: None,
            logprobs: None,
        }
    }

    /// The server's defaults, those of llama-server.
    pub fn server() -> Self {
        SamplingParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            dry_penalty_last_n: 64,
            ..SamplingParams::cli()
        }
    }

    /// Forbids tokens, for example the end-of-sequence ids when the end is to be ignored.
    pub fn forbid(&mut self, tokens: impl IntoIterator<Item = u32>) {
        self.logit_bias
            .extend(tokens.into_iter().map(|token| LogitBias {
                token,
                bias: f32::NEG_INFINITY,
            }));
    }

    /// Whether a sampler is in the order. With mirostat none is.
    fn uses(&self, kind: SamplerKind) -> bool {
        self.mirostat == Mirostat::Off && self.samplers.has(kind)
    }

    /// Whether any penalty changes anything.
    pub fn penalises(&self) -> bool {
        let active = self.repetition_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0;
        active && self.repeat_last_n != 0 && self.uses(SamplerKind::Penalties)
    }

    /// Whether DRY is on.
    pub fn looks_for_repetitions(&self) -> bool {
        self.dry_multiplier != 0.0 && self.dry_penalty_last_n != 0 && self.uses(SamplerKind::Dry)
    }

    /// Whether the draw is by rank: what top-k leaves is a short list, and nothing bends its distribution.
    pub(super) fn draws_by_rank(&self) -> bool {
        self.uses(SamplerKind::TopK)
            && (1..=MAX_RANKED).contains(&self.top_k)
            && self.min_keep <= MAX_RANKED as usize
            && self.adaptive_target < 0.0
    }

    /// Whether the token is the likeliest one, as bias and penalties leave the row.
    pub fn is_greedy(&self) -> bool {
        let drops_the_best = self.uses(SamplerKind::TypicalP) && self.typical_p < 1.0
            || self.uses(SamplerKind::Xtc) && self.xtc_probability > 0.0;
        self.temperature == 0.0
            && self.dynatemp_range == 0.0
            && self.uses(SamplerKind::Temperature)
            && !drops_the_best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_sets_of_defaults() {
        let (cli, server) = (SamplingParams::cli(), SamplingParams::server());
        assert!(cli.is_greedy() && !server.is_greedy());
        assert_eq!(cli.validate(10), Ok(()));
        assert_eq!(server.validate(10), Ok(()));
        insta::assert_debug_snapshot!(server, @r#"
        SamplingParams {
            temperature: 0.8,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            min_keep: 0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repeat_last_n: 64,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: 64,
            dry_sequence_breakers: SequenceBreakers {
                texts: [
                    "\n",
                    ":",
                    "\"",
                    "*",
                ],
                tokens: None,
            },
            mirostat: Off,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            adaptive_target: -1.0,
            adaptive_decay: 0.9,
            samplers: SamplerOrder(
                [
                    Penalties,
                    Dry,
                    TopNSigma,
                    TopK,
                    TypicalP,
                    TopP,
                    MinP,
                    Xtc,
                    Temperature,
                ],
            ),
            logit_bias: [],
            seed: None,
            logprobs: None,
        }
        "#);
        let same = SamplingParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            dry_penalty_last_n: 64,
            ..cli
        };
        assert_eq!(server, same);
    }

    #[test]
    fn what_works_depends_on_the_order_too() {
        let base = SamplingParams {
            presence_penalty: 1.0,
            dry_multiplier: 1.0,
            dry_penalty_last_n: -1,
            ..SamplingParams::cli()
        };
        assert!(base.penalises() && base.looks_for_repetitions() && base.is_greedy());
        let none = SamplingParams {
            samplers: SamplerOrder::from_letters("k").unwrap(),
            ..base.clone()
        };
        assert!(!none.penalises() && !none.looks_for_repetitions() && !none.is_greedy());
        let mirostat = SamplingParams {
            mirostat: Mirostat::V2,
            ..base.clone()
        };
        assert!(!mirostat.penalises() && !mirostat.looks_for_repetitions());
        let xtc = SamplingParams {
            xtc_probability: 0.1,
            ..base.clone()
        };
        let moving = SamplingParams {
            dynatemp_range: 0.1,
            ..base
        };
        assert!(!xtc.is_greedy() && !moving.is_greedy());
    }
}
