//! Clients that have said all they want to say and close that half of the connection: they are answered. Those that are
//! gone look the same at first, and are found out.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use mlxcel_tests::cli::Mlxcel;
use mlxcel_tests::http::Connection;
use mlxcel_tests::scripted::continuation;
use mlxcel_tests::server::{LOOKAHEAD, Server};
use serde_json::{Value, json};

const CANCELLED: &str = "mlxcel_requests_total{model=\"scripted\",outcome=\"cancelled\"}";

fn server(flags: &[&str]) -> Server {
    let flags = [&["--temp", "0", "--metrics"], flags].concat();
    Server::scripted(&json!({"delay_us": 5_000}), &flags)
}

fn body(max_tokens: usize, is_stream: bool) -> String {
    json!({"prompt": "a", "max_tokens": max_tokens, "stream": is_stream}).to_string()
}

fn request(version: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST /v1/completions {version}\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

fn is_idle(server: &Server) -> bool {
    server.metric("llamacpp:requests_processing") + server.metric("mlxcel_queue_depth") == 0.0
}

fn runs(server: &Server) {
    server.wait_for("it runs", |server| {
        server.metric("llamacpp:requests_processing") > 0.0
    });
}

#[test]
fn who_only_listens_is_answered() {
    for lookahead in LOOKAHEAD {
        let server = server(&["--lookahead", lookahead]);
        for tokens in [1, 100] {
            let mut whole = Connection::open(server.address());
            whole.send(
                "POST",
                "/v1/completions",
                &[],
                body(tokens, false).as_bytes(),
            );
            whole.end_writing();
            let answer = whole.response().success();
            assert_eq!(answer["choices"][0]["text"], continuation("a", tokens));
            assert!(whole.is_at_end());
            let mut stream = Connection::open(server.address());
            stream.send(
                "POST",
                "/v1/completions",
                &[],
                body(tokens, true).as_bytes(),
            );
            stream.end_writing();
            let answer = stream.response();
            let events = answer.events();
            assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
            let text: String = events
                .iter()
                .filter_map(|event| serde_json::from_str::<Value>(event).ok())
                .filter_map(|chunk| Some(chunk["choices"][0]["text"].as_str()?.to_owned()))
                .collect();
            assert_eq!(text, continuation("a", tokens));
            assert!(stream.is_at_end());
        }
        let mut health = Connection::open(server.address());
        health.send("GET", "/health", &[], b"");
        health.end_writing();
        assert_eq!(health.response().status, 200);
        // Two at once, and then nothing more.
        let mut two = Connection::open(server.address());
        two.write(request("HTTP/1.1", &body(20, false)).repeat(2).as_bytes());
        two.end_writing();
        for _ in 0..2 {
            let answer = two.response().success();
            assert_eq!(answer["choices"][0]["text"], continuation("a", 20));
        }
        assert_eq!(server.metric(CANCELLED), 0.0);
    }
}

#[test]
fn who_listens_no_more_is_not_answered() {
    for lookahead in LOOKAHEAD {
        let server = server(&["--lookahead", lookahead]);
        for is_stream in [false, true] {
            let before = server.metric(CANCELLED);
            let mut connection = Connection::open(server.address());
            connection.write(request("HTTP/1.1", &body(4000, is_stream)).as_bytes());
            connection.end_writing();
            // An interim response, or the head of the stream.
            let first = connection.head().status;
            assert_eq!(first, if is_stream { 200 } else { 100 });
            runs(&server);
            drop(connection);
            server.wait_for("it has ended", is_idle);
            assert_eq!(server.metric(CANCELLED), before + 1.0);
        }
        // 4,000 tokens would have taken 20 s each.
        assert!(server.metric("llamacpp:n_decode_total") < 4_000.0);
    }
}

#[test]
fn an_older_client_that_closes_its_half_is_gone() {
    let server = server(&[]);
    let mut connection = Connection::open(server.address());
    connection.write(request("HTTP/1.0", &body(4000, false)).as_bytes());
    connection.end_writing();
    assert_eq!(connection.response().status, 0);
    server.wait_for("it has ended", is_idle);
    assert_eq!(server.metric(CANCELLED), 1.0);
    // What is there at once is still sent.
    let mut health = Connection::open(server.address());
    health.write(b"GET /health HTTP/1.0\r\n\r\n");
    health.end_writing();
    assert_eq!(health.response().status, 200);
}

/// What a client has sent ahead hides its end from who reads, not from who asks the system.
#[test]
fn what_was_sent_ahead_does_not_hide_that_a_client_is_gone() {
    let server = server(&[]);
    for ahead in ["\r\n", "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"] {
        for is_stream in [false, true] {
            let before = server.metric(CANCELLED);
            let mut connection = Connection::open(server.address());
            let sent = request("HTTP/1.1", &body(4000, is_stream)) + ahead;
            connection.write(sent.as_bytes());
            runs(&server);
            drop(connection);
            server.wait_for("it has ended", is_idle);
            assert_eq!(server.metric(CANCELLED), before + 1.0, "{ahead:?}");
        }
    }
}

#[test]
fn a_unix_socket_knows_both_ends_too() {
    let home = Mlxcel::new().with_mock_plugins();
    let path = home.path("server.sock");
    let host = path.to_string_lossy().into_owned();
    let script = json!({"delay_us": 5_000});
    let flags = ["--host", &host, "--temp", "0", "--metrics"];
    let server = Server::scripted_in(home, &script, &flags);
    let ask = |text: &str| {
        let mut stream = UnixStream::connect(&path).expect("connected");
        stream.write_all(text.as_bytes()).expect("written");
        stream.shutdown(Shutdown::Write).expect("closed");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("read");
        answer
    };
    server.wait_for("it is ready", |_| {
        ask("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").starts_with("HTTP/1.1 200")
    });
    let answer = ask(&request("HTTP/1.1", &body(100, false)));
    assert!(answer.contains(&continuation("a", 100)), "{answer}");
    let mut gone = UnixStream::connect(&path).expect("connected");
    gone.write_all(request("HTTP/1.1", &body(4000, false)).as_bytes())
        .expect("written");
    drop(gone);
    server.wait_for("it has ended", |_| {
        let page = ask("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
        page.contains(&format!("{CANCELLED} 1\n"))
    });
}
