//! Random tensors from explicit keys.

use mlxcel_abi::DType;
use mlxcel_abi::kinds::random;
use mlxcel_abi::ops_args::RandomArgs;

use crate::{Backend, Result, Tensor};

impl Tensor {
    /// Key from a seed.
    pub fn random_key(backend: &Backend, seed: u64) -> Result<Tensor> {
        op!(backend, random_key, seed)
    }

    /// `n` independent keys, `[n, 2]`.
    pub fn random_split(&self, n: i64) -> Result<Tensor> {
        op!(self.backend(), random_split, self.handle(), n)
    }

    /// Draws of `kind` (see [`mlxcel_abi::kinds::random`]) with this tensor as the key.
    pub fn random(&self, kind: u32, dtype: DType, shape: &[i64], a: f64, b: f64) -> Result<Tensor> {
        let args = RandomArgs {
            kind,
            dtype,
            key: self.handle(),
            dims: shape.as_ptr(),
            ndim: shape.len() as u32,
            a,
            b,
            ..RandomArgs::default()
        };
        op!(self.backend(), random, &args)
    }

    /// One index per row of `logits`, drawn with this tensor as the key. u32.
    pub fn categorical(&self, logits: &Tensor) -> Result<Tensor> {
        let args = RandomArgs {
            kind: random::CATEGORICAL,
            dtype: DType::U32,
            key: self.handle(),
            logits: logits.handle(),
            ..RandomArgs::default()
        };
        op!(self.backend(), random, &args)
    }
}
