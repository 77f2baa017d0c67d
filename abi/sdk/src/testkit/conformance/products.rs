//! Matrix products of plain tensors.

use mlxcel_abi::{DType, status};

use super::FLOATS;
use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;

/// Operands: vectors, ragged sizes, batches that broadcast, one row, long inner dimensions.
const SHAPES: [(&[i64], &[i64]); 18] = [
    (&[2, 3], &[3, 4]),
    (&[1, 1], &[1, 1]),
    (&[1, 64], &[64, 96]),
    (&[5, 33], &[33, 17]),
    (&[17, 65], &[65, 9]),
    (&[40, 128], &[128, 3]),
    (&[3], &[3]),
    (&[3], &[3, 2]),
    (&[2, 3], &[3]),
    (&[4, 2, 3], &[4, 3, 5]),
    (&[4, 2, 3], &[3, 5]),
    (&[2, 1, 2, 3], &[3, 3, 2]),
    (&[3], &[2, 3, 4]),
    (&[2, 700], &[700, 3]),
    (&[0, 3], &[3, 2]),
    // Large enough for tiles, their rests, and several threads.
    (&[1, 520], &[520, 1031]),
    (&[67, 300], &[300, 131]),
    (&[3, 35, 70], &[3, 70, 66]),
];

pub(super) fn run(suite: &mut Suite<'_>) {
    for dtype in FLOATS {
        plain(suite, dtype);
        with_addend(suite, dtype);
        chosen(suite, dtype);
    }
    mixed(suite);
    refusals(suite);
}

/// Products of numbers in [-2, 2): the magnitude of a term is about 1.
fn near(inner: i64) -> Tolerance {
    Tolerance::accumulated(inner.max(1) as usize, 2.0)
}

fn plain(suite: &mut Suite<'_>, dtype: DType) {
    for (a, b) in SHAPES {
        let (left, right) = (Array::usual(dtype, a, 1), Array::usual(dtype, b, 2));
        let inner = a[a.len() - 1];
        let case = format!("{} {a:?} @ {b:?}", dtype.name());
        suite.check("matmul", case, near(inner), |back| {
            left.on(back)?.matmul(&right.on(back)?)
        });
    }
    for (of_a, of_b) in [
        (Layout::Transposed, Layout::Plain),
        (Layout::Plain, Layout::Transposed),
        (Layout::Transposed, Layout::Transposed),
        (Layout::Strided, Layout::Strided),
    ] {
        for (a, b) in [
            (&[7, 12][..], &[12, 9][..]),
            (&[2, 7, 12], &[2, 12, 9]),
            (&[1, 32], &[32, 40]),
        ] {
            let (left, right) = (Array::usual(dtype, a, 3), Array::usual(dtype, b, 4));
            let case = format!("{} {of_a:?} {a:?} @ {of_b:?} {b:?}", dtype.name());
            suite.check("matmul", case, near(12), |back| {
                left.laid_out(back, of_a)?
                    .matmul(&right.laid_out(back, of_b)?)
            });
        }
    }
    let (left, right) = (
        Array::usual(dtype, &[2, 0], 1),
        Array::usual(dtype, &[0, 3], 2),
    );
    let case = format!("{} with an empty inner dimension", dtype.name());
    suite.check("matmul", case, Tolerance::EXACT, |back| {
        left.on(back)?.matmul(&right.on(back)?)
    });
    // A half accumulator would lose the small terms or overflow.
    let (large, small) = (
        Array::of(dtype, &[1, 4096], core::iter::repeat_n(1.0, 4096)),
        Array::of(dtype, &[4096, 1], core::iter::repeat_n(1.0, 4096)),
    );
    let case = format!("{} of 4096 ones", dtype.name());
    suite.check("matmul", case, Tolerance::ROUNDED, |back| {
        large.on(back)?.matmul(&small.on(back)?)
    });
    let odd = Array::of(dtype, &[2, 2], [f64::NAN, 1.0, f64::INFINITY, 0.0]);
    let eye = Array::of(dtype, &[2, 2], [1.0, 0.0, 0.0, 1.0]);
    let case = format!("{} NaN and infinities spread", dtype.name());
    suite.check("matmul", case, Tolerance::ROUNDED, |back| {
        odd.on(back)?.matmul(&eye.on(back)?)
    });
}

fn with_addend(suite: &mut Suite<'_>, dtype: DType) {
    for (a, b, c) in [
        (&[2, 3][..], &[3, 4][..], &[2, 4][..]),
        (&[5, 33], &[33, 17], &[17]),
        (&[5, 3], &[3, 4], &[5, 1]),
        (&[2, 5, 3], &[3, 4], &[4]),
        (&[1, 64], &[64, 32], &[1, 32]),
    ] {
        let [left, right, addend] = [
            Array::usual(dtype, a, 5),
            Array::usual(dtype, b, 6),
            Array::usual(dtype, c, 7),
        ];
        for (alpha, beta) in [(1.0, 1.0), (0.5, -2.0), (1.0, 0.0)] {
            let case = format!("{} {alpha} * {a:?} @ {b:?} + {beta} * {c:?}", dtype.name());
            let near = Tolerance::units(16.0, 4.0).floor(8.0);
            suite.check("addmm", case, near, |back| {
                left.on(back)?
                    .addmm(&right.on(back)?, &addend.on(back)?, alpha, beta)
            });
        }
    }
}

fn chosen(suite: &mut Suite<'_>, dtype: DType) {
    let experts = Array::usual(dtype, &[4, 6, 5], 8);
    let index = |dims: &[i64], limit| Array::indices(DType::U32, dims, limit, 9);
    let x = Array::usual(dtype, &[3, 2, 6], 10);
    let (right, left) = (index(&[3], 4), index(&[3], 3));
    suite.check(
        "gather_matmul",
        format!("{} right chosen", dtype.name()),
        near(6),
        |b| {
            x.on(b)?
                .gather_matmul(&experts.on(b)?, None, Some(&right.on(b)?), false)
        },
    );
    suite.check(
        "gather_matmul",
        format!("{} both chosen", dtype.name()),
        near(6),
        |b| {
            x.on(b)?.gather_matmul(
                &experts.on(b)?,
                Some(&left.on(b)?),
                Some(&right.on(b)?),
                false,
            )
        },
    );
    suite.check(
        "gather_matmul",
        format!("{} left chosen", dtype.name()),
        near(6),
        |b| {
            let left = Array::indices(DType::U32, &[4], 3, 11).on(b)?;
            x.on(b)?
                .gather_matmul(&experts.on(b)?, Some(&left), None, false)
        },
    );
    let tokens = Array::usual(dtype, &[3, 1, 1, 6], 12);
    let per_token = index(&[3, 2], 4);
    suite.check(
        "gather_matmul",
        format!("{} two experts a token", dtype.name()),
        near(6),
        |b| {
            tokens
                .on(b)?
                .gather_matmul(&experts.on(b)?, None, Some(&per_token.on(b)?), false)
        },
    );
    let rows = Array::usual(dtype, &[7, 1, 6], 13);
    let ascending = Array::of(DType::U32, &[7], [0.0, 0.0, 1.0, 1.0, 1.0, 3.0, 3.0]);
    suite.check(
        "gather_matmul",
        format!("{} sorted rows", dtype.name()),
        near(6),
        |b| {
            rows.on(b)?
                .gather_matmul(&experts.on(b)?, None, Some(&ascending.on(b)?), true)
        },
    );
    suite.check(
        "gather_matmul",
        format!("{} transposed experts", dtype.name()),
        near(5),
        |b| {
            let x = Array::usual(dtype, &[3, 2, 5], 14).on(b)?;
            x.gather_matmul(&experts.on(b)?.t()?, None, Some(&right.on(b)?), false)
        },
    );
}

fn mixed(suite: &mut Suite<'_>) {
    for (a, b) in [
        (DType::F16, DType::F32),
        (DType::BF16, DType::F32),
        (DType::F16, DType::BF16),
    ] {
        let (left, right) = (Array::usual(a, &[3, 8], 15), Array::usual(b, &[8, 4], 16));
        let case = format!("{} @ {}", a.name(), b.name());
        suite.check("matmul", case, near(8), |back| {
            left.on(back)?.matmul(&right.on(back)?)
        });
    }
}

fn refusals(suite: &mut Suite<'_>) {
    let bad = status::INVALID_ARGUMENT;
    let array = Array::usual(DType::F32, &[2, 3], 17);
    let integers = Array::usual(DType::I32, &[2, 2], 18);
    let scalar = Array::usual(DType::F32, &[], 19);
    suite.refuses("matmul", "inner dimensions that differ", bad, |b| {
        array.on(b)?.matmul(&array.on(b)?)
    });
    suite.refuses("matmul", "a scalar", bad, |b| {
        array.on(b)?.matmul(&scalar.on(b)?)
    });
    suite.refuses("matmul", "integers", bad, |b| {
        integers.on(b)?.matmul(&integers.on(b)?)
    });
    let batch = [
        Array::usual(DType::F32, &[2, 2, 3], 20),
        Array::usual(DType::F32, &[3, 3, 2], 21),
    ];
    suite.refuses("matmul", "batches that do not broadcast", bad, |b| {
        batch[0].on(b)?.matmul(&batch[1].on(b)?)
    });
    suite.refuses("addmm", "an addend that does not fit", bad, |b| {
        array
            .on(b)?
            .addmm(&array.on(b)?.t()?, &array.on(b)?, 1.0, 1.0)
    });
    suite.refuses("gather_matmul", "inner dimensions that differ", bad, |b| {
        let index = Array::indices(DType::U32, &[2], 2, 22).on(b)?;
        batch[0]
            .on(b)?
            .gather_matmul(&batch[0].on(b)?, None, Some(&index), false)
    });
}
