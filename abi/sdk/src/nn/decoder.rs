//! The decoder that most text models are, top to bottom. `T` rows of a packed step, `H` hidden
//! features, `R` rows whose logits are wanted, `V` tokens.

use crate::nn::{Attention, Embedding, GatedMlp, LmHead, RmsNorm};
use crate::{Model, Result, Step, Tensor, Weights};

/// The half of a layer that looks at other positions.
pub trait Mixer {
    /// `[T, H]` to `[T, H]`.
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor>;

    /// `x` plus the result for the norm of `x`.
    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm, step: &Step<'_>) -> Result<Tensor> {
        x.add(&self.forward(&norm.forward(x)?, step)?)
    }
}

/// The half of a layer that looks at every row alone.
pub trait FeedForward {
    /// `[T, H]` to `[T, H]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;

    /// `x` plus the result for the norm of `x`.
    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        x.add(&self.forward(&norm.forward(x)?)?)
    }
}

impl Mixer for Attention {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        Attention::forward(self, x, step)
    }

    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm, step: &Step<'_>) -> Result<Tensor> {
        Attention::forward_onto(self, x, norm, step)
    }
}

impl FeedForward for GatedMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        GatedMlp::forward(self, x)
    }

    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        GatedMlp::forward_onto(self, x, norm)
    }
}

/// Two halves, each behind a norm, added to the residual stream. Either may be missing.
pub struct DecoderLayer {
    /// The first half.
    pub mixer: Option<(RmsNorm, Box<dyn Mixer>)>,
    /// The second half.
    pub feed_forward: Option<(RmsNorm, Box<dyn FeedForward>)>,
}

impl core::fmt::Debug for DecoderLayer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (mixer, feed_forward) = (self.mixer.is_some(), self.feed_forward.is_some());
        write!(
            f,
            "DecoderLayer(mixer {mixer}, feed-forward {feed_forward})"
        )
    }
}

impl DecoderLayer {
    /// Both halves behind the norms that most models call `input_layernorm` and
    /// `post_attention_layernorm`.
    pub fn load(
        at: &Weights,
        shape: &DecoderShape,
        mixer: Box<dyn Mixer>,
        feed_forward: Box<dyn FeedForward>,
    ) -> Result<Self> {
        let norm = |name: &str| shape.norm(&at.at(name));
        Ok(Self {
            mixer: Some((norm("input_layernorm")?, mixer)),
            feed_forward: Some((norm("post_attention_layernorm")?, feed_forward)),
        })
    }

    /// `[T, H]` to `[T, H]`.
    pub fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        if let Some((norm, mixer)) = &self.mixer {
            x = mixer.forward_onto(&x, norm, step)?;
        }
        if let Some((norm, feed_forward)) = &self.feed_forward {
            x = feed_forward.forward_onto(&x, norm)?;
        }
        Ok(x)
    }
}

/// What surrounds the layers.
#[derive(Debug, Clone, Copy)]
pub struct DecoderShape {
    /// Tokens.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Added to the mean of squares in norms.
    pub eps: f32,
    /// Weights of norms are stored minus one.
    pub norms_minus_one: bool,
    /// The embedding is the head.
    pub tied: bool,
    /// Number of layers.
    pub n_layers: usize,
}

impl DecoderShape {
    /// Loads a norm of the residual stream.
    pub fn norm(&self, at: &Weights) -> Result<RmsNorm> {
        if self.norms_minus_one {
            RmsNorm::load_minus_one(at, self.hidden, self.eps)
        } else {
            RmsNorm::load(at, self.hidden, self.eps)
        }
    }
}

/// Embedding, layers, final norm, head.
#[derive(Debug)]
pub struct Decoder {
    embedding: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    head: LmHead,
}

impl Decoder {
    /// Loads `embed_tokens`, `layers` and `norm` at `model`, and the head at `head`. `layer` makes a
    /// layer from its number and its view.
    pub fn load(
        shape: &DecoderShape,
        model: &Weights,
        head: &Weights,
        layer: impl Fn(usize, &Weights) -> Result<DecoderLayer>,
    ) -> Result<Self> {
        let DecoderShape { vocab, hidden, .. } = *shape;
        // Old exports carry the frequencies of every layer; they follow from the configuration.
        model.ignore_suffix("rotary_emb.inv_freq");
        let embedding = Embedding::load(&model.at("embed_tokens"), vocab, hidden)?;
        let at = model.at("layers");
        let layers = (0..shape.n_layers).map(|index| layer(index, &at.at_index(index)));
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            norm: shape.norm(&model.at("norm"))?,
            head: LmHead::load(head, &embedding, shape.tied, vocab, hidden)?,
            embedding,
        })
    }
}

impl Model for Decoder {
    fn forward(&self, step: &Step<'_>) -> Result<Tensor> {
        let mut x = self.embedding.forward(&step.tokens)?; // [T, H]
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer
                .forward(&x, step)
                .map_err(|e| e.at(&format!("layer {index}")))?;
        }
        let rows = step.logit_rows(&x)?; // [R, H]
        self.head.forward_normed(&rows, &self.norm) // [R, V]
    }
}
