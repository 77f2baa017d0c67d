//! Indexing operations.

use mlxcel_abi::Tensor as Handle;
use mlxcel_abi::ops_args::GatherArgs;

use crate::{Error, Result, Tensor};

impl Tensor {
    /// Rows along `axis` by integer indices of any shape.
    pub fn take(&self, indices: &Tensor, axis: i32) -> Result<Tensor> {
        op!(self.backend(), take, self.handle(), indices.handle(), axis)
    }

    /// Elements by indices of the same rank.
    pub fn take_along(&self, indices: &Tensor, axis: i32) -> Result<Tensor> {
        op!(
            self.backend(),
            take_along,
            self.handle(),
            indices.handle(),
            axis
        )
    }

    /// Copy with elements replaced by indices of the same rank.
    pub fn put_along(&self, indices: &Tensor, values: &Tensor, axis: i32) -> Result<Tensor> {
        op!(
            self.backend(),
            put_along,
            self.handle(),
            indices.handle(),
            values.handle(),
            axis
        )
    }

    /// General gather: `indices[i]` indexes `axes[i]`; result `broadcast(indices) + slice_sizes`.
    pub fn gather(&self, indices: &[&Tensor], axes: &[u32], slice_sizes: &[i64]) -> Result<Tensor> {
        let handles = index_handles(indices, axes)?;
        let args = GatherArgs {
            indices: handles.as_ptr(),
            axes: axes.as_ptr(),
            n_indices: handles.len() as u32,
            ndim: slice_sizes.len() as u32,
            slice_sizes: slice_sizes.as_ptr(),
            ..GatherArgs::default()
        };
        op!(self.backend(), gather, self.handle(), &args)
    }

    /// General scatter; `kind` is one of [`mlxcel_abi::kinds::scatter`].
    pub fn scatter(
        &self,
        kind: u32,
        indices: &[&Tensor],
        axes: &[u32],
        updates: &Tensor,
    ) -> Result<Tensor> {
        let handles = index_handles(indices, axes)?;
        let args = GatherArgs {
            indices: handles.as_ptr(),
            axes: axes.as_ptr(),
            n_indices: handles.len() as u32,
            ndim: self.info()?.ndim,
            ..GatherArgs::default()
        };
        op!(
            self.backend(),
            scatter,
            kind,
            self.handle(),
            updates.handle(),
            &args
        )
    }
}

fn index_handles(indices: &[&Tensor], axes: &[u32]) -> Result<Vec<Handle>> {
    if indices.len() != axes.len() {
        return Err(Error::Other(format!(
            "every index tensor needs its axis, found {} tensors and {} axes",
            indices.len(),
            axes.len()
        )));
    }
    Ok(indices.iter().map(|t| t.handle()).collect())
}
