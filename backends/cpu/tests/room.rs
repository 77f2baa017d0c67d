//! Half activations where memory ends in the middle of a call. One test: limits are those of the whole process.
#![allow(clippy::unwrap_used, reason = "a test fails that way")]

#[macro_use]
mod harness;

use harness::{Device, noise};
use mlxcel_abi::ops_args::MemoryLimits;
use mlxcel_abi::{DType, Tensor};

const STEPS: u64 = 100;

#[test]
fn nothing_is_left_of_results_of_which_one_has_no_room() {
    let d = Device::open();
    let n = 1 << 18;
    let numbers = |seed, dims: &[i64]| d.of(DType::BF16, &noise(seed, n as usize), dims);
    let (x, residual, w) = (numbers(1, &[1, n]), numbers(2, &[1, n]), numbers(3, &[n]));
    d.eval(&[x, residual, w]);
    run!(d, clear_cache).unwrap();
    let before = d.memory();
    let limit = |limit_bytes| {
        d.set_limits(MemoryLimits {
            limit_bytes,
            ..MemoryLimits::default()
        })
        .unwrap();
    };
    let mut refused = 0;
    // Room for nothing, then for a little more each time until there is room for all.
    for step in 0..STEPS {
        limit(before.active_bytes + step * (n as u64) / 2);
        let mut out = [Tensor::NONE; 2];
        match run!(d, add_rms_norm, x, residual, w, 1e-5, &raw mut out) {
            Ok(()) => out.into_iter().for_each(|t| d.release(t)),
            Err(_) => refused += 1,
        }
        run!(d, clear_cache).unwrap();
        assert_eq!(d.memory().live_tensors, before.live_tensors, "step {step}");
    }
    assert!((1..STEPS).contains(&refused), "{refused}");
    limit(0);
}
