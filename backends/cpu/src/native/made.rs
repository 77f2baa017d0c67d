//! Results while they are made.

use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::{Native, View};

/// A tensor of our own, released unless it is given away.
pub(super) struct Made<'a> {
    native: Native<'a>,
    t: Tensor,
    view: View,
}

impl<'a> Made<'a> {
    pub(super) fn new(native: Native<'a>, shape: &[i64]) -> Result<Self> {
        Self::of(native, DType::F32, shape)
    }

    /// Of a type of 32 bits.
    pub(super) fn of(native: Native<'a>, dtype: DType, shape: &[i64]) -> Result<Self> {
        let (t, view) = native.allocate(dtype, shape)?;
        Ok(Self { native, t, view })
    }

    /// Its elements.
    pub(super) fn slice(&mut self) -> &mut [f32] {
        // SAFETY: allocated here with elements of this size; nobody else knows it.
        unsafe { self.view.as_mut_slice() }
    }

    /// The tensor, for reading while it lives.
    pub(super) fn tensor(&self) -> Tensor {
        self.t
    }

    pub(super) fn give(mut self) -> Tensor {
        core::mem::replace(&mut self.t, Tensor::NONE)
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        if !self.t.is_none() {
            // A handle of our own is live; there is nobody to tell otherwise.
            let _ = self.native.release(self.t);
        }
    }
}
