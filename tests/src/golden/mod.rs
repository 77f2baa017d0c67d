//! Runs tiny checkpoints through the whole path (reader, family plugin, cpu plugin, engine) and
//! compares with what the reference implementation computed on them.
//!
//! A family's test is a list of [`cases`]; [`engines`] opens checkpoints. How checkpoints and numbers
//! were made is in `tests/golden/tools/README.md`. Needs the plugins that `cargo xtask test` prepares.
//! Everything here panics where a test would fail.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "support of tests: a failure here is a failed test, `--nocapture` shows the distances"
)]

pub mod cases;
pub mod engines;

use std::path::{Path, PathBuf};

use serde_json::Value;

pub use cases::Case;
pub use engines::{engine, open};

/// Folder of a checked-in variant: `tests/golden/<family>/<variant>`.
pub fn folder(family: &str, variant: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    golden.join(family).join(variant)
}

/// `golden.json` of a variant's folder.
pub fn golden(folder: &Path) -> Value {
    json(&folder.join("golden.json"))
}

/// A JSON file.
pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Token ids of a JSON list.
pub fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

/// Numbers of a JSON list.
pub fn floats(value: &Value) -> Vec<f32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|x| x.as_f64().unwrap() as f32)
        .collect()
}

/// Place of the largest logit.
pub fn argmax(logits: &[f32]) -> u32 {
    logits
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1))
        .unwrap()
        .0 as u32
}

/// Largest distance of two rows of logits, relative to the range of the second.
pub fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let (low, high) = want
        .iter()
        .fold((f32::MAX, f32::MIN), |(l, h), x| (l.min(*x), h.max(*x)));
    got.iter()
        .zip(want)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
        / (high - low)
}
