//! Requests whose frame is odd rather than their content: lines, names, codings and lengths of HTTP itself, and senders
//! that leave or are left in the middle.

use std::thread;

use mlxcel_tests::http::{Connection, Response};
use mlxcel_tests::scripted::continuation;
use mlxcel_tests::server::{LOOKAHEAD, Server};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const BODY: &str = r#"{"prompt": "7", "max_tokens": 9}"#;

fn server(flags: &[&str]) -> Server {
    let flags = [&["--temp", "0", "--metrics"], flags].concat();
    Server::scripted(&json!({"delay_us": 2_000}), &flags)
}

fn write(server: &Server, text: &str) -> (Connection, Response) {
    let mut connection = Connection::open(server.address());
    connection.write(text.as_bytes());
    let response = connection.response();
    (connection, response)
}

fn post(server: &Server, headers: &str, body: &str) -> Response {
    write(
        server,
        &format!("POST /v1/completions HTTP/1.1\r\n{headers}\r\n{body}"),
    )
    .1
}

fn code(response: &Response) -> Value {
    response.json()["error"]["code"].clone()
}

#[test]
fn a_name_counts_wherever_it_stands_and_is_there_once() {
    let server = server(&[]);
    let get = |target: &str, headers: &str| {
        write(&server, &format!("GET {target} HTTP/1.1\r\n{headers}\r\n")).1
    };
    assert_eq!(get("/health", "Host: localhost\r\n").status, 200);
    assert_eq!(
        get("http://localhost/health", "Host: localhost\r\n").status,
        200
    );
    for (target, headers) in [
        ("/health", "Host: evil.example\r\n"),
        ("http://evil.example/health", "Host: localhost\r\n"),
        ("http://localhost/health", "Host: evil.example\r\n"),
    ] {
        let refused = get(target, headers);
        assert_eq!(refused.status, 403, "{target}, {headers}");
        assert!(refused.text().contains("evil.example"));
    }
    for headers in [
        "Host: localhost\r\nHost: evil.example\r\n",
        "Host: local host\r\n",
        "Host: me@localhost\r\n",
        "Accept: */*\r\n",
    ] {
        let refused = get("/health", headers);
        assert_eq!(refused.status, 400, "{headers}: {}", refused.text());
        let message = refused.json()["error"]["message"].clone();
        assert!(message.as_str().is_some_and(|text| text.contains("Host")));
    }
    // HTTP/1.0 needs no name, but may have one.
    let old = |target: &str| write(&server, &format!("GET {target} HTTP/1.0\r\n\r\n")).1;
    assert_eq!(old("/health").status, 200);
    assert_eq!(old("http://evil.example/health").status, 403);
}

#[test]
fn bodies_come_whole_or_in_plain_chunks_and_as_nothing_else() {
    let server = server(&[]);
    let text = |answer: Response| answer.success()["choices"][0]["text"].clone();
    let length = BODY.len();
    let whole = post(
        &server,
        &format!("Host: localhost\r\nContent-Length: {length}\r\n"),
        BODY,
    );
    assert_eq!(text(whole), "89!");
    let chunks = format!(
        "5;note=x\r\n{}\r\n{:x}\r\n{}\r\n0\r\nTrailer: x\r\n\r\n",
        &BODY[..5],
        length - 5,
        &BODY[5..]
    );
    let chunked = "Host: localhost\r\nTransfer-Encoding: Chunked\r\n";
    assert_eq!(text(post(&server, chunked, &chunks)), "89!");
    let packed = "Host: localhost\r\nTransfer-Encoding: gzip, chunked\r\n";
    let refused = post(&server, packed, &chunks);
    assert_eq!(refused.status, 415, "{}", refused.text());
    for headers in [
        "Transfer-Encoding: identity\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: 18446744073709551616\r\n",
    ] {
        let refused = post(&server, &format!("Host: localhost\r\n{headers}"), BODY);
        assert_eq!(refused.status, 400, "{headers}");
    }
    // Nothing is sent before the server asks for it.
    let mut asked = Connection::open(server.address());
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n"
    );
    asked.write(head.as_bytes());
    assert_eq!(asked.head().status, 100);
    asked.write(BODY.as_bytes());
    assert_eq!(text(asked.response()), "89!");
}

#[test]
fn errors_are_json_and_do_not_repeat_what_was_sent_at_any_length() {
    let server = server(&[]);
    let bad_name = server.get("/v1/models/%ff");
    assert_eq!((bad_name.status, code(&bad_name)), (400, Value::Null));
    let long = "x".repeat(100_000);
    for (route, body) in [
        ("/v1/completions", json!({"prompt": "a", long.as_str(): 1})),
        ("/v1/completions", json!({"prompt": "a", "model": long})),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "a", long.as_str(): 1}]}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": long, "content": "a"}]}),
        ),
        ("/completion", json!({"prompt": "a", long.as_str(): 1})),
    ] {
        let refused = server.post(route, &body);
        assert!((400..=404).contains(&refused.status), "{route}");
        let length = refused.body.len();
        assert!(length < 3000, "{route}: {length} bytes");
        assert!(refused.json()["error"]["message"].is_string());
    }
    let seed = server.post("/v1/completions", &json!({"prompt": "a", "seed": u64::MAX}));
    assert_eq!(
        seed.json()["error"]["message"],
        "seed is 18446744073709551615, expected a whole number of at most 63 bits"
    );
    // More headers, and longer ones, than anybody needs.
    let many: String = (0..500).map(|n| format!("X-{n}: a\r\n")).collect();
    assert_eq!(
        post(&server, &format!("Host: localhost\r\n{many}"), "").status,
        431
    );
    let key = format!(
        "Host: localhost\r\nAuthorization: Bearer {}\r\n",
        "k".repeat(1_000_000)
    );
    // It may have closed the connection before all of it was written.
    assert!(matches!(post(&server, &key, "").status, 431 | 0));
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn several_answers_end_with_the_client_that_wanted_them() {
    for lookahead in LOOKAHEAD {
        let server = server(&["--parallel", "3", "--lookahead", lookahead]);
        let live = server.metric("mlxcel_engine_live_tensors");
        for (round, is_stream) in (0..8).flat_map(|n| [(n, false), (n, true)]) {
            let prompt = "ab".repeat(40);
            let body = json!({"prompt": prompt, "n": 6, "max_tokens": 3000, "stream": is_stream});
            let mut connection = Connection::open(server.address());
            connection.send("POST", "/v1/completions", &[], body.to_string().as_bytes());
            server.wait_for("it runs", |server| {
                server.metric("llamacpp:requests_processing") > 0.0
            });
            if is_stream {
                connection.head();
                for _ in 0..round {
                    connection.chunk();
                }
            }
            drop(connection);
        }
        server.wait_for("all answers are over", |server| {
            server.metric("llamacpp:requests_processing") + server.metric("mlxcel_queue_depth")
                == 0.0
        });
        server.post("/v1/cache/reset", &json!({})).success();
        server.wait_for("everything is given back", |server| {
            server.get("/v1/cache/stats").success()["pool_pages_in_use"] == 0
                && server.metric("mlxcel_engine_live_tensors") == live
                && server.metric("mlxcel_connections") <= 1.0
        });
        let answer = server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 5}));
        assert_eq!(answer.success()["choices"][0]["text"], continuation("a", 5));
    }
}

#[test]
fn a_prompt_in_work_is_answered_before_the_server_ends() {
    for lookahead in LOOKAHEAD {
        let flags = ["--lookahead", lookahead, "--prefill-chunk-size", "32"];
        let mut server = server(&flags);
        let body = |is_stream| {
            let prompt = format!("{}{is_stream}a", "l".repeat(3000));
            json!({"prompt": prompt, "max_tokens": 4, "n": 2, "stream": is_stream}).to_string()
        };
        let asked: Vec<Connection> = [false, true]
            .map(|is_stream| {
                let mut connection = Connection::open(server.address());
                let body = body(is_stream);
                connection.send("POST", "/v1/completions", &[], body.as_bytes());
                connection
            })
            .into_iter()
            .collect();
        server.wait_for("they run", |server| {
            server.metric("llamacpp:requests_processing") > 0.0
                && server.metric("mlxcel_connections") > 2.0
        });
        let process = Pid::from_raw(server.id() as i32).expect("a process");
        kill_process(process, Signal::TERM).expect("signalled");
        let answers: Vec<Response> = thread::scope(|scope| {
            let readers: Vec<_> = asked
                .into_iter()
                .map(|mut connection| scope.spawn(move || connection.response()))
                .collect();
            let ended = readers.into_iter().map(|reader| reader.join());
            ended.map(|answer| answer.expect("answered")).collect()
        });
        let whole = answers[0].success();
        for choice in whole["choices"].as_array().expect("choices") {
            assert_eq!(choice["text"], "bcde", "{lookahead}");
        }
        assert!(answers[1].text().ends_with("data: [DONE]\n\n"));
        assert_eq!(server.wait().code, Some(0));
    }
}
