//! Tiny random checkpoints of the qwen lines with linear attention, through the whole path (reader,
//! family plugin, cpu plugin, engine), against logits and greedy tokens of the reference
//! implementation; and batches over recurrent states, which change no answer.
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

const ALL: [&str; 8] = [
    "qwen3-next",
    "qwen3-next-mixed",
    "qwen3-5",
    "qwen3-5-nested",
    "qwen3-5-moe",
    "mlx-qwen3-next-4bit",
    "mlx-qwen3-5-4bit",
    "mlx-qwen3-5-moe-4bit",
];

/// The prompts end behind the second page, so that prefill takes more than one step.
#[test]
fn checkpoints_agree_with_the_reference() {
    for variant in ALL {
        mlxcel_tests::golden::check(&Case {
            folder: folder("qwen", variant),
            file: "",
            prompts: &["short", "long"],
            ctx_size: 0,
            limit: 1e-4,
        });
    }
}

/// The values of three of them, as llama.cpp's converter lays them out.
#[test]
fn gguf_files_agree_with_the_reference() {
    for variant in ["gguf-qwen3next", "gguf-qwen35", "gguf-qwen35moe"] {
        mlxcel_tests::golden::check(&Case {
            folder: folder("qwen", variant),
            file: "model.gguf",
            prompts: &["short", "long"],
            ctx_size: 0,
            limit: 1e-4,
        });
    }
}

/// Half precision through MLX's own kernels stays near the reference in f32.
#[test]
fn half_types_stay_near() {
    for (dtype, limit) in [(DType::F16, 1e-2), (DType::BF16, 6e-2)] {
        for variant in ["qwen3-next", "qwen3-5", "mlx-qwen3-5-moe-4bit"] {
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
            "qwen3-next",
            json!({"linear_key_head_dim": 4}),
            "linear_attn.",
        ),
        (
            "qwen3-next",
            json!({"linear_conv_kernel_dim": 3}),
            "conv1d.weight",
        ),
        (
            "qwen3-next",
            json!({"head_dim": 8}),
            "self_attn.q_proj.weight",
        ),
        (
            "qwen3-next",
            json!({"layer_types": null, "full_attention_interval": 2}),
            "layers.1.self_attn",
        ),
        (
            "qwen3-next",
            json!({"linear_num_value_heads": 3}),
            "linear_num_value_heads",
        ),
        (
            "qwen3-5",
            json!({"intermediate_size": 16}),
            "mlp.gate_proj.weight",
        ),
        (
            "qwen3-5",
            json!({"layer_types": ["mamba", "full_attention", "full_attention", "full_attention"]}),
            "mamba",
        ),
    ] {
        let text = refusal(variant, &changes);
        assert!(text.contains(part), "{variant}, {changes}: {text}");
    }
}
