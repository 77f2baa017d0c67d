//! Slots for handles, creation, reading and memory.

use mlxcel_abi::ops_args::{FromHostArgs, MemoryInfo, MemoryLimits};
use mlxcel_abi::{AbiError, DType, Result, Tensor, TensorInfo};

use super::edge::{all, list, slots};
use super::inner::{Borrow, Inner};
use super::value::{Value, decode, encode};
use super::{binary, movement, number, shape};

slots! {
    fn retain(inner, t: Tensor) {
        inner.retain(t)
    }

    fn release(inner, t: Tensor) {
        inner.release(t)
    }

    fn info(inner, t: Tensor, out: *mut TensorInfo) {
        let value = inner.get(t)?;
        let dims: Vec<i64> = value.shape.iter().map(|&dim| dim as i64).collect();
        let info = TensorInfo::new(value.dtype, &dims)
            .ok_or_else(|| AbiError::internal(format!("shape {dims:?} has too many dimensions")))?;
        write(out, info)
    }

    fn from_host(inner, args: *const FromHostArgs, out: *mut Tensor) {
        let args = FromHostArgs::read(args)?;
        let dims = list("dims", args.dims, args.ndim as usize)?;
        let value = host_value(inner, &args, dims)?;
        if out.is_null() {
            return Err(AbiError::invalid("there is no place for the result"));
        }
        let handle = inner.keep(value)?;
        // Only now: a call that fails takes nothing over.
        if let Some(release) = args.release {
            inner.lend(handle, Borrow { release, owner: args.owner });
        }
        write(out, handle)
    }

    fn full(inner, value: f64, dtype: DType, dims: *const i64, ndim: u32, out: *mut Tensor) {
        let dims = shape::from_dims(list("dims", dims, ndim as usize)?)?;
        inner.give(out, binary::full(inner.mode, value, dtype, dims)?)
    }

    fn arange(inner, start: f64, stop: f64, step: f64, dtype: DType, out: *mut Tensor) {
        inner.give(out, movement::arange(inner.mode, start, stop, step, dtype)?)
    }

    fn eye(inner, n: i64, m: i64, k: i64, dtype: DType, out: *mut Tensor) {
        inner.give(out, movement::eye(inner.mode, n, m, k, dtype)?)
    }

    fn read(inner, t: Tensor, dst: *mut u8, byte_len: usize) {
        let bytes = encode(&*inner.get(t)?);
        if bytes.len() != byte_len {
            return Err(AbiError::invalid(format!(
                "the tensor has {} bytes, the destination {byte_len}",
                bytes.len()
            )));
        }
        if dst.is_null() && byte_len > 0 {
            return Err(AbiError::invalid("the destination is null"));
        }
        if byte_len > 0 {
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), dst, byte_len);
        }
        Ok(())
    }

    fn eval(inner, ts: *const Tensor, n: usize) {
        all(inner, list("tensors", ts, n)?).map(drop)
    }

    fn async_eval(inner, ts: *const Tensor, n: usize) {
        all(inner, list("tensors", ts, n)?).map(drop)
    }

    fn synchronize(_inner) {
        Ok(())
    }

    fn memory(inner, out: *mut MemoryInfo) {
        if out.is_null() {
            return Err(AbiError::invalid("there is no place for the figures"));
        }
        // The caller's build says how much of the struct it has.
        let room = (*out).struct_size.min(size_of::<MemoryInfo>());
        if room < size_of::<usize>() {
            return Err(AbiError::invalid(format!("argument struct says it has {room} bytes")));
        }
        let info = MemoryInfo { struct_size: (*out).struct_size, ..inner.memory() };
        core::ptr::copy_nonoverlapping((&raw const info).cast::<u8>(), out.cast::<u8>(), room);
        Ok(())
    }

    fn set_memory_limits(inner, args: *const MemoryLimits) {
        inner.set_limits(&MemoryLimits::read(args)?);
        Ok(())
    }

    fn clear_cache(_inner) {
        // Freed tensors are not kept for reuse.
        Ok(())
    }
}

/// Writes a plain result.
///
/// # Safety
/// `out` must be null or writable.
unsafe fn write<T>(out: *mut T, value: T) -> Result<()> {
    if out.is_null() {
        return Err(AbiError::invalid("there is no place for the result"));
    }
    // SAFETY: not null, and the caller vouches for it.
    unsafe { out.write(value) };
    Ok(())
}

/// The tensor that `args` describe, with the host's bytes read.
///
/// # Safety
/// `args.data` must be null or point to `args.byte_len` bytes.
unsafe fn host_value(inner: &Inner, args: &FromHostArgs, dims: &[i64]) -> Result<Value> {
    number::class(args.dtype)?;
    let dims = shape::from_dims(dims)?;
    let size = args.dtype.size_bytes();
    let expected = shape::count(&dims)? * size;
    if expected != args.byte_len {
        return Err(AbiError::invalid(format!(
            "shape {dims:?} of {} takes {expected} bytes, found {}",
            args.dtype.name(),
            args.byte_len
        )));
    }
    let alignment = if args.dtype == DType::C64 { 4 } else { size };
    if expected > 0 && !(args.data as usize).is_multiple_of(alignment) {
        return Err(AbiError::invalid(format!(
            "data of {} must be aligned to {alignment} bytes",
            args.dtype.name()
        )));
    }
    // SAFETY: the caller vouches for the range.
    let bytes = unsafe { list("data", args.data, args.byte_len)? };
    inner
        .mode
        .value(args.dtype, dims, || decode(args.dtype, bytes))
}
