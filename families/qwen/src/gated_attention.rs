//! Attention whose result is gated: the query projection gives a query and a gate for every head.

use mlxcel_sdk::nn::{Linear, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::hybrid_config::HybridConfig;

/// One layer of attention.
pub(crate) struct GatedAttention {
    layer: usize,
    heads: i64,
    kv_heads: i64,
    head_dim: i64,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    rope: Rope,
}

impl GatedAttention {
    pub(crate) fn load(
        weights: &Weights,
        config: &HybridConfig,
        layer: usize,
        rope: &Rope,
        norm: impl Fn(&Weights, usize) -> Result<RmsNorm>,
    ) -> Result<Self> {
        let HybridConfig {
            hidden,
            heads,
            kv_heads,
            head_dim,
            bias,
            ..
        } = *config;
        let linear =
            |name: &str, inputs, outputs| Linear::load(&weights.at(name), inputs, outputs, bias);
        Ok(Self {
            layer,
            heads: heads as i64,
            kv_heads: kv_heads as i64,
            head_dim: head_dim as i64,
            q: linear("q_proj", hidden, 2 * heads * head_dim)?,
            k: linear("k_proj", hidden, kv_heads * head_dim)?,
            v: linear("v_proj", hidden, kv_heads * head_dim)?,
            o: linear("o_proj", heads * head_dim, hidden)?,
            q_norm: norm(&weights.at("q_norm"), head_dim)?,
            k_norm: norm(&weights.at("k_norm"), head_dim)?,
            rope: rope.clone(),
        })
    }

    /// `[T, hidden]` to `[T, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let width = self.head_dim;
        let both = self.q.forward(x)?.reshape(&[-1, self.heads, 2 * width])?; // [T, H, 2D]
        let gate = both
            .narrow(2, width, width)?
            .reshape(&[-1, self.heads * width])?;
        let q = self
            .q_norm
            .forward(&both.narrow(2, 0, width)?.contiguous()?)?;
        let split = |t: Tensor| t.reshape(&[-1, self.kv_heads, width]);
        let k = self.k_norm.forward(&split(self.k.forward(x)?)?)?;
        let v = split(self.v.forward(x)?)?;
        let q = self.rope.forward(&q, &step.positions)?;
        let k = self.rope.forward(&k, &step.positions)?;
        let options = AttendOptions {
            scale: (width as f32).sqrt().recip(),
            ..AttendOptions::default()
        };
        let y = step.attend(self.layer, &q, &k, &v, &options)?; // [T, H, D]
        let y = y
            .reshape(&[-1, self.heads * width])?
            .mul(&gate.sigmoid()?)?;
        self.o.forward(&y)
    }
}
