//! The operations over recurrent states and index keys, composed from simple ones: what a step falls
//! back on where the backend lacks a slot, and what conformance compares the slots with. Slow, since
//! a recurrence is one node after another; the recorded operations depend on shapes alone.

use mlxcel_abi::DType;
use mlxcel_abi::kinds::scatter;

use crate::{Result, Tensor};

/// Which rows belong to which sequence, as tensors.
#[derive(Debug, Clone)]
pub struct RowMap {
    /// `[S + 1]` i32.
    pub row_starts: Tensor,
    /// `[T]` i32.
    pub row_sequences: Tensor,
}

/// Parameters of a short convolution.
#[derive(Debug, Clone, Copy)]
pub struct ShortConv<'a> {
    /// `[C, K]`; the last column meets the row itself.
    pub weight: &'a Tensor,
    /// `[C]`.
    pub bias: Option<&'a Tensor>,
    /// One of [`mlxcel_abi::kinds::unary`]; 0 is none.
    pub activation: u32,
}

/// Inputs of the gated delta rule.
#[derive(Debug, Clone, Copy)]
pub struct GatedDelta<'a> {
    /// `[T, Hk, Dk]`, already normed and scaled.
    pub q: &'a Tensor,
    /// `[T, Hk, Dk]`, already normed.
    pub k: &'a Tensor,
    /// `[T, Hv, Dv]`; value head h goes with key head `h / (Hv / Hk)`.
    pub v: &'a Tensor,
    /// Log decay, `[T, Hv]` or `[T, Hv, Dk]`.
    pub g: &'a Tensor,
    /// `[T, Hv]`.
    pub beta: &'a Tensor,
}

/// Inputs of the choice of keys.
#[derive(Debug, Clone, Copy)]
pub struct Index<'a> {
    /// `[T, H, D]`, already rotated.
    pub q: &'a Tensor,
    /// `[T, D]`, already rotated.
    pub k: &'a Tensor,
    /// `[T, H]`.
    pub weights: &'a Tensor,
    /// Keys chosen for every row.
    pub top_k: usize,
    /// Multiplies `q . k`; above 0.
    pub scale: f32,
}

/// Rows `[.., C]` of `state` (the K - 1 rows before the step, `[S, K - 1, C]`) and of `x`, found by
/// their place in the step: `places` are rows of the step, which before a sequence's start mean its
/// state.
fn rows_at(
    state: &Tensor,
    x: &Tensor,
    places: &Tensor,
    starts: &Tensor,
    sequences: &Tensor,
) -> Result<Tensor> {
    let (n, before, width) = (state.dim(0)?, state.dim(1)?, state.dim(2)?);
    let both = Tensor::concat(x.backend(), &[&state.reshape(&[n * before, width])?, x], 0)?;
    let from_start = places.sub(starts)?;
    let in_state = sequences
        .mul_scalar(before as f64)?
        .add(&from_start)?
        .add_scalar(before as f64)?;
    let in_step = places.add_scalar((n * before) as f64)?;
    let index = places.ge(starts)?.select(&in_step, &in_state)?;
    both.take(&index, 0)
}

/// Convolves rows `x` `[T, C]` from the state `[S, K - 1, C]` on: result `[T, C]` in `x`'s dtype, and
/// the state after the step.
pub fn short_conv(
    x: &Tensor,
    conv: &ShortConv<'_>,
    state: &Tensor,
    rows: &RowMap,
) -> Result<(Tensor, Tensor)> {
    let backend = x.backend();
    let (n_rows, n, before) = (x.dim(0)?, state.dim(0)?, state.dim(1)?);
    let values = x.cast(DType::F32)?;
    let state = state.cast(DType::F32)?;
    let first = rows.row_starts.narrow(0, 0, n)?;
    let end = rows.row_starts.narrow(0, 1, n)?.reshape(&[n, 1])?;
    let steps =
        |from: i64, to: i64| Tensor::arange(backend, from as f64, to as f64, 1.0, DType::I32);

    let starts = first.take(&rows.row_sequences, 0)?.reshape(&[n_rows, 1])?;
    let places = steps(0, n_rows)?
        .reshape(&[n_rows, 1])?
        .add(&steps(-before, 1)?)?; // [T, K]
    let sequences = rows.row_sequences.reshape(&[n_rows, 1])?;
    let seen = rows_at(&state, &values, &places, &starts, &sequences)?; // [T, K, C]
    let weight = conv.weight.cast(DType::F32)?.t()?; // [K, C]
    let mut y = seen.mul(&weight)?.sum(&[1], false)?;
    if let Some(bias) = conv.bias {
        y = y.add(&bias.cast(DType::F32)?)?;
    }
    if conv.activation != 0 {
        y = y.unary(conv.activation)?;
    }

    let places = end.add(&steps(-before, 0)?)?; // [S, K - 1]
    let sequences = steps(0, n)?.reshape(&[n, 1])?;
    let kept = rows_at(
        &state,
        &values,
        &places,
        &first.reshape(&[n, 1])?,
        &sequences,
    )?;
    Ok((y.cast(x.dtype()?)?, kept))
}

/// Runs the gated delta rule from the state `[S, Hv, Dk, Dv]` on: result `[T, Hv, Dv]` in `v`'s
/// dtype, and the state after the step.
pub fn gated_delta(
    inputs: &GatedDelta<'_>,
    state: &Tensor,
    rows: &RowMap,
) -> Result<(Tensor, Tensor)> {
    let GatedDelta { q, k, v, g, beta } = *inputs;
    let (n_rows, heads, width) = (v.dim(0)?, v.dim(1)?, v.dim(2)?);
    let (key_heads, key_width) = (k.dim(1)?, k.dim(2)?);
    let group = heads / key_heads.max(1);
    let per_head = |t: &Tensor| -> Result<Tensor> {
        let t = t.cast(DType::F32)?;
        if group == 1 {
            Ok(t)
        } else {
            t.repeat(group, 1)
        }
    };
    let q = per_head(q)?.reshape(&[n_rows, heads, 1, key_width])?;
    let k = per_head(k)?.reshape(&[n_rows, heads, key_width, 1])?;
    let v = v.cast(DType::F32)?.reshape(&[n_rows, heads, 1, width])?;
    let decay = g
        .cast(DType::F32)?
        .exp()?
        .reshape(&[n_rows, heads, -1, 1])?;
    let beta = beta.cast(DType::F32)?.reshape(&[n_rows, heads, 1, 1])?;
    let mut state = state.cast(DType::F32)?;
    let mut out = Vec::new();
    for row in 0..n_rows {
        let at = |t: &Tensor| t.narrow(0, row, 1);
        let sequence = at(&rows.row_sequences)?;
        let key = at(&k)?;
        let decayed = state.take(&sequence, 0)?.mul(&at(&decay)?)?; // [1, H, Dk, Dv]
        let recalled = decayed.mul(&key)?.sum(&[2], true)?;
        let delta = at(&v)?.sub(&recalled)?.mul(&at(&beta)?)?; // [1, H, 1, Dv]
        let updated = decayed.add(&key.mul(&delta)?)?;
        out.push(at(&q)?.matmul(&updated)?); // [1, H, 1, Dv]
        state = state.scatter(scatter::SET, &[&sequence], &[0], &updated.unsqueeze(0)?)?;
    }
    let y = Tensor::concat(inputs.v.backend(), &out.iter().collect::<Vec<_>>(), 0)?;
    let y = y
        .reshape(&[n_rows, heads, width])?
        .cast(inputs.v.dtype()?)?;
    Ok((y, state))
}

/// Chooses keys among `keys` `[S, L, D]`, this step's included: `[T, top_k]` i32, -1 for none.
pub fn index(
    inputs: &Index<'_>,
    keys: &Tensor,
    positions: &Tensor,
    row_sequences: &Tensor,
) -> Result<Tensor> {
    let backend = keys.backend();
    let (n_rows, heads, length) = (inputs.q.dim(0)?, inputs.q.dim(1)?, keys.dim(1)?);
    let keys = keys.take(row_sequences, 0)?.cast(DType::F32)?; // [T, L, D]
    let scores = inputs
        .q
        .cast(DType::F32)?
        .matmul(&keys.t()?)?
        .mul_scalar(inputs.scale.into())?
        .relu()?; // [T, H, L]
    let weights = inputs
        .weights
        .cast(DType::F32)?
        .reshape(&[n_rows, heads, 1])?;
    let scores = scores.mul(&weights)?.sum(&[1], false)?; // [T, L]
    let at = Tensor::arange(backend, 0.0, length as f64, 1.0, DType::I32)?;
    let visible = at.le(&positions.reshape(&[n_rows, 1])?)?;
    let never = Tensor::full(backend, f64::INFINITY, DType::F32, &[])?;
    let order = visible.select(&scores.neg()?, &never)?.argsort(-1)?;
    let most = (inputs.top_k as i64).min(length);
    let chosen = order.narrow(1, 0, most)?;
    let sees = visible.take_along(&chosen, 1)?;
    let none = Tensor::full(backend, -1.0, DType::I32, &[])?;
    let chosen = sees.select(&chosen.cast(DType::I32)?, &none)?;
    if most == inputs.top_k as i64 {
        return Ok(chosen);
    }
    chosen.pad(&[0, 0], &[0, inputs.top_k as i64 - most], -1.0)
}
