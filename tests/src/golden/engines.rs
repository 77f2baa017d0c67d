//! Engines over tiny checkpoints on the cpu backend: one request at a time, or several in one step.

use std::path::Path;

use mlxcel::engine::batch::BatchLimits;
use mlxcel::engine::schedule::Budget;
use mlxcel::engine::{
    CancelToken, EngineFacts, EngineHandle, Event, GenerateRequest, GenerateStream, LoadOptions,
    Precision, open_model, start_engine,
};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel::sampling::SamplingParams;
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};

/// Starts an engine; `Err` is the host's message.
pub(super) fn start(
    checkpoint: &Path,
    options: LoadOptions,
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
    let backend = BackendChoice::Named("cpu".to_owned());
    let backend = loader.select_backend(&catalogue, &backend).unwrap();
    start_engine(opened, backend, options, |_, _| {}).map_err(|e| e.to_string())
}

/// What runs one request at a time, with products in the type of the activations: what is compared is the
/// architecture, not what a backend rounds for speed.
pub(super) fn alone(ctx_size: usize, dtype: DType) -> LoadOptions {
    LoadOptions {
        dtype: Some(dtype),
        ctx_size,
        threads: 1,
        precision: Some(Precision::Exact),
        ..LoadOptions::default()
    }
}

/// Opens a checkpoint; `Err` is the host's message. `ctx_size` 0 is the model's own.
pub fn open(checkpoint: &Path, ctx_size: usize, dtype: DType) -> Result<EngineHandle, String> {
    start(checkpoint, alone(ctx_size, dtype)).map(|(engine, _)| engine)
}

/// As [`open`], for checkpoints that must open.
pub fn engine(checkpoint: &Path, ctx_size: usize, dtype: DType) -> EngineHandle {
    open(checkpoint, ctx_size, dtype).unwrap()
}

/// An engine that runs four requests in one step, and cuts prompts into short chunks beside them, with the
/// products that the backend chooses itself.
pub(super) fn batching(checkpoint: &Path, ctx_size: usize) -> EngineHandle {
    let budget = Budget {
        rows: 13,
        prefill_rows_beside_decode: 6,
    };
    let limits = BatchLimits {
        parallel: 4,
        budget: budget.into(),
    };
    let options = LoadOptions {
        limits,
        precision: None,
        ..alone(ctx_size, DType::F32)
    };
    start(checkpoint, options).unwrap().0
}

/// The likeliest continuation.
pub(super) fn greedy(engine: &EngineHandle, prompt: Vec<u32>, n: usize) -> GenerateStream {
    let request = GenerateRequest {
        prompt,
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_new_tokens: Some(n),
        ..GenerateRequest::default()
    };
    engine.generate(request, CancelToken::default()).unwrap()
}

/// Tokens of a stream that does not fail.
pub(super) fn tokens(stream: GenerateStream) -> Vec<u32> {
    let token = |event| match event {
        Event::Token { id, .. } => Some(id),
        Event::Failed(error) => panic!("{error}"),
        _ => None,
    };
    stream.filter_map(token).collect()
}
