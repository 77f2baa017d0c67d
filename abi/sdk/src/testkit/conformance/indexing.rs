//! Elements chosen by integer tensors.

use mlxcel_abi::kinds::scatter as kind;
use mlxcel_abi::{DType, status};

use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;

const DTYPES: [DType; 6] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::U32,
    DType::BOOL,
];
const EXACT: Tolerance = Tolerance::EXACT;

pub(super) fn run(suite: &mut Suite<'_>) {
    for dtype in DTYPES {
        takes(suite, dtype);
        along(suite, dtype);
        gathers(suite, dtype);
        scatters(suite, dtype);
    }
    index_types(suite);
    refusals(suite);
}

fn takes(suite: &mut Suite<'_>, dtype: DType) {
    for (dims, indices, axis) in [
        (&[5][..], &[3][..], 0),
        (&[5, 4], &[7], 0),
        (&[5, 4], &[3], -1),
        (&[5, 4], &[2, 3], 0),
        (&[2, 5, 3], &[2, 2], 1),
        (&[5, 4], &[], 0),
        (&[5, 4], &[0], 0),
    ] {
        let array = Array::usual(dtype, dims, 1);
        let limit = dims[if axis < 0 {
            dims.len() - 1
        } else {
            axis as usize
        }];
        let index = Array::indices(DType::I32, indices, limit, 2);
        let case = format!("{} {dims:?} by {indices:?} along {axis}", dtype.name());
        suite.check("take", case, EXACT, |b| {
            array.on(b)?.take(&index.on(b)?, axis)
        });
    }
    for layout in [Layout::Transposed, Layout::Strided] {
        let array = Array::usual(dtype, &[5, 4], 1);
        let index = Array::indices(DType::U32, &[6], 5, 3);
        let case = format!("{} {layout:?}", dtype.name());
        suite.check("take", case, EXACT, |b| {
            array
                .laid_out(b, layout)?
                .take(&index.laid_out(b, layout)?, 0)
        });
    }
}

fn along(suite: &mut Suite<'_>, dtype: DType) {
    for (dims, indices, axis) in [
        (&[6][..], &[4][..], 0),
        (&[3, 5], &[3, 2], 1),
        (&[3, 5], &[7, 5], 0),
        (&[2, 4, 3], &[2, 1, 3], -2),
        (&[3, 5], &[1, 2], 1),
    ] {
        let array = Array::usual(dtype, dims, 4);
        let limit = dims[if axis < 0 {
            (axis + dims.len() as i32) as usize
        } else {
            axis as usize
        }];
        let index = Array::indices(DType::I32, indices, limit, 5);
        let case = format!("{} {dims:?} by {indices:?} along {axis}", dtype.name());
        suite.check("take_along", case, EXACT, |b| {
            array.on(b)?.take_along(&index.on(b)?, axis)
        });
    }
    // Indices that do not repeat: the order of two writes to one place is left open.
    let array = Array::usual(dtype, &[3, 5], 6);
    let index = Array::of(DType::I32, &[3, 2], [4.0, 0.0, 1.0, 3.0, 2.0, 1.0]);
    for (values, case) in [
        (&[3, 2][..], "as many values"),
        (&[3, 1], "a value per row"),
        (&[], "one value"),
    ] {
        let values = Array::usual(dtype, values, 7);
        suite.check(
            "put_along",
            format!("{} {case}", dtype.name()),
            EXACT,
            |b| array.on(b)?.put_along(&index.on(b)?, &values.on(b)?, 1),
        );
    }
    suite.check_all(
        "put_along",
        format!("{} leaves its source", dtype.name()),
        EXACT,
        |b| {
            let (source, values) = (array.on(b)?, Array::usual(dtype, &[3, 2], 7).on(b)?);
            Ok(vec![source.put_along(&index.on(b)?, &values, -1)?, source])
        },
    );
}

fn gathers(suite: &mut Suite<'_>, dtype: DType) {
    let array = Array::usual(dtype, &[4, 5, 3], 8);
    let rows = Array::indices(DType::I32, &[6], 4, 9);
    let columns = Array::indices(DType::I32, &[6], 5, 10);
    let grid = Array::indices(DType::I32, &[2, 1], 4, 11);
    suite.check("gather", format!("{} rows", dtype.name()), EXACT, |b| {
        array.on(b)?.gather(&[&rows.on(b)?], &[0], &[1, 5, 3])
    });
    suite.check("gather", format!("{} pairs", dtype.name()), EXACT, |b| {
        array
            .on(b)?
            .gather(&[&rows.on(b)?, &columns.on(b)?], &[0, 1], &[1, 1, 3])
    });
    suite.check("gather", format!("{} grids", dtype.name()), EXACT, |b| {
        array
            .on(b)?
            .gather(&[&grid.on(b)?, &columns.on(b)?], &[0, 1], &[1, 1, 2])
    });
    let starts = Array::indices(DType::I32, &[3], 3, 12);
    suite.check("gather", format!("{} blocks", dtype.name()), EXACT, |b| {
        array.on(b)?.gather(&[&starts.on(b)?], &[1], &[2, 3, 1])
    });
}

fn scatters(suite: &mut Suite<'_>, dtype: DType) {
    let array = Array::usual(dtype, &[5, 3], 13);
    let apart = Array::of(DType::I32, &[3], [4.0, 0.0, 2.0]);
    let updates = Array::usual(dtype, &[3, 1, 3], 14);
    for (code, name) in kind::ALL {
        if dtype == DType::BOOL && *code != kind::SET {
            continue;
        }
        let case = format!("{name} {} rows", dtype.name());
        suite.check("scatter", case, Tolerance::ROUNDED, |b| {
            array
                .on(b)?
                .scatter(*code, &[&apart.on(b)?], &[0], &updates.on(b)?)
        });
    }
    let (rows, columns) = (
        Array::of(DType::I32, &[2], [3.0, 1.0]),
        Array::of(DType::I32, &[2], [0.0, 2.0]),
    );
    let points = Array::usual(dtype, &[2, 1, 1], 15);
    suite.check_all(
        "scatter",
        format!("set {} points, leaves its source", dtype.name()),
        EXACT,
        |b| {
            let source = array.on(b)?;
            let indices = [&rows.on(b)?, &columns.on(b)?];
            Ok(vec![
                source.scatter(kind::SET, &indices, &[0, 1], &points.on(b)?)?,
                source,
            ])
        },
    );
    if dtype == DType::BOOL {
        return;
    }
    // Repeated indices: the results of these do not depend on the order up to rounding.
    let repeated = Array::of(DType::I32, &[4], [1.0, 1.0, 3.0, 1.0]);
    let updates = Array::usual(dtype, &[4, 1, 3], 16);
    for code in [kind::ADD, kind::MAX, kind::MIN] {
        let case = format!("{} {} repeated rows", kind::name(code), dtype.name());
        let near = if code == kind::ADD {
            Tolerance::units(4.0, 4.0).floor(4.0)
        } else {
            EXACT
        };
        suite.check("scatter", case, near, |b| {
            array
                .on(b)?
                .scatter(code, &[&repeated.on(b)?], &[0], &updates.on(b)?)
        });
    }
}

fn index_types(suite: &mut Suite<'_>) {
    let array = Array::usual(DType::F32, &[5, 4], 17);
    for dtype in [
        DType::U8,
        DType::U16,
        DType::U32,
        DType::I8,
        DType::I32,
        DType::I64,
    ] {
        let index = Array::indices(dtype, &[6], 5, 18);
        suite.check("take", format!("indices of {}", dtype.name()), EXACT, |b| {
            array.on(b)?.take(&index.on(b)?, 0)
        });
    }
    let negative = Array::of(DType::I32, &[3], [-1.0, -5.0, 2.0]);
    suite.check("take", "negative indices", EXACT, |b| {
        array.on(b)?.take(&negative.on(b)?, 0)
    });
    let negative = Array::of(DType::I32, &[5, 1], [-1.0, -4.0, 2.0, 0.0, -2.0]);
    suite.check("take_along", "negative indices", EXACT, |b| {
        array.on(b)?.take_along(&negative.on(b)?, 1)
    });
}

fn refusals(suite: &mut Suite<'_>) {
    let bad = status::INVALID_ARGUMENT;
    let array = Array::usual(DType::F32, &[5, 4], 19);
    let index = Array::indices(DType::I32, &[3], 4, 20);
    let floats = Array::usual(DType::F32, &[3], 21);
    suite.refuses("take", "axis 2 of [5, 4]", bad, |b| {
        array.on(b)?.take(&index.on(b)?, 2)
    });
    suite.refuses("take", "float indices", bad, |b| {
        array.on(b)?.take(&floats.on(b)?, 0)
    });
    suite.refuses("take_along", "indices of another rank", bad, |b| {
        array.on(b)?.take_along(&index.on(b)?, 0)
    });
    suite.refuses("put_along", "indices of another rank", bad, |b| {
        array.on(b)?.put_along(&index.on(b)?, &floats.on(b)?, 0)
    });
    suite.refuses("gather", "an axis given twice", bad, |b| {
        array
            .on(b)?
            .gather(&[&index.on(b)?, &index.on(b)?], &[0, 0], &[1, 4])
    });
    suite.refuses("gather", "slices larger than the source", bad, |b| {
        array.on(b)?.gather(&[&index.on(b)?], &[0], &[1, 5])
    });
    suite.refuses("gather", "float indices", bad, |b| {
        array.on(b)?.gather(&[&floats.on(b)?], &[0], &[1, 4])
    });
    suite.refuses("scatter", "updates of a wrong shape", bad, |b| {
        array
            .on(b)?
            .scatter(kind::SET, &[&index.on(b)?], &[0], &array.on(b)?)
    });
    suite.refuses("scatter", "an unknown kind", status::UNIMPLEMENTED, |b| {
        let updates = Array::usual(DType::F32, &[3, 1, 4], 22);
        array
            .on(b)?
            .scatter(9999, &[&index.on(b)?], &[0], &updates.on(b)?)
    });
}
