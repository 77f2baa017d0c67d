//! Random draws. The keys are the caller's; nothing here has a state.

use mlxcel_abi::Tensor;
use mlxcel_abi::kinds::random as kind;
use mlxcel_abi::ops_args::RandomArgs;

use crate::args;
use crate::bridge::{self, RandomSpec};
use crate::slot::{get, optional, tensor_slots};

tensor_slots! {
    fn random_key(_context, _tensors; seed: u64) {
        Ok(bridge::random_key(seed)?)
    }

    fn random_split(_context, tensors; key: Tensor, n: i64) {
        Ok(bridge::random_split(get(tensors, key)?, n)?)
    }

    fn random(_context, tensors; args: *const RandomArgs) {
        // SAFETY: the slot's contract.
        let args = unsafe { RandomArgs::read(args) }?;
        // A categorical draw has the shape of its logits.
        let ndim = if args.kind == kind::CATEGORICAL { 0 } else { args.ndim };
        // SAFETY: the slot's contract.
        let dims = unsafe { args::shape(args.dims, ndim) }?;
        let logits = optional(tensors, args.logits)?;
        let spec = RandomSpec {
            kind: args.kind,
            dtype: args.dtype.0,
            key: get(tensors, args.key)?,
            dims,
            a: args.a,
            b: args.b,
            logits: logits.as_slice(),
        };
        Ok(bridge::random(&spec)?)
    }
}
