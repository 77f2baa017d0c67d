//! Operations that move or rename elements: reshape, cast, rows by index.

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::stream::Device;

use super::rows::pairs;
use super::{State, is_half, is_plain, slot, small};
use crate::driver::{Arguments, Rows, Shape};
use crate::kernels::Text;

pub(super) fn install(table: &mut BackendOps) {
    table.reshape = reshape;
    table.cast = cast;
    table.take = take;
    table.contiguous = contiguous;
}

slot!(join reshape(a: Tensor, dims: *const i64, ndim: u32) |device, state| {
    if dims.is_null() || ndim == 0 || ndim > 8 {
        return Ok(super::Outcome::Pass);
    }
    // SAFETY: the slot's contract: `ndim` dimensions.
    renamed(device, state, a, unsafe { core::slice::from_raw_parts(dims, ndim as usize) })
});
slot!(cast(a: Tensor, dtype: DType) |device, state| converted(device, state, a, dtype));
slot!(contiguous(a: Tensor) |device, state| part(device, state, a));
slot!(take(a: Tensor, indices: Tensor, axis: i32) |device, state| rows(device, state, a, indices, axis));

/// A part of a weight, in memory of its own that is as constant as the weight is: kernels read it ahead. In MLX's memory, where it
/// would come to lie otherwise, it is one of many results.
fn part(device: Device<'_>, state: &mut State, a: Tensor) -> Result<Option<Tensor>> {
    let (view, is_foreign) = device.view(a)?;
    if is_foreign || view.is_empty() {
        return Ok(None);
    }
    let Some(whole_bytes) = state.pool.constant_around(view.data as usize) else {
        return Ok(None);
    };
    let size = view.dtype.size_bytes();
    let bytes = view.len() * size;
    let Some((rows, pitch)) = rows_of(view.shape(), view.strides(), view.is_contiguous) else {
        return Ok(None);
    };
    if bytes >= whole_bytes {
        // Nothing is cut off.
        return Ok(None);
    }
    let (t, to) = state.output(&device, view.dtype, view.shape())?;
    let rows = Rows {
        from: view.data as usize,
        to,
        rows,
        bytes: bytes / rows,
        pitch: pitch * size,
    };
    // SAFETY: as the view has it; the result has room for all rows.
    unsafe { state.queue.copy_rows(&rows) }?;
    state.pool.set_constant(to, bytes);
    Ok(Some(t))
}

/// How many rows without gaps a view is, and elements from one to the next; none where it is none such.
fn rows_of(shape: &[i64], strides: &[i64], is_contiguous: bool) -> Option<(usize, usize)> {
    let len = shape.iter().product::<i64>();
    if is_contiguous {
        return Some((1, usize::try_from(len).ok()?));
    }
    match (shape, strides) {
        (&[rows, columns], &[stride, 1]) if stride >= columns => {
            Some((usize::try_from(rows).ok()?, usize::try_from(stride).ok()?))
        }
        _ => None,
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_along_either_axis_are_rows() {
        // Rows 4 to 7 of 8, and columns 3 to 5 of 6.
        assert_eq!(rows_of(&[4, 6], &[6, 1], true), Some((1, 24)));
        assert_eq!(rows_of(&[8, 3], &[6, 1], false), Some((8, 6)));
        assert_eq!(rows_of(&[3], &[1], true), Some((1, 3)));
        for (shape, strides) in [
            (&[8, 3][..], &[1, 8][..]),
            (&[8, 3], &[0, 1]),
            (&[8, 3], &[-6, 1]),
            (&[2, 8, 3], &[48, 6, 1]),
        ] {
            assert_eq!(rows_of(shape, strides, false), None);
        }
    }
}
