//! Shapes, joining and cutting.

use mlxcel_abi::Tensor;
use mlxcel_abi::ops_args::SliceArgs;

use crate::args::{self, Result, per_axis};
use crate::bridge::{self, SliceSpec};
use crate::fault::Fault;
use crate::slot::{get, list, tensor_slots};

/// The box that `args` describes.
///
/// # Safety
/// `args` must be valid for the call, with arrays of `ndim` entries.
unsafe fn box_of<'a>(args: *const SliceArgs) -> Result<SliceSpec<'a>> {
    // SAFETY: forwarded to the caller.
    let args = unsafe { SliceArgs::read(args) }?;
    // SAFETY: as above.
    let (starts, stops, strides) = unsafe {
        (
            per_axis(args.starts, args.ndim, "starts")?,
            per_axis(args.stops, args.ndim, "stops")?,
            per_axis(args.strides, args.ndim, "strides")?,
        )
    };
    if strides.contains(&0) {
        return Err(Fault::invalid(format!("strides {strides:?} contain 0")));
    }
    Ok(SliceSpec {
        starts,
        stops,
        strides,
    })
}

tensor_slots! {
    fn reshape(_context, tensors; a: Tensor, dims: *const i64, ndim: u32) {
        // SAFETY: the slot's contract.
        let dims = unsafe { args::open_shape(dims, ndim) }?;
        Ok(bridge::reshape(get(tensors, a)?, dims)?)
    }

    fn transpose(_context, tensors; a: Tensor, axes: *const i32, n_axes: u32) {
        // SAFETY: the slot's contract.
        let axes = unsafe { per_axis(axes, n_axes, "axes") }?;
        Ok(bridge::transpose(get(tensors, a)?, axes)?)
    }

    fn broadcast_to(_context, tensors; a: Tensor, dims: *const i64, ndim: u32) {
        // SAFETY: the slot's contract.
        let dims = unsafe { args::shape(dims, ndim) }?;
        Ok(bridge::broadcast_to(get(tensors, a)?, dims)?)
    }

    fn concat(_context, tensors; ts: *const Tensor, n: usize, axis: i32) {
        // SAFETY: the slot's contract.
        let handles = unsafe { args::values(ts, n, "tensors") }?;
        Ok(bridge::concat(&list(tensors, handles)?, axis)?)
    }

    fn slice(_context, tensors; a: Tensor, args: *const SliceArgs) {
        // SAFETY: the slot's contract.
        let spec = unsafe { box_of(args) }?;
        Ok(bridge::slice(get(tensors, a)?, &spec)?)
    }

    fn slice_update(_context, tensors; a: Tensor, update: Tensor, args: *const SliceArgs) {
        // SAFETY: the slot's contract.
        let spec = unsafe { box_of(args) }?;
        Ok(bridge::slice_update(get(tensors, a)?, get(tensors, update)?, &spec)?)
    }

    fn pad(_context, tensors; a: Tensor, low: *const i64, high: *const i64, ndim: u32, value: f64) {
        // SAFETY: the slot's contract.
        let (low, high) = unsafe { (per_axis(low, ndim, "low")?, per_axis(high, ndim, "high")?) };
        args::check_dims(low, 0)?;
        args::check_dims(high, 0)?;
        Ok(bridge::pad(get(tensors, a)?, low, high, value)?)
    }

    fn repeat(_context, tensors; a: Tensor, n: i64, axis: i32) {
        Ok(bridge::repeat(get(tensors, a)?, n, axis)?)
    }

    fn tile(_context, tensors; a: Tensor, reps: *const i64, n_reps: u32) {
        // SAFETY: the slot's contract.
        let reps = unsafe { per_axis(reps, n_reps, "reps") }?;
        Ok(bridge::tile(get(tensors, a)?, reps)?)
    }

    fn contiguous(_context, tensors; a: Tensor) {
        Ok(bridge::contiguous(get(tensors, a)?)?)
    }
}
