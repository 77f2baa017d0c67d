//! Tiny random checkpoints of the deepseek line, through the whole path (reader, family plugin, cpu
//! plugin, engine), against logits and greedy tokens of the reference implementation.
//!
//! How the checkpoints and numbers were made is in `tests/golden/deepseek/README.md`. Needs the
//! plugins that `cargo xtask test` prepares.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failure in a test is a failed test, `--nocapture` shows the distances"
)]

use std::path::Path;

use mlxcel::engine::batch::BatchLimits;
use mlxcel::engine::schedule::Budget;
use mlxcel::engine::{
    CancelToken, EngineHandle, Event, GenerateRequest, LoadOptions, open_model, start_engine,
};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel::sampling::SamplingParams;
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use mlxcel_tests::golden::{Case, engine, folder, golden, ids, open, worst_distance};
use serde_json::{Value, json};

fn check(variant: &str, file: &str) {
    mlxcel_tests::golden::check(&Case {
        folder: folder("deepseek", variant),
        file,
        prompts: &["short", "long"],
        ctx_size: 0,
        limit: 1e-4,
    });
}

macro_rules! variants {
    ($($test:ident: $variant:literal $(, $file:literal)?;)*) => {$(
        #[test]
        fn $test() {
            check($variant, concat!("" $(, $file)?));
        }
    )*};
}

variants! {
    deepseek: "deepseek";
    v2: "v2";
    v2_lite: "v2-lite";
    v2_with_biases_and_unequal_mscales: "v2-yarn-bias";
    v3: "v3";
    v3_plain: "v3-plain";
    v3_with_fused_experts: "v3-fused";
    v3_in_8_bit_floats: "v3-fp8";
    v32: "v32";
    v32_yarn: "v32-yarn";
    v4: "v4";
    v4_beyond_its_original_context: "v4-long";
    gguf_deepseek: "gguf-deepseek", "model.gguf";
    gguf_deepseek2_with_a_whole_kv_b: "gguf-deepseek2-lite", "model.gguf";
    gguf_deepseek2: "gguf-deepseek2", "model.gguf";
    mlx_deepseek_4_bits: "mlx-deepseek-4bit";
    mlx_v2_4_bits: "mlx-v2-4bit";
    mlx_v3_4_bits: "mlx-v3-4bit";
    mlx_v3_not_quantised: "mlx-v3-bf16";
    mlx_v32_4_bits: "mlx-v32-4bit";
}

/// A variant's checkpoint with another configuration.
fn with_config(variant: &str, config: &str) -> tempfile::TempDir {
    let (dir, from) = (tempfile::tempdir().unwrap(), folder("deepseek", variant));
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    std::fs::copy(
        from.join("model.safetensors"),
        dir.path().join("model.safetensors"),
    )
    .unwrap();
    dir
}

/// The spelling of settings that the publisher wrote: `rope_theta` and `rope_scaling` with `type`,
/// `scoring_func`, `topk_method`, `num_nextn_predict_layers`.
#[test]
fn legacy_configs_read_alike() {
    for variant in [
        "v2",
        "v2-lite",
        "v2-yarn-bias",
        "v3",
        "v3-plain",
        "v3-fused",
        "v32",
        "v32-yarn",
        "v4",
        "v4-long",
    ] {
        let from = folder("deepseek", variant);
        let legacy = std::fs::read_to_string(from.join("config.legacy.json")).unwrap();
        let dir = with_config(variant, &legacy);
        let off = worst_distance(&golden(&from), &engine(dir.path(), 0, DType::F32));
        assert!(off < 1e-4, "{variant}: {off}");
    }
}

/// Half precision through MLX's own kernels stays near the reference in f32.
#[test]
fn half_types_stay_near() {
    for (dtype, limit) in [(DType::F16, 1e-2), (DType::BF16, 6e-2)] {
        for variant in ["deepseek", "v2", "v3", "mlx-v2-4bit", "mlx-v3-4bit"] {
            let from = folder("deepseek", variant);
            let off = worst_distance(&golden(&from), &engine(&from, 0, dtype));
            println!("{variant} in {}: {off:.1e}", dtype.name());
            assert!(off < limit, "{variant} in {}: {off}", dtype.name());
        }
    }
}

/// An engine that runs four requests in one step, and cuts prompts into short chunks.
fn batching(variant: &str) -> EngineHandle {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR").expect("run with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    let loader = Loader::default();
    let opened = open_model(&folder("deepseek", variant), &catalogue, &loader, None).unwrap();
    let backend = BackendChoice::Named("cpu".to_owned());
    let backend = loader.select_backend(&catalogue, &backend).unwrap();
    let options = LoadOptions {
        dtype: Some(DType::F32),
        threads: 1,
        limits: BatchLimits {
            parallel: 4,
            budget: Budget {
                rows: 13,
                prefill_rows_beside_decode: 6,
            },
        },
        ..LoadOptions::default()
    };
    start_engine(opened, backend, options, |_, _| {}).unwrap().0
}

/// Prompts that run together, in chunks beside each other's decoding, get the tokens that the
/// reference gave each alone; in the second round from prefixes that were found.
#[test]
fn a_batch_answers_as_each_prompt_alone() {
    for variant in [
        "deepseek",
        "v2",
        "v3",
        "mlx-v3-4bit",
        "v32",
        "v32-yarn",
        "v4",
    ] {
        let golden = golden(&folder("deepseek", variant));
        let engine = batching(variant);
        let prompts = golden["prompts"].as_array().unwrap();
        for round in 0..2 {
            let answers: Vec<_> = [1, 0, 1, 0, 0]
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
            for (want, stream) in answers {
                let token = |event| match event {
                    Event::Token { id, .. } => Some(id),
                    Event::Failed(error) => panic!("{variant}: {error}"),
                    _ => None,
                };
                let got: Vec<u32> = stream.filter_map(token).collect();
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

fn refusal(variant: &str, changes: &Value) -> String {
    let read =
        |path: &Path| serde_json::from_slice::<Value>(&std::fs::read(path).unwrap()).unwrap();
    let mut config = read(&folder("deepseek", variant).join("config.json"));
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let dir = with_config(variant, &config.to_string());
    open(dir.path(), 0, DType::F32)
        .map(|_| ())
        .expect_err(&changes.to_string())
}

/// A config that contradicts the file is an error that names the key or the tensor.
#[test]
fn configs_that_contradict_the_weights_are_refused() {
    for (variant, changes, part) in [
        (
            "v3",
            json!({"num_experts_per_tok": 9}),
            "num_experts_per_tok",
        ),
        (
            "v3",
            json!({"n_routed_experts": 4, "n_group": 2}),
            "mlp.gate.weight",
        ),
        (
            "v3",
            json!({"n_shared_experts": 1}),
            "shared_experts.gate_proj.weight",
        ),
        ("v3", json!({"n_shared_experts": null}), "shared_experts"),
        (
            "v3",
            json!({"first_k_dense_replace": 0, "mlp_layer_types": null}),
            "layers.0.mlp.gate.weight",
        ),
        ("v3", json!({"kv_lora_rank": 8}), "kv_b_proj.weight"),
        ("v3", json!({"qk_nope_head_dim": 16}), "q_b_proj.weight"),
        ("v3", json!({"v_head_dim": 12}), "kv_b_proj.weight"),
        ("v3", json!({"q_lora_rank": null}), "q_proj.weight"),
        ("v3", json!({"attention_bias": true}), "q_a_proj.bias"),
        (
            "v3",
            json!({"num_nextn_predict_layers": 0, "num_mtp_layers": null}),
            "model.layers.2",
        ),
        ("v2", json!({"topk_method": "noaux_tc"}), "noaux_tc"),
        ("v32", json!({"index_head_dim": 16}), "indexer.wq_b.weight"),
        (
            "v4",
            json!({"mlp_layer_types": ["moe", "moe", "moe", "moe"]}),
            "layers.0.ffn.gate.bias",
        ),
        ("v4", json!({"hc_mult": 2}), "hc_attn_fn"),
        (
            "v2",
            json!({"architectures": ["DeepseekV2ForSequenceClassification"]}),
            "ForSequenceClassification",
        ),
    ] {
        let text = refusal(variant, &changes);
        assert!(text.contains(part), "{variant}, {changes}: {text}");
    }
}
