//! Reading and writing at indices.

use mlxcel_abi::Tensor;
use mlxcel_abi::ops_args::GatherArgs;

use crate::args::{self, Result, per_axis};
use crate::bridge::{self, Ref};
use crate::context::Tensors;
use crate::slot::{get, list, tensor_slots};

/// Index tensors and their axes.
///
/// # Safety
/// The arrays of `args` must have `n_indices` entries.
unsafe fn indices<'a>(tensors: &'a Tensors, args: &GatherArgs) -> Result<(Vec<Ref<'a>>, Vec<i32>)> {
    // SAFETY: forwarded to the caller.
    let (handles, axes) = unsafe {
        (
            per_axis(args.indices, args.n_indices, "indices")?,
            per_axis(args.axes, args.n_indices, "axes")?,
        )
    };
    Ok((list(tensors, handles)?, args::axes(axes)?))
}

tensor_slots! {
    fn take(_context, tensors; a: Tensor, indices: Tensor, axis: i32) {
        Ok(bridge::take(get(tensors, a)?, get(tensors, indices)?, axis)?)
    }

    fn take_along(_context, tensors; a: Tensor, indices: Tensor, axis: i32) {
        Ok(bridge::take_along(get(tensors, a)?, get(tensors, indices)?, axis)?)
    }

    fn put_along(_context, tensors; a: Tensor, indices: Tensor, values: Tensor, axis: i32) {
        Ok(bridge::put_along(get(tensors, a)?, get(tensors, indices)?, get(tensors, values)?, axis)?)
    }

    fn gather(_context, tensors; a: Tensor, args: *const GatherArgs) {
        // SAFETY: the slot's contract.
        let args = unsafe { GatherArgs::read(args) }?;
        // SAFETY: the slot's contract.
        let (indices, axes) = unsafe { indices(tensors, &args) }?;
        // SAFETY: the slot's contract.
        let slice_sizes = unsafe { args::shape(args.slice_sizes, args.ndim) }?;
        Ok(bridge::gather(get(tensors, a)?, &indices, &axes, slice_sizes)?)
    }

    fn scatter(_context, tensors; kind: u32, a: Tensor, updates: Tensor, args: *const GatherArgs) {
        // SAFETY: the slot's contract.
        let args = unsafe { GatherArgs::read(args) }?;
        // SAFETY: the slot's contract.
        let (indices, axes) = unsafe { indices(tensors, &args) }?;
        Ok(bridge::scatter(kind, get(tensors, a)?, get(tensors, updates)?, &indices, &axes)?)
    }
}
