//! The decoder, top to bottom. `T` rows of a packed step, `H` hidden features.

use mlxcel_sdk::nn::{Attention, AttentionConfig, Embedding, GatedMlp, LmHead, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::config::DecoderConfig;

/// The feed-forward half of a block, which architectures and layers exchange.
pub(crate) trait FeedForward {
    /// `[T, H]` to `[T, H]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;
}

impl FeedForward for GatedMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        GatedMlp::forward(self, x)
    }
}

/// Attention and feed-forward, each behind a norm, added to the residual stream.
struct Block {
    input_norm: RmsNorm,
    attention: Attention,
    post_norm: RmsNorm,
    feed_forward: Box<dyn FeedForward>,
}

impl Block {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let x = x.add(&self.attention.forward(&self.input_norm.forward(x)?, step)?)?;
        x.add(&self.feed_forward.forward(&self.post_norm.forward(&x)?)?)
    }
}

/// Embedding, blocks, final norm, head.
pub(crate) struct Decoder {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: LmHead,
}

impl Decoder {
    /// Loads the model; `feed_forward` makes the second half of a block from the layer's number and view.
    pub(crate) fn load(
        config: &DecoderConfig,
        weights: &Weights,
        feed_forward: impl Fn(usize, &Weights) -> Result<Box<dyn FeedForward>>,
    ) -> Result<Self> {
        // Old exports carry the frequencies of every layer; they follow from the configuration.
        weights.ignore_suffix("rotary_emb.inv_freq");
        let root = weights.at("model");
        let (vocab, hidden, eps) = (config.vocab, config.hidden, config.eps);
        let rope = Rope::new(&root, &config.rope, config.head_dim, false)?;
        let embedding = Embedding::load(&root.at("embed_tokens"), vocab, hidden)?;
        let layers = root.at("layers");
        let blocks = (0..config.windows.len())
            .map(|layer| {
                let at = layers.at_index(layer);
                let norm = |name: &str| RmsNorm::load(&at.at(name), hidden, eps);
                let attention = attention_config(config, layer);
                Ok(Block {
                    input_norm: norm("input_layernorm")?,
                    attention: Attention::load(&at.at("self_attn"), attention, Some(rope.clone()))?,
                    post_norm: norm("post_attention_layernorm")?,
                    feed_forward: feed_forward(layer, &at)?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let norm = RmsNorm::load(&root.at("norm"), hidden, eps)?;
        let head = LmHead::load(
            &weights.at("lm_head"),
            &embedding,
            config.tied,
            vocab,
            hidden,
        )?;
        Ok(Self {
            embedding,
            blocks,
            norm,
            head,
        })
    }
}

fn attention_config(config: &DecoderConfig, layer: usize) -> AttentionConfig {
    AttentionConfig {
        layer,
        hidden: config.hidden,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        qkv_bias: config.qkv_bias,
        out_bias: config.out_bias,
        qk_norm_eps: config.head_norms.then_some(config.eps),
        scale: (config.head_dim as f32).sqrt().recip(),
        softcap: 0.0,
    }
}

impl Model for Decoder {
    fn forward(&self, step: &Step<'_>) -> Result<Tensor> {
        let mut x = self.embedding.forward(&step.tokens)?; // [T, H]
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block
                .forward(&x, step)
                .map_err(|e| e.at(&format!("layer {layer}")))?;
        }
        let rows = step.logit_rows(&x)?; // [R, H]
        self.head.forward(&self.norm.forward(&rows)?) // [R, V]
    }
}
