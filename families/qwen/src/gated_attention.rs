//! Attention whose result is gated: the query projection gives a query and a gate for every head.

use mlxcel_sdk::nn::{Linear, Mixer, RmsNorm, Rope, RotatedAttention, project};
use mlxcel_sdk::prelude::*;

use crate::hybrid_config::HybridConfig;

/// One layer of attention.
pub(crate) struct GatedAttention {
    heads: i64,
    head_dim: i64,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    inner: RotatedAttention,
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
            heads: heads as i64,
            head_dim: head_dim as i64,
            q: linear("q_proj", hidden, 2 * heads * head_dim)?,
            k: linear("k_proj", hidden, kv_heads * head_dim)?,
            v: linear("v_proj", hidden, kv_heads * head_dim)?,
            o: linear("o_proj", heads * head_dim, hidden)?,
            inner: RotatedAttention::new(layer, heads, kv_heads, head_dim)
                .with_norms(Some([
                    norm(&weights.at("q_norm"), head_dim)?,
                    norm(&weights.at("k_norm"), head_dim)?,
                ]))
                .with_rope(Some(rope.clone())),
        })
    }

    /// What `o_proj` takes, `[T, H D]`.
    fn attended(&self, x: &Tensor, norm: Option<&RmsNorm>, step: &Step<'_>) -> Result<Tensor> {
        let (heads, width) = (self.heads, self.head_dim);
        let [both, k, v] = project(x, norm, [&self.q, &self.k, &self.v])?;
        let both = both.reshape(&[-1, heads, 2 * width])?; // [T, H, 2D]
        let part = |first| both.narrow(2, first, width);
        let gate = part(width)?.reshape(&[-1, heads * width])?;
        let q = part(0)?.reshape(&[-1, heads * width])?;
        self.inner
            .forward([&q, &k, &v], step)?
            .mul(&gate.sigmoid()?)
    }
}

impl Mixer for GatedAttention {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        self.o.forward(&self.attended(x, None, step)?)
    }

    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm, step: &Step<'_>) -> Result<Tensor> {
        self.o.forward_onto(&self.attended(x, Some(norm), step)?, x)
    }
}
