//! The rules of every family over tiny random models on the reference backend: a step with caches
//! equals one without, a batch each sequence alone, a chunked prompt the whole one.

use mlxcel_family_deepseek as _;
use mlxcel_sdk::DType;
use mlxcel_sdk::testkit::{FamilyUnderTest, MapWeights};
use serde_json::{Value, json};

fn config(changes: &Value) -> Value {
    let mut config = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 128,
        "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "n_group": 2, "topk_group": 1,
        "index_n_heads": 4, "index_head_dim": 12, "index_topk": 6,
    });
    if let (Some(config), Some(changes)) = (config.as_object_mut(), changes.as_object()) {
        config.extend(changes.clone());
    }
    config
}

macro_rules! rules {
    ($($test:ident: $changes:tt;)*) => {$(
        #[test]
        fn $test() {
            let family = FamilyUnderTest::this_plugin(config(&json!($changes)));
            family.and_then(|family| family.filled(1)).unwrap().verdict().unwrap();
        }
    )*};
}

rules! {
    deepseek: {"model_type": "deepseek", "num_key_value_heads": 2};
    deepseek_with_biases_and_scores_that_sum_to_one: {"model_type": "deepseek", "attention_bias": true,
        "norm_topk_prob": true, "n_shared_experts": null};
    deepseek_v2: {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"};
    deepseek_v2_without_query_compression: {"model_type": "deepseek_v2", "q_lora_rank": null,
        "tie_word_embeddings": true};
    deepseek_v3: {"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": 4,
        "original_max_position_embeddings": 16, "mscale": 1.2, "mscale_all_dim": 0.8}};
    deepseek_v3_without_experts: {"model_type": "deepseek_v3", "n_routed_experts": null, "attention_bias": true};
    deepseek_v32: {"model_type": "deepseek_v32"};
}

/// Every kind of layer of the fourth generation, and experts by token id in the first.
#[test]
fn deepseek_v4() {
    let config = json!({
        "model_type": "deepseek_v4", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "vocab_size": 64, "max_position_embeddings": 128, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 24,
        "o_groups": 2, "o_lora_rank": 12, "sliding_window": 5, "index_n_heads": 4, "index_head_dim": 12, "index_topk": 2,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
            "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "hc_mult": 2, "hc_sinkhorn_iters": 3, "num_hash_layers": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "swiglu_limit": 1.5, "rope_theta": 10000.0, "compress_rope_theta": 40000.0,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16},
    });
    let mut weights = MapWeights::new();
    let experts: Vec<u8> = (0..64i64)
        .flat_map(|token| [token % 4, (token / 4 + token + 1) % 4])
        .flat_map(i64::to_le_bytes)
        .collect();
    let table = "layers.0.ffn.gate.tid2eid";
    weights
        .insert(table, DType::I64, &[64, 2], experts)
        .unwrap();
    let family = FamilyUnderTest::this_plugin(config).unwrap();
    let family = family.with_weights(weights).filled(1).unwrap();
    family.verdict().unwrap();
}

#[test]
fn shapes_of_a_large_configuration() {
    let config = config(&json!({
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 4,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129_280,
        "max_position_embeddings": 163_840, "moe_intermediate_size": 2048, "n_routed_experts": 16,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 4, "topk_group": 2,
    }));
    let family = FamilyUnderTest::this_plugin(config)
        .and_then(FamilyUnderTest::shaped)
        .unwrap();
    family.check_shapes().unwrap();
}
