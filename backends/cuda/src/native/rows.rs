//! Norm, rotary embedding, gated activations, sums and products of equal shapes.

use mlxcel_abi::kinds::{binary as binary_kind, glu as glu_kind};
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::RopeArgs;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::stream::Device;

use super::pending::{Pending, Sum};
use super::rotations::{HeadNorms, Turn};
use super::routing::Norm;
use super::{State, is_half, is_plain, refuse_gaps, slot, small};
use crate::driver::{Arguments, Shape};
use crate::kernels::Text;

/// Elements of rows, and how many of them there are, that a warp norms better than a block: those of heads.
const SHORT_ROW: i32 = 512;
const MANY_ROWS: usize = 8;

pub(super) fn install(table: &mut BackendOps) {
    table.rms_norm = rms_norm;
    table.rope = rope;
    table.glu = glu;
    table.binary = binary;
}

slot!(join rms_norm(x: Tensor, w: Tensor, eps: f32) |device, state| norm(device, state, x, w, eps));
slot!(join rope(args: *const RopeArgs) |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    rotate(device, state, &unsafe { RopeArgs::read(args) }?)
});
slot!(join glu(kind: u32, gate: Tensor, up: Tensor) |device, state| gated(device, state, kind, gate, up));
slot!(join binary(kind: u32, a: Tensor, b: Tensor) |device, state| pairwise(device, state, kind, a, b));

/// A launch over `n` pairs of elements.
pub(super) fn pairs(n: usize) -> Shape {
    Shape::line(n.div_ceil(256).clamp(1, 4096) as u32, 256)
}

pub(super) fn norm(
    device: Device<'_>,
    state: &mut State,
    x: Tensor,
    w: Tensor,
    eps: f32,
) -> Result<Option<Tensor>> {
    state.settle(&device, &[x, w])?;
    let view = state.input(&device, x)?;
    refuse_gaps(state, &[&view])?;
    let width = view.shape().last().copied().unwrap_or(0);
    if !is_half(view.dtype) || !is_plain(&view, 4) || width % 2 != 0 {
        return Ok(None);
    }
    let weight = if w.is_none() {
        0
    } else {
        let weight = state.input(&device, w)?;
        if weight.dtype != view.dtype || !is_plain(&weight, 4) || weight.shape() != [width] {
            return Ok(None);
        }
        weight.data as usize
    };
    let (Some(columns), rows) = (small(width), view.len() / width as usize) else {
        return Ok(None);
    };
    let (t, out) = state.output(&device, view.dtype, view.shape())?;
    // A sum that waits is made on the way.
    let sum = state.take_sum(&device, view.data as usize)?;
    let (first, added, total) = match &sum {
        Some(sum) => (sum.a, sum.b, sum.out),
        None => (view.data as usize, 0, 0),
    };
    if sum.is_none() && columns <= SHORT_ROW && rows >= MANY_ROWS && !state.keeps_rows_apart {
        let arguments = Arguments::new()
            .wide(first)
            .wide(weight)
            .wide(out)
            .int(rows as i32)
            .int(columns)
            .float(eps);
        let shape = Shape::line(rows.div_ceil(8) as u32, 256);
        let text = Text::Rows;
        // SAFETY: a warp a row of `width` elements; the weight is as long or null.
        unsafe { state.launch(text, view.dtype, "rms_norm_short", &shape, 0, arguments) }?;
        return Ok(Some(t));
    }
    let mut norm = Norm {
        x: first,
        added,
        weight,
        total,
        eps,
        out,
        rows,
        columns,
        dtype: view.dtype,
        held: sum.map(|sum| sum.held).unwrap_or_default(),
    };
    if state.may_route(&norm) {
        norm.held.extend(super::pending::hold(&device, &[x, w, t])?);
        state.pending = Pending::Norm(norm);
        return Ok(Some(t));
    }
    let submitted = state.submit_norm(&norm);
    super::pending::let_go(&device, &norm.held).and(submitted)?;
    Ok(Some(t))
}

/// What a rotary embedding turns by: the periods that are given, or frequencies of `base`; none where neither can be.
pub(super) fn table(
    device: &Device<'_>,
    state: &mut State,
    periods: Tensor,
    dims: u32,
    base: f32,
) -> Result<Option<usize>> {
    if periods.is_none() {
        return match base > 0.0 {
            true => frequencies(state, dims, base).map(Some),
            false => Ok(None),
        };
    }
    let view = state.input(device, periods)?;
    let fits =
        view.dtype == DType::F32 && is_plain(&view, 4) && view.shape() == [i64::from(dims / 2)];
    Ok(fits.then_some(view.data as usize))
}

/// base^(-2 i / dims) on the device, uploaded once.
fn frequencies(state: &mut State, dims: u32, base: f32) -> Result<usize> {
    if let Some(found) = state.frequencies.get(&(dims, base.to_bits())) {
        return Ok(*found);
    }
    let values: Vec<u8> = (0..dims / 2)
        .map(|i| f64::from(base).powf(-2.0 * f64::from(i) / f64::from(dims)) as f32)
        .flat_map(f32::to_le_bytes)
        .collect();
    let (address, size) = state.pool.take(state.driver, values.len())?;
    state.kept.push((address, size));
    // SAFETY: the block has room for the values.
    unsafe { state.queue.upload(address, values.as_ptr(), values.len()) }?;
    state.frequencies.insert((dims, base.to_bits()), address);
    Ok(address)
}

fn rotate(device: Device<'_>, state: &mut State, args: &RopeArgs) -> Result<Option<Tensor>> {
    state.settle(&device, &[args.x, args.positions, args.freqs])?;
    let (x, positions) = (
        state.input(&device, args.x)?,
        state.input(&device, args.positions)?,
    );
    refuse_gaps(state, &[&x])?;
    let &[rows, heads, width] = x.shape() else {
        return Ok(None);
    };
    let dims = i64::from(args.dims);
    let fits = is_half(x.dtype)
        && is_plain(&x, 2)
        && is_plain(&positions, 4)
        && positions.dtype == DType::I32
        && positions.shape() == [rows]
        && dims >= 2
        && dims % 2 == 0
        && dims <= width
        && args.interleaved <= 1;
    if !fits {
        return Ok(None);
    }
    let Some(table) = table(&device, state, args.freqs, args.dims, args.base)? else {
        return Ok(None);
    };
    let (Some(heads), Some(width), Some(rows)) = (small(heads), small(width), small(rows)) else {
        return Ok(None);
    };
    let turn = Turn {
        positions: positions.data as usize,
        table,
        dims: args.dims as i32,
        interleaved: args.interleaved as i32,
        is_inverse: i32::from(!args.freqs.is_none()),
        scale: args.scale,
        rows,
        width,
        dtype: x.dtype,
        norms: HeadNorms::default(),
    };
    let t = state.defer_rotation(
        &device,
        turn,
        &x,
        heads,
        [args.x, args.positions, args.freqs],
    )?;
    Ok(Some(t))
}

pub(super) fn gated(
    device: Device<'_>,
    state: &mut State,
    kind: u32,
    gate: Tensor,
    up: Tensor,
) -> Result<Option<Tensor>> {
    if !(glu_kind::SILU..=glu_kind::RELU).contains(&kind) {
        return Ok(None);
    }
    state.settle(&device, &[gate, up])?;
    let (a, b) = (state.input(&device, gate)?, state.input(&device, up)?);
    refuse_gaps(state, &[&a, &b])?;
    // Two elements at a time; whether that is so may not depend on how many rows there are where they are kept apart.
    let counted = match a.shape().last() {
        Some(&last) if state.keeps_rows_apart => last as usize,
        _ => a.len(),
    };
    let fits = is_half(a.dtype)
        && a.dtype == b.dtype
        && a.shape() == b.shape()
        && is_plain(&a, 4)
        && is_plain(&b, 4)
        && counted.is_multiple_of(2);
    if !fits {
        return Ok(None);
    }
    let (t, out) = state.output(&device, a.dtype, a.shape())?;
    if state.take_gated(
        &device,
        [a.data as usize, b.data as usize],
        out,
        kind as i32,
    )? {
        return Ok(Some(t));
    }
    state.flush(&device)?;
    let n = a.len() / 2;
    let arguments = Arguments::new()
        .wide(a.data as usize)
        .wide(b.data as usize)
        .wide(out)
        .wide(n)
        .int(kind as i32);
    // SAFETY: three arrays of `n` pairs.
    unsafe { state.launch(Text::Rows, a.dtype, "glu", &pairs(n), 0, arguments) }?;
    Ok(Some(t))
}

/// `b` is as large as `a`, or one row that is combined with each of `a`'s.
pub(super) fn pairwise(
    device: Device<'_>,
    state: &mut State,
    kind: u32,
    a: Tensor,
    b: Tensor,
) -> Result<Option<Tensor>> {
    if !(binary_kind::ADD..=binary_kind::MUL).contains(&kind) {
        return Ok(None);
    }
    let handles = [a, b];
    state.settle(&device, &handles)?;
    let (a, b) = (state.input(&device, a)?, state.input(&device, b)?);
    if kind == binary_kind::ADD
        && let Some(made) = state.take_rank_sum(&device, &a, &b)?
    {
        return Ok(Some(made));
    }
    state.flush(&device)?;
    let is_row = b.shape().len() == 1 && a.shape().last() == b.shape().first();
    let fits = is_half(a.dtype)
        && a.dtype == b.dtype
        && (a.shape() == b.shape() || is_row)
        && is_plain(&a, 4)
        && is_plain(&b, 4)
        && b.len().is_multiple_of(2);
    if !fits {
        return Ok(None);
    }
    let (t, out) = state.output(&device, a.dtype, a.shape())?;
    let n = a.len() / 2;
    if kind == binary_kind::ADD && a.shape() == b.shape() {
        let sum = Sum {
            a: a.data as usize,
            b: b.data as usize,
            out,
            pairs: n,
            dtype: a.dtype,
            held: super::pending::hold(&device, &[handles[0], handles[1], t])?,
        };
        state.pending = Pending::Sum(sum);
        return Ok(Some(t));
    }
    let arguments = Arguments::new()
        .wide(a.data as usize)
        .wide(b.data as usize)
        .wide(out)
        .wide(n)
        .wide(b.len() / 2)
        .int(kind as i32 - 1);
    // SAFETY: `n` pairs of `a` and of the result, and a whole number of times `b`.
    unsafe { state.launch(Text::Rows, a.dtype, "combine", &pairs(n), 0, arguments) }?;
    Ok(Some(t))
}
