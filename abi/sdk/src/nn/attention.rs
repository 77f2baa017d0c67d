//! Multi-head attention with grouped keys and values over the host's cache.

use crate::nn::heads::{HeadProjections, HeadSizes};
use crate::nn::{RmsNorm, Rope, RotatedAttention, project};
use crate::{Result, Step, Tensor, Weights};

/// Shape and variants of one attention layer.
#[derive(Debug, Clone)]
pub struct AttentionConfig {
    /// Layer number, as in the model's description.
    pub layer: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Biases on query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub out_bias: bool,
    /// RMS norm of every query and key head, with this epsilon.
    pub qk_norm_eps: Option<f32>,
    /// Multiplies the scores.
    pub scale: f32,
    /// Soft cap of the scores; 0 is none.
    pub softcap: f32,
}

/// `q_proj`, `k_proj`, `v_proj`, optional head norms, rotary embedding, attention, `o_proj`.
#[derive(Debug, Clone)]
pub struct Attention {
    projections: HeadProjections,
    inner: RotatedAttention,
}

impl Attention {
    /// Loads the projections; `rope` is none for layers without positions.
    pub fn load(weights: &Weights, config: AttentionConfig, rope: Option<Rope>) -> Result<Self> {
        Self::load_with_norms(weights, config, rope, RmsNorm::load)
    }

    /// As `load`, with `load_norm` for the head norms, where their weights are not stored plainly.
    pub fn load_with_norms(
        weights: &Weights,
        config: AttentionConfig,
        rope: Option<Rope>,
        load_norm: impl Fn(&Weights, usize, f32) -> Result<RmsNorm>,
    ) -> Result<Self> {
        let head_dim = config.head_dim;
        let sizes = HeadSizes {
            hidden: config.hidden,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim,
        };
        let projections = HeadProjections::load(weights, sizes, config.qkv_bias, config.out_bias)?;
        let (heads, kv_heads) = (projections.heads, projections.kv_heads);
        let norms = match config.qk_norm_eps {
            Some(eps) => Some([
                load_norm(&weights.at("q_norm"), head_dim, eps)?,
                load_norm(&weights.at("k_norm"), head_dim, eps)?,
            ]),
            None => None,
        };
        Ok(Self {
            inner: RotatedAttention::new(config.layer, heads, kv_heads, head_dim)
                .with_norms(norms)
                .with_rope(rope)
                .with_scores(config.scale, config.softcap),
            projections,
        })
    }

    /// `[T, hidden]` to `[T, hidden]`.
    pub fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        self.projections.o.forward(&self.attended(x, None, step)?)
    }

    /// As `forward`, of the norm of `x`.
    pub fn forward_normed(&self, x: &Tensor, norm: &RmsNorm, step: &Step<'_>) -> Result<Tensor> {
        self.projections
            .o
            .forward(&self.attended(x, Some(norm), step)?)
    }

    /// `x` plus the layer's result for the norm of `x`.
    pub fn forward_onto(&self, x: &Tensor, norm: &RmsNorm, step: &Step<'_>) -> Result<Tensor> {
        self.projections
            .o
            .forward_onto(&self.attended(x, Some(norm), step)?, x)
    }

    /// What `o_proj` takes: `[T, H * D]`.
    fn attended(&self, x: &Tensor, norm: Option<&RmsNorm>, step: &Step<'_>) -> Result<Tensor> {
        let HeadProjections { q, k, v, .. } = &self.projections;
        let [q, k, v] = project(x, norm, [q, k, v])?;
        self.inner.forward([&q, &k, &v], step)
    }
}
