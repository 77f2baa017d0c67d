//! Clients and engines that misbehave: no request hangs, no text is wrong, health says what is.

use std::sync::Barrier;
use std::thread;

use mlxcel_tests::cli::Mlxcel;
use mlxcel_tests::http::{Connection, request};
use mlxcel_tests::scripted::continuation;
use mlxcel_tests::server::{Ended, LOOKAHEAD, Server};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

fn signal(server: &Server, signal: Signal) {
    let process = Pid::from_raw(server.id() as i32).expect("a process");
    kill_process(process, signal).expect("signalled");
}

fn completion(prompt: &str, max_tokens: usize, is_stream: bool) -> Vec<u8> {
    json!({"prompt": prompt, "max_tokens": max_tokens, "stream": is_stream})
        .to_string()
        .into_bytes()
}

fn is_idle(server: &Server) -> bool {
    server.metric("llamacpp:requests_processing") + server.metric("llamacpp:requests_deferred")
        == 0.0
        && server.metric("mlxcel_batch_sequences_started_total")
            == server.metric("mlxcel_batch_sequences_completed_total")
}

/// A thousand requests of every kind at once: right ones get the right text, and nothing is left of the others.
#[test]
fn a_thousand_requests_with_disconnects_and_rubbish() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({"delay_us": 200}),
            &[
                "--lookahead",
                lookahead,
                "--temp",
                "0",
                "--metrics",
                "--max-queue-depth",
                "64",
                "--max-body-bytes",
                "20000",
            ],
        );
        let clients = 8;
        let files = || std::fs::read_dir(format!("/proc/{}/fd", server.id())).map(Iterator::count);
        server
            .post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1}))
            .success();
        let files_before = files().ok();
        thread::scope(|scope| {
            for client in 0..clients {
                let server = &server;
                scope.spawn(move || {
                    for round in 0..125 {
                        misbehave(server, client, client * 125 + round);
                    }
                });
            }
        });
        server.wait_for("all answers are over", is_idle);
        assert_eq!(
            server.metric("mlxcel_requests_total{model=\"scripted\",outcome=\"failed\"}"),
            0.0
        );
        assert_eq!(server.get("/health").status, 200);
        // Pages in use are the prefix cache's, and nothing else's.
        let stats = server.get("/v1/cache/stats").success();
        assert_eq!(stats["pool_pages_in_use"], stats["pages"]);
        server.post("/v1/cache/reset", &json!({})).success();
        server.wait_for("the pages are free", |server| {
            server.get("/v1/cache/stats").success()["pool_pages_in_use"] == 0
        });
        server.wait_for("the connections are closed", |server| {
            server.metric("mlxcel_connections") <= 1.0
        });
        server.wait_for("no file is left open", |_| files().ok() <= files_before);
    }
}

fn misbehave(server: &Server, client: usize, number: usize) {
    let letter = char::from(b'a' + (number % 26) as u8);
    let prompt = format!("{}{letter}", "p".repeat(number % 70));
    let mut connection = Connection::open(server.address());
    match number % 7 {
        0 | 1 => {
            connection.send("POST", "/v1/completions", &[], &completion(&prompt, 10, false));
            let text = connection.response().success()["choices"][0]["text"].clone();
            assert_eq!(text, continuation(&prompt, 10), "client {client}");
        }
        2 => {
            connection.send("POST", "/v1/completions", &[], &completion(&prompt, 10, true));
            let mut text = String::new();
            for event in connection.response().events() {
                let chunk: Value = serde_json::from_str(&event).unwrap_or_default();
                text.push_str(chunk["choices"][0]["text"].as_str().unwrap_or_default());
            }
            assert_eq!(text, continuation(&prompt, 10), "client {client}");
        }
        // Leaves before, or in the middle of, the answer.
        3 => drop(connection.send("POST", "/v1/completions", &[], &completion(&prompt, 3000, false))),
        4 => {
            connection.send("POST", "/v1/completions", &[], &completion(&prompt, 3000, true));
            connection.head();
            for _ in 0..number % 4 {
                connection.chunk();
            }
        }
        // Says less, or more, than it promised.
        5 => drop(connection.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{\"prompt\"")),
        _ => {
            connection.send("POST", "/v1/completions", &[], &[b'x'; 30_000]);
            let status = connection.response().status;
            assert!(status == 413 || status == 0, "{status}");
        }
    }
}

#[test]
fn a_full_queue_refuses_at_once_and_says_when_to_come_back() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({"delay_us": 20_000}),
            &[
                "--lookahead",
                lookahead,
                "--temp",
                "0",
                "--parallel",
                "1",
                "--max-queue-depth",
                "2",
                "--metrics",
            ],
        );
        let mut running: Vec<Connection> =
            (0..3).map(|_| Connection::open(server.address())).collect();
        for connection in &mut running {
            connection.send("POST", "/v1/completions", &[], &completion("a", 3000, true));
            assert_eq!(connection.head().status, 200);
        }
        let refused = server.post("/v1/completions", &json!({"prompt": "a"}));
        assert_eq!(
            (refused.status, refused.header("retry-after")),
            (503, Some("1")),
            "{}",
            refused.text()
        );
        assert_eq!(refused.json()["error"]["code"], "queue_full");
        assert_eq!(server.get("/health").status, 200);
        drop(running);
        server.wait_for("there is room again", |server| {
            server
                .post("/v1/completions", &json!({"prompt": "8"}))
                .status
                == 200
        });
        assert!(server.metric("mlxcel_requests_refused_total") >= 1.0);
    }
}

#[test]
fn a_client_that_goes_away_ends_its_answer() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({"delay_us": 5_000}),
            &["--temp", "0", "--lookahead", lookahead, "--metrics"],
        );
        for is_stream in [false, true] {
            let before =
                server.metric("mlxcel_requests_total{model=\"scripted\",outcome=\"cancelled\"}");
            let mut connection = Connection::open(server.address());
            connection.send(
                "POST",
                "/v1/completions",
                &[],
                &completion("a", 4000, is_stream),
            );
            server.wait_for("it runs", |server| {
                server.metric("llamacpp:requests_processing") > 0.0
            });
            drop(connection);
            server.wait_for("it has ended", is_idle);
            assert_eq!(
                server.metric("mlxcel_requests_total{model=\"scripted\",outcome=\"cancelled\"}"),
                before + 1.0
            );
        }
        // 4,000 tokens would have taken 20 s each.
        assert!(server.metric("llamacpp:n_decode_total") < 4_000.0);
    }
}

#[test]
fn silence_is_broken_by_comments() {
    let server = Server::scripted(&json!({"delay_us": 2_500_000}), &["--temp", "0"]);
    let body = json!({"prompt": "a", "max_tokens": 1, "stream": true, "sse_ping_interval": 1});
    let text = server.post("/v1/completions", &body).text();
    assert!(text.starts_with(":\n\n"), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
}

#[test]
fn a_connection_is_closed_when_it_was_asked_to_be() {
    let server = Server::scripted(&json!({}), &["--temp", "0"]);
    for head in [
        "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n",
    ] {
        for is_stream in [false, true] {
            let body = completion("7", 9, is_stream);
            let mut connection = Connection::open(server.address());
            connection.write(format!("{head}Content-Length: {}\r\n\r\n", body.len()).as_bytes());
            connection.write(&body);
            let answer = connection.response();
            assert_eq!(answer.status, 200);
            assert!(connection.is_at_end(), "{head}");
        }
    }
    // Two requests on one connection.
    let mut connection = Connection::open(server.address());
    for _ in 0..2 {
        connection.send("POST", "/v1/completions", &[], &completion("7", 9, true));
        assert!(connection.response().text().ends_with("data: [DONE]\n\n"));
    }
    let packed = request(
        server.address(),
        "POST",
        "/v1/completions",
        &["Content-Encoding: gzip"],
        b"\x1f\x8b",
    );
    assert_eq!(packed.status, 415);
}

#[test]
fn slow_senders_are_not_waited_for() {
    let server = Server::scripted(
        &json!({}),
        &["--header-timeout", "1", "--body-timeout", "1"],
    );
    let mut headers = Connection::open(server.address());
    headers.write(b"GET /health HTTP/1.1\r\nHost: local");
    let mut body = Connection::open(server.address());
    body.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{");
    assert_eq!(body.response().status, 408);
    headers.response();
    assert!(headers.is_at_end());
}

#[test]
fn a_step_that_fails_ends_its_requests_and_no_others() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({"fail_at": 3}),
            &["--temp", "0", "--lookahead", lookahead, "--metrics"],
        );
        let ask = || server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 9}));
        let failed = ask();
        assert_eq!(failed.status, 500, "{}", failed.text());
        assert_eq!(failed.json()["error"]["type"], "server_error");
        assert_eq!(ask().success()["choices"][0]["text"], "bcdefghij");
        assert_eq!(server.metric("mlxcel_batch_failed_steps_total"), 1.0);
        assert_eq!(server.get("/health").status, 200);
    }
}

#[test]
fn a_device_that_fails_again_and_again_is_not_healthy_and_may_come_back() {
    let server = Server::scripted(&json!({"fail_at": 1, "fail_until": 4}), &["--temp", "0"]);
    let ask = || {
        server
            .post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1}))
            .status
    };
    assert_eq!([ask(), ask(), ask()], [500, 500, 500]);
    server.wait_for("it is not healthy", |server| {
        server.get("/health").status == 503
    });
    assert_eq!(ask(), 200);
    server.wait_for("it is healthy", |server| {
        server.get("/health").status == 200
    });
}

#[test]
fn a_model_that_panicked_is_not_healthy_any_more() {
    let server = Server::scripted(&json!({"panic_at": 3}), &["--temp", "0"]);
    let ask = || server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 9}));
    assert_eq!(ask().status, 500);
    server.wait_for("it is not healthy", |server| {
        server.get("/health").status == 503
    });
    let refused = ask();
    assert_eq!(
        (refused.status, refused.json()["error"]["code"].as_str()),
        (503, Some("engine_poisoned"))
    );
    assert_eq!(server.get("/v1/models").status, 200);
}

#[test]
fn a_reader_that_takes_nothing_is_given_up() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({}),
            &[
                "--temp",
                "0",
                "--lookahead",
                lookahead,
                "--metrics",
                "--write-timeout",
                "1",
            ],
        );
        let mut deaf = Connection::open(server.address());
        let body = json!({"prompt": "a", "max_tokens": 4000, "n": 8, "stream": true}).to_string();
        deaf.send("POST", "/v1/completions", &[], body.as_bytes());
        // Others are served meanwhile.
        assert_eq!(
            server
                .post("/v1/completions", &json!({"prompt": "7"}))
                .success()["choices"][0]["text"],
            "89!"
        );
        server.wait_for("it is given up", |server| {
            server.metric("mlxcel_requests_total{model=\"scripted\",outcome=\"cancelled\"}")
                + server.metric("mlxcel_requests_total{model=\"scripted\",outcome=\"failed\"}")
                == 1.0
        });
        server.wait_for("it has ended", is_idle);
        drop(deaf);
    }
}

#[test]
fn an_error_in_the_middle_of_a_stream_is_its_last_event() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({"delay_us": 300_000, "fail_at": 5}),
            &["--temp", "0", "--lookahead", lookahead],
        );
        let answer = server.post(
            "/v1/completions",
            &json!({"prompt": "a", "max_tokens": 9, "stream": true}),
        );
        assert_eq!(answer.status, 200);
        let events = answer.events();
        let last: Value = serde_json::from_str(events.last().expect("an event")).expect("JSON");
        assert_eq!(last["error"]["type"], "server_error", "{events:?}");
    }
}

#[test]
fn a_stuck_engine_is_told_and_nobody_waits_for_it() {
    for lookahead in LOOKAHEAD {
        let server = Server::scripted(
            &json!({"hang_at": 6}),
            &[
                "--temp",
                "0",
                "--lookahead",
                lookahead,
                "--step-timeout",
                "1",
                "--drain-timeout",
                "1",
            ],
        );
        let answers: Vec<_> = thread::scope(|scope| {
            let ask = |is_stream| {
                let server = &server;
                scope.spawn(move || {
                    server.post_bytes("/v1/completions", &completion("a", 100, is_stream))
                })
            };
            let asked: Vec<_> = [false, true, false].map(ask).into_iter().collect();
            asked
                .into_iter()
                .map(|thread| thread.join().expect("answered"))
                .collect()
        });
        for answer in &answers {
            assert!(
                answer.status == 503 || answer.text().contains("\"code\":\"engine_stuck\""),
                "{} {}",
                answer.status,
                answer.text()
            );
        }
        let health = server.get("/health");
        assert_eq!(health.status, 503);
        assert!(health.text().contains("stuck"), "{}", health.text());
        assert_eq!(
            server
                .post("/v1/completions", &json!({"prompt": "a"}))
                .status,
            503
        );
        assert_eq!(server.get("/v1/models").status, 200);
        let mut server = server;
        signal(&server, Signal::TERM);
        assert_eq!(server.wait().code, Some(0));
    }
}

#[test]
fn answers_end_before_the_server_does() {
    for lookahead in LOOKAHEAD {
        let mut server = Server::scripted(
            &json!({"delay_us": 10_000}),
            &["--temp", "0", "--lookahead", lookahead],
        );
        let mut connection = Connection::open(server.address());
        connection.send("POST", "/v1/completions", &[], &completion("a", 60, true));
        connection.head();
        connection.chunk();
        signal(&server, Signal::TERM);
        server.wait_for("it drains", |server| server.get("/health").status == 503);
        assert_eq!(
            server
                .post("/v1/completions", &json!({"prompt": "a"}))
                .json()["error"]["code"],
            "draining"
        );
        let mut rest = Vec::new();
        while let Some(chunk) = connection.chunk() {
            rest.extend(chunk);
        }
        assert!(String::from_utf8_lossy(&rest).ends_with("data: [DONE]\n\n"));
        let Ended { code, stderr } = server.wait();
        assert_eq!(code, Some(0), "{stderr}");
        assert!(stderr.contains("no answer was cut at the end"), "{stderr}");
    }
}

#[test]
fn answers_that_take_too_long_are_ended_with_a_word() {
    for lookahead in LOOKAHEAD {
        let mut server = Server::scripted(
            &json!({"delay_us": 50_000}),
            &[
                "--temp",
                "0",
                "--lookahead",
                lookahead,
                "--drain-timeout",
                "0",
            ],
        );
        let mut connection = Connection::open(server.address());
        connection.send("POST", "/v1/completions", &[], &completion("a", 4000, true));
        connection.head();
        connection.chunk();
        signal(&server, Signal::INT);
        let mut rest = Vec::new();
        while let Some(chunk) = connection.chunk() {
            rest.extend(chunk);
        }
        let rest = String::from_utf8_lossy(&rest);
        assert!(rest.contains("\"code\":\"draining\""), "{rest}");
        assert_eq!(server.wait().code, Some(0));
    }
}

/// Nobody has anything to wait for on a connection without a request, or with the beginning of one.
#[test]
fn silent_connections_do_not_hold_up_the_end() {
    let mut server = Server::scripted(&json!({}), &["--temp", "0", "--metrics", "-v"]);
    let said = [
        "",
        "GET /heal",
        "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    ];
    let open: Vec<Connection> = said
        .iter()
        .map(|said| {
            let mut connection = Connection::open(server.address());
            connection.write(said.as_bytes());
            connection
        })
        .collect();
    server.wait_for("all are there", |server| {
        server.metric("mlxcel_connections") >= said.len() as f64
    });
    signal(&server, Signal::TERM);
    let Ended { code, stderr } = server.wait();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("no answer was cut at the end"), "{stderr}");
    assert!(!stderr.contains("before all was written"), "{stderr}");
    drop(open);
}

#[test]
fn the_end_says_how_many_answers_were_cut() {
    let flags = ["--temp", "0", "--drain-timeout", "1", "--metrics"];
    let mut server = Server::scripted(&json!({"delay_us": 50_000}), &flags);
    let mut asked: Vec<Connection> = [true, false, true]
        .map(|is_stream| {
            let mut connection = Connection::open(server.address());
            let body = completion("a", 4000, is_stream);
            connection.send("POST", "/v1/completions", &[], &body);
            connection
        })
        .into_iter()
        .collect();
    server.wait_for("all run", |server| {
        server.metric("llamacpp:requests_processing") == 3.0
    });
    signal(&server, Signal::TERM);
    let answers: Vec<_> = asked.iter_mut().map(Connection::response).collect();
    for (answer, status) in answers.iter().zip([200, 503, 200]) {
        assert_eq!(answer.status, status);
        assert!(answer.text().contains("\"code\":\"draining\""));
        assert!(!answer.text().contains("[DONE]"));
    }
    let Ended { code, stderr } = server.wait();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(
        stderr.contains("3 answers were not finished in time"),
        "{stderr}"
    );
}

#[test]
fn health_says_loading_until_a_token_was_computed() {
    let home = Mlxcel::new().with_mock_plugins();
    // The first step is the server's own.
    let server = Server::scripted_listening(home, &json!({"delay_us": 1_500_000}), &[]);
    let health = server.get("/health");
    assert_eq!(health.status, 503);
    assert!(health.text().contains("Loading model"), "{}", health.text());
    assert_eq!(
        server
            .post("/v1/completions", &json!({"prompt": "a"}))
            .json()["error"]["code"],
        "model_loading"
    );
    server.wait_for("it is ready", |server| server.get("/health").status == 200);
    let home = Mlxcel::new().with_mock_plugins();
    let mut broken = Server::scripted_listening(home, &json!({"fail_at": 0}), &[]);
    let ended = broken.wait();
    assert!(
        ended.code != Some(0) && ended.stderr.contains("fails as told"),
        "{ended:?}"
    );
}

/// The address is a promise: with a model that cannot be served none is printed.
#[test]
fn no_address_is_printed_for_a_model_that_cannot_be_served() {
    let home = Mlxcel::new().with_mock_plugins();
    let model = home.mock_model("model");
    let config = std::fs::read_to_string(model.join("config.json")).expect("read");
    for (config, message) in [
        (config.replace("\"mock\"", "\"mcok\""), "no plugin knows"),
        (config.clone(), "tokenizer"),
    ] {
        home.file("model/config.json", config);
        let done = home.run(["serve", "-m", "./model", "--port", "0", "--force"]);
        assert_eq!(done.stdout, "", "{}", done.show());
        assert!(done.stderr.contains(message), "{}", done.show());
    }
    let home = home.with("MLXCEL_MEMORY_LIMIT", "1");
    let done = home.run(["serve", "-m", "./model", "--port", "0"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(7), ""));
}

#[test]
fn a_long_prompt_does_not_keep_short_ones_waiting() {
    let server = Server::scripted(
        &json!({"delay_us": 20_000}),
        &[
            "--temp",
            "0",
            "--prefill-chunk-size",
            "64",
            "--prefill-beside-decode",
            "16",
        ],
    );
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let long = scope.spawn(|| {
            let mut connection = Connection::open(server.address());
            connection.send(
                "POST",
                "/v1/completions",
                &[],
                &completion(&"l".repeat(4000), 1, false),
            );
            barrier.wait();
            connection.response().success();
            std::time::Instant::now()
        });
        barrier.wait();
        for _ in 0..3 {
            server
                .post("/v1/completions", &json!({"prompt": "a", "max_tokens": 2}))
                .success();
        }
        let short_ended = std::time::Instant::now();
        assert!(short_ended < long.join().expect("answered"));
    });
}
