//! Elementwise functions of two and three broadcast tensors.

use mlxcel_abi::kinds::binary as kind;
use mlxcel_abi::{AbiError, DType, Result};

use super::complex;
use super::number::{Class, at_least_float, class, promote, round_float};
use super::shape;
use super::special;
use super::value::{Data, Mode, Value};

/// Type the operands are brought to, and type of the result.
fn dtypes(code: u32, a: DType, b: DType) -> Result<(DType, DType)> {
    let common = promote(a, b);
    match code {
        kind::ADD
        | kind::SUB
        | kind::MUL
        | kind::FLOOR_DIV
        | kind::REM
        | kind::POW
        | kind::MIN
        | kind::MAX => Ok((common, common)),
        kind::DIV | kind::ATAN2 | kind::LOGADDEXP => {
            let float = at_least_float(common);
            Ok((float, float))
        }
        kind::EQ | kind::NE | kind::LT | kind::LE | kind::GT | kind::GE => {
            Ok((common, DType::BOOL))
        }
        kind::LOGICAL_AND | kind::LOGICAL_OR => Ok((DType::BOOL, DType::BOOL)),
        kind::BIT_AND | kind::BIT_OR | kind::BIT_XOR | kind::SHL | kind::SHR => {
            if matches!(class(common)?, Class::Float | Class::Complex) {
                return Err(AbiError::invalid(format!(
                    "{} needs integers or bools, found {} and {}",
                    kind::name(code),
                    a.name(),
                    b.name()
                )));
            }
            // Shifted bools would not fit a bool: MLX takes u8.
            let shifts = matches!(code, kind::SHL | kind::SHR);
            let common = if shifts && common == DType::BOOL {
                DType::U8
            } else {
                common
            };
            Ok((common, common))
        }
        code => Err(AbiError::unimplemented(format!(
            "elementwise function {code} of two tensors is not known to this backend"
        ))),
    }
}

/// One of [`mlxcel_abi::kinds::binary`].
pub(super) fn binary(mode: Mode, code: u32, a: &Value, b: &Value) -> Result<Value> {
    let (common, result) = dtypes(code, a.dtype, b.dtype)?;
    if promote(a.dtype, b.dtype) == DType::C64 {
        complex::supports_binary(code)?;
    }
    let out = shape::broadcast(&[&a.shape, &b.shape])?;
    mode.value(result, out.clone(), || {
        let a = spread(mode, a, common, &out)?;
        let b = spread(mode, b, common, &out)?;
        match class(common)? {
            Class::Complex => complex::binary(code, &a.complexes(), &b.complexes()),
            Class::Float if result == DType::BOOL => {
                let f = float_comparison(code);
                let pairs = a
                    .reals()
                    .iter()
                    .zip(b.reals().iter())
                    .map(|(&a, &b)| i128::from(f(a, b)))
                    .collect();
                Ok(Data::Int(pairs))
            }
            Class::Float => {
                let f = float_function(code);
                let pairs = a
                    .reals()
                    .iter()
                    .zip(b.reals().iter())
                    .map(|(&a, &b)| f(a, b, result))
                    .collect();
                Ok(Data::Real(pairs))
            }
            Class::Int | Class::Bool => {
                let f = int_function(code);
                Ok(Data::Int(
                    a.ints()?
                        .iter()
                        .zip(b.ints()?)
                        .map(|(&a, &b)| f(a, b, common))
                        .collect(),
                ))
            }
        }
    })
}

/// As [`binary`] with a constant of `a`'s dtype.
pub(super) fn binary_scalar(
    mode: Mode,
    code: u32,
    a: &Value,
    scalar: f64,
    first: bool,
) -> Result<Value> {
    let constant = full(mode, scalar, a.dtype, Vec::new())?;
    if first {
        binary(mode, code, &constant, a)
    } else {
        binary(mode, code, a, &constant)
    }
}

/// Constant tensor.
pub(super) fn full(mode: Mode, x: f64, dtype: DType, dims: Vec<usize>) -> Result<Value> {
    let count = shape::count(&dims)?;
    mode.value(dtype, dims, || Data::filled(dtype, x, count))
}

/// `cond ? a : b`, broadcast.
pub(super) fn select(mode: Mode, cond: &Value, a: &Value, b: &Value) -> Result<Value> {
    let dtype = promote(a.dtype, b.dtype);
    let out = shape::broadcast(&[&cond.shape, &a.shape, &b.shape])?;
    mode.value(dtype, out.clone(), || {
        let cond = spread(mode, cond, DType::BOOL, &out)?;
        let mut chosen = spread(mode, b, dtype, &out)?.data;
        let a = spread(mode, a, dtype, &out)?;
        let yes: Vec<usize> = cond
            .ints()?
            .iter()
            .enumerate()
            .filter(|(_, x)| **x != 0)
            .map(|(i, _)| i)
            .collect();
        chosen.put(&yes, &a.data.pick(&yes))?;
        Ok(chosen)
    })
}

/// `a` in another dtype, repeated to the shape `out`.
fn spread(mode: Mode, a: &Value, dtype: DType, out: &[usize]) -> Result<Value> {
    let mut value = a.cast(mode, dtype)?;
    if value.shape != out {
        value.data = value.data.pick(&shape::broadcast_positions(&a.shape, out));
        value.shape = out.to_vec();
    }
    Ok(value)
}

fn float_comparison(code: u32) -> fn(f64, f64) -> bool {
    match code {
        kind::EQ => |a, b| a == b,
        kind::NE => |a, b| a != b,
        kind::LT => |a, b| a < b,
        kind::LE => |a, b| a <= b,
        kind::GT => |a, b| a > b,
        _ => |a, b| a >= b,
    }
}

fn float_function(code: u32) -> fn(f64, f64, DType) -> f64 {
    match code {
        kind::ADD => |a, b, _| a + b,
        kind::SUB => |a, b, _| a - b,
        kind::MUL => |a, b, _| a * b,
        kind::DIV => |a, b, _| a / b,
        // The quotient is an element of the type before it is floored.
        kind::FLOOR_DIV => |a, b, dtype| round_float(dtype, a / b).floor(),
        kind::REM => |a, b, _| {
            let rest = a % b;
            if rest != 0.0 && (rest < 0.0) != (b < 0.0) {
                rest + b
            } else {
                rest
            }
        },
        kind::POW => |a, b, _| a.powf(b),
        kind::MIN => |a, b, _| special::min_nan(a, b),
        kind::MAX => |a, b, _| special::max_nan(a, b),
        kind::ATAN2 => |a, b, _| a.atan2(b),
        _ => |a, b, _| special::logaddexp(a, b),
    }
}

/// Division by zero gives 0 and shifts beyond the width give 0 (or the sign): the interface leaves
/// both open, and a test kit must not crash on them.
fn int_function(code: u32) -> fn(i128, i128, DType) -> i128 {
    match code {
        kind::ADD => |a, b, _| a.wrapping_add(b),
        kind::SUB => |a, b, _| a.wrapping_sub(b),
        kind::MUL => |a, b, _| a.wrapping_mul(b),
        kind::FLOOR_DIV => |a, b, _| {
            if b == 0 {
                0
            } else {
                a.div_euclid(b) - i128::from(b < 0 && a.rem_euclid(b) != 0)
            }
        },
        kind::REM => |a, b, _| {
            let rest = if b == 0 { 0 } else { a % b };
            if rest != 0 && (rest < 0) != (b < 0) {
                rest + b
            } else {
                rest
            }
        },
        kind::POW => |a, b, _| match b {
            b if b >= 0 => a.wrapping_pow(b.min(i128::from(u32::MAX)) as u32),
            b if a == -1 => 1 - 2 * b.rem_euclid(2),
            _ => i128::from(a == 1),
        },
        kind::MIN => |a, b, _| a.min(b),
        kind::MAX => |a, b, _| a.max(b),
        kind::EQ => |a, b, _| i128::from(a == b),
        kind::NE => |a, b, _| i128::from(a != b),
        kind::LT => |a, b, _| i128::from(a < b),
        kind::LE => |a, b, _| i128::from(a <= b),
        kind::GT => |a, b, _| i128::from(a > b),
        kind::GE => |a, b, _| i128::from(a >= b),
        kind::LOGICAL_AND | kind::BIT_AND => |a, b, _| a & b,
        kind::LOGICAL_OR | kind::BIT_OR => |a, b, _| a | b,
        kind::BIT_XOR => |a, b, _| a ^ b,
        kind::SHL => |a, b, dtype| if shift_fits(b, dtype) { a << b } else { 0 },
        _ => |a, b, dtype| {
            if shift_fits(b, dtype) {
                a >> b
            } else {
                a.signum().min(0)
            }
        },
    }
}

fn shift_fits(by: i128, dtype: DType) -> bool {
    by >= 0 && by < 8 * dtype.size_bytes() as i128
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integer_division_floors_and_the_remainder_follows_the_divisor() {
        let (div, rem) = (int_function(kind::FLOOR_DIV), int_function(kind::REM));
        for a in -9..=9i128 {
            for b in [-4, -3, -1, 1, 2, 5i128] {
                let (q, r) = (div(a, b, DType::I32), rem(a, b, DType::I32));
                assert_eq!(q * b + r, a, "{a} / {b}");
                assert!(r == 0 || (r < 0) == (b < 0), "{a} % {b} = {r}");
                assert_eq!(q as f64, (a as f64 / b as f64).floor());
            }
        }
        assert_eq!(div(5, 0, DType::I32), 0);
    }

    #[test]
    fn float_remainder_has_the_sign_of_the_divisor() {
        let rem = float_function(kind::REM);
        assert_eq!(rem(-5.0, 3.0, DType::F32), 1.0);
        assert_eq!(rem(5.0, -3.0, DType::F32), -1.0);
        assert!(rem(3.0, 0.0, DType::F32).is_nan());
    }
}
