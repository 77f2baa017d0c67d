//! The hybrids: rules of families on the test kit's caches, descriptions, refusals.

use mlxcel_sdk::arch::find;
use mlxcel_sdk::testkit::FamilyUnderTest;
use mlxcel_sdk::{CacheDesc, Config, GgufSummary, ModelDesc, Probe, Result, StateDesc};
use serde_json::{Value, json};

fn base(model_type: &str) -> Value {
    json!({"model_type": model_type, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 61,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24})
}

fn with(changes: &Value) -> Value {
    let mut config = base("qwen3_next");
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn describe(arch: &str, config: &Value) -> Result<ModelDesc> {
    let implementation = find(arch).unwrap().implementation;
    implementation.describe(&Config::root(config).unwrap())
}

fn probe(arch: &str, config: &Value) -> Probe {
    let implementation = find(arch).unwrap().implementation;
    implementation.probe(&Config::root(config).unwrap())
}

fn keeps_the_rules(config: Value) {
    let family = FamilyUnderTest::this_plugin(config)
        .unwrap()
        .filled(1)
        .unwrap();
    family.verdict().unwrap();
}

#[test]
fn qwen3_next_keeps_the_rules_of_families() {
    keeps_the_rules(with(
        &json!({"mlp_only_layers": [1], "attention_bias": true}),
    ));
}

#[test]
fn qwen3_5_keeps_the_rules_of_families() {
    keeps_the_rules(base("qwen3_5_text"));
}

#[test]
fn qwen3_5_moe_keeps_the_rules_of_families() {
    let mut config = base("qwen3_5_moe_text");
    config["tie_word_embeddings"] = json!(true);
    keeps_the_rules(config);
}

#[test]
fn three_layers_of_states_come_before_one_of_keys() {
    let desc = describe("qwen3_next", &base("qwen3_next")).unwrap();
    let recurrent = CacheDesc::Recurrent {
        states: vec![
            StateDesc::f32(&[3, 2 * 16 + 24]),
            StateDesc::f32(&[4, 8, 6]),
        ],
    };
    let dense = CacheDesc::Dense {
        kv_heads: 2,
        k_dim: 16,
        v_dim: 16,
    };
    let expected = [
        recurrent.clone(),
        recurrent.clone(),
        recurrent.clone(),
        dense.clone(),
    ];
    assert_eq!(desc.layers, expected);
    let every_other = with(&json!({"full_attention_interval": 2}));
    let desc = describe("qwen3_next", &every_other).unwrap();
    assert_eq!(
        desc.layers,
        [
            recurrent.clone(),
            dense.clone(),
            recurrent.clone(),
            dense.clone()
        ]
    );
    let types =
        json!({"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]});
    assert_eq!(
        describe("qwen3_next", &with(&types)).unwrap().layers,
        [dense, recurrent]
    );
}

#[test]
fn settings_of_the_text_half_are_found_in_the_multimodal_config() {
    let nested = json!({"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": base("qwen3_5_text"), "vision_config": {}});
    assert_eq!(probe("qwen3_5", &nested).score, 100);
    let desc = describe("qwen3_5", &nested).unwrap();
    assert_eq!(
        desc.layers,
        describe("qwen3_5", &base("qwen3_5_text")).unwrap().layers
    );
    let reward = json!({"architectures": ["Qwen3_5ForSequenceClassification"]});
    let refused = probe("qwen3_5", &reward);
    assert!(
        refused.score == 0 && refused.why.contains("ForSequenceClassification"),
        "{refused:?}"
    );
    let vision = json!({"vision_config": {}});
    assert_eq!(probe("qwen3_next", &vision).score, 0);
}

#[test]
fn bad_values_are_named() {
    for (changes, parts) in [
        (
            json!({"linear_num_value_heads": 3}),
            [
                "linear_num_value_heads",
                "a multiple of linear_num_key_heads (2)",
            ],
        ),
        (
            json!({"linear_conv_kernel_dim": 1}),
            ["linear_conv_kernel_dim", "2 to 64"],
        ),
        (
            json!({"linear_key_head_dim": 0}),
            ["linear_key_head_dim", "1 to 65536"],
        ),
        (
            json!({"layer_types": ["full_attention"]}),
            ["layer_types", "4 layers"],
        ),
        (
            json!({"layer_types": ["mamba", "full_attention", "full_attention", "full_attention"]}),
            ["mamba", "known types"],
        ),
        (
            json!({"full_attention_interval": 0}),
            ["full_attention_interval", "1 to 4096"],
        ),
        (
            json!({"partial_rotary_factor": 0.19}),
            ["partial_rotary_factor", "even"],
        ),
        (
            json!({"num_key_value_heads": 3}),
            ["num_attention_heads", "num_key_value_heads (3)"],
        ),
        (
            json!({"num_experts_per_tok": 5}),
            ["num_experts_per_tok", "at most the number of experts (4)"],
        ),
        (
            json!({"attention_bias": 1}),
            ["attention_bias", "true or false"],
        ),
    ] {
        let text = describe("qwen3_next", &with(&changes))
            .expect_err(&changes.to_string())
            .to_string();
        assert!(
            parts.iter().all(|part| text.contains(part)),
            "{changes}: {text}"
        );
    }
    let mut config = base("qwen3_5_moe_text");
    config["norm_topk_prob"] = json!(false);
    let text = describe("qwen3_5_moe", &config).unwrap_err().to_string();
    assert!(text.contains("norm_topk_prob"), "{text}");
}

fn summary(changes: &Value) -> GgufSummary {
    let mut summary = json!({"general.architecture": "qwen35", "tensors": {
        "token_embd.weight": {"shape": [61, 32], "type": "F16"},
        "blk.0.ssm_conv1d.weight": {"shape": [56, 4], "type": "F32"},
        "blk.0.ssm_a": {"shape": [4], "type": "F32"},
        "blk.1.attn_q.weight": {"shape": [128, 32], "type": "F16"},
        "blk.2.nextn.eh_proj.weight": {"shape": [32, 64], "type": "F16"},
    }});
    for (key, value) in [
        ("embedding_length", json!(32)),
        ("block_count", json!(3)),
        ("nextn_predict_layers", json!(1)),
        ("feed_forward_length", json!(48)),
        ("context_length", json!(512)),
        ("attention.head_count", json!(4)),
        ("attention.head_count_kv", json!(2)),
        ("attention.key_length", json!(16)),
        ("attention.layer_norm_rms_epsilon", json!(1e-6)),
        ("rope.dimension_count", json!(4)),
        ("ssm.conv_kernel", json!(4)),
        ("ssm.state_size", json!(8)),
        ("ssm.group_count", json!(2)),
        ("ssm.time_step_rank", json!(4)),
        ("ssm.inner_size", json!(24)),
    ] {
        summary[format!("qwen35.{key}")] = value;
    }
    for (key, value) in changes.as_object().unwrap() {
        summary[format!("qwen35.{key}")] = value.clone();
    }
    serde_json::from_value(summary).unwrap()
}

#[test]
fn a_gguf_file_says_what_its_layers_are_by_their_tensors() {
    let qwen = find("qwen3_5").unwrap().implementation;
    let adapter = qwen.adapt_gguf(&summary(&json!({}))).unwrap();
    assert_eq!(adapter.ignore, ["blk.2.nextn.eh_proj.weight"]);
    let mapped = |name: &str| adapter.tensors.iter().find(|tensor| tensor.to == name);
    assert!(mapped("model.layers.0.linear_attn.A").is_some());
    let config = Value::Object(adapter.config.clone());
    let desc = describe("qwen3_5", &config).unwrap();
    let states = vec![StateDesc::f32(&[3, 56]), StateDesc::f32(&[4, 8, 6])];
    assert_eq!(desc.layers[0], CacheDesc::Recurrent { states });
    assert!(matches!(desc.layers[1], CacheDesc::Dense { k_dim: 16, .. }));
    assert_eq!(desc.layers.len(), 2);
    for (changes, part) in [
        (json!({"nextn_predict_layers": 3}), "nextn_predict_layers"),
        (json!({"ssm.group_count": null}), "ssm.group_count"),
        (json!({"ssm.time_step_rank": 0}), "ssm.time_step_rank"),
        (json!({"pooling_type": 2}), "pooling_type"),
    ] {
        let error = qwen.adapt_gguf(&summary(&changes)).unwrap_err().to_string();
        assert!(error.contains(part), "{changes}: {error}");
    }
}
