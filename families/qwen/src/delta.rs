//! The gated delta rule (Yang et al. 2024) behind a short convolution, in the two layouts of its
//! projections. `T` rows, `Hk` and `Hv` heads of keys and values.

use mlxcel_sdk::abi::kinds::{glu, unary};
use mlxcel_sdk::nn::{Linear, RmsNorm};
use mlxcel_sdk::prelude::*;
use mlxcel_sdk::{GatedDelta, ShortConv};

use crate::hybrid_config::{DeltaConfig, HybridConfig, Layout};

/// Added to the squares' sum when queries and keys are normed.
const NORM_EPS: f64 = 1e-6;

/// Numbers of the layer's states.
const CONV_STATE: usize = 0;
const DELTA_STATE: usize = 1;

/// What a row is projected to.
struct Projected {
    /// Queries, keys, values `[T, channels]`, heads one after another.
    mixed: Tensor,
    /// Gate of the result, `[T, Hv, Dv]`.
    z: Tensor,
    /// `[T, Hv]`.
    b: Tensor,
    /// `[T, Hv]`.
    a: Tensor,
}

/// The projections as checkpoints have them.
enum Projections {
    /// qwen3_next: two products, interleaved by key head.
    Joined { qkvz: Linear, ba: Linear },
    /// qwen3_5: a product each.
    Apart {
        qkv: Linear,
        z: Linear,
        b: Linear,
        a: Linear,
    },
}

impl Projections {
    fn load(
        weights: &Weights,
        config: &DeltaConfig,
        hidden: usize,
        layout: Layout,
    ) -> Result<Self> {
        let (_, values) = config.widths();
        let heads = config.value_heads;
        let linear = |name: &str, width| Linear::load(&weights.at(name), hidden, width, false);
        if layout == Layout::Joined {
            return Ok(Self::Joined {
                qkvz: linear("in_proj_qkvz", config.channels() + values)?,
                ba: linear("in_proj_ba", 2 * heads)?,
            });
        }
        Ok(Self::Apart {
            qkv: linear("in_proj_qkv", config.channels())?,
            z: linear("in_proj_z", values)?,
            b: linear("in_proj_b", heads)?,
            a: linear("in_proj_a", heads)?,
        })
    }

    fn forward(&self, x: &Tensor, config: &DeltaConfig) -> Result<Projected> {
        let (heads, dim) = (config.value_heads as i64, config.value_dim as i64);
        match self {
            Self::Apart { qkv, z, b, a } => Ok(Projected {
                mixed: qkv.forward(x)?,
                z: z.forward(x)?.reshape(&[-1, heads, dim])?,
                b: b.forward(x)?,
                a: a.forward(x)?,
            }),
            Self::Joined { qkvz, ba } => {
                let groups = config.key_heads as i64;
                let key = config.key_dim as i64;
                let each = heads / groups;
                let parts = qkvz
                    .forward(x)?
                    .reshape(&[-1, groups, 2 * key + 2 * each * dim])?
                    .split(2, &[key, key, each * dim, each * dim])?;
                let [q, k, v, z] = four(parts)?;
                let flat = |t: &Tensor, width: i64| t.reshape(&[-1, groups * width]);
                let (q, k, v) = (flat(&q, key)?, flat(&k, key)?, flat(&v, each * dim)?);
                let rates = ba.forward(x)?.reshape(&[-1, groups, 2 * each])?;
                let rate = |first: i64| rates.narrow(2, first, each)?.reshape(&[-1, heads]);
                Ok(Projected {
                    mixed: Tensor::concat(x.backend(), &[&q, &k, &v], 1)?,
                    z: z.reshape(&[-1, heads, dim])?,
                    b: rate(0)?,
                    a: rate(each)?,
                })
            }
        }
    }
}

fn four(parts: Vec<Tensor>) -> Result<[Tensor; 4]> {
    parts.try_into().map_err(|parts: Vec<Tensor>| {
        Error::Other(format!("{} parts of a projection", parts.len()))
    })
}

/// One layer.
pub(crate) struct DeltaNet {
    layer: usize,
    config: DeltaConfig,
    eps: f32,
    projections: Projections,
    /// `[channels, taps]`.
    kernel: Tensor,
    /// `-exp(A_log)`, f32 `[Hv]`.
    decay: Tensor,
    /// f32 `[Hv]`.
    dt_bias: Tensor,
    norm: RmsNorm,
    out: Linear,
}

impl DeltaNet {
    pub(crate) fn load(weights: &Weights, config: &HybridConfig, layer: usize) -> Result<Self> {
        let delta = config.delta.clone();
        let (channels, taps) = (delta.channels() as i64, delta.taps as i64);
        let heads = [delta.value_heads as i64];
        let conv = weights.at("conv1d");
        // MLX keeps the channel axis last.
        let shape = match is_mlx_kernel(&conv)? {
            true => [channels, taps, 1],
            false => [channels, 1, taps],
        };
        let kernel = conv.tensor("weight", &shape)?.reshape(&[channels, taps])?;
        let decay = weights
            .stored("A_log", &heads)?
            .cast(DType::F32)?
            .exp()?
            .neg()?;
        let dt_bias = weights.stored("dt_bias", &heads)?.cast(DType::F32)?;
        for derived in [&kernel, &decay, &dt_bias] {
            weights.keep(derived);
        }
        Ok(Self {
            layer,
            eps: (NORM_EPS / delta.key_dim as f64) as f32,
            projections: Projections::load(weights, &delta, config.hidden, config.layout)?,
            kernel,
            decay,
            dt_bias,
            norm: RmsNorm::load(&weights.at("norm"), delta.value_dim, config.eps)?,
            out: Linear::load(
                &weights.at("out_proj"),
                delta.widths().1,
                config.hidden,
                false,
            )?,
            config: delta,
        })
    }

    /// `[T, hidden]` to `[T, hidden]`.
    pub(crate) fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let DeltaConfig {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = self.config;
        let (keys, values) = self.config.widths();
        let Projected { mixed, z, b, a } = self.projections.forward(x, &self.config)?;
        let conv = ShortConv {
            weight: &self.kernel,
            bias: None,
            activation: unary::SILU,
        };
        let mixed = step.short_conv(self.layer, CONV_STATE, &mixed, &conv)?;
        let part = |first: usize, heads: usize, dim: usize| {
            mixed
                .narrow(1, first as i64, (heads * dim) as i64)?
                .reshape(&[-1, heads as i64, dim as i64])
        };
        // x / sqrt(sum(x^2) + eps) is an RMS norm of eps / n, divided by sqrt(n).
        let unit = |t: Tensor, factor: f64| {
            t.cast(DType::F32)?
                .rms_norm(None, self.eps)?
                .mul_scalar(factor)
        };
        let root = (key_dim as f64).sqrt().recip();
        let q = unit(part(0, key_heads, key_dim)?, root * root)?;
        let k = unit(part(keys, key_heads, key_dim)?, root)?;
        let v = part(2 * keys, value_heads, value_dim)?;
        let g = a
            .cast(DType::F32)?
            .add(&self.dt_bias)?
            .softplus()?
            .mul(&self.decay)?;
        let inputs = GatedDelta {
            q: &q,
            k: &k,
            v: &v,
            g: &g,
            beta: &b.sigmoid()?,
        };
        let y = step.gated_delta(self.layer, DELTA_STATE, &inputs)?; // [T, Hv, Dv]
        let y = z.glu(glu::SILU, &self.norm.forward(&y)?)?;
        self.out.forward(&y.reshape(&[-1, values as i64])?)
    }
}

/// Whether a convolution's kernel `[C, K, 1]` has its channel axis last, as MLX keeps it; others are
/// `[C, 1, K]`. Checkpoints of MLX also store norms as they are used.
pub(crate) fn is_mlx_kernel(conv: &Weights) -> Result<bool> {
    if !conv.contains("weight") {
        return Ok(false);
    }
    let info = conv.info("weight")?;
    Ok(matches!(info.shape(), [_, taps, 1] if *taps > 1))
}
