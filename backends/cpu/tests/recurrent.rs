//! Short convolution and gated delta with half activations around states in f32: what f32 gives, rounded once.
#![allow(clippy::unwrap_used, reason = "a test fails that way")]

#[macro_use]
mod harness;

use harness::{Device, noise};
use mlxcel_abi::cache_args::{GatedDeltaPoolArgs, ShortConvPoolArgs, StateRows};
use mlxcel_abi::kinds::unary;
use mlxcel_abi::{DType, Result, Tensor};

const HALF: [DType; 2] = [DType::F16, DType::BF16];
const ROWS: i64 = 6;
const SLOTS: i64 = 4;
/// Sequences that go on, that begin, that have no rows, and of padding; the last two share a slot that is nobody's.
const SOURCES: [i32; 4] = [1, -1, 3, -1];
const TARGETS: [i32; 4] = [2, 1, 0, 0];
const STARTS: [u32; 5] = [0, 3, 5, 5, 6];

fn rows(d: &Device) -> StateRows {
    let starts = STARTS.map(|start| start as i32);
    StateRows {
        sources: d.i32s(&SOURCES, &[4]),
        targets: d.i32s(&TARGETS, &[4]),
        row_sequences: d.i32s(&[0, 0, 0, 1, 1, 3], &[ROWS]),
        row_starts: d.i32s(&starts, &[5]),
        host_row_starts: STARTS.as_ptr(),
        n_sequences: 4,
        ..StateRows::default()
    }
}

/// Values that both half types hold exactly.
fn exact(seed: u32, shape: &[i64]) -> Vec<f32> {
    let count = shape.iter().product::<i64>() as usize;
    let eighths = |x: &f32| (x * 8.0).round() / 8.0;
    noise(seed, count).iter().map(eighths).collect()
}

/// A result and the states after it, but for those of the slot that is nobody's.
type Moved = Result<(Vec<f32>, Vec<f32>)>;

fn read(d: &Device, dtype: DType, out: [Tensor; 2]) -> (Vec<f32>, Vec<f32>) {
    assert_eq!([d.dtype(out[0]), d.dtype(out[1])], [dtype, DType::F32]);
    let states = d.read(out[1]);
    (
        d.read(out[0]),
        states[states.len() / SLOTS as usize..].to_vec(),
    )
}

fn convolve(d: &Device, dtype: DType, states: DType) -> Moved {
    let given = |seed, shape: &[i64]| d.of(dtype, &exact(seed, shape), shape);
    let pool = [SLOTS, 2, 5];
    let args = ShortConvPoolArgs {
        x: given(1, &[ROWS, 5]),
        weight: given(2, &[5, 3]),
        bias: given(3, &[5]),
        pool: d.of(states, &noise(4, 40), &pool),
        rows: rows(d),
        activation: unary::SILU,
        ..ShortConvPoolArgs::default()
    };
    let mut out = [Tensor::NONE; 2];
    run!(d, short_conv, &raw const args, &raw mut out)?;
    Ok(read(d, dtype, out))
}

fn step(d: &Device, dtype: DType, states: DType) -> Moved {
    let given = |seed, shape: &[i64]| d.of(dtype, &exact(seed, shape), shape);
    let args = GatedDeltaPoolArgs {
        q: given(1, &[ROWS, 2, 3]),
        k: given(2, &[ROWS, 2, 3]),
        v: given(3, &[ROWS, 4, 5]),
        g: given(4, &[ROWS, 4]),
        beta: given(5, &[ROWS, 4]),
        pool: d.of(states, &noise(6, 240), &[SLOTS, 4, 3, 5]),
        rows: rows(d),
        ..GatedDeltaPoolArgs::default()
    };
    let mut out = [Tensor::NONE; 2];
    run!(d, gated_delta, &raw const args, &raw mut out)?;
    Ok(read(d, dtype, out))
}

#[test]
fn half_activations_give_what_f32_gives_rounded_once() {
    let d = Device::open();
    for moves in [convolve, step] {
        let (result, states) = moves(&d, DType::F32, DType::F32).unwrap();
        assert!(result.iter().chain(&states).any(|x| x.abs() > 0.1));
        for dtype in HALF {
            let rounded = d.read(d.of(dtype, &result, &[result.len() as i64]));
            let found = moves(&d, dtype, DType::F32).unwrap();
            assert_eq!(found, (rounded, states.clone()), "{dtype:?}");
        }
    }
}

/// A state is written in place and adds up over thousands of rows: its pool is f32, and is not taken for something else.
#[test]
fn states_in_another_type_are_refused() {
    let d = Device::open();
    for (moves, dtype) in [convolve, step]
        .into_iter()
        .flat_map(|m| HALF.map(|h| (m, h)))
    {
        let error = moves(&d, DType::F32, dtype).unwrap_err();
        assert!(
            error.message.contains("a pool of states is f32"),
            "{}",
            error.message
        );
    }
}
