//! The server with a real model: what one answers alone, many answer together; and OpenAI's own client is content.

use std::collections::BTreeMap;
use std::process::Command;
use std::thread;

use mlxcel_tests::cli::prepared;
use mlxcel_tests::server::Server;
use serde_json::{Value, json};

/// Conversations of different lengths, some of which begin alike.
fn questions() -> Vec<Value> {
    let long = "The quick brown fox jumps over the lazy dog. ".repeat(6);
    (0..16)
        .map(|index| {
            let question = match index % 4 {
                0 => format!("What is {index} plus one?"),
                1 => "What is the capital of France?".to_owned(),
                2 => format!("{long} How many words is {}?", index / 4),
                _ => format!("Write the number {}.", index * 7),
            };
            json!({"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 3 + index % 6})
        })
        .collect()
}

fn text(answer: &Value) -> String {
    answer["choices"][0]["message"]["content"]
        .as_str()
        .expect("text")
        .to_owned()
}

#[test]
fn answers_are_the_same_alone_and_together() {
    let questions = questions();
    let ask =
        |server: &Server, body: &Value| text(&server.post("/v1/chat/completions", body).success());
    let alone = Server::real(&["--parallel", "1"]);
    // Without what others left in the cache.
    let expected: Vec<String> = questions
        .iter()
        .map(|body| {
            alone.post("/v1/cache/reset", &json!({})).success();
            ask(&alone, body)
        })
        .collect();
    drop(alone);
    let together = Server::real(&["--parallel", "8"]);
    // Everything twice, so that some find what others have just computed.
    let answers: BTreeMap<(usize, usize), String> = thread::scope(|scope| {
        let pairs = (0..2).flat_map(|turn| (0..questions.len()).map(move |index| (turn, index)));
        let running: Vec<_> = pairs
            .map(|(turn, index)| {
                let (together, body) = (&together, &questions[index]);
                scope.spawn(move || ((turn, index), ask(together, body)))
            })
            .collect();
        running
            .into_iter()
            .map(|thread| thread.join().expect("answered"))
            .collect()
    });
    assert_eq!(answers.len(), 32);
    for ((_, index), answer) in answers {
        assert_eq!(answer, expected[index], "{}", questions[index]);
    }
}

#[test]
fn turn_two_computes_only_what_is_new() {
    let (cached, plain) = (Server::real(&[]), Server::real(&["--no-prefix-cache"]));
    let history = "Paris is a city on the river Seine. ".repeat(12);
    let first =
        json!({"role": "user", "content": format!("{history}What is the capital of France?")});
    let mut messages = vec![first];
    let mut known = 0;
    for question in ["And of Italy?", "And of Spain?", ""] {
        let body = json!({"messages": messages, "temperature": 0, "max_tokens": 24});
        let answer = cached.post("/v1/chat/completions", &body).success();
        let uncached = plain.post("/v1/chat/completions", &body).success();
        assert_eq!(text(&answer), text(&uncached));
        assert_eq!(uncached["timings"]["cache_n"], 0);
        let number = |place: &str| answer["usage"][place].as_u64().expect("a number");
        let found = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!(found, Some(known), "of {} tokens", number("prompt_tokens"));
        let computed = answer["timings"]["prompt_n"].as_u64();
        assert_eq!(computed, Some(number("prompt_tokens") - known));
        // All that was said but the last token, which was never computed.
        known = number("prompt_tokens") + number("completion_tokens") - 1;
        messages.push(json!({"role": "assistant", "content": text(&answer)}));
        messages.push(json!({"role": "user", "content": question}));
    }
    let stats = plain.get("/v1/cache/stats").success();
    assert_eq!(
        (stats["enabled"].as_bool(), stats["pages"].as_u64()),
        (Some(false), Some(0))
    );
}

#[test]
fn a_server_that_was_killed_finds_its_pages_again() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path().to_str().expect("a path");
    let flags = [
        "--prefix-cache-dir",
        dir,
        "--prefix-cache-dir-bytes",
        "100000000",
    ];
    let story = "Paris is a city on the river Seine. ".repeat(9);
    let body = json!({
        "messages": [{"role": "user", "content": format!("{story}What is the capital of France?")}],
        "temperature": 0, "max_tokens": 12,
    });
    let first = Server::real(&flags);
    let answer = first.post("/v1/chat/completions", &body).success();
    let number = |place: &str| answer["usage"][place].as_u64().expect("a number");
    let full_pages = (number("prompt_tokens") + number("completion_tokens") - 1) / 32;
    first.wait_for("the pages are written", |server| {
        let stats = server.get("/v1/cache/stats").success();
        stats["disk"]["pages_written"].as_u64() == Some(full_pages)
    });
    // Without a chance to clean up.
    drop(first);
    let second = Server::real(&flags);
    let again = second.post("/v1/chat/completions", &body).success();
    assert_eq!(text(&again), text(&answer));
    let found = again["timings"]["cache_n"].as_u64().expect("a number");
    assert_eq!(found, (number("prompt_tokens") - 1) / 32 * 32);
    let stats = second.get("/v1/cache/stats").success();
    assert_eq!(stats["disk"]["pages_read"].as_u64(), Some(found / 32));
    assert_eq!(stats["disk"]["files_damaged"], 0);
}

#[test]
fn the_official_client_is_content() {
    let client = prepared("MLXCEL_TEST_OPENAI_CLIENT");
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/clients/openai_client.py");
    let server = Server::real(&[
        "--alias",
        "smollm2",
        "--api-key",
        "secret",
        "--parallel",
        "8",
        "--max-queue-depth",
        "64",
    ]);
    let done = Command::new(python)
        .args([script, &format!("{}/v1", server.url()), "secret", "smollm2"])
        .env("PYTHONPATH", client)
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .expect("started");
    let show = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(show(&done.stdout), "all well\n", "{}", show(&done.stderr));
}
