//! How far products may round: the settings of `precision`, and weights in half types.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failure in a test is a failed test"
)]

#[macro_use]
mod harness;

use harness::{Device, noise};
use mlxcel_abi::kinds::quant;
use mlxcel_abi::ops_args::{QuantSpec, QuantizedMatmulArgs, QuantizedWeight};
use mlxcel_abi::{DType, Tensor, status};

const ROWS: usize = 45;
const COLUMNS: usize = 288;

fn quantized(d: &Device, bits: u32, group_size: u32) -> QuantizedWeight {
    let spec = QuantSpec {
        mode: quant::AFFINE,
        bits,
        group_size,
        ..QuantSpec::default()
    };
    let w = d.f32s(&noise(5, ROWS * COLUMNS), &[ROWS as i64, COLUMNS as i64]);
    let mut out = [Tensor::NONE; 3];
    run!(d, quantize, w, &raw const spec, &raw mut out).expect("quantises");
    let [weight, scales, biases] = out;
    QuantizedWeight {
        weight,
        scales,
        biases,
        spec,
        ..QuantizedWeight::default()
    }
}

fn matmul(d: &Device, x: &[f32], w: QuantizedWeight) -> Vec<f32> {
    let args = QuantizedMatmulArgs {
        x: d.f32s(x, &[(x.len() / COLUMNS) as i64, COLUMNS as i64]),
        w,
        ..QuantizedMatmulArgs::default()
    };
    d.read(op!(d, quantized_matmul, &raw const args).expect("multiplies"))
}

/// `x @ w.T` in f64.
fn expected(x: &[f32], w: &[f32]) -> Vec<f64> {
    x.chunks_exact(COLUMNS)
        .flat_map(|x| w.chunks_exact(COLUMNS).map(move |w| (x, w)))
        .map(|(x, w)| {
            x.iter()
                .zip(w)
                .map(|(x, w)| f64::from(*x) * f64::from(*w))
                .sum()
        })
        .collect()
}

#[test]
fn each_precision_keeps_its_distance_for_few_rows_and_for_many() {
    for (precision, error) in [("exact", 1e-6), ("high", 1e-5), ("fast", 5e-3)] {
        let d = Device::open_with("", &format!(r#"{{"precision":"{precision}"}}"#)).unwrap();
        for (bits, group) in [(4, 32), (8, 32), (5, 32), (6, 32), (3, 32)] {
            let w = quantized(&d, bits, group);
            let wide = d.read(op!(d, dequantize, &raw const w, DType::F32).unwrap());
            for rows in [1, 2, 7, 16, 17, 40] {
                let x = noise(7 + rows as u32, rows * COLUMNS);
                let found = matmul(&d, &x, w);
                // Errors of that many products of numbers up to 1 add up like a random walk.
                let limit = error * (COLUMNS as f64).sqrt() * 3.0;
                for (found, expected) in found.iter().zip(expected(&x, &wide)) {
                    let off = (f64::from(*found) - expected).abs();
                    assert!(off < limit, "{precision} {bits} {rows}: {found} {expected}");
                }
            }
        }
    }
}

#[test]
fn a_row_gives_the_same_alone_and_among_others() {
    for precision in ["exact", "high", "fast"] {
        let d = Device::open_with("", &format!(r#"{{"precision":"{precision}"}}"#)).unwrap();
        for bits in [4, 8, 5] {
            let w = quantized(&d, bits, 32);
            let x = noise(3, 40 * COLUMNS);
            let alone = matmul(&d, &x[..COLUMNS], w);
            for rows in [2, 5, 16, 40] {
                let among = &matmul(&d, &x[..rows * COLUMNS], w)[..ROWS];
                for (a, b) in alone.iter().zip(among) {
                    // Beyond 16 rows, and in exact mode beyond two, sums have another order.
                    assert!((a - b).abs() < 3e-5, "{precision} {bits} {rows}: {a} {b}");
                    let is_same_order = precision != "exact" && rows <= 16;
                    assert!(
                        !is_same_order || a == b,
                        "{precision} {bits} {rows}: {a} {b}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_with_nan_spoils_no_other() {
    for precision in ["exact", "high", "fast"] {
        let d = Device::open_with("", &format!(r#"{{"precision":"{precision}"}}"#)).unwrap();
        let w = quantized(&d, 4, 32);
        for rows in [2, 20] {
            let mut x = noise(4, rows * COLUMNS);
            x[COLUMNS + 100] = f32::NAN;
            for (row, y) in matmul(&d, &x, w).chunks_exact(ROWS).enumerate() {
                assert!(
                    y.iter().all(|y| y.is_nan() == (row == 1)),
                    "{precision} {row}"
                );
            }
        }
    }
}

#[test]
fn the_default_is_one_of_the_precisions_and_others_are_refused() {
    let found = {
        let d = Device::open();
        matmul(&d, &noise(9, COLUMNS), quantized(&d, 4, 32))
    };
    let same = ["exact", "high"].into_iter().filter(|precision| {
        let d = Device::open_with("", &format!(r#"{{"precision":"{precision}"}}"#)).unwrap();
        matmul(&d, &noise(9, COLUMNS), quantized(&d, 4, 32)) == found
    });
    assert_eq!(same.count(), 1);
    let refused = Device::open_with("", r#"{"precision":"low"}"#)
        .err()
        .unwrap();
    assert_eq!(refused.code, status::INVALID_ARGUMENT);
    assert!(refused.message.contains("exact, high or fast"));
}

#[test]
fn half_weights_give_what_the_same_weights_give_in_f32() {
    let d = Device::open();
    let shape = [ROWS as i64, COLUMNS as i64];
    for dtype in [DType::F16, DType::BF16] {
        let half = d.of(dtype, &noise(11, ROWS * COLUMNS), &shape);
        let wide = op!(d, cast, half, DType::F32).unwrap();
        let axes = [1_i32, 0];
        let [half, wide] = [half, wide].map(|w| op!(d, transpose, w, axes.as_ptr(), 2).unwrap());
        for rows in [1, 3, 8, 9, 30] {
            let x = d.f32s(&noise(12, rows * COLUMNS), &[rows as i64, COLUMNS as i64]);
            let (a, b) = (
                op!(d, matmul, x, half).unwrap(),
                op!(d, matmul, x, wide).unwrap(),
            );
            assert_eq!(d.dtype(a), DType::F32);
            assert_eq!(d.read(a), d.read(b), "{} {rows}", dtype.name());
        }
    }
}
