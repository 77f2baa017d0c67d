//! A real model of the gemma line, Gemma 3 270M, against recorded logits and greedy tokens of the reference
//! implementation (`tests/golden/gemma3_270m.json`, made by `tests/golden/tools/make_gemma3_270m.py`).
//!
//! Its terms ask whoever runs it to fetch it: the test runs where `MLXCEL_TEST_GEMMA3_GGUF` names the GGUF in
//! Q4_K_M, and says that it did not where nothing does. Needs the plugins that `cargo xtask test` prepares.

use std::path::Path;

use mlxcel::plugin::DType;
use mlxcel_tests::golden::{argmax, engine, ids, json};

/// Of the range of logits.
const LIMIT: f64 = 1e-4;

#[test]
fn logits_and_greedy_tokens_match_the_reference() {
    let Some(path) = std::env::var_os("MLXCEL_TEST_GEMMA3_GGUF") else {
        println!("not run: MLXCEL_TEST_GEMMA3_GGUF is not set");
        return;
    };
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/gemma3_270m.json");
    let golden = json(&golden);
    let engine = engine(Path::new(&path), 1024, DType::F32);
    for prompt in golden["prompts"].as_array().unwrap() {
        let (name, mut text) = (&prompt["name"], ids(&prompt["ids"]));
        let range = prompt["range"].as_f64().unwrap();
        let logits = engine.score(text.clone()).unwrap();
        let mut worst = 0.0_f64;
        for pair in prompt["top10"].as_array().unwrap() {
            let (id, want) = (pair[0].as_u64().unwrap(), pair[1].as_f64().unwrap());
            let got = f64::from(*logits.get(id as usize).unwrap());
            worst = worst.max((got - want).abs() / range);
        }
        println!("{name}: {worst:.1e} of the range of logits");
        assert!(worst < LIMIT, "{name}: the top ten are off by {worst}");
        let want = ids(&prompt["greedy"]);
        let mut got = vec![argmax(&logits)];
        while got.len() < want.len() {
            text.push(*got.last().unwrap());
            got.push(argmax(&engine.score(text.clone()).unwrap()));
        }
        assert_eq!(got, want, "{name}");
    }
}
