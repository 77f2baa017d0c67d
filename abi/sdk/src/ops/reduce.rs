//! Reductions, running reductions and order.

use mlxcel_abi::kinds::{arg_reduce, cumulative, order, reduce};

use crate::{Result, Tensor};

impl Tensor {
    /// One of [`mlxcel_abi::kinds::reduce`] over `axes`, or all axes when empty.
    pub fn reduce(&self, kind: u32, axes: &[i32], keep_dims: bool) -> Result<Tensor> {
        op!(
            self.backend(),
            reduce,
            kind,
            self.handle(),
            axes.as_ptr(),
            axes.len() as u32,
            u32::from(keep_dims)
        )
    }

    /// Sum.
    pub fn sum(&self, axes: &[i32], keep_dims: bool) -> Result<Tensor> {
        self.reduce(reduce::SUM, axes, keep_dims)
    }

    /// Mean.
    pub fn mean(&self, axes: &[i32], keep_dims: bool) -> Result<Tensor> {
        self.reduce(reduce::MEAN, axes, keep_dims)
    }

    /// Largest element.
    pub fn max(&self, axes: &[i32], keep_dims: bool) -> Result<Tensor> {
        self.reduce(reduce::MAX, axes, keep_dims)
    }

    /// Smallest element.
    pub fn min(&self, axes: &[i32], keep_dims: bool) -> Result<Tensor> {
        self.reduce(reduce::MIN, axes, keep_dims)
    }

    /// Index of the largest element along an axis, u32.
    pub fn argmax(&self, axis: i32, keep_dims: bool) -> Result<Tensor> {
        op!(
            self.backend(),
            arg_reduce,
            arg_reduce::ARGMAX,
            self.handle(),
            axis,
            u32::from(keep_dims)
        )
    }

    /// Index of the smallest element along an axis, u32.
    pub fn argmin(&self, axis: i32, keep_dims: bool) -> Result<Tensor> {
        op!(
            self.backend(),
            arg_reduce,
            arg_reduce::ARGMIN,
            self.handle(),
            axis,
            u32::from(keep_dims)
        )
    }

    /// One of [`mlxcel_abi::kinds::cumulative`].
    pub fn cumulative(
        &self,
        kind: u32,
        axis: i32,
        reverse: bool,
        inclusive: bool,
    ) -> Result<Tensor> {
        op!(
            self.backend(),
            cumulative,
            kind,
            self.handle(),
            axis,
            u32::from(reverse),
            u32::from(inclusive)
        )
    }

    /// Running sum.
    pub fn cumsum(&self, axis: i32) -> Result<Tensor> {
        self.cumulative(cumulative::CUMSUM, axis, false, true)
    }

    /// Ascending order of the elements.
    pub fn sort(&self, axis: i32) -> Result<Tensor> {
        op!(self.backend(), order, order::SORT, self.handle(), 0, axis)
    }

    /// Indices of the ascending order.
    pub fn argsort(&self, axis: i32) -> Result<Tensor> {
        op!(
            self.backend(),
            order,
            order::ARGSORT,
            self.handle(),
            0,
            axis
        )
    }

    /// Indices such that the element at `k` is in its sorted place, smaller ones before it.
    pub fn argpartition(&self, k: i64, axis: i32) -> Result<Tensor> {
        op!(
            self.backend(),
            order,
            order::ARGPARTITION,
            self.handle(),
            k,
            axis
        )
    }

    /// The partitioned elements themselves.
    pub fn partition(&self, k: i64, axis: i32) -> Result<Tensor> {
        op!(
            self.backend(),
            order,
            order::PARTITION,
            self.handle(),
            k,
            axis
        )
    }

    /// The `k` largest elements, in no particular order.
    pub fn topk(&self, k: i64, axis: i32) -> Result<Tensor> {
        op!(self.backend(), order, order::TOPK, self.handle(), k, axis)
    }

    /// Softmax along an axis, computed in f32, returned in this dtype.
    pub fn softmax(&self, axis: i32) -> Result<Tensor> {
        op!(self.backend(), softmax, self.handle(), axis)
    }
}
