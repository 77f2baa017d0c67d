//! A mixture of experts gives the very bits of its parts, in every precision, for few rows and for many; routing finds
//! the highest.
#![allow(clippy::unwrap_used, reason = "a test fails that way")]

#[macro_use]
mod harness;

use harness::{Device, noise};
use mlxcel_abi::fused_args::{LinearWeight, MixtureArgs, RouteArgs};
use mlxcel_abi::kinds::{glu, quant};
use mlxcel_abi::ops_args::{QuantSpec, QuantizedMatmulArgs, QuantizedWeight};
use mlxcel_abi::{DType, Tensor, status};

const COLUMNS: i64 = 192;
const INNER: i64 = 96;

/// A stack `[experts, rows, columns]` in a form of bits and group size; 0 bits are plain, groups of 32 in mode mxfp4.
fn stack(d: &Device, (mode, bits): (u32, u32), shape: [i64; 3], seed: u32) -> LinearWeight {
    let w = d.f32s(&noise(seed, shape.iter().product::<i64>() as usize), &shape);
    let mut raw = LinearWeight::default();
    if bits == 0 {
        let axes = [0, 2, 1];
        raw.plain = op!(d, transpose, w, axes.as_ptr(), 3).unwrap();
        return raw;
    }
    let spec = QuantSpec {
        mode,
        bits,
        group_size: 32,
        ..QuantSpec::default()
    };
    let mut parts = [Tensor::NONE; 3];
    run!(d, quantize, w, &raw const spec, &raw mut parts).unwrap();
    raw.quantized = QuantizedWeight {
        weight: parts[0],
        scales: parts[1],
        biases: parts[2],
        spec,
        ..QuantizedWeight::default()
    };
    raw
}

/// `x[rows]` `[.., 1, columns]` with chosen matrices.
fn gathered(d: &Device, x: Tensor, layer: &LinearWeight, rows: Tensor, experts: Tensor) -> Tensor {
    if layer.plain.is_none() {
        let args = QuantizedMatmulArgs {
            x,
            w: layer.quantized,
            lhs_indices: rows,
            rhs_indices: experts,
            transpose: 1,
            ..QuantizedMatmulArgs::default()
        };
        return op!(d, gather_quantized_matmul, &raw const args).unwrap();
    }
    op!(d, gather_matmul, x, layer.plain, rows, experts, 0).unwrap()
}

#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    experts: usize,
    chosen: usize,
    forms: [(u32, u32); 3],
    residual: bool,
    /// Every row has the same experts, one of them twice.
    crowded: bool,
}

impl Case {
    fn choice(&self) -> Vec<u32> {
        let pairs = (0..self.rows).flat_map(|row| (0..self.chosen).map(move |slot| (row, slot)));
        pairs
            .map(|(row, slot)| match self.crowded {
                true => (slot / 2) as u32,
                false => ((5 * row + 2 * slot) % self.experts) as u32,
            })
            .collect()
    }

    fn check(&self, precision: &str) {
        let Self { rows, chosen, .. } = *self;
        let d = Device::open_with("", &format!(r#"{{"precision":"{precision}"}}"#)).unwrap();
        let n = self.experts as i64;
        let layers = [
            stack(&d, self.forms[0], [n, INNER, COLUMNS], 1),
            stack(&d, self.forms[1], [n, INNER, COLUMNS], 2),
            stack(&d, self.forms[2], [n, COLUMNS, INNER], 3),
        ];
        let shape = [rows as i64, chosen as i64];
        let x = d.f32s(&noise(4, rows * COLUMNS as usize), &[rows as i64, COLUMNS]);
        let weights = noise(5, rows * chosen);
        let residual = noise(6, rows * COLUMNS as usize);
        let experts = d.u32s(&self.choice(), &shape);
        let args = MixtureArgs {
            x,
            experts,
            weights: d.f32s(&weights, &shape),
            gate: layers[0],
            up: layers[1],
            down: layers[2],
            kind: glu::SILU,
            residual: match self.residual {
                true => d.f32s(&residual, &[rows as i64, COLUMNS]),
                false => Tensor::NONE,
            },
            ..MixtureArgs::default()
        };
        let fused = d.read(op!(d, mixture, &raw const args).unwrap());

        let pairs = rows * chosen;
        let row_of: Vec<u32> = (0..pairs).map(|pair| (pair / chosen) as u32).collect();
        let row_of = d.u32s(&row_of, &shape);
        let single = d.f32s(&d.read(x), &[rows as i64, 1, COLUMNS]);
        let gate = gathered(&d, single, &layers[0], row_of, experts);
        let up = gathered(&d, single, &layers[1], row_of, experts);
        let both = d.read(op!(d, glu, glu::SILU, gate, up).unwrap());
        let flat = d.f32s(&both, &[pairs as i64, 1, INNER]);
        let pair_of: Vec<u32> = (0..pairs as u32).collect();
        let y = gathered(&d, flat, &layers[2], d.u32s(&pair_of, &shape), experts);
        let y = d.read(y);
        let width = COLUMNS as usize;
        for (i, fused) in fused.iter().enumerate() {
            let (row, column) = (i / width, i % width);
            let terms = (row * chosen..(row + 1) * chosen)
                .map(|pair| weights[pair] * y[pair * width + column]);
            let sum = terms.fold(0.0, |sum, term| sum + term);
            let expected = if self.residual {
                sum + residual[i]
            } else {
                sum
            };
            assert_eq!(*fused, expected, "{self:?} {precision} {i}");
        }
    }
}

#[test]
fn a_mixture_gives_the_bits_of_its_parts() {
    let (four, eight, plain) = ((quant::AFFINE, 4), (quant::AFFINE, 8), (0, 0));
    let floats = (quant::MXFP4, 4);
    let base = Case {
        rows: 1,
        experts: 6,
        chosen: 3,
        forms: [four; 3],
        residual: true,
        crowded: false,
    };
    let of = |rows: usize, crowded: bool| Case {
        rows,
        crowded,
        ..base.clone()
    };
    for precision in ["exact", "high", "fast"] {
        for case in [
            of(1, false),
            of(1, true),
            of(5, false),
            of(16, true),
            of(17, true),
        ] {
            case.check(precision);
        }
        for forms in [
            [eight; 3],
            [four, eight, four],
            [plain; 3],
            [four, four, plain],
            [floats; 3],
            [floats, four, eight],
        ] {
            for rows in [1, 7, 50] {
                let case = Case {
                    forms,
                    residual: false,
                    ..of(rows, false)
                };
                case.check(precision);
            }
        }
    }
}

#[test]
fn a_row_alone_gets_what_it_gets_among_others() {
    let d = Device::open_with("", r#"{"precision":"high"}"#).unwrap();
    let layer = |shape, seed| stack(&d, (quant::AFFINE, 4), shape, seed);
    let (gate, up) = (layer([4, INNER, COLUMNS], 1), layer([4, INNER, COLUMNS], 2));
    let down = layer([4, COLUMNS, INNER], 3);
    let (x, weights) = (noise(4, 6 * COLUMNS as usize), noise(5, 12));
    let experts = [0, 1, 1, 2, 3, 0, 0, 2, 2, 1, 1, 0];
    let run = |rows: core::ops::Range<usize>| {
        let (n, wide) = (rows.len() as i64, COLUMNS as usize);
        let args = MixtureArgs {
            x: d.f32s(&x[rows.start * wide..rows.end * wide], &[n, COLUMNS]),
            experts: d.u32s(&experts[2 * rows.start..2 * rows.end], &[n, 2]),
            weights: d.f32s(&weights[2 * rows.start..2 * rows.end], &[n, 2]),
            gate,
            up,
            down,
            kind: glu::GELU_TANH,
            ..MixtureArgs::default()
        };
        d.read(op!(d, mixture, &raw const args).unwrap())
    };
    let alone: Vec<f32> = (0..6).flat_map(|row| run(row..row + 1)).collect();
    assert_eq!(run(0..6), alone);
}

#[test]
fn what_is_not_there_is_refused() {
    let d = Device::open();
    let layer = |shape| stack(&d, (quant::AFFINE, 4), shape, 1);
    let mut args = MixtureArgs {
        x: d.f32s(&noise(4, COLUMNS as usize), &[1, COLUMNS]),
        experts: d.u32s(&[1, 4], &[1, 2]),
        weights: d.f32s(&[0.5, 0.5], &[1, 2]),
        gate: layer([4, INNER, COLUMNS]),
        up: layer([4, INNER, COLUMNS]),
        down: layer([4, COLUMNS, INNER]),
        kind: glu::SILU,
        ..MixtureArgs::default()
    };
    let refused = |args: &MixtureArgs| op!(d, mixture, &raw const *args).unwrap_err();
    let error = refused(&args);
    assert_eq!(error.code, status::INVALID_ARGUMENT);
    assert!(error.message.contains("expert 4 of 4"), "{}", error.message);
    // Another shape is for the composition.
    args.experts = d.u32s(&[1, 3], &[1, 2]);
    args.down = layer([4, INNER, COLUMNS]);
    assert_eq!(refused(&args).code, status::UNIMPLEMENTED);
}

#[test]
fn routing_finds_the_highest_with_their_shares() {
    let d = Device::open();
    let logits = noise(9, 40 * 128);
    for (k, renormalised) in [(1, 0), (8, 1), (8, 0), (128, 0)] {
        let args = RouteArgs {
            logits: d.f32s(&logits, &[40, 128]),
            top_k: k as u32,
            renormalised,
            ..RouteArgs::default()
        };
        let mut out = [Tensor::NONE; 2];
        run!(d, route, &raw const args, &raw mut out).unwrap();
        assert_eq!(d.shape(out[0]), [40, k as i64]);
        assert_eq!(d.dtype(out[0]), DType::U32);
        let experts = d.read_bytes(out[0]);
        let experts: Vec<u32> = experts
            .as_chunks()
            .0
            .iter()
            .map(|bytes| u32::from_le_bytes(*bytes))
            .collect();
        let weights = d.read(out[1]);
        for (row, logits) in logits.chunks_exact(128).enumerate() {
            let mut order: Vec<usize> = (0..128).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let of = &order[..if renormalised == 1 { k } else { 128 }];
            let total: f64 = of.iter().map(|i| f64::from(logits[*i]).exp()).sum();
            for slot in 0..k {
                assert_eq!(experts[row * k + slot] as usize, order[slot]);
                let share = f64::from(logits[order[slot]]).exp() / total;
                assert!((f64::from(weights[row * k + slot]) - share).abs() < 1e-6);
            }
        }
    }
}
