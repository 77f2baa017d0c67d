//! Arithmetic of complex numbers, as pairs of real and imaginary part.

use mlxcel_abi::kinds::{binary, unary as kind};
use mlxcel_abi::{AbiError, Result};

use super::value::Data;

type C = [f64; 2];

fn mul(a: C, b: C) -> C {
    [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]]
}

fn div(a: C, b: C) -> C {
    let norm = b[0] * b[0] + b[1] * b[1];
    let top = mul(a, [b[0], -b[1]]);
    [top[0] / norm, top[1] / norm]
}

fn abs(a: C) -> f64 {
    a[0].hypot(a[1])
}

fn sqrt(a: C) -> C {
    let size = abs(a);
    let re = ((size + a[0]) / 2.0).max(0.0).sqrt();
    let im = ((size - a[0]) / 2.0).max(0.0).sqrt();
    [re, im.copysign(a[1])]
}

const SUPPORTED: &[u32] = &[
    kind::NEG,
    kind::ABS,
    kind::SIGN,
    kind::EXP,
    kind::LOG,
    kind::SQRT,
    kind::SQUARE,
    kind::RECIPROCAL,
    kind::SIN,
    kind::COS,
    kind::REAL,
    kind::IMAG,
    kind::CONJ,
    kind::LOGICAL_NOT,
    kind::IS_NAN,
    kind::IS_INF,
    kind::IS_FINITE,
];

/// Whether this backend has the function for complex numbers.
pub(super) fn supports_unary(code: u32) -> Result<()> {
    if SUPPORTED.contains(&code) {
        return Ok(());
    }
    Err(AbiError::unimplemented(format!(
        "{} of complex numbers is not in this backend",
        kind::name(code)
    )))
}

pub(super) fn unary(code: u32, a: &[C]) -> Result<Data> {
    let f: fn(C) -> C = match code {
        kind::ABS => return Ok(Data::Real(a.iter().map(|&x| abs(x)).collect())),
        kind::REAL => return Ok(Data::Real(a.iter().map(|x| x[0]).collect())),
        kind::IMAG => return Ok(Data::Real(a.iter().map(|x| x[1]).collect())),
        kind::LOGICAL_NOT => return Ok(test(a, |x| x == [0.0, 0.0])),
        kind::IS_NAN => return Ok(test(a, |x| x[0].is_nan() || x[1].is_nan())),
        kind::IS_INF => return Ok(test(a, |x| x[0].is_infinite() || x[1].is_infinite())),
        kind::IS_FINITE => return Ok(test(a, |x| x[0].is_finite() && x[1].is_finite())),
        kind::NEG => |x| [-x[0], -x[1]],
        kind::CONJ => |x| [x[0], -x[1]],
        kind::SIGN => |x| {
            let size = abs(x);
            if size == 0.0 {
                x
            } else {
                [x[0] / size, x[1] / size]
            }
        },
        kind::EXP => |x| [x[0].exp() * x[1].cos(), x[0].exp() * x[1].sin()],
        kind::LOG => |x| [abs(x).ln(), x[1].atan2(x[0])],
        kind::SQRT => sqrt,
        kind::SQUARE => |x| mul(x, x),
        kind::RECIPROCAL => |x| div([1.0, 0.0], x),
        kind::SIN => |x| [x[0].sin() * x[1].cosh(), x[0].cos() * x[1].sinh()],
        kind::COS => |x| [x[0].cos() * x[1].cosh(), -x[0].sin() * x[1].sinh()],
        other => {
            supports_unary(other)?;
            |x| x
        }
    };
    Ok(Data::Complex(a.iter().map(|&x| f(x)).collect()))
}

fn test(a: &[C], f: fn(C) -> bool) -> Data {
    Data::Int(a.iter().map(|&x| i128::from(f(x))).collect())
}

/// Whether this backend has the function for complex numbers.
pub(super) fn supports_binary(code: u32) -> Result<()> {
    use binary::{ADD, DIV, EQ, LOGICAL_AND, LOGICAL_OR, MUL, NE, SUB};
    if [ADD, SUB, MUL, DIV, EQ, NE, LOGICAL_AND, LOGICAL_OR].contains(&code) {
        return Ok(());
    }
    Err(AbiError::unimplemented(format!(
        "{} of complex numbers is not in this backend",
        binary::name(code)
    )))
}

/// Functions that give complex numbers; the operands are broadcast already.
pub(super) fn binary(code: u32, a: &[C], b: &[C]) -> Result<Data> {
    let f: fn(C, C) -> C = match code {
        binary::ADD => |a, b| [a[0] + b[0], a[1] + b[1]],
        binary::SUB => |a, b| [a[0] - b[0], a[1] - b[1]],
        binary::MUL => mul,
        binary::DIV => div,
        binary::EQ => return Ok(compare(a, b, |a, b| a == b)),
        binary::NE => return Ok(compare(a, b, |a, b| a != b)),
        other => return supports_binary(other).map(|()| Data::Absent),
    };
    Ok(Data::Complex(
        a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect(),
    ))
}

fn compare(a: &[C], b: &[C], f: fn(C, C) -> bool) -> Data {
    Data::Int(
        a.iter()
            .zip(b)
            .map(|(&a, &b)| i128::from(f(a, b)))
            .collect(),
    )
}
