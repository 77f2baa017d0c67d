//! Ranges of the sampling parameters.

use super::params::{LogitBias, SamplingParams};

/// A parameter outside its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ParamError {
    /// A number outside its range, or not a number.
    #[error("{name} is {value}, expected {expected}")]
    Range {
        /// The parameter.
        name: &'static str,
        /// What it was.
        value: f64,
        /// The range in words.
        expected: &'static str,
    },
    /// A bias for a token that does not exist.
    #[error("logit_bias names token {token}, the vocabulary has {vocab_size} tokens")]
    BiasToken {
        /// The token.
        token: u32,
        /// The model's vocabulary.
        vocab_size: usize,
    },
    /// A bias that is not a number or would force a token.
    #[error("logit_bias of token {token} is {bias}, expected a finite number or -infinity")]
    BiasValue {
        /// The token.
        token: u32,
        /// The bias.
        bias: f32,
    },
    /// Sequence breakers that no vocabulary was asked about: a mistake of the program.
    #[error("dry_sequence_breakers were not turned into tokens")]
    Breakers,
    /// More alternatives than there are tokens.
    #[error("{wanted} top log probabilities wanted, the vocabulary has {vocab_size} tokens")]
    TopLogprobs {
        /// How many.
        wanted: usize,
        /// The model's vocabulary.
        vocab_size: usize,
    },
}

/// Name, number, and the range with its words.
type Ranged = (&'static str, f32, f32, f32, &'static str);

impl SamplingParams {
    fn ranged(&self) -> [Ranged; 18] {
        let tiny = f32::MIN_POSITIVE;
        let one = "0 to 1";
        let signed = "-100 to 100";
        let hundred = "0 to 100";
        [
            ("temperature", self.temperature, 0.0, 100.0, hundred),
            ("dynatemp_range", self.dynatemp_range, 0.0, 100.0, hundred),
            (
                "dynatemp_exponent",
                self.dynatemp_exponent,
                0.0,
                100.0,
                hundred,
            ),
            ("top_p", self.top_p, 0.0, 1.0, one),
            ("min_p", self.min_p, 0.0, 1.0, one),
            ("typical_p", self.typical_p, 0.0, 1.0, one),
            (
                "top_n_sigma",
                self.top_n_sigma,
                -1e6,
                1e6,
                "a finite number",
            ),
            ("xtc_probability", self.xtc_probability, 0.0, 1.0, one),
            ("xtc_threshold", self.xtc_threshold, 0.0, 1.0, one),
            (
                "repetition_penalty",
                self.repetition_penalty,
                tiny,
                100.0,
                "more than 0, up to 100",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                -100.0,
                100.0,
                signed,
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                -100.0,
                100.0,
                signed,
            ),
            ("dry_multiplier", self.dry_multiplier, 0.0, 100.0, hundred),
            ("dry_base", self.dry_base, 1.0, 100.0, "1 to 100"),
            ("mirostat_tau", self.mirostat_tau, 0.0, 100.0, hundred),
            ("mirostat_eta", self.mirostat_eta, 0.0, 100.0, hundred),
            (
                "adaptive_target",
                self.adaptive_target,
                -1e6,
                1.0,
                "0 to 1, or less than 0 for off",
            ),
            (
                "adaptive_decay",
                self.adaptive_decay,
                0.0,
                0.99,
                "0 to 0.99",
            ),
        ]
    }

    /// Checks every parameter for a model with `vocab_size` output rows.
    pub fn validate(&self, vocab_size: usize) -> Result<(), ParamError> {
        for (name, value, low, high, expected) in self.ranged() {
            if !(low..=high).contains(&value) {
                return Err(ParamError::Range {
                    name,
                    value: f64::from(value),
                    expected,
                });
            }
        }
        for (name, last_n) in [
            ("repeat_last_n", self.repeat_last_n),
            ("dry_penalty_last_n", self.dry_penalty_last_n),
        ] {
            if last_n < -1 {
                return Err(ParamError::Range {
                    name,
                    value: f64::from(last_n),
                    expected: "-1 or more",
                });
            }
        }
        for &LogitBias { token, bias } in &self.logit_bias {
            if token as usize >= vocab_size {
                return Err(ParamError::BiasToken { token, vocab_size });
            }
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(ParamError::BiasValue { token, bias });
            }
        }
        match self.logprobs {
            Some(request) if request.top > vocab_size => Err(ParamError::TopLogprobs {
                wanted: request.top,
                vocab_size,
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::logprobs::LogprobsRequest;
    use super::*;

    #[test]
    fn every_parameter_is_refused_by_name() {
        let base = SamplingParams::cli;
        type Change = fn(&mut SamplingParams);
        let changes: [Change; 21] = [
            |p| p.temperature = -0.1,
            |p| p.temperature = f32::NAN,
            |p| p.dynatemp_range = -1.0,
            |p| p.dynatemp_exponent = f32::INFINITY,
            |p| p.top_p = 1.1,
            |p| p.min_p = -1.0,
            |p| p.typical_p = f32::INFINITY,
            |p| p.top_n_sigma = f32::NAN,
            |p| p.xtc_probability = 2.0,
            |p| p.xtc_threshold = -0.5,
            |p| p.repetition_penalty = 0.0,
            |p| p.frequency_penalty = 101.0,
            |p| p.presence_penalty = f32::NAN,
            |p| p.dry_multiplier = -1.0,
            |p| p.dry_base = 0.5,
            |p| p.dry_penalty_last_n = -2,
            |p| p.mirostat_tau = f32::NAN,
            |p| p.mirostat_eta = -1.0,
            |p| p.adaptive_target = 1.5,
            |p| p.adaptive_decay = 1.0,
            |p| p.repeat_last_n = -2,
        ];
        let mut bad: Vec<SamplingParams> = changes
            .iter()
            .map(|change| {
                let mut params = base();
                change(&mut params);
                params
            })
            .collect();
        bad.extend([
            SamplingParams {
                logit_bias: vec![LogitBias {
                    token: 10,
                    bias: 0.0,
                }],
                ..base()
            },
            SamplingParams {
                logit_bias: vec![LogitBias {
                    token: 9,
                    bias: f32::INFINITY,
                }],
                ..base()
            },
            SamplingParams {
                logprobs: Some(LogprobsRequest {
                    top: 11,
                    ..Default::default()
                }),
                ..base()
            },
        ]);
        let messages: Vec<String> = bad
            .iter()
            .map(|params| params.validate(10).unwrap_err().to_string())
            .collect();
        insta::assert_snapshot!(messages.join("\n"), @r"
        temperature is -0.10000000149011612, expected 0 to 100
        temperature is NaN, expected 0 to 100
        dynatemp_range is -1, expected 0 to 100
        dynatemp_exponent is inf, expected 0 to 100
        top_p is 1.100000023841858, expected 0 to 1
        min_p is -1, expected 0 to 1
        typical_p is inf, expected 0 to 1
        top_n_sigma is NaN, expected a finite number
        xtc_probability is 2, expected 0 to 1
        xtc_threshold is -0.5, expected 0 to 1
        repetition_penalty is 0, expected more than 0, up to 100
        frequency_penalty is 101, expected -100 to 100
        presence_penalty is NaN, expected -100 to 100
        dry_multiplier is -1, expected 0 to 100
        dry_base is 0.5, expected 1 to 100
        dry_penalty_last_n is -2, expected -1 or more
        mirostat_tau is NaN, expected 0 to 100
        mirostat_eta is -1, expected 0 to 100
        adaptive_target is 1.5, expected 0 to 1, or less than 0 for off
        adaptive_decay is 1, expected 0 to 0.99
        repeat_last_n is -2, expected -1 or more
        logit_bias names token 10, the vocabulary has 10 tokens
        logit_bias of token 9 is inf, expected a finite number or -infinity
        11 top log probabilities wanted, the vocabulary has 10 tokens
        ");
    }
}
