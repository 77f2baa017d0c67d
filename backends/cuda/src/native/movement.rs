//! Operations that move or rename elements: reshape, cast, rows by index.

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::stream::Device;

use super::rows::pairs;
use super::{State, is_half, is_plain, slot, small};
use crate::driver::{Arguments, Shape};
use crate::kernels::Text;

pub(super) fn install(table: &mut BackendOps) {
    table.reshape = reshape;
    table.cast = cast;
    table.take = take;
}

slot!(join reshape(a: Tensor, dims: *const i64, ndim: u32) |device, state| {
    if dims.is_null() || ndim == 0 || ndim > 8 {
        return Ok(super::Outcome::Pass);
    }
    // SAFETY: the slot's contract: `ndim` dimensions.
    renamed(device, state, a, unsafe { core::slice::from_raw_parts(dims, ndim as usize) })
});
slot!(cast(a: Tensor, dtype: DType) |device, state| converted(device, state, a, dtype));
slot!(take(a: Tensor, indices: Tensor, axis: i32) |device, state| rows(device, state, a, indices, axis));

fn renamed(
    device: Device<'_>,
    state: &mut State,
    a: Tensor,
    dims: &[i64],
) -> Result<Option<Tensor>> {
    state.settle(&device, &[a])?;
    let (view, _) = device.view(a)?;
    if !view.is_contiguous || view.is_empty() {
        return Ok(None);
    }
    let known = dims
        .iter()
        .filter(|d| **d >= 0)
        .try_fold(1_i64, |n, d| n.checked_mul(*d));
    let Some(known) = known else { return Ok(None) };
    let free = dims.iter().filter(|d| **d < 0).count();
    let len = view.len() as i64;
    let fits = match free {
        0 => known == len,
        1 => known > 0 && len % known == 0 && dims.iter().all(|d| *d >= -1),
        _ => false,
    };
    if !fits {
        return Ok(None);
    }
    let dims: Vec<i64> = dims
        .iter()
        .map(|d| if *d == -1 { len / known } else { *d })
        .collect();
    device.share(a, &dims).map(Some)
}

fn converted(
    device: Device<'_>,
    state: &mut State,
    a: Tensor,
    dtype: DType,
) -> Result<Option<Tensor>> {
    let view = state.input(&device, a)?;
    if view.dtype == dtype {
        return device.retain(a).map(Some);
    }
    let fits = is_half(view.dtype)
        && dtype == DType::F32
        && is_plain(&view, 4)
        && view.len().is_multiple_of(2);
    if !fits {
        return Ok(None);
    }
    let (t, out) = state.output(&device, dtype, view.shape())?;
    let n = view.len() / 2;
    let arguments = Arguments::new().wide(view.data as usize).wide(out).wide(n);
    // SAFETY: as many pairs in as out.
    unsafe { state.launch(Text::Rows, view.dtype, "widen", &pairs(n), 0, arguments) }?;
    Ok(Some(t))
}

fn rows(
    device: Device<'_>,
    state: &mut State,
    a: Tensor,
    indices: Tensor,
    axis: i32,
) -> Result<Option<Tensor>> {
    let (source, index) = (state.input(&device, a)?, state.input(&device, indices)?);
    let usable = axis == 0
        && is_plain(&source, 2)
        && is_plain(&index, 4)
        && !source.shape().is_empty()
        && matches!(index.dtype, DType::I32 | DType::U32)
        && index.shape().len() + source.shape().len() <= 9;
    if !usable {
        return Ok(None);
    }
    let n = source.shape().first().copied().unwrap_or(1);
    let row_bytes = source.len() / n as usize * source.dtype.size_bytes();
    let in_words = row_bytes.is_multiple_of(4) && is_plain(&source, 4);
    let (name, unit) = if in_words {
        ("take_words", 4)
    } else {
        ("take_halves", 2)
    };
    let (Some(table_rows), Some(units), true) = (
        small(n),
        small((row_bytes / unit) as i64),
        row_bytes.is_multiple_of(unit),
    ) else {
        return Ok(None);
    };
    let tail = source.shape().get(1..).unwrap_or_default();
    let shape: Vec<i64> = index.shape().iter().chain(tail).copied().collect();
    let (t, out) = state.output(&device, source.dtype, &shape)?;
    let arguments = Arguments::new()
        .wide(source.data as usize)
        .wide(index.data as usize)
        .wide(out)
        .int(units)
        .int(table_rows)
        .int(i32::from(index.dtype == DType::I32));
    let launch = Shape {
        grid: [
            index.len() as u32,
            (units as u32).div_ceil(512).clamp(1, 64),
            1,
        ],
        threads: 128,
        shared_bytes: 0,
    };
    // SAFETY: rows of `units` units; the kernel keeps indices inside the table.
    unsafe { state.launch(Text::Rows, DType::BF16, name, &launch, 0, arguments) }?;
    Ok(Some(t))
}
