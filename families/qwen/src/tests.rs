//! Configurations and GGUF summaries, good and bad, through the registered architectures.

use mlxcel_sdk::arch::find;
use mlxcel_sdk::{CacheDesc, Config, GgufAdapter, GgufSummary, ModelDesc, Probe, Result};
use serde_json::{Value, json};

const ALL: [&str; 4] = ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"];

fn describe(arch: &str, config: &Value) -> Result<ModelDesc> {
    let implementation = find(arch).unwrap().implementation;
    implementation.describe(&Config::root(config).unwrap())
}

fn probe(arch: &str, config: &Value) -> Probe {
    let implementation = find(arch).unwrap().implementation;
    implementation.probe(&Config::root(config).unwrap())
}

fn adapt(arch: &str, summary: Value) -> Result<GgufAdapter> {
    let summary: GgufSummary = serde_json::from_value(summary).unwrap();
    find(arch).unwrap().implementation.adapt_gguf(&summary)
}

fn with(base: &Value, changes: &Value) -> Value {
    let mut config = base.clone();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

/// What every architecture takes.
fn base() -> Value {
    json!({"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2})
}

fn windows(arch: &str, changes: Value) -> Vec<usize> {
    let desc = describe(arch, &with(&base(), &changes)).unwrap();
    let window = |layer: &CacheDesc| match layer {
        CacheDesc::Window { window, .. } => *window,
        _ => 0,
    };
    desc.layers.iter().map(window).collect()
}

fn message(arch: &str, changes: &Value) -> String {
    let error = describe(arch, &with(&base(), changes)).expect_err(&changes.to_string());
    error.to_string()
}

#[test]
fn windows_follow_the_rule_of_each_architecture() {
    let on = |extra: Value| {
        let settings = json!({"use_sliding_window": true, "sliding_window": 8});
        with(&settings, &extra)
    };
    let from_2 = || on(json!({"max_window_layers": 2}));
    assert_eq!(windows("qwen2", from_2()), [0, 0, 8, 8]);
    assert_eq!(windows("qwen3", from_2()), [0, 0, 8, 8]);
    assert_eq!(windows("qwen2_moe", from_2()), [8, 0, 0, 0]);
    assert_eq!(windows("qwen3_moe", from_2()), [8, 8, 8, 8]);
    assert_eq!(windows("qwen2_moe", on(json!({}))), [8, 0, 8, 0]);
    assert_eq!(windows("qwen2", on(json!({}))), [0; 4]);
    let types = json!({"layer_types":
        ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]});
    assert_eq!(windows("qwen2", on(types.clone())), [8, 0, 0, 8]);
    assert_eq!(windows("qwen2_moe", on(types.clone())), [8, 0, 0, 8]);
    assert!(message("qwen3_moe", &on(types)).contains("layer_types"));
    for arch in ALL {
        let left_over =
            json!({"use_sliding_window": false, "sliding_window": 8, "max_window_layers": 0});
        assert_eq!(windows(arch, left_over), [0; 4], "{arch}");
        let null =
            json!({"use_sliding_window": true, "sliding_window": null, "max_window_layers": 1});
        assert_eq!(windows(arch, null), [0; 4], "{arch}");
    }
    let missing = json!({"use_sliding_window": true, "max_window_layers": 3});
    assert_eq!(windows("qwen3", missing), [0, 0, 0, 4096]);
}

#[test]
fn head_width_follows_the_class_of_each_architecture() {
    for (arch, width) in [
        ("qwen2", 16),
        ("qwen2_moe", 16),
        ("qwen3", 128),
        ("qwen3_moe", 16),
    ] {
        let desc = describe(arch, &base()).unwrap();
        let dense = CacheDesc::Dense {
            kv_heads: 2,
            k_dim: width,
            v_dim: width,
        };
        assert_eq!(desc.layers, vec![dense; 4], "{arch}");
        assert_eq!((desc.vocab_size, desc.context_length), (100, 32_768));
    }
}

#[test]
fn bad_values_are_named_in_every_architecture() {
    for arch in ALL {
        for (changes, parts) in [
            (
                json!({"hidden_size": null}),
                ["\"hidden_size\"", "an integer"],
            ),
            (
                json!({"hidden_size": "64"}),
                ["\"hidden_size\" is \"64\"", "an integer"],
            ),
            (
                json!({"hidden_size": 66, "head_dim": null, "num_attention_heads": 0}),
                ["num_attention_heads", "1 to 4096"],
            ),
            (
                json!({"num_hidden_layers": 0}),
                ["num_hidden_layers", "1 to 4096"],
            ),
            (
                json!({"num_hidden_layers": 1e9}),
                ["num_hidden_layers", "1 to 4096"],
            ),
            (
                json!({"num_key_value_heads": 3}),
                [
                    "num_attention_heads",
                    "a multiple of num_key_value_heads (3)",
                ],
            ),
            (json!({"head_dim": 0}), ["head_dim", "2 to 4096"]),
            (json!({"head_dim": 15}), ["head_dim", "an even number"]),
            (
                json!({"partial_rotary_factor": 0.5}),
                ["partial_rotary_factor", "all features"],
            ),
            (json!({"vocab_size": -1}), ["vocab_size", "an integer"]),
            (
                json!({"hidden_act": "mish"}),
                ["hidden_act = \"mish\"", "silu"],
            ),
            (
                json!({"rms_norm_eps": "small"}),
                ["rms_norm_eps", "a number"],
            ),
            (
                json!({"tie_word_embeddings": 1}),
                ["tie_word_embeddings", "true or false"],
            ),
            (
                json!({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}),
                ["mrope", "known rope types"],
            ),
            (json!({"rope_theta": 0}), ["rope_theta", "a number"]),
            (
                json!({"use_sliding_window": "yes"}),
                ["use_sliding_window", "true or false"],
            ),
            (
                json!({"use_sliding_window": true, "sliding_window": 0}),
                ["sliding_window", "an integer"],
            ),
            (
                json!({"max_window_layers": "2"}),
                ["max_window_layers", "an integer"],
            ),
            (
                json!({"layer_types": ["full_attention"]}),
                ["layer_types", "4 layers"],
            ),
            (
                json!({"layer_types": ["linear_attention", "full_attention", "full_attention", "full_attention"]}),
                ["linear_attention", "known types"],
            ),
            (
                json!({"layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"]}),
                ["layer_types", "no window"],
            ),
        ] {
            let text = message(arch, &changes);
            assert!(
                parts.iter().all(|part| text.contains(part)),
                "{arch}, {changes}: {text}"
            );
        }
    }
}

#[test]
fn bad_values_of_experts_are_named() {
    for arch in ["qwen2_moe", "qwen3_moe"] {
        for (changes, parts) in [
            (
                json!({"num_experts_per_tok": 9}),
                ["num_experts_per_tok", "at most the number of experts (8)"],
            ),
            (json!({"num_experts": 0}), ["num_experts", "1 to 4096"]),
            (
                json!({"num_local_experts": 4}),
                ["num_local_experts", "the same as num_experts (8)"],
            ),
            (json!({"num_experts": "8"}), ["num_experts", "an integer"]),
            (
                json!({"moe_intermediate_size": null}),
                ["moe_intermediate_size\" is", "an integer"],
            ),
            (
                json!({"decoder_sparse_step": 0}),
                ["decoder_sparse_step", "an integer from 1"],
            ),
            (
                json!({"mlp_only_layers": [4]}),
                ["mlp_only_layers", "below num_hidden_layers (4)"],
            ),
            (
                json!({"mlp_only_layers": "none"}),
                ["mlp_only_layers", "a list of integers"],
            ),
            (
                json!({"mlp_only_layers": [0], "intermediate_size": null}),
                ["intermediate_size", "an integer"],
            ),
            (
                json!({"norm_topk_prob": 1}),
                ["norm_topk_prob", "true or false"],
            ),
        ] {
            let text = message(arch, &changes);
            assert!(
                parts.iter().all(|part| text.contains(part)),
                "{arch}, {changes}: {text}"
            );
        }
        describe(arch, &with(&base(), &json!({"intermediate_size": null}))).unwrap();
        let renamed = json!({"num_experts": null, "num_local_experts": 2});
        describe(arch, &with(&base(), &renamed)).unwrap();
    }
    let text = message("qwen2_moe", &json!({"shared_expert_intermediate_size": 0}));
    assert!(text.contains("shared_expert_intermediate_size"), "{text}");
}

#[test]
fn other_heads_and_multimodal_models_are_refused_by_name() {
    assert_eq!(probe("qwen2", &base()).score, 100);
    let text = json!({"architectures": ["Qwen2ForCausalLM"]});
    assert_eq!(probe("qwen2", &with(&base(), &text)).score, 100);
    for (changes, part) in [
        (
            json!({"architectures": ["Qwen2ForRewardModel"]}),
            "Qwen2ForRewardModel",
        ),
        (
            json!({"architectures": ["Qwen3ForSequenceClassification"]}),
            "ForSequenceClassification",
        ),
        (
            json!({"architectures": "Qwen3ForCausalLM"}),
            "a list of strings",
        ),
        (json!({"vision_config": {}}), "vision_config"),
    ] {
        for arch in ALL {
            let probe = probe(arch, &with(&base(), &changes));
            assert!(
                probe.score == 0 && probe.why.contains(part),
                "{arch}: {probe:?}"
            );
        }
    }
}

fn summary(arch: &str, changes: &Value) -> Value {
    let mut summary = json!({"general.architecture": arch, "tensors": {
        "token_embd.weight": {"shape": [100, 64], "type": "F16"},
        "blk.0.ffn_gate_exps.weight": {"shape": [8, 32, 64], "type": "F16"},
        "blk.0.ffn_gate_shexp.weight": {"shape": [48, 64], "type": "F16"},
        "blk.0.ffn_gate_inp_shexp.weight": {"shape": [64], "type": "F32"},
    }});
    for (key, value) in [
        ("embedding_length", json!(64)),
        ("block_count", json!(1)),
        ("feed_forward_length", json!(96)),
        ("context_length", json!(512)),
        ("attention.head_count", json!(4)),
        ("attention.layer_norm_rms_epsilon", json!(1e-6)),
        ("expert_count", json!(8)),
        ("expert_used_count", json!(2)),
    ] {
        summary[format!("{arch}.{key}")] = value;
    }
    for (key, value) in changes.as_object().unwrap() {
        summary[format!("{arch}.{key}")] = value.clone();
    }
    summary
}

#[test]
fn gguf_without_the_newer_keys_is_read_from_its_tensors() {
    let adapter = adapt("qwen2_moe", summary("qwen2moe", &json!({}))).unwrap();
    let config = Value::Object(adapter.config);
    for (key, value) in [
        ("moe_intermediate_size", json!(32)),
        ("shared_expert_intermediate_size", json!(48)),
        ("norm_topk_prob", json!(false)),
        ("head_dim", json!(16)),
        ("tie_word_embeddings", json!(true)),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    describe("qwen2_moe", &config).unwrap();
    let adapter = adapt(
        "qwen3_moe",
        summary("qwen3moe", &json!({"attention.key_length": 32})),
    )
    .unwrap();
    assert_eq!(adapter.config["norm_topk_prob"], json!(true));
    assert_eq!(adapter.config["head_dim"], json!(32));
}

#[test]
fn gguf_that_we_do_not_understand_is_refused_by_name() {
    for (changes, part) in [
        (json!({"pooling_type": 3}), "qwen3.pooling_type = 3"),
        (
            json!({"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 1.2}),
            "attn_factor = 1.2",
        ),
        (json!({"block_count": 0}), "block_count"),
        (json!({"embedding_length": "64"}), "embedding_length"),
        (
            json!({"attention.head_count": null}),
            "attention.head_count",
        ),
    ] {
        let error = adapt("qwen3", summary("qwen3", &changes)).unwrap_err();
        assert!(error.to_string().contains(part), "{changes}: {error}");
    }
}
