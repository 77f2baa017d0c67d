//! Attention of long-context models: queries grow sharper with their position, and a layer may look
//! at its own chunk of the sequence only.

use mlxcel_sdk::nn::{HeadProjections, HeadSizes, Mixer, RmsNorm, Rope, project};
use mlxcel_sdk::prelude::*;

/// `1 + scale * ln(1 + floor((position + offset) / length))`, a factor on queries
/// (<https://arxiv.org/abs/2501.19399>, in the stepwise form of Llama 4).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Temperature {
    pub scale: f64,
    pub length: f64,
    pub offset: f64,
}

impl Temperature {
    /// Factor of every row, `[T, 1, 1]` in f32.
    fn factors(&self, positions: &Tensor) -> Result<Tensor> {
        positions
            .cast(DType::F32)?
            .add_scalar(self.offset)?
            .div_scalar(self.length)?
            .floor()?
            .log1p()?
            .mul_scalar(self.scale)?
            .add_scalar(1.0)?
            .reshape(&[-1, 1, 1])
    }
}

/// Shape and variants of one layer.
#[derive(Debug, Clone)]
pub(crate) struct TemperedConfig {
    pub layer: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub bias: bool,
    /// Norm without weight of every query and key head after the rotary embedding.
    pub qk_norm_eps: Option<f32>,
    pub temperature: Option<Temperature>,
    /// A row sees keys of its own chunk only: those whose position gives the same quotient.
    pub chunk: Option<usize>,
}

/// Grouped-query attention with these variants.
#[derive(Debug)]
pub(crate) struct TemperedAttention {
    config: TemperedConfig,
    projections: HeadProjections,
    rope: Option<Rope>,
}

impl TemperedAttention {
    pub(crate) fn load(at: &Weights, config: TemperedConfig, rope: Option<Rope>) -> Result<Self> {
        let sizes = HeadSizes {
            hidden: config.hidden,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        Ok(Self {
            projections: HeadProjections::load(at, sizes, config.bias, config.bias)?,
            rope,
            config,
        })
    }
}

impl TemperedAttention {
    /// What `o_proj` takes, `[T, H D]`.
    fn attended(&self, x: &Tensor, norm: Option<&RmsNorm>, step: &Step<'_>) -> Result<Tensor> {
        let (config, parts) = (&self.config, &self.projections);
        let split = |t: &Tensor, n: usize| t.reshape(&[-1, n as i64, config.head_dim as i64]);
        let [q, k, v] = project(x, norm, [&parts.q, &parts.k, &parts.v])?;
        let mut q = split(&q, parts.heads)?; // [T, H, D]
        let mut k = split(&k, parts.kv_heads)?; // [T, Hkv, D]
        let v = split(&v, parts.kv_heads)?;
        if let Some(rope) = &self.rope {
            q = rope.forward(&q, &step.positions)?;
            k = rope.forward(&k, &step.positions)?;
        }
        if let Some(eps) = config.qk_norm_eps {
            q = q.rms_norm(None, eps)?;
            k = k.rms_norm(None, eps)?;
        }
        if let Some(temperature) = &config.temperature {
            let factors = temperature.factors(&step.positions)?.cast(q.dtype()?)?;
            q = q.mul(&factors)?;
        }
        let options = AttendOptions {
            scale: (config.head_dim as f32).sqrt().recip(),
            ..AttendOptions::default()
        };
        let y = match config.chunk {
            Some(chunk) => step.attend_in_chunk(config.layer, &q, &k, &v, &options, chunk)?,
            None => step.attend(config.layer, &q, &k, &v, &options)?,
        };
        y.reshape(&[-1, (parts.heads * config.head_dim) as i64])
    }
}

impl Mixer for TemperedAttention {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let o = &self.projections.o;
        o.forward(&self.attended(x, None, step)?) // [T, H]
    }

    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm, step: &Step<'_>) -> Result<Tensor> {
        let o = &self.projections.o;
        o.forward_onto(&self.attended(x, Some(norm), step)?, x)
    }
}
