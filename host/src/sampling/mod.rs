//! From logits to the next token.
//!
//! A [`Sampler`] is a function of the parameters, the logits of one row, the ids so far and the step. What it remembers
//! (ids, and what mirostat and adaptive-p have learnt) is of its own request, so a result never depends on what else runs
//! in the batch. This module must not know about requests, models, tokenizers or tensors.
//!
//! # Order
//!
//! 1. `logit_bias` is added.
//! 2. The samplers of [`SamplingParams::samplers`] in their order, each on what the one before left. By default, as in
//!    llama.cpp: penalties (repetition, then frequency and presence), DRY, top-n-sigma, top-k, typical-p, top-p, min-p,
//!    XTC, temperature. All filters therefore look at the distribution *without* temperature.
//! 3. Temperature 0 leaves the largest logit, the lowest id among equals.
//! 4. The draw. Where top-k leaves at most [`MAX_RANKED`] tokens: by rank with one random number of seed and step, see
//!    [`RowDraw`], so that a device can do the same. Else by the Gumbel-max trick: the token with the largest
//!    `logit / temperature + noise`, where the noise of a token is a function of seed, step and token id alone (see
//!    `rng`). With `adaptive_target` from 0 on, adaptive-p bends the distribution towards that probability first.
//!    Which of them it is depends on the request's parameters alone.
//!
//! Mirostat takes the place of all samplers but the temperature: bias, temperature, mirostat, draw.
//!
//! NaN and +infinity in the model's logits are an error that names the step. -infinity is a token that cannot be drawn.

mod breakers;
mod chain;
mod draw;
mod dry;
mod exp;
mod feedback;
mod filter;
mod history;
mod logprobs;
mod order;
mod params;
mod penalty;
mod rng;
mod row;
mod row_draw;
mod select;
mod validate;

pub use breakers::{BreakerCache, BreakerError, Breakers, SequenceBreakers};
pub use chain::{Sample, Sampler, SamplingError};
pub use logprobs::{LogprobStage, Logprobs, LogprobsRequest};
pub use order::{OrderError, SamplerKind, SamplerOrder};
pub use params::{LogitBias, Mirostat, SamplingParams};
pub use rng::random_seed;
pub use row_draw::{MAX_RANKED, RowDraw};
pub use validate::ParamError;

#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod tests;
