//! Creation, reading, casts and views.

use mlxcel_abi::{DType, status};

use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::Tensor;

/// Types that every backend must hold; f64 is left to those that can.
pub(super) const HELD: [DType; 13] = [
    DType::BOOL,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::F16,
    DType::BF16,
    DType::F32,
    DType::C64,
];

pub(super) fn run(suite: &mut Suite<'_>) {
    host_memory(suite);
    constants(suite);
    ranges(suite);
    casts(suite);
    views(suite);
}

fn host_memory(suite: &mut Suite<'_>) {
    for dtype in HELD {
        for dims in [
            &[][..],
            &[1],
            &[7],
            &[2, 3],
            &[2, 1, 3, 2],
            &[0],
            &[3, 0, 2],
        ] {
            let array = Array::usual(dtype, dims, 1);
            suite.check(
                "from_host",
                format!("{} {dims:?}", dtype.name()),
                Tolerance::EXACT,
                |b| array.on(b),
            );
        }
        for layout in Layout::ALL {
            let array = Array::usual(dtype, &[2, 3, 4], 2);
            let case = format!("{} {layout:?} view", dtype.name());
            suite.check("read", case, Tolerance::EXACT, |b| {
                array.laid_out(b, layout)
            });
        }
    }
    let ends = |dtype, ends: &[i128]| Array::ints(dtype, &[ends.len() as i64], ends);
    for array in [
        ends(DType::I64, &[i64::MIN.into(), i64::MAX.into(), -1]),
        ends(DType::U64, &[u64::MAX.into(), 0, 1 << 63]),
        ends(DType::I8, &[-128, 127]),
        ends(DType::U32, &[u32::MAX.into()]),
    ] {
        let case = format!("{} ends of the range", array.0.dtype.name());
        suite.check("from_host", case, Tolerance::EXACT, |b| array.on(b));
    }
    for dtype in super::FLOATS {
        let odd = Array::of(
            dtype,
            &[5],
            [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 1.0],
        );
        suite.check(
            "from_host",
            format!("{} NaN and infinities", dtype.name()),
            Tolerance::EXACT,
            |b| odd.on(b),
        );
    }
}

fn constants(suite: &mut Suite<'_>) {
    for dtype in HELD {
        for dims in [&[][..], &[3], &[2, 2], &[0, 4]] {
            let case = format!("3 as {} {dims:?}", dtype.name());
            suite.check("full", case, Tolerance::EXACT, |b| {
                Tensor::full(b, 3.0, dtype, dims)
            });
        }
        suite.check(
            "full",
            format!("0 as {}", dtype.name()),
            Tolerance::EXACT,
            |b| Tensor::zeros(b, dtype, &[4]),
        );
    }
    for dtype in super::FLOATS {
        for x in [0.1, -2.5, f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            let case = format!("{x} as {}", dtype.name());
            suite.check("full", case, Tolerance::EXACT, |b| {
                Tensor::full(b, x, dtype, &[2])
            });
        }
    }
    for (n, m, k) in [(3, 3, 0), (2, 4, 1), (4, 2, -1), (2, 2, 5), (1, 1, 0)] {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::I32] {
            let case = format!("[{n}, {m}] diagonal {k} {}", dtype.name());
            suite.check("eye", case, Tolerance::EXACT, |b| {
                Tensor::eye(b, n, m, k, dtype)
            });
        }
    }
    suite.refuses(
        "full",
        "a negative dimension",
        status::INVALID_ARGUMENT,
        |b| Tensor::zeros(b, DType::F32, &[2, -1]),
    );
    suite.refuses(
        "full",
        "more than 8 dimensions",
        status::INVALID_ARGUMENT,
        |b| Tensor::zeros(b, DType::F32, &[1; 9]),
    );
}

fn ranges(suite: &mut Suite<'_>) {
    for dtype in [
        DType::I32,
        DType::I64,
        DType::U32,
        DType::F32,
        DType::F16,
        DType::BF16,
    ] {
        for (start, stop, step) in [
            (0.0, 5.0, 1.0),
            (3.0, 10.0, 3.0),
            (5.0, 5.0, 1.0),
            (4.0, 1.0, 1.0),
        ] {
            let case = format!("{start}..{stop} by {step} {}", dtype.name());
            suite.check("arange", case, Tolerance::EXACT, |b| {
                Tensor::arange(b, start, stop, step, dtype)
            });
        }
    }
    suite.check("arange", "5..0 by -2 i32", Tolerance::EXACT, |b| {
        Tensor::arange(b, 5.0, 0.0, -2.0, DType::I32)
    });
    suite.check("arange", "0..1 by 0.25 f16", Tolerance::EXACT, |b| {
        Tensor::arange(b, 0.0, 1.0, 0.25, DType::F16)
    });
    suite.check(
        "arange",
        "0..1 by 0.1 f32",
        Tolerance::units(2.0, 2.0),
        |b| Tensor::arange(b, 0.0, 1.0, 0.1, DType::F32),
    );
    suite.refuses("arange", "steps of 0", status::INVALID_ARGUMENT, |b| {
        Tensor::arange(b, 0.0, 1.0, 0.0, DType::F32)
    });
}

fn casts(suite: &mut Suite<'_>) {
    for from in HELD {
        for to in HELD {
            // What becomes of a negative number in an unsigned type is left open.
            let array = match (from, to) {
                (DType::C64, _) => Array::complex(&[2, 3], 3),
                _ if from.is_float() => Array::spread(from, &[2, 3], 0.0, 9.0, 3),
                _ => Array::indices(from, &[2, 3], if from == DType::BOOL { 2 } else { 10 }, 3),
            };
            if from == DType::C64 && !(to.is_float() || to == DType::C64) {
                continue;
            }
            let case = format!("{} to {}", from.name(), to.name());
            suite.check("cast", case, Tolerance::EXACT, |b| array.on(b)?.cast(to));
        }
    }
    let halves = Array::of(
        DType::F32,
        &[6],
        [2049.0, 2051.0, 257.0, 259.0, 1e-7, 65519.0],
    );
    for to in [DType::F16, DType::BF16] {
        suite.check(
            "cast",
            format!("f32 ties to {}", to.name()),
            Tolerance::EXACT,
            |b| halves.on(b)?.cast(to),
        );
    }
    let large = Array::of(DType::F32, &[3], [70000.0, -70000.0, f64::NAN]);
    suite.check("cast", "f32 beyond f16's range", Tolerance::EXACT, |b| {
        large.on(b)?.cast(DType::F16)
    });
    let signed = Array::of(DType::F32, &[4], [-1.9, 1.9, -0.5, 100.0]);
    for to in [DType::I8, DType::I32, DType::I64] {
        suite.check(
            "cast",
            format!("f32 towards 0 to {}", to.name()),
            Tolerance::EXACT,
            |b| signed.on(b)?.cast(to),
        );
    }
    let truth = Array::of(DType::F32, &[4], [0.0, -0.0, 0.1, f64::NAN]);
    suite.check("cast", "f32 to truth", Tolerance::EXACT, |b| {
        truth.on(b)?.cast(DType::BOOL)
    });
    for layout in Layout::ALL {
        let array = Array::usual(DType::F32, &[3, 4], 4);
        suite.check(
            "cast",
            format!("{layout:?} view to f16"),
            Tolerance::EXACT,
            |b| array.laid_out(b, layout)?.cast(DType::F16),
        );
    }
}

fn views(suite: &mut Suite<'_>) {
    let floats = Array::usual(DType::F32, &[2, 4], 5);
    for to in [
        DType::U32,
        DType::I32,
        DType::U8,
        DType::U16,
        DType::F16,
        DType::U64,
    ] {
        suite.check(
            "view",
            format!("f32 [2, 4] as {}", to.name()),
            Tolerance::EXACT,
            |b| floats.on(b)?.view(to),
        );
    }
    let bytes = Array::usual(DType::U8, &[3, 8], 6);
    for to in [DType::U32, DType::I8, DType::I64] {
        suite.check(
            "view",
            format!("u8 [3, 8] as {}", to.name()),
            Tolerance::EXACT,
            |b| bytes.on(b)?.view(to),
        );
    }
    suite.check("view", "of a transposed view", Tolerance::EXACT, |b| {
        floats.laid_out(b, Layout::Transposed)?.view(DType::U16)
    });
    let odd = Array::usual(DType::U8, &[2, 3], 7);
    suite.refuses(
        "view",
        "bytes that do not fill an element",
        status::INVALID_ARGUMENT,
        |b| odd.on(b)?.view(DType::U32),
    );
}
