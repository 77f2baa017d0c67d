//! The decoder, top to bottom. `T` rows of a packed step, `H` hidden features.

use mlxcel_sdk::nn::{Attention, AttentionConfig, Embedding, GatedMlp, LmHead, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::config::DecoderConfig;

/// The feed-forward half of a block, which architectures exchange.
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
    /// Loads the model; `feed_forward` makes the second half of each block from the layer's view.
    pub(crate) fn load(
        config: &DecoderConfig,
        weights: &Weights,
        feed_forward: impl Fn(&Weights) -> Result<Box<dyn FeedForward>>,
    ) -> Result<Self> {
        // Old exports carry the frequencies of every layer; they follow from the configuration.
        weights.ignore_suffix("rotary_emb.inv_freq");
        let root = weights.at("model");
        let rope = load_rope(config, &root)?;
        let embedding = Embedding::load(&root.at("embed_tokens"), config.vocab, config.hidden)?;
        let layers = root.at("layers");
        let blocks = config
            .layers
            .iter()
            .enumerate()
            .map(|(layer, kind)| {
                let at = layers.at_index(layer);
                let attention = AttentionConfig {
                    layer,
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
                Ok(Block {
                    input_norm: RmsNorm::load(
                        &at.at("input_layernorm"),
                        config.hidden,
                        config.eps,
                    )?,
                    attention: Attention::load(
                        &at.at("self_attn"),
                        attention,
                        kind.rope.then(|| rope.clone()),
                    )?,
                    post_norm: RmsNorm::load(
                        &at.at("post_attention_layernorm"),
                        config.hidden,
                        config.eps,
                    )?,
                    feed_forward: feed_forward(&at)?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let norm = RmsNorm::load(&root.at("norm"), config.hidden, config.eps)?;
        let head = LmHead::load(
            &weights.at("lm_head"),
            &embedding,
            config.tied,
            config.vocab,
            config.hidden,
        )?;
        Ok(Self {
            embedding,
            blocks,
            norm,
            head,
        })
    }
}

fn load_rope(config: &DecoderConfig, root: &Weights) -> Result<Rope> {
    let factors = root.at("rope_factors");
    if factors.contains("weight") {
        let half = (config.rope.dims / 2) as i64;
        let factors = factors.stored("weight", &[half])?;
        return Rope::with_factors(root, &config.rope, config.head_dim, false, &factors);
    }
    Rope::new(root, &config.rope, config.head_dim, false)
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
