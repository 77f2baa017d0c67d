//! Attention of `deepseek_v4` (section 2.3): one vector per position that is key and value of all
//! heads, seen within a short window, and beyond it compressed keys of groups of positions, of which
//! an indexer may choose. One softmax runs over both and a sink.
//!
//! A layer with a window alone is attention over the host's cache. The others are composed from
//! simple operations here and have two caches. What a sequence needs of its last rows (keys of the
//! window, projections of groups that are not full) is recurrent state. A compressed key is made once,
//! and kept as the index key of the last row of its group; the other rows of a group keep zeros there.
//!
//! What stays linear in the context: the host hands over all index keys of a step's sequences, of which one
//! in `rate` holds anything, and scores are computed against every compressed key, chosen or not. An
//! operation that attends over chosen compressed keys in the pages would end the first.

use mlxcel_sdk::nn::{Linear, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::compress::{Compressor, CompressorConfig, keys_of, rotate_tail};
use crate::latent::ByHead;
use crate::recent::{Ends, StepRows};
use crate::routing::best;

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

    /// The layer's caches, one or two.
    pub(crate) fn caches(&self, reach: Reach) -> Vec<CacheDesc> {
        let Some(long) = self.long(reach) else {
            return vec![CacheDesc::Window {
                kv_heads: 1,
                k_dim: self.width,
                v_dim: self.width,
                window: self.window,
            }];
        };
        let index = self.index(reach);
        let window = StateDesc::f32(&[(self.window - 1).max(1), self.width]);
        let mut states = vec![window, long.state()];
        states.extend(index.map(|index| index.state()));
        let keys = CacheDesc::Latent {
            // Only the index keys are used.
            k_dim: 1,
            v_dim: 1,
            index_dim: Some(self.width + index.map_or(0, |index| index.width)),
        };
        vec![keys, CacheDesc::Recurrent { states }]
    }

    /// Elements per row that live at once: queries, result, and the keys of the row's window.
    pub(crate) fn activation_width(&self) -> usize {
        2 * self.heads * self.width + self.window * (self.width + self.heads) + 5 * self.width
    }
}

/// Which caches of [`SharedConfig::caches`] an attention layer has, by their place among all.
const WINDOW_STATE: usize = 0;
const GROUP_STATE: usize = 1;
const INDEX_STATE: usize = 2;

/// Attention of one layer.
pub(crate) struct SharedAttention {
    /// Place of the layer's first cache.
    cache: usize,
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
    rate: i64,
    indexer: Option<Indexer>,
}

impl SharedAttention {
    /// `rope` is the layer's own: that of layers with compressed keys differs from that of the others.
    pub(crate) fn load(
        weights: &Weights,
        cache: usize,
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
                rate: shape.rate as i64,
                indexer: config
                    .index(reach)
                    .map(|shape| Indexer::load(&weights.at("indexer"), config, shape, rope))
                    .transpose()?,
            }),
        };
        Ok(Self {
            cache,
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
            sinks: weights.single("attn_sink", &[heads as i64])?,
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
                step.attend(self.cache, &q, &kv, &kv, &options)?
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
        let (place, states) = (StepRows::of(step)?, self.cache + 1);
        let ends = Ends::of(&place, long.rate)?;
        let compress = |compressor: &Compressor, state: usize| -> Result<Tensor> {
            let kept = step.state_read(states, state)?;
            let (keys, kept) = compressor.forward(x, &kept, &place, &ends)?;
            step.state_write(states, state, &kept)?;
            Ok(keys)
        };
        let mut row = vec![compress(&long.compressor, GROUP_STATE)?];
        if let Some(indexer) = &long.indexer {
            row.push(compress(&indexer.compressor, INDEX_STATE)?);
        }
        let row = Tensor::concat(backend, &row.iter().collect::<Vec<_>>(), 1)?;
        let history = step.index_keys(self.cache, &row)?; // [S, L, W]
        let keys = keys_of(&history, long.rate, &place)?.cast(DType::F32)?; // [S, N, W]
        let far = keys.narrow(2, 0, width)?;
        let mut seen = long.seen(&far, &step.positions)?; // [T, N]
        let sequences = place.sequences.cast(DType::U32)?;
        if let Some(indexer) = &long.indexer {
            let keys = keys.narrow(2, width, keys.dim(2)? - width)?;
            let inputs = (x, q_low, &step.positions, &sequences);
            seen = indexer.restrict(&keys, inputs, &seen)?;
        }
        let (near, near_seen) = self.windows(kv, step, &place)?;

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
    fn windows(&self, kv: &Tensor, step: &Step<'_>, place: &StepRows) -> Result<(Tensor, Tensor)> {
        let (window, width) = (self.config.window as i64, self.config.width as i64);
        let (backend, rows) = (kv.backend(), place.n_rows);
        let kept = step.state_read(self.cache + 1, WINDOW_STATE)?;
        let kv = kv.reshape(&[rows, width])?.cast(DType::F32)?;
        let all = Tensor::arange(backend, 0.0, rows as f64, 1.0, DType::I32)?;
        let near = place.before(&kept, &kv, (&all, &place.sequences), window)?;
        step.state_write(self.cache + 1, WINDOW_STATE, &place.kept_after(&kept, &kv)?)?;
        let back = Tensor::arange(backend, (1 - window) as f64, 1.0, 1.0, DType::I32)?;
        let positions = place.positions.reshape(&[rows, 1])?.add(&back)?; // [T, window]
        Ok((near, positions.ge_scalar(0.0)?))
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

    /// Of the groups `seen` `[T, N]` the best of every row, by `keys` `[S, N, width]`. The inputs are rows
    /// `[T, H]`, their compressed queries, positions and sequences.
    fn restrict(
        &self,
        keys: &Tensor,
        inputs: (&Tensor, &Tensor, &Tensor, &Tensor),
        seen: &Tensor,
    ) -> Result<Tensor> {
        let (x, q_low, positions, sequences) = inputs;
        let (rows, groups) = (seen.dim(0)?, seen.dim(1)?);
        if self.top_k as i64 >= groups {
            return Ok(seen.clone());
        }
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
