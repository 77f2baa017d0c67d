//! Creation, shapes, joining, cutting, indexing, reductions and order.

#[macro_use]
mod harness;

use std::ptr::null;

use harness::Device;
use mlxcel_abi::kinds::{arg_reduce, binary, cumulative, order, reduce, scatter};
use mlxcel_abi::ops_args::{GatherArgs, SliceArgs};
use mlxcel_abi::{DType, Result, Tensor};

fn slice(d: &Device, a: Tensor, starts: &[i64], stops: &[i64], strides: &[i64]) -> Result<Tensor> {
    let args = box_of(starts, stops, strides);
    op!(d, slice, a, &raw const args)
}

fn box_of(starts: &[i64], stops: &[i64], strides: &[i64]) -> SliceArgs {
    SliceArgs {
        ndim: starts.len() as u32,
        starts: starts.as_ptr(),
        stops: stops.as_ptr(),
        strides: strides.as_ptr(),
        ..SliceArgs::default()
    }
}

fn count(d: &Device, n: usize, dims: &[i64]) -> Tensor {
    d.f32s(&(0..n).map(|i| i as f32).collect::<Vec<_>>(), dims)
}

#[test]
fn creation() {
    let d = Device::open();
    let dims = [2_i64, 2];
    for dtype in DType::ALL {
        let full = op!(d, full, 1.0, *dtype, dims.as_ptr(), 2);
        d.expect(full, *dtype, &dims, &[1.0; 4]);
    }
    d.expect(
        op!(d, full, 3.0, DType::I64, null(), 0),
        DType::I64,
        &[],
        &[3.0],
    );
    assert!(op!(d, full, 300.0, DType::U8, dims.as_ptr(), 2).is_err());
    assert!(op!(d, full, f64::NAN, DType::I32, dims.as_ptr(), 2).is_err());
    d.expect(
        op!(d, arange, 1.0, 2.0, 0.25, DType::F32),
        DType::F32,
        &[4],
        &[1.0, 1.25, 1.5, 1.75],
    );
    d.expect(
        op!(d, arange, 3.0, 0.0, -1.0, DType::I32),
        DType::I32,
        &[3],
        &[3.0, 2.0, 1.0],
    );
    d.expect(
        op!(d, arange, 1.0, 1.0, 1.0, DType::I32),
        DType::I32,
        &[0],
        &[],
    );
    assert!(op!(d, arange, 0.0, 1.0, 0.0, DType::F32).is_err());
    d.expect(
        op!(d, eye, 2, 3, 1, DType::F16),
        DType::F16,
        &[2, 3],
        &[0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
    );
    d.expect(
        op!(d, eye, 1, 2, i64::MAX, DType::F32),
        DType::F32,
        &[1, 2],
        &[0.0, 0.0],
    );
}

#[test]
fn shapes_change() {
    let d = Device::open();
    let a = count(&d, 6, &[2, 3]);
    let dims = [3_i64, -1];
    d.expect(
        op!(d, reshape, a, dims.as_ptr(), 2),
        DType::F32,
        &[3, 2],
        &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
    );
    let axes = [1_i32, 0];
    d.expect(
        op!(d, transpose, a, axes.as_ptr(), 2),
        DType::F32,
        &[3, 2],
        &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0],
    );
    let wide = [2_i64, 2, 3];
    let spread = op!(d, broadcast_to, d.f32s(&[7.0], &[1, 1]), wide.as_ptr(), 3);
    d.expect(spread, DType::F32, &wide, &[7.0; 12]);
    let negative = op!(d, transpose, a, [-1_i32, -2].as_ptr(), 2).unwrap();
    let packed = op!(d, contiguous, negative);
    d.expect(packed, DType::F32, &[3, 2], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
}

#[test]
fn joining_and_repeating() {
    let d = Device::open();
    let (a, b) = (count(&d, 2, &[1, 2]), d.f32s(&[8.0, 9.0], &[1, 2]));
    let both = [a, b];
    d.expect(
        op!(d, concat, both.as_ptr(), 2, 0),
        DType::F32,
        &[2, 2],
        &[0.0, 1.0, 8.0, 9.0],
    );
    d.expect(
        op!(d, concat, both.as_ptr(), 2, -1),
        DType::F32,
        &[1, 4],
        &[0.0, 1.0, 8.0, 9.0],
    );
    let mixed = [d.of(DType::BF16, &[1.0], &[1]), d.f32s(&[2.0], &[1])];
    d.expect(
        op!(d, concat, mixed.as_ptr(), 2, 0),
        DType::F32,
        &[2],
        &[1.0, 2.0],
    );
    d.expect(
        op!(d, repeat, a, 2, 1),
        DType::F32,
        &[1, 4],
        &[0.0, 0.0, 1.0, 1.0],
    );
    d.expect(
        op!(d, tile, a, [2_i64, 1, 2].as_ptr(), 3),
        DType::F32,
        &[2, 1, 4],
        &[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0],
    );
    let (low, high) = ([1_i64, 0], [0_i64, 1]);
    d.expect(
        op!(d, pad, a, low.as_ptr(), high.as_ptr(), 2, 5.0),
        DType::F32,
        &[2, 3],
        &[5.0, 5.0, 5.0, 0.0, 1.0, 5.0],
    );
    d.expect(op!(d, repeat, a, 0, 1), DType::F32, &[1, 0], &[]);
}

#[test]
fn slices_are_pythons() {
    let d = Device::open();
    let a = count(&d, 12, &[3, 4]);
    d.expect(
        slice(&d, a, &[0, 1], &[3, 4], &[2, 2]),
        DType::F32,
        &[2, 2],
        &[1.0, 3.0, 9.0, 11.0],
    );
    d.expect(
        slice(&d, a, &[-1, 0], &[3, -1], &[1, 1]),
        DType::F32,
        &[1, 3],
        &[8.0, 9.0, 10.0],
    );
    d.expect(
        slice(&d, a, &[0, 3], &[1, i64::MIN], &[1, -1]),
        DType::F32,
        &[1, 4],
        &[3.0, 2.0, 1.0, 0.0],
    );
    d.expect(
        slice(&d, a, &[0, 0], &[i64::MAX, 1], &[i64::MAX, 1]),
        DType::F32,
        &[1, 1],
        &[0.0],
    );
    d.expect(
        slice(&d, a, &[2, 0], &[1, 4], &[1, 1]),
        DType::F32,
        &[0, 4],
        &[],
    );
    assert!(slice(&d, a, &[0], &[1], &[1]).is_err());
    let zero = slice(&d, a, &[0, 0], &[1, 1], &[1, 0]).unwrap_err();
    assert_eq!(zero.message, "slice: strides [1, 0] contain 0");
}

#[test]
fn boxes_are_replaced() {
    let d = Device::open();
    let a = count(&d, 6, &[2, 3]);
    let args = box_of(&[0, 1], &[2, 3], &[1, 1]);
    let update = d.of(DType::F16, &[7.0, 8.0], &[1, 2]);
    let out = op!(d, slice_update, a, update, &raw const args);
    d.expect(out, DType::F32, &[2, 3], &[0.0, 7.0, 8.0, 3.0, 7.0, 8.0]);
    d.expect(Ok(a), DType::F32, &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert!(op!(d, slice_update, a, count(&d, 3, &[3]), &raw const args).is_err());
}

#[test]
fn taking_and_putting() {
    let d = Device::open();
    let a = count(&d, 6, &[2, 3]);
    let indices = d.i32s(&[2, 0], &[2]);
    d.expect(
        op!(d, take, a, indices, 1),
        DType::F32,
        &[2, 2],
        &[2.0, 0.0, 5.0, 3.0],
    );
    let grid = d.u32s(&[1, 0, 1, 1], &[2, 2]);
    d.expect(
        op!(d, take, a, grid, 0).map(|t| t),
        DType::F32,
        &[2, 2, 3],
        &[3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 3.0, 4.0, 5.0],
    );
    let along = d.i32s(&[2, 1], &[2, 1]);
    d.expect(
        op!(d, take_along, a, along, -1),
        DType::F32,
        &[2, 1],
        &[2.0, 4.0],
    );
    let values = d.f32s(&[-1.0, -2.0], &[2, 1]);
    d.expect(
        op!(d, put_along, a, along, values, 1),
        DType::F32,
        &[2, 3],
        &[0.0, 1.0, -1.0, 3.0, -2.0, 5.0],
    );
    let error = op!(d, take, a, a, 0).unwrap_err();
    assert_eq!(
        error.message,
        "take: indices are of type f32, integers are needed"
    );
    assert!(
        op!(d, take, a, indices, 2)
            .unwrap_err()
            .message
            .contains("axis 2 does not exist in shape [2, 3]")
    );
    assert!(op!(d, take, a, d.bools(&[true], &[1]), 0).is_err());
}

#[test]
fn gather_and_scatter() {
    let d = Device::open();
    let a = count(&d, 6, &[2, 3]);
    let indices = [d.i32s(&[0, 1], &[2]), d.i32s(&[2, 1], &[2])];
    let axes = [0_u32, 1];
    let sizes = [1_i64, 1];
    let mut args = GatherArgs {
        indices: indices.as_ptr(),
        axes: axes.as_ptr(),
        n_indices: 2,
        ndim: 2,
        slice_sizes: sizes.as_ptr(),
        ..GatherArgs::default()
    };
    d.expect(
        op!(d, gather, a, &raw const args),
        DType::F32,
        &[2, 1, 1],
        &[2.0, 4.0],
    );
    let updates = d.f32s(&[10.0, 20.0], &[2, 1, 1]);
    for (kind, first, second) in [
        (scatter::SET, 10.0, 20.0),
        (scatter::ADD, 12.0, 24.0),
        (scatter::MUL, 20.0, 80.0),
        (scatter::MAX, 10.0, 20.0),
        (scatter::MIN, 2.0, 4.0),
    ] {
        let out = op!(d, scatter, kind, a, updates, &raw const args);
        d.expect(
            out,
            DType::F32,
            &[2, 3],
            &[0.0, 1.0, first, 3.0, second, 5.0],
        );
    }
    let nowhere = [d.i32s(&[], &[0]), d.i32s(&[], &[0])];
    let nothing = GatherArgs {
        indices: nowhere.as_ptr(),
        ..args
    };
    let out = op!(
        d,
        scatter,
        scatter::ADD,
        a,
        d.f32s(&[], &[0, 1, 1]),
        &raw const nothing
    );
    d.expect(out, DType::F32, &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let flat = d.f32s(&[1.0, 2.0], &[2]);
    assert!(op!(d, scatter, scatter::SET, a, flat, &raw const args).is_err());
    let twice = [0_u32, 0];
    args.axes = twice.as_ptr();
    assert!(op!(d, gather, a, &raw const args).is_err());
}

#[test]
fn reductions_keep_the_type() {
    let d = Device::open();
    let values = [1.0, 2.0, 3.0, 6.0];
    let lse = values.iter().map(|v: &f32| v.exp()).sum::<f32>().ln();
    let cases = [
        (reduce::SUM, 12.0),
        (reduce::MEAN, 3.0),
        (reduce::PROD, 36.0),
        (reduce::MAX, 6.0),
        (reduce::MIN, 1.0),
        (reduce::VAR, 3.5),
        (reduce::LOGSUMEXP, lse),
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let a = d.of(dtype, &values, &[2, 2]);
        for (kind, expected) in cases {
            d.expect(
                op!(d, reduce, kind, a, null(), 0, 0),
                dtype,
                &[],
                &[expected],
            );
            d.expect(
                op!(d, reduce, kind, a, [0_i32, -1].as_ptr(), 2, 1),
                dtype,
                &[1, 1],
                &[expected],
            );
        }
        d.expect(
            op!(d, reduce, reduce::SUM, a, [1_i32].as_ptr(), 1, 0),
            dtype,
            &[2],
            &[3.0, 9.0],
        );
    }
    let whole = d.i32s(&[1, 2, 3, 5], &[4]);
    d.expect(
        op!(d, reduce, reduce::SUM, whole, null(), 0, 0),
        DType::I32,
        &[],
        &[11.0],
    );
    d.expect(
        op!(d, reduce, reduce::MEAN, whole, null(), 0, 0),
        DType::F32,
        &[],
        &[2.75],
    );
    let bytes = d.bytes(DType::U8, &[3, 4], &[2]);
    d.expect(
        op!(d, reduce, reduce::SUM, bytes, null(), 0, 0),
        DType::U32,
        &[],
        &[7.0],
    );
    let truth = d.bools(&[true, false, true], &[3]);
    d.expect(
        op!(d, reduce, reduce::SUM, truth, null(), 0, 0),
        DType::I32,
        &[],
        &[2.0],
    );
    d.expect(
        op!(d, reduce, reduce::ALL_OF, truth, null(), 0, 0),
        DType::BOOL,
        &[],
        &[0.0],
    );
    d.expect(
        op!(d, reduce, reduce::ANY_OF, truth, null(), 0, 0),
        DType::BOOL,
        &[],
        &[1.0],
    );
    let empty = d.f32s(&[], &[0]);
    d.expect(
        op!(d, reduce, reduce::SUM, empty, null(), 0, 0),
        DType::F32,
        &[],
        &[0.0],
    );
    assert!(op!(d, reduce, reduce::MAX, empty, null(), 0, 0).is_err());
    assert!(op!(d, reduce, reduce::SUM, whole, [1_i32].as_ptr(), 1, 0).is_err());
}

#[test]
fn half_sums_accumulate_in_f32() {
    let d = Device::open();
    let many = [70_000_i64];
    let ones = op!(d, full, 1.0, DType::F16, many.as_ptr(), 1).unwrap();
    d.expect(
        op!(d, reduce, reduce::MEAN, ones, null(), 0, 0),
        DType::F16,
        &[],
        &[1.0],
    );
    let fine = op!(d, full, 0.001, DType::BF16, many.as_ptr(), 1).unwrap();
    let sum = op!(d, reduce, reduce::SUM, fine, null(), 0, 0).unwrap();
    assert!((d.read(sum)[0] - 70.0).abs() < 0.5);
}

#[test]
fn extremes_by_index_take_the_first() {
    let d = Device::open();
    let a = d.f32s(&[3.0, 5.0, 5.0, 1.0, 1.0, 2.0], &[2, 3]);
    d.expect(
        op!(d, arg_reduce, arg_reduce::ARGMAX, a, 1, 0),
        DType::U32,
        &[2],
        &[1.0, 2.0],
    );
    d.expect(
        op!(d, arg_reduce, arg_reduce::ARGMIN, a, -1, 1),
        DType::U32,
        &[2, 1],
        &[0.0, 0.0],
    );
}

#[test]
fn running_reductions() {
    let d = Device::open();
    let a = d.f32s(&[1.0, 3.0, 2.0], &[3]);
    let cases: [(u32, u32, u32, [f32; 3]); 5] = [
        (cumulative::CUMSUM, 0, 1, [1.0, 4.0, 6.0]),
        (cumulative::CUMSUM, 1, 1, [6.0, 5.0, 2.0]),
        (cumulative::CUMSUM, 0, 0, [0.0, 1.0, 4.0]),
        (cumulative::CUMPROD, 0, 1, [1.0, 3.0, 6.0]),
        (cumulative::CUMMAX, 0, 1, [1.0, 3.0, 3.0]),
    ];
    for (kind, reverse, inclusive, expected) in cases {
        d.expect(
            op!(d, cumulative, kind, a, 0, reverse, inclusive),
            DType::F32,
            &[3],
            &expected,
        );
    }
    d.expect(
        op!(d, cumulative, cumulative::CUMMIN, a, 0, 1, 1),
        DType::F32,
        &[3],
        &[1.0, 2.0, 2.0],
    );
    let half = d.of(DType::F16, &[0.0, 0.0], &[2]);
    d.expect(
        op!(d, cumulative, cumulative::LOGCUMSUMEXP, half, 0, 0, 1),
        DType::F16,
        &[2],
        &[0.0, 2.0_f32.ln()],
    );
    assert!(
        op!(d, cumulative, cumulative::CUMSUM, a, 0, 2, 1)
            .unwrap_err()
            .message
            .contains("reverse is 0 or 1")
    );
}

#[test]
fn order_and_softmax() {
    let d = Device::open();
    let a = d.of(DType::F16, &[3.0, 1.0, 2.0, 4.0], &[4]);
    d.expect(
        op!(d, order, order::SORT, a, 0, 0),
        DType::F16,
        &[4],
        &[1.0, 2.0, 3.0, 4.0],
    );
    d.expect(
        op!(d, order, order::ARGSORT, a, 0, 0),
        DType::U32,
        &[4],
        &[1.0, 2.0, 0.0, 3.0],
    );
    let partition = op!(d, order, order::PARTITION, a, 1, 0).unwrap();
    assert_eq!(d.read(partition)[1], 2.0);
    let by_index = op!(d, order, order::ARGPARTITION, a, -1, 0).unwrap();
    assert_eq!((d.dtype(by_index), d.read(by_index)[3]), (DType::U32, 3.0));
    let mut top = d.read(op!(d, order, order::TOPK, a, 2, 0).unwrap());
    top.sort_by(f32::total_cmp);
    assert_eq!(top, [3.0, 4.0]);
    assert!(op!(d, order, order::TOPK, a, 5, 0).is_err());
    assert!(op!(d, order, order::PARTITION, a, 4, 0).is_err());
    let third = 1.0 / 3.0;
    let even = op!(d, softmax, d.of(DType::BF16, &[5.0, 5.0, 5.0], &[1, 3]), -1);
    d.expect(even, DType::BF16, &[1, 3], &[third, third, third]);
    let large = op!(d, softmax, d.f32s(&[1000.0, 0.0], &[2]), 0);
    d.expect(large, DType::F32, &[2], &[1.0, 0.0]);
}

#[test]
fn broadcasting_is_checked() {
    let d = Device::open();
    let error = op!(
        d,
        binary,
        binary::ADD,
        count(&d, 2, &[2]),
        count(&d, 3, &[3])
    )
    .unwrap_err();
    assert_eq!(error.code, mlxcel_abi::status::INVALID_ARGUMENT);
    assert!(error.message.starts_with("binary: "), "{error}");
}
