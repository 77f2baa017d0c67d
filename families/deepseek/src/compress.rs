//! Compressed keys (DeepSeek-V4, section 2.3): every `rate` positions give one key, a mean of
//! projections of their rows, weighted feature by feature. In the overlapping form a group's key also
//! takes in the group before it, through projections of its own.
//!
//! A key is made once, in the step that has the last row of its group; projections of the rows before
//! come from the sequence's state.

use mlxcel_sdk::nn::{Linear, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::recent::{Ends, StepRows};

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
    shape: CompressorConfig,
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

    /// Positions that one key takes in.
    fn reach(&self) -> usize {
        self.rate * (1 + usize::from(self.overlapping))
    }

    /// What a sequence keeps: the projections of the rows that a key may still need.
    pub(crate) fn state(&self) -> StateDesc {
        StateDesc::f32(&[(self.reach() - 1).max(1), 2 * self.columns()])
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
            position_bias: weights.single("ape", &[rate as i64, columns as i64])?,
            norm: RmsNorm::load(&weights.at("norm"), config.width, config.eps)?,
            rope: rope.clone(),
            rotated,
            shape: config,
        })
    }

    /// Keys of the groups that rows `[T, H]` end, `[T, width]`, zeros at rows that end none; and the state
    /// after them, from the state before.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        kept: &Tensor,
        rows: &StepRows,
        ends: &Ends,
    ) -> Result<(Tensor, Tensor)> {
        let projections = [&self.kv.forward(x)?, &self.gate.forward(x)?];
        let projected = Tensor::concat(x.backend(), &projections, 1)?.cast(DType::F32)?; // [T, 2 columns]
        let at = (&ends.rows, &ends.sequences);
        let seen = rows.before(kept, &projected, at, self.shape.reach() as i64)?; // [G, reach, 2 columns]
        let keys = self.keys(&seen, &ends.positions, x.dtype()?)?;
        Ok((ends.spread(&keys)?, rows.kept_after(kept, &projected)?))
    }

    /// Keys of groups whose last positions are `ends` `[G]`, from the projections of their rows: `[G, width]`.
    fn keys(&self, seen: &Tensor, ends: &Tensor, dtype: DType) -> Result<Tensor> {
        let (rate, width) = (self.shape.rate as i64, self.shape.width as i64);
        let columns = self.shape.columns() as i64;
        let part = |row: i64, column: i64| seen.narrow(1, row, rate)?.narrow(2, column, width);
        let bias = |column: i64| self.position_bias.narrow(1, column, width);
        // A group's own columns are the last ones, those of the group before it the first.
        let (row, own) = (seen.dim(1)? - rate, columns - width);
        let mut kv = part(row, own)?; // [G, rate, width]
        let mut gate = part(row, columns + own)?.add(&bias(own)?)?;
        if self.shape.overlapping {
            // Before the first group there is nothing.
            let before = part(0, columns)?.add(&bias(0)?)?;
            let shape = before.shape()?;
            let there = ends.ge_scalar(rate as f64)?.reshape(&[-1, 1, 1])?;
            let nothing = Tensor::full(seen.backend(), f64::NEG_INFINITY, DType::F32, &shape)?;
            let before = there.broadcast_to(&shape)?.select(&before, &nothing)?;
            gate = Tensor::concat(seen.backend(), &[&before, &gate], 1)?;
            kv = Tensor::concat(seen.backend(), &[&part(0, 0)?, &kv], 1)?;
        }
        let pooled = kv.mul(&gate.softmax(1)?)?.sum(&[1], false)?.cast(dtype)?; // [G, width]
        // A key stands at its group's first position.
        let starts = ends.add_scalar((1 - rate) as f64)?.maximum_scalar(0.0)?;
        let keys = self.norm.forward(&pooled)?.unsqueeze(1)?;
        rotate_tail(&self.rope, &keys, &starts, self.rotated)?.reshape(&[-1, width])
    }
}

/// The keys among what rows left, `[S, L, W]`: those at the last rows of groups of `rate`, `[S, N, W]`. A
/// group that is not full has zeros, since a product with 0 must not make felt what is not defined.
pub(crate) fn keys_of(history: &Tensor, rate: i64, rows: &StepRows) -> Result<Tensor> {
    let backend = history.backend();
    let (n, length, width) = (history.dim(0)?, history.dim(1)?, history.dim(2)?);
    let groups = length / rate;
    if groups == 0 {
        return Tensor::zeros(backend, history.dtype()?, &[n, 1, width]);
    }
    let range = |from: i64, to: i64, by: i64| {
        Tensor::arange(backend, from as f64, to as f64, by as f64, DType::I32)
    };
    let keys = history.take(&range(rate - 1, groups * rate, rate)?, 1)?;
    let full = rows
        .last_positions()?
        .add_scalar(1.0)?
        .floor_div_scalar(rate as f64)?
        .reshape(&[n, 1])?; // [S, 1]
    let there = range(0, groups, 1)?
        .reshape(&[1, groups])?
        .lt(&full)?
        .reshape(&[n, groups, 1])?
        .broadcast_to(&[n, groups, width])?;
    there.select(
        &keys,
        &Tensor::zeros(backend, history.dtype()?, &[n, groups, width])?,
    )
}
