//! Operations that move elements without computing: shapes, slices, joins, repeats.

use mlxcel_abi::types::MAX_DIMS;
use mlxcel_abi::{AbiError, DType, Result};

use super::number::{float_to_int, promote};
use super::shape;
use super::value::{Data, Mode, Value};

/// Same elements in another shape; one dimension may be -1.
pub(super) fn reshape(mode: Mode, a: &Value, dims: &[i64]) -> Result<Value> {
    let refused = |why: &str| {
        Err(AbiError::invalid(format!(
            "{:?} cannot be reshaped to {dims:?}: {why}",
            a.shape
        )))
    };
    let mut target = dims.to_vec();
    let open: Vec<usize> = (0..dims.len()).filter(|&i| dims[i] == -1).collect();
    match open[..] {
        [] => {}
        [at] => {
            target[at] = 1;
            let rest = shape::count(&shape::from_dims(&target)?)?;
            if rest == 0 || !a.count().is_multiple_of(rest) {
                return refused("the open dimension has no size that fits");
            }
            target[at] = (a.count() / rest) as i64;
        }
        _ => return refused("only one dimension may be -1"),
    }
    let out = shape::from_dims(&target)?;
    if shape::count(&out)? != a.count() {
        return refused("the number of elements differs");
    }
    mode.value(a.dtype, out, || Ok(a.data.clone()))
}

/// Permutes the axes.
pub(super) fn transpose(mode: Mode, a: &Value, axes: &[i32]) -> Result<Value> {
    if axes.len() != a.shape.len() {
        return Err(AbiError::invalid(format!(
            "a permutation of {} axes is needed for shape {:?}, found {axes:?}",
            a.shape.len(),
            a.shape
        )));
    }
    let order = shape::axes(axes, a.shape.len())?;
    let out = order.iter().map(|&axis| a.shape[axis]).collect();
    mode.value(a.dtype, out, || {
        Ok(a.data.pick(&shape::permuted_positions(&a.shape, &order)))
    })
}

/// Repeats axes of size 1 to a larger shape.
pub(super) fn broadcast_to(mode: Mode, a: &Value, dims: &[i64]) -> Result<Value> {
    let out = shape::from_dims(dims)?;
    if out.len() < a.shape.len() || shape::broadcast(&[&a.shape, &out])? != out {
        return Err(AbiError::invalid(format!(
            "shape {:?} cannot be broadcast to {dims:?}",
            a.shape
        )));
    }
    mode.value(a.dtype, out.clone(), || {
        Ok(a.data.pick(&shape::broadcast_positions(&a.shape, &out)))
    })
}

/// Joins along an existing axis; dtypes are promoted as in arithmetic.
pub(super) fn concat(mode: Mode, parts: &[&Value], axis: i32) -> Result<Value> {
    let Some((first, rest)) = parts.split_first() else {
        return Err(AbiError::invalid("nothing was given to join"));
    };
    let axis = shape::axis(axis, first.shape.len())?;
    let mut out = first.shape.clone();
    let mut dtype = first.dtype;
    for part in rest {
        let fits = part.shape.len() == out.len()
            && (0..out.len()).all(|i| i == axis || part.shape[i] == first.shape[i]);
        if !fits {
            return Err(AbiError::invalid(format!(
                "shapes {:?} and {:?} cannot be joined along axis {axis}",
                first.shape, part.shape
            )));
        }
        out[axis] += part.shape[axis];
        dtype = promote(dtype, part.dtype);
    }
    mode.value(dtype, out.clone(), || {
        let mut data = Data::filled(dtype, 0.0, shape::count(&out)?)?;
        let strides = shape::strides(&out);
        let mut start = 0;
        for part in parts {
            let positions = shape::enumerate(&part.shape, &strides, start * strides[axis]);
            data.put(&positions, &part.cast(mode, dtype)?.data)?;
            start += part.shape[axis] as isize;
        }
        Ok(data)
    })
}

/// A strided box as it came from outside.
#[derive(Debug)]
pub(super) struct Bounds<'a> {
    pub starts: &'a [i64],
    pub stops: &'a [i64],
    pub strides: &'a [i64],
}

/// A strided box of a shape: its own shape and the positions of its elements.
pub(super) struct Region {
    pub shape: Vec<usize>,
    strides: Vec<isize>,
    start: isize,
}

impl Region {
    pub(super) fn positions(&self) -> Vec<usize> {
        shape::enumerate(&self.shape, &self.strides, self.start)
    }
}

/// Resolves a box as Python slices are: negative indices count from the end, out of range ones
/// are cut; with a negative step an index below the first element stops after it.
pub(super) fn region(of: &[usize], asked: &Bounds<'_>) -> Result<Region> {
    let Bounds {
        starts,
        stops,
        strides,
    } = asked;
    if starts.len() != of.len() {
        return Err(AbiError::invalid(format!(
            "a slice of shape {of:?} needs {} entries per list, found {}",
            of.len(),
            starts.len()
        )));
    }
    let own = shape::strides(of);
    let mut region = Region {
        shape: Vec::new(),
        strides: Vec::new(),
        start: 0,
    };
    for i in 0..of.len() {
        let (size, step) = (of[i] as i64, strides[i]);
        if step == 0 {
            return Err(AbiError::invalid(format!("the step of axis {i} is 0")));
        }
        let from_end = |x: i64| if x < 0 { x.saturating_add(size) } else { x };
        let (start, span) = if step > 0 {
            let start = from_end(starts[i]).clamp(0, size);
            (start, from_end(stops[i]).clamp(0, size) - start)
        } else {
            let start = from_end(starts[i]).clamp(-1, size - 1);
            (start, start - from_end(stops[i]).clamp(-1, size - 1))
        };
        let length = if span <= 0 {
            0
        } else {
            (span as u64).div_ceil(step.unsigned_abs()) as usize
        };
        region.shape.push(length);
        region
            .strides
            .push(own[i] * if length > 1 { step as isize } else { 1 });
        region.start += own[i] * start.max(0) as isize;
    }
    Ok(region)
}

/// Takes a strided box.
pub(super) fn slice(mode: Mode, a: &Value, asked: &Bounds<'_>) -> Result<Value> {
    let region = region(&a.shape, asked)?;
    mode.value(a.dtype, region.shape.clone(), || {
        Ok(a.data.pick(&region.positions()))
    })
}

/// Copy of `a` with a box replaced by `update`, which is broadcast to it and takes `a`'s dtype.
pub(super) fn slice_update(
    mode: Mode,
    a: &Value,
    update: &Value,
    asked: &Bounds<'_>,
) -> Result<Value> {
    let region = region(&a.shape, asked)?;
    if shape::broadcast(&[&update.shape, &region.shape])
        .ok()
        .as_ref()
        != Some(&region.shape)
    {
        return Err(AbiError::invalid(format!(
            "an update of shape {:?} does not fit the slice {:?}",
            update.shape, region.shape
        )));
    }
    mode.value(a.dtype, a.shape.clone(), || {
        let spread = update
            .cast(mode, a.dtype)?
            .data
            .pick(&shape::broadcast_positions(&update.shape, &region.shape));
        let mut data = a.data.clone();
        data.put(&region.positions(), &spread)?;
        Ok(data)
    })
}

/// Pads with a constant of the tensor's dtype.
pub(super) fn pad(mode: Mode, a: &Value, low: &[i64], high: &[i64], x: f64) -> Result<Value> {
    if low.len() != a.shape.len() {
        return Err(AbiError::invalid(format!(
            "padding of shape {:?} needs {} entries, found {}",
            a.shape,
            a.shape.len(),
            low.len()
        )));
    }
    if low.iter().chain(high).any(|&n| n < 0) {
        return Err(AbiError::invalid(format!(
            "negative padding: low {low:?}, high {high:?}"
        )));
    }
    let dims: Vec<i64> = (0..low.len())
        .map(|i| {
            low[i]
                .saturating_add(high[i])
                .saturating_add(a.shape[i] as i64)
        })
        .collect();
    let out = shape::from_dims(&dims)?;
    mode.value(a.dtype, out.clone(), || {
        let strides = shape::strides(&out);
        let start = strides
            .iter()
            .zip(low)
            .map(|(stride, &n)| stride * n as isize)
            .sum();
        let mut data = Data::filled(a.dtype, x, shape::count(&out)?)?;
        data.put(&shape::enumerate(&a.shape, &strides, start), &a.data)?;
        Ok(data)
    })
}

/// Repeats every element `n` times along an axis.
pub(super) fn repeat(mode: Mode, a: &Value, n: i64, axis: i32) -> Result<Value> {
    let axis = shape::axis(axis, a.shape.len())?;
    let times = usize::try_from(n)
        .map_err(|_| AbiError::invalid(format!("an element cannot be repeated {n} times")))?;
    let mut out = a.shape.clone();
    out[axis] = out[axis].saturating_mul(times);
    mode.value(a.dtype, out, || {
        let (outer, size, inner) = shape::around(&a.shape, axis);
        let mut positions = Vec::new();
        for row in 0..outer * size {
            for _ in 0..times {
                positions.extend(row * inner..(row + 1) * inner);
            }
        }
        Ok(a.data.pick(&positions))
    })
}

/// Repeats the whole tensor; a shorter of shape and counts is filled up with ones in front.
pub(super) fn tile(mode: Mode, a: &Value, reps: &[i64]) -> Result<Value> {
    let ndim = a.shape.len().max(reps.len());
    if ndim > MAX_DIMS {
        return Err(AbiError::invalid(format!(
            "{} counts are too many",
            reps.len()
        )));
    }
    let reps = shape::from_dims(reps)?;
    let in_front = |list: &[usize]| [vec![1; ndim - list.len()], list.to_vec()].concat();
    let (dims, reps) = (in_front(&a.shape), in_front(&reps));
    let out: Vec<usize> = dims
        .iter()
        .zip(&reps)
        .map(|(&d, &r)| d.saturating_mul(r))
        .collect();
    mode.value(a.dtype, out, || {
        // Interleaved as [reps, dim] pairs, where the repeats have stride 0.
        let own = shape::strides(&dims);
        let shape: Vec<usize> = reps.iter().zip(&dims).flat_map(|(&r, &d)| [r, d]).collect();
        let strides: Vec<isize> = own.iter().flat_map(|&stride| [0, stride]).collect();
        Ok(a.data.pick(&shape::enumerate(&shape, &strides, 0)))
    })
}

/// `[start, stop)` in steps: `ceil((stop - start) / step)` elements. Integer types take start and
/// step truncated, as MLX does.
pub(super) fn arange(mode: Mode, start: f64, stop: f64, step: f64, dtype: DType) -> Result<Value> {
    if dtype == DType::BOOL || dtype == DType::C64 {
        return Err(AbiError::invalid(format!(
            "a range of {} is not defined",
            dtype.name()
        )));
    }
    let n = ((stop - start) / step).ceil();
    if !(start.is_finite() && stop.is_finite() && step.is_finite()) || step == 0.0 || n > 2e9 {
        return Err(AbiError::invalid(format!(
            "a range from {start} to {stop} in steps of {step} has no usable length"
        )));
    }
    let count = n.max(0.0) as usize;
    mode.value(dtype, vec![count], || {
        if dtype.is_float() {
            return Ok(Data::Real(
                (0..count).map(|i| start + i as f64 * step).collect(),
            ));
        }
        let (start, step) = (float_to_int(dtype, start), float_to_int(DType::I64, step));
        Ok(Data::Int(
            (0..count as i128).map(|i| start + i * step).collect(),
        ))
    })
}

/// `[n, m]` with ones on the `k`-th diagonal.
pub(super) fn eye(mode: Mode, n: i64, m: i64, k: i64, dtype: DType) -> Result<Value> {
    let out = shape::from_dims(&[n, m])?;
    mode.value(dtype, out.clone(), || {
        let mut data = Data::filled(dtype, 0.0, shape::count(&out)?)?;
        let ones: Vec<usize> = (0..n)
            .filter(|row| (0..m).contains(&row.saturating_add(k)))
            .map(|row| (row * m + row + k) as usize)
            .collect();
        data.put(&ones, &Data::filled(dtype, 1.0, ones.len())?)?;
        Ok(data)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: Mode = Mode { shapes_only: false };

    fn iota(shape: &[usize]) -> Value {
        let n: usize = shape.iter().product();
        Value {
            dtype: DType::I32,
            shape: shape.to_vec(),
            data: Data::Int((0..n as i128).collect()),
        }
    }

    fn sliced(a: &Value, start: i64, stop: i64, step: i64) -> Vec<i128> {
        let asked = Bounds {
            starts: &[start],
            stops: &[stop],
            strides: &[step],
        };
        slice(MODE, a, &asked).unwrap().ints().unwrap().to_vec()
    }

    #[test]
    fn slices_behave_as_in_python() {
        let a = iota(&[10]);
        assert_eq!(sliced(&a, 2, 9, 3), [2, 5, 8]);
        assert_eq!(sliced(&a, -3, 100, 1), [7, 8, 9]);
        assert_eq!(sliced(&a, 8, 1, -3), [8, 5, 2]);
        assert_eq!(sliced(&a, 9, -11, -4), [9, 5, 1]);
        assert_eq!(sliced(&a, 5, 2, 1), []);
        assert_eq!(sliced(&a, 3, 3, -1), []);
        let empty = Bounds {
            starts: &[0],
            stops: &[1],
            strides: &[0],
        };
        assert!(slice(MODE, &a, &empty).is_err());
    }

    #[test]
    fn joins_and_tiles_and_repeats() {
        let (a, b) = (iota(&[2, 2]), iota(&[2, 1]));
        let joined = concat(MODE, &[&a, &b], 1).unwrap();
        assert_eq!(joined.ints().unwrap(), [0, 1, 0, 2, 3, 1]);
        assert_eq!(tile(MODE, &b, &[2]).unwrap().ints().unwrap(), [0, 0, 1, 1]);
        assert_eq!(tile(MODE, &b, &[2, 1, 1]).unwrap().shape, [2, 2, 1]);
        assert_eq!(
            repeat(MODE, &a, 2, 0).unwrap().ints().unwrap(),
            [0, 1, 0, 1, 2, 3, 2, 3]
        );
        assert_eq!(
            pad(MODE, &b, &[1, 0], &[0, 1], 7.0)
                .unwrap()
                .ints()
                .unwrap(),
            [7, 7, 0, 7, 1, 7]
        );
    }

    #[test]
    fn reshape_finds_the_open_dimension() {
        let a = iota(&[2, 6]);
        assert_eq!(reshape(MODE, &a, &[3, -1]).unwrap().shape, [3, 4]);
        assert!(reshape(MODE, &a, &[5, -1]).is_err());
        assert!(reshape(MODE, &a, &[-1, -1]).is_err());
        assert!(reshape(MODE, &iota(&[0]), &[0, -1]).is_err());
        assert_eq!(
            eye(MODE, 2, 3, 1, DType::I8).unwrap().ints().unwrap(),
            [0, 1, 0, 0, 0, 1]
        );
    }
}
