//! Slots for products, layers and random draws.

use mlxcel_abi::ops_args::{
    AttentionArgs, ConvArgs, PagedAttentionArgs, QuantSpec, QuantizedMatmulArgs, QuantizedWeight,
    RandomArgs, RopeArgs,
};
use mlxcel_abi::{AbiError, DType, Tensor};

use super::attention::Dense;
use super::edge::{QuantizedParts, flag, list, slots};
use super::paged::Paged;
use super::random::Draw;
use super::{
    attention as attend, conv as convolution, fourier, layers, paged, product, quant,
    random as draws,
};

slots! {
    fn matmul(inner, a: Tensor, b: Tensor, out: *mut Tensor) {
        inner.give(out, product::matmul(inner.mode, &*inner.get(a)?, &*inner.get(b)?)?)
    }

    fn addmm(inner, c: Tensor, a: Tensor, b: Tensor, alpha: f32, beta: f32, out: *mut Tensor) {
        let (c, a, b) = (inner.get(c)?, inner.get(a)?, inner.get(b)?);
        inner.give(out, product::addmm(inner.mode, &c, &a, &b, alpha, beta)?)
    }

    fn gather_matmul(inner, a: Tensor, b: Tensor, lhs: Tensor, rhs: Tensor, sorted: u32, out: *mut Tensor) {
        flag("sorted", sorted)?;
        let (a, b) = (inner.get(a)?, inner.get(b)?);
        let (lhs, rhs) = (inner.get_optional(lhs)?, inner.get_optional(rhs)?);
        inner.give(out, product::gather_matmul(inner.mode, &a, &b, lhs.as_deref(), rhs.as_deref())?)
    }

    fn quantize(inner, w: Tensor, spec: *const QuantSpec, out: *mut [Tensor; 3]) {
        let spec = QuantSpec::read(spec)?;
        let (weight, scales, biases) = quant::quantize(inner.mode, &*inner.get(w)?, &spec)?;
        inner.give_all(out, [Some(weight), Some(scales), biases])
    }

    fn dequantize(inner, w: *const QuantizedWeight, dtype: DType, out: *mut Tensor) {
        let parts = QuantizedParts::find(inner, QuantizedWeight::read(w)?)?;
        inner.give(out, quant::dequantize(inner.mode, &parts.as_quantized(), dtype)?)
    }

    fn quantized_matmul(inner, args: *const QuantizedMatmulArgs, out: *mut Tensor) {
        let args = QuantizedMatmulArgs::read(args)?;
        let parts = QuantizedParts::find(inner, args.w)?;
        let transpose = flag("transpose", args.transpose)?;
        if !args.lhs_indices.is_none() || !args.rhs_indices.is_none() {
            return Err(AbiError::invalid("indices belong to gather_quantized_matmul"));
        }
        inner.give(out, quant::quantized_matmul(inner.mode, &*inner.get(args.x)?, &parts.as_quantized(), transpose)?)
    }

    fn gather_quantized_matmul(inner, args: *const QuantizedMatmulArgs, out: *mut Tensor) {
        let args = QuantizedMatmulArgs::read(args)?;
        let parts = QuantizedParts::find(inner, args.w)?;
        let transpose = flag("transpose", args.transpose)?;
        flag("sorted_indices", args.sorted_indices)?;
        let (lhs, rhs) = (inner.get_optional(args.lhs_indices)?, inner.get_optional(args.rhs_indices)?);
        let value = quant::gather_quantized_matmul(
            inner.mode,
            &*inner.get(args.x)?,
            &parts.as_quantized(),
            transpose,
            lhs.as_deref(),
            rhs.as_deref(),
        )?;
        inner.give(out, value)
    }

    fn conv(inner, args: *const ConvArgs, out: *mut Tensor) {
        let args = ConvArgs::read(args)?;
        flag("transposed", args.transposed)?;
        inner.give(out, convolution::conv(inner.mode, &args, &*inner.get(args.x)?, &*inner.get(args.w)?)?)
    }

    fn fft(inner, kind: u32, a: Tensor, n: *const i64, axes: *const i32, n_axes: u32, out: *mut Tensor) {
        let axes = list("axes", axes, n_axes as usize)?;
        let sizes = if n.is_null() { &[] } else { list("n", n, n_axes as usize)? };
        inner.give(out, fourier::fft(inner.mode, kind, &*inner.get(a)?, sizes, axes)?)
    }

    fn rms_norm(inner, x: Tensor, w: Tensor, eps: f32, out: *mut Tensor) {
        let w = inner.get_optional(w)?;
        inner.give(out, layers::rms_norm(inner.mode, &*inner.get(x)?, w.as_deref(), eps)?)
    }

    fn layer_norm(inner, x: Tensor, w: Tensor, b: Tensor, eps: f32, out: *mut Tensor) {
        let (w, b) = (inner.get_optional(w)?, inner.get_optional(b)?);
        inner.give(out, layers::layer_norm(inner.mode, &*inner.get(x)?, w.as_deref(), b.as_deref(), eps)?)
    }

    fn rope(inner, args: *const RopeArgs, out: *mut Tensor) {
        let args = RopeArgs::read(args)?;
        flag("interleaved", args.interleaved)?;
        let (x, positions) = (inner.get(args.x)?, inner.get(args.positions)?);
        let freqs = inner.get_optional(args.freqs)?;
        inner.give(out, layers::rope(inner.mode, &args, &x, &positions, freqs.as_deref())?)
    }

    fn attention(inner, args: *const AttentionArgs, out: *mut Tensor) {
        let args = AttentionArgs::read(args)?;
        let (q, k, v) = (inner.get(args.q)?, inner.get(args.k)?, inner.get(args.v)?);
        let (mask, sinks) = (inner.get_optional(args.mask)?, inner.get_optional(args.sinks)?);
        let tensors = Dense { q: &q, k: &k, v: &v, mask: mask.as_deref(), sinks: sinks.as_deref() };
        inner.give(out, attend::attention(inner.mode, &args, &tensors)?)
    }

    fn paged_attention(inner, args: *const PagedAttentionArgs, out: *mut [Tensor; 3]) {
        let args = PagedAttentionArgs::read(args)?;
        let row_starts = list("row_starts", args.row_starts, args.n_sequences as usize + 1)?;
        let (q, k, v) = (inner.get(args.q)?, inner.get_optional(args.k)?, inner.get_optional(args.v)?);
        let (k_pool, v_pool) = (inner.get(args.k_pool)?, inner.get_optional(args.v_pool)?);
        let (slots, row_sequences) = (inner.get_optional(args.slots)?, inner.get(args.row_sequences)?);
        let (positions, page_table) = (inner.get(args.positions)?, inner.get(args.page_table)?);
        let (sinks, selection) = (inner.get_optional(args.sinks)?, inner.get_optional(args.selection)?);
        let tensors = Paged {
            q: &q,
            k: k.as_deref(),
            v: v.as_deref(),
            k_pool: &k_pool,
            v_pool: v_pool.as_deref(),
            slots: slots.as_deref(),
            row_sequences: &row_sequences,
            positions: &positions,
            page_table: &page_table,
            sinks: sinks.as_deref(),
            selection: selection.as_deref(),
        };
        inner.give_all(out, paged::paged_attention(inner.mode, &args, row_starts, &tensors)?)
    }

    fn glu(inner, kind: u32, gate: Tensor, up: Tensor, out: *mut Tensor) {
        inner.give(out, layers::glu(inner.mode, kind, &*inner.get(gate)?, &*inner.get(up)?)?)
    }

    fn random_key(inner, seed: u64, out: *mut Tensor) {
        inner.give(out, draws::key(inner.mode, seed)?)
    }

    fn random_split(inner, key: Tensor, n: i64, out: *mut Tensor) {
        inner.give(out, draws::split(inner.mode, &*inner.get(key)?, n)?)
    }

    fn random(inner, args: *const RandomArgs, out: *mut Tensor) {
        let args = RandomArgs::read(args)?;
        let (key, logits) = (inner.get(args.key)?, inner.get_optional(args.logits)?);
        let draw = Draw {
            kind: args.kind,
            dtype: args.dtype,
            key: &key,
            dims: list("dims", args.dims, args.ndim as usize)?,
            a: args.a,
            b: args.b,
            logits: logits.as_deref(),
        };
        inner.give(out, draws::random(inner.mode, &draw)?)
    }
}
