//! Softmax, layer norm, sums along an axis, and order along the last one: what routers of experts and
//! encoders are made of.

use mlxcel_abi::kinds::{order as order_kind, reduce as reduce_kind};
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::Native;
use mlxcel_cpu_kernels::normalise;

use super::{Outcome, State, filled, floats, slot};

pub(super) fn install(table: &mut BackendOps) {
    table.softmax = softmax;
    table.layer_norm = layer_norm;
    table.order = order;
    table.take_along = take_along;
    table.reduce = reduce;
}

slot!(softmax(a: Tensor, axis: i32) |native, state| scaled(native, state, a, axis));
slot!(layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: f32) |native, state| {
    normed(native, state, x, [w, b], eps)
});
slot!(order(kind: u32, a: Tensor, k: i64, axis: i32) |native, _state| ordered(native, kind, a, k, axis));
slot!(take_along(a: Tensor, indices: Tensor, axis: i32) |native, _state| picked(native, a, indices, axis));
slot!(reduce(kind: u32, a: Tensor, axes: *const i32, n_axes: u32, keep_dims: u32) |native, _state| {
    if kind != reduce_kind::SUM || axes.is_null() || n_axes != 1 || keep_dims > 1 {
        return Ok(Outcome::Pass);
    }
    // SAFETY: the slot's contract: one axis.
    summed(native, a, unsafe { *axes }, keep_dims == 1)
});

/// Index of an axis, which may count from the end.
fn axis_of(axis: i32, ndim: usize) -> Option<usize> {
    let from_start = if axis < 0 {
        i64::from(axis) + ndim as i64
    } else {
        i64::from(axis)
    };
    usize::try_from(from_start).ok().filter(|axis| *axis < ndim)
}

/// The size of the last axis, if `axis` is that one.
fn last_axis(shape: &[i64], axis: i32) -> Option<usize> {
    let last = shape.len().checked_sub(1)?;
    (axis_of(axis, shape.len()) == Some(last)).then(|| shape.get(last).map(|n| *n as usize))?
}

fn scaled(native: Native<'_>, state: &State, a: Tensor, axis: i32) -> Result<Option<Tensor>> {
    let Some(a) = floats(&native, a)? else {
        return Ok(None);
    };
    let Some(width) = last_axis(a.shape(), axis) else {
        return Ok(None);
    };
    // SAFETY: a contiguous f32 view of a tensor that the caller holds during the call.
    let input = unsafe { a.as_slice::<f32>() };
    filled(&native, a.given, a.shape(), "softmax", |out| {
        normalise::softmax(state.isa, input, width, out);
        true
    })
}

fn normed(
    native: Native<'_>,
    state: &State,
    x: Tensor,
    parameters: [Tensor; 2],
    eps: f32,
) -> Result<Option<Tensor>> {
    let Some(x) = floats(&native, x)? else {
        return Ok(None);
    };
    let width = x.shape().last().map_or(0, |n| *n as usize);
    let mut found = [None, None];
    for (found, parameter) in found.iter_mut().zip(parameters) {
        if parameter.is_none() {
            continue;
        }
        match floats(&native, parameter)? {
            Some(view) if view.shape() == [width as i64] => *found = Some(view),
            _ => return Ok(None),
        }
    }
    let [weight, bias] = &found;
    // SAFETY: contiguous f32 views of tensors that the caller holds during the call.
    let (input, weight, bias) = unsafe {
        (
            x.as_slice::<f32>(),
            weight.as_ref().map(|w| w.as_slice::<f32>()),
            bias.as_ref().map(|b| b.as_slice::<f32>()),
        )
    };
    filled(&native, x.given, x.shape(), "layer_norm", |out| {
        normalise::layer_norm(state.isa, input, weight, bias, eps, width, out);
        true
    })
}

/// Order along the last axis of numbers; where not-a-numbers go is for MLX to say.
fn ordered(native: Native<'_>, kind: u32, a: Tensor, k: i64, axis: i32) -> Result<Option<Tensor>> {
    let Some(a) = floats(&native, a)? else {
        return Ok(None);
    };
    let Some(width) = last_axis(a.shape(), axis) else {
        return Ok(None);
    };
    let size = width as i64;
    let fits = match kind {
        order_kind::ARGSORT => true,
        order_kind::ARGPARTITION => (-size..size).contains(&k),
        order_kind::TOPK => (1..=size).contains(&k),
        _ => false,
    };
    // SAFETY: a contiguous f32 view of a tensor that the caller holds during the call.
    let input = unsafe { a.as_slice::<f32>() };
    if !fits || u32::try_from(width).is_err() || input.iter().any(|x| x.is_nan()) {
        return Ok(None);
    }
    let by_value = |row: &[f32], i: u32, j: u32| {
        let at = |i: u32| row.get(i as usize).copied().unwrap_or(0.0);
        at(i).total_cmp(&at(j)).then(i.cmp(&j))
    };
    let mut order: Vec<u32> = Vec::with_capacity(width);
    if kind == order_kind::TOPK {
        let keep = k as usize;
        let mut shape = a.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = k;
        }
        let mut values = Vec::with_capacity(width);
        return filled(&native, a.given, &shape, "topk", |out| {
            for (row, out) in input.chunks_exact(width).zip(out.chunks_exact_mut(keep)) {
                values.clear();
                values.extend_from_slice(row);
                if keep < width {
                    values.select_nth_unstable_by(width - keep, f32::total_cmp);
                }
                out.copy_from_slice(values.get(width - keep..).unwrap_or_default());
            }
            true
        });
    }
    let (t, view) = native.allocate(DType::U32, a.shape())?;
    // SAFETY: freshly allocated with this type; nobody else knows it.
    let out = unsafe { view.as_mut_slice::<u32>() };
    for (row, out) in input.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        order.clear();
        order.extend(0..width as u32);
        if kind == order_kind::ARGSORT {
            order.sort_unstable_by(|i, j| by_value(row, *i, *j));
        } else {
            let position = if k < 0 { k + size } else { k } as usize;
            order.select_nth_unstable_by(position, |i, j| by_value(row, *i, *j));
        }
        out.copy_from_slice(&order);
    }
    Ok(Some(t))
}

/// Elements of 16 or 32 bits along the last axis, by indices inside it.
fn picked(native: Native<'_>, a: Tensor, indices: Tensor, axis: i32) -> Result<Option<Tensor>> {
    let (source, index) = (native.view(a)?, native.view(indices)?);
    let (Some(width), Some(chosen)) = (
        last_axis(source.shape(), axis),
        last_axis(index.shape(), axis),
    ) else {
        return Ok(None);
    };
    let leading = |shape: &[i64]| shape.split_last().map(|(_, rest)| rest.to_vec());
    let bytes = source.dtype.size_bytes();
    let usable = source.is_contiguous
        && index.is_contiguous
        && !source.is_empty()
        && !index.is_empty()
        && matches!(bytes, 2 | 4)
        && matches!(index.dtype, DType::I32 | DType::U32)
        && leading(source.shape()) == leading(index.shape());
    if !usable {
        return Ok(None);
    }
    // SAFETY: a contiguous view of integers of 32 bits of a tensor that the caller holds. Negative indices
    // become large ones, which are not inside.
    let at = unsafe { index.as_slice::<u32>() };
    if at.iter().any(|i| *i as usize >= width) {
        return Ok(None);
    }
    let (t, out) = native.allocate(source.dtype, index.shape())?;
    let sizes = [width, chosen];
    // SAFETY: contiguous views with elements of this size, of a tensor that the caller holds and of one that nobody else
    // knows.
    unsafe {
        match bytes {
            2 => pick::<u16>(source.as_slice(), at, sizes, out.as_mut_slice()),
            _ => pick::<u32>(source.as_slice(), at, sizes, out.as_mut_slice()),
        }
    }
    Ok(Some(t))
}

/// Of every `width` elements the `chosen` ones that `at` names.
fn pick<T: Copy + Default>(from: &[T], at: &[u32], [width, chosen]: [usize; 2], out: &mut [T]) {
    let rows = from.chunks_exact(width).zip(at.chunks_exact(chosen));
    for ((from, at), out) in rows.zip(out.chunks_exact_mut(chosen)) {
        for (out, i) in out.iter_mut().zip(at) {
            *out = from.get(*i as usize).copied().unwrap_or_default();
        }
    }
}

/// Sum along one axis.
fn summed(native: Native<'_>, a: Tensor, axis: i32, keep_dims: bool) -> Result<Option<Tensor>> {
    let Some(a) = floats(&native, a)? else {
        return Ok(None);
    };
    let Some(axis) = axis_of(axis, a.shape().len()) else {
        return Ok(None);
    };
    let size = |dims: &[i64]| dims.iter().product::<i64>() as usize;
    let (before, rest) = a.shape().split_at(axis);
    let Some((n, after)) = rest.split_first() else {
        return Ok(None);
    };
    let (n, inner) = (*n as usize, size(after));
    let mut shape = before.to_vec();
    if keep_dims {
        shape.push(1);
    }
    shape.extend_from_slice(after);
    // SAFETY: a contiguous f32 view of a tensor that the caller holds during the call.
    let input = unsafe { a.as_slice::<f32>() };
    filled(&native, a.given, &shape, "sum", |out| {
        for (block, out) in input
            .chunks_exact(n * inner)
            .zip(out.chunks_exact_mut(inner))
        {
            if let [out] = out {
                // Pairwise enough: eight sums side by side.
                let mut sums = [0.0f32; 8];
                for part in block.chunks(8) {
                    for (sum, x) in sums.iter_mut().zip(part) {
                        *sum += x;
                    }
                }
                *out = sums.iter().sum();
                continue;
            }
            out.fill(0.0);
            for row in block.chunks_exact(inner) {
                for (out, x) in out.iter_mut().zip(row) {
                    *out += x;
                }
            }
        }
        true
    })
}
