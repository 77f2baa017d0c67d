//! The gated delta rule (Yang et al. 2024) behind a short convolution, in the two layouts of its
//! projections. `T` rows, `Hk` and `Hv` heads of keys and values.

use mlxcel_sdk::abi::kinds::{glu, unary};
use mlxcel_sdk::nn::{Linear, Mixer, RmsNorm, project};
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

/// Queries, keys, values and gates.
enum Wide {
    /// One product, interleaved by key head.
    Joined(Linear),
    /// Queries, keys and values; gates.
    Apart(Linear, Linear),
}

/// Rates of writing and of decay.
enum Rates {
    /// One product, interleaved by key head.
    Joined(Linear),
    /// `b` and `a`.
    Apart(Linear, Linear),
}

/// The projections as checkpoints have them.
struct Projections {
    wide: Wide,
    rates: Rates,
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
        // GGUF files of qwen3_next have the wide product in parts and the rates joined.
        let in_parts = layout == Layout::Apart || weights.at("in_proj_qkv").exists();
        let wide = if in_parts {
            Wide::Apart(
                linear("in_proj_qkv", config.channels())?,
                linear("in_proj_z", values)?,
            )
        } else {
            Wide::Joined(linear("in_proj_qkvz", config.channels() + values)?)
        };
        let rates = match layout {
            Layout::Joined => Rates::Joined(linear("in_proj_ba", 2 * heads)?),
            Layout::Apart => Rates::Apart(linear("in_proj_b", heads)?, linear("in_proj_a", heads)?),
        };
        Ok(Self { wide, rates })
    }

    /// Projects `x`, or its norm.
    fn forward(
        &self,
        x: &Tensor,
        norm: Option<&RmsNorm>,
        config: &DeltaConfig,
    ) -> Result<Projected> {
        let (heads, dim) = (config.value_heads as i64, config.value_dim as i64);
        let (groups, key) = (config.key_heads as i64, config.key_dim as i64);
        let each = heads / groups;
        if let (Wide::Apart(qkv, z), Rates::Apart(b, a)) = (&self.wide, &self.rates) {
            let [mixed, z, b, a] = project(x, norm, [qkv, z, b, a])?;
            let z = z.reshape(&[-1, heads, dim])?;
            return Ok(Projected { mixed, z, b, a });
        }
        let x = &match norm {
            Some(norm) => norm.forward(x)?,
            None => x.clone(),
        };
        let (mixed, z) = match &self.wide {
            Wide::Apart(qkv, z) => (qkv.forward(x)?, z.forward(x)?),
            Wide::Joined(qkvz) => {
                let parts = qkvz
                    .forward(x)?
                    .reshape(&[-1, groups, 2 * key + 2 * each * dim])?
                    .split(2, &[key, key, each * dim, each * dim])?;
                let [q, k, v, z] = four(parts)?;
                let flat = |t: &Tensor, width: i64| t.reshape(&[-1, groups * width]);
                let (q, k, v) = (flat(&q, key)?, flat(&k, key)?, flat(&v, each * dim)?);
                (Tensor::concat(x.backend(), &[&q, &k, &v], 1)?, z)
            }
        };
        let (b, a) = match &self.rates {
            Rates::Apart(b, a) => (b.forward(x)?, a.forward(x)?),
            Rates::Joined(ba) => {
                let rates = ba.forward(x)?.reshape(&[-1, groups, 2 * each])?;
                let rate = |first: i64| rates.narrow(2, first, each)?.reshape(&[-1, heads]);
                (rate(0)?, rate(each)?)
            }
        };
        Ok(Projected {
            mixed,
            z: z.reshape(&[-1, heads, dim])?,
            b,
            a,
        })
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
        // GGUF files hold the rate as it is used.
        let decay = if weights.contains("A") {
            weights.single("A", &heads)?
        } else {
            let log = weights.single("A_log", &heads)?;
            log.exp()?.neg()?
        };
        let dt_bias = weights.single("dt_bias", &heads)?;
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

    /// What `out_proj` takes, `[T, Hv Dv]`.
    fn mixed(&self, x: &Tensor, norm: Option<&RmsNorm>, step: &Step<'_>) -> Result<Tensor> {
        let DeltaConfig {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = self.config;
        let (keys, values) = self.config.widths();
        let Projected { mixed, z, b, a } = self.projections.forward(x, norm, &self.config)?;
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
        let mut q = unit(part(0, key_heads, key_dim)?, root * root)?;
        let mut k = unit(part(keys, key_heads, key_dim)?, root)?;
        if self.config.tiled && key_heads != value_heads {
            let times = [1, (value_heads / key_heads) as i64, 1];
            (q, k) = (q.tile(&times)?, k.tile(&times)?);
        }
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
        y.reshape(&[-1, values as i64])
    }
}

impl Mixer for DeltaNet {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        self.out.forward(&self.mixed(x, None, step)?)
    }

    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm, step: &Step<'_>) -> Result<Tensor> {
        self.out.forward_onto(&self.mixed(x, Some(norm), step)?, x)
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
