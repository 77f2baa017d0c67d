//! Configurations and GGUF summaries of gemma3n and gemma4, good and bad.

use mlxcel_sdk::{CacheDesc, ModelDesc};
use serde_json::{Value, json};

use crate::tests::{adapt, describe, probe, with};

/// `text_config` of the published Gemma 3n E2B, without the lists that it also has.
fn e2b() -> Value {
    json!({"model_type": "gemma3n_text", "hidden_size": 2048, "intermediate_size": vec![8192; 30],
        "num_hidden_layers": 30, "num_kv_shared_layers": 10, "head_dim": 256, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 262_400, "sliding_window": 512})
}

/// `text_config` of a Gemma 4 in the spelling of published files.
fn small() -> Value {
    json!({"model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
        "num_kv_shared_layers": 2, "sliding_window": 9, "layer_types": ["sliding_attention", "sliding_attention",
        "full_attention", "sliding_attention", "full_attention"], "use_bidirectional_attention": "vision",
        "num_global_key_value_heads": 1})
}

fn kinds(desc: &ModelDesc) -> String {
    let kind = |layer: &CacheDesc| match layer {
        CacheDesc::Window { .. } => 's',
        CacheDesc::Dense { .. } => 'f',
        CacheDesc::None => '-',
        _ => '?',
    };
    desc.layers.iter().map(kind).collect()
}

#[test]
fn layers_that_share_a_cache_have_none() {
    let desc = describe("gemma3n", &e2b()).unwrap();
    assert_eq!(kinds(&desc), "ssssfssssfssssfssssf----------");
    let nested = json!({"model_type": "gemma3n", "text_config": e2b(), "audio_config": {}});
    assert_eq!(describe("gemma3n", &nested).unwrap(), desc);
    assert_eq!(probe("gemma3n", &nested).score, 50);
    assert_eq!(probe("gemma3n", &e2b()).score, 100);

    let desc = describe("gemma4", &small()).unwrap();
    assert_eq!(kinds(&desc), "ssf--");
    let wide = CacheDesc::Dense {
        kv_heads: 2,
        k_dim: 16,
        v_dim: 16,
    };
    assert_eq!(desc.layers[2], wide);
}

#[test]
fn heads_of_full_layers_read_alike_in_both_spellings() {
    let published = with(&small(), json!({"attention_k_eq_v": true}));
    let desc = describe("gemma4", &published).unwrap();
    let one = CacheDesc::Dense {
        kv_heads: 1,
        k_dim: 16,
        v_dim: 16,
    };
    assert_eq!(desc.layers[2], one);
    let mut listed = published.clone();
    for key in ["global_head_dim", "num_global_key_value_heads"] {
        listed.as_object_mut().unwrap().remove(key);
    }
    let own = json!({"head_dim": 16, "num_key_value_heads": 1});
    listed["per_layer_config"] = json!({"2": own, "4": own});
    assert_eq!(describe("gemma4", &listed).unwrap(), desc);
}

/// Every change must give an error with both texts.
fn refused(arch: &str, base: &Value, cases: &[(Value, [&str; 2])]) {
    describe(arch, base).unwrap();
    for (changes, parts) in cases {
        let error = describe(arch, &with(base, changes.clone()))
            .unwrap_err()
            .to_string();
        assert!(
            parts.iter().all(|part| error.contains(part)),
            "{changes}: {error}"
        );
    }
}

#[test]
fn bad_values_of_gemma3n_are_named() {
    refused(
        "gemma3n",
        &e2b(),
        &[
            (
                json!({"intermediate_size": vec![8192; 29]}),
                ["\"intermediate_size\"", "each of 30 layers"],
            ),
            (
                json!({"intermediate_size": "8192"}),
                ["\"intermediate_size\" is \"8192\"", "an integer"],
            ),
            (
                json!({"intermediate_size": null}),
                ["\"intermediate_size\" is null", "an integer"],
            ),
            (
                json!({"num_kv_shared_layers": 30}),
                ["\"num_kv_shared_layers\" is 30", "from 0 to 29"],
            ),
            (
                json!({"num_kv_shared_layers": 27}),
                [
                    "\"num_kv_shared_layers\" is 27",
                    "leaves a layer with full_attention",
                ],
            ),
            (
                json!({"altup_num_inputs": 1}),
                ["\"altup_num_inputs\" is 1", "from 2"],
            ),
            (
                json!({"altup_active_idx": 4}),
                ["\"altup_active_idx\" is 4", "from 0 to 3"],
            ),
            (
                json!({"activation_sparsity_pattern": 0.95}),
                ["\"activation_sparsity_pattern\" is 0.95", "list"],
            ),
            (
                json!({"activation_sparsity_pattern": [0.5]}),
                ["\"activation_sparsity_pattern\"", "each of 30 layers"],
            ),
            (
                json!({"activation_sparsity_pattern": vec![1.0; 30]}),
                ["\"activation_sparsity_pattern\"", "below 1"],
            ),
            (
                json!({"laurel_rank": 0}),
                ["\"laurel_rank\" is 0", "from 1"],
            ),
            (
                json!({"hidden_size_per_layer_input": 0}),
                ["\"hidden_size_per_layer_input\" is 0", "from 1"],
            ),
            (
                json!({"use_bidirectional_attention": true}),
                ["use_bidirectional_attention = true", "causal"],
            ),
            (
                json!({"rope_scaling": {"rope_type": "wavy"}}),
                ["rope_scaling.rope_type = \"wavy\"", "linear"],
            ),
        ],
    );
    let missing = describe("gemma3n", &json!({"model_type": "gemma3n"}))
        .unwrap_err()
        .to_string();
    assert!(missing.contains("\"text_config\" is missing"), "{missing}");
    // The class's own default does not fit a model with fewer layers.
    let few = json!({"model_type": "gemma3n_text", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 10});
    let error = describe("gemma3n", &few).unwrap_err().to_string();
    assert!(
        error.contains("\"num_kv_shared_layers\" is missing") && error.contains("default is 15"),
        "{error}"
    );
}

#[test]
fn bad_values_of_gemma4_are_named() {
    let moe = json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8});
    refused(
        "gemma4",
        &with(&small(), moe),
        &[
            (
                json!({"top_k_experts": 5}),
                ["\"top_k_experts\" is 5", "from 1 to 4"],
            ),
            (
                json!({"num_experts": null}),
                ["\"num_experts\" is null", "an integer"],
            ),
            (
                json!({"moe_intermediate_size": 0}),
                ["\"moe_intermediate_size\" is 0", "from 1"],
            ),
            (
                json!({"enable_moe_block": "yes"}),
                ["\"enable_moe_block\" is \"yes\"", "true or false"],
            ),
            (
                json!({"global_head_dim": 15}),
                ["\"global_head_dim\" is 15", "an even number"],
            ),
            (
                json!({"num_kv_shared_layers": 5}),
                ["\"num_kv_shared_layers\" is 5", "from 0 to 4"],
            ),
            (
                json!({"num_kv_shared_layers": 3}),
                [
                    "\"num_kv_shared_layers\" is 3",
                    "leaves a layer with full_attention",
                ],
            ),
            (
                json!({"attention_k_eq_v": true, "num_global_key_value_heads": 3}),
                [
                    "\"num_attention_heads\" is 4",
                    "num_global_key_value_heads (3)",
                ],
            ),
            (
                json!({"vocab_size_per_layer_input": 5}),
                [
                    "\"vocab_size_per_layer_input\" is 5",
                    "at least vocab_size (262144)",
                ],
            ),
            (
                json!({"per_layer_config": {"2": {"head_dim": 0}}}),
                ["head_dim\" is 0", "from 2"],
            ),
            (
                json!({"per_layer_config": {"2": {"num_key_value_heads": 3}}}),
                [
                    "num_key_value_heads\" is 3",
                    "a divisor of num_attention_heads (4)",
                ],
            ),
            (
                json!({"per_layer_config": {"2": {"hidden_size": 3}}}),
                ["hidden_size = 3", "differ between layers"],
            ),
            (
                json!({"layer_types": vec!["sliding_attention"; 5]}),
                ["layer_types", "the last layer is full_attention"],
            ),
            (
                json!({"layer_types": vec!["linear_attention"; 5]}),
                ["linear_attention", "known types"],
            ),
            (
                json!({"use_bidirectional_attention": "all"}),
                ["use_bidirectional_attention = \"all\"", "causal"],
            ),
            (
                json!({"rope_parameters": {"full_attention": {}}}),
                ["\"rope_parameters\"", "sliding_attention"],
            ),
            (
                json!({"rope_parameters": {"sliding_attention": {}, "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}}),
                ["partial_rotary_factor\" is 2", "from 0 to 1"],
            ),
            (
                json!({"final_logit_softcapping": "30"}),
                ["\"final_logit_softcapping\" is \"30\"", "a number"],
            ),
            (
                json!({"architectures": ["Gemma4TextModel"]}),
                ["Gemma4TextModel", "language head"],
            ),
        ],
    );
}

fn summary(arch: &str) -> Value {
    let slides = [true, true, false, true, false];
    let mut summary = json!({"general.architecture": arch, "tensors": {
        "token_embd.weight": {"shape": [96, 32], "type": "Q8_0"},
        "per_layer_token_embd.weight": {"shape": [96, 160], "type": "Q4_0"},
        "blk.0.laurel_l.weight": {"shape": [4, 32], "type": "F16"},
        "blk.2.attn_v.weight": {"shape": [16, 32], "type": "F16"}}});
    for (key, value) in [
        ("context_length", json!(256)),
        ("embedding_length", json!(32)),
        ("block_count", json!(5)),
        ("feed_forward_length", json!([48, 48, 48, 96, 96])),
        ("attention.head_count", json!(4)),
        ("attention.head_count_kv", json!([2, 2, 1, 2, 1])),
        ("attention.key_length", json!(16)),
        ("attention.key_length_swa", json!(8)),
        ("attention.layer_norm_rms_epsilon", json!(1e-6)),
        ("attention.sliding_window", json!(9)),
        ("attention.sliding_window_pattern", json!(slides)),
        ("attention.shared_kv_layers", json!(2)),
        ("embedding_length_per_layer_input", json!(32)),
    ] {
        summary[format!("{arch}.{key}")] = value;
    }
    summary
}

#[test]
fn gguf_of_gemma4_gives_the_same_layers() {
    let adapter = adapt("gemma4", summary("gemma4")).unwrap();
    let config = Value::Object(adapter.config);
    assert_eq!(config["attention_k_eq_v"], false);
    assert_eq!(config["use_double_wide_mlp"], true);
    let desc = describe("gemma4", &config).unwrap();
    assert_eq!(kinds(&desc), "ssf--");
    let one = CacheDesc::Dense {
        kv_heads: 1,
        k_dim: 16,
        v_dim: 16,
    };
    assert_eq!(desc.layers[2], one);
    for (changes, part) in [
        (
            json!({"gemma4.feed_forward_length": [48, 48, 96, 96, 96]}),
            "feed_forward_length",
        ),
        (
            json!({"gemma4.feed_forward_length": [48]}),
            "each of 5 layers",
        ),
        (
            json!({"gemma4.attention.value_length": 8}),
            "attention.value_length = 8",
        ),
        (
            json!({"gemma4.attention.sliding_window_pattern": 6}),
            "true or false for each",
        ),
        (
            json!({"gemma4.attention.head_count_kv": "2"}),
            "head_count_kv",
        ),
        (json!({"gemma4.expert_count": 4}), "expert_used_count"),
    ] {
        let error = adapt("gemma4", with(&summary("gemma4"), changes))
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn gguf_of_gemma3n_has_deviations_for_shares() {
    let scales = json!([1.644_853_6, "-Infinity", 0.0, "-Infinity", "-Infinity"]);
    let file = with(
        &summary("gemma3n"),
        json!({"gemma3n.activation_sparsity_scale": scales,
        "gemma3n.attention.head_count_kv": 2}),
    );
    let config = Value::Object(adapt("gemma3n", file.clone()).unwrap().config);
    let shares = config["activation_sparsity_pattern"].as_array().unwrap();
    assert!((shares[0].as_f64().unwrap() - 0.95).abs() < 1e-7);
    assert_eq!(shares[1..3], [json!(0.0), json!(0.5)]);
    assert_eq!(kinds(&describe("gemma3n", &config).unwrap()), "ssf--");
    for (changes, part) in [
        (
            json!({"gemma3n.activation_sparsity_scale": [1.0]}),
            "each of 5 layers",
        ),
        (
            json!({"gemma3n.activation_sparsity_scale": ["NaN", 1, 1, 1, 1]}),
            "NaN",
        ),
        (
            json!({"gemma3n.attention.sliding_window_pattern": 6}),
            "sliding_window_pattern = 6",
        ),
        (json!({"gemma3n.altup.num_inputs": 0}), "altup.num_inputs"),
    ] {
        let error = adapt("gemma3n", with(&file, changes))
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
    }
}
