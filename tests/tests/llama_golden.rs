//! Tiny random checkpoints of the llama line, through the whole path (reader, family plugin, cpu
//! plugin, engine), against logits and greedy tokens of the reference implementation.
//!
//! How the checkpoints and numbers were made is in `tests/golden/tools/README.md`. Needs the
//! plugins that `cargo xtask test` prepares.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure in a test is a failed test"
)]

use mlxcel::plugin::DType;
use mlxcel_tests::golden::{Case, engine, folder, golden, worst_distance};

fn check(variant: &str, file: &str, prompts: &[&str], ctx_size: usize) {
    mlxcel_tests::golden::check(&Case {
        folder: folder("llama", variant),
        file,
        prompts,
        ctx_size,
        // Q6_K has groups of 16, which MLX's form does not know: it is expanded to f16, which rounds.
        limit: if variant == "gguf-kquants" {
            1e-3
        } else {
            1e-4
        },
    });
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
    ministral3: "ministral3";
    ministral3_with_a_window: "ministral3-window";
    mistral3: "mistral3";
    mistral3_around_ministral3: "mistral3-ministral";
    llama4: "llama4";
    llama4_text: "llama4-text";
    nemotron_nas: "nemotron-nas";
    arcee: "arcee";
    iquestcoder: "iquestcoder";
    iquestloopcoder: "iquestloopcoder";
    mlx_ministral3: "mlx-ministral3-4bit";
    mlx_llama4: "mlx-llama4-4bit";
    mlx_nemotron_nas: "mlx-nemotron-nas-4bit";
    fp8_with_block_scales: "fp8-blocks";
    fp8_with_a_scale_a_matrix: "fp8-tensor";
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
    gguf_ministral3: "gguf-ministral3";
    gguf_llama4: "gguf-llama4";
    gguf_deci: "gguf-deci";
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
    let config = std::fs::read(folder("llama", "rope-longrope").join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
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
        "ministral3",
        "mistral3",
        "llama4",
        "llama4-text",
        "iquestcoder",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let from = folder("llama", variant);
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
        // A temperature above 1 sharpens the rounding of scores too.
        for (variant, times) in [
            ("llama-gqa", 1.0),
            ("mlx-4bit-g32", 1.0),
            ("mistral-window", 1.0),
            ("ministral3", 2.0),
            ("nemotron-nas", 1.0),
            ("iquestloopcoder", 1.0),
            ("fp8-blocks", 1.0),
        ] {
            let from = folder("llama", variant);
            let off = worst_distance(&golden(&from), &engine(&from, 0, dtype));
            let limit = limit * times;
            assert!(off < limit, "{variant} in {}: {off}", dtype.name());
        }
    }
}
