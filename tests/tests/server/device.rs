//! Devices that fail, throw, hang, run out of memory or give numbers that are none: the requests it was about fail with a
//! clear error in their dialect, the others and the server do not, and nothing is left behind.

use std::thread;

use mlxcel_tests::cli::Mlxcel;
use mlxcel_tests::http::Response;
use mlxcel_tests::scripted::continuation;
use mlxcel_tests::server::Server;
use serde_json::{Value, json};

/// Whatever goes wrong, it makes no difference whether a step is in flight.
const MODES: [&str; 2] = ["off", "on"];

fn server(fault: &str, script: &Value, flags: &[&str]) -> Server {
    let home = Mlxcel::new().with_faulty_device(fault);
    Server::scripted_in(
        home,
        script,
        &[&["--temp", "0", "--metrics"], flags].concat(),
    )
}

fn ask(server: &Server, prompt: &str) -> Response {
    server.post(
        "/v1/completions",
        &json!({"prompt": prompt, "max_tokens": 9}),
    )
}

/// Everybody has left, and the device has as many tensors as `live`.
fn settle(server: &Server, live: f64) {
    server.wait_for("everybody has left", |server| {
        server.metric("llamacpp:requests_processing") + server.metric("mlxcel_queue_depth") == 0.0
    });
    server.wait_for("the tensors are free", |server| {
        server.metric("mlxcel_engine_live_tensors") == live
    });
    assert_eq!(
        ask(server, "a").success()["choices"][0]["text"],
        continuation("a", 9)
    );
    server.post("/v1/cache/reset", &json!({})).success();
    server.wait_for("the pages are free", |server| {
        server.get("/v1/cache/stats").success()["pool_pages_in_use"] == 0
    });
    assert_eq!(server.metric("mlxcel_engine_live_tensors"), live);
}

#[test]
fn an_operation_that_fails_or_throws_fails_its_requests_only() {
    let faults = [
        "error_take_8",
        "error_eval_4",
        "error_read_3",
        "error_from_host_20",
        "panic_read_3",
        "error_sample_3",
        "panic_sample_3",
    ];
    let cases = MODES.map(|mode| faults.map(|fault| (mode, fault)));
    let ahead = [("on", "error_binary_scalar_2")];
    for (mode, fault) in cases.into_iter().flatten().chain(ahead) {
        let server = server(fault, &json!({}), &["--lookahead", mode]);
        let live = server.metric("mlxcel_engine_live_tensors");
        assert!(live > 0.0);
        let failed = ask(&server, "a");
        assert_eq!(failed.status, 500, "{mode}, {fault}: {}", failed.text());
        let error = &failed.json()["error"];
        assert_eq!(error["type"], "server_error", "{fault}");
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|text| text.contains("as told")),
            "{fault}: {error}"
        );
        server.wait_for("the failure is counted", |server| {
            server.metric("mlxcel_batch_failed_steps_total") == 1.0
        });
        assert_eq!(server.get("/health").status, 200, "{fault}");
        settle(&server, live);
    }
}

#[test]
fn errors_have_the_dialect_of_their_route_and_streams_end_with_them() {
    let native = server("error_read_3", &json!({}), &[]);
    let failed = native.post("/completion", &json!({"prompt": "a", "n_predict": 9}));
    assert_eq!(
        (failed.status, failed.json()["error"]["code"].as_u64()),
        (500, Some(500))
    );
    // Later than a stream keeps its status back.
    let stream = server("error_read_4", &json!({"delay_us": 300_000}), &[]);
    let body = json!({"prompt": "a", "max_tokens": 9, "stream": true});
    let events = stream.post("/v1/completions", &body).events();
    let last: Value = serde_json::from_str(events.last().expect("an event")).expect("JSON");
    assert_eq!(last["error"]["type"], "server_error", "{events:?}");
    assert!(!events.contains(&"[DONE]".to_owned()));
}

#[test]
fn memory_that_is_used_up_is_told_as_such() {
    let server = server("full_take_8", &json!({}), &[]);
    let failed = ask(&server, "a");
    assert_eq!(
        (failed.status, failed.header("retry-after")),
        (503, Some("1")),
        "{}",
        failed.text()
    );
    assert_eq!(failed.json()["error"]["code"], "device_memory");
    assert_eq!(
        ask(&server, "a").success()["choices"][0]["text"],
        continuation("a", 9)
    );
}

#[test]
fn numbers_that_are_none_never_become_text_and_concern_their_own_request() {
    // On the host, which samples where penalties are asked for, and on the device.
    for (fault, mode, penalty) in [
        ("nan_read_6", "off", 0.001),
        ("nan_read_6", "on", 0.001),
        ("nan_sample_6", "off", 0.0),
        ("nan_sample_6", "on", 0.0),
    ] {
        not_a_number(fault, mode, penalty);
    }
}

fn not_a_number(fault: &str, mode: &str, penalty: f64) {
    let script = json!({"delay_us": 20_000});
    let server = server(fault, &script, &["--lookahead", mode]);
    let live = server.metric("mlxcel_engine_live_tensors");
    let answers: Vec<Response> = thread::scope(|scope| {
        let asked: Vec<_> = ["a", "b", "c"]
            .map(|prompt| {
                let server = &server;
                scope.spawn(move || {
                    server.post(
                        "/v1/completions",
                        &json!({"prompt": prompt, "max_tokens": 40, "presence_penalty": penalty}),
                    )
                })
            })
            .into_iter()
            .collect();
        asked
            .into_iter()
            .map(|thread| thread.join().expect("answered"))
            .collect()
    });
    let failed: Vec<&Response> = answers
        .iter()
        .filter(|answer| answer.status != 200)
        .collect();
    assert_eq!(
        failed.len(),
        1,
        "{fault}, {mode}: the first row of one step was spoilt"
    );
    assert_eq!(failed[0].status, 500);
    assert!(failed[0].text().contains("NaN"), "{}", failed[0].text());
    for (answer, prompt) in answers
        .iter()
        .zip(["a", "b", "c"])
        .filter(|(answer, _)| answer.status == 200)
    {
        assert_eq!(
            answer.json()["choices"][0]["text"],
            continuation(prompt, 40)
        );
    }
    assert_eq!(server.metric("mlxcel_batch_failed_steps_total"), 0.0);
    assert_eq!(server.get("/health").status, 200);
    settle(&server, live);
}

#[test]
fn a_device_that_hangs_is_told_and_nobody_waits_for_it() {
    for (fault, mode) in [
        ("hang_read_4", "off"),
        ("hang_take_10", "off"),
        ("hang_read_4", "on"),
        ("hang_sample_4", "on"),
    ] {
        let flags = ["--step-timeout", "1", "--lookahead", mode];
        let server = server(fault, &json!({}), &flags);
        let answers: Vec<Response> = thread::scope(|scope| {
            let asked: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 50}))
                    })
                })
                .collect();
            asked
                .into_iter()
                .map(|thread| thread.join().expect("answered"))
                .collect()
        });
        for answer in &answers {
            assert_eq!(answer.status, 503, "{}", answer.text());
            assert_eq!(answer.json()["error"]["code"], "engine_stuck");
        }
        assert_eq!(server.get("/health").status, 503);
        let health = server.get("/metrics").text();
        assert!(
            health.contains("mlxcel_engine_step_age_seconds"),
            "{health}"
        );
    }
}

#[test]
fn tensors_do_not_grow_with_requests_or_tokens() {
    for mode in MODES {
        tensors_after_many_requests(mode);
    }
}

fn tensors_after_many_requests(mode: &str) {
    let server = server(
        "none",
        &json!({}),
        &["--parallel", "8", "--lookahead", mode],
    );
    let live = server.metric("mlxcel_engine_live_tensors");
    thread::scope(|scope| {
        for client in 0..8 {
            let server = &server;
            scope.spawn(move || {
                for length in 1..12usize {
                    let prompt = "x".repeat(length * 9 + client);
                    let answer = server.post(
                        "/v1/completions",
                        &json!({"prompt": prompt, "max_tokens": 60}),
                    );
                    assert_eq!(
                        answer.success()["choices"][0]["text"],
                        continuation("x", 60)
                    );
                }
            });
        }
    });
    settle(&server, live);
}
