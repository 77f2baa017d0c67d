//! Attention of `deepseek_v4` (section 2.3): one vector per position that is key and value of all
//! heads, seen within a short window, and beyond it compressed keys of groups of positions, of which
//! an indexer may choose. One softmax runs over both and a sink.
//!
//! A layer with a window alone is attention over the host's cache. The others are composed from
//! simple operations here: what every row leaves (its key, its part of the compressed keys) is kept as
//! an index key, and the compressed keys are made anew from all of it in every step. That is exact
//! for every mix of rows and keeps no state but the host's; it costs, each step, work and
//! memory that grow with the whole context, and was made to be right and not to be fast.

use mlxcel_sdk::nn::{Linear, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::compress::{Compressor, CompressorConfig, defined, rotate_tail};
use crate::latent::ByHead;
use crate::routing::{best, in_f32};

/// What a layer sees beyond its window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Nothing.
    Window,
    /// Overlapping groups of a few positions, the best of them by an indexer.
    Sparse { rate: usize },
    /// Groups of many positions, all of them.
    Heavy { rate: usize },
}

/// Shape of the attention, the same in every layer.
#[derive(Debug, Clone)]
pub(crate) struct SharedConfig {
    pub hidden: usize,
    pub heads: usize,
    pub width: usize,
    /// Features at the end of a head that are rotated.
    pub rotated: usize,
    pub q_rank: usize,
    pub window: usize,
    pub out_groups: usize,
    pub out_rank: usize,
    pub index_heads: usize,
    pub index_width: usize,
    pub index_top_k: usize,
    pub eps: f32,
}

impl SharedConfig {
    fn long(&self, reach: Reach) -> Option<CompressorConfig> {
        let (rate, overlapping) = match reach {
            Reach::Window => return None,
            Reach::Sparse { rate } => (rate, true),
            Reach::Heavy { rate } => (rate, false),
        };
        Some(CompressorConfig {
            rate,
            width: self.width,
            overlapping,
            eps: self.eps,
        })
    }

    fn index(&self, reach: Reach) -> Option<CompressorConfig> {
        let Reach::Sparse { rate } = reach else {
            return None;
        };
        Some(CompressorConfig {
            rate,
            width: self.index_width,
            overlapping: true,
            eps: self.eps,
        })
    }

    /// The layer's cache.
    pub(crate) fn cache(&self, reach: Reach) -> CacheDesc {
        let Some(long) = self.long(reach) else {
            return CacheDesc::Window {
                kv_heads: 1,
                k_dim: self.width,
                v_dim: self.width,
                window: self.window,
            };
        };
        let index = self.index(reach).map_or(0, |index| index.cached());
        CacheDesc::Latent {
            // Only the index keys are used.
            k_dim: 1,
            v_dim: 1,
            index_dim: Some(self.width + long.cached() + index),
        }
    }

    /// Elements per row that live at once: queries, result, and the keys of the row's window.
    pub(crate) fn activation_width(&self) -> usize {
        2 * self.heads * self.width + self.window * (self.width + self.heads) + 5 * self.width
    }
}

/// Attention of one layer.
pub(crate) struct SharedAttention {
    layer: usize,
    config: SharedConfig,
    q_down: Linear,
    q_norm: RmsNorm,
    q_up: Linear,
    kv: Linear,
    kv_norm: RmsNorm,
    out_down: ByHead,
    out_up: Linear,
    /// f32 `[heads]`.
    sinks: Tensor,
    rope: Rope,
    long: Option<LongReach>,
}

/// Compressed keys, and which of them a row sees.
struct LongReach {
    compressor: Compressor,
    rate: usize,
    columns: i64,
    indexer: Option<Indexer>,
}

impl SharedAttention {
    /// `rope` is the layer's own: that of layers with compressed keys differs from that of the others.
    pub(crate) fn load(
        weights: &Weights,
        layer: usize,
        reach: Reach,
        config: &SharedConfig,
        rope: &Rope,
    ) -> Result<Self> {
        let &SharedConfig {
            hidden,
            heads,
            width,
            rotated,
            q_rank,
            out_groups,
            out_rank,
            eps,
            ..
        } = config;
        let linear = |name: &str, inputs: usize, outputs: usize| {
            Linear::load(&weights.at(name), inputs, outputs, false)
        };
        // transformers saves the published `kv_norm` as `norm`.
        let kv_norm = ["kv_norm", "norm"]
            .into_iter()
            .find(|name| weights.at(name).contains("weight"))
            .unwrap_or("kv_norm");
        let long = match config.long(reach) {
            None => None,
            Some(shape) => Some(LongReach {
                compressor: Compressor::load(
                    &weights.at("compressor"),
                    hidden,
                    shape,
                    rope,
                    rotated,
                )?,
                rate: shape.rate,
                columns: shape.cached() as i64,
                indexer: config
                    .index(reach)
                    .map(|shape| Indexer::load(&weights.at("indexer"), config, shape, rope))
                    .transpose()?,
            }),
        };
        Ok(Self {
            layer,
            q_down: linear("wq_a", hidden, q_rank)?,
            q_norm: RmsNorm::load(&weights.at("q_norm"), q_rank, eps)?,
            q_up: linear("wq_b", q_rank, heads * width)?,
            kv: linear("wkv", hidden, width)?,
            kv_norm: RmsNorm::load(&weights.at(kv_norm), width, eps)?,
            out_down: ByHead::load_flat(
                &weights.at("wo_a"),
                out_groups,
                heads * width / out_groups,
                out_rank,
            )?,
            out_up: linear("wo_b", out_groups * out_rank, hidden)?,
            sinks: in_f32(weights, "attn_sink", &[heads as i64])?,
            rope: rope.clone(),
            long,
            config: config.clone(),
        })
    }

    /// `[T, H]` to `[T, H]`.
    pub(crate) fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let &SharedConfig {
            heads,
            width,
            rotated,
            out_groups,
            out_rank,
            eps,
            ..
        } = &self.config;
        let (heads, width) = (heads as i64, width as i64);
        let rotate =
            |t: &Tensor, positions: &Tensor| rotate_tail(&self.rope, t, positions, rotated);
        let q_low = self.q_norm.forward(&self.q_down.forward(x)?)?; // [T, q_rank]
        let q = self.q_up.forward(&q_low)?.reshape(&[-1, heads, width])?;
        let q = rotate(&q.rms_norm(None, eps)?, &step.positions)?; // [T, heads, width]
        let kv = self.kv_norm.forward(&self.kv.forward(x)?)?.unsqueeze(1)?;
        let kv = rotate(&kv, &step.positions)?; // [T, 1, width]
        let y = match &self.long {
            None => {
                let options = AttendOptions {
                    scale: self.scale(),
                    sinks: Some(&self.sinks),
                    ..AttendOptions::default()
                };
                step.attend(self.layer, &q, &kv, &kv, &options)?
            }
            Some(long) => self.attend_long(long, x, &q, &q_low, &kv, step)?,
        };
        // Values were rotated as keys: turned back, they depend on distances alone.
        let y = rotate(&y, &step.positions.neg()?)?; // [T, heads, width]
        let groups = out_groups as i64;
        let y = self
            .out_down
            .forward(&y.reshape(&[-1, groups, heads * width / groups])?)?;
        self.out_up
            .forward(&y.reshape(&[-1, groups * out_rank as i64])?)
    }

    fn scale(&self) -> f32 {
        (self.config.width as f32).sqrt().recip()
    }

    /// Attention over the window and the compressed keys.
    fn attend_long(
        &self,
        long: &LongReach,
        x: &Tensor,
        q: &Tensor,
        q_low: &Tensor,
        kv: &Tensor,
        step: &Step<'_>,
    ) -> Result<Tensor> {
        let (heads, width) = (self.config.heads as i64, self.config.width as i64);
        let (backend, dtype, rows) = (x.backend(), q.dtype()?, q.dim(0)?);
        let sequences = step.row_sequences()?; // [T]
        let mut row = vec![kv.reshape(&[-1, width])?, long.compressor.project(x)?];
        if let Some(indexer) = &long.indexer {
            row.push(indexer.compressor.project(x)?);
        }
        let row = Tensor::concat(backend, &row.iter().collect::<Vec<_>>(), 1)?;
        let history = step.index_keys(self.layer, &row)?; // [S, L, W]
        let history = defined(&history, &step.positions, &sequences)?;
        let near = history.narrow(2, 0, width)?; // [S, L, width]
        let far = history.narrow(2, width, long.columns)?;
        let far = long.compressor.keys(&far)?.cast(DType::F32)?; // [S, N, width]
        let mut seen = long.seen(&far, &step.positions)?; // [T, N]
        let sequences = sequences.cast(DType::U32)?;
        if let Some(indexer) = &long.indexer {
            let start = width + long.columns;
            let left = history.narrow(2, start, history.dim(2)? - start)?;
            let inputs = (x, q_low, &step.positions, &sequences);
            seen = indexer.restrict(&left, inputs, &seen)?;
        }
        let (near, near_seen) = self.windows(&near, &step.positions, &sequences)?;

        let q = q.cast(DType::F32)?;
        let minus = |shape: &[i64]| Tensor::full(backend, f64::NEG_INFINITY, DType::F32, shape);
        let masked = |scores: &Tensor, seen: &Tensor| -> Result<Tensor> {
            let shape = scores.shape()?;
            let seen = seen.unsqueeze(1)?.broadcast_to(&shape)?;
            let scaled = scores.mul_scalar(f64::from(self.scale()))?;
            seen.select(&scaled, &minus(&shape)?)
        };
        let near_scores = masked(&q.matmul(&near.t()?)?, &near_seen)?; // [T, heads, window]
        let far_scores = q.gather_matmul(&far.t()?, None, Some(&sequences), false)?;
        let far_scores = masked(&far_scores, &seen)?; // [T, heads, N]
        let sinks = self
            .sinks
            .reshape(&[1, heads, 1])?
            .broadcast_to(&[rows, heads, 1])?;
        let all = Tensor::concat(backend, &[&near_scores, &far_scores, &sinks], 2)?.softmax(-1)?;
        let (n_near, n_far) = (near_scores.dim(2)?, far_scores.dim(2)?);
        let near = all.narrow(2, 0, n_near)?.matmul(&near)?;
        let far =
            all.narrow(2, n_near, n_far)?
                .gather_matmul(&far, None, Some(&sequences), false)?;
        near.add(&far)?.cast(dtype) // [T, heads, width]
    }

    /// f32 keys of the window of every row, `[T, window, width]`, and which of them there are.
    fn windows(
        &self,
        keys: &Tensor,
        positions: &Tensor,
        sequences: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let (n, length, width) = (keys.dim(0)?, keys.dim(1)?, keys.dim(2)?);
        // No window is longer than what there is.
        let window = (self.config.window as i64).min(length);
        let rows = positions.dim(0)?;
        let back = Tensor::arange(keys.backend(), 0.0, window as f64, 1.0, DType::I32)?;
        let places = positions
            .reshape(&[rows, 1])?
            .sub(&back.reshape(&[1, window])?)?; // [T, window]
        let first = sequences.cast(DType::I32)?.mul_scalar(length as f64)?;
        let flat = places
            .maximum_scalar(0.0)?
            .add(&first.reshape(&[rows, 1])?)?;
        let taken = keys.reshape(&[n * length, width])?.take(&flat, 0)?;
        Ok((taken.cast(DType::F32)?, places.ge_scalar(0.0)?))
    }
}

impl LongReach {
    /// Groups that are full at every row's position: `[T, N]`.
    fn seen(&self, keys: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let n = keys.dim(1)?;
        let full = positions
            .add_scalar(1.0)?
            .floor_div_scalar(self.rate as f64)?
            .reshape(&[-1, 1])?;
        Tensor::arange(keys.backend(), 0.0, n as f64, 1.0, DType::I32)?
            .reshape(&[1, n])?
            .lt(&full)
    }
}

/// Chooses compressed keys: `sum_h w_h relu(q_h . k)` over compressed keys of its own.
struct Indexer {
    compressor: Compressor,
    queries: Linear,
    head_weights: Linear,
    rope: Rope,
    heads: i64,
    width: i64,
    rotated: usize,
    top_k: usize,
}

impl Indexer {
    fn load(
        weights: &Weights,
        config: &SharedConfig,
        shape: CompressorConfig,
        rope: &Rope,
    ) -> Result<Self> {
        let &SharedConfig {
            hidden,
            rotated,
            index_heads,
            index_width,
            ..
        } = config;
        let inner = weights.at("compressor");
        let queries = weights.at("wq_b");
        Ok(Self {
            compressor: Compressor::load(&inner, hidden, shape, rope, rotated)?,
            queries: Linear::load(&queries, config.q_rank, index_heads * index_width, false)?,
            head_weights: Linear::load(&weights.at("weights_proj"), hidden, index_heads, false)?,
            rope: rope.clone(),
            heads: index_heads as i64,
            width: index_width as i64,
            rotated,
            top_k: config.index_top_k,
        })
    }

    /// Of the groups `seen` `[T, N]` the best of every row. The inputs are rows `[T, H]`, their
    /// compressed queries, positions and sequences.
    fn restrict(
        &self,
        left: &Tensor,
        inputs: (&Tensor, &Tensor, &Tensor, &Tensor),
        seen: &Tensor,
    ) -> Result<Tensor> {
        let (x, q_low, positions, sequences) = inputs;
        let (rows, groups) = (seen.dim(0)?, seen.dim(1)?);
        if self.top_k as i64 >= groups {
            return Ok(seen.clone());
        }
        let keys = self.compressor.keys(left)?.cast(DType::F32)?; // [S, N, width]
        let q = self
            .queries
            .forward(q_low)?
            .reshape(&[-1, self.heads, self.width])?;
        let q = rotate_tail(&self.rope, &q, positions, self.rotated)?.cast(DType::F32)?;
        let weights = self.head_weights.forward(x)?.cast(DType::F32)?; // [T, heads]
        let factor = ((self.heads * self.width) as f64).sqrt().recip();
        let scores = q
            .gather_matmul(&keys.t()?, None, Some(sequences), false)?
            .relu()?
            .mul(&weights.mul_scalar(factor)?.unsqueeze(2)?)?
            .sum(&[1], false)?; // [T, N]
        let backend = x.backend();
        let minus = Tensor::full(backend, f64::NEG_INFINITY, DType::F32, &[rows, groups])?;
        let chosen = best(&seen.select(&scores, &minus)?, self.top_k)?; // [T, top_k]
        let ones = Tensor::full(backend, 1.0, DType::F32, &[rows, self.top_k as i64])?;
        let chosen = Tensor::zeros(backend, DType::F32, &[rows, groups])?
            .put_along(&chosen, &ones, 1)?
            .gt_scalar(0.0)?;
        seen.logical_and(&chosen)
    }
}
