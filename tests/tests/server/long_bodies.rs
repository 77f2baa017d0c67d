//! Bodies that take long to read: they get their answers, and short requests get theirs meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use mlxcel_tests::http::Connection;
use mlxcel_tests::scripted::continuation;
use mlxcel_tests::server::Server;
use serde_json::json;

/// A list with so many times the same item.
fn list(item: &str, count: usize) -> String {
    format!("[{}]", vec![item; count].join(","))
}

#[test]
fn long_bodies_are_answered_and_keep_nobody_waiting() {
    let server = Server::scripted(&json!({}), &["--temp", "0", "--metrics"]);
    let ids = list("97", 300_000);
    let message = r#"{"role":"user","content":"a"}"#;
    let words = "ab ".repeat(100_000);
    let long = [
        (
            "/v1/completions",
            format!(r#"{{"prompt":{ids}}}"#),
            "300000 tokens",
        ),
        (
            "/completion",
            format!(r#"{{"prompt":"{words}"}}"#),
            "300000 tokens",
        ),
        (
            "/v1/completions",
            format!(r#"{{"prompt":{}}}"#, list("{}", 300_000)),
            "prompt is an object",
        ),
        (
            "/v1/completions",
            format!(r#"{{"prompt":"a","stop":{}}}"#, list("\"b\"", 100_000)),
            "100000 stop strings",
        ),
        (
            "/v1/completions",
            format!(r#"{{"prompt":"a","logit_bias":{}}}"#, list("[1,1]", 50_000)),
            "50000 entries",
        ),
        (
            "/v1/completions",
            format!(r#"{{"x":{ids}}}"#),
            "prompt is missing",
        ),
        (
            "/v1/completions",
            format!(r#"{{"prompt":{}}}"#, "[".repeat(300_000)),
            "recursion limit",
        ),
        ("/v1/completions", format!("{ids}]"), "not valid JSON"),
        ("/v1/completions", ids.clone(), "the body is a list"),
        (
            "/v1/chat/completions",
            format!(r#"{{"messages":{}}}"#, list(message, 3_000)),
            "tokens and the context holds",
        ),
        (
            "/detokenize",
            format!(r#"{{"tokens":{}}}"#, list("300", 100_000)),
            "tokens has 300",
        ),
    ];
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let (server, is_over) = (&server, &is_over);
        let short = scope.spawn(move || {
            let mut answers = 0;
            while !is_over.load(Ordering::Acquire) || answers == 0 {
                assert_eq!(server.get("/health").status, 200);
                let answer =
                    server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 9}));
                assert_eq!(answer.success()["choices"][0]["text"], continuation("a", 9));
                answers += 1;
            }
        });
        // More of them at a time than are worked on.
        let asked: Vec<_> = long
            .iter()
            .map(|(path, body, words)| {
                scope.spawn(move || {
                    let refused = server.post_bytes(path, body.as_bytes());
                    assert_eq!(refused.status, 400, "{path} {words}: {}", refused.text());
                    assert!(
                        refused.text().contains(words),
                        "{words}: {}",
                        refused.text()
                    );
                })
            })
            .collect();
        let ended = asked.into_iter().map(|thread| thread.join());
        let ended: Vec<bool> = ended.map(|outcome| outcome.is_ok()).collect();
        is_over.store(true, Ordering::Release);
        short.join().expect("answered");
        assert!(ended.iter().all(|is_fine| *is_fine), "{ended:?}");
    });
    let pieces = json!({"content": words, "with_pieces": true});
    let tokens = server.post("/tokenize", &pieces).success()["tokens"].clone();
    let tokens = tokens.as_array().expect("tokens");
    assert_eq!(tokens.len(), words.len());
    assert_eq!(tokens[1], json!({"id": 98, "piece": "b"}));
    let ids: Vec<_> = tokens.iter().map(|token| token["id"].clone()).collect();
    let spelled = server
        .post("/detokenize", &json!({"tokens": ids}))
        .success();
    assert_eq!(spelled["content"], words);
}

/// More than the buffers between the two hold: who closes before it has read makes the client fail at writing.
#[test]
fn clients_that_write_all_before_they_read_learn_that_it_was_too_much() {
    let server = Server::scripted(&json!({}), &[]);
    let body = vec![b' '; 18_000_000];
    let learns = |connection: &mut Connection| {
        let answer = connection.head();
        assert_eq!(answer.status, 413);
        assert_eq!(answer.header("connection"), Some("close"));
    };
    let mut whole = Connection::open(server.address());
    assert!(whole.send("POST", "/v1/completions", &[], &body));
    learns(&mut whole);
    let mut chunks = Connection::open(server.address());
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert!(chunks.write(head.as_bytes()));
    assert!(chunks.write(format!("{:x}\r\n", body.len()).as_bytes()));
    assert!(chunks.write(&body));
    assert!(chunks.write(b"\r\n0\r\n\r\n"));
    learns(&mut chunks);
    // Nothing is read of what is much too large, nor of what has not been asked for.
    for headers in [
        "Content-Length: 100000000\r\n",
        "Content-Length: 18000000\r\nExpect: 100-continue\r\n",
    ] {
        let mut waiting = Connection::open(server.address());
        let head = format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n");
        assert!(waiting.write(head.as_bytes()));
        learns(&mut waiting);
    }
    assert_eq!(server.get("/health").status, 200);
}
