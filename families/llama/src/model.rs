//! The decoder, top to bottom. `T` rows of a packed step, `H` hidden features.

use mlxcel_sdk::nn::{
    Attention, AttentionConfig, Embedding, GatedMlp, LmHead, RmsNorm, Rope, RopeConfig,
};
use mlxcel_sdk::prelude::*;

use crate::config::DecoderConfig;

/// The half of a block that looks at other positions, which architectures exchange.
pub(crate) trait Mixer {
    /// `[T, H]` to `[T, H]`.
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor>;
}

impl Mixer for Attention {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        Attention::forward(self, x, step)
    }
}

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

/// Attention and feed-forward, each behind a norm, added to the residual stream. Either half may be
/// missing.
pub(crate) struct Block {
    pub mixer: Option<(RmsNorm, Box<dyn Mixer>)>,
    pub feed_forward: Option<(RmsNorm, Box<dyn FeedForward>)>,
}

impl Block {
    /// Both halves behind the norms that this line of models calls `input_layernorm` and
    /// `post_attention_layernorm`.
    pub(crate) fn load(
        layer: &Weights,
        (hidden, eps): (usize, f32),
        mixer: impl Mixer + 'static,
        feed_forward: Box<dyn FeedForward>,
    ) -> Result<Self> {
        let norm = |name: &str| RmsNorm::load(&layer.at(name), hidden, eps);
        Ok(Self {
            mixer: Some((norm("input_layernorm")?, Box::new(mixer))),
            feed_forward: Some((norm("post_attention_layernorm")?, feed_forward)),
        })
    }

    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        if let Some((norm, mixer)) = &self.mixer {
            x = x.add(&mixer.forward(&norm.forward(&x)?, step)?)?;
        }
        if let Some((norm, feed_forward)) = &self.feed_forward {
            x = x.add(&feed_forward.forward(&norm.forward(&x)?)?)?;
        }
        Ok(x)
    }
}

/// What surrounds the blocks.
pub(crate) struct Frame {
    pub vocab: usize,
    pub hidden: usize,
    pub eps: f32,
    /// The embedding is the head.
    pub tied: bool,
    pub n_layers: usize,
}

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

/// Embedding, blocks, final norm, head.
pub(crate) struct Decoder {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: LmHead,
}

impl Decoder {
    /// Loads a model of plain blocks; `feed_forward` makes the second half of each from the layer's
    /// view.
    pub(crate) fn load(
        config: &DecoderConfig,
        places: &Places,
        feed_forward: impl Fn(&Weights) -> Result<Box<dyn FeedForward>>,
    ) -> Result<Self> {
        let rope = load_rope(config, &places.model)?;
        Self::with_blocks(&config.frame(), places, |index, layer| {
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
            Block::load(
                layer,
                (config.hidden, config.eps),
                attention,
                feed_forward(layer)?,
            )
        })
    }

    /// Loads a model whose blocks are made by `block` from their number and their view.
    pub(crate) fn with_blocks(
        frame: &Frame,
        places: &Places,
        block: impl Fn(usize, &Weights) -> Result<Block>,
    ) -> Result<Self> {
        // Old exports carry the frequencies of every layer; they follow from the configuration.
        places.model.ignore_suffix("rotary_emb.inv_freq");
        let embedding =
            Embedding::load(&places.model.at("embed_tokens"), frame.vocab, frame.hidden)?;
        let layers = places.model.at("layers");
        let blocks = (0..frame.n_layers)
            .map(|index| block(index, &layers.at_index(index)))
            .collect::<Result<Vec<_>>>()?;
        let norm = RmsNorm::load(&places.model.at("norm"), frame.hidden, frame.eps)?;
        let head = LmHead::load(
            &places.head,
            &embedding,
            frame.tied,
            frame.vocab,
            frame.hidden,
        )?;
        Ok(Self {
            embedding,
            blocks,
            norm,
            head,
        })
    }
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
        let factors = factors.stored("weight", &[half])?;
        return Rope::with_factors(model, config, head_dim, interleaved, &factors);
    }
    Rope::new(model, config, head_dim, interleaved)
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
