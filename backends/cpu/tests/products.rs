//! Products, quantised weights, convolutions, Fourier transforms and random draws.

#[macro_use]
mod harness;

use std::ptr::null;

use harness::{Device, close_to, noise};
use mlxcel_abi::kinds::{binary, fft, quant, random, reduce};
use mlxcel_abi::ops_args::{ConvArgs, QuantSpec, QuantizedMatmulArgs, QuantizedWeight, RandomArgs};
use mlxcel_abi::{DType, Result, Tensor, status};

/// `[m, k] @ [k, n]`.
fn product(a: &[f32], b: &[f32], m: usize, k: usize, n: usize) -> Vec<f32> {
    let mut out = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            out[i * n + j] = (0..k).map(|x| a[i * k + x] * b[x * n + j]).sum();
        }
    }
    out
}

#[test]
fn matrix_products() {
    let d = Device::open();
    let (a, b) = (noise(1, 6), noise(2, 12));
    let expected = product(&a, &b, 2, 3, 4);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (x, w) = (d.of(dtype, &a, &[2, 3]), d.of(dtype, &b, &[3, 4]));
        d.expect(op!(d, matmul, x, w), dtype, &[2, 4], &expected);
        let c = d.of(dtype, &[1.0; 4], &[4]);
        let sum: Vec<f32> = expected.iter().map(|v| 2.0 * v + 0.5).collect();
        d.expect(op!(d, addmm, c, x, w, 2.0, 0.5), dtype, &[2, 4], &sum);
    }
    assert!(op!(d, matmul, d.f32s(&a, &[2, 3]), d.f32s(&b, &[4, 3])).is_err());
    assert!(op!(d, matmul, d.i32s(&[1], &[1, 1]), d.i32s(&[1], &[1, 1])).is_err());
}

#[test]
fn chosen_matrices() {
    let d = Device::open();
    let a = noise(3, 2 * 2 * 3);
    let b = noise(4, 3 * 3 * 2);
    let (x, w) = (d.f32s(&a, &[2, 2, 3]), d.f32s(&b, &[3, 3, 2]));
    let (lhs, rhs) = (d.u32s(&[1, 0], &[2]), d.u32s(&[2, 0], &[2]));
    let expected: Vec<f32> = [(1, 2), (0, 0)]
        .iter()
        .flat_map(|&(l, r)| product(&a[l * 6..], &b[r * 6..], 2, 3, 2))
        .collect();
    d.expect(
        op!(d, gather_matmul, x, w, lhs, rhs, 0),
        DType::F32,
        &[2, 2, 2],
        &expected,
    );
    let in_order: Vec<f32> = [(0, 2), (1, 0)]
        .iter()
        .flat_map(|&(l, r)| product(&a[l * 6..], &b[r * 6..], 2, 3, 2))
        .collect();
    d.expect(
        op!(d, gather_matmul, x, w, Tensor::NONE, rhs, 0),
        DType::F32,
        &[2, 2, 2],
        &in_order,
    );
}

#[test]
fn chosen_matrices_of_half_types() {
    let d = Device::open();
    let (a, b) = (noise(3, 6), noise(4, 12));
    for dtype in [DType::F16, DType::BF16] {
        let (x, w) = (d.of(dtype, &a, &[1, 2, 3]), d.of(dtype, &b, &[2, 3, 2]));
        let rhs = d.u32s(&[1], &[1]);
        let expected = product(&a, &b[6..], 2, 3, 2);
        let out = op!(d, gather_matmul, x, w, Tensor::NONE, rhs, 0);
        d.expect(out, dtype, &[1, 2, 2], &expected);
    }
    let wide = d.of(DType::F64, &[0.0; 4], &[1, 2, 2]);
    let one = d.u32s(&[0], &[1]);
    let refused = op!(d, gather_matmul, wide, wide, one, Tensor::NONE, 0).unwrap_err();
    assert_eq!(refused.code, status::UNIMPLEMENTED);
}

#[test]
fn products_with_nothing_in_them_do_not_trap() {
    let d = Device::open();
    let none = d.u32s(&[], &[0]);
    let (x, w) = (d.f32s(&[0.0; 6], &[1, 2, 3]), d.f32s(&[0.0; 6], &[1, 3, 2]));
    d.expect(
        op!(d, gather_matmul, x, w, none, none, 0),
        DType::F32,
        &[0, 2, 2],
        &[],
    );
    let no_inner = d.f32s(&[], &[1, 2, 0]);
    let out = op!(d, matmul, no_inner, d.f32s(&[], &[1, 0, 2]));
    d.expect(out, DType::F32, &[1, 2, 2], &[0.0; 4]);
    let packed = quantize(&d, d.f32s(&[], &[0, 64]), quant::AFFINE, 4, 32).unwrap();
    let args = QuantizedMatmulArgs {
        x: d.f32s(&[0.0; 64], &[1, 64]),
        w: packed,
        ..QuantizedMatmulArgs::default()
    };
    d.expect(
        op!(d, quantized_matmul, &raw const args),
        DType::F32,
        &[1, 0],
        &[],
    );
    d.expect(
        op!(d, dequantize, &raw const packed, DType::F16),
        DType::F16,
        &[0, 64],
        &[],
    );
}

fn quantize(
    d: &Device,
    w: Tensor,
    mode: u32,
    bits: u32,
    group_size: u32,
) -> Result<QuantizedWeight> {
    let spec = QuantSpec {
        mode,
        bits,
        group_size,
        ..QuantSpec::default()
    };
    let mut out = [Tensor::NONE; 3];
    run!(d, quantize, w, &raw const spec, &raw mut out)?;
    let [weight, scales, biases] = out;
    Ok(QuantizedWeight {
        weight,
        scales,
        biases,
        spec,
        ..QuantizedWeight::default()
    })
}

#[test]
fn quantised_products_match_the_expanded_weight() {
    let d = Device::open();
    let (n, k) = (8, 128);
    let w = noise(5, n * k);
    let x = noise(6, 3 * k);
    let formats = [
        (quant::AFFINE, 2, 64),
        (quant::AFFINE, 3, 64),
        (quant::AFFINE, 4, 32),
        (quant::AFFINE, 5, 64),
        (quant::AFFINE, 6, 128),
        (quant::AFFINE, 8, 64),
        (quant::MXFP4, 4, 32),
        (quant::MXFP8, 8, 32),
        (quant::NVFP4, 4, 16),
    ];
    for (mode, bits, group_size) in formats {
        let name = format!("{} {bits}/{group_size}", quant::name(mode));
        let packed = quantize(
            &d,
            d.f32s(&w, &[n as i64, k as i64]),
            mode,
            bits,
            group_size,
        )
        .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(packed.biases.is_none(), mode != quant::AFFINE, "{name}");
        let wide = op!(d, dequantize, &raw const packed, DType::F32)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let expanded = d.read(wide);
        let worst = expanded
            .iter()
            .zip(&w)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(
            worst < 2.0 / (1 << bits.min(4)) as f32 + 0.1,
            "{name}: off by {worst}"
        );
        let transposed: Vec<f32> = (0..k)
            .flat_map(|j| (0..n).map(move |i| (i, j)))
            .map(|(i, j)| expanded[i * k + j])
            .collect();
        let expected = product(&x, &transposed, 3, k, n);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let args = QuantizedMatmulArgs {
                x: d.of(dtype, &x, &[3, k as i64]),
                w: packed,
                ..QuantizedMatmulArgs::default()
            };
            let out = op!(d, quantized_matmul, &raw const args)
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(d.dtype(out), dtype, "{name}");
            close_to(
                &d.read(out),
                &expected,
                if dtype == DType::F32 { 1e-4 } else { 5e-2 },
            );
            let narrow = op!(d, dequantize, &raw const packed, dtype).unwrap();
            assert_eq!(d.dtype(narrow), dtype, "{name}");
        }
    }
}

#[test]
fn quantised_products_take_vectors_other_orders_and_experts() {
    let d = Device::open();
    let w = d.f32s(&noise(7, 2 * 32 * 64), &[2, 32, 64]);
    let packed = quantize(&d, w, quant::AFFINE, 4, 32).unwrap();
    let wide = d.read(op!(d, dequantize, &raw const packed, DType::F32).unwrap());
    let x = noise(8, 64);
    let rhs = d.u32s(&[1, 0, 1], &[3]);
    let rows = d.f32s(&x, &[1, 1, 64]);
    let args = QuantizedMatmulArgs {
        x: rows,
        w: packed,
        rhs_indices: rhs,
        lhs_indices: d.u32s(&[0, 0, 0], &[3]),
        ..QuantizedMatmulArgs::default()
    };
    let out = op!(d, gather_quantized_matmul, &raw const args).unwrap();
    assert_eq!(d.shape(out), [3, 1, 32]);
    let dot = |expert: usize, row: usize| -> f32 {
        (0..64)
            .map(|i| x[i] * wide[(expert * 32 + row) * 64 + i])
            .sum()
    };
    let expected: Vec<f32> = [1, 0, 1]
        .iter()
        .flat_map(|&e| (0..32).map(move |r| (e, r)))
        .map(|(e, r)| dot(e, r))
        .collect();
    close_to(&d.read(out), &expected, 1e-4);

    let one = quantize(
        &d,
        d.f32s(&noise(9, 32 * 64), &[32, 64]),
        quant::AFFINE,
        8,
        64,
    )
    .unwrap();
    let flat = d.read(op!(d, dequantize, &raw const one, DType::F32).unwrap());
    let vector = QuantizedMatmulArgs {
        x: d.f32s(&x, &[64]),
        w: one,
        ..QuantizedMatmulArgs::default()
    };
    let by_rows: Vec<f32> = (0..32)
        .map(|r| (0..64).map(|i| x[i] * flat[r * 64 + i]).sum())
        .collect();
    let out = op!(d, quantized_matmul, &raw const vector).unwrap();
    assert_eq!((d.dtype(out), d.shape(out)), (DType::F32, vec![32]));
    close_to(&d.read(out), &by_rows, 1e-4);
    let straight = QuantizedMatmulArgs {
        x: d.f32s(&x[..32], &[1, 32]),
        w: one,
        transpose: 0,
        ..QuantizedMatmulArgs::default()
    };
    let out = op!(d, quantized_matmul, &raw const straight).unwrap();
    close_to(&d.read(out), &product(&x[..32], &flat, 1, 32, 64), 1e-4);
}

#[test]
fn wrong_quantised_weights_are_refused_by_name() {
    let d = Device::open();
    let w = d.f32s(&noise(1, 64), &[1, 64]);
    let refused = |mode, bits, group_size| {
        quantize(&d, w, mode, bits, group_size)
            .map(|_| ())
            .unwrap_err()
    };
    assert_eq!(refused(quant::AFFINE, 7, 64).code, status::INVALID_ARGUMENT);
    assert_eq!(
        refused(quant::AFFINE, 4, 0).message,
        "quantize: affine has no form with 4 bits and groups of 0"
    );
    assert_eq!(refused(9, 4, 32).code, status::UNIMPLEMENTED);
    assert!(
        refused(quant::AFFINE, u32::MAX, 32)
            .message
            .contains("bits")
    );
    assert_eq!(
        refused(quant::AFFINE, 4, 128).code,
        status::INVALID_ARGUMENT
    );
    let mut packed = quantize(&d, w, quant::AFFINE, 4, 32).unwrap();
    let args = |w| QuantizedMatmulArgs {
        x: d.f32s(&[1.0; 64], &[1, 64]),
        w,
        ..QuantizedMatmulArgs::default()
    };
    let wrong_x = QuantizedMatmulArgs {
        x: d.f32s(&[1.0; 32], &[1, 32]),
        ..args(packed)
    };
    assert_eq!(
        op!(d, quantized_matmul, &raw const wrong_x)
            .unwrap_err()
            .code,
        status::INVALID_ARGUMENT
    );
    packed.biases = Tensor::NONE;
    let without_biases = args(packed);
    let message = op!(d, quantized_matmul, &raw const without_biases)
        .unwrap_err()
        .message;
    assert_eq!(message, "quantized_matmul: affine needs biases");
    packed.weight = d.f32s(&[1.0], &[1]);
    assert!(op!(d, dequantize, &raw const packed, DType::F32).is_err());
}

#[test]
fn convolutions() {
    let d = Device::open();
    let x = d.f32s(&[1.0, 2.0, 3.0, 4.0], &[1, 4, 1]);
    let w = d.f32s(&[1.0, 10.0], &[1, 2, 1]);
    let plain = ConvArgs {
        x,
        w,
        n_spatial: 1,
        ..ConvArgs::default()
    };
    d.expect(
        op!(d, conv, &raw const plain),
        DType::F32,
        &[1, 3, 1],
        &[21.0, 32.0, 43.0],
    );
    let padded = ConvArgs {
        padding_low: [1, 0, 0],
        stride: [2, 1, 1],
        ..plain
    };
    d.expect(
        op!(d, conv, &raw const padded),
        DType::F32,
        &[1, 2, 1],
        &[10.0, 32.0],
    );
    let dilated = ConvArgs {
        dilation: [2, 1, 1],
        padding_high: [1, 0, 0],
        ..plain
    };
    d.expect(
        op!(d, conv, &raw const dilated),
        DType::F32,
        &[1, 3, 1],
        &[31.0, 42.0, 3.0],
    );
    let spread = ConvArgs {
        transposed: 1,
        stride: [2, 1, 1],
        ..plain
    };
    d.expect(
        op!(d, conv, &raw const spread),
        DType::F32,
        &[1, 8, 1],
        &[1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0],
    );
    let cut = ConvArgs {
        padding_low: [1, 0, 0],
        padding_high: [1, 0, 0],
        output_padding: [1, 0, 0],
        ..spread
    };
    d.expect(
        op!(d, conv, &raw const cut),
        DType::F32,
        &[1, 7, 1],
        &[10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0],
    );
    let half = ConvArgs {
        x: d.of(DType::F16, &[1.0, 2.0], &[1, 2, 1]),
        w: d.of(DType::F16, &[1.0, 10.0], &[1, 2, 1]),
        ..plain
    };
    d.expect(
        op!(d, conv, &raw const half),
        DType::F16,
        &[1, 1, 1],
        &[21.0],
    );
}

#[test]
fn convolutions_in_groups_and_more_axes() {
    let d = Device::open();
    let x = d.f32s(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], &[1, 2, 2, 2]);
    let depthwise = ConvArgs {
        x,
        w: d.f32s(&[1.0, 100.0], &[2, 1, 1, 1]),
        n_spatial: 2,
        groups: 2,
        ..ConvArgs::default()
    };
    d.expect(
        op!(d, conv, &raw const depthwise),
        DType::F32,
        &[1, 2, 2, 2],
        &[1.0, 200.0, 3.0, 400.0, 5.0, 600.0, 7.0, 800.0],
    );
    let cube = ConvArgs {
        x: d.f32s(&[1.0; 8], &[1, 2, 2, 2, 1]),
        w: d.f32s(&[1.0; 8], &[1, 2, 2, 2, 1]),
        n_spatial: 3,
        ..ConvArgs::default()
    };
    d.expect(
        op!(d, conv, &raw const cube),
        DType::F32,
        &[1, 1, 1, 1, 1],
        &[8.0],
    );
    for wrong in [
        ConvArgs {
            groups: 0,
            ..depthwise
        },
        ConvArgs {
            groups: 3,
            ..depthwise
        },
        ConvArgs {
            stride: [0, 1, 1],
            ..depthwise
        },
        ConvArgs {
            n_spatial: 4,
            ..depthwise
        },
        ConvArgs {
            n_spatial: 1,
            ..depthwise
        },
        ConvArgs {
            padding_low: [-1, 0, 0],
            ..depthwise
        },
        ConvArgs {
            output_padding: [1, 0, 0],
            ..depthwise
        },
        ConvArgs {
            stride: [1, 1 << 40, 1],
            ..depthwise
        },
    ] {
        assert_eq!(
            op!(d, conv, &raw const wrong).unwrap_err().code,
            status::INVALID_ARGUMENT
        );
    }
    let too_small = ConvArgs {
        dilation: [5, 5, 5],
        ..cube
    };
    assert!(
        op!(d, conv, &raw const too_small)
            .unwrap_err()
            .message
            .contains("reaches over 6")
    );
}

#[test]
fn fourier_transforms() {
    let d = Device::open();
    let a = d.f32s(&[1.0, 2.0, 3.0, 4.0], &[4]);
    let (keep, axis) = ([0_i64], [0_i32]);
    let forward = op!(d, fft, fft::FFT, a, keep.as_ptr(), axis.as_ptr(), 1).unwrap();
    assert_eq!(d.dtype(forward), DType::C64);
    let parts = d.read(op!(d, view, forward, DType::F32).unwrap());
    close_to(&parts, &[10.0, 0.0, -2.0, 2.0, -2.0, 0.0, -2.0, -2.0], 1e-5);
    let back = op!(d, fft, fft::IFFT, forward, keep.as_ptr(), axis.as_ptr(), 1).unwrap();
    d.expect(
        op!(d, unary, mlxcel_abi::kinds::unary::REAL, back),
        DType::F32,
        &[4],
        &[1.0, 2.0, 3.0, 4.0],
    );
    let half = op!(d, fft, fft::RFFT, a, keep.as_ptr(), [-1_i32].as_ptr(), 1).unwrap();
    assert_eq!(d.shape(half), [3]);
    d.expect(
        op!(d, fft, fft::IRFFT, half, keep.as_ptr(), axis.as_ptr(), 1),
        DType::F32,
        &[4],
        &[1.0, 2.0, 3.0, 4.0],
    );
    let longer = op!(d, fft, fft::RFFT, a, [8_i64].as_ptr(), axis.as_ptr(), 1).unwrap();
    assert_eq!(d.shape(longer), [5]);
    assert!(op!(d, fft, fft::FFT, a, keep.as_ptr(), [1_i32].as_ptr(), 1).is_err());
    assert!(
        op!(
            d,
            fft,
            fft::FFT,
            a,
            [0_i64, 0].as_ptr(),
            [0_i32, 0].as_ptr(),
            2
        )
        .is_err()
    );
    assert!(op!(d, fft, fft::FFT, a, null(), null(), 0).is_err());
}

fn draw(
    d: &Device,
    kind: u32,
    dtype: DType,
    key: Tensor,
    dims: &[i64],
    a: f64,
    b: f64,
) -> Result<Tensor> {
    let args = RandomArgs {
        kind,
        dtype,
        key,
        dims: dims.as_ptr(),
        ndim: dims.len() as u32,
        a,
        b,
        ..RandomArgs::default()
    };
    op!(d, random, &raw const args)
}

#[test]
fn draws_depend_on_their_key_alone() {
    let d = Device::open();
    let key = op!(d, random_key, 7).unwrap();
    assert_eq!((d.dtype(key), d.shape(key)), (DType::U32, vec![2]));
    let keys = op!(d, random_split, key, 3).unwrap();
    assert_eq!(d.shape(keys), [3, 2]);
    let one = d.read(draw(&d, random::UNIFORM, DType::F32, key, &[64], -1.0, 3.0).unwrap());
    assert_eq!(
        one,
        d.read(draw(&d, random::UNIFORM, DType::F32, key, &[64], -1.0, 3.0).unwrap())
    );
    assert!(one.iter().all(|v| (-1.0..3.0).contains(v)));
    let other = op!(d, random_key, 8).unwrap();
    assert_ne!(
        one,
        d.read(draw(&d, random::UNIFORM, DType::F32, other, &[64], -1.0, 3.0).unwrap())
    );
    assert_eq!(
        draw(&d, random::BITS, DType::F32, keys, &[1], 0.0, 1.0)
            .unwrap_err()
            .code,
        status::INVALID_ARGUMENT
    );
}

#[test]
fn draws_have_their_distribution() {
    let d = Device::open();
    let key = op!(d, random_key, 1).unwrap();
    let dims = [20_000_i64];
    let mean = |t: Tensor| {
        d.read(
            op!(
                d,
                reduce,
                reduce::MEAN,
                op!(d, cast, t, DType::F32).unwrap(),
                null(),
                0,
                0
            )
            .unwrap(),
        )[0]
    };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let normal = draw(&d, random::NORMAL, dtype, key, &dims, 2.0, 0.5).unwrap();
        assert_eq!(d.dtype(normal), dtype);
        assert!((mean(normal) - 2.0).abs() < 0.05);
        let gumbel = draw(&d, random::GUMBEL, dtype, key, &dims, 0.0, 1.0).unwrap();
        assert_eq!(d.dtype(gumbel), dtype);
        assert!((mean(gumbel) - 0.577).abs() < 0.06, "{}", mean(gumbel));
    }
    let coin = draw(&d, random::BERNOULLI, DType::F32, key, &dims, 0.25, 0.0).unwrap();
    assert_eq!(d.dtype(coin), DType::BOOL);
    assert!((mean(coin) - 0.25).abs() < 0.02);
    assert_eq!(
        d.dtype(draw(&d, random::BITS, DType::F32, key, &[3], 0.0, 1.0).unwrap()),
        DType::U32
    );
    let logits = op!(
        d,
        binary,
        binary::ADD,
        d.f32s(&vec![0.0; 2000], &[1000, 2]),
        d.f32s(&[0.0, 3.0_f32.ln()], &[2])
    )
    .unwrap();
    let args = RandomArgs {
        kind: random::CATEGORICAL,
        key,
        logits,
        ..RandomArgs::default()
    };
    let drawn = op!(d, random, &raw const args).unwrap();
    assert_eq!((d.dtype(drawn), d.shape(drawn)), (DType::U32, vec![1000]));
    assert!((mean(drawn) - 0.75).abs() < 0.06);
    let none = RandomArgs {
        kind: random::CATEGORICAL,
        key,
        ..RandomArgs::default()
    };
    assert!(op!(d, random, &raw const none).is_err());
    assert_eq!(
        draw(&d, random::UNIFORM, DType::F64, key, &[1], 0.0, 1.0)
            .unwrap_err()
            .code,
        status::UNIMPLEMENTED
    );
}
