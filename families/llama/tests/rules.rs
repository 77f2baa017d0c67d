//! The llama family on the reference backend: the rules of every family over tiny random models,
//! recorded results of other implementations, and the shapes of a large configuration.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure in a test is a failed test"
)]

use std::path::Path;

use mlxcel_family_llama as _;
use mlxcel_sdk::abi::ops_args::QuantSpec;
use mlxcel_sdk::testkit::{FamilyUnderTest, Golden, ReferenceOptions, reference_backend};
use serde_json::{Value, json};

fn config(changes: Value) -> Value {
    let mut config = json!({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": false,
    });
    if let (Some(config), Some(changes)) = (config.as_object_mut(), changes.as_object()) {
        config.extend(changes.clone());
    }
    config
}

macro_rules! rules {
    ($($test:ident: $changes:tt;)*) => {
        mod rules {
            use super::*;

            $(#[test]
            fn $test() {
                let family = FamilyUnderTest::this_plugin(config(json!($changes)));
                family.and_then(|family| family.filled(1)).unwrap().verdict().unwrap();
            })*
        }
    };
}

rules! {
    llama: {};
    llama_tied: {"tie_word_embeddings": true};
    llama_with_biases: {"attention_bias": true, "mlp_bias": true};
    llama_with_wide_heads: {"head_dim": 16};
    llama_with_scaled_rope: {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }};
    llama_with_dynamic_rope: {
        "max_position_embeddings": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    };
    mistral_with_a_window: {"model_type": "mistral", "sliding_window": 5};
    mixtral: {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2};
    ministral3: {"model_type": "ministral3", "head_dim": 8, "rope_theta": null, "sliding_window": 7, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 4,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
    }};
    llama4: {
        "model_type": "llama4_text", "head_dim": 8, "num_hidden_layers": 4, "intermediate_size_mlp": 32,
        "num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 3, "floor_scale": 4,
    };
    nemotron_nas: {"model_type": "nemotron-nas", "num_hidden_layers": 4, "block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"replace_with_linear": true}},
        {"attention": {"replace_with_linear": true}, "ffn": {"no_op": true}},
        {"attention": {"no_op": true}, "ffn": {"ffn_mult": 2.5}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"intermediate_size": 24}},
    ]};
    arcee: {"model_type": "arcee", "hidden_act": "relu2"};
    iquestcoder: {"model_type": "iquestcoder", "head_dim": 16};
    iquestloopcoder: {"model_type": "iquestloopcoder", "loop_window_size": 3};
    smollm3: {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 2};
}

#[test]
fn quantised_experts_keep_the_rules() {
    let mixtral =
        json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2});
    let family = FamilyUnderTest::this_plugin(config(mixtral)).and_then(|family| family.filled(2));
    let spec = QuantSpec {
        bits: 4,
        group_size: 32,
        ..QuantSpec::default()
    };
    let quantized = family
        .and_then(|family| family.quantized(spec, |path| !path.ends_with("gate")))
        .unwrap();
    assert!(
        quantized
            .weights()
            .names()
            .any(|name| name.ends_with("experts.0.w1.scales"))
    );
    quantized.verdict().unwrap();
}

macro_rules! goldens {
    ($($test:ident: $folder:literal;)*) => {
        mod golden {
            use super::*;

            $(#[test]
            fn $test() {
                let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama").join($folder);
                let golden = Golden::read(&folder).unwrap();
                let family = FamilyUnderTest::of_golden(&golden).unwrap();
                let reference = reference_backend(ReferenceOptions::default());
                family.check_golden(&golden, &reference.backend(), 1e-4).unwrap();
            })*
        }
    };
}

goldens! {
    grouped_query: "llama-gqa";
    tied: "llama-tied";
    biases: "llama-bias";
    head_dim: "llama-head-dim";
    bf16: "llama-bf16";
    mistral_window: "mistral-window";
    mixtral: "mixtral";
    smollm3: "smollm3";
    ministral3: "ministral3";
    mistral3: "mistral3";
    llama4: "llama4";
    llama4_text: "llama4-text";
    arcee: "arcee";
    iquestloopcoder: "iquestloopcoder";
    nemotron_nas: "nemotron-nas";
    rope_linear: "rope-linear";
    rope_llama3: "rope-llama3";
    rope_yarn: "rope-yarn";
    mlx_3_bits: "mlx-3bit-g32";
    mlx_5_bits: "mlx-5bit-g32";
    mlx_6_bits: "mlx-6bit-g64";
    mlx_mixed_bits: "mlx-mixed";
    mlx_mixtral: "mlx-mixtral-4bit";
    mlx_mxfp4: "mlx-mxfp4";
}

#[test]
fn shapes_of_a_large_configuration() {
    let config = config(json!({
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
    }));
    let family = FamilyUnderTest::this_plugin(config)
        .and_then(FamilyUnderTest::shaped)
        .unwrap();
    family.check_shapes().unwrap();
}

/// transformers ties only a head that equals the embedding; one that differs is the checkpoint's word
/// against the configuration's.
#[test]
fn a_head_of_its_own_is_used_although_the_configuration_ties_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama/llama-gqa");
    let mut golden = Golden::read(&folder).unwrap();
    assert!(golden.weights.names().any(|name| name == "lm_head.weight"));
    golden.config["tie_word_embeddings"] = json!(true);
    let family = FamilyUnderTest::of_golden(&golden).unwrap();
    let reference = reference_backend(ReferenceOptions::default());
    family
        .check_golden(&golden, &reference.backend(), 1e-4)
        .unwrap();
}
