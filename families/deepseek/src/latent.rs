//! Multi-head latent attention (DeepSeek-V2, section 2.1): one compressed key per position, from
//! which the keys and values of all heads follow. It is the compressed key that is cached.
//!
//! A score is `q . (W_UK c)`, which is `(W_UK^T q) . c`: with the query multiplied first
//! ("absorbed"), attention runs on the cached latent itself, as if there were one key head, and the
//! result is expanded to the heads' values once per row. That is done for prompts too. Expanding
//! keys and values would take fewer products within one long prompt, but it would have to be
//! repeated for all that is cached at every chunk of it, a step that mixes prompts and decoding
//! would need both forms, and a row's result would depend on what it is batched with.

use mlxcel_sdk::nn::{Linear, Mixer, RmsNorm, Rope, RopeConfig, RopeScaling, project};
use mlxcel_sdk::prelude::*;
use mlxcel_sdk::quant::{self, QuantizedTensor};

use crate::config::DecoderConfig;

/// The norms of the two compressions have this epsilon in the reference, whatever `rms_norm_eps` is.
const INNER_EPS: f32 = 1e-6;
const WIDTH: core::ops::RangeInclusive<usize> = 1..=65_536;

/// Shape of one attention layer.
#[derive(Debug, Clone)]
pub(crate) struct LatentConfig {
    pub heads: usize,
    /// Width of the compressed key.
    pub rank: usize,
    /// Width of the compressed query; none is not compressed.
    pub q_rank: Option<usize>,
    /// Features of a head without positions.
    pub nope: usize,
    /// Features of a head that are rotated; the key has one set of them for all heads.
    pub rotated: usize,
    pub v_dim: usize,
    pub rope: RopeConfig,
    /// Rotated pairs are neighbours, not halves.
    pub interleaved: bool,
    pub scale: f32,
    pub bias: bool,
}

impl LatentConfig {
    pub(crate) fn read(config: &Config<'_>, decoder: &DecoderConfig) -> Result<Self> {
        let width = |key: &str| config.uint_in(key, WIDTH);
        let (nope, rotated) = (width("qk_nope_head_dim")?, width("qk_rope_head_dim")?);
        if !rotated.is_multiple_of(2) {
            return Err(config.error("qk_rope_head_dim", "an even number, to be rotated in pairs"));
        }
        if let Some(both) = config.opt_uint("qk_head_dim", 1..=131_072)?
            && both != nope + rotated
        {
            let expected = format!(
                "{}, the sum of qk_nope_head_dim ({nope}) and qk_rope_head_dim ({rotated})",
                nope + rotated
            );
            return Err(config.error("qk_head_dim", expected));
        }
        let heads = decoder.heads;
        if let Some(kv_heads) = config.opt_uint("num_key_value_heads", 1..=4096)?
            && kv_heads != heads
        {
            let expected = format!("the same as num_attention_heads ({heads})");
            return Err(config.error("num_key_value_heads", expected));
        }
        let rope = RopeConfig::read_whole(config, rotated)?;
        let temperature = temperature(config, &rope)?;
        Ok(Self {
            heads,
            rank: width("kv_lora_rank")?,
            q_rank: config.opt_uint("q_lora_rank", WIDTH)?,
            nope,
            rotated,
            v_dim: width("v_head_dim")?,
            rope,
            interleaved: true,
            scale: (temperature / ((nope + rotated) as f64).sqrt()) as f32,
            bias: decoder.attention_bias,
        })
    }

    /// Width of a cached key.
    pub(crate) fn k_dim(&self) -> usize {
        self.rank + self.rotated
    }

    /// Elements per row that live at once: queries as projected and absorbed, the result before and
    /// after its expansion, the compressions.
    pub(crate) fn activation_width(&self) -> usize {
        let per_head = self.nope + self.rotated + self.k_dim() + self.rank + self.v_dim;
        self.heads * per_head + self.q_rank.unwrap_or(0) + 2 * self.k_dim()
    }
}

/// What stretched positions multiply the scores by: `(0.1 mscale_all_dim ln(factor) + 1)^2`
/// (DeepSeek-V2's published model; its two factors on cosines and sines are the embedding's).
fn temperature(config: &Config<'_>, rope: &RopeConfig) -> Result<f64> {
    let settings = match config.section("rope_parameters")? {
        Some(settings) => Some(settings),
        None => config.section("rope_scaling")?,
    };
    let (Some(settings), false) = (settings, rope.scaling == RopeScaling::Plain) else {
        return Ok(1.0);
    };
    let all = settings.float_or("mscale_all_dim", 0.0, 0.0..=1e3)?;
    if all == 0.0 {
        return Ok(1.0);
    }
    let factor = match &rope.scaling {
        RopeScaling::Yarn { factor, .. } => *factor,
        _ => settings.float_in("factor", 1e-3..=1e6)?,
    };
    let mscale = if factor <= 1.0 {
        1.0
    } else {
        0.1 * all * factor.ln() + 1.0
    };
    Ok(mscale * mscale)
}

/// A matrix for every head.
#[derive(Debug, Clone)]
pub(crate) enum ByHead {
    /// `[heads, in, out]`.
    Plain(Tensor),
    Quantized {
        weight: QuantizedTensor,
        /// The weight is `[heads, out, in]`.
        transposed: bool,
    },
}

impl ByHead {
    /// Loads `weight` `[heads, outputs, inputs]`, as mlx-lm and llama.cpp's converter store it.
    fn load(weights: &Weights, heads: usize, inputs: usize, outputs: usize) -> Result<Self> {
        let leading = [heads as i64];
        match weights.quant()? {
            Some(spec) => Ok(Self::Quantized {
                weight: quant::load(weights, spec, &leading, outputs, inputs)?,
                transposed: true,
            }),
            None => {
                let shape = [heads as i64, outputs as i64, inputs as i64];
                Ok(Self::Plain(weights.tensor("weight", &shape)?.t()?))
            }
        }
    }

    /// Loads `weight` `[heads * outputs, inputs]`, the heads one after another.
    pub(crate) fn load_flat(
        weights: &Weights,
        heads: usize,
        inputs: usize,
        outputs: usize,
    ) -> Result<Self> {
        let rows = heads * outputs;
        let split = |flat: &Tensor| {
            let columns = flat.dim(1)?;
            flat.reshape(&[heads as i64, outputs as i64, columns])
        };
        match weights.quant()? {
            Some(spec) => {
                let flat = quant::load(weights, spec, &[], rows, inputs)?;
                Ok(Self::Quantized {
                    weight: QuantizedTensor {
                        weight: split(&flat.weight)?,
                        scales: split(&flat.scales)?,
                        biases: flat.biases.as_ref().map(split).transpose()?,
                        spec,
                    },
                    transposed: true,
                })
            }
            None => {
                let flat = weights.tensor("weight", &[rows as i64, inputs as i64])?;
                Ok(Self::Plain(split(&flat)?.t()?))
            }
        }
    }

    /// `[T, heads, in]` to `[T, heads, out]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.transpose(&[1, 0, 2])?; // [heads, T, in]
        let y = match self {
            Self::Plain(weight) => x.matmul(weight)?,
            Self::Quantized {
                weight,
                transposed: true,
            } => weight.matmul_t(&x)?,
            Self::Quantized { weight, .. } => weight.matmul(&x)?,
        };
        y.transpose(&[1, 0, 2])
    }
}

/// The two halves of `kv_b_proj` by head: `W_UK` from a query's features to the latent, `W_UV` from
/// the latent to a value.
fn load_expansions(weights: &Weights, config: &LatentConfig) -> Result<(ByHead, ByHead)> {
    let &LatentConfig {
        heads,
        rank,
        nope,
        v_dim,
        ..
    } = config;
    let (absorb, expand) = (weights.at("embed_q"), weights.at("unembed_out"));
    if absorb.contains("weight") || expand.contains("weight") {
        return Ok((
            ByHead::load(&absorb, heads, nope, rank)?,
            ByHead::load(&expand, heads, rank, v_dim)?,
        ));
    }
    // Published: the rows of a head are those of its key and then those of its value.
    let whole = weights.at("kv_b_proj");
    let rows = heads * (nope + v_dim);
    let part = |tensor: &Tensor, start: usize, len: usize| -> Result<Tensor> {
        let by_head = [heads as i64, (nope + v_dim) as i64, tensor.dim(1)?];
        let by_head = tensor.reshape(&by_head)?;
        let part = by_head.narrow(1, start as i64, len as i64)?.contiguous()?;
        weights.keep(&part);
        Ok(part)
    };
    match whole.quant()? {
        Some(spec) => {
            let all = quant::load(&whole, spec, &[], rows, rank)?;
            let half = |start: usize, len: usize| -> Result<QuantizedTensor> {
                let biases = all.biases.as_ref().map(|biases| part(biases, start, len));
                Ok(QuantizedTensor {
                    weight: part(&all.weight, start, len)?,
                    scales: part(&all.scales, start, len)?,
                    biases: biases.transpose()?,
                    spec,
                })
            };
            let absorb = ByHead::Quantized {
                weight: half(0, nope)?,
                transposed: false,
            };
            let expand = ByHead::Quantized {
                weight: half(nope, v_dim)?,
                transposed: true,
            };
            Ok((absorb, expand))
        }
        None => {
            let all = whole.tensor("weight", &[rows as i64, rank as i64])?;
            let absorb = ByHead::Plain(part(&all, 0, nope)?);
            let expand = ByHead::Plain(part(&all, nope, v_dim)?.t()?);
            Ok((absorb, expand))
        }
    }
}

/// From the residual to queries.
enum Queries {
    Plain(Linear),
    Compressed {
        down: Linear,
        norm: RmsNorm,
        up: Linear,
    },
}

/// Multi-head latent attention of one layer.
pub(crate) struct LatentAttention {
    layer: usize,
    config: LatentConfig,
    queries: Queries,
    compress: Linear,
    norm: RmsNorm,
    absorb: ByHead,
    expand: ByHead,
    out: Linear,
    rope: Rope,
}

impl LatentAttention {
    pub(crate) fn load(
        weights: &Weights,
        layer: usize,
        hidden: usize,
        config: &LatentConfig,
    ) -> Result<Self> {
        let linear = |name: &str, inputs: usize, outputs: usize, bias: bool| {
            Linear::load(&weights.at(name), inputs, outputs, bias)
        };
        let (rank, bias) = (config.rank, config.bias);
        let q_width = config.heads * (config.nope + config.rotated);
        let queries = match config.q_rank {
            None => Queries::Plain(linear("q_proj", hidden, q_width, false)?),
            Some(q_rank) => Queries::Compressed {
                down: linear("q_a_proj", hidden, q_rank, bias)?,
                norm: RmsNorm::load(&weights.at("q_a_layernorm"), q_rank, INNER_EPS)?,
                up: linear("q_b_proj", q_rank, q_width, false)?,
            },
        };
        let (absorb, expand) = load_expansions(weights, config)?;
        Ok(Self {
            layer,
            queries,
            compress: linear("kv_a_proj_with_mqa", hidden, config.k_dim(), bias)?,
            norm: RmsNorm::load(&weights.at("kv_a_layernorm"), rank, INNER_EPS)?,
            absorb,
            expand,
            out: linear("o_proj", config.heads * config.v_dim, hidden, bias)?,
            rope: Rope::new(weights, &config.rope, config.rotated, config.interleaved)?,
            config: config.clone(),
        })
    }

    /// As `forward`, for rows that see only what `select` chooses from the compressed queries
    /// `[T, q_rank]`.
    pub(crate) fn forward_selecting(
        &self,
        x: &Tensor,
        step: &Step<'_>,
        select: impl FnOnce(&Tensor) -> Result<Option<Tensor>>,
    ) -> Result<Tensor> {
        let &LatentConfig {
            heads,
            rank,
            nope,
            rotated,
            v_dim,
            scale,
            ..
        } = &self.config;
        let [heads, rank, nope, rotated] = [heads, rank, nope, rotated].map(|n| n as i64);
        let (q, compressed, selection) = match &self.queries {
            Queries::Plain(q) => {
                let [q, compressed] = project(x, None, [q, &self.compress])?;
                (q, compressed, None)
            }
            Queries::Compressed { down, norm, up } => {
                let [q, compressed] = project(x, None, [down, &self.compress])?;
                let q = norm.forward(&q)?;
                (up.forward(&q)?, compressed, select(&q)?)
            }
        }; // compressed is [T, rank + rotated]
        let q = q.reshape(&[-1, heads, nope + rotated])?; // [T, heads, nope + rotated]
        let absorbed = self.absorb.forward(&q.narrow(2, 0, nope)?)?; // [T, heads, rank]
        let q_rotated = self
            .rope
            .forward(&q.narrow(2, nope, rotated)?, &step.positions)?;
        let latent = self.norm.forward(&compressed.narrow(1, 0, rank)?)?;
        let k_rotated = compressed
            .narrow(1, rank, rotated)?
            .reshape(&[-1, 1, rotated])?;
        let k_rotated = self.rope.forward(&k_rotated, &step.positions)?;
        let backend = x.backend();
        let q = Tensor::concat(backend, &[&absorbed, &q_rotated], 2)?; // [T, heads, k_dim]
        let k = Tensor::concat(backend, &[&latent.unsqueeze(1)?, &k_rotated], 2)?; // [T, 1, k_dim]
        let options = AttendOptions {
            scale,
            selection: selection.as_ref(),
            ..AttendOptions::default()
        };
        let y = step.attend_latent(self.layer, &q, &k, &options)?; // [T, heads, rank]
        let values = self.expand.forward(&y)?; // [T, heads, v_dim]
        self.out
            .forward(&values.reshape(&[-1, heads * v_dim as i64])?)
    }
}

impl Mixer for LatentAttention {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        self.forward_selecting(x, step, |_| Ok(None))
    }
}
