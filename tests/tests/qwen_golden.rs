//! Tiny random checkpoints of the qwen line, through the whole path (reader, family plugin, cpu
//! plugin, engine), against logits and greedy tokens of the reference implementation.
//!
//! How the checkpoints and numbers were made is in `tests/golden/tools/README.md`. Needs the
//! plugins that `cargo xtask test` prepares.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a helper of tests that fails is a failed test"
)]

use std::path::Path;

use mlxcel::plugin::DType;
use mlxcel_tests::golden::{Case, engine, folder, golden, open, worst_distance};
use serde_json::{Value, json};

fn check(variant: &str, file: &str) {
    mlxcel_tests::golden::check(&Case {
        folder: folder("qwen", variant),
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
    qwen2: "qwen2";
    qwen2_tied: "qwen2-tied";
    qwen2_window: "qwen2-window";
    qwen2_layer_types: "qwen2-types";
    qwen2_yarn: "qwen2-yarn";
    qwen2_moe: "qwen2-moe";
    qwen2_moe_with_dense_layers_and_windows: "qwen2-moe-mixed";
    qwen3: "qwen3";
    qwen3_with_biases_and_tied: "qwen3-bias-tied";
    qwen3_window: "qwen3-window";
    qwen3_moe: "qwen3-moe";
    qwen3_moe_with_fused_experts: "qwen3-moe-fused";
    qwen3_moe_with_dense_layers_and_a_window: "qwen3-moe-mixed";
    gguf_qwen2: "gguf-qwen2", "model.gguf";
    gguf_qwen2_yarn: "gguf-qwen2-yarn", "model.gguf";
    gguf_qwen2_moe: "gguf-qwen2moe", "model.gguf";
    gguf_qwen3: "gguf-qwen3", "model.gguf";
    gguf_qwen3_moe: "gguf-qwen3moe", "model.gguf";
    mlx_qwen2_4_bits: "mlx-qwen2-4bit";
    mlx_qwen2_moe_4_bits: "mlx-qwen2-moe-4bit";
    mlx_qwen3_8_bits: "mlx-qwen3-8bit";
    mlx_qwen3_moe_4_bits: "mlx-qwen3-moe-4bit";
}

/// The spelling of settings that transformers 4 and the publishers wrote: `rope_theta` and
/// `rope_scaling`, `num_experts`, windows without `layer_types`.
#[test]
fn legacy_configs_read_alike() {
    for variant in [
        "qwen2",
        "qwen2-tied",
        "qwen2-window",
        "qwen2-yarn",
        "qwen2-moe",
        "qwen2-moe-mixed",
        "qwen3",
        "qwen3-bias-tied",
        "qwen3-window",
        "qwen3-moe",
        "qwen3-moe-fused",
        "qwen3-moe-mixed",
    ] {
        let (dir, from) = (tempfile::tempdir().unwrap(), folder("qwen", variant));
        std::fs::copy(
            from.join("config.legacy.json"),
            dir.path().join("config.json"),
        )
        .unwrap();
        std::fs::copy(
            from.join("model.safetensors"),
            dir.path().join("model.safetensors"),
        )
        .unwrap();
        let off = worst_distance(&golden(&from), &engine(dir.path(), 0, DType::F32));
        assert!(off < 1e-4, "{variant}: {off}");
    }
}

/// Half precision through MLX's own kernels stays near the reference in f32.
#[test]
fn half_types_stay_near() {
    for (dtype, limit) in [(DType::F16, 5e-3), (DType::BF16, 4e-2)] {
        for variant in [
            "qwen2",
            "qwen2-moe",
            "qwen3",
            "qwen3-moe",
            "mlx-qwen2-4bit",
            "mlx-qwen3-moe-4bit",
        ] {
            let from = folder("qwen", variant);
            let off = worst_distance(&golden(&from), &engine(&from, 0, dtype));
            assert!(off < limit, "{variant} in {}: {off}", dtype.name());
        }
    }
}

fn refusal(variant: &str, changes: &Value) -> String {
    let (dir, from) = (tempfile::tempdir().unwrap(), folder("qwen", variant));
    let read =
        |path: &Path| serde_json::from_slice::<Value>(&std::fs::read(path).unwrap()).unwrap();
    let mut config = read(&from.join("config.json"));
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(
        from.join("model.safetensors"),
        dir.path().join("model.safetensors"),
    )
    .unwrap();
    open(dir.path(), 0, DType::F32)
        .map(|_| ())
        .expect_err(&changes.to_string())
}

/// A config that contradicts the file is an error that names the key or the tensor.
#[test]
fn configs_that_contradict_the_weights_are_refused() {
    for (variant, changes, part) in [
        (
            "qwen3-moe",
            json!({"num_experts_per_tok": 5}),
            "num_experts_per_tok",
        ),
        (
            "qwen3-moe",
            json!({"num_local_experts": 3}),
            "mlp.gate.weight",
        ),
        (
            "qwen3-moe",
            json!({"mlp_only_layers": [0]}),
            "layers.0.mlp.gate_proj.weight",
        ),
        (
            "qwen2-moe",
            json!({"shared_expert_intermediate_size": 8}),
            "shared_expert.gate_proj.weight",
        ),
        ("qwen2-moe", json!({"qkv_bias": false}), "q_proj.bias"),
        ("qwen3", json!({"head_dim": 16}), "q_proj.weight"),
        ("qwen3", json!({"attention_bias": true}), "q_proj.bias"),
        (
            "qwen2",
            json!({"tie_word_embeddings": "no"}),
            "tie_word_embeddings",
        ),
        (
            "qwen2",
            json!({"architectures": ["Qwen2ForRewardModel"]}),
            "Qwen2ForRewardModel",
        ),
    ] {
        let text = refusal(variant, &changes);
        assert!(text.contains(part), "{variant}, {changes}: {text}");
    }
}
