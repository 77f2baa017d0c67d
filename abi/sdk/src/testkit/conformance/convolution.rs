//! Convolutions.

use mlxcel_abi::{DType, status};

use super::FLOATS;
use super::array::{Array, Layout};
use super::suite::Suite;
use super::tolerance::Tolerance;
use crate::{Conv, Tensor};

pub(super) fn run(suite: &mut Suite<'_>) {
    for dtype in FLOATS {
        one_axis(suite, dtype);
        two_axes(suite, dtype);
        three_axes(suite, dtype);
        transposed(suite, dtype);
    }
    refusals(suite);
}

fn check(suite: &mut Suite<'_>, dtype: DType, x: &[i64], w: &[i64], options: Conv, what: &str) {
    let (input, kernel) = (Array::usual(dtype, x, 1), Array::usual(dtype, w, 2));
    let terms: i64 = w[1..].iter().product();
    let near = Tolerance::accumulated(terms as usize, 2.0);
    let case = format!("{} {x:?} by {w:?} {what}", dtype.name());
    suite.check("conv", case, near, |b| {
        input.on(b)?.conv(&kernel.on(b)?, &options)
    });
}

fn one_axis(suite: &mut Suite<'_>, dtype: DType) {
    let plain = Conv::plain(1);
    check(suite, dtype, &[2, 9, 3], &[4, 3, 3], plain, "plain");
    check(
        suite,
        dtype,
        &[1, 9, 3],
        &[4, 3, 3],
        Conv {
            padding: [1, 0, 0],
            ..plain
        },
        "padded",
    );
    check(
        suite,
        dtype,
        &[1, 10, 2],
        &[5, 4, 2],
        Conv {
            stride: [2, 1, 1],
            ..plain
        },
        "stride 2",
    );
    check(
        suite,
        dtype,
        &[1, 12, 2],
        &[3, 3, 2],
        Conv {
            dilation: [3, 1, 1],
            ..plain
        },
        "dilation 3",
    );
    check(
        suite,
        dtype,
        &[1, 8, 6],
        &[6, 3, 1],
        Conv {
            groups: 6,
            padding: [2, 0, 0],
            ..plain
        },
        "depthwise",
    );
    check(
        suite,
        dtype,
        &[2, 7, 4],
        &[6, 2, 2],
        Conv { groups: 2, ..plain },
        "2 groups",
    );
    check(suite, dtype, &[1, 5, 80], &[16, 1, 80], plain, "pointwise");
    let input = Array::usual(dtype, &[1, 7, 4], 3);
    let kernel = Array::usual(dtype, &[3, 2, 4], 4);
    for layout in [Layout::Transposed, Layout::Strided] {
        let case = format!("{} {layout:?}", dtype.name());
        suite.check("conv", case, Tolerance::accumulated(8, 2.0), |b| {
            input
                .laid_out(b, layout)?
                .conv(&kernel.laid_out(b, layout)?, &plain)
        });
    }
}

fn two_axes(suite: &mut Suite<'_>, dtype: DType) {
    let plain = Conv::plain(2);
    check(suite, dtype, &[1, 6, 5, 3], &[4, 3, 3, 3], plain, "plain");
    check(
        suite,
        dtype,
        &[2, 5, 6, 2],
        &[3, 3, 2, 2],
        Conv {
            padding: [1, 2, 0],
            ..plain
        },
        "padded",
    );
    check(
        suite,
        dtype,
        &[1, 8, 8, 3],
        &[5, 4, 4, 3],
        Conv {
            stride: [4, 4, 1],
            ..plain
        },
        "patches",
    );
    check(
        suite,
        dtype,
        &[1, 7, 9, 1],
        &[2, 3, 3, 1],
        Conv {
            stride: [2, 3, 1],
            dilation: [2, 1, 1],
            ..plain
        },
        "strides and dilation",
    );
    check(
        suite,
        dtype,
        &[1, 5, 5, 4],
        &[4, 3, 3, 1],
        Conv {
            groups: 4,
            padding: [1, 1, 0],
            ..plain
        },
        "depthwise",
    );
}

fn three_axes(suite: &mut Suite<'_>, dtype: DType) {
    let plain = Conv::plain(3);
    check(
        suite,
        dtype,
        &[1, 4, 5, 4, 2],
        &[3, 2, 3, 2, 2],
        plain,
        "plain",
    );
    check(
        suite,
        dtype,
        &[1, 4, 4, 4, 1],
        &[2, 2, 2, 2, 1],
        Conv {
            stride: [2, 1, 2],
            padding: [1, 0, 1],
            ..plain
        },
        "padded, strides",
    );
}

fn transposed(suite: &mut Suite<'_>, dtype: DType) {
    let plain = Conv {
        transposed: true,
        ..Conv::plain(1)
    };
    check(suite, dtype, &[1, 5, 3], &[4, 3, 3], plain, "transposed");
    check(
        suite,
        dtype,
        &[2, 4, 2],
        &[3, 4, 2],
        Conv {
            stride: [2, 1, 1],
            padding: [1, 0, 0],
            ..plain
        },
        "transposed, stride 2",
    );
    check(
        suite,
        dtype,
        &[1, 4, 2],
        &[3, 3, 2],
        Conv {
            stride: [2, 1, 1],
            output_padding: [1, 0, 0],
            ..plain
        },
        "transposed, output padding",
    );
    let plain = Conv {
        transposed: true,
        ..Conv::plain(2)
    };
    check(
        suite,
        dtype,
        &[1, 3, 4, 2],
        &[3, 3, 2, 2],
        plain,
        "transposed",
    );
    check(
        suite,
        dtype,
        &[1, 3, 3, 2],
        &[2, 3, 3, 2],
        Conv {
            stride: [2, 2, 1],
            padding: [1, 1, 0],
            output_padding: [1, 1, 0],
            ..plain
        },
        "transposed, stride 2",
    );
}

fn refusals(suite: &mut Suite<'_>) {
    let x = Array::usual(DType::F32, &[1, 5, 4], 5);
    let mut refuse = |case: &str, w: &[i64], options: Conv| {
        let w = Array::usual(DType::F32, w, 6);
        let run =
            |b: &crate::Backend| -> crate::Result<Tensor> { x.on(b)?.conv(&w.on(b)?, &options) };
        suite.refuses("conv", case, status::INVALID_ARGUMENT, run);
    };
    let plain = Conv::plain(1);
    refuse("other channels", &[2, 3, 3], plain);
    refuse("a kernel larger than the input", &[2, 6, 4], plain);
    refuse(
        "groups that do not divide",
        &[2, 3, 4],
        Conv { groups: 3, ..plain },
    );
    refuse("two axes for a line", &[2, 3, 4], Conv::plain(2));
    refuse(
        "stride 0",
        &[2, 3, 4],
        Conv {
            stride: [0, 1, 1],
            ..plain
        },
    );
}
