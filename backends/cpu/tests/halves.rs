//! Activations in f16 and bf16: an operation gives what the same kernel gives for their numbers in f32, rounded once, in the
//! type of its operands, with gaps between them or without.
#![allow(clippy::unwrap_used, reason = "a test fails that way")]

#[macro_use]
mod harness;

use harness::{Device, noise};
use mlxcel_abi::fused_args::{
    GatedMlpArgs, InputNorm, LinearWeight, MixtureArgs, ProjectArgs, RouteArgs,
};
use mlxcel_abi::kinds::{binary, glu, order, quant, reduce};
use mlxcel_abi::ops_args::{ConvArgs, QuantSpec, QuantizedMatmulArgs, QuantizedWeight, RopeArgs};
use mlxcel_abi::{DType, Tensor};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];
const WIDTH: i64 = 128;

/// Operands of one call in one type.
struct Operands<'a> {
    d: &'a Device,
    dtype: DType,
    /// Whether they are f32 with the numbers that the type holds.
    is_wide: bool,
}

impl Operands<'_> {
    fn tensor(&self, seed: u32, dims: &[i64]) -> Tensor {
        let count = dims.iter().product::<i64>() as usize;
        let narrow = self.d.of(self.dtype, &noise(seed, count), dims);
        if !self.is_wide {
            return narrow;
        }
        op!(self.d, cast, narrow, DType::F32).unwrap()
    }

    fn quantized(&self, seed: u32, rows: i64, columns: i64) -> QuantizedWeight {
        self.packed(seed, &[rows, columns])
    }

    fn stacked(&self, seed: u32, count: i64, rows: i64, columns: i64) -> QuantizedWeight {
        self.packed(seed, &[count, rows, columns])
    }

    fn packed(&self, seed: u32, dims: &[i64]) -> QuantizedWeight {
        let (d, count) = (self.d, dims.iter().product::<i64>() as usize);
        let w = d.f32s(&noise(seed, count), dims);
        let spec = QuantSpec {
            mode: quant::AFFINE,
            bits: 4,
            group_size: 64,
            ..QuantSpec::default()
        };
        let mut parts = [Tensor::NONE; 3];
        run!(d, quantize, w, &raw const spec, &raw mut parts).unwrap();
        d.eval(&parts);
        QuantizedWeight {
            weight: parts[0],
            scales: parts[1],
            biases: parts[2],
            spec,
            ..QuantizedWeight::default()
        }
    }

    /// With a bias; plain, or in 4 bits.
    fn layer(&self, seed: u32, rows: i64, columns: i64, is_plain: bool) -> LinearWeight {
        let mut layer = LinearWeight {
            bias: self.tensor(seed + 1, &[rows]),
            ..LinearWeight::default()
        };
        if is_plain {
            layer.plain = self.transposed(self.tensor(seed, &[rows, columns]));
        } else {
            layer.quantized = self.quantized(seed, rows, columns);
        }
        layer
    }

    fn transposed(&self, t: Tensor) -> Tensor {
        let axes = [1, 0];
        op!(self.d, transpose, t, axes.as_ptr(), 2).unwrap()
    }
}

/// Compares what `call` gives for halves with what it gives for their numbers.
fn agrees(name: &str, options: &str, call: impl Fn(&Operands<'_>) -> Vec<Tensor>) {
    let d = Device::open_with("", options).unwrap();
    for dtype in HALVES {
        let of = |is_wide| {
            let d = &d;
            call(&Operands { d, dtype, is_wide })
        };
        let (narrow, wide) = (of(false), of(true));
        assert_eq!(narrow.len(), wide.len());
        for (narrow, wide) in narrow.into_iter().zip(wide) {
            assert_eq!(d.dtype(wide), DType::F32, "{name}");
            assert_eq!(d.dtype(narrow), dtype, "{name}");
            assert_eq!(d.shape(narrow), d.shape(wide), "{name}");
            let rounded = op!(d, cast, wide, dtype).unwrap();
            assert_eq!(
                d.read_bytes(narrow),
                d.read_bytes(rounded),
                "{name} {dtype:?}"
            );
        }
    }
}

#[test]
fn rows_are_those_of_f32_rounded_once() {
    agrees("rms_norm", "", |o| {
        let (x, w) = (o.tensor(1, &[5, WIDTH]), o.tensor(2, &[WIDTH]));
        vec![op!(o.d, rms_norm, x, w, 1e-5).unwrap()]
    });
    agrees("layer_norm", "", |o| {
        let (x, w, b) = (
            o.tensor(1, &[5, WIDTH]),
            o.tensor(2, &[WIDTH]),
            o.tensor(3, &[WIDTH]),
        );
        vec![op!(o.d, layer_norm, x, w, b, 1e-5).unwrap()]
    });
    agrees("rope", "", |o| {
        let args = RopeArgs {
            x: o.tensor(1, &[5, 3, 64]),
            positions: o.d.i32s(&[0, 1, 7, 900, 31], &[5]),
            dims: 64,
            ..RopeArgs::default()
        };
        vec![op!(o.d, rope, &raw const args).unwrap()]
    });
    agrees("glu", "", |o| {
        let (gate, up) = (o.tensor(1, &[5, WIDTH]), o.tensor(2, &[5, WIDTH]));
        let kinds = [glu::SILU, glu::GELU_TANH, glu::RELU];
        kinds
            .map(|kind| op!(o.d, glu, kind, gate, up).unwrap())
            .to_vec()
    });
    agrees("binary", "", |o| {
        let (a, b, row) = (
            o.tensor(1, &[5, WIDTH]),
            o.tensor(2, &[5, WIDTH]),
            o.tensor(3, &[WIDTH]),
        );
        let pairs = [(binary::ADD, b), (binary::MUL, b), (binary::ADD, row)];
        pairs
            .map(|(kind, b)| op!(o.d, binary, kind, a, b).unwrap())
            .to_vec()
    });
    agrees("softmax", "", |o| {
        vec![op!(o.d, softmax, o.tensor(1, &[5, WIDTH]), -1).unwrap()]
    });
    agrees("sum", "", |o| {
        let (x, axis) = (o.tensor(1, &[5, WIDTH]), [-1]);
        vec![op!(o.d, reduce, reduce::SUM, x, axis.as_ptr(), 1, 0).unwrap()]
    });
    agrees("topk", "", |o| {
        vec![op!(o.d, order, order::TOPK, o.tensor(1, &[5, WIDTH]), 3, -1).unwrap()]
    });
    agrees("add_rms_norm", "", |o| {
        let (x, residual) = (o.tensor(1, &[5, WIDTH]), o.tensor(2, &[5, WIDTH]));
        let mut out = [Tensor::NONE; 2];
        run!(
            o.d,
            add_rms_norm,
            x,
            residual,
            o.tensor(3, &[WIDTH]),
            1e-5,
            &raw mut out
        )
        .unwrap();
        out.to_vec()
    });
}

#[test]
fn products_are_those_of_f32_rounded_once() {
    for options in [
        r#"{"precision":"exact"}"#,
        r#"{"precision":"high"}"#,
        r#"{"precision":"fast"}"#,
    ] {
        for rows in [1, 8, 70] {
            agrees("quantized_matmul", options, |o| {
                let args = QuantizedMatmulArgs {
                    x: o.tensor(1, &[rows, WIDTH]),
                    w: o.quantized(2, 96, WIDTH),
                    transpose: 1,
                    ..QuantizedMatmulArgs::default()
                };
                vec![op!(o.d, quantized_matmul, &raw const args).unwrap()]
            });
            agrees("matmul", options, |o| {
                let w = o.transposed(o.tensor(2, &[96, WIDTH]));
                vec![op!(o.d, matmul, o.tensor(1, &[rows, WIDTH]), w).unwrap()]
            });
            agrees("project", options, |o| {
                let layers = [o.layer(2, 96, WIDTH, false), o.layer(4, 64, WIDTH, true)];
                let args = ProjectArgs {
                    x: o.tensor(1, &[rows, WIDTH]),
                    norm: InputNorm {
                        normed: 1,
                        eps: 1e-5,
                        weight: o.tensor(6, &[WIDTH]),
                        ..InputNorm::default()
                    },
                    layers: layers.as_ptr(),
                    n_layers: 2,
                    ..ProjectArgs::default()
                };
                let mut out = [Tensor::NONE; 2];
                run!(o.d, project, &raw const args, out.as_mut_ptr()).unwrap();
                out.to_vec()
            });
            agrees("gated_mlp", options, |o| {
                let x = o.tensor(1, &[rows, WIDTH]);
                let args = GatedMlpArgs {
                    x,
                    gate: o.layer(2, 192, WIDTH, false),
                    up: o.layer(4, 192, WIDTH, true),
                    down: o.layer(6, WIDTH, 192, false),
                    kind: glu::SILU,
                    residual: x,
                    ..GatedMlpArgs::default()
                };
                vec![op!(o.d, gated_mlp, &raw const args).unwrap()]
            });
        }
    }
    agrees("conv", "", |o| {
        let args = ConvArgs {
            x: o.tensor(1, &[1, 9, 6]),
            w: o.tensor(2, &[4, 3, 6]),
            n_spatial: 1,
            ..ConvArgs::default()
        };
        vec![op!(o.d, conv, &raw const args).unwrap()]
    });
}

#[test]
fn an_expanded_weight_is_rounded_to_the_type_that_is_asked_for() {
    let d = Device::open();
    let of = |dtype| {
        let o = Operands {
            d: &d,
            dtype,
            is_wide: false,
        };
        let w = o.quantized(3, 32, WIDTH);
        op!(d, dequantize, &raw const w, dtype).unwrap()
    };
    for dtype in HALVES {
        let rounded = op!(d, cast, of(DType::F32), dtype).unwrap();
        assert_eq!(d.dtype(of(dtype)), dtype);
        assert_eq!(d.read_bytes(of(dtype)), d.read_bytes(rounded));
    }
}

#[test]
fn elements_of_16_bits_are_taken_along_an_axis() {
    let d = Device::open();
    for dtype in HALVES {
        let x = d.of(dtype, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
        let at = d.i32s(&[2, 0, 1, 1], &[2, 2]);
        let taken = op!(d, take_along, x, at, -1);
        d.expect(taken, dtype, &[2, 2], &[3.0, 1.0, 5.0, 5.0]);
    }
}

#[test]
fn what_has_gaps_is_read_in_its_order() {
    agrees("rms_norm", "", |o| {
        let x = o.tensor(1, &[WIDTH, 7]);
        let x = match o.is_wide {
            // MLX makes a copy for the kernels, which do not take f32 with gaps.
            true => op!(o.d, contiguous, o.transposed(x)).unwrap(),
            false => o.transposed(x),
        };
        vec![op!(o.d, rms_norm, x, Tensor::NONE, 1e-5).unwrap()]
    });
}

#[test]
fn operands_of_several_types_give_f32() {
    let d = Device::open();
    let numbers = [1.0, 2.0, 3.0, 4.0];
    let of = |dtype| d.of(dtype, &numbers, &[4]);
    for [a, b] in [
        [DType::F16, DType::BF16],
        [DType::BF16, DType::F32],
        [DType::F32, DType::F16],
    ] {
        let sum = op!(d, binary, binary::ADD, of(a), of(b));
        d.expect(sum, DType::F32, &[4], &[2.0, 4.0, 6.0, 8.0]);
    }
}

#[test]
fn what_is_widened_is_let_go_at_the_end_of_a_call_that_fails_too() {
    let d = Device::open();
    let (x, w) = (
        d.of(DType::BF16, &noise(1, 640), &[5, 128]),
        d.of(DType::BF16, &noise(2, 64), &[64]),
    );
    d.eval(&[x, w]);
    let before = d.memory().live_tensors;
    assert!(op!(d, rms_norm, x, w, 1e-5).is_err());
    let made = op!(d, softmax, x, -1).unwrap();
    d.release(made);
    assert_eq!(d.memory().live_tensors, before);
}

#[test]
fn a_constant_is_one_of_the_tensors_type() {
    let d = Device::open();
    let x = d.of(DType::BF16, &[1.0, 2.0], &[2]);
    let y = op!(d, binary_scalar, binary::MUL, x, 25.298, 0);
    d.expect(y, DType::BF16, &[2], &[25.25, 50.5]);
    assert_eq!(
        d.read(op!(d, binary_scalar, binary::MUL, x, 25.298, 0).unwrap()),
        [25.25, 50.5]
    );
}

#[test]
fn mixtures_are_those_of_f32_rounded_once() {
    for rows in [1, 5, 40] {
        agrees("route and mixture", "", |o| {
            let (d, experts, chosen, inner) = (o.d, 4, 2, 64);
            let args = RouteArgs {
                logits: o.tensor(9, &[rows, experts]),
                top_k: chosen,
                renormalised: 1,
                ..RouteArgs::default()
            };
            let mut routed = [Tensor::NONE; 2];
            run!(d, route, &raw const args, &raw mut routed).unwrap();
            // The same experts and shares for both.
            let weights = o.tensor(10, &[rows, i64::from(chosen)]);
            let stack = |seed, n, k| LinearWeight {
                quantized: o.stacked(seed, experts, n, k),
                ..LinearWeight::default()
            };
            let x = o.tensor(1, &[rows, WIDTH]);
            let args = MixtureArgs {
                x,
                experts: routed[0],
                weights,
                gate: stack(2, inner, WIDTH),
                up: stack(3, inner, WIDTH),
                down: stack(4, WIDTH, inner),
                kind: glu::SILU,
                residual: x,
                ..MixtureArgs::default()
            };
            let mut out = Tensor::NONE;
            run!(d, mixture, &raw const args, &raw mut out).unwrap();
            vec![routed[1], out]
        });
    }
}
