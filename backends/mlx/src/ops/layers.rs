//! Norms and rotary embedding.

use mlxcel_abi::ops_args::RopeArgs;
use mlxcel_abi::{AbiError, Tensor};

use crate::args::{flag, small};
use crate::bridge::{self, RopeSpec};
use crate::slot::{get, optional, tensor_slots};

tensor_slots! {
    fn rms_norm(_context, tensors; x: Tensor, w: Tensor, eps: f32) {
        let w = optional(tensors, w)?;
        Ok(bridge::rms_norm(get(tensors, x)?, w.as_slice(), eps)?)
    }

    fn layer_norm(_context, tensors; x: Tensor, w: Tensor, b: Tensor, eps: f32) {
        let (w, b) = (optional(tensors, w)?, optional(tensors, b)?);
        Ok(bridge::layer_norm(get(tensors, x)?, w.as_slice(), b.as_slice(), eps)?)
    }

    fn rope(context, tensors; args: *const RopeArgs) {
        // SAFETY: the slot's contract.
        let args = unsafe { RopeArgs::read(args) }?;
        let freqs = optional(tensors, args.freqs)?;
        let spec = RopeSpec {
            x: get(tensors, args.x)?,
            positions: get(tensors, args.positions)?,
            freqs: freqs.as_slice(),
            dims: small(args.dims, "dims")?,
            interleaved: flag(args.interleaved, "interleaved")?,
            base: args.base,
            scale: args.scale,
        };
        let mut memo = context.memo.borrow_mut();
        let memo = memo.as_mut().ok_or_else(|| AbiError::internal("the backend has no memo"))?;
        Ok(bridge::rope(&spec, memo)?)
    }
}
