//! Shapes, slices, joins, padding and repeats.

use mlxcel_abi::{DType, status};

use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::Tensor;

const DTYPES: [DType; 6] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::BOOL,
    DType::I64,
];
const EXACT: Tolerance = Tolerance::EXACT;

pub(super) fn run(suite: &mut Suite<'_>) {
    for dtype in DTYPES {
        reshapes(suite, dtype);
        permutations(suite, dtype);
        slices(suite, dtype);
        updates(suite, dtype);
        joins(suite, dtype);
        fills(suite, dtype);
    }
    chains(suite);
    refusals(suite);
}

fn reshapes(suite: &mut Suite<'_>, dtype: DType) {
    for (from, to) in [
        (&[2, 6][..], &[3, 4][..]),
        (&[2, 6], &[-1]),
        (&[2, 6], &[4, -1, 1]),
        (&[1], &[]),
        (&[], &[1, 1]),
        (&[0, 3], &[3, 0]),
        (&[0, 3], &[-1, 3]),
    ] {
        let array = Array::usual(dtype, from, 1);
        suite.check(
            "reshape",
            format!("{} {from:?} to {to:?}", dtype.name()),
            EXACT,
            |b| array.on(b)?.reshape(to),
        );
    }
    for layout in [Layout::Transposed, Layout::Strided] {
        let array = Array::usual(dtype, &[4, 6], 2);
        let case = format!("{} {layout:?}", dtype.name());
        suite.check("reshape", case.clone(), EXACT, |b| {
            array.laid_out(b, layout)?.reshape(&[3, 8])
        });
        suite.check("contiguous", case, EXACT, |b| {
            array.laid_out(b, layout)?.contiguous()
        });
    }
}

fn permutations(suite: &mut Suite<'_>, dtype: DType) {
    for (dims, axes) in [
        (&[2, 3][..], &[1, 0][..]),
        (&[2, 3, 4], &[0, 2, 1]),
        (&[2, 3, 4], &[2, 0, 1]),
        (&[2, 3, 4], &[-1, -2, -3]),
        (&[5], &[0]),
        (&[2, 0, 3], &[1, 2, 0]),
        (&[2, 1, 3, 2], &[3, 0, 1, 2]),
    ] {
        let array = Array::usual(dtype, dims, 3);
        let case = format!("{} {dims:?} by {axes:?}", dtype.name());
        suite.check("transpose", case, EXACT, |b| array.on(b)?.transpose(axes));
    }
    for (from, to) in [
        (&[3][..], &[2, 3][..]),
        (&[2, 1], &[2, 4]),
        (&[], &[2, 2]),
        (&[1, 3, 1], &[2, 3, 2]),
        (&[1], &[0]),
    ] {
        let array = Array::usual(dtype, from, 4);
        let case = format!("{} {from:?} to {to:?}", dtype.name());
        suite.check("broadcast_to", case, EXACT, |b| {
            array.on(b)?.broadcast_to(to)
        });
    }
}

/// Boxes of a `[4, 10]` tensor: start, stop and step of both axes.
const BOXES: [[[i64; 3]; 2]; 8] = [
    [[0, 4, 1], [0, 10, 1]],
    [[1, 3, 1], [2, 9, 3]],
    [[-3, -1, 1], [-4, 10, 1]],
    [[0, 100, 2], [5, 200, 1]],
    [[2, 2, 1], [0, 10, 1]],
    [[3, -5, -1], [9, -11, -2]],
    [[0, 1, 5], [8, 1, -3]],
    [[3, 0, -1], [4, 5, 1]],
];

fn columns(of: [[i64; 3]; 2]) -> [[i64; 2]; 3] {
    [0, 1, 2].map(|part| [of[0][part], of[1][part]])
}

fn slices(suite: &mut Suite<'_>, dtype: DType) {
    for asked in BOXES {
        let [starts, stops, strides] = columns(asked);
        let array = Array::usual(dtype, &[4, 10], 5);
        for layout in [Layout::Plain, Layout::Transposed] {
            let case = format!("{} {layout:?} {asked:?}", dtype.name());
            suite.check("slice", case, EXACT, |b| {
                array.laid_out(b, layout)?.slice(&starts, &stops, &strides)
            });
        }
    }
}

fn updates(suite: &mut Suite<'_>, dtype: DType) {
    let array = Array::usual(dtype, &[4, 10], 6);
    for (asked, dims) in [
        ([[1, 3, 1], [2, 9, 3]], &[2, 3][..]),
        ([[0, 4, 1], [0, 10, 1]], &[4, 10]),
        ([[0, 4, 2], [0, 10, 1]], &[1, 10]),
        ([[-2, 4, 1], [-3, -1, 1]], &[]),
        ([[2, 3, 1], [0, 10, 5]], &[2]),
        ([[2, 2, 1], [0, 10, 1]], &[0, 10]),
    ] {
        let [starts, stops, strides] = columns(asked);
        let update = Array::usual(dtype, dims, 7);
        let case = format!("{} {asked:?} by {dims:?}", dtype.name());
        suite.check("slice_update", case.clone(), EXACT, |b| {
            array
                .on(b)?
                .slice_update(&update.on(b)?, &starts, &stops, &strides)
        });
        // The source is read afterwards: an update in place must not be seen through it.
        suite.check_all(
            "slice_update",
            format!("{case} leaves its source"),
            EXACT,
            |b| {
                let source = array.on(b)?;
                let updated = source.slice_update(&update.on(b)?, &starts, &stops, &strides)?;
                Ok(vec![updated, source])
            },
        );
    }
    if dtype.is_float() {
        let update = Array::usual(DType::F32, &[2, 2], 8);
        let case = format!("{} takes the source's dtype", dtype.name());
        suite.check("slice_update", case, EXACT, |b| {
            array
                .on(b)?
                .slice_update(&update.on(b)?, &[0, 0], &[2, 2], &[1, 1])
        });
    }
}

fn joins(suite: &mut Suite<'_>, dtype: DType) {
    for (shapes, axis) in [
        (&[&[2, 3][..], &[4, 3]][..], 0),
        (&[&[2, 3], &[2, 1], &[2, 2]], -1),
        (&[&[2, 3, 2], &[2, 1, 2]], 1),
        (&[&[5]], 0),
        (&[&[0, 3], &[2, 3]], 0),
    ] {
        let arrays: Vec<Array> = shapes
            .iter()
            .zip(9..)
            .map(|(dims, seed)| Array::usual(dtype, dims, seed))
            .collect();
        for layout in [Layout::Plain, Layout::Transposed] {
            let case = format!("{} {layout:?} {shapes:?} along {axis}", dtype.name());
            suite.check("concat", case, EXACT, |b| {
                let tensors = arrays
                    .iter()
                    .map(|a| a.laid_out(b, layout))
                    .collect::<crate::Result<Vec<_>>>()?;
                Tensor::concat(b, &tensors.iter().collect::<Vec<_>>(), axis)
            });
        }
    }
}

fn fills(suite: &mut Suite<'_>, dtype: DType) {
    for (dims, low, high) in [
        (&[3][..], &[1][..], &[2][..]),
        (&[2, 3], &[0, 1], &[2, 0]),
        (&[2, 3], &[0, 0], &[0, 0]),
        (&[0, 2], &[1, 0], &[1, 0]),
    ] {
        let array = Array::usual(dtype, dims, 10);
        for x in [0.0, 1.0] {
            let case = format!("{} {dims:?} by {low:?} {high:?} with {x}", dtype.name());
            suite.check("pad", case, EXACT, |b| array.on(b)?.pad(low, high, x));
        }
    }
    if dtype.is_float() {
        let array = Array::usual(dtype, &[2], 10);
        let case = format!("{} with minus infinity", dtype.name());
        suite.check("pad", case, EXACT, |b| {
            array.on(b)?.pad(&[1], &[1], f64::NEG_INFINITY)
        });
    }
    for (dims, n, axis) in [
        (&[3][..], 2, 0),
        (&[2, 3], 3, 0),
        (&[2, 3], 2, -1),
        (&[2, 3], 1, 1),
        (&[2, 3], 0, 1),
    ] {
        let array = Array::usual(dtype, dims, 11);
        let case = format!("{} {dims:?} {n} times along {axis}", dtype.name());
        suite.check("repeat", case, EXACT, |b| array.on(b)?.repeat(n, axis));
    }
    for (dims, reps) in [
        (&[3][..], &[2][..]),
        (&[2, 3], &[2, 1]),
        (&[2, 3], &[2]),
        (&[3], &[2, 2]),
        (&[2, 3], &[1, 3]),
    ] {
        let array = Array::usual(dtype, dims, 12);
        let case = format!("{} {dims:?} by {reps:?}", dtype.name());
        suite.check("tile", case, EXACT, |b| array.on(b)?.tile(reps));
    }
}

/// Views of views, as families make them.
fn chains(suite: &mut Suite<'_>) {
    let array = Array::usual(DType::F16, &[6, 8], 13);
    suite.check("transpose", "heads split, moved and joined", EXACT, |b| {
        array
            .on(b)?
            .reshape(&[6, 2, 4])?
            .transpose(&[1, 0, 2])?
            .narrow(1, 2, 3)?
            .transpose(&[1, 0, 2])?
            .reshape(&[3, 8])
    });
    suite.check("slice", "of a broadcast view", EXACT, |b| {
        array
            .on(b)?
            .narrow(0, 0, 1)?
            .broadcast_to(&[3, 8])?
            .slice(&[1, 7], &[3, -9], &[1, -2])
    });
    suite.check("slice_update", "of a transposed view", EXACT, |b| {
        let update = array.on(b)?.narrow(0, 0, 2)?;
        array
            .laid_out(b, Layout::Transposed)?
            .slice_update(&update, &[2, 0], &[4, 8], &[1, 1])
    });
}

fn refusals(suite: &mut Suite<'_>) {
    let bad = status::INVALID_ARGUMENT;
    let array = Array::usual(DType::F32, &[2, 3], 14);
    for to in [&[5][..], &[-1, -1], &[4, -1], &[-2, 3]] {
        suite.refuses("reshape", format!("[2, 3] to {to:?}"), bad, |b| {
            array.on(b)?.reshape(to)
        });
    }
    for axes in [&[0][..], &[0, 0], &[0, 2], &[0, 1, 2]] {
        suite.refuses("transpose", format!("[2, 3] by {axes:?}"), bad, |b| {
            array.on(b)?.transpose(axes)
        });
    }
    for to in [&[3][..], &[2, 4], &[3, 3, 3]] {
        suite.refuses("broadcast_to", format!("[2, 3] to {to:?}"), bad, |b| {
            array.on(b)?.broadcast_to(to)
        });
    }
    let other = Array::usual(DType::F32, &[3, 2], 15);
    suite.refuses("concat", "shapes that do not fit", bad, |b| {
        Tensor::concat(b, &[&array.on(b)?, &other.on(b)?], 0)
    });
    suite.refuses("concat", "nothing", bad, |b| Tensor::concat(b, &[], 0));
    suite.refuses("concat", "axis 2 of [2, 3]", bad, |b| {
        Tensor::concat(b, &[&array.on(b)?], 2)
    });
    suite.refuses("slice", "a step of 0", bad, |b| {
        array.on(b)?.slice(&[0, 0], &[2, 3], &[1, 0])
    });
    suite.refuses("slice", "one entry for two axes", bad, |b| {
        array.on(b)?.slice(&[0], &[2], &[1])
    });
    suite.refuses("slice_update", "an update that does not fit", bad, |b| {
        array
            .on(b)?
            .slice_update(&other.on(b)?, &[0, 0], &[2, 3], &[1, 1])
    });
    suite.refuses("pad", "one entry for two axes", bad, |b| {
        array.on(b)?.pad(&[1], &[1], 0.0)
    });
    suite.refuses("pad", "a negative amount", bad, |b| {
        array.on(b)?.pad(&[0, -1], &[0, 0], 0.0)
    });
    suite.refuses("repeat", "-1 times", bad, |b| array.on(b)?.repeat(-1, 0));
    suite.refuses("repeat", "along axis 2 of [2, 3]", bad, |b| {
        array.on(b)?.repeat(2, 2)
    });
}
