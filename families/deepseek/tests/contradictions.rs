//! Configurations whose keys contradict each other, or say what no reader follows: refused where the
//! model is described, by key, value and what is allowed. Keys that repeat each other are fine.

#![allow(clippy::unwrap_used, reason = "a failure in a test is a failed test")]

use mlxcel_family_deepseek as _;
use mlxcel_sdk::testkit::FamilyUnderTest;
use serde_json::{Value, json};

/// Three layers of a generation before the fourth.
fn earlier(arch: &str) -> Value {
    json!({
        "model_type": arch, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 128,
        "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "n_group": 2, "topk_group": 1,
        "index_n_heads": 4, "index_head_dim": 12, "index_topk": 6,
    })
}

/// Four layers of the fourth generation, as transformers saves them.
fn fourth() -> Value {
    json!({
        "model_type": "deepseek_v4", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "vocab_size": 64, "max_position_embeddings": 128, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 24,
        "partial_rotary_factor": 0.5, "o_groups": 2, "o_lora_rank": 12, "sliding_window": 5, "index_n_heads": 4,
        "index_head_dim": 12, "index_topk": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
            "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "rope_theta": 10000.0, "compress_rope_theta": 40000.0,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "compress": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16,
                "rope_theta": 40000.0, "partial_rotary_factor": 0.5},
        },
    })
}

fn describe(mut config: Value, changes: &Value) -> Result<(), String> {
    for (path, value) in changes.as_object().unwrap() {
        let (at, key) = path.rsplit_once('.').unwrap_or(("", path));
        let at = if at.is_empty() {
            at.to_owned()
        } else {
            format!("/{}", at.replace('.', "/"))
        };
        config.pointer_mut(&at).unwrap()[key] = value.clone();
    }
    let family = FamilyUnderTest::this_plugin(config);
    family.map(|_| ()).map_err(|error| error.to_string())
}

/// The refusals, one a line.
fn refusals(base: impl Fn() -> Value, changes: &[Value]) -> String {
    let refusal = |changes: &Value| match describe(base(), changes) {
        Ok(()) => format!("accepted: {changes}"),
        Err(message) => message,
    };
    changes.iter().map(refusal).collect::<Vec<_>>().join("\n")
}

#[test]
fn spellings_of_the_fourth_generation_that_say_the_same_are_fine() {
    for changes in [
        json!({}),
        json!({"compress_ratios": [0, 4, 128, 4]}),
        json!({"compress_ratios": [0, 4, 128, 4, 0]}),
        json!({"num_hash_layers": 1, "compress_rate_csa": 2, "compress_rate_hca": 4}),
        json!({"partial_rotary_factor": null}),
        json!({"qk_rope_head_dim": null}),
        json!({"num_local_experts": 4, "intermediate_size": 16}),
        json!({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16}}),
        json!({"rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16,
            "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
        json!({"rope_parameters": null}),
        json!({"per_layer_config": {}}),
    ] {
        assert_eq!(describe(fourth(), &changes), Ok(()), "{changes}");
    }
}

#[test]
fn spellings_of_the_fourth_generation_that_differ_are_refused() {
    let said = refusals(
        fourth,
        &[
            json!({"qk_rope_head_dim": 4}),
            json!({"partial_rotary_factor": 0.25}),
            json!({"qk_rope_head_dim": null, "partial_rotary_factor": 0.2}),
            json!({"rope_parameters.main.partial_rotary_factor": 0.25}),
            json!({"rope_parameters.compress.partial_rotary_factor": 1.0}),
            json!({"rope_theta": 5000}),
            json!({"rope_parameters.compress.rope_theta": 5000}),
            json!({"rope_parameters.compress": null}),
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 5000}}),
            json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
            json!({"rope_scaling": {"type": "yarn", "factor": 8}}),
            json!({"compress_ratios": [0, 4, 4, 4]}),
            json!({"compress_ratios": [0, 4, 128]}),
            json!({"compress_ratios": [0, 4, 128, 5]}),
            json!({"layer_types": ["sliding_attention"]}),
            json!({"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]}),
            json!({"compress_rate_csa": 4}),
            json!({"num_hash_layers": 3}),
            json!({"num_hash_layers": 0}),
            json!({"mlp_layer_types": ["moe"]}),
            json!({"mlp_layer_types": ["moe", "moe", "dense", "moe"]}),
            json!({"num_local_experts": 8}),
            json!({"intermediate_size": 48}),
            json!({"per_layer_config": {"0": {"head_dim": 8}}}),
        ],
    );
    insta::assert_snapshot!(said, @r#"
    describe: config key "qk_rope_head_dim" is 4: expected 8, as partial_rotary_factor (0.5) beside it makes of head_dim (16), or only one of the two
    describe: config key "qk_rope_head_dim" is 8: expected 4, as partial_rotary_factor (0.25) beside it makes of head_dim (16), or only one of the two
    describe: config key "partial_rotary_factor" is 0.2: expected a value that makes an even number of rotated features up to head_dim (16) (this gives 3)
    describe: config key "rope_parameters.main.partial_rotary_factor" is 0.25: expected a share of head_dim (16) that is the 8 rotated features of the model, or none
    describe: config key "rope_parameters.compress.partial_rotary_factor" is 1.0: expected a share of head_dim (16) that is the 8 rotated features of the model, or none
    describe: config key "rope_theta" is 5000: expected 10000, as rope_parameters.main.rope_theta says, or only one of the two
    describe: config key "compress_rope_theta" is 40000.0: expected 5000, as rope_parameters.compress.rope_theta says, or only one of the two
    describe: config key "rope_parameters.compress" is null: expected an object, as there is one for main
    describe: config key "rope_parameters.rope_theta" is 5000: expected 10000, the base of layers with a window alone, or none
    describe: config key "rope_parameters.partial_rotary_factor" is 0.25: expected a share of head_dim (16) that is the 8 rotated features of the model, or none
    describe: config key "rope_scaling" is {"type":"yarn","factor":8}: expected what rope_parameters.compress.factor says (4), or only one of the two
    describe: config key "compress_ratios" is [0,4,4,4]: expected 128 for layer 2, as layer_types beside it says, or only one of the two
    describe: config key "compress_ratios" is [0,4,128]: expected one entry for each of 4 layers, not 3
    describe: compress_ratios[3] = 5 is not supported by this plugin: known ratios are 0, 4 and 128
    describe: config key "layer_types" is ["sliding_attention"]: expected one entry for each of 4 layers, not 1
    describe: layer_types[1] = "full_attention" is not supported by this plugin: known types are sliding_attention, compressed_sparse_attention and heavily_compressed_attention
    describe: config key "compress_rate_csa" is 4: expected 2, as compress_rates beside it says, or only one of the two
    describe: config key "num_hash_layers" is 3: expected a number of first layers with which layer 1 is moe, as mlp_layer_types beside it says, or only one of the two
    describe: config key "num_hash_layers" is 0: expected a number of first layers with which layer 0 is hash_moe, as mlp_layer_types beside it says, or only one of the two
    describe: config key "mlp_layer_types" is ["moe"]: expected one entry for each of 4 layers, not 1
    describe: mlp_layer_types[2] = "dense" is not supported by this plugin: known types are hash_moe and moe
    describe: config key "num_local_experts" is 8: expected 4, as n_routed_experts beside it says, or only one of the two
    describe: config key "intermediate_size" is 48: expected 16, as moe_intermediate_size beside it says, or only one of the two
    describe: per_layer_config = {"0":{"head_dim":8}} is not supported by this plugin: layers of this architecture are alike but for their kinds
    "#);
}

#[test]
fn layers_of_earlier_generations_that_contradict_each_other_are_refused() {
    for arch in ["deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32"] {
        for changes in [
            json!({"mlp_layer_types": ["dense", "sparse", "sparse"]}),
            json!({"mlp_layer_types": ["dense", "dense", "sparse"], "first_k_dense_replace": 2}),
            json!({"mlp_layer_types": ["dense", "dense", "sparse"], "first_k_dense_replace": null}),
            json!({"mlp_layer_types": ["dense", "dense", "sparse"], "first_k_dense_replace": null,
                "moe_layer_freq": 2}),
        ] {
            assert_eq!(
                describe(earlier(arch), &changes),
                Ok(()),
                "{arch}: {changes}"
            );
        }
    }
    let said = refusals(
        || earlier("deepseek_v32"),
        &[
            json!({"mlp_layer_types": ["dense", "dense", "sparse"]}),
            json!({"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": null,
                "moe_layer_freq": 2}),
            json!({"mlp_layer_types": ["sparse"]}),
            json!({"mlp_layer_types": ["dense", "sparse", "moe"]}),
            json!({"layer_types": ["indexed_attention"]}),
            json!({"layer_types": ["indexed_attention", "indexed_attention", "full_attention"]}),
            json!({"rope_interleave": false}),
            json!({"qk_head_dim": 12}),
            json!({"per_layer_config": {"0": {"num_attention_heads": 8}}}),
        ],
    );
    insta::assert_snapshot!(said, @r#"
    describe: config key "first_k_dense_replace" is 1: expected a number with which layer 1 is dense, as mlp_layer_types beside it says, or only one of the two
    describe: config key "moe_layer_freq" is 2: expected a number with which layer 1 is sparse, as mlp_layer_types beside it says, or only one of the two
    describe: config key "mlp_layer_types" is ["sparse"]: expected one entry for each of 3 layers, not 1
    describe: mlp_layer_types[2] = "moe" is not supported by this plugin: known types are dense and sparse
    describe: config key "layer_types" is ["indexed_attention"]: expected one entry for each of 3 layers, not 1
    describe: layer_types[2] = "full_attention" is not supported by this plugin: layers of this architecture are all indexed_attention
    describe: rope_interleave = false is not supported by this plugin: this architecture rotates neighbours (true)
    describe: config key "qk_head_dim" is 12: expected 20, the sum of qk_nope_head_dim (12) and qk_rope_head_dim (8)
    describe: per_layer_config = {"0":{"num_attention_heads":8}} is not supported by this plugin: layers of this architecture are alike but for their kinds
    "#);
}

#[test]
fn what_earlier_generations_have_not_is_refused() {
    let same = json!({"qk_head_dim": 20, "rope_interleave": true});
    for arch in ["deepseek_v2", "deepseek_v3", "deepseek_v32"] {
        assert_eq!(describe(earlier(arch), &same), Ok(()), "{arch}");
        let said = describe(earlier(arch), &json!({"qk_head_dim": 24})).unwrap_err();
        assert!(
            said.contains("\"qk_head_dim\" is 24: expected 20"),
            "{said}"
        );
    }
    // The third generation rotates halves where the file says so.
    let halves = json!({"rope_interleave": false});
    assert_eq!(describe(earlier("deepseek_v3"), &halves), Ok(()));
    // transformers takes a null for false, where no key is true.
    for (key, arch) in [
        ("rope_interleave", "deepseek_v3"),
        ("norm_topk_prob", "deepseek_v3"),
        ("norm_topk_prob", "deepseek_v32"),
    ] {
        let said = describe(earlier(arch), &json!({ key: null })).unwrap_err();
        let parts = [&format!("\"{key}\" is null"), "true or false"];
        assert!(parts.iter().all(|part| said.contains(*part)), "{said}");
    }
    let said = describe(earlier("deepseek_v2"), &halves).unwrap_err();
    assert!(said.contains("rope_interleave = false"), "{said}");
    for arch in ["deepseek", "deepseek_v2", "deepseek_v3"] {
        for (types, part) in [
            (
                json!(["full_attention", "full_attention", "sliding_attention"]),
                "layer_types[2] = \"sliding_attention\"",
            ),
            (
                json!(["full_attention"]),
                "one entry for each of 3 layers, not 1",
            ),
        ] {
            let said = describe(earlier(arch), &json!({"layer_types": types})).unwrap_err();
            assert!(said.contains(part), "{arch}: {said}");
        }
    }
}
