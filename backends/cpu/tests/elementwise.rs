//! Elementwise functions, scalars, selection and their dtypes.

#[macro_use]
mod harness;

use harness::Device;
use mlxcel_abi::kinds::{binary, glu, unary};
use mlxcel_abi::{DType, Tensor};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

#[test]
fn adds_and_reads() {
    let d = Device::open();
    let (a, b) = (d.f32s(&[1.0, 2.0, 3.0], &[3]), d.f32s(&[10.0], &[1]));
    d.expect(
        op!(d, binary, binary::ADD, a, b),
        DType::F32,
        &[3],
        &[11.0, 12.0, 13.0],
    );
}

#[test]
fn every_unary_function_has_its_value() {
    let d = Device::open();
    let x: f64 = 0.4;
    let tanh_arg = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let erf = 0.428_392_355_046_668_4;
    let erf_of_scaled = 0.310_843_483_220_648_4;
    let cases: &[(u32, f64)] = &[
        (unary::NEG, -x),
        (unary::ABS, x),
        (unary::SIGN, 1.0),
        (unary::EXP, x.exp()),
        (unary::EXPM1, x.exp_m1()),
        (unary::LOG, x.ln()),
        (unary::LOG2, x.log2()),
        (unary::LOG10, x.log10()),
        (unary::LOG1P, x.ln_1p()),
        (unary::SQRT, x.sqrt()),
        (unary::RSQRT, 1.0 / x.sqrt()),
        (unary::SQUARE, x * x),
        (unary::RECIPROCAL, 1.0 / x),
        (unary::SIN, x.sin()),
        (unary::COS, x.cos()),
        (unary::TAN, x.tan()),
        (unary::ASIN, x.asin()),
        (unary::ACOS, x.acos()),
        (unary::ATAN, x.atan()),
        (unary::SINH, x.sinh()),
        (unary::COSH, x.cosh()),
        (unary::TANH, x.tanh()),
        (unary::ASINH, x.asinh()),
        (unary::ATANH, x.atanh()),
        (unary::ERF, erf),
        (unary::ERFINV, 0.370_807_158_593_557_5),
        (unary::SIGMOID, sigmoid(x)),
        (unary::FLOOR, 0.0),
        (unary::CEIL, 1.0),
        (unary::ROUND, 0.0),
        (unary::REAL, x),
        (unary::IMAG, 0.0),
        (unary::CONJ, x),
        (unary::SILU, x * sigmoid(x)),
        (unary::GELU, 0.5 * x * (1.0 + erf_of_scaled)),
        (unary::GELU_TANH, 0.5 * x * (1.0 + tanh_arg.tanh())),
        (unary::GELU_QUICK, x * sigmoid(1.702 * x)),
        (unary::RELU, x),
        (unary::RELU_SQUARED, x * x),
        (unary::SOFTPLUS, x.exp().ln_1p()),
        (unary::LOG_SIGMOID, sigmoid(x).ln()),
    ];
    for &(kind, expected) in cases {
        let name = unary::name(kind);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let a = d.of(dtype, &[0.4], &[1]);
            let out = op!(d, unary, kind, a).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(d.dtype(out), dtype, "{name} changed the type");
            let found = f64::from(d.read(out)[0]);
            let tolerance = if dtype == DType::F32 { 2e-6 } else { 1e-2 };
            assert!(
                (found - expected).abs() <= tolerance * expected.abs().max(1.0),
                "{name} {}: {found}, expected {expected}",
                dtype.name()
            );
        }
    }
    d.expect(
        op!(d, unary, unary::ACOSH, d.f32s(&[2.0], &[1])),
        DType::F32,
        &[1],
        &[2.0_f32.acosh()],
    );
}

#[test]
fn tests_of_numbers_give_bools() {
    let d = Device::open();
    let a = d.f32s(&[0.0, 1.0, f32::NAN, f32::INFINITY], &[4]);
    for (kind, expected) in [
        (unary::LOGICAL_NOT, [1.0, 0.0, 0.0, 0.0]),
        (unary::IS_NAN, [0.0, 0.0, 1.0, 0.0]),
        (unary::IS_INF, [0.0, 0.0, 0.0, 1.0]),
        (unary::IS_FINITE, [1.0, 1.0, 0.0, 0.0]),
    ] {
        d.expect(op!(d, unary, kind, a), DType::BOOL, &[4], &expected);
    }
}

#[test]
fn functions_of_integers_become_f32_only_where_they_must() {
    let d = Device::open();
    let a = d.i32s(&[-4, 9], &[2]);
    for (kind, expected) in [
        (unary::NEG, [4.0, -9.0]),
        (unary::ABS, [4.0, 9.0]),
        (unary::SQUARE, [16.0, 81.0]),
        (unary::FLOOR, [-4.0, 9.0]),
        (unary::BIT_NOT, [3.0, -10.0]),
        (unary::RELU, [0.0, 9.0]),
    ] {
        d.expect(op!(d, unary, kind, a), DType::I32, &[2], &expected);
    }
    d.expect(
        op!(d, unary, unary::SQRT, d.i32s(&[9], &[1])),
        DType::F32,
        &[1],
        &[3.0],
    );
    d.expect(
        op!(d, unary, unary::NEG, d.bools(&[true], &[1])),
        DType::F32,
        &[1],
        &[-1.0],
    );
    d.expect(
        op!(d, unary, unary::GELU, d.i32s(&[0], &[1])),
        DType::F32,
        &[1],
        &[0.0],
    );
}

#[test]
fn large_negative_gelu_keeps_its_digits_in_half() {
    let d = Device::open();
    let out = op!(d, unary, unary::GELU, d.of(DType::F16, &[-3.0], &[1])).unwrap();
    let expected = -3.0 * 0.001_349_898;
    assert!((d.read(out)[0] - expected).abs() < 1e-5);
}

#[test]
fn every_binary_function_has_its_value() {
    let d = Device::open();
    let (x, y) = (5.5_f32, -2.0_f32);
    let cases: &[(u32, f32)] = &[
        (binary::ADD, 3.5),
        (binary::SUB, 7.5),
        (binary::MUL, -11.0),
        (binary::DIV, -2.75),
        (binary::FLOOR_DIV, -3.0),
        (binary::REM, -0.5),
        (binary::POW, 1.0 / 30.25),
        (binary::MIN, y),
        (binary::MAX, x),
        (binary::ATAN2, x.atan2(y)),
        (binary::LOGADDEXP, x + (y - x).exp().ln_1p()),
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for &(kind, expected) in cases {
            d.expect(
                op!(
                    d,
                    binary,
                    kind,
                    d.of(dtype, &[x], &[1]),
                    d.of(dtype, &[y], &[1])
                ),
                dtype,
                &[1],
                &[expected],
            );
        }
        for (kind, expected) in [
            (binary::EQ, 0.0),
            (binary::NE, 1.0),
            (binary::LT, 0.0),
            (binary::LE, 0.0),
            (binary::GT, 1.0),
            (binary::GE, 1.0),
            (binary::LOGICAL_AND, 1.0),
            (binary::LOGICAL_OR, 1.0),
        ] {
            d.expect(
                op!(
                    d,
                    binary,
                    kind,
                    d.of(dtype, &[x], &[1]),
                    d.of(dtype, &[y], &[1])
                ),
                DType::BOOL,
                &[1],
                &[expected],
            );
        }
    }
    let (a, b) = (d.i32s(&[12], &[1]), d.i32s(&[10], &[1]));
    for (kind, expected) in [
        (binary::BIT_AND, 8.0),
        (binary::BIT_OR, 14.0),
        (binary::BIT_XOR, 6.0),
    ] {
        d.expect(op!(d, binary, kind, a, b), DType::I32, &[1], &[expected]);
    }
    let two = d.i32s(&[2], &[1]);
    d.expect(
        op!(d, binary, binary::SHL, a, two),
        DType::I32,
        &[1],
        &[48.0],
    );
    d.expect(
        op!(d, binary, binary::SHR, a, two),
        DType::I32,
        &[1],
        &[3.0],
    );
}

#[test]
fn integer_division_floors_and_never_traps() {
    let d = Device::open();
    let a = d.i32s(&[7, -7, 7, -7, i32::MIN, 5], &[6]);
    let b = d.i32s(&[2, 2, -2, -2, -1, 0], &[6]);
    let quotient = op!(d, binary, binary::FLOOR_DIV, a, b).unwrap();
    d.expect(
        Ok(quotient),
        DType::I32,
        &[6],
        &[3.0, -4.0, -4.0, 3.0, i32::MIN as f32, 0.0],
    );
    d.expect(
        op!(d, binary, binary::REM, a, b),
        DType::I32,
        &[6],
        &[1.0, 1.0, -1.0, -1.0, 0.0, 0.0],
    );
    d.expect(
        op!(
            d,
            binary_scalar,
            binary::FLOOR_DIV,
            d.u32s(&[7], &[1]),
            0.0,
            0
        ),
        DType::U32,
        &[1],
        &[0.0],
    );
    let powers = op!(
        d,
        binary,
        binary::POW,
        d.i32s(&[2, 3, 1, -1, -1, 0], &[6]),
        d.i32s(&[10, -1, -5, -3, -2, 0], &[6])
    );
    d.expect(
        powers,
        DType::I32,
        &[6],
        &[1024.0, 0.0, 1.0, -1.0, 1.0, 1.0],
    );
    d.expect(
        op!(
            d,
            binary,
            binary::DIV,
            d.i32s(&[7], &[1]),
            d.i32s(&[2], &[1])
        ),
        DType::F32,
        &[1],
        &[3.5],
    );
}

#[test]
fn scalars_take_the_tensors_type() {
    let d = Device::open();
    for dtype in HALVES {
        let a = d.of(dtype, &[1.0, 2.0], &[2]);
        d.expect(
            op!(d, binary_scalar, binary::MUL, a, 0.5, 0),
            dtype,
            &[2],
            &[0.5, 1.0],
        );
        d.expect(
            op!(d, binary_scalar, binary::SUB, a, 3.0, 1),
            dtype,
            &[2],
            &[2.0, 1.0],
        );
    }
    let a = d.i32s(&[5], &[1]);
    d.expect(
        op!(d, binary_scalar, binary::ADD, a, -7.0, 0),
        DType::I32,
        &[1],
        &[-2.0],
    );
    let error = op!(d, binary_scalar, binary::MUL, a, 0.5, 0).unwrap_err();
    assert_eq!(
        error.message,
        "binary_scalar: 0.5 is not a value of type i32"
    );
    assert!(op!(d, binary_scalar, binary::ADD, d.u32s(&[5], &[1]), -1.0, 0).is_err());
}

#[test]
fn two_types_meet_in_a_third() {
    let d = Device::open();
    let wide = d.f32s(&[2.0], &[1]);
    for dtype in HALVES {
        let x = d.of(dtype, &[1.5], &[1]);
        d.expect(
            op!(d, binary, binary::ADD, x, wide),
            DType::F32,
            &[1],
            &[3.5],
        );
        d.expect(
            op!(d, binary, binary::ADD, d.i32s(&[1], &[1]), x),
            dtype,
            &[1],
            &[2.5],
        );
        d.expect(
            op!(d, select, d.bools(&[false], &[1]), x, wide),
            DType::F32,
            &[1],
            &[2.0],
        );
        d.expect(op!(d, glu, glu::RELU, x, wide), DType::F32, &[1], &[3.0]);
    }
    assert!(op!(d, glu, glu::SILU, wide, d.f32s(&[1.0, 2.0], &[2])).is_err());
}

#[test]
fn selects_and_clips() {
    let d = Device::open();
    let cond = d.bools(&[true, false], &[2, 1]);
    let (a, b) = (d.f32s(&[1.0, 2.0], &[2]), d.f32s(&[9.0], &[1]));
    d.expect(
        op!(d, select, cond, a, b),
        DType::F32,
        &[2, 2],
        &[1.0, 2.0, 9.0, 9.0],
    );
    d.expect(
        op!(d, clip, d.f32s(&[-5.0, 0.5, 5.0], &[3]), -1.0, 1.0),
        DType::F32,
        &[3],
        &[-1.0, 0.5, 1.0],
    );
    let whole = d.i32s(&[-5, 0, 5], &[3]);
    d.expect(
        op!(d, clip, whole, f64::NEG_INFINITY, 2.5),
        DType::I32,
        &[3],
        &[-5.0, 0.0, 2.0],
    );
    d.expect(
        op!(d, clip, whole, -2.5, f64::INFINITY),
        DType::I32,
        &[3],
        &[-2.0, 0.0, 5.0],
    );
    assert!(op!(d, clip, whole, f64::NAN, 1.0).is_err());
}

#[test]
fn gated_activations_multiply() {
    let d = Device::open();
    let sigmoid = 1.0 / (1.0 + (-0.4_f32).exp());
    let cases = [
        (glu::SILU, 0.4 * sigmoid),
        (glu::GELU, 0.262_168_7),
        (glu::GELU_TANH, 0.262_162_6),
        (glu::RELU, 0.4),
        (glu::SIGMOID, sigmoid),
    ];
    for (kind, expected) in cases {
        for dtype in [DType::F32, DType::F16] {
            d.expect(
                op!(
                    d,
                    glu,
                    kind,
                    d.of(dtype, &[0.4], &[1]),
                    d.of(dtype, &[3.0], &[1])
                ),
                dtype,
                &[1],
                &[3.0 * expected],
            );
        }
    }
}

#[test]
fn casts_and_views() {
    let d = Device::open();
    let a = d.f32s(&[1.7, -1.7, 0.0], &[3]);
    d.expect(
        op!(d, cast, a, DType::I32),
        DType::I32,
        &[3],
        &[1.0, -1.0, 0.0],
    );
    d.expect(
        op!(d, cast, a, DType::BOOL),
        DType::BOOL,
        &[3],
        &[1.0, 1.0, 0.0],
    );
    d.expect(
        op!(d, cast, a, DType::F64),
        DType::F64,
        &[3],
        &[1.7, -1.7, 0.0],
    );
    let bits = op!(d, view, d.f32s(&[1.0], &[1]), DType::U16).unwrap();
    d.expect(Ok(bits), DType::U16, &[2], &[0.0, f32::from(0x3f80_u16)]);
    d.expect(op!(d, view, bits, DType::F32), DType::F32, &[1], &[1.0]);
    assert!(op!(d, view, d.bytes(DType::U8, &[1, 2, 3], &[3]), DType::U32).is_err());
}

#[test]
fn unknown_codes_are_unimplemented() {
    let d = Device::open();
    let a = d.f32s(&[1.0], &[1]);
    let codes = [
        op!(d, unary, 9999, a),
        op!(d, binary, 9999, a, a),
        op!(d, glu, 9999, a, a),
        op!(d, reduce, 9999, a, std::ptr::null(), 0, 0),
        op!(d, order, 9999, a, 0, 0),
    ];
    for code in codes {
        let error = code.map(|_: Tensor| ()).unwrap_err();
        assert_eq!(error.code, mlxcel_abi::status::UNIMPLEMENTED, "{error}");
        assert!(error.message.contains("9999"), "{error}");
    }
}
