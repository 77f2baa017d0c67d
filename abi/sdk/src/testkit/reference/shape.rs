//! Shapes, axes, broadcasting, and the enumeration of strided elements.

use mlxcel_abi::types::MAX_DIMS;
use mlxcel_abi::{AbiError, Result};

/// Number of elements; shapes whose count does not fit are refused.
pub(in crate::testkit) fn count(shape: &[usize]) -> Result<usize> {
    // A later zero must not hide an overflow that an implementation might compute on the way.
    let mut product = 1usize;
    for &dim in shape {
        product = product
            .checked_mul(dim.max(1))
            .filter(|&n| n <= isize::MAX as usize / 16)
            .ok_or_else(|| AbiError::invalid(format!("shape {shape:?} has too many elements")))?;
    }
    Ok(if shape.contains(&0) { 0 } else { product })
}

/// Checks dimensions that came from outside.
pub(in crate::testkit) fn from_dims(dims: &[i64]) -> Result<Vec<usize>> {
    if dims.len() > MAX_DIMS {
        return Err(AbiError::invalid(format!(
            "a tensor may have {MAX_DIMS} dimensions, found {}",
            dims.len()
        )));
    }
    let shape = dims
        .iter()
        .map(|&dim| usize::try_from(dim).ok())
        .collect::<Option<Vec<usize>>>()
        .ok_or_else(|| AbiError::invalid(format!("shape {dims:?} has a negative dimension")))?;
    count(&shape)?;
    Ok(shape)
}

/// Index of `axis` in a shape of `ndim` dimensions; negative counts from the end.
pub(in crate::testkit) fn axis(axis: i32, ndim: usize) -> Result<usize> {
    let index = i64::from(axis) + if axis < 0 { ndim as i64 } else { 0 };
    usize::try_from(index)
        .ok()
        .filter(|&index| index < ndim)
        .ok_or_else(|| {
            AbiError::invalid(format!(
                "axis {axis} is out of range for a tensor of {ndim} dimension(s)"
            ))
        })
}

/// Indices of `axes`, in the given order; a repeated one is refused.
pub(in crate::testkit) fn axes(axes: &[i32], ndim: usize) -> Result<Vec<usize>> {
    let mut out = Vec::with_capacity(axes.len());
    for &one in axes {
        let index = axis(one, ndim)?;
        if out.contains(&index) {
            return Err(AbiError::invalid(format!(
                "axis {one} is given twice in {axes:?}"
            )));
        }
        out.push(index);
    }
    Ok(out)
}

/// Common shape of broadcast operands.
pub(in crate::testkit) fn broadcast(shapes: &[&[usize]]) -> Result<Vec<usize>> {
    let ndim = shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
    let mut out = vec![1usize; ndim];
    for shape in shapes {
        let offset = ndim - shape.len();
        for (have, &dim) in out[offset..].iter_mut().zip(*shape) {
            if *have == 1 {
                *have = dim;
            } else if dim != 1 && dim != *have {
                return Err(AbiError::invalid(format!(
                    "shapes {shapes:?} cannot be broadcast together"
                )));
            }
        }
    }
    count(&out)?;
    Ok(out)
}

/// Row-major strides.
pub(in crate::testkit) fn strides(shape: &[usize]) -> Vec<isize> {
    let mut out = vec![1isize; shape.len()];
    for i in (1..shape.len()).rev() {
        out[i - 1] = out[i] * shape[i].max(1) as isize;
    }
    out
}

/// Strides that read a tensor of shape `from` as if it had shape `to`. The shapes must fit.
pub(in crate::testkit) fn broadcast_strides(from: &[usize], to: &[usize]) -> Vec<isize> {
    let own = strides(from);
    let offset = to.len() - from.len();
    let mut out = vec![0isize; to.len()];
    for (i, (&dim, &stride)) in from.iter().zip(&own).enumerate() {
        if dim != 1 {
            out[offset + i] = stride;
        }
    }
    out
}

/// Positions of a strided box in row-major order of `shape`.
pub(in crate::testkit) fn enumerate(
    shape: &[usize],
    strides: &[isize],
    start: isize,
) -> Vec<usize> {
    let total: usize = shape.iter().product();
    let mut out = Vec::with_capacity(total);
    let mut counter = vec![0usize; shape.len()];
    let mut position = start;
    for _ in 0..total {
        out.push(position as usize);
        for axis in (0..shape.len()).rev() {
            counter[axis] += 1;
            position += strides[axis];
            if counter[axis] < shape[axis] {
                break;
            }
            counter[axis] = 0;
            position -= strides[axis] * shape[axis] as isize;
        }
    }
    out
}

/// For every element of `to`, the element of `from` it repeats.
pub(in crate::testkit) fn broadcast_positions(from: &[usize], to: &[usize]) -> Vec<usize> {
    enumerate(to, &broadcast_strides(from, to), 0)
}

/// Positions with the axes `order` moved to the given order.
pub(in crate::testkit) fn permuted_positions(shape: &[usize], order: &[usize]) -> Vec<usize> {
    let own = strides(shape);
    let dims: Vec<usize> = order.iter().map(|&axis| shape[axis]).collect();
    let steps: Vec<isize> = order.iter().map(|&axis| own[axis]).collect();
    enumerate(&dims, &steps, 0)
}

/// Sizes before, at and after an axis.
pub(in crate::testkit) fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (
        shape[..axis].iter().product(),
        shape[axis],
        shape[axis + 1..].iter().product(),
    )
}

/// Refuses a shape other than `expected`, naming `what`.
pub(in crate::testkit) fn need(what: &str, found: &[usize], expected: &[usize]) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(AbiError::invalid(format!(
        "{what} must have shape {expected:?}, found {found:?}"
    )))
}

/// Refuses another number of dimensions than `ndim`, naming `what`.
pub(in crate::testkit) fn need_ndim(what: &str, found: &[usize], ndim: usize) -> Result<()> {
    if found.len() == ndim {
        return Ok(());
    }
    Err(AbiError::invalid(format!(
        "{what} must have {ndim} dimension(s), found shape {found:?}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_follows_the_usual_rule() {
        assert_eq!(broadcast(&[&[3, 1], &[2, 1, 4]]), Ok(vec![2, 3, 4]));
        assert_eq!(broadcast(&[&[], &[0]]), Ok(vec![0]));
        assert!(broadcast(&[&[2], &[3]]).is_err());
        assert_eq!(broadcast_positions(&[2, 1], &[2, 2]), [0, 0, 1, 1]);
        assert_eq!(broadcast_positions(&[], &[3]), [0, 0, 0]);
    }

    #[test]
    fn axes_count_from_both_ends_and_once() {
        assert_eq!(axis(-1, 3), Ok(2));
        assert!(axis(3, 3).is_err());
        assert!(axis(i32::MIN, 3).is_err());
        assert!(axes(&[0, -2], 2).is_err());
    }

    #[test]
    fn permutation_reads_the_transpose() {
        assert_eq!(permuted_positions(&[2, 3], &[1, 0]), [0, 3, 1, 4, 2, 5]);
        assert_eq!(enumerate(&[2, 2], &[-3, 1], 3), [3, 4, 0, 1]);
        assert!(enumerate(&[0, 4], &[4, 1], 0).is_empty());
    }

    #[test]
    fn absurd_shapes_are_refused() {
        assert!(from_dims(&[1 << 40, 1 << 40]).is_err());
        assert!(from_dims(&[1 << 40, 1 << 40, 0]).is_err());
        assert!(from_dims(&[2, -1]).is_err());
        assert!(from_dims(&[1; 9]).is_err());
        assert_eq!(from_dims(&[2, 0]), Ok(vec![2, 0]));
    }
}
