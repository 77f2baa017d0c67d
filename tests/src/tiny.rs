//! Engines over checked-in tiny checkpoints with the cpu plugin, and greedy questions to them.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "support of tests: a failure here is a failed test"
)]

use std::path::{Path, PathBuf};

use mlxcel::engine::batch::BatchLimits;
use mlxcel::engine::schedule::AskedBudget;
use mlxcel::engine::{
    CancelToken, EngineError, EngineHandle, Event, FinishReason, GenerateRequest, GenerateStats,
    GenerateStream, KvType, LoadOptions, Lookahead, OpenedModel, PrefixOptions, open_model,
    start_engine,
};
use mlxcel::plugin::{BackendChoice, DType, Loader, SelectedBackend};
use mlxcel::sampling::SamplingParams;
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use serde_json::Value;

use crate::cli::Mlxcel;
use crate::golden::folder;
use crate::scripted::tokenizer_of;

/// Family and variant of a folder under `tests/golden`.
pub type Kind = (&'static str, &'static str);

/// Every answer is the same whether steps wait for the tokens of the ones before or not.
pub const MODES: [Lookahead; 2] = [Lookahead::Off, Lookahead::On];

/// Bytes that one position takes in the pool.
pub fn token_bytes(kind: Kind, kv_type: impl Into<KvType>) -> u64 {
    let (opened, _) = open(kind);
    opened.desc.kv_bytes_per_token(kv_type) as u64
}

/// Starts an engine over a checkpoint.
pub fn start(kind: Kind, options: LoadOptions) -> Result<EngineHandle, EngineError> {
    let (opened, backend) = open(kind);
    Ok(start_engine(opened, backend, options, |_, _| {})?.0)
}

fn open((family, variant): Kind) -> (OpenedModel, SelectedBackend) {
    open_path(&folder(family, variant), &[])
}

/// Opens a checkpoint with the built plugins and further plugin files, for the cpu.
pub fn open_path(checkpoint: &Path, files: &[PathBuf]) -> (OpenedModel, SelectedBackend) {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR");
    let dir =
        dir.expect("MLXCEL_TEST_PLUGINS_DIR is not set: run the tests with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        files: files.to_vec(),
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    let loader = Loader::default();
    let opened = open_model(checkpoint, &catalogue, &loader, None).unwrap();
    let backend = loader
        .select_backend(&catalogue, &BackendChoice::Named("cpu".to_owned()))
        .unwrap();
    (opened, backend)
}

/// A copy of a checkpoint in the home folder of `mlxcel`, with what a server needs besides: a letter for each of its tokens,
/// of which there are at most 106 and the third ends an answer.
pub fn copy_with_tokenizer(mlxcel: &Mlxcel, (family, variant): Kind) -> PathBuf {
    let source = folder(family, variant);
    for name in ["config.json", "model.safetensors"] {
        let bytes = std::fs::read(source.join(name)).unwrap();
        mlxcel.file(&format!("{variant}/{name}"), bytes);
    }
    let config = std::fs::read(source.join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let size = config
        .get("vocab_size")
        .or(config.pointer("/text_config/vocab_size"));
    let size = size.and_then(Value::as_u64).unwrap() as usize;
    // Of the letters that stand for bytes, those that stand for themselves.
    let letters = ('!'..='~').chain('¡'..='¬').take(size);
    let tokenizer = tokenizer_of(letters, 2).to_string();
    mlxcel.file(&format!("{variant}/tokenizer.json"), tokenizer);
    let settings = r#"{"eos_token": "<|end|>", "chat_template": "{{ messages[0]['content'] }}"}"#;
    mlxcel.file(&format!("{variant}/tokenizer_config.json"), settings);
    mlxcel.path(variant)
}

/// Options for `parallel` requests in short steps, with more room than any of these models needs.
pub fn options(parallel: usize) -> LoadOptions {
    LoadOptions {
        dtype: Some(DType::F32),
        threads: 1,
        limits: BatchLimits {
            parallel,
            budget: AskedBudget {
                rows: Some(48),
                prefill_rows_beside_decode: Some(16),
            },
        },
        kv_budget_bytes: Some(1 << 30),
        ..LoadOptions::default()
    }
}

/// A prefix cache that keeps nothing, so that every answer is computed from its first token on.
pub fn nothing_kept() -> PrefixOptions {
    PrefixOptions {
        max_bytes: Some(0),
        ..PrefixOptions::default()
    }
}

/// The likeliest `count` tokens behind a prompt.
pub fn request(prompt: &[u32], count: usize) -> GenerateRequest {
    GenerateRequest {
        prompt: prompt.to_vec(),
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_new_tokens: Some(count),
        ..GenerateRequest::default()
    }
}

/// Starts such a request.
pub fn begin(engine: &EngineHandle, prompt: &[u32], count: usize) -> GenerateStream {
    begin_with(engine, request(prompt, count))
}

/// Starts any request that nobody cancels.
pub fn begin_with(engine: &EngineHandle, request: GenerateRequest) -> GenerateStream {
    engine.generate(request, CancelToken::default()).unwrap()
}

/// Tokens of a stream, why it ended, and its figures; or what it failed with.
pub fn outcome(
    stream: GenerateStream,
) -> Result<(Vec<u32>, FinishReason, GenerateStats), EngineError> {
    let mut tokens = Vec::new();
    for event in stream {
        match event {
            Event::Token { id, .. } => tokens.push(id),
            Event::Done { reason, stats } => return Ok((tokens, reason, stats)),
            Event::Failed(error) => return Err(error),
            Event::Prefill { .. } => {}
        }
    }
    panic!("a stream ended without an end")
}

/// Tokens of a stream that does not fail, and its figures.
pub fn collect(stream: GenerateStream) -> (Vec<u32>, GenerateStats) {
    match outcome(stream) {
        Ok((tokens, _, stats)) => (tokens, stats),
        Err(error) => panic!("{error}"),
    }
}

/// Waits until the engine has nothing left to do: the last answers may be out before their step has ended.
pub fn settle(engine: &EngineHandle) {
    while engine.health().step_age.is_some() {
        std::thread::yield_now();
    }
}

/// Greedy answer, and tokens of the prompt that were found.
pub fn ask(engine: &EngineHandle, prompt: &[u32], count: usize) -> (Vec<u32>, usize) {
    let (tokens, stats) = collect(begin(engine, prompt, count));
    (tokens, stats.cached_tokens)
}

/// Token ids below 64, the same for the same seed.
pub fn tokens(count: usize, seed: usize) -> Vec<u32> {
    let token = |i: usize| ((i * 7 + seed * 13) % 58 + 3) as u32;
    (0..count).map(token).collect()
}

/// Rounds of a request that is cancelled and one whose reader goes away, beside one that must get `want`.
pub fn cancel_beside(engine: &EngineHandle, prompt: &[u32], want: &[u32], rounds: usize) {
    for round in 0..rounds {
        let cancel = CancelToken::default();
        let cancelled = engine
            .generate(request(&[5, 6, 7], 10_000), cancel.clone())
            .unwrap();
        let abandoned = begin(engine, prompt, 10_000);
        let kept = begin(engine, prompt, want.len());
        abandoned.take(round).for_each(drop);
        cancel.cancel();
        assert_eq!(collect(kept).0, want);
        collect(cancelled);
    }
}
