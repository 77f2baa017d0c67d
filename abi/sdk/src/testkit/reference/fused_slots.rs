//! Slots of fused operations, by their definition: the parts one after another, each rounded to the
//! activation's dtype.

use std::sync::Arc;

use mlxcel_abi::fused_args::{GatedMlpArgs, InputNorm, LinearWeight, ProjectArgs, RotateArgs};
use mlxcel_abi::kinds::binary as binary_kind;
use mlxcel_abi::ops_args::{PagedAttentionArgs, RopeArgs};
use mlxcel_abi::{AbiError, Result, Tensor};

use super::edge::{QuantizedParts, flag, list, slots};
use super::inner::Inner;
use super::number::need_float;
use super::paged::{self, Paged};
use super::value::Value;
use super::{binary, layers, movement, product, quant, shape};

fn add(inner: &Inner, what: &str, a: &Value, b: &Value) -> Result<Value> {
    need_float(what, b.dtype)?;
    binary::binary(
        inner.mode,
        binary_kind::ADD,
        a,
        &b.cast(inner.mode, a.dtype)?,
    )
}

/// One linear layer of `x` `[T, K]`, in its dtype.
fn linear(inner: &Inner, x: &Value, layer: &LinearWeight) -> Result<Value> {
    let y = if layer.plain.is_none() {
        let parts = QuantizedParts::find(inner, layer.quantized)?;
        quant::quantized_matmul(inner.mode, x, &parts.as_quantized(), true)?
    } else {
        let weight = inner.get(layer.plain)?;
        shape::need_ndim("a layer's weight", &weight.shape, 2)?;
        product::matmul(inner.mode, x, &weight)?.cast(inner.mode, x.dtype)?
    };
    match inner.get_optional(layer.bias)? {
        Some(bias) => {
            shape::need("a layer's bias", &bias.shape, &y.shape[1..])?;
            add(inner, "a layer's bias", &y, &bias)
        }
        None => Ok(y),
    }
}

/// The input, normed where that is asked for.
fn input(inner: &Inner, x: Tensor, norm: &InputNorm) -> Result<Arc<Value>> {
    let x = inner.get(x)?;
    need_float("the activation", x.dtype)?;
    shape::need_ndim("the activation", &x.shape, 2)?;
    if !flag("norm.normed", norm.normed)? {
        return Ok(x);
    }
    let weight = inner.get_optional(norm.weight)?;
    layers::rms_norm(inner.mode, &x, weight.as_deref(), norm.eps).map(Arc::new)
}

/// `y`, with the residual added where there is one.
fn with_residual(inner: &Inner, y: Value, residual: Tensor) -> Result<Value> {
    match inner.get_optional(residual)? {
        Some(residual) => {
            shape::need("the residual", &residual.shape, &y.shape)?;
            add(inner, "the residual", &y, &residual)
        }
        None => Ok(y),
    }
}

/// `[T, heads, width]` of rows that come so, or flat.
fn by_head(inner: &Inner, x: &Value, width: usize) -> Result<Value> {
    let dims = [x.shape[0] as i64, -1, width as i64];
    match x.shape.len() {
        2 | 3 => movement::reshape(inner.mode, x, &dims),
        n => Err(AbiError::invalid(format!(
            "queries, keys and values have 2 or 3 dimensions, found {n}"
        ))),
    }
}

/// Queries or keys with their heads normed, then rotated.
fn rotated(
    inner: &Inner,
    x: Value,
    weight: Tensor,
    rotate: &RotateArgs,
    positions: &Value,
) -> Result<Value> {
    let x = if flag("normed", rotate.normed)? {
        let weight = inner.get_optional(weight)?;
        layers::rms_norm(inner.mode, &x, weight.as_deref(), rotate.eps)?
    } else {
        x
    };
    if rotate.dims == 0 {
        return Ok(x);
    }
    flag("interleaved", rotate.interleaved)?;
    let args = RopeArgs {
        dims: rotate.dims,
        interleaved: rotate.interleaved,
        base: rotate.base,
        scale: rotate.scale,
        ..RopeArgs::default()
    };
    let freqs = inner.get_optional(rotate.freqs)?;
    layers::rope(inner.mode, &args, &x, positions, freqs.as_deref())
}

slots! {
    fn project(inner, args: *const ProjectArgs, out: *mut Tensor) {
        let args = ProjectArgs::read(args)?;
        let weights = list("layers", args.layers, args.n_layers as usize)?;
        if weights.is_empty() || out.is_null() {
            return Err(AbiError::invalid("a projection needs layers and a place for the results"));
        }
        if weights.len() > 1 && !args.residual.is_none() {
            return Err(AbiError::invalid(format!("a residual goes with one layer, found {}", weights.len())));
        }
        let x = input(inner, args.x, &args.norm)?;
        let mut results = Vec::new();
        for weight in weights {
            results.push(with_residual(inner, linear(inner, &x, weight)?, args.residual)?);
        }
        let mut handles: Vec<Tensor> = Vec::new();
        for value in results {
            match inner.keep(value) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    for handle in handles {
                        inner.release(handle)?;
                    }
                    return Err(error);
                }
            }
        }
        core::ptr::copy_nonoverlapping(handles.as_ptr(), out, handles.len());
        Ok(())
    }

    fn gated_mlp(inner, args: *const GatedMlpArgs, out: *mut Tensor) {
        let args = GatedMlpArgs::read(args)?;
        let x = input(inner, args.x, &args.norm)?;
        let (gate, up) = (linear(inner, &x, &args.gate)?, linear(inner, &x, &args.up)?);
        let y = linear(inner, &layers::glu(inner.mode, args.kind, &gate, &up)?, &args.down)?;
        inner.give(out, with_residual(inner, y, args.residual)?)
    }

    fn add_rms_norm(inner, x: Tensor, residual: Tensor, w: Tensor, eps: f32, out: *mut [Tensor; 2]) {
        let sum = with_residual(inner, Value::clone(&*inner.get(x)?), residual)?;
        let normed = layers::rms_norm(inner.mode, &sum, inner.get_optional(w)?.as_deref(), eps)?;
        inner.give_all(out, [Some(sum), Some(normed)])
    }

    fn rotated_paged_attention(inner, args: *const PagedAttentionArgs, rotate: *const RotateArgs, out: *mut [Tensor; 3]) {
        let (args, rotate) = (PagedAttentionArgs::read(args)?, RotateArgs::read(rotate)?);
        if args.k.is_none() || args.latent_dim > 0 {
            return Err(AbiError::unimplemented("keys that are not appended, or latent, are not rotated here"));
        }
        let row_starts = list("row_starts", args.row_starts, args.n_sequences as usize + 1)?;
        let (k_pool, v_pool) = (inner.get(args.k_pool)?, inner.get(args.v_pool)?);
        shape::need_ndim("k_pool", &k_pool.shape, 4)?;
        shape::need_ndim("v_pool", &v_pool.shape, 4)?;
        let (given, width) = (inner.get(args.q)?, k_pool.shape[3]);
        let positions = inner.get(args.positions)?;
        let q = by_head(inner, &given, width)?;
        let q = rotated(inner, q, rotate.q_norm, &rotate, &positions)?;
        let k = by_head(inner, &*inner.get(args.k)?, width)?;
        let k = rotated(inner, k, rotate.k_norm, &rotate, &positions)?;
        let v = by_head(inner, &*inner.get(args.v)?, v_pool.shape[3])?;
        let slots = inner.get(args.slots)?;
        let (row_sequences, page_table) = (inner.get(args.row_sequences)?, inner.get(args.page_table)?);
        let (sinks, selection) = (inner.get_optional(args.sinks)?, inner.get_optional(args.selection)?);
        let tensors = Paged {
            q: &q,
            k: Some(&k),
            v: Some(&v),
            k_pool: &k_pool,
            v_pool: Some(&v_pool),
            slots: Some(&slots),
            row_sequences: &row_sequences,
            positions: &positions,
            page_table: &page_table,
            sinks: sinks.as_deref(),
            selection: selection.as_deref(),
        };
        let [mixed, keys, values] = paged::paged_attention(inner.mode, &args, row_starts, &tensors)?;
        let mixed = match mixed {
            Some(mixed) if given.shape.len() == 2 => {
                Some(movement::reshape(inner.mode, &mixed, &[given.shape[0] as i64, -1])?)
            }
            mixed => mixed,
        };
        inner.give_all(out, [mixed, keys, values])
    }
}
