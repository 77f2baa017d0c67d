//! Multi-head attention with grouped keys and values over the host's cache.

use crate::nn::{Linear, RmsNorm, Rope};
use crate::{AttendOptions, Result, Step, Tensor, Weights};

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
    config: AttentionConfig,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    rope: Option<Rope>,
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
        let (hidden, head_dim) = (config.hidden, config.head_dim);
        let (q_width, kv_width) = (config.heads * head_dim, config.kv_heads * head_dim);
        let norm = |name: &str| {
            config
                .qk_norm_eps
                .map(|eps| load_norm(&weights.at(name), head_dim, eps))
                .transpose()
        };
        Ok(Self {
            q: Linear::load(&weights.at("q_proj"), hidden, q_width, config.qkv_bias)?,
            k: Linear::load(&weights.at("k_proj"), hidden, kv_width, config.qkv_bias)?,
            v: Linear::load(&weights.at("v_proj"), hidden, kv_width, config.qkv_bias)?,
            o: Linear::load(&weights.at("o_proj"), q_width, hidden, config.out_bias)?,
            q_norm: norm("q_norm")?,
            k_norm: norm("k_norm")?,
            rope,
            config,
        })
    }

    /// `[T, hidden]` to `[T, hidden]`.
    pub fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let AttentionConfig {
            layer,
            heads,
            kv_heads,
            head_dim,
            scale,
            softcap,
            ..
        } = self.config;
        let split = |t: Tensor, n: usize| t.reshape(&[-1, n as i64, head_dim as i64]);
        let mut q = split(self.q.forward(x)?, heads)?; // [T, H, D]
        let mut k = split(self.k.forward(x)?, kv_heads)?; // [T, Hkv, D]
        let v = split(self.v.forward(x)?, kv_heads)?;
        if let Some(norm) = &self.q_norm {
            q = norm.forward(&q)?;
        }
        if let Some(norm) = &self.k_norm {
            k = norm.forward(&k)?;
        }
        if let Some(rope) = &self.rope {
            q = rope.forward(&q, &step.positions)?;
            k = rope.forward(&k, &step.positions)?;
        }
        let options = AttendOptions {
            scale,
            softcap,
            ..AttendOptions::default()
        };
        let y = step.attend(layer, &q, &k, &v, &options)?; // [T, H, D]
        self.o
            .forward(&y.reshape(&[-1, (heads * head_dim) as i64])?)
    }
}
