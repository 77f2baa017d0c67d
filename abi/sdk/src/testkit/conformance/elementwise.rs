//! Elementwise functions of one tensor.

use mlxcel_abi::kinds::unary as kind;
use mlxcel_abi::{DType, status};

use super::FLOATS;
use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::{Tolerance, of_unary};

pub(super) fn run(suite: &mut Suite<'_>) {
    for (code, name) in kind::ALL {
        floats(suite, *code, name);
        integers(suite, *code, name);
        extremes(suite, *code, name);
    }
    complex(suite);
    clips(suite);
    refusals(suite);
}

/// Numbers on which a function is defined and tame.
fn domain(code: u32) -> (f64, f64) {
    match code {
        kind::LOG | kind::LOG2 | kind::LOG10 | kind::SQRT | kind::RSQRT => (0.01, 20.0),
        kind::LOG1P => (-0.9, 20.0),
        kind::ASIN | kind::ACOS | kind::ATANH | kind::ERFINV => (-0.99, 0.99),
        kind::ACOSH => (1.0, 20.0),
        kind::RECIPROCAL => (0.1, 8.0),
        kind::TAN => (-1.4, 1.4),
        kind::SIN | kind::COS => (-20.0, 20.0),
        kind::ERF => (-3.0, 3.0),
        _ => (-8.0, 8.0),
    }
}

fn is_complex_only(code: u32) -> bool {
    matches!(code, kind::REAL | kind::IMAG | kind::CONJ)
}

fn floats(suite: &mut Suite<'_>, code: u32, name: &str) {
    if code == kind::BIT_NOT || is_complex_only(code) {
        return;
    }
    let (low, high) = domain(code);
    for dtype in FLOATS {
        for dims in [&[][..], &[37], &[2, 3, 5], &[0]] {
            let array = Array::spread(dtype, dims, low, high, u64::from(code));
            let case = format!("{name} {} {dims:?}", dtype.name());
            suite.check("unary", case, of_unary(code), |b| array.on(b)?.unary(code));
        }
        for layout in [Layout::Transposed, Layout::Strided] {
            let array = Array::spread(dtype, &[3, 5], low, high, 7);
            let case = format!("{name} {} {layout:?}", dtype.name());
            suite.check("unary", case, of_unary(code), |b| {
                array.laid_out(b, layout)?.unary(code)
            });
        }
    }
}

/// Functions that are defined on integers keep them; the others give f32.
fn integers(suite: &mut Suite<'_>, code: u32, name: &str) {
    if is_complex_only(code) {
        return;
    }
    let keeps = [
        kind::NEG,
        kind::ABS,
        kind::SIGN,
        kind::SQUARE,
        kind::FLOOR,
        kind::CEIL,
        kind::ROUND,
        kind::BIT_NOT,
        kind::LOGICAL_NOT,
        kind::IS_NAN,
        kind::IS_INF,
        kind::IS_FINITE,
    ];
    let becomes_float = [
        kind::EXP,
        kind::LOG,
        kind::SQRT,
        kind::RSQRT,
        kind::RECIPROCAL,
        kind::SIN,
        kind::COS,
        kind::TANH,
        kind::SIGMOID,
        kind::ERF,
    ];
    let dtypes: &[DType] = match code {
        kind::LOGICAL_NOT | kind::BIT_NOT => &[
            DType::BOOL,
            DType::U8,
            DType::I8,
            DType::U32,
            DType::I32,
            DType::I64,
        ],
        code if keeps.contains(&code) => {
            &[DType::U8, DType::I8, DType::U32, DType::I32, DType::I64]
        }
        code if becomes_float.contains(&code) => &[DType::BOOL, DType::U8, DType::I32],
        _ => return,
    };
    for &dtype in dtypes {
        let array = match code {
            kind::LOG | kind::RSQRT | kind::RECIPROCAL | kind::SQRT if dtype == DType::BOOL => {
                Array::of(dtype, &[3], [1.0; 3])
            }
            kind::LOG | kind::RSQRT | kind::RECIPROCAL | kind::SQRT => {
                Array::spread(dtype, &[3, 4], 1.0, 9.9, 8)
            }
            _ => Array::usual(dtype, &[3, 4], 8),
        };
        let case = format!("{name} {}", dtype.name());
        suite.check("unary", case, of_unary(code), |b| array.on(b)?.unary(code));
    }
}

/// NaN stays NaN, infinities and zeros have their limits.
fn extremes(suite: &mut Suite<'_>, code: u32, name: &str) {
    let all = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0];
    let points: &[f64] = match code {
        kind::NEG
        | kind::ABS
        | kind::EXP
        | kind::EXPM1
        | kind::SQUARE
        | kind::ATAN
        | kind::SINH
        | kind::COSH
        | kind::TANH
        | kind::ASINH
        | kind::ERF
        | kind::SIGMOID
        | kind::FLOOR
        | kind::CEIL
        | kind::ROUND
        | kind::IS_NAN
        | kind::IS_INF
        | kind::IS_FINITE
        | kind::RELU
        | kind::RECIPROCAL
        | kind::SQRT
        | kind::LOG
        | kind::LOG2
        | kind::LOG10
        | kind::RSQRT => &all,
        kind::SIN | kind::COS | kind::LOG1P | kind::ASIN | kind::ACOS => &[f64::NAN, 0.0, -0.0],
        // What the sign of NaN is, and inf * 0 inside a gate, is left open.
        kind::SIGN => &all[1..],
        kind::SILU | kind::GELU | kind::GELU_TANH | kind::GELU_QUICK | kind::SOFTPLUS => {
            &[f64::NAN, 0.0]
        }
        _ => return,
    };
    for dtype in FLOATS {
        let array = Array::of(dtype, &[points.len() as i64], points.iter().copied());
        let case = format!("{name} {} of extremes", dtype.name());
        suite.check("unary", case, of_unary(code), |b| array.on(b)?.unary(code));
    }
    if code == kind::ROUND {
        let ties = Array::of(DType::F32, &[6], [0.5, 1.5, 2.5, -0.5, -1.5, 8388609.0]);
        suite.check("unary", "round ties to even", Tolerance::EXACT, |b| {
            ties.on(b)?.round()
        });
    }
    if matches!(
        code,
        kind::SIGMOID | kind::TANH | kind::SILU | kind::GELU | kind::GELU_TANH | kind::SOFTPLUS
    ) {
        let far = Array::of(DType::F32, &[4], [-100.0, 100.0, -1000.0, 1000.0]);
        let case = format!("{name} f32 far out");
        suite.check("unary", case, of_unary(code), |b| far.on(b)?.unary(code));
    }
}

fn complex(suite: &mut Suite<'_>) {
    let tolerance = Tolerance::units(8.0, 8.0).floor(1.0);
    for code in [
        kind::NEG,
        kind::ABS,
        kind::EXP,
        kind::SQUARE,
        kind::REAL,
        kind::IMAG,
        kind::CONJ,
    ] {
        let array = Array::complex(&[2, 5], 9);
        let case = format!("{} c64", kind::name(code));
        suite.check("unary", case, tolerance, |b| array.on(b)?.unary(code));
    }
    let real = Array::usual(DType::F32, &[4], 10);
    for code in [kind::REAL, kind::IMAG, kind::CONJ] {
        let case = format!("{} of real numbers", kind::name(code));
        suite.check("unary", case, Tolerance::EXACT, |b| real.on(b)?.unary(code));
    }
}

fn clips(suite: &mut Suite<'_>) {
    let bounds = [
        (-1.0, 1.0),
        (0.5, 0.5),
        (f64::NEG_INFINITY, 1.0),
        (-0.5, f64::INFINITY),
    ];
    for dtype in FLOATS {
        for (low, high) in bounds {
            let array = Array::usual(dtype, &[3, 7], 11);
            let case = format!("{} to [{low}, {high}]", dtype.name());
            suite.check("clip", case, Tolerance::ROUNDED, |b| {
                array.on(b)?.clip(low, high)
            });
        }
        let odd = Array::of(
            dtype,
            &[4],
            [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0],
        );
        let case = format!("{} of extremes", dtype.name());
        suite.check("clip", case, Tolerance::ROUNDED, |b| {
            odd.on(b)?.clip(-1.0, 1.0)
        });
    }
    for dtype in [DType::I32, DType::U8, DType::I64] {
        let array = Array::usual(dtype, &[20], 12);
        let case = format!("{} to [1, 5]", dtype.name());
        suite.check("clip", case, Tolerance::EXACT, |b| {
            array.on(b)?.clip(1.0, 5.0)
        });
    }
}

fn refusals(suite: &mut Suite<'_>) {
    let array = Array::usual(DType::F32, &[2], 13);
    suite.refuses("unary", "an unknown function", status::UNIMPLEMENTED, |b| {
        array.on(b)?.unary(9999)
    });
    suite.refuses(
        "unary",
        "bit_not of floats",
        status::INVALID_ARGUMENT,
        |b| array.on(b)?.unary(kind::BIT_NOT),
    );
}
