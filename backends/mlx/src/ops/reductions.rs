//! Reductions, running reductions and order.

use mlxcel_abi::Tensor;

use crate::args::{flag, per_axis};
use crate::bridge;
use crate::slot::{get, tensor_slots};

tensor_slots! {
    fn reduce(_context, tensors; kind: u32, a: Tensor, axes: *const i32, n_axes: u32, keep_dims: u32) {
        // SAFETY: the slot's contract.
        let axes = unsafe { per_axis(axes, n_axes, "axes") }?;
        let keep_dims = flag(keep_dims, "keep_dims")?;
        Ok(bridge::reduce(kind, get(tensors, a)?, axes, keep_dims)?)
    }

    fn arg_reduce(_context, tensors; kind: u32, a: Tensor, axis: i32, keep_dims: u32) {
        let keep_dims = flag(keep_dims, "keep_dims")?;
        Ok(bridge::arg_reduce(kind, get(tensors, a)?, axis, keep_dims)?)
    }

    fn cumulative(_context, tensors; kind: u32, a: Tensor, axis: i32, reverse: u32, inclusive: u32) {
        let (reverse, inclusive) = (flag(reverse, "reverse")?, flag(inclusive, "inclusive")?);
        Ok(bridge::cumulative(kind, get(tensors, a)?, axis, reverse, inclusive)?)
    }

    fn order(_context, tensors; kind: u32, a: Tensor, k: i64, axis: i32) {
        Ok(bridge::order(kind, get(tensors, a)?, k, axis)?)
    }

    fn softmax(_context, tensors; a: Tensor, axis: i32) {
        Ok(bridge::softmax(get(tensors, a)?, axis)?)
    }
}
