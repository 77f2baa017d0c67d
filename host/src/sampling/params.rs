//! Sampling parameters, their ranges and the two sets of defaults.

use super::logprobs::LogprobsRequest;

/// A number added to the logit of one token. -infinity forbids the token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitBias {
    /// The token.
    pub token: u32,
    /// What is added.
    pub bias: f32,
}

/// How the next token is chosen. Start from [`SamplingParams::cli`] or [`SamplingParams::server`].
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; larger is more random.
    pub temperature: f32,
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
    /// Added before anything else.
    pub logit_bias: Vec<LogitBias>,
    /// The seed of the draws. Without one, every request draws differently.
    pub seed: Option<u64>,
    /// Which log probabilities to report.
    pub logprobs: Option<LogprobsRequest>,
}

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
    /// More alternatives than there are tokens.
    #[error("{wanted} top log probabilities wanted, the vocabulary has {vocab_size} tokens")]
    TopLogprobs {
        /// How many.
        wanted: usize,
        /// The model's vocabulary.
        vocab_size: usize,
    },
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
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            min_keep: 0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repeat_last_n: 64,
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

    /// Whether any penalty needs the ids so far.
    pub fn looks_back(&self) -> bool {
        let active = self.repetition_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0;
        active && self.repeat_last_n != 0
    }

    /// Whether the next token is the likeliest one.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Checks every parameter for a model with `vocab_size` output rows.
    pub fn validate(&self, vocab_size: usize) -> Result<(), ParamError> {
        let range = |name, value: f32, low: f32, high: f32, expected| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(ParamError::Range {
                    name,
                    value: f64::from(value),
                    expected,
                })
            }
        };
        range("temperature", self.temperature, 0.0, 100.0, "0 to 100")?;
        range("top_p", self.top_p, 0.0, 1.0, "0 to 1")?;
        range("min_p", self.min_p, 0.0, 1.0, "0 to 1")?;
        range("typical_p", self.typical_p, 0.0, 1.0, "0 to 1")?;
        range(
            "top_n_sigma",
            self.top_n_sigma,
            -1e6,
            1e6,
            "a finite number",
        )?;
        range(
            "repetition_penalty",
            self.repetition_penalty,
            f32::MIN_POSITIVE,
            100.0,
            "more than 0, up to 100",
        )?;
        range(
            "frequency_penalty",
            self.frequency_penalty,
            -100.0,
            100.0,
            "-100 to 100",
        )?;
        range(
            "presence_penalty",
            self.presence_penalty,
            -100.0,
            100.0,
            "-100 to 100",
        )?;
        if self.repeat_last_n < -1 {
            let value = f64::from(self.repeat_last_n);
            return Err(ParamError::Range {
                name: "repeat_last_n",
                value,
                expected: "-1 or more",
            });
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
    use super::*;

    #[test]
    fn defaults_are_valid_and_differ() {
        assert_eq!(SamplingParams::cli().validate(10), Ok(()));
        assert_eq!(SamplingParams::server().validate(10), Ok(()));
        assert!(SamplingParams::cli().is_greedy());
        let server = SamplingParams::server();
        assert_eq!(
            (server.temperature, server.top_k, server.top_p, server.min_p),
            (0.8, 40, 0.95, 0.05)
        );
        assert_eq!(
            (
                server.repeat_last_n,
                server.repetition_penalty,
                server.typical_p
            ),
            (64, 1.0, 1.0)
        );
    }

    #[test]
    fn every_parameter_is_refused_by_name() {
        let base = SamplingParams::cli;
        let bad: Vec<SamplingParams> = vec![
            SamplingParams {
                temperature: -0.1,
                ..base()
            },
            SamplingParams {
                temperature: f32::NAN,
                ..base()
            },
            SamplingParams {
                top_p: 1.1,
                ..base()
            },
            SamplingParams {
                min_p: -1.0,
                ..base()
            },
            SamplingParams {
                typical_p: f32::INFINITY,
                ..base()
            },
            SamplingParams {
                top_n_sigma: f32::NAN,
                ..base()
            },
            SamplingParams {
                repetition_penalty: 0.0,
                ..base()
            },
            SamplingParams {
                frequency_penalty: 101.0,
                ..base()
            },
            SamplingParams {
                presence_penalty: f32::NAN,
                ..base()
            },
            SamplingParams {
                repeat_last_n: -2,
                ..base()
            },
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
        ];
        let messages: Vec<String> = bad
            .iter()
            .map(|params| params.validate(10).unwrap_err().to_string())
            .collect();
        insta::assert_snapshot!(messages.join("\n"), @r"
        temperature is -0.10000000149011612, expected 0 to 100
        temperature is NaN, expected 0 to 100
        top_p is 1.100000023841858, expected 0 to 1
        min_p is -1, expected 0 to 1
        typical_p is inf, expected 0 to 1
        top_n_sigma is NaN, expected a finite number
        repetition_penalty is 0, expected more than 0, up to 100
        frequency_penalty is 101, expected -100 to 100
        presence_penalty is NaN, expected -100 to 100
        repeat_last_n is -2, expected -1 or more
        logit_bias names token 10, the vocabulary has 10 tokens
        logit_bias of token 9 is inf, expected a finite number or -infinity
        11 top log probabilities wanted, the vocabulary has 10 tokens
        ");
    }
}
