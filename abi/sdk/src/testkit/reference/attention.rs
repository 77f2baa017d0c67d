//! Attention over given keys.

use mlxcel_abi::kinds::mask;
use mlxcel_abi::ops_args::AttentionArgs;
use mlxcel_abi::{AbiError, DType, Result};

use super::number::need_float;
use super::product::dot;
use super::shape;
use super::value::{Data, Mode, Value};

/// What turns the scores of one query into weights.
pub(super) struct Scoring {
    pub scale: f64,
    pub softcap: f64,
}

impl Scoring {
    pub(super) fn score(&self, q: &[f64], k: &[f64]) -> f64 {
        let score = self.scale * dot(q, k);
        if self.softcap > 0.0 {
            self.softcap * (score / self.softcap).tanh()
        } else {
            score
        }
    }
}

/// Softmax of `scores` (with a sink logit, which takes weight and gives nothing), then the weighted
/// sum of the values, added to `out`.
pub(super) fn mix<'v>(
    scores: &[f64],
    sink: Option<f64>,
    values: impl Iterator<Item = &'v [f64]>,
    out: &mut [f64],
) {
    let top = scores
        .iter()
        .copied()
        .chain(sink)
        .fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - top).exp());
    for (weight, value) in weights.iter().zip(values) {
        // As in `dot`: indices are what unoptimised builds run fastest.
        let (share, mut i) = (weight / total, 0);
        while i < out.len() {
            out[i] += share * value[i];
            i += 1;
        }
    }
}

pub(super) fn need_sinks(sinks: Option<&Value>, heads: usize) -> Result<()> {
    let Some(sinks) = sinks else {
        return Ok(());
    };
    need_float("sinks", sinks.dtype)?;
    shape::need("sinks", &sinks.shape, &[heads])
}

pub(super) fn need_heads(heads: usize, kv_heads: usize) -> Result<()> {
    if kv_heads > 0 && heads.is_multiple_of(kv_heads) {
        return Ok(());
    }
    Err(AbiError::invalid(format!(
        "{heads} query heads are no multiple of {kv_heads} key heads"
    )))
}

/// Tensors of [`AttentionArgs`].
pub(super) struct Dense<'a> {
    pub q: &'a Value,
    pub k: &'a Value,
    pub v: &'a Value,
    pub mask: Option<&'a Value>,
    pub sinks: Option<&'a Value>,
}

/// Dense attention: `[B, H, Tq, D]` over `[B, Hkv, Tk, D]` and `[B, Hkv, Tk, Dv]`.
pub(super) fn attention(mode: Mode, args: &AttentionArgs, t: &Dense<'_>) -> Result<Value> {
    for (what, value) in [("q", t.q), ("k", t.k), ("v", t.v)] {
        need_float(what, value.dtype)?;
        shape::need_ndim(what, &value.shape, 4)?;
    }
    let [b, h, tq, d] = [t.q.shape[0], t.q.shape[1], t.q.shape[2], t.q.shape[3]];
    let [hkv, tk, dv] = [t.k.shape[1], t.k.shape[2], t.v.shape[3]];
    shape::need("k", &t.k.shape, &[b, hkv, tk, d])?;
    shape::need("v", &t.v.shape, &[b, hkv, tk, dv])?;
    need_heads(h, hkv)?;
    need_sinks(t.sinks, h)?;
    let grid = [b, h, tq, tk];
    match (args.mask_kind, t.mask) {
        (mask::NONE | mask::CAUSAL, _) => {}
        (mask::TENSOR, Some(m)) if m.dtype == DType::BOOL || m.dtype.is_float() => {
            if m.shape.len() > 4
                || shape::broadcast(&[&m.shape, &grid]).ok().as_deref() != Some(&grid[..])
            {
                return Err(AbiError::invalid(format!(
                    "a mask of shape {:?} does not fit {grid:?}",
                    m.shape
                )));
            }
        }
        (mask::TENSOR, Some(m)) => {
            return Err(AbiError::invalid(format!(
                "a mask must be bool or a float, found {}",
                m.dtype.name()
            )));
        }
        (mask::TENSOR, None) => return Err(AbiError::invalid("the mask is missing")),
        (kind, _) => {
            return Err(AbiError::unimplemented(format!(
                "mask kind {kind} is not known to this backend"
            )));
        }
    }
    let out = vec![b, h, tq, dv];
    let total = shape::count(&out)?;
    mode.value(t.q.dtype, out, || {
        let scoring = Scoring {
            scale: args.scale.into(),
            softcap: args.softcap.into(),
        };
        let (q, k, v) = (t.q.reals(), t.k.reals(), t.v.reals());
        let bias = additive_mask(args, t, &grid);
        let sinks = t.sinks.map(Value::reals);
        let mut data = vec![0.0; total];
        for row in 0..b * h * tq {
            let (head, query) = (row / tq % h, row % tq);
            let kv = row / tq / h * hkv + head / (h / hkv);
            let q_row = &q[row * d..(row + 1) * d];
            let scores: Vec<f64> = (0..tk)
                .map(|key| {
                    let k_row = &k[(kv * tk + key) * d..][..d];
                    let bias = match &bias {
                        Some(bias) => bias[row * tk + key],
                        None if args.mask_kind == mask::CAUSAL => {
                            causal_bias(args.window, query, key, tq, tk)
                        }
                        None => 0.0,
                    };
                    scoring.score(q_row, k_row) + bias
                })
                .collect();
            let values = (0..tk).map(|key| &v[(kv * tk + key) * dv..][..dv]);
            mix(
                &scores,
                sinks.as_ref().map(|sinks| sinks[head]),
                values,
                &mut data[row * dv..(row + 1) * dv],
            );
        }
        Ok(Data::Real(data))
    })
}

/// The mask tensor as numbers to add, one per query and key.
fn additive_mask(args: &AttentionArgs, t: &Dense<'_>, grid: &[usize; 4]) -> Option<Vec<f64>> {
    let mask = t.mask.filter(|_| args.mask_kind == mask::TENSOR)?;
    let values = mask.reals();
    let bias = |x: f64| match (mask.dtype, x) {
        (DType::BOOL, 0.0) => f64::NEG_INFINITY,
        (DType::BOOL, _) => 0.0,
        (_, x) => x,
    };
    Some(
        shape::broadcast_positions(&mask.shape, grid)
            .into_iter()
            .map(|i| bias(values[i]))
            .collect(),
    )
}

/// Last query on the last key; a window counts the query's own key.
fn causal_bias(window: u32, query: usize, key: usize, tq: usize, tk: usize) -> f64 {
    let position = query as i64 + tk as i64 - tq as i64;
    let behind = position - key as i64;
    let visible = behind >= 0 && (window == 0 || behind < i64::from(window));
    if visible { 0.0 } else { f64::NEG_INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: Mode = Mode { shapes_only: false };

    fn real(shape: &[usize], v: &[f64]) -> Value {
        Value {
            dtype: DType::F64,
            shape: shape.to_vec(),
            data: Data::Real(v.to_vec()),
        }
    }

    #[test]
    fn a_query_without_scores_averages_what_it_sees() {
        let q = real(&[1, 1, 2, 1], &[0.0, 0.0]);
        let k = real(&[1, 1, 3, 1], &[1.0, 2.0, 3.0]);
        let v = real(&[1, 1, 3, 1], &[3.0, 6.0, 12.0]);
        let t = Dense {
            q: &q,
            k: &k,
            v: &v,
            mask: None,
            sinks: None,
        };
        let mut args = AttentionArgs {
            mask_kind: mask::CAUSAL,
            ..AttentionArgs::default()
        };
        assert_eq!(*attention(MODE, &args, &t).unwrap().reals(), [4.5, 7.0]);
        args.window = 1;
        assert_eq!(*attention(MODE, &args, &t).unwrap().reals(), [6.0, 12.0]);
        let sinks = real(&[1], &[0.0]);
        let t = Dense {
            sinks: Some(&sinks),
            ..t
        };
        assert_eq!(*attention(MODE, &args, &t).unwrap().reals(), [3.0, 6.0]);
    }
}
