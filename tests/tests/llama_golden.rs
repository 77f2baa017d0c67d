//! Tiny random checkpoints of the llama line, through the whole path (reader, family plugin, cpu
//! plugin, engine), against logits and greedy tokens of the reference implementation.
//!
//! How the checkpoints and numbers were made is in `tests/golden/tools/README.md`. Needs the
//! plugins that `cargo xtask test` prepares.

use std::path::{Path, PathBuf};

use mlxcel::engine::{EngineHandle, LoadOptions, open_model, start_engine};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use serde_json::Value;

fn folder(variant: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/llama").join(variant)
}

fn engine(path: &Path, ctx_size: usize, dtype: DType) -> EngineHandle {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR");
    let dir = dir.expect("MLXCEL_TEST_PLUGINS_DIR is not set: run the tests with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    let loader = Loader::default();
    let opened = open_model(path, &catalogue, &loader, None).unwrap();
    let backend = loader
        .select_backend(&catalogue, &BackendChoice::Named("cpu".to_owned()))
        .unwrap();
    let options = LoadOptions {
        dtype: Some(dtype),
        ctx_size,
        threads: 1,
    };
    start_engine(opened, backend, options, |_, _| {}).unwrap().0
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|x| x.as_f64().unwrap() as f32)
        .collect()
}

fn argmax(logits: &[f32]) -> u32 {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32
}

/// Largest distance of two rows of logits, relative to the range of the second.
fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let (low, high) = want
        .iter()
        .fold((f32::MAX, f32::MIN), |(l, h), x| (l.min(*x), h.max(*x)));
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / (high - low)
}

/// Runs prompts of a variant and compares: logits of the last position, then greedy decoding with
/// the cache. Also that a prompt in two parts gives the same logits.
fn check(variant: &str, file: &str, prompts: &[&str], ctx_size: usize) {
    let golden: Value = serde_json::from_slice(&std::fs::read(folder(variant).join("golden.json")).unwrap()).unwrap();
    let engine = engine(&folder(variant).join(file), ctx_size, DType::F32);
    for prompt in golden["prompts"].as_array().unwrap() {
        let name = prompt["name"].as_str().unwrap();
        if !prompts.contains(&name) {
            continue;
        }
        let tokens = ids(&prompt["ids"]);
        let logits = engine.score(tokens.clone()).unwrap();
        let off = distance(&logits, &floats(&prompt["last_logits"]));
        // Q6_K has groups of 16, which MLX's form does not know: it is expanded to f16, which rounds.
        let limit = if variant == "gguf-kquants" { 1e-3 } else { 1e-4 };
        assert!(off < limit, "{variant}, {name}: logits are off by {off} of their range");
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
        assert!(off < 1e-5, "{variant}, {name}: a prompt in two parts is off by {off}");
    }
}

macro_rules! variants {
    ($($test:ident: $variant:literal;)*) => {$(
        #[test]
        fn $test() {
            check($variant, "", &["short", "long"], 0);
        }
    )*};
}

variants! {
    grouped_query_attention: "llama-gqa";
    tied_embeddings: "llama-tied";
    biases: "llama-bias";
    explicit_head_dim: "llama-head-dim";
    bf16_weights: "llama-bf16";
    rope_linear: "rope-linear";
    rope_llama3: "rope-llama3";
    rope_yarn: "rope-yarn";
    rope_yarn_with_mscale: "rope-yarn-mscale";
    rope_yarn_with_explicit_factors: "rope-yarn-explicit";
    mistral_with_a_window: "mistral-window";
    mistral_without_a_window: "mistral-full";
    mixtral: "mixtral";
    mixtral_with_fused_experts: "mixtral-fused";
    smollm3: "smollm3";
    smollm3_with_a_list: "smollm3-list";
    smollm3_with_windows: "smollm3-window";
    mlx_3_bits: "mlx-3bit-g32";
    mlx_4_bits: "mlx-4bit-g32";
    mlx_5_bits: "mlx-5bit-g32";
    mlx_6_bits: "mlx-6bit-g64";
    mlx_8_bits: "mlx-8bit-g32";
    mlx_mixed: "mlx-mixed";
    mlx_mixtral: "mlx-mixtral-4bit";
    mlx_mxfp4: "mlx-mxfp4";
}

macro_rules! gguf_variants {
    ($($test:ident: $variant:literal;)*) => {$(
        #[test]
        fn $test() {
            check($variant, "model.gguf", &["short", "long"], 0);
        }
    )*};
}

gguf_variants! {
    gguf_blocks_of_32: "gguf-blocks32";
    gguf_k_quants: "gguf-kquants";
    gguf_llama3_frequencies: "gguf-llama3";
    gguf_mixtral: "gguf-mixtral";
}

/// The reference takes the frequencies from the longest position of the call; ours depend on each
/// row's own position (see `nn/rope.rs`). Within the original context both are the plain embedding.
#[test]
fn rope_dynamic_within_the_original_context() {
    check("rope-dynamic", "", &["short"], 0);
}

/// The reference chooses the factors by the length of the call, we by the context that is run.
#[test]
fn rope_longrope_chooses_by_the_context() {
    let config: Value =
        serde_json::from_slice(&std::fs::read(folder("rope-longrope").join("config.json")).unwrap()).unwrap();
    let settings = &config["rope_parameters"];
    let original = settings["original_max_position_embeddings"]
        .as_u64()
        .or(config["original_max_position_embeddings"].as_u64());
    check("rope-longrope", "", &["short"], original.unwrap() as usize);
    check("rope-longrope", "", &["long"], 0);
}

/// The spelling of settings that transformers 4 wrote.
#[test]
fn legacy_configs_read_alike() {
    for variant in [
        "llama-gqa",
        "llama-bias",
        "llama-tied",
        "rope-linear",
        "rope-llama3",
        "rope-yarn",
        "rope-yarn-mscale",
        "mistral-window",
        "smollm3",
        "mixtral",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let from = folder(variant);
        std::fs::copy(from.join("config.legacy.json"), dir.path().join("config.json")).unwrap();
        std::fs::copy(from.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let golden: Value = serde_json::from_slice(&std::fs::read(from.join("golden.json")).unwrap()).unwrap();
        let engine = engine(dir.path(), 0, DType::F32);
        for prompt in golden["prompts"].as_array().unwrap() {
            let off = distance(
                &engine.score(ids(&prompt["ids"])).unwrap(),
                &floats(&prompt["last_logits"]),
            );
            assert!(off < 1e-4, "{variant}: {off}");
        }
    }
}

/// Half precision through MLX's own kernels stays near the reference in f32.
#[test]
fn half_types_stay_near() {
    for (dtype, limit) in [(DType::F16, 5e-3), (DType::BF16, 4e-2)] {
        for variant in ["llama-gqa", "mlx-4bit-g32", "mistral-window"] {
            let golden: Value =
                serde_json::from_slice(&std::fs::read(folder(variant).join("golden.json")).unwrap()).unwrap();
            let engine = engine(&folder(variant), 0, dtype);
            for prompt in golden["prompts"].as_array().unwrap() {
                let off = distance(
                    &engine.score(ids(&prompt["ids"])).unwrap(),
                    &floats(&prompt["last_logits"]),
                );
                assert!(off < limit, "{variant} in {}: {off}", dtype.name());
            }
        }
    }
}
