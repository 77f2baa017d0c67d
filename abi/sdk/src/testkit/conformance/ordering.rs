//! Index of extremes, sorting, partitions, largest elements.

use mlxcel_abi::kinds::order as kind;
use mlxcel_abi::{DType, status};

use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::{Backend, Result, Tensor};

const DTYPES: [DType; 6] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::U8,
    DType::I64,
];

const LANES: [(&[i64], i32); 6] = [
    (&[9], 0),
    (&[3, 8], -1),
    (&[8, 3], 0),
    (&[2, 5, 3], 1),
    (&[2, 300], 1),
    (&[4, 1], 1),
];

pub(super) fn run(suite: &mut Suite<'_>) {
    extremes(suite);
    sorts(suite);
    partitions(suite);
    largest(suite);
    refusals(suite);
}

fn extremes(suite: &mut Suite<'_>) {
    for dtype in DTYPES {
        for (dims, axis) in LANES {
            // Integers repeat, so that ties occur.
            let array = Array::usual(dtype, dims, 1);
            for keep in [false, true] {
                let case = format!(
                    "{} {dims:?} along {axis}{}",
                    dtype.name(),
                    if keep { " kept" } else { "" }
                );
                suite.check(
                    "arg_reduce",
                    format!("argmax {case}"),
                    Tolerance::EXACT,
                    |b| array.on(b)?.argmax(axis, keep),
                );
                suite.check(
                    "arg_reduce",
                    format!("argmin {case}"),
                    Tolerance::EXACT,
                    |b| array.on(b)?.argmin(axis, keep),
                );
            }
        }
        let ties = Array::of(
            dtype,
            &[2, 5],
            [1.0, 3.0, 3.0, 0.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0],
        );
        let case = format!("argmax {} of ties", dtype.name());
        suite.check("arg_reduce", case, Tolerance::EXACT, |b| {
            ties.on(b)?.argmax(1, false)
        });
        for layout in [Layout::Transposed, Layout::Strided] {
            let array = Array::usual(dtype, &[4, 6], 2);
            let case = format!("argmax {} {layout:?}", dtype.name());
            suite.check("arg_reduce", case, Tolerance::EXACT, |b| {
                array.laid_out(b, layout)?.argmax(1, false)
            });
        }
    }
    let infinite = Array::of(
        DType::F32,
        &[4],
        [f64::NEG_INFINITY, -1.0, f64::INFINITY, 0.0],
    );
    suite.check(
        "arg_reduce",
        "argmax with infinities",
        Tolerance::EXACT,
        |b| infinite.on(b)?.argmax(0, false),
    );
    suite.check(
        "arg_reduce",
        "argmin with infinities",
        Tolerance::EXACT,
        |b| infinite.on(b)?.argmin(0, false),
    );
}

fn sorts(suite: &mut Suite<'_>) {
    for dtype in DTYPES {
        for (dims, axis) in LANES {
            let array = Array::usual(dtype, dims, 3);
            let case = format!("{} {dims:?} along {axis}", dtype.name());
            suite.check("order", format!("sort {case}"), Tolerance::EXACT, |b| {
                array.on(b)?.sort(axis)
            });
            // Equal elements may come in any order, so the order is judged by what it picks.
            suite.check("order", format!("argsort {case}"), Tolerance::EXACT, |b| {
                let a = array.on(b)?;
                a.take_along(&a.argsort(axis)?, axis)
            });
            suite.check(
                "order",
                format!("argsort {case} is a permutation"),
                Tolerance::EXACT,
                |b| array.on(b)?.argsort(axis)?.sort(axis),
            );
        }
        for layout in [Layout::Transposed, Layout::Strided] {
            let array = Array::usual(dtype, &[4, 6], 4);
            let case = format!("sort {} {layout:?}", dtype.name());
            suite.check("order", case, Tolerance::EXACT, |b| {
                array.laid_out(b, layout)?.sort(-1)
            });
        }
    }
    let odd = Array::of(
        DType::F32,
        &[6],
        [2.0, f64::INFINITY, f64::NAN, -1.0, f64::NEG_INFINITY, 0.0],
    );
    suite.check("order", "sort puts NaN last", Tolerance::EXACT, |b| {
        odd.on(b)?.sort(0)
    });
}

/// A partition with both sides sorted is fully determined by what the contract says of it.
fn partitions(suite: &mut Suite<'_>) {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::I32] {
        for (dims, axis, k) in [
            (&[9][..], 0, 4),
            (&[3, 8], -1, 0),
            (&[8, 3], 0, 7),
            (&[2, 5, 3], 1, 2),
            (&[2, 300], 1, 250),
        ] {
            let array = Array::usual(dtype, dims, 5);
            let case = format!("{} {dims:?} along {axis} at {k}", dtype.name());
            suite.check(
                "order",
                format!("partition {case}"),
                Tolerance::EXACT,
                |b| sides(&array.on(b)?.partition(k, axis)?, k, axis),
            );
            suite.check(
                "order",
                format!("argpartition {case}"),
                Tolerance::EXACT,
                |b| {
                    let a = array.on(b)?;
                    sides(&a.take_along(&a.argpartition(k, axis)?, axis)?, k, axis)
                },
            );
            suite.check(
                "order",
                format!("argpartition {case} is a permutation"),
                Tolerance::EXACT,
                |b| array.on(b)?.argpartition(k, axis)?.sort(axis),
            );
        }
    }
}

/// Sorts the elements up to the one at `k`, and those after it.
fn sides(partitioned: &Tensor, k: i64, axis: i32) -> Result<Tensor> {
    let size = partitioned.dim(axis)?;
    let low = partitioned.narrow(axis, 0, k)?.sort(axis)?;
    let middle = partitioned.narrow(axis, k, 1)?;
    let high = partitioned.narrow(axis, k + 1, size - k - 1)?.sort(axis)?;
    Tensor::concat(partitioned.backend(), &[&low, &middle, &high], axis)
}

fn largest(suite: &mut Suite<'_>) {
    for dtype in DTYPES {
        for (dims, axis, k) in [
            (&[9][..], 0, 3),
            (&[3, 8], -1, 1),
            (&[8, 3], 0, 5),
            (&[3, 4], 1, 4),
            (&[2, 300], 1, 40),
        ] {
            let array = Array::usual(dtype, dims, 6);
            let case = format!("topk {k} of {} {dims:?} along {axis}", dtype.name());
            suite.check("order", case, Tolerance::EXACT, |b| {
                array.on(b)?.topk(k, axis)?.sort(axis)
            });
        }
    }
}

fn refusals(suite: &mut Suite<'_>) {
    let array = Array::usual(DType::F32, &[2, 3], 7);
    let ordered = |code: u32, k: i64, axis: i32| {
        let array = array.clone();
        move |b: &Backend| -> Result<Tensor> {
            let a = array.on(b)?;
            op!(b, order, code, a.handle(), k, axis)
        }
    };
    suite.refuses(
        "order",
        "axis 2 of [2, 3]",
        status::INVALID_ARGUMENT,
        ordered(kind::SORT, 0, 2),
    );
    suite.refuses(
        "order",
        "4 largest of 3",
        status::INVALID_ARGUMENT,
        ordered(kind::TOPK, 4, 1),
    );
    suite.refuses(
        "order",
        "-1 largest",
        status::INVALID_ARGUMENT,
        ordered(kind::TOPK, -1, 1),
    );
    suite.refuses(
        "order",
        "position 3 of 3",
        status::INVALID_ARGUMENT,
        ordered(kind::PARTITION, 3, 1),
    );
    suite.refuses(
        "order",
        "an unknown order",
        status::UNIMPLEMENTED,
        ordered(9999, 0, 1),
    );
    suite.refuses(
        "arg_reduce",
        "axis -3 of [2, 3]",
        status::INVALID_ARGUMENT,
        |b| array.on(b)?.argmax(-3, false),
    );
    suite.refuses("arg_reduce", "an unknown one", status::UNIMPLEMENTED, |b| {
        let a = array.on(b)?;
        op!(b, arg_reduce, 9999, a.handle(), 0, 0)
    });
    let empty = Array::usual(DType::F32, &[2, 0], 8);
    suite.refuses(
        "arg_reduce",
        "argmax over an empty axis",
        status::INVALID_ARGUMENT,
        |b| empty.on(b)?.argmax(1, false),
    );
}
