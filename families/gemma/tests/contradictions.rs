//! Configurations whose keys contradict each other: refused where the model is described, by key, value and
//! what is allowed. Keys that repeat each other are fine.

#![allow(clippy::unwrap_used, reason = "a failure in a test is a failed test")]

use mlxcel_family_gemma as _;
use mlxcel_sdk::testkit::FamilyUnderTest;
use serde_json::{Value, json};

/// Five layers, of which the last two read the caches of layers 1 and 2.
fn shared(arch: &str) -> Value {
    json!({
        "model_type": arch, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
        "max_position_embeddings": 128, "sliding_window": 5, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
            "full_attention"],
        "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
        "altup_num_inputs": 3, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
    })
}

fn describe(mut config: Value, changes: &Value) -> Result<(), String> {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let family = FamilyUnderTest::this_plugin(config);
    family.map(|_| ()).map_err(|error| error.to_string())
}

/// The refusals, one a line.
fn refusals(arch: &str, changes: &[Value]) -> String {
    let refusal = |changes: &Value| match describe(shared(arch), changes) {
        Ok(()) => format!("accepted: {changes}"),
        Err(message) => message,
    };
    changes.iter().map(refusal).collect::<Vec<_>>().join("\n")
}

/// Rotary settings of both kinds of layer, as transformers 5 writes them.
fn nested() -> Value {
    json!({"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})
}

#[test]
fn rotary_settings_in_both_spellings_are_fine_where_they_agree() {
    let older = json!({"rope_parameters": nested(), "rope_theta": 1000000, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8}});
    for arch in ["gemma3_text", "gemma3n_text", "gemma4_text"] {
        assert_eq!(describe(shared(arch), &older), Ok(()), "{arch}");
    }
    let class = json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4});
    assert_eq!(describe(shared("gemma4_text"), &class), Ok(()));
}

#[test]
fn rotary_settings_that_contradict_each_other_are_refused() {
    let beside = |mut changes: Value| {
        changes["rope_parameters"] = nested();
        changes
    };
    let changes = [
        beside(json!({"rope_theta": 5e5})),
        beside(json!({"rope_local_base_freq": 1e5})),
        beside(json!({"rope_scaling": {"rope_type": "linear", "factor": 4.0}})),
        beside(json!({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}})),
        beside(json!({"rope_scaling": {"factor": 8.0, "beta_fast": 32}})),
    ];
    insta::assert_snapshot!(refusals("gemma3_text", &changes), @r#"
    describe: config key "rope_theta" is 500000.0: expected 1000000, as rope_parameters.full_attention.rope_theta says, or only one of the two
    describe: config key "rope_local_base_freq" is 100000.0: expected 10000, as rope_parameters.sliding_attention.rope_theta says, or only one of the two
    describe: config key "rope_scaling" is {"rope_type":"linear","factor":4.0}: expected what rope_parameters.full_attention.factor says (8.0), or only one of the two
    describe: config key "rope_scaling" is {"rope_type":"yarn","factor":8.0}: expected what rope_parameters.full_attention.rope_type says ("linear"), or only one of the two
    describe: config key "rope_scaling" is {"factor":8.0,"beta_fast":32}: expected what rope_parameters.full_attention.beta_fast says (missing), or only one of the two
    "#);
    for arch in ["gemma3n_text", "gemma4_text"] {
        for changes in &changes {
            assert!(
                describe(shared(arch), changes).is_err(),
                "{arch}: {changes}"
            );
        }
    }
    // gemma4 has no older spelling: what stands there alone is not what its class computes.
    let alone = [
        json!({"rope_theta": 5e5}),
        json!({"rope_local_base_freq": 1e5}),
        json!({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ];
    insta::assert_snapshot!(refusals("gemma4_text", &alone), @r#"
    describe: config key "rope_theta" is 500000.0: expected 1000000, the base of full_attention in rope_parameters, or no such key
    describe: config key "rope_local_base_freq" is 100000.0: expected 10000, the base of sliding_attention in rope_parameters, or no such key
    describe: config key "rope_scaling" is {"rope_type":"linear","factor":4.0}: expected settings of full_attention in rope_parameters, where this architecture has them
    "#);
}

#[test]
fn heads_by_layer_that_fit_each_other_are_fine() {
    for changes in [
        json!({"global_head_dim": 16}),
        json!({"per_layer_config": {"2": {"head_dim": 16}, "4": {"head_dim": 16}}}),
        json!({"per_layer_config": {"2": {"head_dim": 16}, "4": {"head_dim": 16}}, "global_head_dim": 16}),
        json!({"per_layer_config": {"0": {"num_key_value_heads": 4}}}),
        json!({"per_layer_config": {"0": {"head_dim": 12}, "1": {"head_dim": 12}, "3": {"head_dim": 12}}}),
        json!({"per_layer_config": {"2": {"num_key_value_heads": 1}, "4": {"num_key_value_heads": 1}},
            "num_global_key_value_heads": 1, "attention_k_eq_v": true}),
        json!({"per_layer_config": {}}),
    ] {
        let config = describe(shared("gemma4_text"), &changes);
        assert_eq!(config, Ok(()), "{changes}");
    }
}

/// Heads of a sliding layer may have another width than `head_dim`, with a rotary embedding that fits.
#[test]
fn heads_by_layer_keep_the_rules() {
    let mut config = shared("gemma4_text");
    config["per_layer_config"] = json!({"0": {"head_dim": 12}, "1": {"head_dim": 12, "num_key_value_heads": 1},
        "2": {"head_dim": 16}, "3": {"head_dim": 12, "num_key_value_heads": 1}, "4": {"head_dim": 16}});
    let family = FamilyUnderTest::this_plugin(config).and_then(|family| family.filled(1));
    family.unwrap().verdict().unwrap();
}

#[test]
fn heads_by_layer_that_do_not_fit_are_refused() {
    let said = refusals(
        "gemma4_text",
        &[
            json!({"per_layer_config": {"2": {"head_dim": 16}}}),
            json!({"per_layer_config": {"2": {"head_dim": 16}, "4": {"head_dim": 32}}}),
            json!({"per_layer_config": {"1": {"num_key_value_heads": 1}}}),
            json!({"per_layer_config": {"3": {"num_key_value_heads": 4}}}),
            json!({"per_layer_config": {"0": {"head_dim": 12}}}),
            json!({"per_layer_config": {"4": {"head_dim": 9}}}),
            json!({"per_layer_config": {"4": {"num_key_value_heads": 3}}}),
            json!({"per_layer_config": {"4": {"intermediate_size": 3}}}),
            json!({"per_layer_config": {"5": {"head_dim": 16}}}),
            json!({"per_layer_config": {"full_attention": {"head_dim": 16}}}),
            json!({"per_layer_config": {"-1": {"head_dim": 16}}}),
            json!({"per_layer_config": {"4": {"head_dim": 8}, "04": {"head_dim": 8}}}),
            json!({"per_layer_config": {"4": 16}}),
            json!({"per_layer_config": [{"head_dim": 16}]}),
            json!({"per_layer_config": {"2": {"head_dim": 16}, "4": {"head_dim": 16}}, "global_head_dim": 32}),
            json!({"per_layer_config": {}, "global_head_dim": 16}),
            json!({"per_layer_config": {"2": {"num_key_value_heads": 1}, "4": {"num_key_value_heads": 1}},
                "num_global_key_value_heads": 4, "attention_k_eq_v": true}),
            json!({"global_head_dim": 15}),
            json!({"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention",
                "sliding_attention"]}),
            json!({"layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention",
                "full_attention"]}),
        ],
    );
    insta::assert_snapshot!(said, @r#"
    describe: config key "per_layer_config.4" is missing: expected head_dim 16 and num_key_value_heads 2, as the layer reads the cache of layer 2 (it has 8 and 2)
    describe: config key "per_layer_config.4" is {"head_dim":32}: expected head_dim 16 and num_key_value_heads 2, as the layer reads the cache of layer 2 (it has 32 and 2)
    describe: config key "per_layer_config.3" is missing: expected head_dim 8 and num_key_value_heads 1, as the layer reads the cache of layer 1 (it has 8 and 2)
    describe: config key "per_layer_config.3" is {"num_key_value_heads":4}: expected head_dim 8 and num_key_value_heads 2, as the layer reads the cache of layer 1 (it has 8 and 4)
    describe: config key "per_layer_config.1" is missing: expected head_dim 12 as layer 0, as layers with sliding_attention share a rotary embedding (it has 8)
    describe: config key "per_layer_config.4.head_dim" is 9: expected an even number, as halves of a head are rotated
    describe: config key "per_layer_config.4.num_key_value_heads" is 3: expected a divisor of num_attention_heads (4)
    describe: per_layer_config.4.intermediate_size = 3 is not supported by this plugin: head_dim and num_key_value_heads differ between layers
    describe: config key "per_layer_config.5" is {"head_dim":16}: expected no such key: layers are 0 to 4
    describe: config key "per_layer_config.full_attention" is {"head_dim":16}: expected no such key: layers are 0 to 4
    describe: config key "per_layer_config.-1" is {"head_dim":16}: expected no such key: layers are 0 to 4
    describe: config key "per_layer_config.04" is {"head_dim":8}: expected one entry for layer 4
    describe: config key "per_layer_config.4" is 16: expected an object
    describe: config key "per_layer_config" is [{"head_dim":16}]: expected an object
    describe: config key "global_head_dim" is 32: expected 16, as layer 2 has by per_layer_config beside it, or only one of the two
    describe: config key "global_head_dim" is 16: expected 8, as layer 2 has by per_layer_config beside it, or only one of the two
    describe: config key "num_global_key_value_heads" is 4: expected 1, as layer 2 has by per_layer_config beside it, or only one of the two
    describe: config key "global_head_dim" is 15: expected an even number, as halves of a head are rotated
    describe: layer_types[4] = "sliding_attention" is not supported by this plugin: the last layer is full_attention
    describe: config key "num_kv_shared_layers" is 2: expected a number that leaves a layer with sliding_attention before the layers that share
    "#);
}

#[test]
fn heads_by_layer_are_gemma4s() {
    for arch in ["gemma", "gemma2", "gemma3_text", "gemma3n_text"] {
        let none = json!({"per_layer_config": {}, "layer_types": null, "num_kv_shared_layers": 0});
        assert_eq!(describe(shared(arch), &none), Ok(()), "{arch}");
        let one = json!({"per_layer_config": {"2": {"head_dim": 16}}, "layer_types": null});
        let said = describe(shared(arch), &one).unwrap_err();
        let parts = ["per_layer_config = ", "head_dim", "alike in all layers"];
        assert!(
            parts.iter().all(|part| said.contains(part)),
            "{arch}: {said}"
        );
    }
}

#[test]
fn layers_that_slide_and_do_not_are_refused() {
    let full = json!(vec!["full_attention"; 5]);
    assert_eq!(
        describe(shared("gemma"), &json!({"layer_types": full})),
        Ok(())
    );
    // transformers writes the pattern of its class beside any list, and follows the list.
    let beside = json!({"sliding_window_pattern": 2});
    assert_eq!(describe(shared("gemma3_text"), &beside), Ok(()));
    let said = [
        refusals("gemma", &[json!({})]),
        refusals(
            "gemma3n_text",
            &[
                json!({"num_kv_shared_layers": 3}),
                json!({"num_kv_shared_layers": 5}),
                json!({"layer_types": ["full_attention"]}),
            ],
        ),
    ];
    insta::assert_snapshot!(said.join("\n"), @r#"
    describe: layer_types[0] = "sliding_attention" is not supported by this plugin: layers of this architecture are all full_attention
    describe: config key "num_kv_shared_layers" is 3: expected a number that leaves a layer with full_attention before the layers that share
    describe: config key "num_kv_shared_layers" is 5: expected an integer from 0 to 4
    describe: config key "layer_types" is ["full_attention"]: expected one entry for each of 5 layers, not 1
    "#);
}
