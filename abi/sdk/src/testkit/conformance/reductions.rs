//! Reductions, running reductions and softmax.

use mlxcel_abi::kinds::{cumulative, reduce as kind};
use mlxcel_abi::{DType, status};

use super::FLOATS;
use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;

/// Shapes with the axes to reduce; none means all.
const AXES: [(&[i64], &[i32]); 9] = [
    (&[7], &[]),
    (&[3, 5], &[0]),
    (&[3, 5], &[-1]),
    (&[2, 3, 4], &[1]),
    (&[2, 3, 4], &[0, 2]),
    (&[2, 3, 4], &[-1, 0]),
    (&[2, 3, 4], &[]),
    (&[3, 130], &[1]),
    (&[1, 1], &[0]),
];

pub(super) fn run(suite: &mut Suite<'_>) {
    for (code, name) in kind::ALL {
        floats(suite, *code, name);
        integers(suite, *code, name);
    }
    extremes(suite);
    nothing(suite);
    half_sums(suite);
    running(suite);
    softmaxes(suite);
    refusals(suite);
}

fn tolerance(code: u32, count: usize) -> Tolerance {
    match code {
        kind::SUM => Tolerance::accumulated(count, 2.0),
        kind::MEAN | kind::VAR => Tolerance::units(8.0, 2.0).floor(0.5),
        kind::PROD => Tolerance::units(32.0, 2.0),
        kind::LOGSUMEXP => Tolerance::units(8.0, 2.0).floor(1.0),
        _ => Tolerance::EXACT,
    }
}

fn numbers(code: u32, dtype: DType, dims: &[i64]) -> Array {
    match code {
        kind::PROD if dtype.is_float() => Array::spread(dtype, dims, 0.8, 1.2, 1),
        kind::PROD => Array::spread(dtype, dims, 1.0, 2.99, 1),
        kind::ALL_OF | kind::ANY_OF => Array::spread(dtype, dims, 0.0, 1.9, 1),
        _ => Array::usual(dtype, dims, 1),
    }
}

fn floats(suite: &mut Suite<'_>, code: u32, name: &str) {
    for dtype in FLOATS {
        for (dims, axes) in AXES {
            let array = numbers(code, dtype, dims);
            for keep in [false, true] {
                let kept = if keep { " kept" } else { "" };
                let case = format!("{name} {} {dims:?} over {axes:?}{kept}", dtype.name());
                let near = tolerance(code, array.0.count());
                suite.check("reduce", case, near, |b| {
                    array.on(b)?.reduce(code, axes, keep)
                });
            }
        }
        for layout in [Layout::Transposed, Layout::Strided] {
            for axis in [0, 1, 2] {
                let array = numbers(code, dtype, &[3, 4, 5]);
                let case = format!("{name} {} {layout:?} over {axis}", dtype.name());
                suite.check("reduce", case, tolerance(code, 5), |b| {
                    array.laid_out(b, layout)?.reduce(code, &[axis], false)
                });
            }
        }
    }
}

/// Narrow integers are left out of sums: their type there is not settled by the contract.
fn integers(suite: &mut Suite<'_>, code: u32, name: &str) {
    let dtypes: &[DType] = match code {
        kind::SUM | kind::PROD => &[DType::I32, DType::I64, DType::U32],
        kind::MAX | kind::MIN => &[DType::I32, DType::I64, DType::U8, DType::I8, DType::U32],
        kind::ALL_OF | kind::ANY_OF => &[DType::BOOL, DType::I32, DType::U8],
        _ => return,
    };
    for &dtype in dtypes {
        for (dims, axes) in [(&[4, 6][..], &[1][..]), (&[4, 6], &[0]), (&[2, 3], &[])] {
            let array = numbers(code, dtype, dims);
            let case = format!("{name} {} {dims:?} over {axes:?}", dtype.name());
            suite.check("reduce", case, Tolerance::EXACT, |b| {
                array.on(b)?.reduce(code, axes, false)
            });
        }
    }
}

fn extremes(suite: &mut Suite<'_>) {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let rows = [
        1.0, nan, 2.0, 1.0, inf, 2.0, 1.0, -inf, 2.0, -inf, -inf, -inf,
    ];
    for dtype in FLOATS {
        let array = Array::of(dtype, &[4, 3], rows);
        for code in [kind::SUM, kind::MEAN, kind::MAX, kind::MIN, kind::LOGSUMEXP] {
            let case = format!("{} {} of extremes", kind::name(code), dtype.name());
            suite.check("reduce", case, tolerance(code, 3), |b| {
                array.on(b)?.reduce(code, &[1], false)
            });
        }
    }
    let large = Array::of(DType::F32, &[3], [1000.0, 1000.5, 999.0]);
    suite.check(
        "reduce",
        "logsumexp of large numbers",
        tolerance(kind::LOGSUMEXP, 3),
        |b| large.on(b)?.reduce(kind::LOGSUMEXP, &[0], false),
    );
}

/// Sums over nothing are 0, products 1; extremes over nothing are refused.
fn nothing(suite: &mut Suite<'_>) {
    for code in [kind::SUM, kind::PROD, kind::ALL_OF, kind::ANY_OF] {
        let array = Array::usual(DType::F32, &[2, 0], 2);
        let case = format!("{} over an empty axis", kind::name(code));
        suite.check("reduce", case, Tolerance::EXACT, |b| {
            array.on(b)?.reduce(code, &[1], false)
        });
    }
    for code in [kind::SUM, kind::MAX] {
        let array = Array::usual(DType::F32, &[0, 3], 2);
        let case = format!("{} of no rows", kind::name(code));
        suite.check("reduce", case, Tolerance::EXACT, |b| {
            array.on(b)?.reduce(code, &[1], true)
        });
    }
    let array = Array::usual(DType::F32, &[2, 0], 2);
    for code in [kind::MAX, kind::MIN] {
        let case = format!("{} over an empty axis", kind::name(code));
        suite.refuses("reduce", case, status::INVALID_ARGUMENT, |b| {
            array.on(b)?.reduce(code, &[1], false)
        });
    }
}

/// A half accumulator would stop growing at 2048 (f16) or 256 (bf16).
fn half_sums(suite: &mut Suite<'_>) {
    for dtype in [DType::F16, DType::BF16] {
        let ones = Array::of(dtype, &[2, 5000], core::iter::repeat_n(1.0, 10_000));
        for code in [kind::SUM, kind::MEAN] {
            for axes in [&[1][..], &[]] {
                let case = format!(
                    "{} of many {} ones over {axes:?}",
                    kind::name(code),
                    dtype.name()
                );
                suite.check("reduce", case, Tolerance::units(1.0, 1.0), |b| {
                    ones.on(b)?.reduce(code, axes, false)
                });
            }
        }
        let rows = Array::of(dtype, &[3000, 2], core::iter::repeat_n(1.0, 6000));
        let case = format!("sum of many {} ones over the first axis", dtype.name());
        suite.check("reduce", case, Tolerance::units(1.0, 1.0), |b| {
            rows.on(b)?.sum(&[0], false)
        });
    }
}

fn running(suite: &mut Suite<'_>) {
    for (code, name) in cumulative::ALL {
        let near = match *code {
            cumulative::CUMMAX | cumulative::CUMMIN => Tolerance::EXACT,
            cumulative::CUMPROD => Tolerance::units(16.0, 8.0),
            // A running half sum may be rounded at every step.
            _ => Tolerance::units(16.0, 8.0).floor(4.0),
        };
        for dtype in FLOATS {
            for (dims, axis) in [(&[9][..], 0), (&[3, 4], 0), (&[3, 4], -1), (&[2, 3, 2], 1)] {
                let array = match *code {
                    cumulative::CUMPROD => Array::spread(dtype, dims, 0.8, 1.2, 3),
                    _ => Array::usual(dtype, dims, 3),
                };
                for (reverse, inclusive) in
                    [(false, true), (true, true), (false, false), (true, false)]
                {
                    // What stands before the first element of an exclusive maximum is left open.
                    if !inclusive && !matches!(*code, cumulative::CUMSUM | cumulative::CUMPROD) {
                        continue;
                    }
                    let case = format!(
                        "{name} {} {dims:?} along {axis}{}{}",
                        dtype.name(),
                        if reverse { " reverse" } else { "" },
                        if inclusive { "" } else { " exclusive" }
                    );
                    suite.check("cumulative", case, near, |b| {
                        array.on(b)?.cumulative(*code, axis, reverse, inclusive)
                    });
                }
            }
        }
        if *code != cumulative::LOGCUMSUMEXP {
            for dtype in [DType::I32, DType::I64] {
                let array = Array::spread(dtype, &[2, 6], -2.99, 2.99, 4);
                let case = format!("{name} {}", dtype.name());
                suite.check("cumulative", case, Tolerance::EXACT, |b| {
                    array.on(b)?.cumulative(*code, 1, false, true)
                });
            }
        }
    }
    let view = Array::usual(DType::F32, &[3, 5], 5);
    suite.check(
        "cumulative",
        "cumsum of a transposed view",
        Tolerance::units(16.0, 8.0).floor(4.0),
        |b| view.laid_out(b, Layout::Transposed)?.cumsum(1),
    );
}

fn softmaxes(suite: &mut Suite<'_>) {
    // An f32 exponential far below the largest has an error of its exponent's: small probabilities
    // are compared absolutely.
    let near = Tolerance::units(8.0, 2.0).floor(1e-4);
    for dtype in FLOATS {
        for (dims, axis) in [
            (&[7][..], 0),
            (&[3, 5], -1),
            (&[3, 5], 0),
            (&[2, 3, 4], 1),
            (&[2, 300], 1),
            (&[4, 1], 1),
        ] {
            let array = Array::spread(dtype, dims, -6.0, 6.0, 6);
            let case = format!("{} {dims:?} along {axis}", dtype.name());
            suite.check("softmax", case, near, |b| array.on(b)?.softmax(axis));
        }
        let masked = Array::of(
            dtype,
            &[2, 3],
            [1.0, f64::NEG_INFINITY, 2.0, 30.0, -30.0, f64::NEG_INFINITY],
        );
        suite.check(
            "softmax",
            format!("{} with masked entries", dtype.name()),
            near,
            |b| masked.on(b)?.softmax(-1),
        );
        for layout in [Layout::Transposed, Layout::Strided] {
            let array = Array::spread(dtype, &[4, 6], -6.0, 6.0, 7);
            let case = format!("{} {layout:?}", dtype.name());
            suite.check("softmax", case, near, |b| {
                array.laid_out(b, layout)?.softmax(-1)
            });
        }
        // The exponentials of such logits overflow f16 unless the maximum is taken off.
        let large = Array::of(dtype, &[4], [20.0, 500.0, 501.0, 499.0]);
        suite.check(
            "softmax",
            format!("{} of large logits", dtype.name()),
            near,
            |b| large.on(b)?.softmax(0),
        );
        // A half accumulator would lose the small ones.
        let many = Array::of(dtype, &[1, 4000], core::iter::repeat_n(0.0, 4000));
        suite.check(
            "softmax",
            format!("{} of many equal logits", dtype.name()),
            near,
            |b| many.on(b)?.softmax(-1),
        );
    }
}

fn refusals(suite: &mut Suite<'_>) {
    let array = Array::usual(DType::F32, &[2, 3], 8);
    for axes in [&[2][..], &[-3], &[0, 0], &[0, -2]] {
        suite.refuses(
            "reduce",
            format!("axes {axes:?} of [2, 3]"),
            status::INVALID_ARGUMENT,
            |b| array.on(b)?.sum(axes, false),
        );
    }
    suite.refuses(
        "reduce",
        "an unknown reduction",
        status::UNIMPLEMENTED,
        |b| array.on(b)?.reduce(9999, &[0], false),
    );
    suite.refuses("cumulative", "an unknown one", status::UNIMPLEMENTED, |b| {
        array.on(b)?.cumulative(9999, 0, false, true)
    });
    suite.refuses(
        "cumulative",
        "axis 2 of [2, 3]",
        status::INVALID_ARGUMENT,
        |b| array.on(b)?.cumsum(2),
    );
    suite.refuses(
        "softmax",
        "axis -3 of [2, 3]",
        status::INVALID_ARGUMENT,
        |b| array.on(b)?.softmax(-3),
    );
}
