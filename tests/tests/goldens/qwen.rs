//! Tiny random checkpoints of the qwen line, through the whole path (reader, family plugin, cpu
//! plugin, engine), against logits and greedy tokens of the reference implementation.
//!
//! How the checkpoints and numbers were made is in `tests/golden/tools/README.md`. Needs the
//! plugins that `cargo xtask test` prepares.

use mlxcel_tests::golden::cases::refusals;
use mlxcel_tests::goldens;
use serde_json::json;

goldens! {
    "qwen", f16 5e-3, bf16 4e-2;
    qwen2: "qwen2".halves(1.0);
    qwen2_tied: "qwen2-tied";
    qwen2_window: "qwen2-window";
    qwen2_layer_types: "qwen2-types";
    qwen2_yarn: "qwen2-yarn";
    qwen2_moe: "qwen2-moe".halves(1.0);
    qwen2_moe_with_dense_layers_and_windows: "qwen2-moe-mixed";
    qwen3: "qwen3".halves(1.0);
    qwen3_yarn_beyond_its_original_context: "qwen3-yarn";
    qwen3_with_biases_and_tied: "qwen3-bias-tied";
    qwen3_window: "qwen3-window";
    qwen3_moe: "qwen3-moe".halves(1.0);
    qwen3_moe_with_fused_experts: "qwen3-moe-fused";
    qwen3_moe_with_dense_layers_and_a_window: "qwen3-moe-mixed";
    gguf_qwen2: "gguf-qwen2";
    gguf_qwen2_yarn: "gguf-qwen2-yarn";
    gguf_qwen2_moe: "gguf-qwen2moe";
    gguf_qwen3: "gguf-qwen3";
    gguf_qwen3_moe: "gguf-qwen3moe";
    mlx_qwen2_4_bits: "mlx-qwen2-4bit".halves(1.0);
    mlx_qwen2_moe_4_bits: "mlx-qwen2-moe-4bit";
    mlx_qwen3_8_bits: "mlx-qwen3-8bit";
    mlx_qwen3_moe_4_bits: "mlx-qwen3-moe-4bit".halves(1.0);
    mlx_qwen3_moe_mxfp4: "mlx-qwen3-moe-mxfp4";
    qwen3_in_8_bit_floats: "qwen3-fp8";
    qwen3_moe_in_8_bit_floats: "qwen3-moe-fp8";
    // Linear attention: the prompts end behind the second page, so that prefill takes more than one step.
    qwen3_next: "qwen3-next".halves(2.0);
    qwen3_next_with_layers_of_its_own: "qwen3-next-mixed";
    qwen3_5: "qwen3-5".halves(2.0);
    qwen3_5_beside_a_vision_tower: "qwen3-5-nested";
    qwen3_5_moe: "qwen3-5-moe";
    gguf_qwen3_next: "gguf-qwen3next";
    gguf_qwen3_5: "gguf-qwen35";
    gguf_qwen3_5_moe: "gguf-qwen35moe";
    mlx_qwen3_next_4_bits: "mlx-qwen3-next-4bit";
    mlx_qwen3_5_4_bits: "mlx-qwen3-5-4bit";
    mlx_qwen3_5_moe_4_bits: "mlx-qwen3-5-moe-4bit".halves(2.0);
    qwen3_next_in_8_bit_floats: "qwen3-next-fp8";
    qwen3_5_in_8_bit_floats: "qwen3-5-fp8";
    qwen3_5_moe_in_8_bit_floats: "qwen3-5-moe-fp8";
}

/// A config that contradicts the file is an error that names the key or the tensor.
#[test]
fn configs_that_contradict_the_weights_are_refused() {
    let cases = [
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
        ("qwen3", json!({"head_dim": 16}), "self_attn.q_"),
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
    ];
    refusals("qwen", &cases);
}
