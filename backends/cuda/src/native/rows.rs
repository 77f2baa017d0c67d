//! Norm, rotary embedding, gated activations, sums and products of equal shapes.

use mlxcel_abi::kinds::{binary as binary_kind, glu as glu_kind};
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::RopeArgs;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::stream::Device;

use super::{State, is_half, is_plain, slot, small};
use crate::driver::{Arguments, Shape};
use crate::kernels::Text;

pub(super) fn install(table: &mut BackendOps) {
    table.rms_norm = rms_norm;
    table.rope = rope;
    table.glu = glu;
    table.binary = binary;
}

slot!(rms_norm(x: Tensor, w: Tensor, eps: f32) |device, state| norm(device, state, x, w, eps));
slot!(rope(args: *const RopeArgs) |device, state| {
    // SAFETY: the slot's contract: a live argument struct.
    rotate(device, state, &unsafe { RopeArgs::read(args) }?)
});
slot!(glu(kind: u32, gate: Tensor, up: Tensor) |device, state| gated(device, state, kind, gate, up));
slot!(binary(kind: u32, a: Tensor, b: Tensor) |device, state| pairwise(device, state, kind, a, b));

/// A launch over `n` pairs of elements.
pub(super) fn pairs(n: usize) -> Shape {
    Shape::line(n.div_ceil(256).clamp(1, 4096) as u32, 256)
}

fn norm(
    device: Device<'_>,
    state: &mut State,
    x: Tensor,
    w: Tensor,
    eps: f32,
) -> Result<Option<Tensor>> {
    let view = state.input(&device, x)?;
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
    let arguments = Arguments::new()
        .wide(view.data as usize)
        .wide(weight)
        .wide(out)
        .int(columns)
        .float(eps);
    let shape = Shape::line(rows as u32, 256);
    // SAFETY: a block a row of `width` elements; the weight is as long or null.
    unsafe { state.launch(Text::Rows, view.dtype, "rms_norm", &shape, 0, arguments) }?;
    Ok(Some(t))
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
    let (address, _) = state.pool.take(state.driver, values.len())?;
    // SAFETY: the block has room for the values.
    unsafe {
        state
            .driver
            .upload(address, values.as_ptr(), values.len(), state.stream)
    }?;
    state.frequencies.insert((dims, base.to_bits()), address);
    Ok(address)
}

fn rotate(device: Device<'_>, state: &mut State, args: &RopeArgs) -> Result<Option<Tensor>> {
    let (x, positions) = (
        state.input(&device, args.x)?,
        state.input(&device, args.positions)?,
    );
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
    let is_given = !args.freqs.is_none();
    let table = if is_given {
        let freqs = state.input(&device, args.freqs)?;
        if freqs.dtype != DType::F32 || !is_plain(&freqs, 4) || freqs.shape() != [dims / 2] {
            return Ok(None);
        }
        freqs.data as usize
    } else if args.base > 0.0 {
        frequencies(state, args.dims, args.base)?
    } else {
        return Ok(None);
    };
    let (Some(n_heads), Some(n_width)) = (small(heads), small(width)) else {
        return Ok(None);
    };
    let (t, out) = state.output(&device, x.dtype, x.shape())?;
    let arguments = Arguments::new()
        .wide(x.data as usize)
        .wide(positions.data as usize)
        .wide(table)
        .wide(out)
        .int(n_heads)
        .int(n_width)
        .int(args.dims as i32)
        .int(args.interleaved as i32)
        .int(i32::from(is_given))
        .float(args.scale);
    let own = heads * (width - dims / 2);
    let shape = Shape {
        grid: [rows as u32, (own as u32).div_ceil(256).clamp(1, 64), 1],
        threads: 256,
        shared_bytes: 0,
    };
    // SAFETY: shapes were checked.
    unsafe { state.launch(Text::Rows, x.dtype, "rope", &shape, 0, arguments) }?;
    Ok(Some(t))
}

fn gated(
    device: Device<'_>,
    state: &mut State,
    kind: u32,
    gate: Tensor,
    up: Tensor,
) -> Result<Option<Tensor>> {
    if !(glu_kind::SILU..=glu_kind::RELU).contains(&kind) {
        return Ok(None);
    }
    let (a, b) = (state.input(&device, gate)?, state.input(&device, up)?);
    let fits = is_half(a.dtype)
        && a.dtype == b.dtype
        && a.shape() == b.shape()
        && is_plain(&a, 4)
        && is_plain(&b, 4)
        && a.len().is_multiple_of(2);
    if !fits {
        return Ok(None);
    }
    let (t, out) = state.output(&device, a.dtype, a.shape())?;
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
fn pairwise(
    device: Device<'_>,
    state: &mut State,
    kind: u32,
    a: Tensor,
    b: Tensor,
) -> Result<Option<Tensor>> {
    if !(binary_kind::ADD..=binary_kind::MUL).contains(&kind) {
        return Ok(None);
    }
    let (a, b) = (state.input(&device, a)?, state.input(&device, b)?);
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
