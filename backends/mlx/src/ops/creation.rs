//! Tensors from nothing and from host memory.

use cxx::UniquePtr;
use mlxcel_abi::DType;
use mlxcel_abi::ops_args::FromHostArgs;
use mlxcel_abi::types::ReleaseFn;

use crate::args::{self, Result};
use crate::bridge::{self, Array};
use crate::context::Context;
use crate::fault::Fault;
use crate::ops::memory::check_room;
use crate::slot::tensor_slots;

/// Shape of the tensor, after all that can be wrong with the arguments was looked at.
fn checked(args: &FromHostArgs) -> Result<&[i64]> {
    // SAFETY: the caller of the slot vouches for the dimensions during the call, hence here.
    let dims = unsafe { args::shape(args.dims, args.ndim) }?;
    let item = args.dtype.size_bytes();
    if item == 0 {
        return Err(Fault::invalid(format!(
            "dtype code {} is not known",
            args.dtype.0
        )));
    }
    let bytes = dims
        .iter()
        .try_fold(item as u64, |product, &dim| product.checked_mul(dim as u64));
    if bytes != Some(args.byte_len as u64) {
        return Err(Fault::invalid(format!(
            "shape {dims:?} of {} does not have {} bytes",
            args.dtype.name(),
            args.byte_len
        )));
    }
    if args.data.is_null() && args.byte_len > 0 {
        return Err(Fault::invalid("the data pointer is null"));
    }
    Ok(dims)
}

/// On failure the memory stays the caller's: `release` is not called.
fn borrow(args: &FromHostArgs, release: ReleaseFn) -> Result<UniquePtr<Array>> {
    let dims = checked(args)?;
    if args.byte_len == 0 {
        // SAFETY: no byte is read.
        let array = unsafe { bridge::from_host_copy(args.data, 0, args.dtype.0, dims) }?;
        // SAFETY: the caller gave this pair to be called once, from any thread.
        unsafe { release(args.owner) };
        return Ok(array);
    }
    let (release, owner) = (release as usize, args.owner as usize);
    // SAFETY: the caller keeps the bytes until `release`, which the shim calls exactly once.
    Ok(unsafe { bridge::from_host_borrow(args.data, args.dtype.0, dims, release, owner) }?)
}

fn copy(context: &Context, args: &FromHostArgs) -> Result<UniquePtr<Array>> {
    let dims = checked(args)?;
    check_room(context, args.byte_len as u64)?;
    // SAFETY: the caller vouches for `byte_len` bytes during the call.
    Ok(unsafe { bridge::from_host_copy(args.data, args.byte_len, args.dtype.0, dims) }?)
}

tensor_slots! {
    fn from_host(context, _tensors; args: *const FromHostArgs) {
        // SAFETY: the slot's contract.
        let args = unsafe { FromHostArgs::read(args) }?;
        match args.release {
            Some(release) => borrow(&args, release),
            None => copy(context, &args),
        }
    }

    fn full(_context, _tensors; value: f64, dtype: DType, dims: *const i64, ndim: u32) {
        // SAFETY: the slot's contract.
        let dims = unsafe { args::shape(dims, ndim) }?;
        Ok(bridge::full(value, dtype.0, dims)?)
    }

    fn arange(_context, _tensors; start: f64, stop: f64, step: f64, dtype: DType) {
        Ok(bridge::arange(start, stop, step, dtype.0)?)
    }

    fn eye(_context, _tensors; n: i64, m: i64, k: i64, dtype: DType) {
        args::check_dims(&[n, m], 0)?;
        Ok(bridge::eye(n, m, k, dtype.0)?)
    }
}
