//! Multi-head attention with grouped keys and values over the host's cache.

use crate::nn::{Linear, RmsNorm, Rope, RotatedAttention, project};
use crate::ranks::Share;
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
    q: Linear,
    k: Linear,
    v: Linear,
    inner: RotatedAttention,
    o: Linear,
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
        let (hidden, head_dim, bias) = (config.hidden, config.head_dim, config.qkv_bias);
        let (q_width, kv_width) = (config.heads * head_dim, config.kv_heads * head_dim);
        let shares = weights
            .ranks()
            .map(|ranks| ranks.heads(config.heads, config.kv_heads));
        let shares = shares.transpose()?;
        let linear = |name: &str, width, share: Option<Share>| match share {
            None => Linear::load(&weights.at(name), hidden, width, bias),
            Some(share) => Linear::load_share(&weights.at(name), hidden, width, bias, share),
        };
        let (q_share, kv_share) = (shares.map(|all| all.queries), shares.map(|all| all.keys));
        let part =
            |heads: usize, share: Option<Share>| heads / share.map_or(1, |share| share.count);
        let (heads, kv_heads) = (part(config.heads, q_share), part(config.kv_heads, kv_share));
        let norms = match config.qk_norm_eps {
            Some(eps) => Some([
                load_norm(&weights.at("q_norm"), head_dim, eps)?,
                load_norm(&weights.at("k_norm"), head_dim, eps)?,
            ]),
            None => None,
        };
        Ok(Self {
            q: linear("q_proj", q_width, q_share)?,
            k: linear("k_proj", kv_width, kv_share)?,
            v: linear("v_proj", kv_width, kv_share)?,
            inner: RotatedAttention::new(config.layer, heads, kv_heads, head_dim)
                .with_norms(norms)
                .with_rope(rope)
                .with_scores(config.scale, config.softcap),
            o: Linear::load_inputs(&weights.at("o_proj"), q_width, hidden, config.out_bias)?,
        })
    }

    /// `[T, hidden]` to `[T, hidden]`.
    pub fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        self.o.forward(&self.attended(x, None, step)?)
    }

    /// As `forward`, of the norm of `x`.
    pub fn forward_normed(&self, x: &Tensor, norm: &RmsNorm, step: &Step<'_>) -> Result<Tensor> {
        self.o.forward(&self.attended(x, Some(norm), step)?)
    }

    /// `x` plus the layer's result for the norm of `x`.
    pub fn forward_onto(&self, x: &Tensor, norm: &RmsNorm, step: &Step<'_>) -> Result<Tensor> {
        self.o.forward_onto(&self.attended(x, Some(norm), step)?, x)
    }

    /// What `o_proj` takes: `[T, H * D]`.
    fn attended(&self, x: &Tensor, norm: Option<&RmsNorm>, step: &Step<'_>) -> Result<Tensor> {
        let [q, k, v] = project(x, norm, [&self.q, &self.k, &self.v])?;
        self.inner.forward([&q, &k, &v], step)
    }
}
