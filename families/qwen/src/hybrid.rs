//! The hybrid decoder, wherever the checkpoint keeps it: layers of attention and of the gated delta rule.

use mlxcel_sdk::nn::{Decoder, DecoderLayer, DecoderShape, FeedForward, Mixer, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::delta::{DeltaNet, is_mlx_kernel};
use crate::gated_attention::GatedAttention;
use crate::hybrid_config::HybridConfig;

/// Views of the decoder and of its head: alone, inside a published multimodal model, or as mlx-lm saves
/// that. What is beside it (vision, heads for drafts) is known and not needed.
fn places(weights: &Weights) -> (Weights, Weights) {
    for beside in ["mtp", "model.visual", "visual", "vision_tower"] {
        weights.at(beside).ignore_all();
    }
    let (model, mlx) = (weights.at("model"), weights.at("language_model"));
    if mlx.exists() {
        return (mlx.at("model"), mlx.at("lm_head"));
    }
    let nested = model.at("language_model");
    let root = if nested.exists() { nested } else { model };
    (root, weights.at("lm_head"))
}

/// Loads the model; `feed_forward` makes the second half of a layer from its number and view.
pub(crate) fn load(
    config: &HybridConfig,
    weights: &Weights,
    feed_forward: impl Fn(usize, &Weights) -> Result<Box<dyn FeedForward>>,
) -> Result<Decoder> {
    let (root, head) = places(weights);
    let eps = config.eps;
    let rope = Rope::new(&root, &config.rope, config.head_dim, false)?;
    let plain_norms = stores_plain_norms(config, &root.at("layers"))?;
    let norm = |at: &Weights, width: usize| match plain_norms {
        true => RmsNorm::load(at, width, eps),
        false => RmsNorm::load_minus_one(at, width, eps),
    };
    let shape = DecoderShape {
        vocab: config.vocab,
        hidden: config.hidden,
        eps,
        norms_minus_one: !plain_norms,
        tied: config.tied,
        n_layers: config.attends.len(),
    };
    Decoder::load(&shape, &root, &head, |index, layer| {
        let attends = config.attends.get(index).copied().unwrap_or_default();
        let mixer: Box<dyn Mixer> = if attends {
            let at = layer.at("self_attn");
            Box::new(GatedAttention::load(&at, config, index, &rope, norm)?)
        } else {
            Box::new(DeltaNet::load(&layer.at("linear_attn"), config, index)?)
        };
        DecoderLayer::load(layer, &shape, mixer, feed_forward(index, layer)?)
    })
}

/// Norms are published minus one. mlx-lm stores them as they are used, and with them the kernels of
/// convolutions in its own layout, by which it is told.
fn stores_plain_norms(config: &HybridConfig, layers: &Weights) -> Result<bool> {
    match config.attends.iter().position(|attends| !attends) {
        Some(layer) => is_mlx_kernel(&layers.at_index(layer).at("linear_attn.conv1d")),
        None => Ok(false),
    }
}
