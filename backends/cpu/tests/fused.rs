//! Fused operations give the very bits that their parts give one after another, in every precision,
//! for few rows and for many, and a row alone gets the same within the rounding of exact products.
#![allow(clippy::unwrap_used, reason = "a test fails that way")]

#[macro_use]
mod harness;

use harness::{Device, noise};
use mlxcel_abi::fused_args::{GatedMlpArgs, InputNorm, LinearWeight, ProjectArgs, RotateArgs};
use mlxcel_abi::kinds::{binary, glu, quant};
use mlxcel_abi::ops_args::{
    PagedAttentionArgs, QuantSpec, QuantizedMatmulArgs, QuantizedWeight, RopeArgs,
};
use mlxcel_abi::{DType, Tensor};

const COLUMNS: i64 = 192;
const EPS: f32 = 1e-5;

/// A layer in 4 or 8 bits, or plain.
fn layer(d: &Device, bits: u32, rows: i64, columns: i64, seed: u32, bias: bool) -> LinearWeight {
    let count = (rows * columns) as usize;
    let w = d.f32s(&noise(seed, count), &[rows, columns]);
    let mut raw = LinearWeight::default();
    if bias {
        raw.bias = d.f32s(&noise(seed + 1, rows as usize), &[rows]);
    }
    if bits == 0 {
        let axes = [1, 0];
        raw.plain = op!(d, transpose, w, axes.as_ptr(), 2).unwrap();
        return raw;
    }
    let spec = QuantSpec {
        mode: quant::AFFINE,
        bits,
        group_size: 64,
        ..QuantSpec::default()
    };
    let mut parts = [Tensor::NONE; 3];
    run!(d, quantize, w, &raw const spec, &raw mut parts).unwrap();
    d.eval(&parts);
    raw.quantized = QuantizedWeight {
        weight: parts[0],
        scales: parts[1],
        biases: parts[2],
        spec,
        ..QuantizedWeight::default()
    };
    raw
}

fn forward(d: &Device, x: Tensor, layer: &LinearWeight) -> Tensor {
    let y = if layer.plain.is_none() {
        let args = QuantizedMatmulArgs {
            x,
            w: layer.quantized,
            transpose: 1,
            ..QuantizedMatmulArgs::default()
        };
        op!(d, quantized_matmul, &raw const args).unwrap()
    } else {
        op!(d, matmul, x, layer.plain).unwrap()
    };
    if layer.bias.is_none() {
        return y;
    }
    op!(d, binary, binary::ADD, y, layer.bias).unwrap()
}

fn bits(d: &Device, t: Tensor) -> Vec<u8> {
    assert_eq!(d.dtype(t), DType::F32);
    d.read_bytes(t)
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    let float = |four: &[u8]| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]);
    bytes.chunks_exact(4).map(float)
}

fn devices() -> Vec<Device> {
    let options =
        ["exact", "high", "fast"].map(|precision| format!("{{\"precision\":\"{precision}\"}}"));
    let open = |options: &String| Device::open_with("", options).unwrap();
    options.iter().map(open).collect()
}

#[test]
fn products_of_one_input() {
    for d in devices() {
        for rows in [1, 3, 16, 40] {
            let x = d.f32s(&noise(1, (rows * COLUMNS) as usize), &[rows, COLUMNS]);
            let weight = d.f32s(&noise(2, COLUMNS as usize), &[COLUMNS]);
            let layers = [
                layer(&d, 4, 130, COLUMNS, 3, false),
                layer(&d, 8, 64, COLUMNS, 5, true),
                layer(&d, 0, 33, COLUMNS, 7, true),
            ];
            let args = ProjectArgs {
                x,
                norm: InputNorm {
                    normed: 1,
                    eps: EPS,
                    weight,
                    ..InputNorm::default()
                },
                layers: layers.as_ptr(),
                n_layers: 3,
                ..ProjectArgs::default()
            };
            let mut out = [Tensor::NONE; 3];
            run!(d, project, &raw const args, out.as_mut_ptr()).unwrap();
            let normed = op!(d, rms_norm, x, weight, EPS).unwrap();
            for (layer, fused) in layers.iter().zip(out) {
                assert!(bits(&d, fused) == bits(&d, forward(&d, normed, layer)));
            }
            // One layer with a residual.
            let residual = d.f32s(&noise(9, (rows * 64) as usize), &[rows, 64]);
            let args = ProjectArgs {
                layers: &raw const layers[1],
                n_layers: 1,
                residual,
                ..args
            };
            let mut fused = Tensor::NONE;
            run!(d, project, &raw const args, &raw mut fused).unwrap();
            let y = forward(&d, normed, &layers[1]);
            let sum = op!(d, binary, binary::ADD, residual, y).unwrap();
            assert!(bits(&d, fused) == bits(&d, sum));
        }
    }
}

#[test]
fn gated_blocks_and_their_rows_alone() {
    const INNER: i64 = 320;
    for (d, is_exact) in devices().into_iter().zip([true, false, false]) {
        for forms in [[4, 4, 8], [0, 0, 0], [4, 0, 8]] {
            let gate = layer(&d, forms[0], INNER, COLUMNS, 3, true);
            let up = layer(&d, forms[1], INNER, COLUMNS, 5, false);
            let down = layer(&d, forms[2], COLUMNS, INNER, 7, true);
            let block = |x: Tensor| {
                let args = GatedMlpArgs {
                    x,
                    norm: InputNorm {
                        normed: 1,
                        eps: EPS,
                        ..InputNorm::default()
                    },
                    gate,
                    up,
                    down,
                    kind: glu::SILU,
                    residual: x,
                    ..GatedMlpArgs::default()
                };
                op!(d, gated_mlp, &raw const args).unwrap()
            };
            for rows in [1, 5, 40] {
                let numbers = noise(1, (rows * COLUMNS) as usize);
                let x = d.f32s(&numbers, &[rows, COLUMNS]);
                let fused = bits(&d, block(x));
                let normed = op!(d, rms_norm, x, Tensor::NONE, EPS).unwrap();
                let (g, u) = (forward(&d, normed, &gate), forward(&d, normed, &up));
                let inner = op!(d, glu, glu::SILU, g, u).unwrap();
                let y = forward(&d, inner, &down);
                assert!(fused == bits(&d, op!(d, binary, binary::ADD, x, y).unwrap()));
                if rows > 16 || !is_exact {
                    continue;
                }
                // Alone a row may be summed in another order, which the products choose by their rows.
                for (row, whole) in fused.chunks_exact(4 * COLUMNS as usize).enumerate() {
                    let at = row * COLUMNS as usize;
                    let one = &numbers[at..at + COLUMNS as usize];
                    let alone = bits(&d, block(d.f32s(one, &[1, COLUMNS])));
                    let largest = floats(whole).fold(0.0, |most: f32, x| most.max(x.abs()));
                    let near = floats(whole).zip(floats(&alone));
                    let far = near.filter(|(a, b)| (a - b).abs() > 1e-5 * largest);
                    assert_eq!(far.count(), 0, "{forms:?}, row {row} of {rows}");
                }
            }
        }
    }
}

#[test]
fn sums_with_their_norm() {
    let d = Device::open();
    for rows in [1, 40] {
        let x = d.f32s(&noise(1, (rows * 77) as usize), &[rows, 77]);
        let residual = d.f32s(&noise(2, (rows * 77) as usize), &[rows, 77]);
        let mut out = [Tensor::NONE; 2];
        let none = Tensor::NONE;
        run!(d, add_rms_norm, x, residual, none, EPS, &raw mut out).unwrap();
        let sum = op!(d, binary, binary::ADD, residual, x).unwrap();
        assert!(bits(&d, out[0]) == bits(&d, sum));
        let normed = op!(d, rms_norm, sum, none, EPS).unwrap();
        assert!(bits(&d, out[1]) == bits(&d, normed));
    }
}

#[test]
fn rotated_attention() {
    const WIDTH: i64 = 16;
    let d = Device::open();
    let (heads, kv_heads) = (4, 2);
    for rows in [1, 7, 40] {
        let flat = |heads: i64, seed| {
            let numbers = noise(seed, (rows * heads * WIDTH) as usize);
            d.f32s(&numbers, &[rows, heads * WIDTH])
        };
        let (q, k, v) = (flat(heads, 1), flat(kv_heads, 2), flat(kv_heads, 3));
        let weight = |seed| d.f32s(&noise(seed, WIDTH as usize), &[WIDTH]);
        let (q_norm, k_norm) = (weight(4), weight(5));
        let pool = || d.f32s(&[0.0; 4 * 32 * 32], &[4, 32, kv_heads, WIDTH]);
        let list: Vec<i32> = (0..rows as i32).collect();
        let slots: Vec<i32> = list.iter().map(|row| row + 32).collect();
        let starts = [0_u32, rows as u32];
        let args = |q, k, v| PagedAttentionArgs {
            q,
            k,
            v,
            k_pool: pool(),
            v_pool: pool(),
            slots: d.i32s(&slots, &[rows]),
            row_sequences: d.i32s(&vec![0; rows as usize], &[rows]),
            positions: d.i32s(&list, &[rows]),
            page_table: d.i32s(&[1, 2], &[1, 2]),
            row_starts: starts.as_ptr(),
            n_sequences: 1,
            scale: 0.25,
            ..PagedAttentionArgs::default()
        };
        let rotate = RotateArgs {
            normed: 1,
            eps: EPS,
            q_norm,
            k_norm,
            dims: WIDTH as u32,
            ..RotateArgs::default()
        };
        let mut fused = [Tensor::NONE; 3];
        let given = args(q, k, v);
        let (given, rotate) = (&raw const given, &raw const rotate);
        run!(d, rotated_paged_attention, given, rotate, &raw mut fused).unwrap();
        assert_eq!(d.shape(fused[0]), [rows, heads * WIDTH]);
        let turned = |t: Tensor, heads: i64, norm| {
            let dims = [rows, heads, WIDTH];
            let t = op!(d, reshape, t, dims.as_ptr(), 3).unwrap();
            let args = RopeArgs {
                x: op!(d, rms_norm, t, norm, EPS).unwrap(),
                positions: d.i32s(&list, &[rows]),
                dims: WIDTH as u32,
                base: 10_000.0,
                scale: 1.0,
                ..RopeArgs::default()
            };
            op!(d, rope, &raw const args).unwrap()
        };
        let dims = [rows, kv_heads, WIDTH];
        let v = op!(d, reshape, v, dims.as_ptr(), 3).unwrap();
        let parts = args(turned(q, heads, q_norm), turned(k, kv_heads, k_norm), v);
        let mut made = [Tensor::NONE; 3];
        run!(d, paged_attention, &raw const parts, &raw mut made).unwrap();
        for (fused, made) in fused.into_iter().zip(made) {
            assert!(bits(&d, fused) == bits(&d, made));
        }
    }
}
