//! The rules of every family over tiny random models on the reference backend: a step with caches
//! equals one without, a batch each sequence alone, a chunked prompt the whole one.

use mlxcel_family_qwen as _;
use mlxcel_sdk::testkit::FamilyUnderTest;
use serde_json::{Value, json};

fn config(changes: &Value) -> Value {
    let mut config = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 128,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
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
    qwen2: {"model_type": "qwen2"};
    qwen2_tied_with_a_window: {"model_type": "qwen2", "tie_word_embeddings": true,
        "use_sliding_window": true, "sliding_window": 5, "max_window_layers": 1};
    qwen2_moe: {"model_type": "qwen2_moe"};
    qwen2_moe_with_a_dense_layer: {"model_type": "qwen2_moe", "norm_topk_prob": true, "decoder_sparse_step": 2};
    qwen3: {"model_type": "qwen3"};
    qwen3_with_biases: {"model_type": "qwen3", "attention_bias": true};
    qwen3_moe: {"model_type": "qwen3_moe", "norm_topk_prob": true};
    qwen3_moe_with_a_window: {"model_type": "qwen3_moe", "use_sliding_window": true, "sliding_window": 5,
        "mlp_only_layers": [0]};
}

#[test]
fn shapes_of_a_large_configuration() {
    let config = config(&json!({
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    }));
    let family = FamilyUnderTest::this_plugin(config)
        .and_then(FamilyUnderTest::shaped)
        .unwrap();
    family.check_shapes().unwrap();
}
