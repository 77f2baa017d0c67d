//! The plain decoder of this line: attention with biases or head norms, and a feed-forward block that
//! architectures exchange.

use mlxcel_sdk::nn::{
    Attention, AttentionConfig, Decoder, DecoderLayer, DecoderShape, FeedForward, Rope,
};
use mlxcel_sdk::prelude::*;

use crate::config::DecoderConfig;

/// Loads the model; `feed_forward` makes the second half of a layer from its number and view.
pub(crate) fn load(
    config: &DecoderConfig,
    weights: &Weights,
    feed_forward: impl Fn(usize, &Weights) -> Result<Box<dyn FeedForward>>,
) -> Result<Decoder> {
    let (root, head) = (weights.at("model"), weights.at("lm_head"));
    let rope = Rope::new(&root, &config.rope, config.head_dim, false)?;
    let shape = DecoderShape {
        vocab: config.vocab,
        hidden: config.hidden,
        eps: config.eps,
        norms_minus_one: false,
        tied: config.tied,
        n_layers: config.windows.len(),
    };
    Decoder::load(&shape, &root, &head, |index, layer| {
        let attention = AttentionConfig {
            layer: index,
            hidden: config.hidden,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            qkv_bias: config.qkv_bias,
            out_bias: config.out_bias,
            qk_norm_eps: config.head_norms.then_some(config.eps),
            scale: (config.head_dim as f32).sqrt().recip(),
            softcap: 0.0,
        };
        let attention = Attention::load(&layer.at("self_attn"), attention, Some(rope.clone()))?;
        DecoderLayer::load(
            layer,
            &shape,
            Box::new(attention),
            feed_forward(index, layer)?,
        )
    })
}
