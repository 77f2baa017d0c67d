//! Quantised weights.

use core::ffi::c_void;

use mlxcel_abi::ops_args::{QuantSpec, QuantizedMatmulArgs, QuantizedWeight};
use mlxcel_abi::{DType, ErrorObj, Status, Tensor};

use crate::args::{Result, flag, small};
use crate::bridge::{self, QuantWeight, Ref};
use crate::context::Tensors;
use crate::slot::{get, make_three, optional, tensor_slots};

/// The weight, with `biases` as the list that the shim takes.
fn weight<'a>(
    tensors: &'a Tensors,
    w: &QuantizedWeight,
    biases: &'a [Ref<'a>],
) -> Result<QuantWeight<'a>> {
    Ok(QuantWeight {
        weight: get(tensors, w.weight)?,
        scales: get(tensors, w.scales)?,
        biases,
        mode: w.spec.mode,
        bits: small(w.spec.bits, "bits")?,
        group_size: small(w.spec.group_size, "group_size")?,
    })
}

/// # Safety
/// The slot's contract: `ctx` of an open backend, pointers valid for the call.
pub(crate) unsafe extern "C" fn quantize(
    ctx: *mut c_void,
    w: Tensor,
    spec: *const QuantSpec,
    out: *mut [Tensor; 3],
    err: *mut *mut ErrorObj,
) -> Status {
    // SAFETY: forwarded to the caller.
    unsafe {
        make_three(ctx, out, err, "quantize", |_, tensors| {
            let spec = QuantSpec::read(spec)?;
            let (bits, group_size) = (
                small(spec.bits, "bits")?,
                small(spec.group_size, "group_size")?,
            );
            Ok(bridge::quantize(
                get(tensors, w)?,
                spec.mode,
                bits,
                group_size,
            )?)
        })
    }
}

tensor_slots! {
    fn dequantize(_context, tensors; w: *const QuantizedWeight, dtype: DType) {
        // SAFETY: the slot's contract.
        let w = unsafe { QuantizedWeight::read(w) }?;
        let biases = optional(tensors, w.biases)?;
        Ok(bridge::dequantize(&weight(tensors, &w, biases.as_slice())?, dtype.0)?)
    }

    fn quantized_matmul(_context, tensors; args: *const QuantizedMatmulArgs) {
        // SAFETY: the slot's contract.
        let args = unsafe { QuantizedMatmulArgs::read(args) }?;
        let biases = optional(tensors, args.w.biases)?;
        let w = weight(tensors, &args.w, biases.as_slice())?;
        let transpose = flag(args.transpose, "transpose")?;
        Ok(bridge::quantized_matmul(get(tensors, args.x)?, &w, transpose)?)
    }

    fn gather_quantized_matmul(_context, tensors; args: *const QuantizedMatmulArgs) {
        // SAFETY: the slot's contract.
        let args = unsafe { QuantizedMatmulArgs::read(args) }?;
        let biases = optional(tensors, args.w.biases)?;
        let w = weight(tensors, &args.w, biases.as_slice())?;
        let (transpose, sorted) = (flag(args.transpose, "transpose")?, flag(args.sorted_indices, "sorted_indices")?);
        let (lhs, rhs) = (optional(tensors, args.lhs_indices)?, optional(tensors, args.rhs_indices)?);
        Ok(bridge::gather_quantized_matmul(
            get(tensors, args.x)?,
            &w,
            transpose,
            lhs.as_slice(),
            rhs.as_slice(),
            sorted,
        )?)
    }
}
