//! Elementwise functions of one tensor.

use mlxcel_abi::kinds::unary as kind;
use mlxcel_abi::{AbiError, DType, Result};

use super::complex;
use super::number::{Class, at_least_float, class, float_to_int, int_range};
use super::special;
use super::value::{Data, Mode, Value, decode, encode};

fn result_dtype(code: u32, a: DType) -> Result<DType> {
    let refused = |why: &str| {
        Err(AbiError::invalid(format!(
            "{} is not defined on {}: {why}",
            kind::name(code),
            a.name()
        )))
    };
    match code {
        kind::NEG if a == DType::BOOL => refused("use logical_not"),
        kind::BIT_NOT if a.is_float() || a == DType::C64 => refused("use an integer type"),
        kind::NEG
        | kind::SIGN
        | kind::SQUARE
        | kind::FLOOR
        | kind::CEIL
        | kind::ROUND
        | kind::RELU
        | kind::RELU_SQUARED
        | kind::CONJ
        | kind::BIT_NOT => Ok(a),
        kind::ABS | kind::REAL | kind::IMAG if a == DType::C64 => Ok(DType::F32),
        kind::ABS | kind::REAL | kind::IMAG => Ok(a),
        kind::LOGICAL_NOT | kind::IS_NAN | kind::IS_INF | kind::IS_FINITE => Ok(DType::BOOL),
        code if kind::ALL.iter().any(|(known, _)| *known == code) => Ok(at_least_float(a)),
        code => Err(AbiError::unimplemented(format!(
            "elementwise function {code} is not known to this backend"
        ))),
    }
}

/// One of [`mlxcel_abi::kinds::unary`].
pub(super) fn unary(mode: Mode, code: u32, a: &Value) -> Result<Value> {
    let dtype = result_dtype(code, a.dtype)?;
    if a.dtype == DType::C64 {
        complex::supports_unary(code)?;
    }
    mode.value(dtype, a.shape.clone(), || {
        if a.dtype == DType::C64 {
            return complex::unary(code, &a.complexes());
        }
        let stays_int = !matches!(class(dtype)?, Class::Float) && class(a.dtype)? != Class::Float;
        if stays_int {
            let f = int_function(code);
            return Ok(Data::Int(
                a.ints()?.iter().map(|&x| f(x, a.dtype)).collect(),
            ));
        }
        // Integers become f32 before the function is taken, as a device would see them.
        let input = a.cast(mode, at_least_float(a.dtype))?;
        if dtype == DType::BOOL {
            let test = float_test(code);
            return Ok(Data::Int(
                input.reals().iter().map(|&x| i128::from(test(x))).collect(),
            ));
        }
        let f = float_function(code);
        Ok(Data::Real(input.reals().iter().map(|&x| f(x)).collect()))
    })
}

fn int_function(code: u32) -> fn(i128, DType) -> i128 {
    match code {
        kind::NEG => |x, _| x.wrapping_neg(),
        kind::ABS => |x, _| x.abs(),
        kind::SIGN => |x, _| x.signum(),
        kind::SQUARE => |x, _| x.wrapping_mul(x),
        kind::RELU => |x, _| x.max(0),
        kind::RELU_SQUARED => |x, _| x.max(0).wrapping_mul(x.max(0)),
        kind::LOGICAL_NOT => |x, _| i128::from(x == 0),
        kind::BIT_NOT => |x, dtype| {
            if dtype == DType::BOOL {
                i128::from(x == 0)
            } else {
                !x
            }
        },
        kind::IS_NAN | kind::IS_INF | kind::IMAG => |_, _| 0,
        kind::IS_FINITE => |_, _| 1,
        // Floor, ceil, round, real, conj.
        _ => |x, _| x,
    }
}

fn float_test(code: u32) -> fn(f64) -> bool {
    match code {
        kind::IS_NAN => f64::is_nan,
        kind::IS_INF => f64::is_infinite,
        kind::IS_FINITE => f64::is_finite,
        _ => |x| x == 0.0,
    }
}

fn float_function(code: u32) -> fn(f64) -> f64 {
    match code {
        kind::NEG => |x| -x,
        kind::ABS => f64::abs,
        kind::SIGN => |x| {
            if x > 0.0 {
                1.0
            } else if x < 0.0 {
                -1.0
            } else {
                0.0
            }
        },
        kind::EXP => f64::exp,
        kind::EXPM1 => f64::exp_m1,
        kind::LOG => f64::ln,
        kind::LOG2 => f64::log2,
        kind::LOG10 => f64::log10,
        kind::LOG1P => f64::ln_1p,
        kind::SQRT => f64::sqrt,
        kind::RSQRT => |x| 1.0 / x.sqrt(),
        kind::SQUARE => |x| x * x,
        kind::RECIPROCAL => |x| 1.0 / x,
        kind::SIN => f64::sin,
        kind::COS => f64::cos,
        kind::TAN => f64::tan,
        kind::ASIN => f64::asin,
        kind::ACOS => f64::acos,
        kind::ATAN => f64::atan,
        kind::SINH => f64::sinh,
        kind::COSH => f64::cosh,
        kind::TANH => f64::tanh,
        kind::ASINH => f64::asinh,
        kind::ACOSH => f64::acosh,
        kind::ATANH => f64::atanh,
        kind::ERF => special::erf,
        kind::ERFINV => special::erfinv,
        kind::SIGMOID => special::sigmoid,
        kind::FLOOR => f64::floor,
        kind::CEIL => f64::ceil,
        kind::ROUND => f64::round_ties_even,
        kind::IMAG => |_| 0.0,
        kind::SILU => |x| x * special::sigmoid(x),
        kind::GELU => special::gelu,
        kind::GELU_TANH => special::gelu_tanh,
        kind::GELU_QUICK => |x| x * special::sigmoid(1.702 * x),
        kind::RELU => |x| special::max_nan(x, 0.0),
        kind::RELU_SQUARED => |x| special::max_nan(x, 0.0).powi(2),
        kind::SOFTPLUS => special::softplus,
        kind::LOG_SIGMOID => |x| -special::softplus(-x),
        // Real and conj of a real number.
        _ => |x| x,
    }
}

/// Limits to `[low, high]`, both taken in the tensor's dtype; NaN stays NaN.
pub(super) fn clip(mode: Mode, a: &Value, low: f64, high: f64) -> Result<Value> {
    if a.dtype == DType::C64 {
        return Err(AbiError::invalid(
            "complex numbers have no order to clip by",
        ));
    }
    mode.value(a.dtype, a.shape.clone(), || {
        Ok(match &a.data {
            Data::Int(v) => {
                let (least, most) = int_range(a.dtype);
                let low = if low.is_nan() {
                    least
                } else {
                    float_to_int(a.dtype, low.ceil())
                };
                let high = if high.is_nan() {
                    most
                } else {
                    float_to_int(a.dtype, high.floor())
                };
                Data::Int(v.iter().map(|&x| x.max(low).min(high)).collect())
            }
            _ => Data::Real(
                a.reals()
                    .iter()
                    .map(|&x| special::min_nan(special::max_nan(x, low), high))
                    .collect(),
            ),
        })
    })
}

/// Reinterprets the bytes; the last axis scales with the element size.
pub(super) fn view(mode: Mode, a: &Value, dtype: DType) -> Result<Value> {
    class(dtype)?;
    let (from, to) = (a.dtype.size_bytes(), dtype.size_bytes());
    let mut shape = a.shape.clone();
    if from != to {
        let Some(last) = shape.last_mut() else {
            return Err(AbiError::invalid(format!(
                "a scalar of {} cannot be viewed as {}: the sizes differ",
                a.dtype.name(),
                dtype.name()
            )));
        };
        let bytes = *last * from;
        if !bytes.is_multiple_of(to) {
            return Err(AbiError::invalid(format!(
                "the last axis has {bytes} bytes, which is no multiple of {} for {}",
                to,
                dtype.name()
            )));
        }
        *last = bytes / to;
    }
    mode.value(dtype, shape, || decode(dtype, &encode(a)))
}
