//! Safe wrappers over the operations that the host itself uses: moving data, sampling, the KV pool.
//!
//! Handles are checked by the backend, so a stale one is an error; lengths behind pointers are checked here.

use std::ffi::c_void;
use std::ops::Deref;

use mlxcel_abi::ops_args::{
    FromHostArgs, MemoryInfo, MemoryLimits, QuantizedWeight, RandomArgs, SliceArgs,
};
use mlxcel_abi::{AbiError, DType, Tensor, TensorInfo};

use super::device::{Backend, DeviceTensor};
use super::error::CallError;

/// Calls an operation with one result.
macro_rules! tensor_op {
    ($backend:ident.$op:ident($($arg:expr),* $(,)?)) => {{
        let ops = $backend.ops();
        $backend.tensor_op(stringify!($op), |out, err| {
            // SAFETY: on the backend thread, since `Backend` is not `Send`. Handles are checked by the backend;
            // every pointer among the arguments comes from a slice or struct that outlives the call.
            unsafe { (ops.$op)(ops.ctx, $($arg,)* out, err) }
        })
    }};
}

/// Calls an operation without a result.
macro_rules! plain_op {
    ($backend:ident.$op:ident($($arg:expr),* $(,)?)) => {{
        let ops = $backend.ops();
        $backend.call_op(stringify!($op), |err| {
            // SAFETY: as for `tensor_op`.
            unsafe { (ops.$op)(ops.ctx, $($arg,)* err) }
        })
    }};
}

pub(super) fn count(len: usize) -> u32 {
    // Longer lists than the ABI can say do not occur; the backend refuses this one as too long.
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// A strided box, one entry per axis.
#[derive(Debug, Clone, Copy)]
pub struct SliceSpec<'a> {
    /// First index per axis.
    pub starts: &'a [i64],
    /// One past the last index per axis.
    pub stops: &'a [i64],
    /// Step per axis.
    pub strides: &'a [i64],
}

impl SliceSpec<'_> {
    fn args(&self, backend: &Backend, op: &'static str) -> Result<SliceArgs, CallError> {
        let ndim = self.starts.len();
        if self.stops.len() != ndim || self.strides.len() != ndim {
            let text = format!(
                "slice has {ndim} starts, {} stops and {} strides, expected as many of each",
                self.stops.len(),
                self.strides.len()
            );
            return Err(CallError::new(backend.subject(op), AbiError::invalid(text)));
        }
        Ok(SliceArgs {
            ndim: count(ndim),
            starts: self.starts.as_ptr(),
            stops: self.stops.as_ptr(),
            strides: self.strides.as_ptr(),
            ..SliceArgs::default()
        })
    }
}

/// Creation and reading.
impl Backend {
    /// Tensor with a copy of `bytes`, row-major elements of `dtype`.
    pub fn from_host(
        &self,
        bytes: &[u8],
        dtype: DType,
        shape: &[i64],
    ) -> Result<DeviceTensor, CallError> {
        let args = FromHostArgs {
            data: bytes.as_ptr(),
            byte_len: bytes.len(),
            dtype,
            ndim: count(shape.len()),
            dims: shape.as_ptr(),
            ..FromHostArgs::default()
        };
        tensor_op!(self.from_host(&raw const args))
    }

    /// Tensor over the bytes that `owner` gives, without a copy where the backend can. The backend keeps `owner`
    /// until it no longer needs the bytes, and may drop it on any thread.
    pub fn from_host_shared<T>(
        &self,
        owner: T,
        dtype: DType,
        shape: &[i64],
    ) -> Result<DeviceTensor, CallError>
    where
        T: Deref<Target = [u8]> + Send + Sync + 'static,
    {
        unsafe extern "C" fn release<T>(owner: *mut c_void) {
            let drop_owner = || {
                // SAFETY: `owner` is the box given away below; the backend calls this once.
                drop(unsafe { Box::from_raw(owner.cast::<T>()) });
                Ok(())
            };
            if let Err(error) = mlxcel_abi::guard::catch(drop_owner) {
                tracing::error!("dropping the owner of borrowed memory: {error}");
            }
        }
        let owner = Box::into_raw(Box::new(owner));
        // SAFETY: just made; shared from here on, and not moved, until `release` drops it. The bytes are borrowed
        // from it for that long, and only from it.
        let bytes: &[u8] = unsafe { &*owner };
        let args = FromHostArgs {
            data: bytes.as_ptr(),
            byte_len: bytes.len(),
            dtype,
            ndim: count(shape.len()),
            dims: shape.as_ptr(),
            release: Some(release::<T>),
            owner: owner.cast(),
            ..FromHostArgs::default()
        };
        let ops = self.ops();
        let mut out = Tensor::NONE;
        // SAFETY: as for `tensor_op`.
        let body = |err| unsafe { (ops.from_host)(ops.ctx, &raw const args, &raw mut out, err) };
        if let Err(error) = self.call_op("from_host", body) {
            // SAFETY: on an error the backend has taken nothing over, so the box is still ours.
            drop(unsafe { Box::from_raw(owner) });
            return Err(error);
        }
        self.adopt(out).ok_or_else(|| self.no_result("from_host"))
    }

    /// Constant tensor.
    pub fn full(&self, value: f64, dtype: DType, shape: &[i64]) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.full(value, dtype, shape.as_ptr(), count(shape.len())))
    }

    /// `[start, stop)` in steps.
    pub fn arange(
        &self,
        start: f64,
        stop: f64,
        step: f64,
        dtype: DType,
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.arange(start, stop, step, dtype))
    }

    /// Shape and dtype; never evaluates.
    pub fn info(&self, t: impl Into<Tensor>) -> Result<TensorInfo, CallError> {
        let mut info = TensorInfo::ZERO;
        plain_op!(self.info(t.into(), &raw mut info))?;
        Ok(info)
    }

    /// Evaluates and copies the elements, row-major, to `bytes`, which must have exactly their length.
    pub fn read_into(&self, t: impl Into<Tensor>, bytes: &mut [u8]) -> Result<(), CallError> {
        plain_op!(self.read(t.into(), bytes.as_mut_ptr(), bytes.len()))
    }

    /// Evaluates and gives the elements' bytes, row-major.
    pub fn read(&self, t: impl Into<Tensor>) -> Result<Vec<u8>, CallError> {
        let t = t.into();
        let info = self.info(t)?;
        let len = info
            .shape()
            .iter()
            .try_fold(info.dtype.size_bytes(), |bytes, &dim| {
                bytes.checked_mul(usize::try_from(dim).ok()?)
            });
        let Some(len) = len else {
            let text = format!("tensor has the impossible shape {:?}", info.shape());
            return Err(CallError::new(
                self.subject("read"),
                AbiError::internal(text),
            ));
        };
        let mut bytes = vec![0; len];
        self.read_into(t, &mut bytes)?;
        Ok(bytes)
    }

    /// The elements as f32, converted on the backend when they are of another type.
    pub fn read_f32(&self, t: impl Into<Tensor>) -> Result<Vec<f32>, CallError> {
        Ok(words(
            &self.read_as(t.into(), DType::F32)?,
            f32::from_ne_bytes,
        ))
    }

    /// The elements as u32, converted on the backend when they are of another type.
    pub fn read_u32(&self, t: impl Into<Tensor>) -> Result<Vec<u32>, CallError> {
        Ok(words(
            &self.read_as(t.into(), DType::U32)?,
            u32::from_ne_bytes,
        ))
    }

    /// The elements as i32, converted on the backend when they are of another type.
    pub fn read_i32(&self, t: impl Into<Tensor>) -> Result<Vec<i32>, CallError> {
        Ok(words(
            &self.read_as(t.into(), DType::I32)?,
            i32::from_ne_bytes,
        ))
    }

    fn read_as(&self, t: Tensor, dtype: DType) -> Result<Vec<u8>, CallError> {
        if self.info(t)?.dtype == dtype {
            return self.read(t);
        }
        self.read(&self.cast(t, dtype)?)
    }

    /// Evaluates and waits.
    pub fn eval(&self, ts: &[Tensor]) -> Result<(), CallError> {
        plain_op!(self.eval(ts.as_ptr(), ts.len()))
    }

    /// Submits and returns.
    pub fn async_eval(&self, ts: &[Tensor]) -> Result<(), CallError> {
        plain_op!(self.async_eval(ts.as_ptr(), ts.len()))
    }

    /// Waits for everything submitted.
    pub fn synchronize(&self) -> Result<(), CallError> {
        plain_op!(self.synchronize())
    }
}

fn words<T>(bytes: &[u8], from: impl Fn([u8; 4]) -> T) -> Vec<T> {
    let word = |chunk: &[u8]| chunk.try_into().ok().map(&from);
    bytes.chunks_exact(4).filter_map(word).collect()
}

/// Memory.
impl Backend {
    /// Figures of the moment.
    pub fn memory(&self) -> Result<MemoryInfo, CallError> {
        let mut info = MemoryInfo::default();
        plain_op!(self.memory(&raw mut info))?;
        Ok(info)
    }

    /// Sets limits.
    pub fn set_memory_limits(&self, limits: &MemoryLimits) -> Result<(), CallError> {
        let args = MemoryLimits {
            struct_size: size_of::<MemoryLimits>(),
            ..*limits
        };
        plain_op!(self.set_memory_limits(&raw const args))
    }

    /// Gives unused buffers back.
    pub fn clear_cache(&self) -> Result<(), CallError> {
        plain_op!(self.clear_cache())
    }
}

/// Computation.
impl Backend {
    /// Converts the elements.
    pub fn cast(&self, a: impl Into<Tensor>, dtype: DType) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.cast(a.into(), dtype))
    }

    /// See [`mlxcel_abi::kinds::unary`].
    pub fn unary(&self, kind: u32, a: impl Into<Tensor>) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.unary(kind, a.into()))
    }

    /// See [`mlxcel_abi::kinds::binary`].
    pub fn binary(
        &self,
        kind: u32,
        a: impl Into<Tensor>,
        b: impl Into<Tensor>,
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.binary(kind, a.into(), b.into()))
    }

    /// `a` and a constant of its dtype. See [`mlxcel_abi::kinds::binary`].
    pub fn binary_scalar(
        &self,
        kind: u32,
        a: impl Into<Tensor>,
        scalar: f64,
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.binary_scalar(kind, a.into(), scalar, 0))
    }

    /// `cond ? a : b`, broadcast.
    pub fn select(
        &self,
        cond: impl Into<Tensor>,
        a: impl Into<Tensor>,
        b: impl Into<Tensor>,
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.select(cond.into(), a.into(), b.into()))
    }

    /// Reduction over `axes` (none reduces all), which stay with size 1. See [`mlxcel_abi::kinds::reduce`].
    pub fn reduce(
        &self,
        kind: u32,
        a: impl Into<Tensor>,
        axes: &[i32],
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.reduce(kind, a.into(), axes.as_ptr(), count(axes.len()), 1))
    }

    /// Index of the extreme element along `axis`, which goes. See [`mlxcel_abi::kinds::arg_reduce`].
    pub fn arg_reduce(
        &self,
        kind: u32,
        a: impl Into<Tensor>,
        axis: i32,
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.arg_reduce(kind, a.into(), axis, 0))
    }

    /// Inclusive running reduction along `axis`. See [`mlxcel_abi::kinds::cumulative`].
    pub fn cumulative(
        &self,
        kind: u32,
        a: impl Into<Tensor>,
        axis: i32,
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.cumulative(kind, a.into(), axis, 0, 1))
    }

    /// Sorting along `axis`. See [`mlxcel_abi::kinds::order`].
    pub fn order(
        &self,
        kind: u32,
        a: impl Into<Tensor>,
        k: i64,
        axis: i32,
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.order(kind, a.into(), k, axis))
    }

    /// Softmax along `axis`.
    pub fn softmax(&self, a: impl Into<Tensor>, axis: i32) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.softmax(a.into(), axis))
    }

    /// New shape; one dimension may be -1.
    pub fn reshape(&self, a: impl Into<Tensor>, shape: &[i64]) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.reshape(a.into(), shape.as_ptr(), count(shape.len())))
    }

    /// Joins along an existing axis.
    pub fn concat(&self, ts: &[Tensor], axis: i32) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.concat(ts.as_ptr(), ts.len(), axis))
    }

    /// Takes a strided box.
    pub fn slice(
        &self,
        a: impl Into<Tensor>,
        spec: SliceSpec<'_>,
    ) -> Result<DeviceTensor, CallError> {
        let args = spec.args(self, "slice")?;
        tensor_op!(self.slice(a.into(), &raw const args))
    }

    /// Copy of `a` with a box replaced; in place when nobody else holds `a`.
    pub fn slice_update(
        &self,
        a: impl Into<Tensor>,
        update: impl Into<Tensor>,
        spec: SliceSpec<'_>,
    ) -> Result<DeviceTensor, CallError> {
        let args = spec.args(self, "slice_update")?;
        tensor_op!(self.slice_update(a.into(), update.into(), &raw const args))
    }

    /// Rows of `a` along `axis` by integer indices of any shape.
    pub fn take(
        &self,
        a: impl Into<Tensor>,
        indices: impl Into<Tensor>,
        axis: i32,
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.take(a.into(), indices.into(), axis))
    }

    /// Elements by indices of the same rank.
    pub fn take_along(
        &self,
        a: impl Into<Tensor>,
        indices: impl Into<Tensor>,
        axis: i32,
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.take_along(a.into(), indices.into(), axis))
    }

    /// Copy of `a` with elements replaced by indices of the same rank.
    pub fn put_along(
        &self,
        a: impl Into<Tensor>,
        indices: impl Into<Tensor>,
        values: impl Into<Tensor>,
        axis: i32,
    ) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.put_along(a.into(), indices.into(), values.into(), axis))
    }

    /// Expands a quantised weight to `dtype`.
    pub fn dequantize(
        &self,
        weight: &QuantizedWeight,
        dtype: DType,
    ) -> Result<DeviceTensor, CallError> {
        let args = QuantizedWeight {
            struct_size: size_of::<QuantizedWeight>(),
            ..*weight
        };
        tensor_op!(self.dequantize(&raw const args, dtype))
    }

    /// Key from a seed.
    pub fn random_key(&self, seed: u64) -> Result<DeviceTensor, CallError> {
        tensor_op!(self.random_key(seed))
    }

    /// Random tensor of `shape`; `args.dims` and `args.ndim` are filled in from it.
    pub fn random(&self, args: RandomArgs, shape: &[i64]) -> Result<DeviceTensor, CallError> {
        let args = RandomArgs {
            struct_size: size_of::<RandomArgs>(),
            dims: shape.as_ptr(),
            ndim: count(shape.len()),
            ..args
        };
        tensor_op!(self.random(&raw const args))
    }
}
