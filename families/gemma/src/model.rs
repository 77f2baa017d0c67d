//! The decoder, top to bottom. `T` rows of a packed step, `H` hidden features.

use mlxcel_sdk::nn::{Attention, AttentionConfig, Embedding, GatedMlp, LmHead, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Sizes};

/// Largest finite half-precision number.
const F16_MAX: f64 = 65504.0;

/// Attention and feed-forward, each between norms, added to the residual stream.
struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    attention_post_norm: Option<RmsNorm>,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
    mlp_post_norm: Option<RmsNorm>,
    /// Residuals of the larger models leave the range of half precision; mlx-lm limits them likewise.
    limited: bool,
}

impl Block {
    fn load(
        at: &Weights,
        config: &DecoderConfig,
        attention: AttentionConfig,
        rope: &Rope,
    ) -> Result<Self> {
        let Sizes {
            hidden, inner, eps, ..
        } = config.sizes;
        let norm = |name: &str| RmsNorm::load_minus_one(&at.at(name), hidden, eps);
        // The first generation calls the norm before the feed-forward block by the name that later
        // ones give to the norm behind attention.
        let (mlp_norm, attention_post_norm, mlp_post_norm) = if config.post_norms {
            (
                norm("pre_feedforward_layernorm")?,
                Some(norm("post_attention_layernorm")?),
                Some(norm("post_feedforward_layernorm")?),
            )
        } else {
            (norm("post_attention_layernorm")?, None, None)
        };
        Ok(Self {
            attention_norm: norm("input_layernorm")?,
            attention: Attention::load_with_norms(
                &at.at("self_attn"),
                attention,
                Some(rope.clone()),
                RmsNorm::load_minus_one,
            )?,
            attention_post_norm,
            mlp_norm,
            mlp: GatedMlp::load(&at.at("mlp"), hidden, inner, false, config.activation)?,
            mlp_post_norm,
            limited: at.compute_dtype() == DType::F16,
        })
    }

    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let x = match &self.attention_post_norm {
            None if !self.limited => self.attention.forward_onto(x, &self.attention_norm, step)?,
            norm => {
                let y = (self.attention).forward_normed(x, &self.attention_norm, step)?;
                self.residual(x, y, norm.as_ref())?
            }
        };
        match &self.mlp_post_norm {
            None if !self.limited => self.mlp.forward_onto(&x, &self.mlp_norm),
            norm => {
                let y = self.mlp.forward_normed(&x, &self.mlp_norm)?;
                self.residual(&x, y, norm.as_ref())
            }
        }
    }

    fn residual(&self, x: &Tensor, y: Tensor, norm: Option<&RmsNorm>) -> Result<Tensor> {
        let y = match norm {
            Some(norm) => norm.forward(&y)?,
            None => y,
        };
        let sum = x.add(&y)?;
        if self.limited {
            return sum.clip(-F16_MAX, F16_MAX);
        }
        Ok(sum)
    }
}

/// Scaled embedding, blocks, final norm, head, soft cap.
pub(crate) struct Decoder {
    embedding: Embedding,
    embedding_scale: f64,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: LmHead,
    logit_cap: Option<f64>,
}

impl Decoder {
    /// Loads the decoder at `root` and the head at `head`.
    pub(crate) fn load(config: &DecoderConfig, root: &Weights, head: &Weights) -> Result<Self> {
        // Old exports carry the frequencies of every layer; they follow from the configuration.
        root.ignore_suffix("rotary_emb.inv_freq");
        let sizes = &config.sizes;
        let rope = Rope::new(root, &config.rope, sizes.head_dim, false)?;
        let sliding_rope = Rope::new(root, &config.sliding_rope, sizes.head_dim, false)?;
        let embedding = Embedding::load(&root.at("embed_tokens"), sizes.vocab, sizes.hidden)?;
        let layers = root.at("layers");
        let blocks = config
            .windows
            .iter()
            .enumerate()
            .map(|(layer, window)| {
                let attention = AttentionConfig {
                    layer,
                    hidden: sizes.hidden,
                    heads: sizes.heads,
                    kv_heads: sizes.kv_heads,
                    head_dim: sizes.head_dim,
                    qkv_bias: sizes.attention_bias,
                    out_bias: sizes.attention_bias,
                    qk_norm_eps: config.head_norms.then_some(sizes.eps),
                    scale: config.score_divisor.sqrt().recip() as f32,
                    softcap: config.score_cap.unwrap_or(0.0) as f32,
                };
                let rope = if window.is_some() {
                    &sliding_rope
                } else {
                    &rope
                };
                Block::load(&layers.at_index(layer), config, attention, rope)
            })
            .collect::<Result<Vec<_>>>()?;
        let norm = RmsNorm::load_minus_one(&root.at("norm"), sizes.hidden, sizes.eps)?;
        let head = LmHead::load(head, &embedding, config.tied, sizes.vocab, sizes.hidden)?;
        Ok(Self {
            embedding,
            embedding_scale: (sizes.hidden as f64).sqrt(),
            blocks,
            norm,
            head,
            logit_cap: config.logit_cap,
        })
    }
}

impl Model for Decoder {
    fn forward(&self, step: &Step<'_>) -> Result<Tensor> {
        let x = self.embedding.forward(&step.tokens)?; // [T, H]
        // The scale is rounded to the activations' type, as transformers does: 25.25 in bf16 and
        // 25.298 in f32 for a width of 640.
        let mut x = x.mul_scalar(self.embedding_scale)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block
                .forward(&x, step)
                .map_err(|e| e.at(&format!("layer {layer}")))?;
        }
        let rows = step.logit_rows(&x)?; // [R, H]
        let logits = self.head.forward_normed(&rows, &self.norm)?; // [R, V]
        match self.logit_cap {
            Some(cap) => logits.div_scalar(cap)?.tanh()?.mul_scalar(cap),
            None => Ok(logits),
        }
    }
}
