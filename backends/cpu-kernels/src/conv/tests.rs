//! Convolutions against sums in f64, for every instruction set of this processor.

use super::*;
use crate::quantized::testing::Numbers;

/// Sums in f64, tap by tap, from the definition.
fn reference(shape: &Shape, x: &[f32], w: &[f32], transposed: bool) -> Vec<f64> {
    let (width, rows) = (shape.group_channels(), shape.outputs / shape.groups);
    let (in_len, out_len): (usize, usize) =
        (shape.input.iter().product(), shape.output.iter().product());
    let mut y = vec![0.0; shape.outputs_len() * shape.outputs];
    let (from_len, from_size, to_size) = if transposed {
        (in_len, shape.input, shape.output)
    } else {
        (out_len, shape.output, shape.input)
    };
    for picture in 0..shape.batch {
        for from in 0..from_len {
            for tap in 0..shape.taps() {
                let at = place(from, from_size);
                let Some(to) = shape.meet(at, place(tap, shape.kernel), to_size) else {
                    continue;
                };
                let (input, output) = if transposed { (from, to) } else { (to, from) };
                for o in 0..shape.outputs {
                    for c in 0..width {
                        let channel = o / rows * width + c;
                        let x = x[(picture * in_len + input) * shape.channels + channel];
                        let w = w[(o * shape.taps() + tap) * width + c];
                        y[(picture * out_len + output) * shape.outputs + o] +=
                            f64::from(x) * f64::from(w);
                    }
                }
            }
        }
    }
    y
}

fn check(shape: Shape, is_transposed: bool) {
    let mut numbers = Numbers(shape.outputs as u64 + shape.kernel[2] as u64);
    let [x, w, y] = shape.lengths().unwrap();
    let (x, w) = (numbers.floats(x), numbers.floats(w));
    let want = reference(&shape, &x, &w, is_transposed);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let mut pool = Pool::new(2).unwrap();
        let panels = [Mutex::default(), Mutex::default()];
        let mut got = vec![f32::NAN; y];
        let operands = Operands {
            x: &x,
            w: &w,
            y: &mut got,
        };
        let run = if is_transposed { transposed } else { conv };
        let mut scratch = Scratch::default();
        assert!(run(isa, &mut pool, &shape, operands, &mut scratch, &panels));
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!(
                (f64::from(*got) - want).abs() < 1e-4,
                "{isa:?} {shape:?} [{i}]: {got} for {want}"
            );
        }
    }
}

const ONE: Shape = Shape {
    batch: 2,
    input: [1, 1, 37],
    channels: 6,
    kernel: [1, 1, 5],
    output: [1, 1, 37],
    outputs: 9,
    groups: 1,
    stride: [1; 3],
    padding: [0, 0, 2],
    dilation: [1; 3],
};

#[test]
fn plain_convolutions_match_f64() {
    check(ONE, false);
    check(
        Shape {
            stride: [1, 1, 3],
            output: [1, 1, 13],
            ..ONE
        },
        false,
    );
    check(
        Shape {
            dilation: [1, 1, 4],
            output: [1, 1, 25],
            ..ONE
        },
        false,
    );
    check(Shape { groups: 3, ..ONE }, false);
    check(
        Shape {
            kernel: [1; 3],
            padding: [0; 3],
            ..ONE
        },
        false,
    );
    let two = Shape {
        input: [1, 11, 14],
        kernel: [1, 3, 3],
        output: [1, 6, 7],
        stride: [1, 2, 2],
        padding: [0, 1, 1],
        ..ONE
    };
    check(two, false);
    check(Shape { groups: 3, ..two }, false);
    check(
        Shape {
            input: [4, 11, 14],
            kernel: [2, 3, 3],
            output: [3, 6, 7],
            ..two
        },
        false,
    );
}

#[test]
fn depthwise_convolutions_match_f64() {
    check(
        Shape {
            channels: 21,
            outputs: 21,
            groups: 21,
            ..ONE
        },
        false,
    );
}

#[test]
fn transposed_convolutions_match_f64() {
    // (37 - 1) * 2 + 4 + 1 - 2 * 2
    let up = Shape {
        stride: [1, 1, 2],
        output: [1, 1, 73],
        ..ONE
    };
    check(up, true);
    check(Shape { groups: 3, ..up }, true);
    check(
        Shape {
            input: [1, 5, 6],
            kernel: [1, 3, 3],
            output: [1, 9, 11],
            stride: [1, 2, 2],
            padding: [0, 1, 1],
            ..ONE
        },
        true,
    );
}

#[test]
fn many_positions_are_multiplied_in_parts() {
    let long = Shape {
        batch: 1,
        input: [1, 1, 40_000],
        output: [1, 1, 40_000],
        channels: 8,
        outputs: 4,
        ..ONE
    };
    check(long, false);
}
