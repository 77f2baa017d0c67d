//! What share of a decode step the plugin boundary takes: calls of one step of SmolLM2's shape,
//! times the cost of a call, over the time of a step.
//!
//! `cargo run --release -p mlxcel-tests --example boundary_share STEP_MS`, with the time of a decode
//! step from `mlxcel bench` (1000 / tokens per second) on the same machine.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a tool for developers"
)]

use std::time::Instant;

use mlxcel_abi::ops::BackendOps;
use mlxcel_abi::{DType, Table, Tensor, TensorInfo};
use mlxcel_family_llama as _;
use mlxcel_sdk::testkit::{
    Caches, FamilyUnderTest, Part, ReferenceOptions, StepOptions, reference_backend,
};
use serde_json::json;

/// Nanoseconds of one call through a table that does the least there is to do behind it.
fn call_ns() -> f64 {
    let backend = reference_backend(ReferenceOptions::default());
    // SAFETY: the table lives as long as `backend`.
    let ops = unsafe { BackendOps::import(backend.ops()) };
    let (mut t, mut err) = (Tensor::NONE, std::ptr::null_mut());
    let dims = [1i64];
    // SAFETY: live arguments and results.
    unsafe { (ops.full)(ops.ctx, 0.0, DType::F32, dims.as_ptr(), 1, &mut t, &mut err) };
    let calls = 1_000_000;
    let best = (0..5).map(|_| {
        let start = Instant::now();
        for _ in 0..calls {
            let mut info = TensorInfo::ZERO;
            // SAFETY: as above.
            unsafe { (ops.info)(ops.ctx, std::hint::black_box(t), &mut info, &mut err) };
        }
        start.elapsed().as_nanos() as f64 / f64::from(calls)
    });
    best.fold(f64::INFINITY, f64::min)
}

/// Calls of one decode step, evaluation left out.
fn calls_of_a_step() -> u64 {
    let family = FamilyUnderTest::this_plugin(json!({
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "rope_theta": 100_000.0, "tie_word_embeddings": true,
    }))
    .and_then(FamilyUnderTest::shaped)
    .unwrap();
    let options = ReferenceOptions {
        shapes_only: true,
        ..ReferenceOptions::default()
    };
    let backend = reference_backend(options);
    let model = family.load(&backend.backend(), DType::F32).unwrap();
    let mut caches = Caches::new();
    let parts = [Part {
        sequence: 0,
        tokens: &[1],
    }];
    model
        .step(&mut caches, &parts, StepOptions::default())
        .unwrap();
    backend.reset_statistics();
    model
        .step(&mut caches, &parts, StepOptions::default())
        .unwrap();
    let calls = backend.statistics().calls;
    // The test kit's own attention is made of other operations; the host makes one call of it. Every
    // tensor that a family makes it also releases, and queries, keys and values are three of one call.
    let of_the_kit = [
        "attention",
        "concat",
        "contiguous",
        "slice",
        "transpose",
        "reshape",
        "rope",
        "retain",
        "info",
        "from_host",
        "read",
        "release",
    ];
    let layers = 30;
    let made: u64 = calls
        .iter()
        .filter(|(slot, _)| !of_the_kit.contains(slot))
        .map(|(_, n)| n)
        .sum();
    2 * (made + layers) + 2 * layers
}

fn main() {
    let step_ms: Option<f64> = std::env::args().nth(1).and_then(|arg| arg.parse().ok());
    let (calls, ns) = (calls_of_a_step(), call_ns());
    println!("calls of a decode step   {calls}");
    println!("cost of a call           {ns:.1} ns");
    println!("boundary in a step       {:.1} us", calls as f64 * ns / 1e3);
    if let Some(step_ms) = step_ms {
        println!(
            "share of {step_ms} ms        {:.2} %",
            calls as f64 * ns / step_ms / 1e4
        );
    }
}
