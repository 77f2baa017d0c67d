//! Results while they are made.

use mlxcel_abi::{DType, Result, Tensor};
use mlxcel_backend_mlx::native::{Native, View};

use super::operands::half_of;

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

    /// Its elements, while they are of 32 bits.
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

    /// The numbers in the type that the caller expects, f32 or rounded to one of 16 bits. Of several results all are rounded before one
    /// is given away, since there may be no memory for the next.
    pub(super) fn rounded(mut self, dtype: DType) -> Result<Self> {
        let Some(half) = half_of(dtype) else {
            return Ok(self);
        };
        let (t, view) = self.native.allocate(dtype, self.view.shape())?;
        // SAFETY: freshly allocated with elements of 16 bits; nobody else knows it.
        half.narrow(self.slice(), unsafe { view.as_mut_slice() });
        let native = self.native;
        Ok(Self { native, t, view })
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

/// A new tensor of f32, or of f32 rounded to 16 bits, that a kernel fills; none is left when the kernel fails.
pub(super) fn filled(
    native: &Native<'_>,
    dtype: DType,
    shape: &[i64],
    name: &str,
    fill: impl FnOnce(&mut [f32]) -> bool,
) -> Result<Option<Tensor>> {
    let mut made = Made::new(*native, shape)?;
    if !fill(made.slice()) {
        return Err(Native::panicked(name));
    }
    Ok(Some(made.rounded(dtype)?.give()))
}
