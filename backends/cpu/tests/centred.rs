//! Centred weights (no biases; 6 bits in groups of 16, or 4, 5 and 8 in groups of 32) in every operation that takes quantised ones, and the experts of a
//! mixture among them, against f64.

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

const EXPERTS: usize = 5;
const ROWS: usize = 38;
const COLUMNS: usize = 288;

/// Mode, bits and group size.
type Form = (u32, u32, usize);

const SIX: Form = (quant::AFFINE, 6, 16);
const FORMS: [Form; 4] = [
    SIX,
    (quant::CENTRED, 8, 32),
    (quant::CENTRED, 5, 32),
    (quant::CENTRED, 4, 32),
];

/// The weight on a device, and what it stands for.
struct Weight {
    raw: QuantizedWeight,
    wide: Vec<f32>,
}

/// `matrices` of 0 is one matrix without a leading axis. Groups of 32 have halves as scales.
fn weight(d: &Device, (mode, bits, group): Form, matrices: usize) -> Weight {
    let elements = matrices.max(1) * ROWS * COLUMNS;
    let (width, middle) = (bits as usize, (1u32 << (bits - 1)) as f32);
    let codes: Vec<u32> = noise(3, elements)
        .iter()
        .map(|x| ((x + 1.0) * (middle - 0.1)) as u32)
        .collect();
    let mut words = vec![0u32; elements * width / 32];
    for (i, code) in codes.iter().enumerate() {
        for bit in (0..width).filter(|bit| code >> bit & 1 == 1) {
            words[(width * i + bit) / 32] |= 1 << ((width * i + bit) % 32);
        }
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let shape = |last: usize| {
        let shape = [matrices as i64, ROWS as i64, last as i64];
        shape[usize::from(matrices == 0)..].to_vec()
    };
    let spec = QuantSpec {
        mode,
        bits,
        group_size: group as u32,
        ..QuantSpec::default()
    };
    // Elements of about the same size in every form.
    let scales: Vec<f32> = noise(4, elements / group)
        .iter()
        .map(|scale| scale * 32.0 / middle)
        .collect();
    let dtype = if group == 16 { DType::F32 } else { DType::F16 };
    let stored = d.of(dtype, &scales, &shape(COLUMNS / group));
    let scales = d.read(op!(d, cast, stored, DType::F32).unwrap());
    let element = |(i, code): (usize, &u32)| scales[i / group] * (*code as f32 - middle);
    Weight {
        raw: QuantizedWeight {
            weight: d.bytes(DType::U32, &bytes, &shape(COLUMNS * width / 32)),
            scales: stored,
            spec,
            ..QuantizedWeight::default()
        },
        wide: codes.iter().enumerate().map(element).collect(),
    }
}

fn dot<'a>(x: &[f32], w: impl Iterator<Item = &'a f32>) -> f64 {
    let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
    terms.sum()
}

fn close(found: &[f32], expected: &[f64], error: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(*found) - expected).abs();
        assert!(off < error, "{i}: {found} {expected}");
    }
}

/// Products of that many codes of up to 32, whose errors add up like a random walk.
fn limit(error: f64) -> f64 {
    error * 32.0 * (COLUMNS as f64).sqrt() * 3.0
}

#[test]
fn the_probe_lists_the_forms() {
    let forms = FORMS.map(|(_, bits, group)| format!(r#"{{"bits":{bits},"group_size":{group}}}"#));
    let forms = format!(r#""centred_forms":[{}]"#, forms.join(","));
    assert!(harness::probe().contains(&forms));
}

#[test]
fn expansion_rounds_no_more_than_singles_do() {
    let d = Device::open();
    for (form, matrices) in FORMS.into_iter().flat_map(|form| [(form, 0), (form, 3)]) {
        let w = weight(&d, form, matrices);
        let wide = op!(d, dequantize, &raw const w.raw, DType::F32).unwrap();
        let exact: Vec<f64> = w.wide.iter().map(|x| f64::from(*x)).collect();
        close(&d.read(wide), &exact, 8e-6);
        let half = op!(d, dequantize, &raw const w.raw, DType::BF16).unwrap();
        assert_eq!(d.dtype(half), DType::BF16);
    }
}

#[test]
fn products_match_in_every_precision() {
    for (precision, error) in [("exact", 1e-6), ("high", 1e-5), ("fast", 5e-3)] {
        let d = Device::open_with("", &format!(r#"{{"precision":"{precision}"}}"#)).unwrap();
        let cases = FORMS
            .into_iter()
            .flat_map(|form| [1, 3, 16, 17, 40].map(|n| (form, n)));
        for (form, rows) in cases {
            let w = weight(&d, form, 0);
            let x = noise(7 + rows as u32, rows * COLUMNS);
            let expected: Vec<f64> = x
                .chunks_exact(COLUMNS)
                .flat_map(|x| w.wide.chunks_exact(COLUMNS).map(|w| dot(x, w.iter())))
                .collect();
            let args = QuantizedMatmulArgs {
                x: d.f32s(&x, &[rows as i64, COLUMNS as i64]),
                w: w.raw,
                ..QuantizedMatmulArgs::default()
            };
            let y = op!(d, quantized_matmul, &raw const args).unwrap();
            close(&d.read(y), &expected, limit(error));
        }
    }
}

#[test]
fn what_the_kernels_lack_is_computed_from_the_expanded_weight() {
    let d = Device::open();
    let w = weight(&d, SIX, 0);
    // The other side of the weight.
    let x = noise(8, 3 * ROWS);
    let expected: Vec<f64> = x
        .chunks_exact(ROWS)
        .flat_map(|x| (0..COLUMNS).map(|c| dot(x, w.wide[c..].iter().step_by(COLUMNS))))
        .collect();
    let args = QuantizedMatmulArgs {
        x: d.f32s(&x, &[3, ROWS as i64]),
        w: w.raw,
        transpose: 0,
        ..QuantizedMatmulArgs::default()
    };
    let y = op!(d, quantized_matmul, &raw const args).unwrap();
    close(&d.read(y), &expected, limit(1e-6));
    // Half activations keep their type.
    let x = noise(9, 2 * COLUMNS);
    let args = QuantizedMatmulArgs {
        x: d.of(DType::F16, &x, &[2, COLUMNS as i64]),
        w: w.raw,
        ..QuantizedMatmulArgs::default()
    };
    let y = op!(d, quantized_matmul, &raw const args).unwrap();
    assert_eq!(d.dtype(y), DType::F16);
}

/// Rows and experts that are chosen, `[T, K]`.
struct Chosen {
    rows: Vec<u32>,
    experts: Vec<u32>,
    shape: [i64; 2],
}

/// `tokens` rows with `k` experts each, one of which nobody chooses.
fn chosen(tokens: usize, k: usize) -> Chosen {
    let pairs = (0..tokens).flat_map(|token| (0..k).map(move |slot| (token, slot)));
    let expert = |(token, slot)| ((3 * token + slot) % (EXPERTS - 1)) as u32;
    Chosen {
        rows: pairs.clone().map(|(token, _)| token as u32).collect(),
        experts: pairs.map(expert).collect(),
        shape: [tokens as i64, k as i64],
    }
}

impl Chosen {
    fn on(&self, d: &Device) -> [Tensor; 2] {
        [&self.rows, &self.experts].map(|values| {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            d.bytes(DType::U32, &bytes, &self.shape)
        })
    }

    fn expected(&self, x: &[f32], w: &[f32]) -> Vec<f64> {
        let pairs = self.rows.iter().zip(&self.experts);
        pairs
            .flat_map(|(row, expert)| {
                let x = &x[*row as usize * COLUMNS..][..COLUMNS];
                let w = &w[*expert as usize * ROWS * COLUMNS..][..ROWS * COLUMNS];
                w.chunks_exact(COLUMNS).map(|w| dot(x, w.iter()))
            })
            .collect()
    }
}

#[test]
fn experts_match_for_few_rows_and_for_many() {
    for (precision, error) in [("exact", 1e-6), ("high", 1e-5), ("fast", 5e-3)] {
        let d = Device::open_with("", &format!(r#"{{"precision":"{precision}"}}"#)).unwrap();
        let cases = FORMS
            .into_iter()
            .flat_map(|form| [(1, 4), (2, 1), (7, 2), (90, 2)].map(|case| (form, case)));
        for (form, (tokens, k)) in cases {
            let w = weight(&d, form, EXPERTS);
            let chosen = chosen(tokens, k);
            let x = noise(tokens as u32, tokens * COLUMNS);
            let [lhs_indices, rhs_indices] = chosen.on(&d);
            let args = QuantizedMatmulArgs {
                x: d.f32s(&x, &[tokens as i64, 1, COLUMNS as i64]),
                w: w.raw,
                lhs_indices,
                rhs_indices,
                ..QuantizedMatmulArgs::default()
            };
            let y = op!(d, gather_quantized_matmul, &raw const args).unwrap();
            assert_eq!(d.shape(y), [tokens as i64, k as i64, 1, ROWS as i64]);
            close(&d.read(y), &chosen.expected(&x, &w.wide), limit(error));
        }
    }
}

#[test]
fn plain_experts_match_in_every_float_type() {
    let d = Device::open();
    let values = noise(6, EXPERTS * ROWS * COLUMNS);
    let shape = [EXPERTS as i64, ROWS as i64, COLUMNS as i64];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let weights = d.of(dtype, &values, &shape);
        let stored = d.read(op!(d, cast, weights, DType::F32).unwrap());
        let axes = [0, 2, 1];
        let b = op!(d, transpose, weights, axes.as_ptr(), 3).unwrap();
        for (tokens, k) in [(1, 4), (7, 2), (90, 2)] {
            let chosen = chosen(tokens, k);
            let x = noise(tokens as u32, tokens * COLUMNS);
            let [lhs, rhs] = chosen.on(&d);
            let a = d.f32s(&x, &[tokens as i64, 1, COLUMNS as i64]);
            let y = op!(d, gather_matmul, a, b, lhs, rhs, 0).unwrap();
            assert_eq!(d.shape(y), [tokens as i64, k as i64, 1, ROWS as i64]);
            close(&d.read(y), &chosen.expected(&x, &stored), 1e-4);
        }
    }
}

#[test]
fn experts_that_are_not_there_are_no_crash() {
    let d = Device::open();
    let w = weight(&d, SIX, EXPERTS);
    let bytes = |values: [i32; 2]| -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    };
    let args = QuantizedMatmulArgs {
        x: d.f32s(&noise(1, 2 * COLUMNS), &[2, 1, COLUMNS as i64]),
        w: w.raw,
        // The same rows in turn where none are given; indices of the other type.
        rhs_indices: d.bytes(DType::I32, &bytes([4, 0]), &[2]),
        ..QuantizedMatmulArgs::default()
    };
    let y = op!(d, gather_quantized_matmul, &raw const args).unwrap();
    assert_eq!(d.shape(y), [2, 1, ROWS as i64]);
}
