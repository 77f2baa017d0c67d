//! Slots of mixtures of experts, by their definition: every product rounded to the activation's dtype,
//! the weighted sum once.

use std::sync::Arc;

use mlxcel_abi::fused_args::{LinearWeight, MixtureArgs, RouteArgs};
use mlxcel_abi::{AbiError, DType, Result, Tensor};

use super::edge::{QuantizedParts, flag, slots};
use super::inner::Inner;
use super::number::need_float;
use super::reduce::logsumexp;
use super::value::{Data, Value};
use super::{layers, movement, product, quant, shape};

slots! {
    fn route(inner, args: *const RouteArgs, out: *mut [Tensor; 2]) {
        let args = RouteArgs::read(args)?;
        let [experts, weights] = routed(inner, &args)?;
        inner.give_all(out, [Some(experts), Some(weights)])
    }

    fn mixture(inner, args: *const MixtureArgs, out: *mut Tensor) {
        let args = MixtureArgs::read(args)?;
        inner.give(out, mixed(inner, &args)?)
    }
}

fn routed(inner: &Inner, args: &RouteArgs) -> Result<[Value; 2]> {
    let logits = inner.get(args.logits)?;
    need_float("logits of experts", logits.dtype)?;
    shape::need_ndim("logits of experts", &logits.shape, 2)?;
    let renormalised = flag("renormalised", args.renormalised)?;
    let (rows, n, k) = (logits.shape[0], logits.shape[1], args.top_k as usize);
    if !(1..=n).contains(&k) {
        return Err(AbiError::invalid(format!(
            "route: {k} of {n} experts are not possible, expected 1 to {n}"
        )));
    }
    let chosen = |row: &[f64]| {
        let mut order: Vec<usize> = (0..n).collect();
        let key = |i: &usize| {
            if row[*i].is_nan() {
                f64::NEG_INFINITY
            } else {
                row[*i]
            }
        };
        order.sort_by(|a, b| key(b).total_cmp(&key(a)));
        order.truncate(k);
        order
    };
    let numbers = logits.reals();
    let each = || numbers.chunks_exact(n.max(1));
    let experts = inner.mode.value(DType::U32, vec![rows, k], || {
        let ids = each().flat_map(chosen).map(|i| i as i128);
        Ok(Data::Int(ids.collect()))
    })?;
    let weights = inner.mode.value(logits.dtype, vec![rows, k], || {
        let weights = each().flat_map(|row| {
            let taken: Vec<f64> = chosen(row).into_iter().map(|i| row[i]).collect();
            let total = logsumexp(if renormalised { &taken } else { row });
            taken.into_iter().map(move |x| (x - total).exp())
        });
        Ok(Data::Real(weights.collect()))
    })?;
    Ok([experts, weights])
}

/// `x[lhs] @ w[rhs].T` for `x` `[M, 1, K]`.
fn gathered(
    inner: &Inner,
    x: &Value,
    layer: &LinearWeight,
    lhs: &Value,
    rhs: &Value,
) -> Result<Value> {
    if !layer.bias.is_none() {
        return Err(AbiError::invalid("experts of a mixture have no bias"));
    }
    if layer.plain.is_none() {
        let parts = QuantizedParts::find(inner, layer.quantized)?;
        let w = parts.as_quantized();
        return quant::gather_quantized_matmul(inner.mode, x, &w, true, Some(lhs), Some(rhs));
    }
    let weight = inner.get(layer.plain)?;
    shape::need_ndim("a stack of experts", &weight.shape, 3)?;
    product::gather_matmul(inner.mode, x, &weight, Some(lhs), Some(rhs))?.cast(inner.mode, x.dtype)
}

fn mixed(inner: &Inner, args: &MixtureArgs) -> Result<Value> {
    let x = inner.get(args.x)?;
    need_float("the activation", x.dtype)?;
    shape::need_ndim("the activation", &x.shape, 2)?;
    let (experts, weights) = (inner.get(args.experts)?, inner.get(args.weights)?);
    shape::need_ndim("experts", &experts.shape, 2)?;
    shape::need("weights of experts", &weights.shape, &experts.shape)?;
    let (rows, width, k) = (x.shape[0], x.shape[1], experts.shape[1]);
    shape::need("experts", &experts.shape, &[rows, k])?;
    let index = |at: &dyn Fn(usize) -> usize| {
        inner.mode.value(DType::U32, vec![rows, k], || {
            Ok(Data::Int((0..rows * k).map(|i| at(i) as i128).collect()))
        })
    };
    let (row_of, pair_of) = (index(&|i| i / k)?, index(&|i| i)?);
    let matrices = |v: &Value, count: usize, width: usize| {
        movement::reshape(inner.mode, v, &[count as i64, 1, width as i64])
    };
    let single = matrices(&x, rows, width)?;
    let gate = gathered(inner, &single, &args.gate, &row_of, &experts)?;
    let up = gathered(inner, &single, &args.up, &row_of, &experts)?;
    let both = layers::glu(inner.mode, args.kind, &gate, &up)?;
    let flat = matrices(&both, rows * k, both.last_dim())?;
    let down = gathered(inner, &flat, &args.down, &pair_of, &experts)?;
    shape::need("a mixture", &down.shape, &[rows, k, 1, width])?;
    let residual: Option<Arc<Value>> = inner.get_optional(args.residual)?;
    if let Some(residual) = &residual {
        shape::need("the residual", &residual.shape, &x.shape)?;
    }
    inner.mode.value(x.dtype, x.shape.clone(), || {
        let (down, weights) = (down.reals(), weights.reals());
        let before = residual.as_ref().map(|residual| residual.reals());
        let sum = |i: usize| {
            let (row, column) = (i / width, i % width);
            let pairs = (row * k..(row + 1) * k).map(|p| weights[p] * down[p * width + column]);
            pairs.sum::<f64>() + before.as_ref().map_or(0.0, |before| before[i])
        };
        Ok(Data::Real((0..rows * width).map(sum).collect()))
    })
}
