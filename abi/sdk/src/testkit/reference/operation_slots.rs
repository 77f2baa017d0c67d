//! Slots for elementwise operations, reductions, shapes and indexing.

use std::sync::Arc;

use mlxcel_abi::ops_args::{GatherArgs, SliceArgs};
use mlxcel_abi::{AbiError, DType, Result, Tensor};

use super::edge::{all, flag, list, slots};
use super::inner::Inner;
use super::movement::Bounds;
use super::value::Value;
use super::{binary as two, indexing, movement, reduce as along, unary as one};

slots! {
    fn cast(inner, a: Tensor, dtype: DType, out: *mut Tensor) {
        inner.give(out, inner.get(a)?.cast(inner.mode, dtype)?)
    }

    fn view(inner, a: Tensor, dtype: DType, out: *mut Tensor) {
        inner.give(out, one::view(inner.mode, &*inner.get(a)?, dtype)?)
    }

    fn unary(inner, kind: u32, a: Tensor, out: *mut Tensor) {
        inner.give(out, one::unary(inner.mode, kind, &*inner.get(a)?)?)
    }

    fn binary(inner, kind: u32, a: Tensor, b: Tensor, out: *mut Tensor) {
        inner.give(out, two::binary(inner.mode, kind, &*inner.get(a)?, &*inner.get(b)?)?)
    }

    fn binary_scalar(inner, kind: u32, a: Tensor, scalar: f64, scalar_first: u32, out: *mut Tensor) {
        let first = flag("scalar_first", scalar_first)?;
        inner.give(out, two::binary_scalar(inner.mode, kind, &*inner.get(a)?, scalar, first)?)
    }

    fn select(inner, cond: Tensor, a: Tensor, b: Tensor, out: *mut Tensor) {
        let (cond, a, b) = (inner.get(cond)?, inner.get(a)?, inner.get(b)?);
        inner.give(out, two::select(inner.mode, &cond, &a, &b)?)
    }

    fn clip(inner, a: Tensor, low: f64, high: f64, out: *mut Tensor) {
        inner.give(out, one::clip(inner.mode, &*inner.get(a)?, low, high)?)
    }

    fn reduce(inner, kind: u32, a: Tensor, axes: *const i32, n_axes: u32, keep_dims: u32, out: *mut Tensor) {
        let axes = list("axes", axes, n_axes as usize)?;
        let keep = flag("keep_dims", keep_dims)?;
        inner.give(out, along::reduce(inner.mode, kind, &*inner.get(a)?, axes, keep)?)
    }

    fn arg_reduce(inner, kind: u32, a: Tensor, axis: i32, keep_dims: u32, out: *mut Tensor) {
        let keep = flag("keep_dims", keep_dims)?;
        inner.give(out, along::arg_reduce(inner.mode, kind, &*inner.get(a)?, axis, keep)?)
    }

    fn cumulative(inner, kind: u32, a: Tensor, axis: i32, reverse: u32, inclusive: u32, out: *mut Tensor) {
        let (reverse, inclusive) = (flag("reverse", reverse)?, flag("inclusive", inclusive)?);
        inner.give(out, along::cumulative(inner.mode, kind, &*inner.get(a)?, axis, reverse, inclusive)?)
    }

    fn order(inner, kind: u32, a: Tensor, k: i64, axis: i32, out: *mut Tensor) {
        inner.give(out, along::order(inner.mode, kind, &*inner.get(a)?, k, axis)?)
    }

    fn softmax(inner, a: Tensor, axis: i32, out: *mut Tensor) {
        inner.give(out, along::softmax(inner.mode, &*inner.get(a)?, axis)?)
    }

    fn reshape(inner, a: Tensor, dims: *const i64, ndim: u32, out: *mut Tensor) {
        let dims = list("dims", dims, ndim as usize)?;
        inner.give(out, movement::reshape(inner.mode, &*inner.get(a)?, dims)?)
    }

    fn transpose(inner, a: Tensor, axes: *const i32, n_axes: u32, out: *mut Tensor) {
        let axes = list("axes", axes, n_axes as usize)?;
        inner.give(out, movement::transpose(inner.mode, &*inner.get(a)?, axes)?)
    }

    fn broadcast_to(inner, a: Tensor, dims: *const i64, ndim: u32, out: *mut Tensor) {
        let dims = list("dims", dims, ndim as usize)?;
        inner.give(out, movement::broadcast_to(inner.mode, &*inner.get(a)?, dims)?)
    }

    fn concat(inner, ts: *const Tensor, n: usize, axis: i32, out: *mut Tensor) {
        let parts = all(inner, list("tensors", ts, n)?)?;
        let parts: Vec<&Value> = parts.iter().map(Arc::as_ref).collect();
        inner.give(out, movement::concat(inner.mode, &parts, axis)?)
    }

    fn slice(inner, a: Tensor, args: *const SliceArgs, out: *mut Tensor) {
        let bounds = bounds(args)?;
        inner.give(out, movement::slice(inner.mode, &*inner.get(a)?, &bounds)?)
    }

    fn slice_update(inner, a: Tensor, update: Tensor, args: *const SliceArgs, out: *mut Tensor) {
        let bounds = bounds(args)?;
        inner.give(out, movement::slice_update(inner.mode, &*inner.get(a)?, &*inner.get(update)?, &bounds)?)
    }

    fn pad(inner, a: Tensor, low: *const i64, high: *const i64, ndim: u32, value: f64, out: *mut Tensor) {
        let (low, high) = (list("low", low, ndim as usize)?, list("high", high, ndim as usize)?);
        inner.give(out, movement::pad(inner.mode, &*inner.get(a)?, low, high, value)?)
    }

    fn repeat(inner, a: Tensor, n: i64, axis: i32, out: *mut Tensor) {
        inner.give(out, movement::repeat(inner.mode, &*inner.get(a)?, n, axis)?)
    }

    fn tile(inner, a: Tensor, reps: *const i64, n_reps: u32, out: *mut Tensor) {
        let reps = list("reps", reps, n_reps as usize)?;
        inner.give(out, movement::tile(inner.mode, &*inner.get(a)?, reps)?)
    }

    fn contiguous(inner, a: Tensor, out: *mut Tensor) {
        let value = inner.get(a)?;
        inner.give(out, (*value).clone())
    }

    fn take(inner, a: Tensor, indices: Tensor, axis: i32, out: *mut Tensor) {
        inner.give(out, indexing::take(inner.mode, &*inner.get(a)?, &*inner.get(indices)?, axis)?)
    }

    fn take_along(inner, a: Tensor, indices: Tensor, axis: i32, out: *mut Tensor) {
        inner.give(out, indexing::take_along(inner.mode, &*inner.get(a)?, &*inner.get(indices)?, axis)?)
    }

    fn put_along(inner, a: Tensor, indices: Tensor, values: Tensor, axis: i32, out: *mut Tensor) {
        let (a, indices, values) = (inner.get(a)?, inner.get(indices)?, inner.get(values)?);
        inner.give(out, indexing::put_along(inner.mode, &a, &indices, &values, axis)?)
    }

    fn gather(inner, a: Tensor, args: *const GatherArgs, out: *mut Tensor) {
        let args = GatherArgs::read(args)?;
        let parts = IndexParts::read(inner, &args)?;
        let sizes = list("slice_sizes", args.slice_sizes, args.ndim as usize)?;
        inner.give(out, indexing::gather(inner.mode, &*inner.get(a)?, &parts.indices(), sizes)?)
    }

    fn scatter(inner, kind: u32, a: Tensor, updates: Tensor, args: *const GatherArgs, out: *mut Tensor) {
        let args = GatherArgs::read(args)?;
        let parts = IndexParts::read(inner, &args)?;
        let (a, updates) = (inner.get(a)?, inner.get(updates)?);
        inner.give(out, indexing::scatter(inner.mode, kind, &a, &updates, &parts.indices())?)
    }
}

/// The box of a slice.
///
/// # Safety
/// `args` must keep the contract of [`SliceArgs`].
unsafe fn bounds<'a>(args: *const SliceArgs) -> Result<Bounds<'a>> {
    // SAFETY: the caller vouches for the struct and for the lists, which have `ndim` entries.
    unsafe {
        let args = SliceArgs::read(args)?;
        let n = args.ndim as usize;
        Ok(Bounds {
            starts: list("starts", args.starts, n)?,
            stops: list("stops", args.stops, n)?,
            strides: list("strides", args.strides, n)?,
        })
    }
}

/// Index tensors of a gather or scatter, with their axes.
struct IndexParts {
    tensors: Vec<Arc<Value>>,
    axes: Vec<usize>,
}

impl IndexParts {
    /// # Safety
    /// `args` must keep the contract of [`GatherArgs`].
    unsafe fn read(inner: &Inner, args: &GatherArgs) -> Result<Self> {
        let n = args.n_indices as usize;
        // SAFETY: the caller vouches for the lists, which have `n_indices` entries.
        let (handles, axes) = unsafe {
            (
                list("indices", args.indices, n)?,
                list("axes", args.axes, n)?,
            )
        };
        if n > mlxcel_abi::types::MAX_DIMS {
            return Err(AbiError::invalid(format!("{n} index tensors are too many")));
        }
        Ok(Self {
            tensors: all(inner, handles)?,
            axes: axes.iter().map(|&axis| axis as usize).collect(),
        })
    }

    fn indices(&self) -> indexing::Indices<'_> {
        indexing::Indices {
            tensors: self.tensors.iter().map(Arc::as_ref).collect(),
            axes: self.axes.clone(),
        }
    }
}
