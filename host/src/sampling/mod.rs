//! From logits to the next token.
//!
//! Everything here is a function of its arguments: the parameters, the logits of one row, the ids so far and the step.
//! [`Chain`] keeps no state between steps, so a result never depends on what else runs in the batch, and each stage can
//! be moved to the device without changing what it computes. [`Sampler`] adds the ids so far and the step. This module must not know about requests, models or tensors.
//!
//! # Order
//!
//! 1. `logit_bias` is added.
//! 2. Penalties: repetition, then frequency and presence, over the last `repeat_last_n` ids.
//! 3. Temperature 0: the largest logit wins, the lowest id among equals; nothing below applies.
//! 4. `top_n_sigma`, `top_k`, `typical_p`, `top_p`, `min_p`, each on what the one before left, all on the distribution
//!    *without* temperature, as in llama.cpp's default order.
//! 5. Temperature, and a draw by the Gumbel-max trick: the token with the largest `logit / temperature + noise`, where
//!    the noise of a token is a function of seed, step and token id alone (see `rng`).
//!
//! NaN and +infinity in the model's logits are an error that names the step. -infinity is a token that cannot be drawn.

mod chain;
mod filter;
mod logprobs;
mod params;
mod penalty;
mod rng;

pub use chain::{Chain, Sample, Sampler, SamplingError};
pub use logprobs::{LogprobStage, Logprobs, LogprobsRequest};
pub use params::{LogitBias, ParamError, SamplingParams};
pub use rng::random_seed;

#[cfg(test)]
mod tests;
