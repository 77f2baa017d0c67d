//! Functions applied element by element.

use mlxcel_abi::{DType, Tensor};

use crate::args::flag;
use crate::bridge;
use crate::slot::{get, tensor_slots};

tensor_slots! {
    fn cast(_context, tensors; a: Tensor, dtype: DType) {
        Ok(bridge::cast(get(tensors, a)?, dtype.0)?)
    }

    fn view(_context, tensors; a: Tensor, dtype: DType) {
        Ok(bridge::view(get(tensors, a)?, dtype.0)?)
    }

    fn unary(_context, tensors; kind: u32, a: Tensor) {
        Ok(bridge::unary(kind, get(tensors, a)?)?)
    }

    fn binary(_context, tensors; kind: u32, a: Tensor, b: Tensor) {
        Ok(bridge::binary(kind, get(tensors, a)?, get(tensors, b)?)?)
    }

    fn binary_scalar(_context, tensors; kind: u32, a: Tensor, scalar: f64, scalar_first: u32) {
        let scalar_first = flag(scalar_first, "scalar_first")?;
        Ok(bridge::binary_scalar(kind, get(tensors, a)?, scalar, scalar_first)?)
    }

    fn select(_context, tensors; cond: Tensor, a: Tensor, b: Tensor) {
        Ok(bridge::select(get(tensors, cond)?, get(tensors, a)?, get(tensors, b)?)?)
    }

    fn clip(_context, tensors; a: Tensor, low: f64, high: f64) {
        Ok(bridge::clip(get(tensors, a)?, low, high)?)
    }

    fn glu(_context, tensors; kind: u32, gate: Tensor, up: Tensor) {
        Ok(bridge::glu(kind, get(tensors, gate)?, get(tensors, up)?)?)
    }
}
