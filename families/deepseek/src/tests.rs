//! Configurations and GGUF summaries, good and bad, through the registered architectures.

use mlxcel_sdk::arch::find;
use mlxcel_sdk::{
    CacheDesc, Config, GgufAdapter, GgufSummary, ModelDesc, Probe, Result, StateDesc,
};
use serde_json::{Value, json};

const ALL: [&str; 4] = ["deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32"];
const LATENT: [&str; 3] = ["deepseek_v2", "deepseek_v3", "deepseek_v32"];

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
        "num_key_value_heads": 4, "vocab_size": 100, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20,
        "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8})
}

fn without(key: &str) -> Value {
    let mut config = base();
    config.as_object_mut().unwrap().remove(key);
    config
}

fn message(arch: &str, changes: &Value) -> String {
    let error = describe(arch, &with(&base(), changes)).expect_err(&changes.to_string());
    error.to_string()
}

#[track_caller]
fn refused(arch: &str, changes: &Value, parts: &[&str]) {
    let text = message(arch, changes);
    assert!(
        parts.iter().all(|part| text.contains(part)),
        "{arch}, {changes}: {text}"
    );
}

#[test]
fn caches_are_one_compressed_key_per_position() {
    for (arch, index_dim) in [
        ("deepseek_v2", None),
        ("deepseek_v3", None),
        ("deepseek_v32", Some(16)),
    ] {
        let latent = CacheDesc::Latent {
            k_dim: 40,
            v_dim: 32,
            index_dim,
        };
        assert_eq!(describe(arch, &base()).unwrap().layers, vec![latent; 4]);
    }
    let dense = CacheDesc::Dense {
        kv_heads: 2,
        k_dim: 16,
        v_dim: 16,
    };
    let config = with(&base(), &json!({"num_key_value_heads": 2}));
    assert_eq!(
        describe("deepseek", &config).unwrap().layers,
        vec![dense; 4]
    );
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
                json!({"num_attention_heads": 0}),
                ["num_attention_heads", "1 to 4096"],
            ),
            (
                json!({"num_hidden_layers": 1e9}),
                ["num_hidden_layers", "1 to 4096"],
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
                json!({"attention_bias": "no"}),
                ["attention_bias", "true or false"],
            ),
            (
                json!({"tie_word_embeddings": 1}),
                ["tie_word_embeddings", "true or false"],
            ),
            (
                json!({"rope_scaling": {"type": "mrope"}}),
                ["mrope", "known rope types"],
            ),
            (
                json!({"rope_scaling": {"type": "yarn"}}),
                ["rope_scaling.factor", "a number"],
            ),
            (
                json!({"partial_rotary_factor": 0.5}),
                ["partial_rotary_factor", "rotate"],
            ),
            (
                json!({"n_routed_experts": 0}),
                ["n_routed_experts", "1 to 4096"],
            ),
            (
                json!({"num_local_experts": 4}),
                ["num_local_experts", "the same as n_routed_experts (8)"],
            ),
            (
                json!({"num_experts_per_tok": 9}),
                ["num_experts_per_tok", "at most the number of experts (8)"],
            ),
            (
                json!({"num_experts_per_tok": null}),
                ["num_experts_per_tok", "an integer"],
            ),
            (
                json!({"moe_intermediate_size": null}),
                ["moe_intermediate_size", "an integer"],
            ),
            (
                json!({"intermediate_size": null}),
                ["intermediate_size", "an integer"],
            ),
            (
                json!({"n_shared_experts": -1}),
                ["n_shared_experts", "an integer"],
            ),
            (
                json!({"first_k_dense_replace": "1"}),
                ["first_k_dense_replace", "an integer"],
            ),
            (
                json!({"moe_layer_freq": 0}),
                ["moe_layer_freq", "an integer from 1"],
            ),
            (
                json!({"mlp_layer_types": ["dense"]}),
                ["mlp_layer_types", "4 layers"],
            ),
            (
                json!({"mlp_layer_types": ["dense", "sparse", "hash", "sparse"]}),
                ["mlp_layer_types", "dense and sparse"],
            ),
            (
                json!({"scoring_func": "tanh"}),
                ["scoring_func = \"tanh\"", "this architecture has"],
            ),
        ] {
            refused(arch, &changes, &parts);
        }
        let text = describe(arch, &without("n_routed_experts"))
            .unwrap_err()
            .to_string();
        assert!(text.contains("n_routed_experts") && text.contains("or null"));
    }
}

#[test]
fn bad_values_of_latent_attention_are_named() {
    for arch in LATENT {
        for (changes, parts) in [
            (json!({"kv_lora_rank": null}), ["kv_lora_rank", "1 to"]),
            (json!({"kv_lora_rank": 0}), ["kv_lora_rank", "1 to"]),
            (
                json!({"qk_rope_head_dim": 7}),
                ["qk_rope_head_dim", "an even number"],
            ),
            (
                json!({"qk_nope_head_dim": "24"}),
                ["qk_nope_head_dim", "an integer"],
            ),
            (json!({"v_head_dim": null}), ["v_head_dim", "an integer"]),
            (json!({"q_lora_rank": 1e9}), ["q_lora_rank", "1 to"]),
            (
                json!({"num_key_value_heads": 2}),
                ["num_key_value_heads", "the same as num_attention_heads (4)"],
            ),
            (
                json!({"rope_scaling": {"type": "yarn", "factor": 4, "mscale_all_dim": -1}}),
                ["rope_scaling.mscale_all_dim", "a number"],
            ),
        ] {
            refused(arch, &changes, &parts);
        }
    }
}

#[test]
fn groups_that_do_not_fit_are_named() {
    for arch in ["deepseek_v2", "deepseek_v3", "deepseek_v32"] {
        let method = match arch {
            "deepseek_v2" => "group_limited_greedy",
            _ => "noaux_tc",
        };
        for (changes, parts) in [
            (
                json!({"n_group": 3}),
                ["n_group", "divides the experts (8)"],
            ),
            (
                json!({"topk_group": 5}),
                ["topk_group", "at most n_group (4)"],
            ),
            (
                json!({"num_experts_per_tok": 5}),
                ["num_experts_per_tok", "the 4 experts of 2 groups"],
            ),
            (json!({"n_group": "4"}), ["n_group", "an integer"]),
        ] {
            refused(
                arch,
                &with(&changes, &json!({"topk_method": method})),
                &parts,
            );
        }
    }
    refused(
        "deepseek_v3",
        &json!({"n_group": 8, "topk_group": 8}),
        &["n_group", "groups of 2 or more"],
    );
    refused(
        "deepseek_v2",
        &json!({"topk_method": "group_limited_greedy", "topk_group": null}),
        &["topk_group", "an integer"],
    );
    // One group, or none at all, is no limit.
    for groups in [
        json!({"n_group": 1, "topk_group": 1}),
        json!({"n_group": null, "topk_group": null}),
    ] {
        describe("deepseek_v3", &with(&base(), &groups)).unwrap();
    }
}

#[test]
fn variants_of_other_generations_are_refused_by_name() {
    for (arch, changes, parts) in [
        (
            "deepseek_v2",
            json!({"scoring_func": "sigmoid"}),
            ["scoring_func = \"sigmoid\"", "softmax"],
        ),
        (
            "deepseek_v2",
            json!({"topk_method": "noaux_tc"}),
            ["topk_method = \"noaux_tc\"", "greedy"],
        ),
        (
            "deepseek_v2",
            json!({"norm_topk_prob": true}),
            ["norm_topk_prob = true", "disagree"],
        ),
        (
            "deepseek_v3",
            json!({"scoring_func": "softmax"}),
            ["scoring_func = \"softmax\"", "sigmoid"],
        ),
        (
            "deepseek_v3",
            json!({"topk_method": "greedy"}),
            ["topk_method = \"greedy\"", "noaux_tc"],
        ),
        (
            "deepseek_v32",
            json!({"q_lora_rank": null}),
            ["q_lora_rank", "compressed queries"],
        ),
        (
            "deepseek_v32",
            json!({"index_head_dim": 4}),
            ["index_head_dim", "qk_rope_head_dim (8)"],
        ),
        (
            "deepseek_v32",
            json!({"index_topk": 0}),
            ["index_topk", "an integer from 1"],
        ),
        (
            "deepseek_v32",
            json!({"index_n_heads": null}),
            ["index_n_heads", "an integer"],
        ),
        (
            "deepseek_v32",
            json!({"layer_types": ["full_attention"]}),
            ["full_attention", "indexed_attention"],
        ),
    ] {
        refused(arch, &changes, &parts);
    }
}

#[test]
fn a_model_without_experts_needs_none_of_their_settings() {
    for arch in ALL {
        let dense = json!({"n_routed_experts": null, "num_experts_per_tok": null, "moe_intermediate_size": null,
            "n_shared_experts": null, "n_group": null, "topk_group": null});
        describe(arch, &with(&base(), &dense)).unwrap();
        let all_sparse = json!({"first_k_dense_replace": 0, "intermediate_size": null});
        describe(arch, &with(&base(), &all_sparse)).unwrap();
        let renamed = json!({"n_routed_experts": null, "num_experts": 8});
        describe(arch, &with(&base(), &renamed)).unwrap();
    }
}

#[test]
fn other_heads_and_multimodal_models_are_refused_by_name() {
    for arch in ALL {
        assert_eq!(probe(arch, &base()).score, 100);
        for (changes, part) in [
            (
                json!({"architectures": ["DeepseekV3ForSequenceClassification"]}),
                "ForSequenceClassification",
            ),
            (
                json!({"architectures": "DeepseekV3ForCausalLM"}),
                "a list of strings",
            ),
            (json!({"vision_config": {}}), "vision_config"),
        ] {
            let probe = probe(arch, &with(&base(), &changes));
            assert!(
                probe.score == 0 && probe.why.contains(part),
                "{arch}: {probe:?}"
            );
        }
    }
}

fn fourth() -> Value {
    json!({"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 100,
        "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 12, "sliding_window": 16,
        "index_n_heads": 4, "index_head_dim": 12, "index_topk": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32})
}

#[test]
fn layers_of_the_fourth_generation_follow_their_types() {
    let window = CacheDesc::Window {
        kv_heads: 1,
        k_dim: 32,
        v_dim: 32,
        window: 16,
    };
    // A compressed key of 32 features, and one of the indexer's 12; beside them the rows before the last of the
    // window, and both projections of the rows that a key may still need, twice as wide where groups overlap.
    let long = |index_dim, groups: &[[usize; 2]]| {
        let states = [[15, 32]].iter().chain(groups);
        let keys = CacheDesc::Latent {
            k_dim: 1,
            v_dim: 1,
            index_dim: Some(index_dim),
        };
        let states = states.map(|shape| StateDesc::f32(shape)).collect();
        vec![keys, CacheDesc::Recurrent { states }]
    };
    let window = vec![window];
    let (heavy, sparse) = (long(32, &[[127, 64]]), long(44, &[[7, 128], [7, 48]]));
    let layers = |changes: Value| {
        let desc = describe("deepseek_v4", &with(&fourth(), &changes)).unwrap();
        desc.layers
    };
    let pattern = [&heavy, &heavy, &heavy, &sparse, &heavy]
        .map(Vec::clone)
        .concat();
    assert_eq!(layers(json!({})), pattern);
    let published = json!({"compress_ratios": [0, 0, 4, 128, 4, 0]});
    let expected = [&window, &window, &sparse, &heavy, &sparse]
        .map(Vec::clone)
        .concat();
    assert_eq!(layers(published), expected);
}

#[test]
fn bad_values_of_the_fourth_generation_are_named() {
    for (changes, parts) in [
        (json!({"head_dim": null}), ["head_dim", "an integer"]),
        (
            json!({"qk_rope_head_dim": 40}),
            ["qk_rope_head_dim", "up to head_dim (32)"],
        ),
        (
            json!({"qk_rope_head_dim": null, "partial_rotary_factor": 0.03}),
            ["\"partial_rotary_factor\" is 0.03", "this gives 0"],
        ),
        (
            json!({"num_key_value_heads": 4}),
            ["num_key_value_heads = 4", "all heads share 1"],
        ),
        (
            json!({"o_groups": 3}),
            ["num_attention_heads", "a multiple of o_groups (3)"],
        ),
        (
            json!({"index_head_dim": 4}),
            ["index_head_dim", "the 8 rotated features"],
        ),
        (
            json!({"index_topk": 0}),
            ["index_topk", "an integer from 1"],
        ),
        (
            json!({"sliding_window": null}),
            ["sliding_window", "an integer"],
        ),
        (json!({"hc_mult": 0}), ["hc_mult", "1 to 64"]),
        (
            json!({"hc_sinkhorn_iters": 0}),
            ["hc_sinkhorn_iters", "1 to 1000"],
        ),
        (
            json!({"layer_types": ["sliding_attention"]}),
            ["layer_types", "5 layers"],
        ),
        (
            json!({"layer_types": ["full_attention", "full_attention", "full_attention", "full_attention", "full_attention"]}),
            ["full_attention", "known types"],
        ),
        (
            json!({"compress_ratios": [0, 0, 8, 4, 4]}),
            ["compress_ratios", "0, 4 and 128"],
        ),
        (
            json!({"compress_ratios": [0]}),
            ["compress_ratios", "5 layers"],
        ),
        (
            json!({"compress_rates": {"compressed_sparse_attention": 0}}),
            ["compress_rates.compressed_sparse_attention", "1 to 4096"],
        ),
        (
            json!({"mlp_layer_types": ["moe", "moe", "dense", "moe", "moe"]}),
            ["mlp_layer_types", "hash_moe and moe"],
        ),
        (
            json!({"scoring_func": "softmax"}),
            ["scoring_func = \"softmax\"", "sqrtsoftplus"],
        ),
        (
            json!({"norm_topk_prob": false}),
            ["norm_topk_prob = false", "sum to 1"],
        ),
        (
            json!({"n_shared_experts": 2}),
            ["n_shared_experts = 2", "has 1"],
        ),
        (
            json!({"num_experts_per_tok": 9}),
            ["num_experts_per_tok", "at most the number of experts (8)"],
        ),
        (
            json!({"swiglu_limit": 0}),
            ["swiglu_limit", "a number from"],
        ),
        (
            json!({"attention_bias": true}),
            ["attention_bias = true", "no biases"],
        ),
    ] {
        let error = describe("deepseek_v4", &with(&fourth(), &changes));
        let text = error.expect_err(&changes.to_string()).to_string();
        assert!(
            parts.iter().all(|part| text.contains(part)),
            "{changes}: {text}"
        );
    }
}

fn summary(arch: &str, changes: &Value) -> Value {
    let mut summary = json!({"general.architecture": arch, "tensors": {
        "token_embd.weight": {"shape": [100, 64], "type": "F16"},
        "blk.0.attn_q.weight": {"shape": [128, 64], "type": "F16"},
        "blk.0.attn_kv_b.weight": {"shape": [176, 32], "type": "F16"},
        "blk.0.attn_k_b.weight": {"shape": [4, 32, 24], "type": "F16"},
        "blk.1.attn_norm.weight": {"shape": [64], "type": "F32"},
    }});
    for (key, value) in [
        ("embedding_length", json!(64)),
        ("block_count", json!(2)),
        ("feed_forward_length", json!(96)),
        ("context_length", json!(512)),
        ("attention.head_count", json!(4)),
        ("attention.layer_norm_rms_epsilon", json!(1e-6)),
        ("attention.kv_lora_rank", json!(32)),
        ("attention.key_length", json!(32)),
        ("attention.value_length", json!(20)),
        ("rope.dimension_count", json!(8)),
        ("leading_dense_block_count", json!(1)),
        ("expert_count", json!(8)),
        ("expert_used_count", json!(2)),
        ("expert_shared_count", json!(1)),
        ("expert_feed_forward_length", json!(32)),
    ] {
        summary[format!("{arch}.{key}")] = value;
    }
    if arch == "deepseek" {
        // Heads of the first generation are rotated whole.
        summary["deepseek.rope.dimension_count"] = json!(16);
    }
    for (key, value) in changes.as_object().unwrap() {
        summary[format!("{arch}.{key}")] = value.clone();
    }
    summary
}

#[test]
fn one_gguf_name_serves_two_generations() {
    let old = summary("deepseek2", &json!({}));
    let text = adapt("deepseek_v3", old.clone()).unwrap_err().to_string();
    assert!(
        text.contains("expert_gating_func = null") && text.contains("2 (sigmoid)"),
        "{text}"
    );
    let adapter = adapt("deepseek_v2", old).unwrap();
    let ignored = adapter.ignore.clone();
    assert_eq!(
        ignored,
        ["blk.0.attn_kv_b.weight"],
        "the two halves are there"
    );
    let config = Value::Object(adapter.config);
    for (key, value) in [
        ("model_type", json!("deepseek_v2")),
        ("qk_nope_head_dim", json!(24)),
        ("q_lora_rank", json!(null)),
        ("routed_scaling_factor", json!(1.0)),
        ("n_group", json!(1)),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    describe("deepseek_v2", &config).unwrap();

    let new = summary(
        "deepseek2",
        &json!({"expert_gating_func": 2, "attention.key_length": 40,
        "attention.key_length_mla": 32, "attention.value_length": 32, "attention.value_length_mla": 20,
        "expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_norm": true, "expert_weights_scale": 2.5,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": 0.1, "nextn_predict_layers": 1}),
    );
    assert!(adapt("deepseek_v2", new.clone()).is_err());
    let adapter = adapt("deepseek_v3", new).unwrap();
    assert!(
        adapter
            .ignore
            .contains(&"blk.1.attn_norm.weight".to_owned())
    );
    let config = Value::Object(adapter.config);
    for (key, value) in [
        ("qk_nope_head_dim", json!(24)),
        ("v_head_dim", json!(20)),
        ("n_group", json!(4)),
        ("num_hidden_layers", json!(1)),
        ("norm_topk_prob", json!(true)),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    assert_eq!(config["rope_scaling"]["mscale_all_dim"], json!(1.0));
    describe("deepseek_v3", &config).unwrap();
}

#[test]
fn gguf_that_we_do_not_understand_is_refused_by_name() {
    for (arch, name, changes, part) in [
        (
            "deepseek_v2",
            "deepseek2",
            json!({"expert_gating_func": 3}),
            "expert_gating_func = 3",
        ),
        (
            "deepseek_v2",
            "deepseek2",
            json!({"attention.temperature_scale": 0.1}),
            "temperature_scale = 0.1",
        ),
        (
            "deepseek_v2",
            "deepseek2",
            json!({"rope.scaling.type": "linear"}),
            "linear",
        ),
        (
            "deepseek_v2",
            "deepseek2",
            json!({"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 1.2}),
            "attn_factor = 1.2",
        ),
        (
            "deepseek_v2",
            "deepseek2",
            json!({"rope.dimension_count": 64}),
            "rope.dimension_count",
        ),
        (
            "deepseek_v2",
            "deepseek2",
            json!({"attention.kv_lora_rank": null}),
            "kv_lora_rank",
        ),
        (
            "deepseek_v2",
            "deepseek2",
            json!({"expert_weights_norm": 1}),
            "expert_weights_norm",
        ),
        (
            "deepseek_v2",
            "deepseek2",
            json!({"expert_group_count": 4}),
            "expert_group_used_count",
        ),
        (
            "deepseek",
            "deepseek",
            json!({"rope.scaling.type": "yarn"}),
            "yarn",
        ),
        (
            "deepseek",
            "deepseek",
            json!({"expert_weights_scale": 2.0}),
            "expert_weights_scale = 2",
        ),
        (
            "deepseek",
            "deepseek",
            json!({"block_count": 0}),
            "block_count",
        ),
        (
            "deepseek",
            "deepseek",
            json!({"rope.dimension_count": 8}),
            "\"deepseek.rope.dimension_count\" is 8: expected 16",
        ),
        (
            "deepseek_v2",
            "deepseek2",
            json!({"attention.key_length_mla": 32, "attention.value_length": 20}),
            "\"deepseek2.attention.key_length\" is 32: expected 40",
        ),
        (
            "deepseek_v2",
            "deepseek2",
            json!({"attention.head_count_kv": 2}),
            "\"deepseek2.attention.head_count_kv\" is 2: expected 4",
        ),
    ] {
        let error = adapt(arch, summary(name, &changes)).unwrap_err();
        assert!(error.to_string().contains(part), "{changes}: {error}");
    }
    let error = adapt("deepseek_v32", summary("deepseek2", &json!({}))).unwrap_err();
    assert!(error.to_string().contains("GGUF"), "{error}");
}
