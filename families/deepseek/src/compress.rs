//! Compressed keys (DeepSeek-V4, section 2.3): every `rate` positions give one key, a mean of
//! projections of their rows, weighted feature by feature. In the overlapping form a group's key also
//! takes in the group before it, through projections of its own.

use mlxcel_sdk::abi::kinds::scatter;
use mlxcel_sdk::nn::{Linear, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::routing::in_f32;

/// Rotates the last features of `[T, N, D]`, as many as the embedding has.
pub(crate) fn rotate_tail(
    rope: &Rope,
    x: &Tensor,
    positions: &Tensor,
    rotated: usize,
) -> Result<Tensor> {
    let (width, rotated) = (x.dim(2)?, rotated as i64);
    if width == rotated {
        return rope.forward(x, positions);
    }
    let still = x.narrow(2, 0, width - rotated)?;
    let turned = rope.forward(&x.narrow(2, width - rotated, rotated)?, positions)?;
    Tensor::concat(x.backend(), &[&still, &turned], 2)
}

/// Makes compressed keys.
pub(crate) struct Compressor {
    kv: Linear,
    gate: Linear,
    /// f32 `[rate, series * width]`.
    position_bias: Tensor,
    norm: RmsNorm,
    rope: Rope,
    rotated: usize,
    rate: usize,
    width: usize,
    overlapping: bool,
}

/// Shape of a compressor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CompressorConfig {
    pub rate: usize,
    /// Width of a compressed key.
    pub width: usize,
    pub overlapping: bool,
    pub eps: f32,
}

impl CompressorConfig {
    /// Columns of each of the two projections.
    fn columns(&self) -> usize {
        self.width * (1 + usize::from(self.overlapping))
    }

    /// Columns that a row leaves in the cache.
    pub(crate) fn cached(&self) -> usize {
        2 * self.columns()
    }
}

impl Compressor {
    pub(crate) fn load(
        weights: &Weights,
        hidden: usize,
        config: CompressorConfig,
        rope: &Rope,
        rotated: usize,
    ) -> Result<Self> {
        let (rate, columns) = (config.rate, config.columns());
        Ok(Self {
            kv: Linear::load(&weights.at("wkv"), hidden, columns, false)?,
            gate: Linear::load(&weights.at("wgate"), hidden, columns, false)?,
            position_bias: in_f32(weights, "ape", &[rate as i64, columns as i64])?,
            norm: RmsNorm::load(&weights.at("norm"), config.width, config.eps)?,
            rope: rope.clone(),
            rotated,
            rate,
            width: config.width,
            overlapping: config.overlapping,
        })
    }

    /// What rows `[T, H]` leave in the cache: `[T, 2 columns]`.
    pub(crate) fn project(&self, x: &Tensor) -> Result<Tensor> {
        let (kv, gate) = (self.kv.forward(x)?, self.gate.forward(x)?);
        Tensor::concat(x.backend(), &[&kv, &gate], 1)
    }

    /// Keys of all groups of every sequence, `[S, N, width]`, from what all their rows left,
    /// `[S, L, 2 columns]`. A group that is not full has a key that nobody may see.
    pub(crate) fn keys(&self, left: &Tensor) -> Result<Tensor> {
        let (rate, width) = (self.rate as i64, self.width as i64);
        let (sequences, length, columns) = (left.dim(0)?, left.dim(1)?, left.dim(2)? / 2);
        let missing = (rate - length % rate) % rate;
        let dtype = left.dtype()?;
        let left = left
            .pad(&[0, 0, 0], &[0, missing, 0], 0.0)?
            .cast(DType::F32)?;
        let groups = (length + missing) / rate;
        let part = |start: i64| {
            left.narrow(2, start, columns)?
                .reshape(&[sequences, groups, rate, columns])
        };
        let (mut kv, mut gate) = (part(0)?, part(columns)?.add(&self.position_bias)?);
        if self.overlapping {
            kv = overlapped(&kv, width, 0.0)?;
            gate = overlapped(&gate, width, f64::NEG_INFINITY)?;
        }
        let pooled = kv.mul(&gate.softmax(2)?)?.sum(&[2], false)?.cast(dtype)?; // [S, N, width]
        // A key stands at its group's first position; the sequences are the heads of the rotation.
        let keys = self.norm.forward(&pooled)?.transpose(&[1, 0, 2])?;
        let end = (groups * rate) as f64;
        let starts = Tensor::arange(keys.backend(), 0.0, end, rate as f64, DType::I32)?;
        rotate_tail(&self.rope, &keys, &starts, self.rotated)?.transpose(&[1, 0, 2])
    }
}

/// `[S, N, rate, 2 width]` to `[S, N, 2 rate, width]`: the first series of the group before, then the
/// second series of the group itself. Before the first group there is `nothing`.
fn overlapped(groups: &Tensor, width: i64, nothing: f64) -> Result<Tensor> {
    let n = groups.dim(1)?;
    let before = groups
        .narrow(3, 0, width)?
        .pad(&[0, 1, 0, 0], &[0, 0, 0, 0], nothing)?
        .narrow(1, 0, n)?;
    let own = groups.narrow(3, width, width)?;
    Tensor::concat(groups.backend(), &[&before, &own], 2)
}

/// History `[S, L, W]` with zeros in place of what is not defined: a product with 0 must not make
/// it felt.
pub(crate) fn defined(history: &Tensor, positions: &Tensor, sequences: &Tensor) -> Result<Tensor> {
    let backend = history.backend();
    let (n, length, width) = (history.dim(0)?, history.dim(1)?, history.dim(2)?);
    let rows = positions.dim(0)?;
    let last = Tensor::zeros(backend, DType::I32, &[n])?.scatter(
        scatter::MAX,
        &[sequences],
        &[0],
        &positions.reshape(&[rows, 1])?,
    )?; // [S]
    let there = Tensor::arange(backend, 0.0, length as f64, 1.0, DType::I32)?
        .reshape(&[1, length])?
        .le(&last.reshape(&[n, 1])?)?
        .reshape(&[n, length, 1])?
        .broadcast_to(&[n, length, width])?;
    let zeros = Tensor::zeros(backend, history.dtype()?, &[n, length, width])?;
    there.select(history, &zeros)
}
