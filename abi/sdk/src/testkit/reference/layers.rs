//! Norms, rotary embedding and gated activations.

use mlxcel_abi::kinds::glu as glu_kind;
use mlxcel_abi::ops_args::RopeArgs;
use mlxcel_abi::{AbiError, Result};

use super::number::{need_float, need_int, promote};
use super::shape;
use super::special;
use super::value::{Data, Mode, Value};

fn need_parameter(what: &str, x: &Value, parameter: Option<&Value>) -> Result<()> {
    let Some(parameter) = parameter else {
        return Ok(());
    };
    need_float(what, parameter.dtype)?;
    shape::need(what, &parameter.shape, &[x.last_dim()])
}

fn need_rows(x: &Value) -> Result<()> {
    need_float("the activation", x.dtype)?;
    if x.shape.is_empty() {
        return Err(AbiError::invalid("a norm needs an axis, found a scalar"));
    }
    Ok(())
}

/// `x / sqrt(mean(x^2) + eps) * w` over the last axis.
pub(super) fn rms_norm(mode: Mode, x: &Value, w: Option<&Value>, eps: f32) -> Result<Value> {
    need_rows(x)?;
    need_parameter("the norm's weight", x, w)?;
    mode.value(x.dtype, x.shape.clone(), || {
        let w = w.map(Value::reals);
        let n = x.last_dim().max(1);
        let mut out = x.reals().into_owned();
        for row in out.chunks_exact_mut(n) {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / n as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            for (i, x) in row.iter_mut().enumerate() {
                *x = *x * scale * w.as_ref().map_or(1.0, |w| w[i]);
            }
        }
        Ok(Data::Real(out))
    })
}

/// `(x - mean) / sqrt(variance + eps) * w + b` over the last axis.
pub(super) fn layer_norm(
    mode: Mode,
    x: &Value,
    w: Option<&Value>,
    b: Option<&Value>,
    eps: f32,
) -> Result<Value> {
    need_rows(x)?;
    need_parameter("the norm's weight", x, w)?;
    need_parameter("the norm's bias", x, b)?;
    mode.value(x.dtype, x.shape.clone(), || {
        let (w, b) = (w.map(Value::reals), b.map(Value::reals));
        let n = x.last_dim().max(1);
        let mut out = x.reals().into_owned();
        for row in out.chunks_exact_mut(n) {
            let mean = row.iter().sum::<f64>() / n as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
            let scale = 1.0 / (variance + f64::from(eps)).sqrt();
            for (i, x) in row.iter_mut().enumerate() {
                let scaled = (*x - mean) * scale * w.as_ref().map_or(1.0, |w| w[i]);
                *x = scaled + b.as_ref().map_or(0.0, |b| b[i]);
            }
        }
        Ok(Data::Real(out))
    })
}

/// Rotary embedding (Su et al. 2021, RoFormer) with a position per row.
pub(super) fn rope(
    mode: Mode,
    args: &RopeArgs,
    x: &Value,
    positions: &Value,
    freqs: Option<&Value>,
) -> Result<Value> {
    need_float("the activation", x.dtype)?;
    shape::need_ndim("the activation", &x.shape, 3)?;
    need_int("positions", positions.dtype)?;
    shape::need("positions", &positions.shape, &x.shape[..1])?;
    let (heads, width, dims) = (x.shape[1], x.shape[2], args.dims as usize);
    if !dims.is_multiple_of(2) || dims > width {
        return Err(AbiError::invalid(format!(
            "an even number of at most {width} features can be rotated, found {dims}"
        )));
    }
    if let Some(freqs) = freqs {
        need_float("freqs", freqs.dtype)?;
        shape::need("freqs", &freqs.shape, &[dims / 2])?;
    }
    mode.value(x.dtype, x.shape.clone(), || {
        let half = dims / 2;
        let periods: Vec<f64> = match freqs {
            Some(freqs) => freqs.reals().into_owned(),
            None => (0..half)
                .map(|i| f64::from(args.base).powf(2.0 * i as f64 / dims as f64))
                .collect(),
        };
        let mut out = x.reals().into_owned();
        for (row, &position) in out
            .chunks_exact_mut((heads * width).max(1))
            .zip(positions.ints()?)
        {
            let turns: Vec<(f64, f64)> = periods
                .iter()
                .map(|period| (f64::from(args.scale) * position as f64 / period).sin_cos())
                .collect();
            for head in row.chunks_exact_mut(width) {
                for (i, &(sin, cos)) in turns.iter().enumerate() {
                    let (p, q) = if args.interleaved == 1 {
                        (2 * i, 2 * i + 1)
                    } else {
                        (i, i + half)
                    };
                    let (a, b) = (head[p], head[q]);
                    head[p] = a * cos - b * sin;
                    head[q] = a * sin + b * cos;
                }
            }
        }
        Ok(Data::Real(out))
    })
}

/// Gated activation `f(gate) * up`.
pub(super) fn glu(mode: Mode, code: u32, gate: &Value, up: &Value) -> Result<Value> {
    let f: fn(f64) -> f64 = match code {
        glu_kind::SILU => |x| x * special::sigmoid(x),
        glu_kind::GELU => special::gelu,
        glu_kind::GELU_TANH => special::gelu_tanh,
        glu_kind::RELU => |x| special::max_nan(x, 0.0),
        glu_kind::SIGMOID => special::sigmoid,
        code => {
            return Err(AbiError::unimplemented(format!(
                "gated activation {code} is not known to this backend"
            )));
        }
    };
    need_float("the gate", gate.dtype)?;
    need_float("the gated input", up.dtype)?;
    shape::need("the gated input", &up.shape, &gate.shape)?;
    mode.value(promote(gate.dtype, up.dtype), gate.shape.clone(), || {
        Ok(Data::Real(
            gate.reals()
                .iter()
                .zip(up.reals().iter())
                .map(|(&gate, &up)| f(gate) * up)
                .collect(),
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlxcel_abi::DType;
    use mlxcel_abi::kinds::unary as unary_kind;

    const MODE: Mode = Mode { shapes_only: false };

    fn real(shape: &[usize], v: &[f64]) -> Value {
        Value {
            dtype: DType::F32,
            shape: shape.to_vec(),
            data: Data::Real(v.to_vec()),
        }
    }

    fn unary_of(code: u32) -> u32 {
        match code {
            glu_kind::SILU => unary_kind::SILU,
            glu_kind::GELU => unary_kind::GELU,
            glu_kind::GELU_TANH => unary_kind::GELU_TANH,
            glu_kind::RELU => unary_kind::RELU,
            _ => unary_kind::SIGMOID,
        }
    }

    #[test]
    fn norms_have_unit_size() {
        let x = real(&[2, 2], &[3.0, 4.0, -1.0, 1.0]);
        let y = rms_norm(MODE, &x, Some(&real(&[2], &[1.0, 2.0])), 0.0).unwrap();
        assert!((y.reals()[0] - 3.0 / 12.5f64.sqrt()).abs() < 1e-6);
        assert!((y.reals()[3] - 2.0).abs() < 1e-6);
        let y = layer_norm(MODE, &x, None, Some(&real(&[2], &[0.0, 10.0])), 0.0).unwrap();
        assert_eq!(*y.reals(), [-1.0, 11.0, -1.0, 11.0]);
        assert!(rms_norm(MODE, &x, Some(&real(&[3], &[0.0; 3])), 0.0).is_err());
    }

    #[test]
    fn rotation_pairs_halves_or_neighbours_and_leaves_the_rest() {
        let x = real(&[1, 1, 5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
        let position = Value {
            dtype: DType::I32,
            shape: vec![1],
            data: Data::Int(vec![1]),
        };
        let freqs = real(&[2], &[2.0 / core::f64::consts::PI, 1e30]);
        let mut args = RopeArgs {
            dims: 4,
            ..RopeArgs::default()
        };
        let rotated = |args: &RopeArgs| -> Vec<f64> {
            rope(MODE, args, &x, &position, Some(&freqs))
                .unwrap()
                .reals()
                .iter()
                .map(|x| x.round())
                .collect()
        };
        assert_eq!(rotated(&args), [-3.0, 2.0, 1.0, 4.0, 5.0]);
        args.interleaved = 1;
        assert_eq!(rotated(&args), [-2.0, 1.0, 3.0, 4.0, 5.0]);
        args.dims = 3;
        assert!(rope(MODE, &args, &x, &position, None).is_err());
    }

    #[test]
    fn gates_are_the_elementwise_functions() {
        let x = real(&[3], &[-1.5, 0.25, 2.0]);
        let one = real(&[3], &[1.0; 3]);
        for (code, name) in glu_kind::ALL {
            let gated = glu(MODE, *code, &x, &one).unwrap();
            let plain = super::super::unary::unary(MODE, unary_of(*code), &x).unwrap();
            assert_eq!(gated, plain, "{name}");
        }
    }
}
