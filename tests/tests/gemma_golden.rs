//! Tiny random checkpoints of the gemma line, through the whole path (reader, family plugin, cpu
//! plugin, engine), against logits and greedy tokens of the reference implementation.
//!
//! How the checkpoints and numbers were made is in `tests/golden/tools/README.md`. Needs the
//! plugins that `cargo xtask test` prepares.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failure in a test is a failed test"
)]

use mlxcel::engine::batch::BatchLimits;
use mlxcel::engine::schedule::Budget;
use mlxcel::engine::{
    CancelToken, EngineHandle, Event, GenerateRequest, GenerateStream, LoadOptions, open_model,
    start_engine,
};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel::sampling::SamplingParams;
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use mlxcel_tests::golden::{Case, check, engine, folder, golden, ids, open, worst_distance};

fn run(variant: &str, file: &str) {
    check(&Case {
        folder: folder("gemma", variant),
        file,
        prompts: &["short", "long"],
        ctx_size: 0,
        limit: 1e-4,
    });
}

macro_rules! variants {
    ($($test:ident: $variant:literal, $file:literal;)*) => {$(
        #[test]
        fn $test() {
            run($variant, $file);
        }
    )*};
}

// The long prompts, of 24 tokens, cross the windows of 8.
variants! {
    gemma: "gemma", "";
    gemma2: "gemma2", "";
    gemma2_with_null_for_caps: "gemma2-uncapped", "";
    gemma3: "gemma3", "";
    gemma3_with_scaled_full_layers: "gemma3-linear", "";
    gemma3_with_the_default_pattern: "gemma3-sixth", "";
    gemma3_beside_a_vision_tower: "gemma3-nested", "";
    gemma3n: "gemma3n", "";
    gemma3n_with_default_layers_and_sparsity: "gemma3n-twelve", "";
    gemma3n_beside_towers: "gemma3n-nested", "";
    gemma4: "gemma4", "";
    gemma4_with_experts: "gemma4-moe", "";
    gemma4_with_default_layers: "gemma4-sixth", "";
    gemma4_beside_towers: "gemma4-nested", "";
    gguf_gemma: "gguf-gemma", "model.gguf";
    gguf_gemma2: "gguf-gemma2", "model.gguf";
    gguf_gemma3: "gguf-gemma3", "model.gguf";
    gguf_gemma3n: "gguf-gemma3n", "model.gguf";
    gguf_gemma4: "gguf-gemma4", "model.gguf";
    gguf_gemma4_with_experts: "gguf-gemma4-moe", "model.gguf";
    mlx_gemma3_4_bits: "mlx-gemma3-4bit", "";
    mlx_gemma2_8_bits: "mlx-gemma2-8bit", "";
    mlx_gemma3n_4_bits: "mlx-gemma3n-4bit", "";
    mlx_gemma4_4_bits: "mlx-gemma4-4bit", "";
    mlx_gemma4_with_experts_4_bits: "mlx-gemma4-moe-4bit", "";
}

/// The spelling of settings that transformers 4 wrote, with the keys missing that published files lack.
#[test]
fn legacy_configs_read_alike() {
    for variant in [
        "gemma",
        "gemma2",
        "gemma2-uncapped",
        "gemma3",
        "gemma3-linear",
        "gemma3-sixth",
        "gemma3-nested",
        "gemma3n",
        "gemma3n-twelve",
        "gemma4",
        "gemma4-moe",
        "gemma4-sixth",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let from = folder("gemma", variant);
        for (name, to) in [
            ("config.legacy.json", "config.json"),
            ("model.safetensors", "model.safetensors"),
        ] {
            std::fs::copy(from.join(name), dir.path().join(to)).unwrap();
        }
        let off = worst_distance(&golden(&from), &engine(dir.path(), 0, DType::F32));
        assert!(off < 1e-4, "{variant}: {off}");
    }
}

/// Half precision through MLX's own kernels stays near the reference in f32.
#[test]
fn half_types_stay_near() {
    for (dtype, limit) in [(DType::F16, 1e-2), (DType::BF16, 4e-2)] {
        for variant in [
            "gemma",
            "gemma2",
            "gemma3",
            "mlx-gemma3-4bit",
            "gemma3n",
            "gemma4",
            "gemma4-moe",
            "mlx-gemma3n-4bit",
            "mlx-gemma4-4bit",
        ] {
            let from = folder("gemma", variant);
            let off = worst_distance(&golden(&from), &engine(&from, 0, dtype));
            println!("{variant} in {}: {off:.1e}", dtype.name());
            assert!(off < limit, "{variant} in {}: {off}", dtype.name());
        }
    }
}

/// An encoder of the same model type is refused by name, not run as a decoder.
#[test]
fn an_encoder_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let from = folder("gemma", "gemma3");
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let config = config.replace("Gemma3ForCausalLM", "Gemma3TextModel");
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    std::fs::copy(
        from.join("model.safetensors"),
        dir.path().join("model.safetensors"),
    )
    .unwrap();
    let error = open(dir.path(), 0, DType::F32).err().unwrap();
    assert!(
        error.contains("Gemma3TextModel") && error.contains("not supported"),
        "{error}"
    );
}

/// An engine that runs several requests in one step, and cuts prompts into short chunks.
fn batching(variant: &str) -> EngineHandle {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR").expect("run with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    let loader = Loader::default();
    let opened = open_model(&folder("gemma", variant), &catalogue, &loader, None).unwrap();
    let backend = BackendChoice::Named("cpu".to_owned());
    let backend = loader.select_backend(&catalogue, &backend).unwrap();
    let options = LoadOptions {
        dtype: Some(DType::F32),
        threads: 1,
        limits: BatchLimits {
            parallel: 4,
            budget: Budget {
                rows: 11,
                prefill_rows_beside_decode: 5,
            },
        },
        ..LoadOptions::default()
    };
    start_engine(opened, backend, options, |_, _| {}).unwrap().0
}

fn tokens(stream: GenerateStream) -> Vec<u32> {
    let token = |event| match event {
        Event::Token { id, .. } => Some(id),
        Event::Failed(error) => panic!("{error}"),
        _ => None,
    };
    stream.filter_map(token).collect()
}

/// Layers that read another's cache do so row by row: prompts in chunks beside answers that go on,
/// and prefixes that were found, give the reference's tokens.
#[test]
fn shared_caches_keep_requests_apart() {
    for variant in ["gemma3n", "gemma4", "gemma4-moe", "mlx-gemma4-4bit"] {
        let engine = batching(variant);
        let golden = golden(&folder("gemma", variant));
        let prompts = golden["prompts"].as_array().unwrap();
        for round in 0..2 {
            let wanted: Vec<(Vec<u32>, GenerateStream)> = [0, 1, 1, 0, 1]
                .iter()
                .map(|&n| {
                    let request = GenerateRequest {
                        prompt: ids(&prompts[n]["ids"]),
                        sampling: SamplingParams {
                            temperature: 0.0,
                            ..SamplingParams::default()
                        },
                        max_new_tokens: Some(12),
                        ..GenerateRequest::default()
                    };
                    let stream = engine.generate(request, CancelToken::default());
                    (ids(&prompts[n]["greedy"]), stream.unwrap())
                })
                .collect();
            for (want, stream) in wanted {
                let got = tokens(stream);
                assert_eq!(got, want[..got.len()], "{variant}, round {round}");
                // The reference goes on behind the end of the text.
                assert!(
                    got.len() == 12 || want[got.len()] == 2,
                    "{variant}: {got:?}"
                );
            }
        }
    }
}
