//! Runs tiny checkpoints through the whole path (reader, family plugin, cpu plugin, engine) and
//! compares with what the reference implementation computed on them.
//!
//! How checkpoints and numbers were made is in `tests/golden/tools/README.md`. Needs the plugins
//! that `cargo xtask test` prepares. Everything here panics where a test would fail.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "support of tests: a failure here is a failed test, `--nocapture` shows the distances"
)]

use std::path::{Path, PathBuf};

use mlxcel::engine::{EngineFacts, EngineHandle, LoadOptions, open_model, start_engine};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use serde_json::Value;

/// Folder of a checked-in variant: `tests/golden/<family>/<variant>`.
pub fn folder(family: &str, variant: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    golden.join(family).join(variant)
}

/// `golden.json` of a variant's folder.
pub fn golden(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap()
}

/// Opens a checkpoint on the cpu backend; `Err` is the host's message. `ctx_size` 0 is the model's own.
pub fn open(checkpoint: &Path, ctx_size: usize, dtype: DType) -> Result<EngineHandle, String> {
    open_with_facts(checkpoint, ctx_size, dtype).map(|(engine, _)| engine)
}

fn open_with_facts(
    checkpoint: &Path,
    ctx_size: usize,
    dtype: DType,
) -> Result<(EngineHandle, EngineFacts), String> {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR");
    let dir =
        dir.expect("MLXCEL_TEST_PLUGINS_DIR is not set: run the tests with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    let loader = Loader::default();
    let opened = open_model(checkpoint, &catalogue, &loader, None).map_err(|e| e.to_string())?;
    let backend = loader
        .select_backend(&catalogue, &BackendChoice::Named("cpu".to_owned()))
        .unwrap();
    let options = LoadOptions {
        dtype: Some(dtype),
        ctx_size,
        threads: 1,
        ..LoadOptions::default()
    };
    start_engine(opened, backend, options, |_, _| {}).map_err(|e| e.to_string())
}

/// As [`open`], for checkpoints that must open.
pub fn engine(checkpoint: &Path, ctx_size: usize, dtype: DType) -> EngineHandle {
    open(checkpoint, ctx_size, dtype).unwrap()
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

/// Largest distance of last logits over the golden's prompts.
pub fn worst_distance(golden: &Value, engine: &EngineHandle) -> f32 {
    let prompts = golden["prompts"].as_array().unwrap();
    let off = |prompt: &Value| {
        distance(
            &engine.score(ids(&prompt["ids"])).unwrap(),
            &floats(&prompt["last_logits"]),
        )
    };
    prompts.iter().map(off).fold(0.0, f32::max)
}

/// What [`check`] runs.
#[derive(Debug)]
pub struct Case<'a> {
    /// Folder of the golden.
    pub folder: PathBuf,
    /// Checkpoint file inside it, or empty for the folder itself.
    pub file: &'a str,
    /// Names of the prompts to run.
    pub prompts: &'a [&'a str],
    /// Context to run with; 0 is the model's own.
    pub ctx_size: usize,
    /// Largest distance of the logits, relative to their range.
    pub limit: f32,
}

/// Runs prompts of a variant in f32 and compares: logits of the last position, then greedy decoding
/// with the cache. Also that a prompt in two parts gives the same logits.
pub fn check(case: &Case<'_>) {
    let variant = case.folder.display();
    let golden = golden(&case.folder);
    let checkpoint = case.folder.join(case.file);
    let (engine, facts) = open_with_facts(&checkpoint, case.ctx_size, DType::F32).unwrap();
    let (mut ran, mut worst) = (0, 0.0_f32);
    for prompt in golden["prompts"].as_array().unwrap() {
        let name = prompt["name"].as_str().unwrap();
        if !case.prompts.contains(&name) {
            continue;
        }
        ran += 1;
        let tokens = ids(&prompt["ids"]);
        let logits = engine.score(tokens.clone()).unwrap();
        let off = distance(&logits, &floats(&prompt["last_logits"]));
        println!("{variant}, {name}: {off:.1e} of the range of logits");
        worst = worst.max(off);
        assert!(
            off < case.limit,
            "{variant}, {name}: logits are off by {off} of their range"
        );
        let want = ids(&prompt["greedy"]);
        let (mut text, mut got) = (tokens.clone(), vec![argmax(&logits)]);
        while got.len() < want.len() {
            text.push(*got.last().unwrap());
            got.push(argmax(&engine.score(text.clone()).unwrap()));
        }
        assert_eq!(got, want, "{variant}, {name}");
        engine.score(vec![2]).unwrap();
        engine.score(tokens[..tokens.len() / 2].to_vec()).unwrap();
        let parts = engine.score(tokens).unwrap();
        let off = distance(&parts, &logits);
        assert!(
            off < 1e-5,
            "{variant}, {name}: a prompt in two parts is off by {off}"
        );
    }
    assert_eq!(
        ran,
        case.prompts.len(),
        "{variant}: the golden lacks one of {:?}",
        case.prompts
    );
    crate::golden_results::settle(&case.folder, &facts.arch, worst);
}
