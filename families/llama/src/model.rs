//! What the architectures of this line share around the SDK's decoder: where a checkpoint keeps it, its
//! plain layers, its rotary embedding.

use mlxcel_sdk::nn::{
    Attention, AttentionConfig, Decoder, DecoderLayer, FeedForward, GatedMlp, Rope, RopeConfig,
};
use mlxcel_sdk::prelude::*;

use crate::config::DecoderConfig;

/// Where a checkpoint keeps the decoder and its head.
pub(crate) struct Places {
    pub model: Weights,
    pub head: Weights,
}

impl Places {
    /// `model` and `lm_head`, as text checkpoints have them.
    pub(crate) fn text(weights: &Weights) -> Self {
        Self {
            model: weights.at("model"),
            head: weights.at("lm_head"),
        }
    }

    /// The text part of a checkpoint with more parts: below `language_model` as published, or with
    /// the names that transformers 5 uses in memory. Tensors of the other `parts` are not needed.
    pub(crate) fn nested(weights: &Weights, parts: &[&str]) -> Self {
        for part in parts {
            weights.at(part).ignore_all();
            weights.at("model").at(part).ignore_all();
        }
        let published = weights.at("language_model");
        let in_memory = weights.at("model.language_model");
        if published.exists() {
            Self::text(&published)
        } else if in_memory.exists() {
            Self {
                model: in_memory,
                head: weights.at("lm_head"),
            }
        } else {
            Self::text(weights)
        }
    }
}

/// Loads a model of plain layers; `feed_forward` makes the second half of each from the layer's view.
pub(crate) fn load_plain(
    config: &DecoderConfig,
    places: &Places,
    feed_forward: impl Fn(&Weights) -> Result<Box<dyn FeedForward>>,
) -> Result<Decoder> {
    let rope = load_rope(config, &places.model)?;
    let shape = config.shape();
    Decoder::load(&shape, &places.model, &places.head, |index, layer| {
        let kind = config.layers.get(index).copied().unwrap_or_default();
        let attention = AttentionConfig {
            layer: index,
            hidden: config.hidden,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            qkv_bias: config.attention_bias,
            out_bias: config.attention_bias,
            qk_norm_eps: None,
            scale: (config.head_dim as f32).sqrt().recip(),
            softcap: 0.0,
        };
        let rope = kind.rope.then(|| rope.clone());
        let attention = Attention::load(&layer.at("self_attn"), attention, rope)?;
        DecoderLayer::load(layer, &shape, Box::new(attention), feed_forward(layer)?)
    })
}

/// The gated block of every dense architecture here.
pub(crate) fn gated_mlp(config: &DecoderConfig, layer: &Weights) -> Result<Box<dyn FeedForward>> {
    Ok(Box::new(GatedMlp::load(
        &layer.at("mlp"),
        config.hidden,
        config.inner,
        config.mlp_bias,
        config.activation,
    )?))
}

/// The rotary embedding of a decoder, with factors per frequency where a GGUF file ships them.
pub(crate) fn load_rope(config: &DecoderConfig, model: &Weights) -> Result<Rope> {
    load_rope_of(&config.rope, config.head_dim, false, model)
}

/// As [`load_rope`], from its parts.
pub(crate) fn load_rope_of(
    config: &RopeConfig,
    head_dim: usize,
    interleaved: bool,
    model: &Weights,
) -> Result<Rope> {
    let factors = model.at("rope_factors");
    if factors.contains("weight") {
        let half = (config.dims / 2) as i64;
        let factors = factors.single("weight", &[half])?;
        return Rope::with_factors(model, config, head_dim, interleaved, &factors);
    }
    Rope::new(model, config, head_dim, interleaved)
}
