//! The decoder that the first generations share around the SDK's: halves of a layer that architectures
//! exchange, and layers for drafts behind the last.

use mlxcel_sdk::nn::{Decoder, DecoderLayer, DecoderShape, FeedForward, Mixer};
use mlxcel_sdk::prelude::*;

use crate::config::DecoderConfig;

/// Loads the model; the two functions make the halves of a layer from its number and view.
pub(crate) fn load(
    config: &DecoderConfig,
    weights: &Weights,
    mixer: impl Fn(usize, &Weights) -> Result<Box<dyn Mixer>>,
    feed_forward: impl Fn(usize, &Weights) -> Result<Box<dyn FeedForward>>,
) -> Result<Decoder> {
    let (root, head) = (weights.at("model"), weights.at("lm_head"));
    // Behind the layers lie those that predict further tokens, for drafting.
    for extra in 0..config.n_draft_layers {
        let index = config.n_layers + extra;
        root.at("layers").at_index(index).ignore_all();
    }
    let shape = DecoderShape {
        vocab: config.vocab,
        hidden: config.hidden,
        eps: config.eps,
        norms_minus_one: false,
        tied: config.tied,
        n_layers: config.n_layers,
    };
    Decoder::load(&shape, &root, &head, |index, layer| {
        let mixer = mixer(index, &layer.at("self_attn"))?;
        DecoderLayer::load(layer, &shape, mixer, feed_forward(index, &layer.at("mlp"))?)
    })
}
