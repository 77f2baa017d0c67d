//! The rules of every family, over tiny random models on the reference backend.

use mlxcel_family_gemma as _;
use mlxcel_sdk::testkit::FamilyUnderTest;
use serde_json::{Value, json};

fn config(changes: Value) -> Value {
    let mut config = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 128,
        "query_pre_attn_scalar": 20,
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
            let family = FamilyUnderTest::this_plugin(config(json!($changes)));
            family.and_then(|family| family.filled(1)).unwrap().verdict().unwrap();
        }
    )*};
}

rules! {
    gemma: {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16};
    gemma_with_its_own_head: {"model_type": "gemma", "tie_word_embeddings": false};
    gemma2: {"model_type": "gemma2", "sliding_window": 5, "attn_logit_softcapping": 3.0};
    gemma3: {"model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 2};
    gemma3_with_biases_and_scaling: {
        "model_type": "gemma3_text", "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"],
        "attention_bias": true, "final_logit_softcapping": 5.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    };
    gemma3n: {
        "model_type": "gemma3n_text", "sliding_window": 5, "num_hidden_layers": 5, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 60, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "altup_num_inputs": 3,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
    };
    gemma4: {
        "model_type": "gemma4_text", "sliding_window": 5, "num_hidden_layers": 5, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 16,
        "use_double_wide_mlp": true, "final_logit_softcapping": 5.0,
    };
    gemma4_with_experts: {
        "model_type": "gemma4_text", "sliding_window": 5, "num_hidden_layers": 3, "global_head_dim": 16,
        "attention_k_eq_v": true, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "enable_moe_block": true, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    };
}
