//! Tiny random checkpoints of the gemma line, through the whole path (reader, family plugin, cpu
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
use mlxcel_tests::golden::{Case, check, engine, folder, golden, open, worst_distance};

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
    gguf_gemma: "gguf-gemma", "model.gguf";
    gguf_gemma2: "gguf-gemma2", "model.gguf";
    gguf_gemma3: "gguf-gemma3", "model.gguf";
    mlx_gemma3_4_bits: "mlx-gemma3-4bit", "";
    mlx_gemma2_8_bits: "mlx-gemma2-8bit", "";
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
    for (dtype, limit) in [(DType::F16, 5e-3), (DType::BF16, 4e-2)] {
        for variant in ["gemma", "gemma2", "gemma3", "mlx-gemma3-4bit"] {
            let from = folder("gemma", variant);
            let off = worst_distance(&golden(&from), &engine(&from, 0, dtype));
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
