//! The whole chain for one row of logits.

use super::filter::{self, Candidate};
use super::logprobs::{self, LogprobStage, Logprobs};
use super::params::{ParamError, SamplingParams};
use super::penalty::{add_bias, apply_penalties};
use super::rng::{MAX_GUMBEL, StepNoise, random_seed};

/// The chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The token.
    pub token: u32,
    /// Its log probability and its alternatives, if they were asked for.
    pub logprobs: Option<Logprobs>,
}

/// Why no token can be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A parameter is outside its range.
    #[error(transparent)]
    Params(#[from] ParamError),
    /// The model produced something that is not a logit. The usual cause is an overflow in half precision.
    #[error(
        "step {step}: the logit of token {token} is {value}, expected a number (numeric overflow in the model?)"
    )]
    NotANumber {
        /// The step of the request, 0 for the first new token.
        step: u64,
        /// The first such token.
        token: u32,
        /// NaN or +infinity.
        value: f32,
    },
    /// Every token has probability zero.
    #[error("step {step}: no token can be chosen, all {vocab_size} logits are -infinity")]
    NoToken {
        /// The step.
        step: u64,
        /// Length of the row.
        vocab_size: usize,
    },
}

/// Chooses the tokens of one request, one after the other.
#[derive(Debug, Clone)]
pub struct Sampler {
    chain: Chain,
    /// Ids that the penalties look at: prompt and answer, or nothing if they are off.
    history: Vec<u32>,
    step: u64,
}

impl Sampler {
    /// A sampler for a request with this prompt. Without a seed in `params`, a random one is taken.
    pub fn new(params: &SamplingParams, prompt: &[u32]) -> Result<Self, SamplingError> {
        let chain = Chain::new(params.clone(), params.seed.unwrap_or_else(random_seed))?;
        let history = if params.looks_back() {
            prompt.to_vec()
        } else {
            Vec::new()
        };
        Ok(Sampler {
            chain,
            history,
            step: 0,
        })
    }

    /// Chooses the next token from the model's `logits` and remembers it.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Sample, SamplingError> {
        let sample = self.chain.choose(logits, &self.history, self.step)?;
        self.step += 1;
        if self.chain.params().looks_back() {
            self.history.push(sample.token);
        }
        Ok(sample)
    }

    /// The seed in use, which repeats the answer.
    pub fn seed(&self) -> u64 {
        self.chain.seed
    }
}

/// The chain as a function of logits, ids so far and step. Holds parameters and scratch memory, but no state that a
/// result depends on.
#[derive(Debug, Clone)]
pub struct Chain {
    params: SamplingParams,
    seed: u64,
    logits: Vec<f32>,
    candidates: Vec<Candidate>,
}

impl Chain {
    /// A chain with checked parameters. `seed` takes the place of the one in `params`.
    pub fn new(params: SamplingParams, seed: u64) -> Result<Self, ParamError> {
        // What depends on the vocabulary is checked when the first logits show its size.
        params.validate(usize::MAX)?;
        Ok(Chain {
            params,
            seed,
            logits: Vec::new(),
            candidates: Vec::new(),
        })
    }

    /// The parameters.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Chooses the token of `step` from the model's `logits`. `history` holds the ids so far, prompt first.
    pub fn choose(
        &mut self,
        logits: &[f32],
        history: &[u32],
        step: u64,
    ) -> Result<Sample, SamplingError> {
        if step == 0 {
            self.params.validate(logits.len())?;
        }
        if let Some((&value, token)) = logits
            .iter()
            .zip(0u32..)
            .find(|(v, _)| v.is_nan() || **v == f32::INFINITY)
        {
            return Err(SamplingError::NotANumber { step, token, value });
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        add_bias(&mut self.logits, &self.params.logit_bias);
        apply_penalties(&mut self.logits, history, &self.params);
        let token = if self.params.is_greedy() {
            self.greedy()
        } else {
            self.draw(step)
        };
        let token = token.ok_or(SamplingError::NoToken {
            step,
            vocab_size: logits.len(),
        })?;
        let logprobs = self.params.logprobs.map(|request| match request.stage {
            LogprobStage::Model => logprobs::of_logits(logits, token, request.top),
            LogprobStage::Drawn => {
                let temperature = f64::from(self.params.temperature);
                // A greedy draw has one candidate, whatever the divisor.
                let temperature = if self.params.is_greedy() {
                    1.0
                } else {
                    temperature
                };
                logprobs::of_candidates(&self.candidates, temperature, token, request.top)
            }
        });
        Ok(Sample { token, logprobs })
    }

    fn greedy(&mut self) -> Option<u32> {
        self.candidates.clear();
        let mut best: Option<Candidate> = None;
        for (&logit, token) in self.logits.iter().zip(0u32..) {
            if logit > best.map_or(f32::NEG_INFINITY, |best| best.logit) {
                best = Some(Candidate { token, logit });
            }
        }
        self.candidates.extend(best);
        best.map(|best| best.token)
    }

    fn draw(&mut self, step: u64) -> Option<u32> {
        filter::candidates(&self.logits, &self.params, &mut self.candidates);
        let noise = StepNoise::new(self.seed, step);
        let temperature = f64::from(self.params.temperature);
        let mut best: Option<(f64, u32)> = None;
        for candidate in &self.candidates {
            let scaled = f64::from(candidate.logit) / temperature;
            let (score, token) = best.unwrap_or((f64::NEG_INFINITY, u32::MAX));
            // No noise could lift this token over the best one.
            if scaled + MAX_GUMBEL < score {
                continue;
            }
            let noisy = scaled + noise.gumbel(candidate.token);
            if noisy > score || (noisy == score && candidate.token < token) {
                best = Some((noisy, candidate.token));
            }
        }
        best.map(|(_, token)| token)
    }
}
