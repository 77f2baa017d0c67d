//! Safe tensors over backend handles: reference counted, never `Send`, ops that return `Result`.

use std::cell::OnceCell;
use std::rc::Rc;

use half::{bf16, f16};
use mlxcel_abi::ops_args::FromHostArgs;
use mlxcel_abi::{DType, Tensor as Handle, TensorInfo};

use crate::{Backend, Error, Result};

struct Inner {
    backend: Backend,
    handle: Handle,
    /// Shape and dtype never change: they are asked for once.
    info: OnceCell<TensorInfo>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A failed release cannot be reported from a drop; the backend counts live handles.
        let _ = command!(self.backend.table(), release, self.handle);
    }
}

/// A tensor of a backend. Cloning shares it.
#[derive(Clone)]
pub struct Tensor {
    /// As `inner` has it: a step reads the handles of all weights, which memory elsewhere would make it wait for.
    handle: Handle,
    inner: Rc<Inner>,
}

impl core::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.info() {
            Ok(info) => write!(f, "Tensor({} {:?})", info.dtype.name(), info.shape()),
            Err(_) => write!(f, "Tensor(stale {:#x})", self.handle.0),
        }
    }
}

/// A Rust type that is the element of a tensor.
pub trait Element: Copy + 'static {
    /// Its dtype.
    const DTYPE: DType;
    /// Zero, to size buffers with.
    const ZERO: Self;
}

macro_rules! elements {
    ($($ty:ty = $dtype:ident, $zero:expr;)*) => {
        $(impl Element for $ty { const DTYPE: DType = DType::$dtype; const ZERO: Self = $zero; })*
    };
}

elements! {
    u8 = U8, 0; u16 = U16, 0; u32 = U32, 0; u64 = U64, 0;
    i8 = I8, 0; i16 = I16, 0; i32 = I32, 0; i64 = I64, 0;
    f16 = F16, f16::ZERO; bf16 = BF16, bf16::ZERO; f32 = F32, 0.0; f64 = F64, 0.0;
}

impl Tensor {
    /// Takes over a handle that an operation returned.
    pub(crate) fn from_handle(backend: &Backend, handle: Handle) -> Self {
        let inner = Inner {
            backend: backend.clone(),
            handle,
            info: OnceCell::new(),
        };
        Self {
            handle,
            inner: Rc::new(inner),
        }
    }

    /// Takes over one reference to `handle`.
    ///
    /// # Safety
    /// The caller must own a reference to `handle` of this very backend and give it up.
    pub unsafe fn from_raw(backend: &Backend, handle: Handle) -> Self {
        Self::from_handle(backend, handle)
    }

    /// Shares a handle that somebody else owns.
    pub(crate) fn borrow_handle(backend: &Backend, handle: Handle) -> Result<Self> {
        command!(backend.table(), retain, handle)?;
        Ok(Self::from_handle(backend, handle))
    }

    /// A handle with its own reference, for giving away.
    pub(crate) fn into_handle(self) -> Result<Handle> {
        command!(self.inner.backend.table(), retain, self.handle)?;
        Ok(self.handle)
    }

    /// The handle, valid as long as the tensor lives.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The handle of an optional tensor.
    pub(crate) fn handle_of(tensor: Option<&Tensor>) -> Handle {
        tensor.map_or(Handle::NONE, Tensor::handle)
    }

    /// The backend it lives on.
    pub fn backend(&self) -> &Backend {
        &self.inner.backend
    }

    /// Shape and dtype.
    pub fn info(&self) -> Result<TensorInfo> {
        if let Some(info) = self.inner.info.get() {
            return Ok(*info);
        }
        let mut info = TensorInfo::ZERO;
        command!(self.inner.backend.table(), info, self.handle, &mut info)?;
        Ok(*self.inner.info.get_or_init(|| info))
    }

    /// Dimensions.
    pub fn shape(&self) -> Result<Vec<i64>> {
        Ok(self.info()?.shape().to_vec())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.info()?.shape().contains(&0))
    }

    /// Element type.
    pub fn dtype(&self) -> Result<DType> {
        Ok(self.info()?.dtype)
    }

    /// Size of one axis; negative counts from the end.
    pub fn dim(&self, axis: i32) -> Result<i64> {
        let info = self.info()?;
        let shape = info.shape();
        let index = if axis < 0 {
            axis + shape.len() as i32
        } else {
            axis
        };
        usize::try_from(index)
            .ok()
            .and_then(|index| shape.get(index).copied())
            .ok_or_else(|| Error::Other(format!("axis {axis} does not exist in shape {shape:?}")))
    }

    /// Tensor with a copy of `data`.
    pub fn from_slice<T: Element>(backend: &Backend, data: &[T], shape: &[i64]) -> Result<Self> {
        Self::from_bytes_of(backend, data, T::DTYPE, shape)
    }

    /// Bool tensor.
    pub fn from_bools(backend: &Backend, data: &[bool], shape: &[i64]) -> Result<Self> {
        Self::from_bytes_of(backend, data, DType::BOOL, shape)
    }

    fn from_bytes_of<T>(
        backend: &Backend,
        data: &[T],
        dtype: DType,
        shape: &[i64],
    ) -> Result<Self> {
        let args = FromHostArgs {
            data: data.as_ptr().cast(),
            byte_len: size_of_val(data),
            dtype,
            ndim: shape.len() as u32,
            dims: shape.as_ptr(),
            ..FromHostArgs::default()
        };
        op!(backend, from_host, &args)
    }

    /// Tensor of one value everywhere.
    pub fn full(backend: &Backend, value: f64, dtype: DType, shape: &[i64]) -> Result<Self> {
        op!(
            backend,
            full,
            value,
            dtype,
            shape.as_ptr(),
            shape.len() as u32
        )
    }

    /// Tensor of zeros.
    pub fn zeros(backend: &Backend, dtype: DType, shape: &[i64]) -> Result<Self> {
        Self::full(backend, 0.0, dtype, shape)
    }

    /// `[start, stop)` in steps.
    pub fn arange(
        backend: &Backend,
        start: f64,
        stop: f64,
        step: f64,
        dtype: DType,
    ) -> Result<Self> {
        op!(backend, arange, start, stop, step, dtype)
    }

    /// `[n, m]` with ones on the `k`-th diagonal.
    pub fn eye(backend: &Backend, n: i64, m: i64, k: i64, dtype: DType) -> Result<Self> {
        op!(backend, eye, n, m, k, dtype)
    }

    /// Evaluates and copies the elements to the host. The dtype must be `T`'s. Not for `forward`:
    /// a step must not wait for the device.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let info = self.info()?;
        if info.dtype != T::DTYPE {
            return Err(Error::Other(format!(
                "tensor is {}, read as {}: cast it first",
                info.dtype.name(),
                T::DTYPE.name()
            )));
        }
        let count: i64 = info.shape().iter().product();
        let mut out = vec![T::ZERO; count.max(0) as usize];
        command!(
            self.backend().table(),
            read,
            self.handle(),
            out.as_mut_ptr().cast(),
            size_of_val(out.as_slice())
        )?;
        Ok(out)
    }

    /// As `to_vec`, for bool tensors.
    pub fn to_bools(&self) -> Result<Vec<bool>> {
        Ok(self
            .cast(DType::U8)?
            .to_vec::<u8>()?
            .into_iter()
            .map(|byte| byte != 0)
            .collect())
    }

    /// Elements as f32, whatever the dtype.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        self.cast(DType::F32)?.to_vec::<f32>()
    }
}
