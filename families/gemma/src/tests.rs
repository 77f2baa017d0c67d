//! Configurations and GGUF summaries, good and bad, through the registered architectures.

use mlxcel_sdk::arch::find;
use mlxcel_sdk::{CacheDesc, Config, GgufAdapter, GgufSummary, ModelDesc, Probe, Result};
use serde_json::{Value, json};

pub(crate) fn describe(arch: &str, config: &Value) -> Result<ModelDesc> {
    let entry = find(arch).unwrap();
    entry
        .implementation
        .describe(&Config::root(config).unwrap())
}

pub(crate) fn probe(arch: &str, config: &Value) -> Probe {
    let entry = find(arch).unwrap();
    entry.implementation.probe(&Config::root(config).unwrap())
}

pub(crate) fn adapt(arch: &str, summary: Value) -> Result<GgufAdapter> {
    let summary: GgufSummary = serde_json::from_value(summary).unwrap();
    find(arch).unwrap().implementation.adapt_gguf(&summary)
}

pub(crate) fn with(base: &Value, changes: Value) -> Value {
    let mut config = base.clone();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

/// `text_config` of the published Gemma 3 4B, which leaves most keys out.
fn sparse_text() -> Value {
    json!({"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024})
}

fn windows(desc: &ModelDesc) -> Vec<usize> {
    let window = |layer: &CacheDesc| match layer {
        CacheDesc::Window { window, .. } => *window,
        _ => 0,
    };
    desc.layers.iter().map(window).collect()
}

#[test]
fn sparse_published_config_takes_the_defaults_of_its_class() {
    let config = json!({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": sparse_text(), "vision_config": {"hidden_size": 1152}});
    let desc = describe("gemma3", &config).unwrap();
    assert_eq!((desc.vocab_size, desc.context_length), (262_208, 131_072));
    let full = CacheDesc::Dense {
        kv_heads: 4,
        k_dim: 256,
        v_dim: 256,
    };
    assert_eq!(desc.layers[5], full);
    assert_eq!(windows(&desc)[..7], [1024, 1024, 1024, 1024, 1024, 0, 1024]);
    assert_eq!(probe("gemma3", &config).score, 50);
    let alone = json!({"model_type": "gemma3", "text_config": sparse_text()});
    assert_eq!(probe("gemma3", &alone).score, 100);
}

#[test]
fn gemma2_slides_in_every_other_layer_from_the_first() {
    let config = json!({"model_type": "gemma2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3});
    assert_eq!(
        windows(&describe("gemma2", &config).unwrap()),
        [4096, 0, 4096]
    );
    let typed = with(
        &config,
        json!({"layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "sliding_window": 7}),
    );
    assert_eq!(windows(&describe("gemma2", &typed).unwrap()), [0, 0, 7]);
}

#[test]
fn bad_values_are_named_with_what_is_allowed() {
    let base = json!({"model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8});
    describe("gemma3", &base).unwrap();
    for (changes, parts) in [
        (
            json!({"hidden_size": null}),
            ["\"hidden_size\" is null", "from 1 to"],
        ),
        (
            json!({"hidden_size": "32"}),
            ["\"hidden_size\" is \"32\"", "an integer"],
        ),
        (
            json!({"num_hidden_layers": 0}),
            ["\"num_hidden_layers\" is 0", "from 1 to 4096"],
        ),
        (
            json!({"num_hidden_layers": 1e9}),
            ["\"num_hidden_layers\"", "from 1 to 4096"],
        ),
        (
            json!({"num_key_value_heads": 3}),
            [
                "\"num_attention_heads\" is 4",
                "a multiple of num_key_value_heads (3)",
            ],
        ),
        (
            json!({"head_dim": 7}),
            ["\"head_dim\" is 7", "an even number"],
        ),
        (
            json!({"rms_norm_eps": -1}),
            ["\"rms_norm_eps\"", "from 0 to 1"],
        ),
        (
            json!({"query_pre_attn_scalar": 0}),
            ["\"query_pre_attn_scalar\" is 0", "a number from"],
        ),
        (
            json!({"final_logit_softcapping": 0.0}),
            ["\"final_logit_softcapping\" is 0.0", "a number from"],
        ),
        (
            json!({"attn_logit_softcapping": 50.0}),
            ["attn_logit_softcapping = 50.0", "no soft cap"],
        ),
        (
            json!({"hidden_activation": "mish"}),
            ["hidden_activation = \"mish\"", "gelu_pytorch_tanh"],
        ),
        (
            json!({"sliding_window": null}),
            ["\"sliding_window\" is null", "sliding_attention"],
        ),
        (
            json!({"sliding_window": 0}),
            ["\"sliding_window\" is 0", "from 1"],
        ),
        (
            json!({"sliding_window_pattern": 0}),
            ["\"sliding_window_pattern\" is 0", "from 1"],
        ),
        (
            json!({"layer_types": ["full_attention"]}),
            ["\"layer_types\"", "one entry for each of 2 layers, not 1"],
        ),
        (
            json!({"layer_types": ["full_attention", "linear_attention"]}),
            ["\"linear_attention\"", "sliding_attention"],
        ),
        (
            json!({"rope_parameters": {"rope_theta": 1e4}}),
            ["\"rope_parameters\"", "full_attention"],
        ),
        (
            json!({"rope_scaling": {"rope_type": "wavy"}}),
            ["rope_scaling.rope_type = \"wavy\"", "linear"],
        ),
        (
            json!({"rope_local_base_freq": "10000"}),
            ["\"rope_local_base_freq\" is \"10000\"", "a number"],
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            ["partial_rotary_factor = 0.5", "all features"],
        ),
        (
            json!({"tie_word_embeddings": 1}),
            ["\"tie_word_embeddings\" is 1", "true or false"],
        ),
    ] {
        let error = describe("gemma3", &with(&base, changes))
            .unwrap_err()
            .to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let error = describe("gemma3", &json!({"model_type": "gemma3"}))
        .unwrap_err()
        .to_string();
    assert!(error.contains("\"text_config\" is missing"), "{error}");
}

#[test]
fn variants_that_are_not_implemented_are_refused_by_name() {
    for (arch, changes, part) in [
        (
            "gemma",
            json!({"use_bidirectional_attention": true}),
            "use_bidirectional_attention = true",
        ),
        (
            "gemma3",
            json!({"use_bidirectional_attention": true}),
            "use_bidirectional_attention = true",
        ),
        (
            "gemma3",
            json!({"architectures": ["Gemma3TextModel"]}),
            "Gemma3TextModel",
        ),
        (
            "gemma2",
            json!({"architectures": ["Gemma2ForSequenceClassification"]}),
            "Gemma2ForSequenceClassification",
        ),
    ] {
        let config = with(&json!({"model_type": arch}), changes);
        let found = probe(arch, &config);
        assert!(found.score == 0 && found.why.contains(part), "{found:?}");
        assert!(
            describe(arch, &config)
                .unwrap_err()
                .to_string()
                .contains(part)
        );
    }
}

#[test]
fn the_first_generation_means_the_approximation_when_it_says_gelu() {
    let base = json!({"model_type": "gemma", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2});
    for same in [
        json!({"hidden_act": "gelu"}),
        json!({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
        json!({"hidden_activation": "gelu_pytorch_tanh"}),
    ] {
        describe("gemma", &with(&base, same)).unwrap();
    }
    let differ = with(
        &base,
        json!({"hidden_act": "gelu", "hidden_activation": "relu"}),
    );
    let error = describe("gemma", &differ).unwrap_err().to_string();
    assert!(
        error.contains("\"hidden_activation\" is \"relu\""),
        "{error}"
    );
}

fn summary(arch: &str, n_layers: usize) -> Value {
    let mut summary = json!({"general.architecture": arch, "tensors": {"token_embd.weight": {"shape": [96, 5376], "type": "Q8_0"}}});
    for (key, value) in [
        ("context_length", json!(8192)),
        ("embedding_length", json!(5376)),
        ("block_count", json!(n_layers)),
        ("feed_forward_length", json!(64)),
        ("attention.head_count", json!(32)),
        ("attention.head_count_kv", json!(16)),
        ("attention.key_length", json!(128)),
        ("attention.value_length", json!(128)),
        ("attention.layer_norm_rms_epsilon", json!(1e-6)),
    ] {
        summary[format!("{arch}.{key}")] = value;
    }
    summary
}

#[test]
fn gguf_metadata_is_completed_by_the_constants_of_the_architecture() {
    for (arch, n_layers, divisor) in [
        ("gemma2", 2, 128),
        ("gemma2", 46, 168),
        ("gemma3", 2, 128),
        ("gemma3", 62, 168),
    ] {
        let adapter = adapt(arch, summary(arch, n_layers)).unwrap();
        assert_eq!(
            adapter.config["query_pre_attn_scalar"], divisor,
            "{arch} {n_layers}"
        );
    }
    let adapter = adapt("gemma", summary("gemma", 2)).unwrap();
    assert!(!adapter.config.contains_key("query_pre_attn_scalar"));

    let slides = |changes: Value| {
        let config = adapt("gemma3", with(&summary("gemma3", 7), changes))
            .unwrap()
            .config;
        windows(&describe("gemma3", &Value::Object(config)).unwrap())
    };
    assert_eq!(slides(json!({})), [0; 7]);
    assert_eq!(
        slides(json!({"gemma3.attention.sliding_window": 9})),
        [9, 9, 9, 9, 9, 0, 9]
    );
    let third =
        json!({"gemma3.attention.sliding_window": 9, "gemma3.attention.sliding_window_pattern": 3});
    assert_eq!(slides(third), [9, 9, 0, 9, 9, 0, 9]);
    let list = [true, false, false, false, false, false, false];
    let list = json!({"gemma3.attention.sliding_window": 9, "gemma3.attention.sliding_window_pattern": list});
    assert_eq!(slides(list), [9, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn gguf_norms_lose_the_one_that_the_converter_added() {
    let adapter = adapt("gemma3", summary("gemma3", 1)).unwrap();
    let changed: Vec<&str> = adapter
        .tensors
        .iter()
        .filter(|mapping| !mapping.ops.is_empty())
        .map(|mapping| mapping.from.as_str())
        .collect();
    let norms = [
        "attn_norm",
        "post_attention_norm",
        "ffn_norm",
        "post_ffw_norm",
        "attn_q_norm",
        "attn_k_norm",
    ];
    let mut expected = vec!["output_norm.weight".to_owned()];
    expected.extend(norms.iter().map(|name| format!("blk.0.{name}.weight")));
    assert_eq!(changed, expected);
    assert_eq!(adapter.tensors.len(), 1 + 1 + 7 + 6);
}

#[test]
fn gguf_metadata_that_does_not_fit_is_named() {
    for (changes, part) in [
        (json!({"gemma3.block_count": 0}), "block_count"),
        (
            json!({"gemma3.attention.value_length": 64}),
            "\"gemma3.attention.value_length\" is 64: expected 128",
        ),
        (
            json!({"gemma3.attention.key_length": "128"}),
            "gemma3.attention.key_length",
        ),
        (
            json!({"gemma3.attention.sliding_window": 9, "gemma3.attention.sliding_window_pattern": "six"}),
            "\"six\"",
        ),
        (json!({"tensors": {}}), "token_embd.weight"),
    ] {
        let error = adapt("gemma3", with(&summary("gemma3", 2), changes))
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
    }
}
