//! Caches in half types beside f32 activations, with layers of every kind that families describe: on tiny
//! checkpoints with the cpu plugin, and through the server with a real model.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure in a test is a failed test"
)]

use mlxcel::engine::{EngineHandle, KvTypes, LoadOptions, open_model, start_engine};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use mlxcel_tests::golden::{distance, folder, golden, ids};
use mlxcel_tests::server::Server;
use serde_json::json;

fn engine(family: &str, variant: &str, kv_types: KvTypes) -> EngineHandle {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR").expect("run with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    let loader = Loader::default();
    let opened = open_model(&folder(family, variant), &catalogue, &loader, None).unwrap();
    let backend = BackendChoice::Named("cpu".to_owned());
    let backend = loader.select_backend(&catalogue, &backend).unwrap();
    let options = LoadOptions {
        dtype: Some(DType::F32),
        kv_types,
        threads: 1,
        ..LoadOptions::default()
    };
    start_engine(opened, backend, options, |_, _| {}).unwrap().0
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
        let prompts = golden(&folder(family, variant));
        let prompts = prompts["prompts"].as_array().unwrap();
        let scores = |kv_types| {
            let engine = engine(family, variant, kv_types);
            let score = |prompt: &serde_json::Value| engine.score(ids(&prompt["ids"])).unwrap();
            let scores: Vec<_> = prompts.iter().map(score).collect();
            // Figures are those of the last step once the engine has taken another command.
            engine.clear_prefix_cache().unwrap();
            (scores, engine.figures().kv_bytes)
        };
        let (exact, exact_bytes) = scores(KvTypes::default());
        // The last one chooses three keys and two experts of scores that lie close together: roundings change choices.
        let f16_limit = if variant == "v4" { 5e-2 } else { 2e-3 };
        for (dtype, limit) in [(DType::F16, f16_limit), (DType::BF16, 5e-2)] {
            let (found, bytes) = scores(KvTypes::both(dtype));
            let off = found.iter().zip(&exact).map(|(a, b)| distance(a, b));
            let off = off.fold(0.0, f32::max);
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
fn a_server_says_in_which_type_it_keeps_keys_and_values() {
    let body = json!({"prompt": "The capital of France is", "temperature": 0, "n_predict": 12});
    let ask = |flags: &[&str]| {
        let server = Server::real(flags);
        let answer = server.post("/completion", &body).success();
        let props = server.get("/props").success();
        (answer["content"].clone(), props["kv_cache_mode"].clone())
    };
    let (text, kept) = ask(&[]);
    assert_eq!(kept, "f32");
    let (half_text, half_kept) = ask(&["--cache-type-k", "f16", "--cache-type-v", "f16"]);
    assert_eq!((half_kept, half_text), (json!("f16"), text));
}
