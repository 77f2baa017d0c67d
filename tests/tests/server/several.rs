//! Several answers to one prompt from models whose caches are not keys and values alone: each is the one of its seed alone,
//! and the prompt is computed once.

use mlxcel_tests::cli::Mlxcel;
use mlxcel_tests::server::{LOOKAHEAD, Server};
use mlxcel_tests::tiny::{Kind, copy_with_tokenizer, tokens};
use serde_json::{Value, json};

/// Recurrent states, latent keys, chosen keys, and keys of several positions in one.
const KINDS: [Kind; 5] = [
    ("qwen", "qwen3-next"),
    ("qwen", "qwen3-5"),
    ("deepseek", "v3"),
    ("deepseek", "v32"),
    ("deepseek", "v4"),
];

/// Two full pages and eleven tokens.
const PROMPT_TOKENS: usize = 75;
const FULL_PAGES_TOKENS: usize = 64;

fn server(kind: Kind, lookahead: &str) -> Server {
    let home = Mlxcel::new().with_real_plugins();
    let model = copy_with_tokenizer(&home, kind);
    let flags = [
        "--metrics",
        "--parallel",
        "4",
        "--threads",
        "1",
        "--lookahead",
        lookahead,
    ];
    Server::start(home, &model, &flags)
}

/// So random that equal answers are no accident.
fn body(prompt: &[u32], seed: u64, extra: Value) -> Value {
    let mut body = json!({
        "prompt": prompt, "max_tokens": 40, "temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": seed,
        "ignore_eos": true,
    });
    if let (Some(body), Some(extra)) = (body.as_object_mut(), extra.as_object()) {
        body.extend(extra.clone());
    }
    body
}

fn texts(answer: &Value) -> Vec<Value> {
    let choices = answer["choices"].as_array().expect("choices");
    choices
        .iter()
        .map(|choice| choice["text"].clone())
        .collect()
}

/// Texts of a stream, by choice.
fn streamed(server: &Server, body: &Value, count: usize) -> Vec<Value> {
    let mut texts = vec![String::new(); count];
    for event in server.post("/v1/completions", body).events() {
        let chunk: Value = serde_json::from_str(&event).unwrap_or_default();
        for choice in chunk["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().expect("an index");
            texts[index as usize].push_str(choice["text"].as_str().expect("a text"));
        }
    }
    texts.into_iter().map(Value::from).collect()
}

#[test]
fn several_answers_are_those_of_their_seeds_and_share_one_prefill() {
    for (kind, lookahead) in KINDS
        .into_iter()
        .flat_map(|kind| LOOKAHEAD.map(|mode| (kind, mode)))
    {
        let server = server(kind, lookahead);
        let prompt = tokens(PROMPT_TOKENS, 4);
        let computed = || server.metric("llamacpp:prompt_tokens_total");
        let before = computed();
        let several = body(&prompt, 70, json!({"n": 4}));
        let all = server.post("/v1/completions", &several).success();
        // The first computes the prompt, the others what lies behind its last full page, or one token where another
        // answer has ended before and left the rest.
        let once = computed() - before;
        let most = PROMPT_TOKENS + 3 * (PROMPT_TOKENS - FULL_PAGES_TOKENS);
        assert!(
            (PROMPT_TOKENS as f64 + 3.0..=most as f64).contains(&once),
            "{kind:?}, {lookahead}: {once}"
        );
        assert_eq!(all["usage"]["prompt_tokens"], PROMPT_TOKENS);
        assert_eq!(all["usage"]["completion_tokens"], 160);
        let all = texts(&all);
        for (index, text) in all.iter().enumerate() {
            server.post("/v1/cache/reset", &json!({})).success();
            let alone = body(&prompt, 70 + index as u64, json!({}));
            let alone = server.post("/v1/completions", &alone).success();
            assert_eq!(alone["timings"]["prompt_n"], PROMPT_TOKENS);
            assert_eq!(
                texts(&alone),
                std::slice::from_ref(text),
                "{kind:?}, {lookahead}, {index}"
            );
            assert!(!all[..index].contains(text), "{kind:?}: {text} twice");
        }
        // The same as a stream, and by the other dialect's name for it.
        server.post("/v1/cache/reset", &json!({})).success();
        let stream = body(&prompt, 70, json!({"n": 4, "stream": true}));
        assert_eq!(streamed(&server, &stream, 4), all, "{kind:?}, {lookahead}");
        let native = json!({"n_cmpl": 4, "n_predict": 40});
        let mut native = body(&prompt, 70, native);
        native
            .as_object_mut()
            .expect("an object")
            .remove("max_tokens");
        let native = server.post("/completion", &native).success();
        let native = native.as_array().expect("answers").iter();
        let native: Vec<Value> = native.map(|answer| answer["content"].clone()).collect();
        assert_eq!(native, all, "{kind:?}, {lookahead}");
    }
}
