//! Take, gather, scatter: elements chosen by integer tensors.

use mlxcel_abi::kinds::scatter as kind;
use mlxcel_abi::{AbiError, DType, Result};

use super::number::{need_int, wrap_int};
use super::shape;
use super::special::{max_nan, min_nan};
use super::value::{Data, Mode, Value};

/// An index as a position on an axis; negative ones count from the end.
fn resolve(index: i128, size: usize) -> Result<usize> {
    let position = if index < 0 {
        index + size as i128
    } else {
        index
    };
    usize::try_from(position)
        .ok()
        .filter(|&p| p < size)
        .ok_or_else(|| {
            AbiError::invalid(format!(
                "index {index} is outside an axis of {size} element(s)"
            ))
        })
}

/// Rows of `a` along `axis`: `a.shape` with the axis replaced by the shape of the indices.
pub(super) fn take(mode: Mode, a: &Value, indices: &Value, axis: i32) -> Result<Value> {
    need_int("an index tensor", indices.dtype)?;
    let axis = shape::axis(axis, a.shape.len())?;
    let out = [&a.shape[..axis], &indices.shape, &a.shape[axis + 1..]].concat();
    if out.len() > mlxcel_abi::types::MAX_DIMS {
        return Err(AbiError::invalid(format!(
            "the result {out:?} has too many dimensions"
        )));
    }
    mode.value(a.dtype, out, || {
        let (outer, size, inner) = shape::around(&a.shape, axis);
        let rows = indices
            .ints()?
            .iter()
            .map(|&i| resolve(i, size))
            .collect::<Result<Vec<_>>>()?;
        let mut positions = Vec::with_capacity(outer * rows.len() * inner);
        for block in 0..outer {
            for &row in &rows {
                let start = (block * size + row) * inner;
                positions.extend(start..start + inner);
            }
        }
        Ok(a.data.pick(&positions))
    })
}

/// Shape of the result of indexing `a` along `axis` by `indices` of the same rank.
fn along(a: &Value, indices: &Value, axis: usize) -> Result<Vec<usize>> {
    need_int("an index tensor", indices.dtype)?;
    shape::need_ndim("the index tensor", &indices.shape, a.shape.len())?;
    let mut out = a.shape.clone();
    out[axis] = indices.shape[axis];
    if shape::broadcast(&[&indices.shape, &out]).ok().as_ref() != Some(&out) {
        return Err(AbiError::invalid(format!(
            "indices of shape {:?} do not fit a tensor of shape {:?} along axis {axis}",
            indices.shape, a.shape
        )));
    }
    Ok(out)
}

/// Positions in `a` that `indices` name along `axis`.
fn positions_along(a: &Value, indices: &Value, axis: usize, out: &[usize]) -> Result<Vec<usize>> {
    let indices = indices
        .data
        .pick(&shape::broadcast_positions(&indices.shape, out));
    let Data::Int(indices) = indices else {
        return Err(AbiError::internal("indices are not integers"));
    };
    let mut strides = shape::strides(&a.shape);
    let stride = core::mem::take(&mut strides[axis]) as usize;
    shape::enumerate(out, &strides, 0)
        .into_iter()
        .zip(indices)
        .map(|(base, index)| Ok(base + stride * resolve(index, a.shape[axis])?))
        .collect()
}

/// Elements by indices of the same rank.
pub(super) fn take_along(mode: Mode, a: &Value, indices: &Value, axis: i32) -> Result<Value> {
    let axis = shape::axis(axis, a.shape.len())?;
    let out = along(a, indices, axis)?;
    mode.value(a.dtype, out.clone(), || {
        Ok(a.data.pick(&positions_along(a, indices, axis, &out)?))
    })
}

/// Copy of `a` with elements replaced by indices of the same rank.
pub(super) fn put_along(
    mode: Mode,
    a: &Value,
    indices: &Value,
    values: &Value,
    axis: i32,
) -> Result<Value> {
    let axis = shape::axis(axis, a.shape.len())?;
    let out = along(a, indices, axis)?;
    if shape::broadcast(&[&values.shape, &out]).ok().as_ref() != Some(&out) {
        return Err(AbiError::invalid(format!(
            "values of shape {:?} do not fit indices of shape {:?}",
            values.shape, indices.shape
        )));
    }
    mode.value(a.dtype, a.shape.clone(), || {
        let values = values.cast(mode, a.dtype)?;
        let source = values
            .data
            .pick(&shape::broadcast_positions(&values.shape, &out));
        let mut data = a.data.clone();
        data.put(&positions_along(a, indices, axis, &out)?, &source)?;
        Ok(data)
    })
}

/// Index tensors with their axes.
pub(super) struct Indices<'a> {
    pub tensors: Vec<&'a Value>,
    pub axes: Vec<usize>,
}

impl Indices<'_> {
    /// Common shape of the index tensors, after checks against the rank of the source.
    fn check(&self, ndim: usize) -> Result<Vec<usize>> {
        for (i, &axis) in self.axes.iter().enumerate() {
            if axis >= ndim || self.axes[..i].contains(&axis) {
                return Err(AbiError::invalid(format!(
                    "index axes {:?} must be different axes of a tensor of {ndim} dimension(s)",
                    self.axes
                )));
            }
        }
        for tensor in &self.tensors {
            need_int("an index tensor", tensor.dtype)?;
        }
        let shapes: Vec<&[usize]> = self.tensors.iter().map(|t| t.shape.as_slice()).collect();
        shape::broadcast(&shapes)
    }

    /// For every index tuple, the position in the source where its block starts.
    fn starts(&self, common: &[usize], source: &[usize], block: &[usize]) -> Result<Vec<usize>> {
        let strides = shape::strides(source);
        let mut starts = vec![0usize; shape::count(common)?];
        for (tensor, &axis) in self.tensors.iter().zip(&self.axes) {
            let indices = tensor.ints()?;
            let spread = shape::broadcast_positions(&tensor.shape, common);
            for (start, i) in starts.iter_mut().zip(spread) {
                let at = resolve(indices[i], source[axis])?;
                if at + block[axis] > source[axis] {
                    return Err(AbiError::invalid(format!(
                        "a block of {} at index {at} runs over an axis of {} element(s)",
                        block[axis], source[axis]
                    )));
                }
                *start += at * strides[axis] as usize;
            }
        }
        Ok(starts)
    }
}

/// General gather: shape of the indices, then `slice_sizes`.
pub(super) fn gather(
    mode: Mode,
    a: &Value,
    indices: &Indices<'_>,
    slice_sizes: &[i64],
) -> Result<Value> {
    shape::need_ndim("the source", &a.shape, slice_sizes.len())?;
    let common = indices.check(a.shape.len())?;
    let block = shape::from_dims(slice_sizes)?;
    if block.iter().zip(&a.shape).any(|(&b, &dim)| b > dim) {
        return Err(AbiError::invalid(format!(
            "slice sizes {slice_sizes:?} exceed the source {:?}",
            a.shape
        )));
    }
    let out = [common.as_slice(), &block].concat();
    if out.len() > mlxcel_abi::types::MAX_DIMS {
        return Err(AbiError::invalid(format!(
            "the result {out:?} has too many dimensions"
        )));
    }
    mode.value(a.dtype, out, || {
        let offsets = shape::enumerate(&block, &shape::strides(&a.shape), 0);
        let mut positions = Vec::new();
        for start in indices.starts(&common, &a.shape, &block)? {
            positions.extend(offsets.iter().map(|offset| start + offset));
        }
        Ok(a.data.pick(&positions))
    })
}

/// General scatter: updates have the shape of the indices, then that of a block of the source.
pub(super) fn scatter(
    mode: Mode,
    code: u32,
    a: &Value,
    updates: &Value,
    indices: &Indices<'_>,
) -> Result<Value> {
    if !kind::ALL.iter().any(|(known, _)| *known == code) {
        return Err(AbiError::unimplemented(format!(
            "scatter {code} is not known to this backend"
        )));
    }
    if a.dtype == DType::C64 && !matches!(code, kind::SET | kind::ADD) {
        return Err(AbiError::unimplemented(format!(
            "scatter {} of complex numbers",
            kind::name(code)
        )));
    }
    let common = indices.check(a.shape.len())?;
    let ndim = common.len();
    let fits = updates.shape.len() == ndim + a.shape.len()
        && updates.shape[..ndim] == common[..]
        && updates.shape[ndim..]
            .iter()
            .zip(&a.shape)
            .all(|(&b, &dim)| b <= dim);
    if !fits {
        return Err(AbiError::invalid(format!(
            "updates of shape {:?} must have the indices' shape {common:?} and then at most {:?}",
            updates.shape, a.shape
        )));
    }
    mode.value(a.dtype, a.shape.clone(), || {
        let updates = updates.cast(mode, a.dtype)?;
        let block = &updates.shape[ndim..];
        let offsets = shape::enumerate(block, &shape::strides(&a.shape), 0);
        let mut positions = Vec::new();
        for start in indices.starts(&common, &a.shape, block)? {
            positions.extend(offsets.iter().map(|offset| start + offset));
        }
        let mut data = a.data.clone();
        match (&mut data, &updates.data) {
            (data, from) if code == kind::SET => data.put(&positions, from)?,
            (Data::Real(to), Data::Real(from)) => merge(to, &positions, from, float_merge(code)),
            (Data::Int(to), Data::Int(from)) => {
                merge(to, &positions, from, int_merge(code));
                to.iter_mut().for_each(|x| *x = wrap_int(a.dtype, *x));
            }
            (Data::Complex(to), Data::Complex(from)) => {
                merge(to, &positions, from, |a, b| [a[0] + b[0], a[1] + b[1]]);
            }
            _ => return Err(AbiError::internal("elements of two classes were mixed")),
        }
        Ok(data)
    })
}

fn merge<T: Copy>(to: &mut [T], positions: &[usize], from: &[T], f: fn(T, T) -> T) {
    for (&position, &x) in positions.iter().zip(from) {
        to[position] = f(to[position], x);
    }
}

fn float_merge(code: u32) -> fn(f64, f64) -> f64 {
    match code {
        kind::ADD => |a, b| a + b,
        kind::MUL => |a, b| a * b,
        kind::MAX => max_nan,
        _ => min_nan,
    }
}

fn int_merge(code: u32) -> fn(i128, i128) -> i128 {
    match code {
        kind::ADD => |a, b| a.wrapping_add(b),
        kind::MUL => |a, b| a.wrapping_mul(b),
        kind::MAX => i128::max,
        _ => i128::min,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: Mode = Mode { shapes_only: false };

    fn ints(shape: &[usize], v: &[i128]) -> Value {
        Value {
            dtype: DType::I32,
            shape: shape.to_vec(),
            data: Data::Int(v.to_vec()),
        }
    }

    #[test]
    fn take_keeps_the_axes_around() {
        let a = ints(&[2, 3], &[0, 1, 2, 3, 4, 5]);
        let taken = take(MODE, &a, &ints(&[2, 1], &[2, -3]), -1).unwrap();
        assert_eq!(taken.shape, [2, 2, 1]);
        assert_eq!(taken.ints().unwrap(), [2, 0, 5, 3]);
        assert!(take(MODE, &a, &ints(&[1], &[3]), 1).is_err());
        let along = take_along(MODE, &a, &ints(&[1, 2], &[1, 0]), 1).unwrap();
        assert_eq!(along.ints().unwrap(), [1, 0, 4, 3]);
        let put = put_along(MODE, &a, &ints(&[2, 1], &[0, 2]), &ints(&[], &[9]), 1).unwrap();
        assert_eq!(put.ints().unwrap(), [9, 1, 2, 3, 4, 9]);
    }

    #[test]
    fn gather_and_scatter_agree_on_blocks() {
        let a = ints(&[3, 2], &[0, 1, 2, 3, 4, 5]);
        let rows = ints(&[2], &[2, 0]);
        let indices = Indices {
            tensors: vec![&rows],
            axes: vec![0],
        };
        let blocks = gather(MODE, &a, &indices, &[1, 2]).unwrap();
        assert_eq!(
            (blocks.shape.as_slice(), blocks.ints().unwrap()),
            ([2, 1, 2].as_slice(), [4, 5, 0, 1].as_slice())
        );
        let zero = ints(&[3, 2], &[0; 6]);
        let added = scatter(MODE, kind::ADD, &zero, &blocks, &indices).unwrap();
        assert_eq!(added.ints().unwrap(), [0, 1, 0, 0, 4, 5]);
        assert!(gather(MODE, &a, &indices, &[2, 2]).is_err());
    }
}
