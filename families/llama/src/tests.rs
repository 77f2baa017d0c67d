//! Configurations and GGUF summaries, good and bad, through the registered architectures.

use mlxcel_sdk::arch::find;
use mlxcel_sdk::{CacheDesc, Config, GgufAdapter, GgufSummary, ModelDesc, Result};
use serde_json::{Value, json};

fn describe(arch: &str, config: &Value) -> Result<ModelDesc> {
    let implementation = find(arch).unwrap().implementation;
    implementation.describe(&Config::root(config).unwrap())
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

fn base(model_type: &str) -> Value {
    json!({"model_type": model_type, "hidden_size": 64, "intermediate_size": 96,
        "intermediate_size_mlp": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100})
}

fn windows(desc: &ModelDesc) -> Vec<usize> {
    let window = |layer: &CacheDesc| match layer {
        CacheDesc::Window { window, .. } => *window,
        _ => 0,
    };
    desc.layers.iter().map(window).collect()
}

#[test]
fn chunks_of_llama4_follow_its_lists_and_intervals() {
    let of = |changes: Value| {
        windows(&describe("llama4", &with(&base("llama4_text"), &changes)).unwrap())
    };
    let chunk = json!({"attention_chunk_size": 8});
    assert_eq!(of(chunk.clone()), [8, 8, 8, 0]);
    // An empty list is no list, and a number is a switch: both are in published files.
    let published = json!({"no_rope_layers": [], "attn_temperature_tuning": 4});
    assert_eq!(of(with(&chunk, &published)), [8, 8, 8, 0]);
    assert_eq!(
        of(with(&chunk, &json!({"no_rope_layer_interval": 2}))),
        [8, 0, 8, 0]
    );
    assert_eq!(
        of(with(&chunk, &json!({"no_rope_layers": [0, 1, 1, 0]}))),
        [0, 8, 8, 0]
    );
    let types = json!({"layer_types": ["full_attention", "chunked_attention", "full_attention", "full_attention"]});
    assert_eq!(of(with(&chunk, &types)), [0, 8, 0, 0]);
    assert_eq!(of(json!({"attention_chunk_size": null})), [0; 4]);
    // Dense, as MobileLLM is: no expert is asked for.
    assert_eq!(
        of(json!({"moe_layers": [], "num_local_experts": 0})),
        [8192, 8192, 8192, 0]
    );
}

/// What a configuration leaves out is what the architecture's class has, and a null is none.
#[test]
fn what_is_left_out_is_the_classes() {
    let window = |change: Value| {
        let config = with(&base("mistral"), &change);
        let windows = windows(&describe("llama", &config).unwrap());
        windows[0]
    };
    assert_eq!(window(json!({})), 4096);
    assert_eq!(window(json!({"sliding_window": null})), 0);
    assert_eq!(window(json!({"sliding_window": 8})), 8);
    let chunk = |change: Value| {
        let config = with(&base("llama4_text"), &change);
        windows(&describe("llama4", &config).unwrap())[0]
    };
    assert_eq!(chunk(json!({})), 8192);
    assert_eq!(chunk(json!({"attention_chunk_size": null})), 0);
    for (arch, model_type, context) in [
        ("llama", "llama", 2048),
        ("llama", "mistral", 131_072),
        ("mixtral", "mixtral", 131_072),
        ("smollm3", "smollm3", 32_768),
        ("arcee", "arcee", 4096),
    ] {
        let mut config = base(model_type);
        config
            .as_object_mut()
            .unwrap()
            .remove("max_position_embeddings");
        let desc = describe(arch, &config).unwrap();
        assert_eq!(desc.context_length, context, "{model_type}");
    }
}

#[test]
fn the_text_part_may_be_nested_and_its_own_flag_wins() {
    let nested =
        |text: Value| json!({"model_type": "mistral3", "text_config": text, "vision_config": {}});
    let text = base("mistral");
    assert_eq!(
        describe("mistral3", &nested(text.clone()))
            .unwrap()
            .vocab_size,
        100
    );
    let windowed = with(&text, &json!({"sliding_window": 8}));
    assert_eq!(
        windows(&describe("mistral3", &nested(windowed)).unwrap()),
        [8; 4]
    );
    let llama4 = json!({"model_type": "llama4", "text_config": base("llama4_text")});
    assert_eq!(describe("llama4", &llama4).unwrap().layers.len(), 4);
}

#[test]
fn two_rounds_have_two_caches() {
    let desc = describe("iquestloopcoder", &base("iquestloopcoder")).unwrap();
    assert_eq!(windows(&desc), [0, 0, 0, 0, 64, 64, 64, 64]);
}

#[test]
fn what_is_not_implemented_or_wrong_is_named() {
    let block = |attention: Value, ffn: Value| json!({"attention": attention, "ffn": ffn});
    let whole = || json!({"ffn_mult": 2.5});
    let blocks = |first: Value| {
        let rest = block(json!({"no_op": true}), json!({"no_op": true}));
        json!({"block_configs": [first, rest, rest, rest]})
    };
    let cases = [
        ("mistral3", json!({"text_config": base("mistral4")})),
        ("mistral3", json!({"text_config": null})),
        ("ministral3", json!({})),
        (
            "ministral3",
            json!({"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}),
        ),
        (
            "ministral3",
            json!({"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": "big"}}),
        ),
        ("llama4", json!({"model_type": "llama4"})),
        ("llama4", json!({"moe_layers": [1, 4]})),
        ("llama4", json!({"no_rope_layers": [1, 1]})),
        (
            "llama4",
            json!({"num_local_experts": 2, "num_experts_per_tok": 3}),
        ),
        (
            "llama4",
            json!({"layer_types": ["chunked_attention", "full_attention", "full_attention", "full_attention"],
                "attention_chunk_size": null}),
        ),
        (
            "llama4",
            json!({"layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention"]}),
        ),
        ("llama4", json!({"attn_temperature_tuning": "on"})),
        ("llama4", json!({"floor_scale": 0})),
        ("nemotron-nas", json!({"block_configs": [1]})),
        ("nemotron-nas", json!({"block_configs": [{}]})),
        (
            "nemotron-nas",
            blocks(
                json!({"attention": {"no_op": true}, "ffn": whole(), "parallel_blocks": [{"no_op": false}]}),
            ),
        ),
        (
            "nemotron-nas",
            blocks(block(
                json!({"no_op": true}),
                json!({"ffn_mult": 2.5, "moe": {"num_local_experts": 4}}),
            )),
        ),
        (
            "nemotron-nas",
            blocks(block(
                json!({"no_op": true}),
                json!({"ffn_mult": 2.5, "gated": false}),
            )),
        ),
        (
            "nemotron-nas",
            blocks(block(
                json!({"no_op": true}),
                json!({"ffn_mult": 2.5, "hidden_act": "relu"}),
            )),
        ),
        (
            "llama4",
            json!({"model_type": "llama4", "text_config": with(&base("wavy"), &json!({}))}),
        ),
        (
            "mistral3",
            json!({"text_config": with(&base("mistral"), &json!({"layer_types": ["wavy", "wavy", "wavy", "wavy"]}))}),
        ),
        (
            "mistral3",
            json!({"text_config": with(&base("mistral"), &json!({"rope_parameters": {"partial_rotary_factor": 0.5}}))}),
        ),
        ("nemotron-nas", blocks(json!({"ffn": whole()}))),
        (
            "nemotron-nas",
            blocks(block(json!({"n_heads_in_group": 3}), whole())),
        ),
        (
            "nemotron-nas",
            blocks(block(json!({"n_heads_in_group": null}), whole())),
        ),
        (
            "nemotron-nas",
            blocks(block(
                json!({"n_heads_in_group": 2, "window_length": 8}),
                whole(),
            )),
        ),
        (
            "nemotron-nas",
            blocks(block(
                json!({"n_heads_in_group": 2}),
                json!({"ffn_mult": 0}),
            )),
        ),
        (
            "nemotron-nas",
            blocks(block(json!({"no_op": "yes"}), whole())),
        ),
        ("iquestcoder", json!({"clip_qkv": 8.0})),
        ("iquestcoder", json!({"use_sliding_window": true})),
        ("iquestloopcoder", json!({"loop_num": 3})),
        ("arcee", json!({"hidden_act": "silu"})),
        ("smollm3", json!({"no_rope_layers": [1]})),
    ];
    let messages = cases.map(|(arch, changes)| {
        let model_type = if arch == "llama4" {
            "llama4_text"
        } else {
            arch
        };
        let error =
            describe(arch, &with(&base(model_type), &changes)).expect_err(&changes.to_string());
        format!("{arch}: {error}")
    });
    insta::assert_snapshot!(messages.join("\n"), @r#"
    mistral3: text_config.model_type = "mistral4" is not supported by this plugin: text decoders of mistral3 are mistral and ministral3
    mistral3: config key "text_config" is null: expected an object with the decoder's settings
    ministral3: config key "rope_parameters" is missing: expected an object: without it the rotary embedding of this architecture is unknown
    ministral3: config key "rope_parameters.original_max_position_embeddings" is missing: expected a number from 1 to 1000000000
    ministral3: config key "rope_parameters.llama_4_scaling_beta" is "big": expected a number from 0 to 1000
    llama4: config key "text_config" is missing: expected an object with the decoder's settings
    llama4: config key "moe_layers" is [1,4]: expected layer numbers below 4, not 4
    llama4: config key "no_rope_layers" is [1,1]: expected one entry for each of 4 layers
    llama4: config key "num_experts_per_tok" is 3: expected at most the number of experts (2)
    llama4: config key "attention_chunk_size" is null: expected an integer, as layer_types has chunked_attention
    llama4: layer_types[3] = "sliding_attention" is not supported by this plugin: known types are full_attention and chunked_attention
    llama4: config key "attn_temperature_tuning" is "on": expected true or false
    llama4: config key "floor_scale" is 0: expected a number from 1 to 1000000000
    nemotron-nas: config key "block_configs" is [1]: expected a list of objects
    nemotron-nas: config key "block_configs" is [{}]: expected one object for each of 4 layers, not 1
    nemotron-nas: block_configs[0].parallel_blocks = [{"no_op":false}] is not supported by this plugin: known are attention, ffn; anything else must be null or false
    nemotron-nas: block_configs[0].ffn.moe = {"num_local_experts":4} is not supported by this plugin: known are intermediate_size, ffn_mult, gated, hidden_act; anything else must be null or false
    nemotron-nas: block_configs[0].ffn.gated = false is not supported by this plugin: feed-forward blocks here have a gate
    nemotron-nas: block_configs[0].ffn.hidden_act = "relu" is not supported by this plugin: all blocks have the model's hidden_act, silu
    llama4: text_config.model_type = "wavy" is not supported by this plugin: the known decoder is llama4_text or llama4
    mistral3: text_config.layer_types[0] = "wavy" is not supported by this plugin: known types are full_attention and sliding_attention
    mistral3: text_config.rope_parameters.partial_rotary_factor = 0.5 is not supported by this plugin: this line of models rotates all features of a head
    nemotron-nas: config key "block_configs[0].attention" is missing: expected an object
    nemotron-nas: config key "block_configs[0].attention.n_heads_in_group" is 3: expected an integer that divides num_attention_heads (4)
    nemotron-nas: config key "block_configs[0].attention.n_heads_in_group" is null: expected an integer that divides num_attention_heads (4)
    nemotron-nas: block_configs[0].attention.window_length = 8 is not supported by this plugin: known are n_heads_in_group; anything else must be null or false
    nemotron-nas: config key "block_configs[0].ffn.ffn_mult" is 0: expected a number from 0.001 to 1000
    nemotron-nas: config key "block_configs[0].attention.no_op" is "yes": expected true or false
    iquestcoder: clip_qkv = 8.0 is not supported by this plugin: queries, keys and values are not clipped here
    iquestcoder: use_sliding_window = true is not supported by this plugin: every layer sees the whole context
    iquestloopcoder: loop_num = 3 is not supported by this plugin: layers run exactly twice
    arcee: hidden_act = "silu" is not supported by this plugin: this architecture is known with relu2
    smollm3: config key "no_rope_layers" is [1]: expected one entry for each of 4 layers
    "#);
}

fn file(arch: &str, extra: Value) -> Value {
    let mut summary = json!({"general.architecture": arch, "tensors": {
        "token_embd.weight": {"shape": [100, 64], "type": "F16"},
        "output_norm.weight": {"shape": [64], "type": "F32"},
    }});
    let common = json!({"embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "context_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6, "attention.key_length": 16});
    for (key, value) in with(&common, &extra).as_object().unwrap() {
        summary[format!("{arch}.{key}")] = value.clone();
    }
    summary
}

#[test]
fn gguf_of_mistral3_has_a_temperature_or_none() {
    let plain = adapt("ministral3", file("mistral3", json!({}))).unwrap();
    assert!(describe("ministral3", &Value::Object(plain.config)).is_ok());
    let yarn = json!({"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.1});
    let adapter = adapt("ministral3", file("mistral3", yarn)).unwrap();
    let scaling = &adapter.config["rope_scaling"];
    assert_eq!(
        (&scaling["mscale"], &scaling["mscale_all_dim"]),
        (&json!(1.0), &json!(1.0))
    );
    assert_eq!(scaling["llama_4_scaling_beta"], json!(0.1));
    assert!(describe("ministral3", &Value::Object(adapter.config)).is_ok());
}

#[test]
fn gguf_files_that_mean_something_else_are_refused() {
    let experts = json!({"expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 32,
        "interleave_moe_layer_step": 1});
    let adapter = adapt("llama4", file("llama4", experts.clone())).unwrap();
    assert_eq!(adapter.config["attention_chunk_size"], json!(8192));
    assert!(describe("llama4", &Value::Object(adapter.config)).is_ok());
    let lists = json!({"attention.head_count": [4, 0], "attention.head_count_kv": [2, 0],
        "feed_forward_length": [96, 0]});
    let adapter = adapt("nemotron-nas", file("deci", lists.clone())).unwrap();
    let desc = describe("nemotron-nas", &Value::Object(adapter.config)).unwrap();
    assert_eq!(desc.layers.last(), Some(&CacheDesc::None));
    let refusals = [
        adapt(
            "llama4",
            file(
                "llama4",
                with(&experts, &json!({"attention.sliding_window": 0})),
            ),
        ),
        adapt("llama4", file("llama4", json!({}))),
        adapt(
            "nemotron-nas",
            file("deci", with(&lists, &json!({"attention.head_count": [4]}))),
        ),
        adapt(
            "nemotron-nas",
            file(
                "deci",
                with(&lists, &json!({"attention.head_count": [4, 2]})),
            ),
        ),
        adapt(
            "nemotron-nas",
            file(
                "deci",
                with(&lists, &json!({"attention.head_count_kv": [3, 0]})),
            ),
        ),
        adapt(
            "nemotron-nas",
            file(
                "deci",
                with(&lists, &json!({"feed_forward_length": "wide"})),
            ),
        ),
    ]
    .map(|refusal| refusal.unwrap_err().to_string());
    insta::assert_snapshot!(refusals.join("\n"), @r#"
    llama4.attention.sliding_window = 0 is not supported by this plugin: files without the key, whose chunk is 8192
    config key "llama4.expert_feed_forward_length" is missing: expected a number in the GGUF metadata
    config key "deci.attention.head_count" is [4]: expected an integer, or a list of 2 integers
    2 heads in layer 1 is not supported by this plugin: layers with 4 heads or none
    config key "deci.attention.head_count_kv" is 3: expected divisors of 4 heads
    config key "deci.feed_forward_length" is "wide": expected an integer, or a list of 2 integers
    "#);
}
