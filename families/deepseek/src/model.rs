//! The decoder that the first generations share, top to bottom. `T` rows of a packed step, `H`
//! hidden features.

use mlxcel_sdk::nn::{Attention, Embedding, GatedMlp, LmHead, RmsNorm};
use mlxcel_sdk::prelude::*;

use crate::config::DecoderConfig;

/// The attention half of a block.
pub(crate) trait Mixer {
    /// `[T, H]` to `[T, H]`.
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor>;
}

impl Mixer for Attention {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        Attention::forward(self, x, step)
    }
}

/// The feed-forward half of a block.
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
    mixer: Box<dyn Mixer>,
    post_norm: RmsNorm,
    feed_forward: Box<dyn FeedForward>,
}

impl Block {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let x = x.add(&self.mixer.forward(&self.input_norm.forward(x)?, step)?)?;
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
    /// Loads the model; the two functions make the halves of a block from the layer's number and view.
    pub(crate) fn load(
        config: &DecoderConfig,
        weights: &Weights,
        mixer: impl Fn(usize, &Weights) -> Result<Box<dyn Mixer>>,
        feed_forward: impl Fn(usize, &Weights) -> Result<Box<dyn FeedForward>>,
    ) -> Result<Self> {
        // Old exports carry the frequencies of every layer; they follow from the configuration.
        weights.ignore_suffix("rotary_emb.inv_freq");
        let root = weights.at("model");
        let (vocab, hidden, eps) = (config.vocab, config.hidden, config.eps);
        let embedding = Embedding::load(&root.at("embed_tokens"), vocab, hidden)?;
        let layers = root.at("layers");
        let blocks = (0..config.n_layers)
            .map(|layer| {
                let at = layers.at_index(layer);
                let norm = |name: &str| RmsNorm::load(&at.at(name), hidden, eps);
                Ok(Block {
                    input_norm: norm("input_layernorm")?,
                    mixer: mixer(layer, &at.at("self_attn"))?,
                    post_norm: norm("post_attention_layernorm")?,
                    feed_forward: feed_forward(layer, &at.at("mlp"))?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        // Behind the layers lie those that predict further tokens, for drafting.
        for extra in 0..config.n_draft_layers {
            layers.at_index(config.n_layers + extra).ignore_all();
        }
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
