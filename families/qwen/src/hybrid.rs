//! The hybrid decoder, top to bottom, wherever the checkpoint keeps it.

use mlxcel_sdk::nn::{Embedding, LmHead, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::delta::{DeltaNet, is_mlx_kernel};
use crate::gated_attention::GatedAttention;
use crate::hybrid_config::HybridConfig;
use crate::model::FeedForward;

/// What mixes the rows of a sequence.
enum Mixer {
    Attention(GatedAttention),
    Delta(DeltaNet),
}

impl Mixer {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        match self {
            Self::Attention(attention) => attention.forward(x, step),
            Self::Delta(delta) => delta.forward(x, step),
        }
    }
}

struct Block {
    input_norm: RmsNorm,
    mixer: Mixer,
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
pub(crate) struct Hybrid {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: LmHead,
}

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

impl Hybrid {
    /// Loads the model; `feed_forward` makes the second half of a block from the layer's number and view.
    pub(crate) fn load(
        config: &HybridConfig,
        weights: &Weights,
        feed_forward: impl Fn(usize, &Weights) -> Result<Box<dyn FeedForward>>,
    ) -> Result<Self> {
        let (root, head) = places(weights);
        let (vocab, hidden, eps) = (config.vocab, config.hidden, config.eps);
        let rope = Rope::new(&root, &config.rope, config.head_dim, false)?;
        let embedding = Embedding::load(&root.at("embed_tokens"), vocab, hidden)?;
        let layers = root.at("layers");
        let plain_norms = stores_plain_norms(config, &layers)?;
        let norm = |at: &Weights, width: usize| match plain_norms {
            true => RmsNorm::load(at, width, eps),
            false => RmsNorm::load_minus_one(at, width, eps),
        };
        let mut blocks = Vec::with_capacity(config.attends.len());
        for (layer, attends) in config.attends.iter().enumerate() {
            let at = layers.at_index(layer);
            let mixer = if *attends {
                let place = at.at("self_attn");
                Mixer::Attention(GatedAttention::load(&place, config, layer, &rope, norm)?)
            } else {
                Mixer::Delta(DeltaNet::load(&at.at("linear_attn"), config, layer)?)
            };
            blocks.push(Block {
                input_norm: norm(&at.at("input_layernorm"), hidden)?,
                mixer,
                post_norm: norm(&at.at("post_attention_layernorm"), hidden)?,
                feed_forward: feed_forward(layer, &at)?,
            });
        }
        Ok(Self {
            norm: norm(&root.at("norm"), hidden)?,
            head: LmHead::load(&head, &embedding, config.tied, vocab, hidden)?,
            embedding,
            blocks,
        })
    }
}

/// Norms are published minus one. mlx-lm stores them as they are used, and with them the kernels of
/// convolutions in its own layout, by which it is told.
fn stores_plain_norms(config: &HybridConfig, layers: &Weights) -> Result<bool> {
    match config.attends.iter().position(|attends| !attends) {
        Some(layer) => is_mlx_kernel(&layers.at_index(layer).at("linear_attn.conv1d")),
        None => Ok(false),
    }
}

impl Model for Hybrid {
    fn forward(&self, step: &Step<'_>) -> Result<Tensor> {
        let mut x = self.embedding.forward(&step.tokens)?; // [T, hidden]
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block
                .forward(&x, step)
                .map_err(|e| e.at(&format!("layer {layer}")))?;
        }
        let rows = step.logit_rows(&x)?; // [R, hidden]
        self.head.forward(&self.norm.forward(&rows)?) // [R, vocabulary]
    }
}
