//! Order of service: priorities, turns of tenants, deadlines; and that what ends gives its pages back.

use std::thread;
use std::time::Instant;

use mlxcel_tests::http::{Connection, Response, request};
use mlxcel_tests::scripted::continuation;
use mlxcel_tests::server::{LOOKAHEAD, Server};
use serde_json::{Value, json};

/// Starts requests one after the other while another one has the only place, lets that one end, and gives the order in
/// which the first were answered, by their index.
fn order(server: &Server, bodies: &[(Value, &str)]) -> Vec<usize> {
    let mut first = Connection::open(server.address());
    let long = json!({"prompt": "a", "max_tokens": 4000, "stream": true}).to_string();
    first.send(
        "POST",
        "/v1/completions",
        &["Authorization: Bearer one"],
        long.as_bytes(),
    );
    assert_eq!(first.head().status, 200);
    let before = server.metric("mlxcel_batch_sequences_completed_total");
    let begun = Instant::now();
    let mut waiting: Vec<(Connection, f64)> = bodies
        .iter()
        .enumerate()
        .map(|(index, (body, key))| {
            let mut connection = Connection::open(server.address());
            let key = format!("Authorization: Bearer {key}");
            let sent_ms = begun.elapsed().as_secs_f64() * 1e3;
            connection.send(
                "POST",
                "/v1/completions",
                &[key.as_str()],
                body.to_string().as_bytes(),
            );
            server.wait_for("it waits", |server| {
                server.metric("mlxcel_queue_depth") > index as f64
            });
            (connection, sent_ms)
        })
        .collect();
    assert_eq!(
        server.metric("mlxcel_batch_sequences_completed_total"),
        before
    );
    drop(first);
    let mut ended: Vec<(f64, usize)> = thread::scope(|scope| {
        let readers: Vec<_> = waiting
            .iter_mut()
            .enumerate()
            .map(|(index, (connection, sent_ms))| {
                scope.spawn(move || (*sent_ms + waited_ms(&connection.response()), index))
            })
            .collect();
        readers
            .into_iter()
            .map(|reader| reader.join().expect("answered"))
            .collect()
    });
    ended.sort_by(|a, b| a.0.total_cmp(&b.0));
    ended.into_iter().map(|(_, index)| index).collect()
}

/// Time from the request to its first token.
fn waited_ms(answer: &Response) -> f64 {
    let answer = answer.success();
    answer["timings"]["prompt_ms"].as_f64().expect("a number")
}

fn ask(priority: i32) -> Value {
    json!({"prompt": "a", "max_tokens": 20, "priority": priority})
}

const ONE_AT_A_TIME: [&str; 8] = [
    "--temp",
    "0",
    "--parallel",
    "1",
    "--metrics",
    "--api-key",
    "one,two,three",
    "--no-slots",
];

#[test]
fn the_more_urgent_go_first_and_tenants_take_turns() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({"delay_us": 5_000}),
            &[&ONE_AT_A_TIME[..], &["--lookahead", lookahead]].concat(),
        )
        .with_key("one");
        let bodies = [
            (ask(1), "one"),
            (ask(0), "one"),
            (ask(-5), "one"),
            (ask(1), "one"),
        ];
        assert_eq!(order(&server, &bodies), [2, 1, 0, 3]);
        // The one that holds the place is the first tenant's, so the others have their turns before.
        let bodies = [
            (ask(0), "one"),
            (ask(0), "one"),
            (ask(0), "two"),
            (ask(0), "two"),
            (ask(0), "three"),
        ];
        assert_eq!(order(&server, &bodies), [2, 4, 0, 3, 1]);
    }
}

#[test]
fn bad_priorities_and_times_are_refused_by_name() {
    let server = Server::scripted(&json!({}), &["--temp", "0", "--decode-timeout", "50"]);
    for (route, body, name) in [
        (
            "/v1/completions",
            json!({"prompt": "a", "priority": 101}),
            "priority",
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "priority": "high"}),
            "priority",
        ),
        (
            "/completion",
            json!({"prompt": "a", "priority": 0.5}),
            "priority",
        ),
        (
            "/completion",
            json!({"prompt": "a", "timeout": 0}),
            "timeout",
        ),
        (
            "/completion",
            json!({"prompt": "a", "timeout": -1}),
            "timeout",
        ),
        (
            "/completion",
            json!({"prompt": "a", "timeout": 51}),
            "timeout",
        ),
        (
            "/completion",
            json!({"prompt": "a", "timeout": 1e300}),
            "timeout",
        ),
        (
            "/v1/completions",
            json!({"prompt": "a", "timeout": "1"}),
            "timeout",
        ),
        (
            "/completion",
            json!({"prompt": "a", "t_max_predict_ms": "1"}),
            "t_max_predict_ms",
        ),
    ] {
        let refused = server.post(route, &body);
        assert_eq!(refused.status, 400, "{body}");
        assert!(refused.text().contains(name), "{}", refused.text());
    }
    let body = json!({"prompt": "7", "priority": -100, "timeout": 50, "t_max_predict_ms": 100_000});
    assert_eq!(
        server.post("/completion", &body).success()["content"],
        "89!"
    );
}

#[test]
fn what_has_had_its_time_ends_with_an_error_and_gives_everything_back() {
    for lookahead in LOOKAHEAD {
        let script = json!({"delay_us": 20_000});
        let server = Server::scripted(
            &script,
            &[
                "--temp",
                "0",
                "--lookahead",
                lookahead,
                "--metrics",
                "--parallel",
                "1",
            ],
        );
        let late = |body: &Value| {
            let answer = server.post("/v1/completions", body);
            assert_eq!(answer.status, 504, "{}", answer.text());
            assert_eq!(answer.json()["error"]["code"], "answer_timeout");
            assert_eq!(answer.json()["error"]["type"], "timeout_error");
        };
        // One that runs, and one that waits for it and never begins.
        thread::scope(|scope| {
            scope.spawn(|| late(&json!({"prompt": "a", "max_tokens": 4000, "timeout": 1.5})));
            server.wait_for("it runs", |server| {
                server.metric("llamacpp:requests_processing") > 0.0
            });
            late(&json!({"prompt": "b", "max_tokens": 4000, "timeout": 0.2}));
        });
        let stream = json!({"prompt": "a", "max_tokens": 4000, "timeout": 1.0, "stream": true});
        let events = server.post("/v1/completions", &stream).events();
        assert!(events.len() > 2);
        assert!(
            events[events.len() - 1].contains("answer_timeout"),
            "{events:?}"
        );
        server.wait_for("all have left", |server| {
            server.metric("llamacpp:requests_processing") + server.metric("mlxcel_queue_depth")
                == 0.0
        });
        server.post("/v1/cache/reset", &json!({})).success();
        server.wait_for("the pages are free", |server| {
            server.get("/v1/cache/stats").success()["pool_pages_in_use"] == 0
        });
    }
}

#[test]
fn a_generation_that_takes_too_long_ends_at_a_line_break() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({"delay_us": 3_000}),
            &["--temp", "0", "--lookahead", lookahead],
        );
        // The model never says a line break.
        let body = json!({"prompt": "a", "n_predict": 60, "t_max_predict_ms": 1});
        let answer = server.post("/completion", &body).success();
        assert_eq!(
            (
                answer["tokens_predicted"].as_u64(),
                answer["stop_type"].as_str()
            ),
            (Some(60), Some("limit"))
        );
    }
}

#[test]
fn a_long_urgent_prompt_starves_neither_answers_nor_prompts() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({"delay_us": 10_000}),
            &[
                "--lookahead",
                lookahead,
                "--temp",
                "0",
                "--metrics",
                "--prefill-chunk-size",
                "64",
                "--prefill-beside-decode",
                "16",
            ],
        );
        let long =
            json!({"prompt": "l".repeat(4000), "max_tokens": 1, "priority": -100}).to_string();
        let mut connection = Connection::open(server.address());
        connection.send("POST", "/v1/completions", &[], long.as_bytes());
        server.wait_for("it runs", |server| {
            server.metric("llamacpp:requests_processing") > 0.0
        });
        let body = json!({"prompt": "a".repeat(40), "max_tokens": 30, "priority": 100});
        for _ in 0..2 {
            let text =
                server.post("/v1/completions", &body).success()["choices"][0]["text"].clone();
            assert_eq!(text, continuation("a", 30));
        }
        assert!(
            server.metric("llamacpp:requests_processing") > 0.0,
            "the long one has ended before"
        );
        connection.response().success();
    }
}

#[test]
fn a_key_may_not_take_all_places() {
    let flags = [
        "--temp",
        "0",
        "--metrics",
        "--api-key",
        "one,two",
        "--parallel",
        "1",
        "--max-queue-depth",
        "5",
        "--max-requests-per-key",
        "3",
    ];
    let server = Server::scripted(&json!({"delay_us": 20_000}), &flags).with_key("one");
    let long = json!({"prompt": "a", "max_tokens": 4000, "stream": true}).to_string();
    let mut running: Vec<Connection> = Vec::new();
    for _ in 0..3 {
        let mut connection = Connection::open(server.address());
        connection.send(
            "POST",
            "/v1/completions",
            &["Authorization: Bearer one"],
            long.as_bytes(),
        );
        assert_eq!(connection.head().status, 200);
        running.push(connection);
    }
    let ask = |key: &str| {
        let key = format!("Authorization: Bearer {key}");
        request(
            server.address(),
            "POST",
            "/v1/completions",
            &[key.as_str()],
            b"{\"prompt\": \"8\"}",
        )
    };
    let refused = ask("one");
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (429, Some("1")),
        "{}",
        refused.text()
    );
    assert_eq!(refused.json()["error"]["code"], "too_many_requests");
    running.truncate(0);
    assert_eq!(ask("two").success()["choices"][0]["text"], "9!");
    server.wait_for("there is room again", |_| ask("one").status == 200);
}
