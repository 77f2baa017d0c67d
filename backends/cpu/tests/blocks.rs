//! Results of kernels share memory that is used again: no live tensor may see it, whatever MLX does with it meanwhile. One test: limits
//! are those of the whole process.
#![allow(clippy::unwrap_used, reason = "a test fails that way")]

#[macro_use]
mod harness;

use harness::{Device, noise};
use mlxcel_abi::kinds::{binary, quant, unary};
use mlxcel_abi::ops_args::{
    MemoryLimits, QuantSpec, QuantizedMatmulArgs, QuantizedWeight, SliceArgs,
};
use mlxcel_abi::{Tensor, status};

const KIB: u64 = 1 << 10;

#[test]
fn memory_of_results_is_used_again_within_bounds() {
    no_live_tensor_sees_memory_that_is_used_again();
    a_weight_that_ended_is_not_remembered();
    what_is_kept_is_cache_and_bounded();
    limits_hold_for_results_of_kernels();
}

/// A program's choices.
struct Choices(u64);

impl Choices {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// A live tensor and what it has to hold.
struct Live {
    t: Tensor,
    shape: [usize; 2],
    values: Vec<f32>,
}

fn dims(shape: [usize; 2]) -> [i64; 2] {
    shape.map(|n| n as i64)
}

/// One operation on live tensors, by a kernel of the processor's or by MLX, which computes later.
fn next(d: &Device, choices: &mut Choices, live: &[Live]) -> Live {
    let a = &live[choices.below(live.len())];
    let [rows, columns] = a.shape;
    let map = |f: &dyn Fn(f32) -> f32| a.values.iter().map(|&v| f(v)).collect();
    let (t, shape, values) = match choices.below(7) {
        0 => {
            let n = choices.below(64) + 1;
            let values = noise(choices.below(1 << 20) as u32, 8 * n);
            (Ok(d.f32s(&values, &[8, n as i64])), [8, n], values)
        }
        1 => {
            let t = op!(d, binary_scalar, binary::MUL, a.t, 0.5, 0);
            (t, a.shape, map(&|v| v * 0.5))
        }
        2 => {
            let t = op!(d, binary, binary::ADD, a.t, a.t);
            (t, a.shape, map(&|v| v + v))
        }
        3 => {
            let shape = [columns, rows];
            let t = op!(d, reshape, a.t, dims(shape).as_ptr(), 2);
            (t, shape, a.values.clone())
        }
        4 => (op!(d, unary, unary::NEG, a.t), a.shape, map(&|v| -v)),
        5 => {
            let values = (0..rows * columns)
                .map(|i| a.values[i % rows * columns + i / rows])
                .collect();
            let t = op!(d, transpose, a.t, [1, 0].as_ptr(), 2);
            (t, [columns, rows], values)
        }
        _ => {
            let update = d.f32s(&[7.0], &[1, 1]);
            let (start, stop) = ([0_i64, 0], [1_i64, 1]);
            let step = [1_i64, 1];
            let args = SliceArgs {
                starts: start.as_ptr(),
                stops: stop.as_ptr(),
                strides: step.as_ptr(),
                ndim: 2,
                ..SliceArgs::default()
            };
            let t = op!(d, slice_update, a.t, update, &raw const args);
            d.release(update);
            let mut values = a.values.clone();
            values[0] = 7.0;
            (t, a.shape, values)
        }
    };
    let t = t.unwrap();
    Live { t, shape, values }
}

fn no_live_tensor_sees_memory_that_is_used_again() {
    for seed in 0..100 {
        let d = Device::open();
        let mut choices = Choices(seed);
        let first = noise(seed as u32, 96);
        let mut live = vec![Live {
            t: d.f32s(&first, &[8, 12]),
            shape: [8, 12],
            values: first,
        }];
        for _ in 0..60 {
            let made = next(&d, &mut choices, &live);
            live.push(made);
            // Handles end before MLX has computed what hangs on them.
            while live.len() > 1 && choices.below(3) == 0 {
                let ended = live.swap_remove(choices.below(live.len()));
                d.release(ended.t);
            }
            let read = &live[choices.below(live.len())];
            if choices.below(2) == 0 {
                assert_eq!(d.read(read.t), read.values, "seed {seed}");
            }
        }
        for tensor in &live {
            assert_eq!(d.shape(tensor.t), dims(tensor.shape));
            assert_eq!(d.read(tensor.t), tensor.values, "seed {seed}");
        }
        live.iter().for_each(|tensor| d.release(tensor.t));
        assert_eq!(d.memory().live_tensors, 0);
    }
}

/// Results of a kernel, with `n` elements each.
fn results(d: &Device, count: usize, n: usize) -> Vec<Tensor> {
    let x = d.f32s(&vec![1.0; n], &[n as i64]);
    let add = || op!(d, binary, binary::ADD, x, x).unwrap();
    let made = (0..count).map(|_| add()).collect();
    d.release(x);
    made
}

fn what_is_kept_is_cache_and_bounded() {
    let d = Device::open();
    run!(d, clear_cache).unwrap();
    let before = d.memory();
    let made = results(&d, 16, 1 << 18);
    let with = d.memory();
    assert!(
        with.active_bytes >= before.active_bytes + 16 * KIB * KIB,
        "{} then {}",
        before.active_bytes,
        with.active_bytes
    );
    made.iter().for_each(|&t| d.release(t));
    let after = d.memory();
    assert!(after.active_bytes < before.active_bytes + KIB * KIB);
    assert!(after.cache_bytes <= 48 * KIB * KIB);
    run!(d, clear_cache).unwrap();
    assert!(d.memory().cache_bytes < KIB * KIB);
    let made = results(&d, 4, 1000);
    d.set_limits(MemoryLimits {
        cache_limit_bytes: 0,
        ..MemoryLimits::default()
    })
    .unwrap();
    made.iter().for_each(|&t| d.release(t));
    assert_eq!(
        d.memory().cache_bytes,
        0,
        "a cache limit of 0 keeps nothing"
    );
}

fn limits_hold_for_results_of_kernels() {
    let d = Device::open();
    let idle = results(&d, 8, 10_000);
    idle.iter().for_each(|&t| d.release(t));
    let limit = d.memory().active_bytes + 512 * KIB;
    d.set_limits(MemoryLimits {
        limit_bytes: limit,
        ..MemoryLimits::default()
    })
    .unwrap();
    let x = d.f32s(&vec![1.0; 10_000], &[10_000]);
    let mut made = Vec::new();
    // What a kernel has no room for is MLX's, which says so when it computes.
    let refused = loop {
        made.push(op!(d, binary, binary::ADD, x, x).unwrap());
        // MLX takes a freed buffer that is some pages larger.
        assert!(d.memory().active_bytes <= limit + 8 * KIB);
        if let Err(error) = run!(d, eval, made.as_ptr(), made.len()) {
            break error;
        }
        assert!(made.len() < 100, "{} tensors", made.len());
    };
    assert_eq!(refused.code, status::RESOURCE_EXHAUSTED, "{refused}");
    d.set_limits(MemoryLimits {
        limit_bytes: 0,
        ..MemoryLimits::default()
    })
    .unwrap();
    made.iter().chain([&x]).for_each(|&t| d.release(t));
}

/// A quantised weight `[64, 64]` of one value.
fn weight(d: &Device, value: f32) -> QuantizedWeight {
    let w = d.f32s(&vec![value; 64 * 64], &[64, 64]);
    let spec = QuantSpec {
        mode: quant::AFFINE,
        bits: 4,
        group_size: 32,
        ..QuantSpec::default()
    };
    let mut parts = [Tensor::NONE; 3];
    run!(d, quantize, w, &raw const spec, &raw mut parts).unwrap();
    d.release(w);
    let [weight, scales, biases] = parts;
    QuantizedWeight {
        weight,
        scales,
        biases,
        spec,
        ..QuantizedWeight::default()
    }
}

fn a_weight_that_ended_is_not_remembered() {
    let d = Device::open();
    let x = d.f32s(&[1.0; 64], &[1, 64]);
    let product = |w: QuantizedWeight| {
        let args = QuantizedMatmulArgs {
            x,
            w,
            ..QuantizedMatmulArgs::default()
        };
        op!(d, quantized_matmul, &raw const args)
    };
    for round in 0..6 {
        let value = round as f32 - 2.5;
        let w = weight(&d, value);
        // By its parts, then from memory.
        for _ in 0..4 {
            let y = product(w).unwrap();
            harness::close_to(&d.read(y), &[64.0 * value; 64], 1e-3);
            d.release(y);
        }
        // Another one's scales, with the same codes.
        let other = weight(&d, 2.0 * value);
        let mixed = QuantizedWeight {
            weight: w.weight,
            ..other
        };
        for _ in 0..3 {
            let y = product(mixed).unwrap();
            harness::close_to(&d.read(y), &[128.0 * value; 64], 1e-3);
            d.release(y);
        }
        let y = product(w).unwrap();
        harness::close_to(&d.read(y), &[64.0 * value; 64], 1e-3);
        d.release(y);
        d.release(w.scales);
        let stale = product(w).unwrap_err();
        assert!(stale.message.contains("stale"), "{stale}");
        for t in [w.weight, w.biases, other.weight, other.scales, other.biases] {
            d.release(t);
        }
    }
    d.release(x);
    assert_eq!(d.memory().live_tensors, 0);
}
