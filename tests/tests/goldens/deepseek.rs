//! Tiny random checkpoints of the deepseek line, through the whole path (reader, family plugin, cpu
//! plugin, engine), against logits and greedy tokens of the reference implementation.
//!
//! How the checkpoints and numbers were made is in `tests/golden/tools/README.md`. Needs the
//! plugins that `cargo xtask test` prepares.

use mlxcel_tests::golden::cases::refusals;
use mlxcel_tests::goldens;
use serde_json::json;

goldens! {
    "deepseek", f16 1e-2, bf16 6e-2;
    deepseek: "deepseek".halves(1.0);
    v2: "v2".halves(1.0);
    v2_lite: "v2-lite";
    v2_with_biases_and_unequal_mscales: "v2-yarn-bias";
    v3: "v3".halves(1.0);
    v3_plain: "v3-plain";
    v3_with_fused_experts: "v3-fused";
    v3_in_8_bit_floats: "v3-fp8";
    v32: "v32";
    v32_yarn: "v32-yarn";
    v4: "v4";
    v4_beyond_its_original_context: "v4-long";
    gguf_deepseek: "gguf-deepseek";
    gguf_deepseek2_with_a_whole_kv_b: "gguf-deepseek2-lite";
    gguf_deepseek2: "gguf-deepseek2";
    mlx_deepseek_4_bits: "mlx-deepseek-4bit";
    mlx_v2_4_bits: "mlx-v2-4bit".halves(1.0);
    mlx_v3_4_bits: "mlx-v3-4bit".halves(1.0);
    mlx_v3_mxfp4: "mlx-v3-mxfp4";
    mlx_v3_not_quantised: "mlx-v3-bf16";
    mlx_v32_4_bits: "mlx-v32-4bit";
    v32_in_8_bit_floats: "v32-fp8";
    v4_4_bits: "v4-4bit";
    v4_with_experts_in_mxfp4: "v4-mxfp4";
    v4_in_8_bit_floats: "v4-fp8";
    v4_with_experts_in_4_bits_as_published: "v4-fp4";
}

/// A config that contradicts the file is an error that names the key or the tensor.
#[test]
fn configs_that_contradict_the_weights_are_refused() {
    let cases = [
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
        (
            "v3",
            json!({"qk_nope_head_dim": 16, "qk_head_dim": 24}),
            "q_b_proj.weight",
        ),
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
    ];
    refusals("deepseek", &cases);
}
