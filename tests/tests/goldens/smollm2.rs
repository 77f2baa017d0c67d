//! A real model, SmolLM2-135M-Instruct, against recorded logits and greedy tokens of independent
//! references (`tests/golden/smollm2.json`; how they were made is in `tests/golden/tools`).
//!
//! Needs the model and the plugins that `cargo xtask test` prepares.

use std::path::PathBuf;

use mlxcel::chat::{ChatOptions, ChatSession, ModelText};
use mlxcel::engine::{
    CancelToken, EngineFacts, EngineHandle, Event, FinishReason, GenerateRequest, KvTypes,
    LoadOptions, Precision, open_model, start_engine,
};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel::sampling::SamplingParams;
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use serde_json::Value;

fn required(name: &str) -> PathBuf {
    let value = std::env::var_os(name);
    PathBuf::from(
        value.unwrap_or_else(|| panic!("{name} is not set: run the tests with `cargo xtask test`")),
    )
}

fn catalogue() -> Catalogue {
    let inputs = SearchInputs {
        dirs: vec![required("MLXCEL_TEST_PLUGINS_DIR")],
        ..SearchInputs::default()
    };
    Catalogue::build(&inputs, HostProfile::CURRENT).unwrap()
}

fn engine() -> (EngineHandle, EngineFacts, ModelText) {
    engine_with(LoadOptions::default())
}

fn engine_with(options: LoadOptions) -> (EngineHandle, EngineFacts, ModelText) {
    let (catalogue, loader) = (catalogue(), Loader::default());
    let opened = open_model(
        &required("MLXCEL_TEST_MODEL_GGUF"),
        &catalogue,
        &loader,
        None,
    )
    .unwrap();
    let backend = loader
        .select_backend(&catalogue, &BackendChoice::Named("cpu".to_owned()))
        .unwrap();
    let text = ModelText::of(&opened).unwrap();
    let options = LoadOptions {
        dtype: Some(DType::F32),
        ..options
    };
    let (engine, facts) = start_engine(opened, backend, options, |_, _| {}).unwrap();
    (engine, facts, text)
}

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/smollm2.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

/// The likeliest continuation, `n` tokens long.
fn greedy(engine: &EngineHandle, prompt: Vec<u32>, n: usize) -> Vec<u32> {
    let request = GenerateRequest {
        prompt,
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_new_tokens: Some(n),
        ..GenerateRequest::default()
    };
    let events = engine.generate(request, CancelToken::default()).unwrap();
    let tokens = events.filter_map(|event| match event {
        Event::Token { id, .. } => Some(id),
        Event::Failed(error) => panic!("{error}"),
        _ => None,
    });
    tokens.collect()
}

/// With activations as they are, and as the backend prefers them: rounded to 16 bits where that is faster.
#[test]
fn logits_and_greedy_tokens_match_the_references() {
    for (precision, limit) in [(Some(Precision::Exact), 1e-3), (None, 1e-2)] {
        matches_the_references(precision, limit);
    }
}

fn matches_the_references(precision: Option<Precision>, exact_limit: f64) {
    let (engine, ..) = engine_with(LoadOptions {
        precision,
        ..LoadOptions::default()
    });
    for prompt in golden()["prompts"].as_array().unwrap() {
        let name = prompt["name"].as_str().unwrap();
        let tokens = ids(&prompt["ids"]);
        let logits = engine.score(tokens.clone()).unwrap();
        for reference in ["exact", "f16"] {
            let limit = if reference == "exact" {
                exact_limit
            } else {
                2e-2
            };
            for pair in prompt[reference]["top10"].as_array().unwrap() {
                let (id, want) = (
                    pair[0].as_u64().unwrap() as usize,
                    pair[1].as_f64().unwrap(),
                );
                let off = (f64::from(logits[id]) - want).abs();
                assert!(
                    off < limit,
                    "{name}, {precision:?}, {reference}: token {id} is {} and should be {want}",
                    logits[id]
                );
            }
        }
        let want = ids(&prompt["exact"]["greedy"]);
        let got = greedy(&engine, tokens, want.len());
        assert_eq!(got, want, "{name}");
    }
}

/// A cache of a half type holds half as much and rounds what it holds: the likeliest tokens are the same.
#[test]
fn caches_of_half_types_give_the_same_greedy_tokens() {
    let golden = golden();
    let answers = |kv_types| {
        let (engine, facts, _) = engine_with(LoadOptions {
            kv_types,
            ..LoadOptions::default()
        });
        let mut answers = Vec::new();
        let mut logits = Vec::new();
        for prompt in [0, 1] {
            let tokens = ids(&golden["prompts"][prompt]["ids"]);
            logits.extend(engine.score(tokens.clone()).unwrap());
            answers.push(greedy(&engine, tokens, 16));
        }
        // Figures are those of the last step once the engine has taken another command.
        engine.clear_prefix_cache().unwrap();
        (answers, logits, facts, engine.figures().kv_bytes)
    };
    let (wanted, exact, facts, exact_bytes) = answers(KvTypes::both(DType::F32));
    assert_eq!(facts.kv_type, DType::F32.into());
    let default = answers(KvTypes::default()).2;
    assert_eq!(
        (default.dtype, default.kv_type),
        (DType::F32, DType::F16.into())
    );
    for (dtype, limit) in [(DType::F16, 0.05), (DType::BF16, 0.5)] {
        let (found, logits, facts, bytes) = answers(KvTypes::both(dtype));
        assert_eq!((facts.dtype, facts.kv_type), (DType::F32, dtype.into()));
        assert_eq!(2 * bytes, exact_bytes, "{dtype:?}");
        let off = logits.iter().zip(&exact).map(|(a, b)| (a - b).abs());
        let off = off.fold(0.0, f32::max);
        assert!(
            off > 0.0 && off < limit,
            "{dtype:?}: logits differ by {off}"
        );
        if dtype == DType::F16 {
            assert_eq!(found, wanted);
        }
    }
}

#[test]
fn a_chat_answers_on_topic_and_remembers() {
    let (engine, facts, text) = engine();
    let options = ChatOptions {
        max_new_tokens: Some(40),
        ..ChatOptions::default()
    };
    let mut chat = ChatSession::new(engine, &facts, text, options).unwrap();
    let mut streamed = String::new();
    let answer = chat
        .ask("What is the capital of France?", &mut |piece| {
            streamed.push_str(piece)
        })
        .unwrap();
    assert!(answer.text.contains("Paris"), "{}", answer.text);
    assert_eq!(
        (&answer.text, answer.reason),
        (&streamed, FinishReason::Eos)
    );
    let second = chat
        .ask("Which country did I ask about?", &mut |_| {})
        .unwrap();
    // A model of this size does not answer well, but it knows what was talked about.
    assert!(
        second.text.contains("Fren") || second.text.contains("France"),
        "{}",
        second.text
    );
    // Full pages of the first turn are found again.
    assert!(second.stats.cached_tokens >= 32, "{:?}", second.stats);
}

#[test]
fn text_equals_the_reference_tokenizer() {
    let (.., text) = engine();
    for case in golden()["tokenizer"].as_array().unwrap() {
        let (plain, want) = (case["text"].as_str().unwrap(), ids(&case["ids"]));
        let got = text
            .tokenizer
            .encode_markup(plain, mlxcel::text::Boundary::AsTrained)
            .unwrap();
        assert_eq!(got, want, "{plain:?}");
    }
}
