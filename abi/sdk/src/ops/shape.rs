//! Shape operations.

use mlxcel_abi::Tensor as Handle;
use mlxcel_abi::ops_args::SliceArgs;

use crate::{Backend, Error, Result, Tensor};

impl Tensor {
    /// New shape; one dimension may be -1.
    pub fn reshape(&self, shape: &[i64]) -> Result<Tensor> {
        op!(
            self.backend(),
            reshape,
            self.handle(),
            shape.as_ptr(),
            shape.len() as u32
        )
    }

    /// Permutes the axes.
    pub fn transpose(&self, axes: &[i32]) -> Result<Tensor> {
        op!(
            self.backend(),
            transpose,
            self.handle(),
            axes.as_ptr(),
            axes.len() as u32
        )
    }

    /// Swaps the last two axes.
    pub fn t(&self) -> Result<Tensor> {
        let ndim = self.info()?.ndim as i32;
        if ndim < 2 {
            return Err(Error::Other(format!(
                "a matrix is needed to transpose, found {ndim} dimension(s)"
            )));
        }
        let mut axes: Vec<i32> = (0..ndim).collect();
        axes.swap(ndim as usize - 2, ndim as usize - 1);
        self.transpose(&axes)
    }

    /// Broadcasts to a shape.
    pub fn broadcast_to(&self, shape: &[i64]) -> Result<Tensor> {
        op!(
            self.backend(),
            broadcast_to,
            self.handle(),
            shape.as_ptr(),
            shape.len() as u32
        )
    }

    /// Inserts an axis of size 1 before `axis`; negative counts from the new end.
    pub fn unsqueeze(&self, axis: i32) -> Result<Tensor> {
        let mut shape = self.shape()?;
        let at = if axis < 0 {
            axis + shape.len() as i32 + 1
        } else {
            axis
        };
        if at < 0 || at as usize > shape.len() {
            return Err(Error::Other(format!(
                "axis {axis} does not fit into shape {shape:?}"
            )));
        }
        shape.insert(at as usize, 1);
        self.reshape(&shape)
    }

    /// Joins along an existing axis.
    pub fn concat(backend: &Backend, tensors: &[&Tensor], axis: i32) -> Result<Tensor> {
        let handles: Vec<Handle> = tensors.iter().map(|t| t.handle()).collect();
        op!(backend, concat, handles.as_ptr(), handles.len(), axis)
    }

    /// Takes a strided box, one entry per axis.
    pub fn slice(&self, starts: &[i64], stops: &[i64], strides: &[i64]) -> Result<Tensor> {
        let args = slice_args(starts, stops, strides)?;
        op!(self.backend(), slice, self.handle(), &args)
    }

    /// Copy with a box replaced.
    pub fn slice_update(
        &self,
        update: &Tensor,
        starts: &[i64],
        stops: &[i64],
        strides: &[i64],
    ) -> Result<Tensor> {
        let args = slice_args(starts, stops, strides)?;
        op!(
            self.backend(),
            slice_update,
            self.handle(),
            update.handle(),
            &args
        )
    }

    /// `[start, start + len)` of one axis.
    pub fn narrow(&self, axis: i32, start: i64, len: i64) -> Result<Tensor> {
        let shape = self.shape()?;
        let at = if axis < 0 {
            axis + shape.len() as i32
        } else {
            axis
        } as usize;
        let size = self.dim(axis)?;
        if start < 0 || len < 0 || start + len > size {
            return Err(Error::Other(format!(
                "[{start}, {}) is outside axis {axis} of shape {shape:?}",
                start + len
            )));
        }
        let mut starts = vec![0; shape.len()];
        let mut stops = shape.clone();
        if let (Some(first), Some(stop)) = (starts.get_mut(at), stops.get_mut(at)) {
            (*first, *stop) = (start, start + len);
        }
        self.slice(&starts, &stops, &vec![1; shape.len()])
    }

    /// Splits one axis into consecutive parts of the given sizes.
    pub fn split(&self, axis: i32, sizes: &[i64]) -> Result<Vec<Tensor>> {
        let mut start = 0;
        sizes
            .iter()
            .map(|&len| {
                let part = self.narrow(axis, start, len);
                start += len;
                part
            })
            .collect()
    }

    /// Pads with a constant, one entry per axis.
    pub fn pad(&self, low: &[i64], high: &[i64], value: f64) -> Result<Tensor> {
        if low.len() != high.len() {
            return Err(Error::Other(format!(
                "pad needs as many entries below ({}) as above ({})",
                low.len(),
                high.len()
            )));
        }
        op!(
            self.backend(),
            pad,
            self.handle(),
            low.as_ptr(),
            high.as_ptr(),
            low.len() as u32,
            value
        )
    }

    /// Repeats every element `n` times along an axis.
    pub fn repeat(&self, n: i64, axis: i32) -> Result<Tensor> {
        op!(self.backend(), repeat, self.handle(), n, axis)
    }

    /// Repeats the whole tensor.
    pub fn tile(&self, reps: &[i64]) -> Result<Tensor> {
        op!(
            self.backend(),
            tile,
            self.handle(),
            reps.as_ptr(),
            reps.len() as u32
        )
    }

    /// Row-major copy if it is not already.
    pub fn contiguous(&self) -> Result<Tensor> {
        op!(self.backend(), contiguous, self.handle())
    }
}

fn slice_args(starts: &[i64], stops: &[i64], strides: &[i64]) -> Result<SliceArgs> {
    if starts.len() != stops.len() || starts.len() != strides.len() {
        return Err(Error::Other(format!(
            "a slice needs one entry per axis, found {} starts, {} stops, {} strides",
            starts.len(),
            stops.len(),
            strides.len()
        )));
    }
    Ok(SliceArgs {
        ndim: starts.len() as u32,
        starts: starts.as_ptr(),
        stops: stops.as_ptr(),
        strides: strides.as_ptr(),
        ..SliceArgs::default()
    })
}
