//! The operation table over a device.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use mlxcel_abi::fused_args::SampleArgs;
use mlxcel_abi::guard::guard;
use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::ops_args::{FromHostArgs, MemoryInfo, MemoryLimits};
use mlxcel_abi::{AbiError, DType, ErrorObj, Result, Status, Table, Tensor, TensorInfo, kinds};

use crate::device::{Device, Value};
use crate::misstep;

/// A lock because `release` may come from any thread.
type Shared = Mutex<Device>;

/// Opens a device.
pub fn open() -> *const BackendOps {
    let device: Box<Shared> = Box::new(Mutex::new(Device::new()));
    let table = BackendOps {
        ctx: Box::into_raw(device).cast(),
        retain,
        release,
        info,
        from_host,
        full,
        read,
        eval,
        async_eval: eval,
        synchronize: nothing,
        memory,
        set_memory_limits,
        clear_cache: nothing,
        cast,
        arg_reduce,
        reshape,
        take,
        concat,
        binary_scalar,
        sample,
        ..BackendOps::stubs()
    };
    Box::into_raw(Box::new(table))
}

/// # Safety
/// `ops` must come from [`open`] and not be used again.
pub unsafe fn close(ops: *const BackendOps) {
    // SAFETY: both boxes were made in `open`; the caller gives them back once.
    unsafe {
        let table = Box::from_raw(ops.cast_mut());
        drop(Box::from_raw(table.ctx.cast::<Shared>()));
    }
}

/// Runs an operation on the device behind `ctx`. `body` is told whether what it reads has to be spoilt.
///
/// # Safety
/// `ctx` must be the table's own and `err` null or writable.
unsafe fn on_device(
    ctx: *mut c_void,
    err: *mut *mut ErrorObj,
    op: &str,
    body: impl FnOnce(&mut Device, bool) -> Result<()>,
) -> Status {
    // SAFETY: the caller vouches for both.
    unsafe {
        guard(err, || {
            let device = &*ctx.cast::<Shared>();
            let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
            if op != "release" {
                device.check_thread()?;
            }
            let is_spoilt = misstep::step(op)?;
            body(&mut device, is_spoilt)
        })
    }
}

/// # Safety
/// `ptr` must be null or point to `len` values.
unsafe fn list<'a, T>(ptr: *const T, len: usize) -> &'a [T] {
    if ptr.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: the caller vouches for the range.
    unsafe { std::slice::from_raw_parts(ptr, len) }
}

/// Declares an entry that runs on the device.
macro_rules! entries {
    ($(fn $name:ident($device:ident, $($arg:ident: $ty:ty),*) $body:block)*) => {$(
        unsafe extern "C" fn $name(ctx: *mut c_void, $($arg: $ty,)* err: *mut *mut ErrorObj) -> Status {
            // SAFETY: arguments are as the table's contract says: live for the call, out pointers writable.
            unsafe { on_device(ctx, err, stringify!($name), |$device, _| $body) }
        }
    )*};
}

unsafe extern "C" fn read(
    ctx: *mut c_void,
    t: Tensor,
    dst: *mut u8,
    byte_len: usize,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = |device: &mut Device, is_spoilt| {
        let value = device.arena.get(t)?;
        let bytes = value.bytes();
        if bytes.len() != byte_len {
            let text = format!("read: {} bytes, room for {byte_len}", bytes.len());
            return Err(AbiError::invalid(text));
        }
        if byte_len > 0 {
            // SAFETY: the caller's range has that length.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst, byte_len) };
        }
        if (is_spoilt || value.is_spoilt())
            && value.info().dtype == DType::F32
            && byte_len >= size_of::<f32>()
        {
            // SAFETY: as above; bytes need no alignment.
            unsafe {
                dst.cast::<[u8; 4]>()
                    .write_unaligned(f32::NAN.to_ne_bytes())
            };
        }
        Ok(())
    };
    // SAFETY: arguments are as the table's contract says.
    unsafe { on_device(ctx, err, "read", body) }
}

unsafe extern "C" fn sample(
    ctx: *mut c_void,
    args: *const SampleArgs,
    out: *mut Tensor,
    err: *mut *mut ErrorObj,
) -> Status {
    let body = |device: &mut Device, is_spoilt| {
        // SAFETY: arguments are as the table's contract says.
        unsafe { out.write(device.sample(&SampleArgs::read(args)?, is_spoilt)?) };
        Ok(())
    };
    // SAFETY: as above.
    unsafe { on_device(ctx, err, "sample", body) }
}

entries! {
    fn retain(device, t: Tensor) { device.arena.retain(t) }

    fn release(device, t: Tensor) {
        drop(device.arena.release(t)?);
        Ok(())
    }

    fn info(device, t: Tensor, out: *mut TensorInfo) {
        out.write(device.arena.get(t)?.info());
        Ok(())
    }

    fn from_host(device, args: *const FromHostArgs, out: *mut Tensor) {
        let args = FromHostArgs::read(args)?;
        let (bytes, shape) = (list(args.data, args.byte_len), list(args.dims, args.ndim as usize));
        let value = match args.release {
            Some(release) => Value::borrowed(args.dtype, shape, bytes, release, args.owner)?,
            None => Value::owned(args.dtype, shape, bytes.to_vec())?,
        };
        out.write(device.arena.insert(value)?);
        Ok(())
    }

    fn full(device, value: f64, dtype: DType, dims: *const i64, ndim: u32, out: *mut Tensor) {
        out.write(device.full(value, dtype, list(dims, ndim as usize))?);
        Ok(())
    }

    fn eval(device, ts: *const Tensor, n: usize) {
        list(ts, n).iter().try_for_each(|&t| device.arena.get(t).map(|_| ()))
    }

    fn nothing(_device,) { Ok(()) }

    fn memory(device, out: *mut MemoryInfo) {
        (*out).live_tensors = device.arena.live() as u64;
        Ok(())
    }

    fn set_memory_limits(_device, args: *const MemoryLimits) {
        match MemoryLimits::read(args)?.limit_bytes {
            u64::MAX => Ok(()),
            limit => Err(AbiError::unimplemented(format!("memory limit {limit}: this backend has none"))),
        }
    }

    fn cast(device, a: Tensor, dtype: DType, out: *mut Tensor) {
        out.write(device.cast(a, dtype)?);
        Ok(())
    }

    fn arg_reduce(device, kind: u32, a: Tensor, axis: i32, keep_dims: u32, out: *mut Tensor) {
        if kind != kinds::arg_reduce::ARGMAX || axis != -1 || keep_dims != 0 {
            return Err(AbiError::unimplemented("arg_reduce: only argmax over the last axis"));
        }
        out.write(device.argmax(a)?);
        Ok(())
    }

    fn reshape(device, a: Tensor, dims: *const i64, ndim: u32, out: *mut Tensor) {
        out.write(device.reshape(a, list(dims, ndim as usize))?);
        Ok(())
    }

    fn take(device, a: Tensor, indices: Tensor, axis: i32, out: *mut Tensor) {
        if axis != 0 {
            return Err(AbiError::unimplemented("take: only the first axis"));
        }
        out.write(device.take_rows(a, indices)?);
        Ok(())
    }

    fn concat(device, ts: *const Tensor, n: usize, axis: i32, out: *mut Tensor) {
        if axis != 0 {
            return Err(AbiError::unimplemented("concat: only the first axis"));
        }
        out.write(device.concat(list(ts, n))?);
        Ok(())
    }

    fn binary_scalar(device, kind: u32, a: Tensor, scalar: f64, scalar_first: u32, out: *mut Tensor) {
        let _ = scalar_first;
        if kind != kinds::binary::MIN {
            return Err(AbiError::unimplemented("binary_scalar: only the smaller of two"));
        }
        out.write(device.at_most(a, scalar)?);
        Ok(())
    }
}
