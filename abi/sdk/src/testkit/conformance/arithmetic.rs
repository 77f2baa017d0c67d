//! Elementwise functions of two and three tensors, and with constants.

use mlxcel_abi::kinds::binary as kind;
use mlxcel_abi::{DType, status};

use super::FLOATS;
use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;

/// Shapes that broadcast: equal, scalar, both sides, ranks apart, empty.
const SHAPES: [(&[i64], &[i64]); 7] = [
    (&[2, 3], &[2, 3]),
    (&[5], &[]),
    (&[], &[]),
    (&[2, 1, 3], &[4, 1]),
    (&[3, 1], &[1, 4]),
    (&[7], &[2, 7]),
    (&[0, 3], &[1, 3]),
];

pub(super) fn run(suite: &mut Suite<'_>) {
    for (code, name) in kind::ALL {
        floats(suite, *code, name);
        integers(suite, *code, name);
        constants(suite, *code, name);
    }
    promotion(suite);
    extremes(suite);
    complex(suite);
    selection(suite);
    refusals(suite);
}

fn is_bitwise(code: u32) -> bool {
    matches!(
        code,
        kind::BIT_AND | kind::BIT_OR | kind::BIT_XOR | kind::SHL | kind::SHR
    )
}

fn tolerance(code: u32) -> Tolerance {
    match code {
        kind::ADD | kind::SUB | kind::MUL | kind::DIV => Tolerance::ROUNDED,
        kind::POW => Tolerance::units(16.0, 2.0),
        kind::REM => Tolerance::units(2.0, 2.0).floor(2.0),
        kind::ATAN2 | kind::LOGADDEXP => Tolerance::units(8.0, 3.0).floor(0.5),
        _ => Tolerance::EXACT,
    }
}

/// Operands on which a function is defined; the right one is never 0 for divisions.
fn operands(code: u32, dtype: DType, a: &[i64], b: &[i64]) -> (Array, Array) {
    let (left, right) = if dtype.is_float() {
        match code {
            kind::POW => (
                Array::spread(dtype, a, 0.1, 3.0, 1),
                Array::spread(dtype, b, -2.0, 2.0, 2),
            ),
            kind::DIV => (
                Array::usual(dtype, a, 1),
                Array::spread(dtype, b, 0.25, 3.0, 2),
            ),
            // Multiples of a quarter: the quotient's floor does not hang on its last bit.
            kind::FLOOR_DIV | kind::REM => {
                (quarters(dtype, a, 1, -15.0), quarters(dtype, b, 2, 1.0))
            }
            kind::EQ
            | kind::NE
            | kind::LT
            | kind::LE
            | kind::GT
            | kind::GE
            | kind::LOGICAL_AND
            | kind::LOGICAL_OR => (quarters(dtype, a, 1, -3.0), quarters(dtype, b, 2, -3.0)),
            _ => (Array::usual(dtype, a, 1), Array::usual(dtype, b, 2)),
        }
    } else {
        match code {
            kind::FLOOR_DIV | kind::REM | kind::DIV => (
                Array::usual(dtype, a, 1),
                Array::spread(dtype, b, 1.0, 4.9, 2),
            ),
            kind::POW | kind::SHL | kind::SHR => (
                Array::usual(dtype, a, 1),
                Array::spread(dtype, b, 0.0, 3.9, 2),
            ),
            _ => (Array::usual(dtype, a, 1), Array::usual(dtype, b, 2)),
        }
    };
    (left, right)
}

fn quarters(dtype: DType, dims: &[i64], seed: u64, low: f64) -> Array {
    let numbers = Array::spread(DType::F32, dims, low, low + 10.0, seed)
        .0
        .reals()
        .into_owned();
    Array::of(
        dtype,
        dims,
        numbers.into_iter().map(|x| (x * 4.0).floor() / 4.0),
    )
}

fn floats(suite: &mut Suite<'_>, code: u32, name: &str) {
    if is_bitwise(code) {
        return;
    }
    for dtype in FLOATS {
        for (a, b) in SHAPES {
            let (left, right) = operands(code, dtype, a, b);
            let case = format!("{name} {} {a:?} {b:?}", dtype.name());
            suite.check("binary", case, tolerance(code), |back| {
                left.on(back)?.binary(code, &right.on(back)?)
            });
        }
        for layout in [Layout::Transposed, Layout::Strided] {
            let (left, right) = operands(code, dtype, &[3, 4], &[3, 4]);
            let case = format!("{name} {} {layout:?}", dtype.name());
            suite.check("binary", case, tolerance(code), |back| {
                left.laid_out(back, layout)?.binary(code, &right.on(back)?)
            });
        }
    }
}

fn integers(suite: &mut Suite<'_>, code: u32, name: &str) {
    if matches!(code, kind::ATAN2 | kind::LOGADDEXP) {
        return;
    }
    for dtype in [DType::I32, DType::U32, DType::U8, DType::I64] {
        let (left, right) = operands(code, dtype, &[3, 5], &[5]);
        let case = format!("{name} {}", dtype.name());
        suite.check("binary", case, tolerance(code), |b| {
            left.on(b)?.binary(code, &right.on(b)?)
        });
    }
    if matches!(
        code,
        kind::LOGICAL_AND | kind::LOGICAL_OR | kind::EQ | kind::NE | kind::BIT_AND | kind::BIT_OR
    ) {
        let (left, right) = operands(code, DType::BOOL, &[2, 8], &[8]);
        suite.check("binary", format!("{name} bool"), Tolerance::EXACT, |b| {
            left.on(b)?.binary(code, &right.on(b)?)
        });
    }
    if code == kind::ADD {
        let (a, b) = (
            Array::ints(DType::U8, &[2], &[200, 5]),
            Array::ints(DType::U8, &[2], &[100, 250]),
        );
        suite.check("binary", "add u8 wraps", Tolerance::EXACT, |back| {
            a.on(back)?.add(&b.on(back)?)
        });
    }
}

fn constants(suite: &mut Suite<'_>, code: u32, name: &str) {
    let dtypes: &[DType] = if is_bitwise(code) {
        &[DType::I32, DType::U8]
    } else {
        &[DType::F32, DType::F16, DType::BF16, DType::I32]
    };
    for &dtype in dtypes {
        if matches!(code, kind::ATAN2 | kind::LOGADDEXP) && !dtype.is_float() {
            continue;
        }
        let (left, right) = operands(code, dtype, &[3, 4], &[3, 4]);
        let case = format!("{name} {} with 2", dtype.name());
        suite.check("binary_scalar", case, tolerance(code), |b| {
            left.on(b)?.binary_scalar(code, 2.0)
        });
        let case = format!("{name} 2 with {}", dtype.name());
        suite.check("binary_scalar", case, tolerance(code), |b| {
            right.on(b)?.scalar_binary(code, 2.0)
        });
    }
    // The constant is one of the tensor's dtype: a half activation stays half.
    if matches!(code, kind::ADD | kind::MUL) {
        for dtype in [DType::F16, DType::BF16] {
            let array = Array::usual(dtype, &[9], 3);
            let case = format!("{name} {} with 0.1", dtype.name());
            suite.check("binary_scalar", case, Tolerance::units(1.0, 2.0), |b| {
                array.on(b)?.binary_scalar(code, 0.1)
            });
        }
    }
}

/// Two dtypes meet in a third as in MLX's table.
fn promotion(suite: &mut Suite<'_>) {
    let pairs = [
        (DType::F16, DType::BF16),
        (DType::F16, DType::F32),
        (DType::BF16, DType::F32),
        (DType::I32, DType::F16),
        (DType::I64, DType::BF16),
        (DType::BOOL, DType::F16),
        (DType::U8, DType::I8),
        (DType::U8, DType::I32),
        (DType::U32, DType::I32),
        (DType::BOOL, DType::I32),
        (DType::I32, DType::I64),
        (DType::F32, DType::C64),
    ];
    for (a, b) in pairs {
        let (left, right) = (Array::usual(a, &[6], 4), Array::usual(b, &[6], 5));
        let case = format!("add {} and {}", a.name(), b.name());
        suite.check("binary", case, Tolerance::ROUNDED, |back| {
            left.on(back)?.add(&right.on(back)?)
        });
        let case = format!("mul {} and {}", b.name(), a.name());
        let near = Tolerance::units(4.0, 4.0).floor(1.0);
        suite.check("binary", case, near, |back| {
            right.on(back)?.mul(&left.on(back)?)
        });
    }
}

fn extremes(suite: &mut Suite<'_>) {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let left = [nan, 1.0, inf, -inf, inf, 0.0, nan, 1.0];
    let right = [1.0, nan, inf, inf, 1.0, 0.0, nan, -inf];
    for code in [
        kind::ADD,
        kind::SUB,
        kind::MUL,
        kind::DIV,
        kind::MIN,
        kind::MAX,
        kind::EQ,
        kind::NE,
        kind::LT,
        kind::LE,
        kind::GT,
        kind::GE,
    ] {
        for dtype in FLOATS {
            let (a, b) = (Array::of(dtype, &[8], left), Array::of(dtype, &[8], right));
            let case = format!("{} {} of extremes", kind::name(code), dtype.name());
            suite.check("binary", case, tolerance(code), |back| {
                a.on(back)?.binary(code, &b.on(back)?)
            });
        }
    }
    let (a, b) = (
        Array::of(DType::F32, &[3], [-inf, 500.0, inf]),
        Array::of(DType::F32, &[3], [-inf, -500.0, 1.0]),
    );
    suite.check(
        "binary",
        "logaddexp far apart",
        tolerance(kind::LOGADDEXP),
        |back| a.on(back)?.binary(kind::LOGADDEXP, &b.on(back)?),
    );
}

fn complex(suite: &mut Suite<'_>) {
    let near = Tolerance::units(8.0, 8.0).floor(4.0);
    for code in [kind::ADD, kind::SUB, kind::MUL, kind::DIV] {
        let (a, b) = (Array::complex(&[2, 3], 6), Array::complex(&[3], 7));
        let case = format!("{} c64", kind::name(code));
        suite.check("binary", case, near, |back| {
            a.on(back)?.binary(code, &b.on(back)?)
        });
    }
}

fn selection(suite: &mut Suite<'_>) {
    let shapes: [[&[i64]; 3]; 4] = [
        [&[3, 4], &[3, 4], &[3, 4]],
        [&[3, 1], &[1, 4], &[]],
        [&[], &[5], &[5]],
        [&[0], &[1], &[0]],
    ];
    for dtype in [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::I32,
        DType::U8,
        DType::BOOL,
        DType::I64,
    ] {
        for [c, a, b] in shapes {
            let cond = Array::usual(DType::BOOL, c, 8);
            let (left, right) = (Array::usual(dtype, a, 9), Array::usual(dtype, b, 10));
            let case = format!("{} {c:?} {a:?} {b:?}", dtype.name());
            suite.check("select", case, Tolerance::EXACT, |back| {
                cond.on(back)?.select(&left.on(back)?, &right.on(back)?)
            });
        }
    }
    let cond = Array::of(DType::F32, &[3], [0.0, 2.0, f64::NAN]);
    let (a, b) = (
        Array::of(DType::F16, &[3], [1.0; 3]),
        Array::of(DType::F32, &[3], [f64::NAN; 3]),
    );
    suite.check(
        "select",
        "numbers as conditions, dtypes promoted",
        Tolerance::EXACT,
        |back| cond.on(back)?.select(&a.on(back)?, &b.on(back)?),
    );
}

fn refusals(suite: &mut Suite<'_>) {
    let (a, b) = (
        Array::usual(DType::F32, &[2, 3], 11),
        Array::usual(DType::F32, &[2, 4], 12),
    );
    suite.refuses(
        "binary",
        "shapes that do not broadcast",
        status::INVALID_ARGUMENT,
        |back| a.on(back)?.add(&b.on(back)?),
    );
    suite.refuses(
        "binary",
        "an unknown function",
        status::UNIMPLEMENTED,
        |back| a.on(back)?.binary(9999, &a.on(back)?),
    );
    suite.refuses(
        "binary",
        "bit_and of floats",
        status::INVALID_ARGUMENT,
        |back| a.on(back)?.binary(kind::BIT_AND, &a.on(back)?),
    );
    suite.refuses(
        "binary_scalar",
        "an unknown function",
        status::UNIMPLEMENTED,
        |back| a.on(back)?.binary_scalar(9999, 1.0),
    );
    suite.refuses(
        "select",
        "shapes that do not broadcast",
        status::INVALID_ARGUMENT,
        |back| a.on(back)?.select(&a.on(back)?, &b.on(back)?),
    );
}
