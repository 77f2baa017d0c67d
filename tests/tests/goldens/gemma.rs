//! Tiny random checkpoints of the gemma line, through the whole path (reader, family plugin, cpu
//! plugin, engine), against logits and greedy tokens of the reference implementation.
//!
//! How the checkpoints and numbers were made is in `tests/golden/tools/README.md`. Needs the
//! plugins that `cargo xtask test` prepares.

use mlxcel::plugin::DType;
use mlxcel_tests::golden::{folder, open};
use mlxcel_tests::goldens;

// The long prompts, of 24 tokens, cross the windows of 8.
goldens! {
    "gemma", f16 1e-2, bf16 4e-2;
    gemma: "gemma".halves(1.0);
    gemma2: "gemma2".halves(1.0);
    gemma2_with_null_for_caps: "gemma2-uncapped";
    gemma3: "gemma3".halves(1.0);
    gemma3_with_scaled_full_layers: "gemma3-linear";
    gemma3_with_the_default_pattern: "gemma3-sixth";
    gemma3_beside_a_vision_tower: "gemma3-nested";
    gemma3n: "gemma3n".halves(1.0);
    gemma3n_with_default_layers_and_sparsity: "gemma3n-twelve";
    gemma3n_beside_towers: "gemma3n-nested";
    gemma4: "gemma4".halves(1.0);
    gemma4_with_experts: "gemma4-moe".halves(1.0);
    gemma4_with_default_layers: "gemma4-sixth";
    gemma4_beside_towers: "gemma4-nested";
    gguf_gemma: "gguf-gemma";
    gguf_gemma2: "gguf-gemma2";
    gguf_gemma3: "gguf-gemma3";
    gguf_gemma3n: "gguf-gemma3n";
    gguf_gemma4: "gguf-gemma4";
    gguf_gemma4_with_experts: "gguf-gemma4-moe";
    gemma_4_bits: "gemma-4bit".halves(1.0);
    mlx_gemma3_mxfp4: "mlx-gemma3-mxfp4";
    mlx_gemma3_4_bits: "mlx-gemma3-4bit".halves(1.0);
    mlx_gemma2_8_bits: "mlx-gemma2-8bit";
    mlx_gemma3n_4_bits: "mlx-gemma3n-4bit".halves(1.0);
    mlx_gemma4_4_bits: "mlx-gemma4-4bit".halves(1.0);
    mlx_gemma4_with_experts_4_bits: "mlx-gemma4-moe-4bit";
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
