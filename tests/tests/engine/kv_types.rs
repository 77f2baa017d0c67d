//! Caches in half and quantised types beside f32 activations, with layers of every kind that families describe: on tiny
//! checkpoints with the cpu plugin, and through the server with a real model.

use mlxcel::engine::{KvType, KvTypes, LoadOptions};
use mlxcel::plugin::DType;
use mlxcel_tests::golden::{distance, folder, golden, ids};
use mlxcel_tests::server::Server;
use mlxcel_tests::tiny::{Kind, options, start};
use serde_json::json;

/// Logits after every prompt of a checkpoint's golden data, and bytes of keys and values.
fn scores(kind: Kind, kv_types: KvTypes) -> (Vec<Vec<f32>>, usize) {
    let options = LoadOptions {
        dtype: Some(DType::F32),
        kv_types,
        threads: 1,
        ..LoadOptions::default()
    };
    let engine = start(kind, options).unwrap();
    let golden = golden(&folder(kind.0, kind.1));
    let prompts = golden["prompts"].as_array().unwrap();
    let score = |prompt: &serde_json::Value| engine.score(ids(&prompt["ids"])).unwrap();
    let scores = prompts.iter().map(score).collect();
    // Figures are those of the last step once the engine has taken another command.
    engine.clear_prefix_cache().unwrap();
    (scores, engine.figures().kv_bytes)
}

#[test]
fn every_kind_of_layer_takes_half_caches() {
    for (family, variant) in [
        ("llama", "llama-gqa"),
        ("llama", "mistral-window"),
        // Soft caps; layers that use another's keys.
        ("gemma", "gemma2"),
        ("gemma", "gemma3n"),
        ("gemma", "gemma4"),
        // Latent keys; keys that are chosen; keys of several positions in one.
        ("deepseek", "v3"),
        ("deepseek", "v32"),
        ("deepseek", "v4"),
    ] {
        let (exact, exact_bytes) = scores((family, variant), KvTypes::both(DType::F32));
        for (dtype, limit) in [(DType::F16, 2e-3), (DType::BF16, 5e-2)] {
            let (found, bytes) = scores((family, variant), KvTypes::both(dtype));
            let off = found.iter().zip(&exact).map(|(a, b)| distance(a, b));
            let off = off.fold(0.0, f32::max);
            println!("{variant} in {}: {off:.1e}", dtype.name());
            assert!(
                off > 0.0 && off < limit,
                "{variant} in {}: {off}",
                dtype.name()
            );
            assert!(bytes < exact_bytes, "{variant}: {bytes} of {exact_bytes}");
        }
    }
}

#[test]
fn layers_with_heads_take_quantised_caches_of_the_size_that_the_formula_says() {
    for (family, variant) in [
        ("llama", "llama-gqa"),
        ("llama", "mistral-window"),
        ("llama", "llama4"),
        ("gemma", "gemma2"),
        ("gemma", "gemma3n"),
        ("gemma", "gemma4"),
        ("qwen", "qwen3-next"),
    ] {
        let (exact, exact_bytes) = scores((family, variant), KvTypes::both(DType::F32));
        for (kv_type, limit) in [(KvType::Q8_0, 2e-2), (KvType::Q4_0, 0.3)] {
            let (found, bytes) = scores((family, variant), KvTypes::both(kv_type));
            let off = found.iter().zip(&exact).map(|(a, b)| distance(a, b));
            let off = off.fold(0.0, f32::max);
            let name = kv_type.name();
            assert!(off > 0.0 && off < limit, "{variant} in {name}: {off}");
            assert!(bytes < exact_bytes, "{variant}: {bytes} of {exact_bytes}");
        }
    }
}

#[test]
fn half_activations_have_quantised_caches_too() {
    let kind = ("llama", "llama-gqa");
    let prompts = golden(&folder(kind.0, kind.1));
    let prompt = ids(&prompts["prompts"][0]["ids"]);
    let score = |dtype, kv_types| {
        let options = LoadOptions {
            dtype: Some(dtype),
            kv_types,
            ..options(1)
        };
        start(kind, options).unwrap().score(prompt.clone()).unwrap()
    };
    let exact = score(DType::F32, KvTypes::both(DType::F32));
    for (kv_type, limit) in [(KvType::Q8_0, 3e-2), (KvType::Q4_0, 0.3)] {
        let off = distance(&score(DType::F16, KvTypes::both(kv_type)), &exact);
        assert!(off < limit, "{}: {off}", kv_type.name());
    }
}

#[test]
fn latent_keys_are_not_quantised_and_say_so() {
    let options = LoadOptions {
        kv_types: KvTypes::both(KvType::Q8_0),
        ..options(1)
    };
    let error = start(("deepseek", "v3"), options)
        .err()
        .unwrap()
        .to_string();
    insta::assert_snapshot!(error, @"deepseek_v3 cannot keep its caches in q8_0: layer 0 has latent keys; leave --cache-type-k and --cache-type-v out, or ask for a float type");
}

#[test]
fn a_server_says_in_which_type_it_keeps_keys_and_values() {
    let body = json!({"prompt": "The capital of France is", "temperature": 0, "n_predict": 12});
    let ask = |flags: &[&str]| {
        let server = Server::real(flags);
        let answer = server.post("/completion", &body).success();
        let props = server.get("/props").success();
        (answer["content"].clone(), props["kv_cache_mode"].clone())
    };
    let (text, kept) = ask(&["--cache-type-k", "f32", "--cache-type-v", "f32"]);
    assert_eq!(kept, "f32");
    assert_eq!(ask(&["--precision", "exact"]), (text.clone(), json!("f32")));
    let (half_text, half_kept) = ask(&[]);
    assert_eq!((half_kept, half_text), (json!("f16"), text.clone()));
    let (q8_text, q8_kept) = ask(&["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]);
    assert_eq!((q8_kept, q8_text), (json!("q8_0"), text));
}
