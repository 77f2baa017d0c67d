//! Weights in mxfp4 by our own kernels: expansion against MLX's, products and experts against f64.

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
use mlxcel_abi::{DType, Tensor};

const EXPERTS: usize = 4;
const ROWS: usize = 45;
const COLUMNS: usize = 288;

fn quantized(d: &Device, shape: &[i64]) -> QuantizedWeight {
    let spec = QuantSpec {
        mode: quant::MXFP4,
        bits: 4,
        group_size: 32,
        ..QuantSpec::default()
    };
    let w = d.f32s(&noise(5, shape.iter().product::<i64>() as usize), shape);
    let mut out = [Tensor::NONE; 3];
    run!(d, quantize, w, &raw const spec, &raw mut out).expect("quantises");
    let [weight, scales, _] = out;
    QuantizedWeight {
        weight,
        scales,
        spec,
        ..QuantizedWeight::default()
    }
}

fn dots(x: &[f32], w: &[f32]) -> Vec<f64> {
    let dot = |w: &[f32]| {
        let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
        terms.sum()
    };
    w.chunks_exact(COLUMNS).map(dot).collect()
}

fn close(found: &[f32], expected: &[f64], error: f64) {
    assert_eq!(found.len(), expected.len());
    // Errors of that many products of numbers up to 1 add up like a random walk.
    let limit = error * (COLUMNS as f64).sqrt() * 3.0;
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(*found) - expected).abs();
        assert!(off < limit, "{i}: {found} {expected}");
    }
}

#[test]
fn expansion_is_the_librarys() {
    let d = Device::open();
    for shape in [vec![ROWS as i64, COLUMNS as i64], vec![3, 7, 64]] {
        let w = quantized(&d, &shape);
        let own = op!(d, dequantize, &raw const w, DType::F32).unwrap();
        // bf16 goes to the library, and has room for every value.
        let other = op!(d, dequantize, &raw const w, DType::BF16).unwrap();
        assert_eq!(d.shape(own), shape);
        assert_eq!(
            d.read(own),
            d.read(op!(d, cast, other, DType::F32).unwrap())
        );
    }
}

#[test]
fn products_match_for_few_rows_and_for_many() {
    for (precision, error) in [("exact", 2e-6), ("high", 1e-5), ("fast", 5e-3)] {
        let d = Device::open_with("", &format!(r#"{{"precision":"{precision}"}}"#)).unwrap();
        let w = quantized(&d, &[ROWS as i64, COLUMNS as i64]);
        let wide = d.read(op!(d, dequantize, &raw const w, DType::F32).unwrap());
        for rows in [1, 2, 7, 16, 17, 40] {
            let x = noise(7 + rows as u32, rows * COLUMNS);
            let args = QuantizedMatmulArgs {
                x: d.f32s(&x, &[rows as i64, COLUMNS as i64]),
                w,
                ..QuantizedMatmulArgs::default()
            };
            let y = d.read(op!(d, quantized_matmul, &raw const args).unwrap());
            let expected: Vec<f64> = x
                .chunks_exact(COLUMNS)
                .flat_map(|x| dots(x, &wide))
                .collect();
            close(&y, &expected, error);
        }
    }
}

#[test]
fn experts_match_for_few_rows_and_for_many() {
    for (precision, error) in [("exact", 2e-6), ("high", 1e-5), ("fast", 5e-3)] {
        let d = Device::open_with("", &format!(r#"{{"precision":"{precision}"}}"#)).unwrap();
        let w = quantized(&d, &[EXPERTS as i64, ROWS as i64, COLUMNS as i64]);
        let wide = d.read(op!(d, dequantize, &raw const w, DType::F32).unwrap());
        for (tokens, k) in [(1, 3), (6, 2), (80, 2)] {
            let x = noise(tokens as u32, tokens * COLUMNS);
            let pairs = (0..tokens).flat_map(|token| (0..k).map(move |slot| (token, slot)));
            let pairs: Vec<(u32, u32)> = pairs
                .map(|(token, slot)| (token as u32, ((5 * token + slot) % EXPERTS) as u32))
                .collect();
            let shape = [tokens as i64, k as i64];
            let rows: Vec<u32> = pairs.iter().map(|(row, _)| *row).collect();
            let experts: Vec<u32> = pairs.iter().map(|(_, expert)| *expert).collect();
            let args = QuantizedMatmulArgs {
                x: d.f32s(&x, &[tokens as i64, 1, COLUMNS as i64]),
                w,
                lhs_indices: d.u32s(&rows, &shape),
                rhs_indices: d.u32s(&experts, &shape),
                ..QuantizedMatmulArgs::default()
            };
            let y = d.read(op!(d, gather_quantized_matmul, &raw const args).unwrap());
            let of_pair = |(row, expert): &(u32, u32)| {
                let x = &x[*row as usize * COLUMNS..][..COLUMNS];
                dots(
                    x,
                    &wide[*expert as usize * ROWS * COLUMNS..][..ROWS * COLUMNS],
                )
            };
            let expected: Vec<f64> = pairs.iter().flat_map(of_pair).collect();
            close(&y, &expected, error);
        }
    }
}
