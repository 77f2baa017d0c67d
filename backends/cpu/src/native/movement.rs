//! Operations that move or rename data: reshape, cast from one type of floats to another, rows by index, evaluation.

use core::ffi::c_void;

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, ErrorObj, Result, Status, Tensor};
use mlxcel_backend_mlx::native::Native;

use super::operands::half_of;
use super::{Outcome, attempt, filled, floats, slot};

pub(super) fn install(table: &mut BackendOps) {
    table.reshape = reshape;
    table.cast = cast;
    table.take = take;
    table.eval = eval;
}

slot!(reshape(a: Tensor, dims: *const i64, ndim: u32) |native, _state| {
    if dims.is_null() || ndim == 0 || ndim > 8 {
        return Ok(Outcome::Pass);
    }
    // SAFETY: the slot's contract: `ndim` dimensions.
    renamed(native, a, unsafe { core::slice::from_raw_parts(dims, ndim as usize) })
});
slot!(cast(a: Tensor, dtype: DType) |native, _state| {
    let view = native.view(a)?;
    if view.dtype == dtype { native.retain(a).map(Some) } else { converted(native, a, dtype) }
});
slot!(take(a: Tensor, indices: Tensor, axis: i32) |native, _state| rows(native, a, indices, axis));

/// From one type of floats to another.
fn converted(native: Native<'_>, a: Tensor, dtype: DType) -> Result<Option<Tensor>> {
    let view = native.view(a)?;
    let direct = view.is_contiguous && !view.is_empty();
    match (half_of(view.dtype), half_of(dtype)) {
        (Some(half), None) if direct && dtype == DType::F32 => {
            filled(&native, dtype, view.shape(), "cast", |out| {
                // SAFETY: a contiguous view of elements of 16 bits, of a tensor that the caller holds.
                half.widen(unsafe { view.as_slice() }, out);
                true
            })
        }
        (None, Some(half)) if direct && view.dtype == DType::F32 => {
            let (t, out) = native.allocate(dtype, view.shape())?;
            // SAFETY: a contiguous f32 view of a tensor that the caller holds, and one of 16 bits that nobody else knows.
            unsafe { half.narrow(view.as_slice(), out.as_mut_slice()) };
            Ok(Some(t))
        }
        (_, None) if dtype != DType::F32 => Ok(None),
        _ => {
            let Some(numbers) = floats(&native, a)? else {
                return Ok(None);
            };
            // SAFETY: a contiguous f32 view, which lives as long as the call.
            let from = unsafe { numbers.as_slice::<f32>() };
            filled(&native, dtype, numbers.shape(), "cast", |out| {
                out.copy_from_slice(from);
                true
            })
        }
    }
}

fn renamed(native: Native<'_>, a: Tensor, dims: &[i64]) -> Result<Option<Tensor>> {
    let view = native.view(a)?;
    if !view.is_contiguous || view.is_empty() {
        return Ok(None);
    }
    let known = dims
        .iter()
        .filter(|d| **d >= 0)
        .try_fold(1i64, |n, d| n.checked_mul(*d));
    let Some(known) = known else { return Ok(None) };
    let free = dims.iter().filter(|d| **d == -1).count();
    let len = view.len() as i64;
    let fits = match free {
        0 => known == len && !dims.iter().any(|d| *d < 0),
        1 => known > 0 && len % known == 0 && !dims.iter().any(|d| *d < -1),
        _ => false,
    };
    if !fits {
        return Ok(None);
    }
    let dims: Vec<i64> = dims
        .iter()
        .map(|d| if *d == -1 { len / known } else { *d })
        .collect();
    native.share(a, &dims).map(Some)
}

/// Rows of a contiguous tensor by indices inside it.
fn rows(native: Native<'_>, a: Tensor, indices: Tensor, axis: i32) -> Result<Option<Tensor>> {
    let (source, index) = (native.view(a)?, native.view(indices)?);
    let usable = axis == 0
        && source.is_contiguous
        && index.is_contiguous
        && !source.is_empty()
        && !source.shape().is_empty()
        && matches!(index.dtype, DType::I32 | DType::U32)
        && index.shape().len() + source.shape().len() <= 9;
    if !usable {
        return Ok(None);
    }
    let n = source.shape().first().map_or(0, |n| *n as usize);
    // SAFETY: a contiguous view of 32-bit integers of a tensor that the caller holds. Negative
    // numbers become large ones, which are not inside.
    let index_values = unsafe { index.as_slice::<u32>() };
    if index_values.iter().any(|i| *i as usize >= n) {
        return Ok(None);
    }
    let row_bytes = source.len() / n * source.dtype.size_bytes();
    let tail = source.shape().get(1..).unwrap_or_default();
    let shape: Vec<i64> = index.shape().iter().chain(tail).copied().collect();
    let (t, out) = native.allocate(source.dtype, &shape)?;
    for (i, from) in index_values.iter().enumerate() {
        // SAFETY: `from` is below the number of rows; `out` has one row per index; the two are
        // different allocations.
        unsafe {
            let from = source.data.add(*from as usize * row_bytes);
            core::ptr::copy_nonoverlapping(from, out.data.add(i * row_bytes), row_bytes);
        }
    }
    Ok(Some(t))
}

/// Most tensors are computed already, which MLX's evaluation would take a round trip to find out.
unsafe extern "C" fn eval(
    ctx: *mut c_void,
    ts: *const Tensor,
    n: usize,
    err: *mut *mut ErrorObj,
) -> Status {
    let kernel = |native: Native<'_>, _: &mut super::State| {
        if ts.is_null() || n == 0 {
            return Ok(Outcome::Pass);
        }
        native.check_room()?;
        // SAFETY: the slot's contract: `n` handles.
        for t in unsafe { core::slice::from_raw_parts(ts, n) } {
            if !native.is_computed(*t)? {
                return Ok(Outcome::Pass);
            }
        }
        Ok(Outcome::Done)
    };
    // SAFETY: the slot's contract; the fallback is a slot of the same table and context.
    unsafe {
        match attempt(ctx, err, kernel) {
            Ok(status) => status,
            Err(mlx) => (mlx.eval)(ctx, ts, n, err),
        }
    }
}
