//! An opened device and the tensors on it.

use std::rc::Rc;

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{AbiError, ErrorObj, Status, Table, Tensor, TensorInfo};

use super::backend::BackendPlugin;
use super::call::call;
use super::error::CallError;

pub(super) struct BackendInner {
    plugin: BackendPlugin,
    raw: *const BackendOps,
    /// Our import of `raw`: every slot can be called.
    ops: BackendOps,
}

impl Drop for BackendInner {
    fn drop(&mut self) {
        self.plugin.close(self.raw);
    }
}

/// An opened device. Clones share it; it is closed when the last clone, tensor and model is gone. Stays on the
/// thread that opened it.
#[derive(Clone)]
pub struct Backend {
    inner: Rc<BackendInner>,
}

impl Backend {
    pub(super) fn new(plugin: BackendPlugin, raw: *const BackendOps, ops: BackendOps) -> Self {
        Self {
            inner: Rc::new(BackendInner { plugin, raw, ops }),
        }
    }

    /// The plugin it belongs to.
    pub fn plugin(&self) -> &BackendPlugin {
        &self.inner.plugin
    }

    /// Its operations, for what has no wrapper here. Calling one is `unsafe`.
    pub fn ops(&self) -> &BackendOps {
        &self.inner.ops
    }

    /// The backend's own table, for families.
    pub(super) fn raw_ops(&self) -> *const BackendOps {
        self.inner.raw
    }

    /// Whether the backend's table reaches to the slot called `op`. It may still answer "unimplemented".
    pub fn has_op(&self, op: &str) -> bool {
        BackendOps::covers(self.inner.ops.struct_size, op)
    }

    /// Takes over a handle with one reference; `None` for "no tensor".
    pub(super) fn adopt(&self, handle: Tensor) -> Option<DeviceTensor> {
        (!handle.is_none()).then(|| DeviceTensor {
            backend: self.clone(),
            handle,
        })
    }

    /// A reference of our own to a borrowed handle.
    pub fn retain(&self, handle: Tensor) -> Result<DeviceTensor, CallError> {
        let ops = self.ops();
        // SAFETY: on the backend thread; a stale handle is an error of the backend.
        self.call_op("retain", |err| unsafe {
            (ops.retain)(ops.ctx, handle, err)
        })?;
        Ok(DeviceTensor {
            backend: self.clone(),
            handle,
        })
    }

    pub(super) fn call_op(
        &self,
        op: &'static str,
        body: impl FnOnce(*mut *mut ErrorObj) -> Status,
    ) -> Result<(), CallError> {
        call(|| self.subject(op), body)
    }

    /// Runs an operation with one result.
    pub(super) fn tensor_op(
        &self,
        op: &'static str,
        body: impl FnOnce(*mut Tensor, *mut *mut ErrorObj) -> Status,
    ) -> Result<DeviceTensor, CallError> {
        let mut out = Tensor::NONE;
        self.call_op(op, |err| body(&raw mut out, err))?;
        self.adopt(out).ok_or_else(|| self.no_result(op))
    }

    pub(super) fn no_result(&self, op: &'static str) -> CallError {
        let error = AbiError::internal("success was reported but no tensor was given");
        CallError::new(self.subject(op), error)
    }

    pub(super) fn subject(&self, op: &str) -> String {
        format!("backend {}: {op}", self.inner.plugin.name())
    }
}

impl std::fmt::Debug for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backend")
            .field("plugin", &self.inner.plugin)
            .finish_non_exhaustive()
    }
}

/// A tensor on a backend, with one reference that is released when it is dropped. Operations take the handle:
/// `Tensor::from(&tensor)`, or the tensor by reference where `impl Into<Tensor>` is asked for.
pub struct DeviceTensor {
    backend: Backend,
    handle: Tensor,
}

impl DeviceTensor {
    /// The handle, borrowed.
    pub fn handle(&self) -> Tensor {
        self.handle
    }

    /// Gives the reference away; whoever gets the handle releases it.
    pub fn into_handle(mut self) -> Tensor {
        std::mem::take(&mut self.handle)
    }

    /// Another reference to the same tensor.
    pub fn try_clone(&self) -> Result<Self, CallError> {
        self.backend.retain(self.handle)
    }

    /// The backend it lives on.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Shape and dtype; never evaluates.
    pub fn info(&self) -> Result<TensorInfo, CallError> {
        self.backend.info(self)
    }
}

impl From<&DeviceTensor> for Tensor {
    fn from(tensor: &DeviceTensor) -> Self {
        tensor.handle
    }
}

impl Drop for DeviceTensor {
    fn drop(&mut self) {
        if self.handle.is_none() {
            return;
        }
        let ops = self.backend.ops();
        let handle = self.handle;
        // SAFETY: on the backend thread; our reference is given back once.
        let body = |err| unsafe { (ops.release)(ops.ctx, handle, err) };
        if let Err(error) = self.backend.call_op("release", body) {
            tracing::warn!("{error}");
        }
    }
}

impl std::fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "DeviceTensor({:#x} on {})",
            self.handle.0,
            self.backend.plugin().name()
        )
    }
}
