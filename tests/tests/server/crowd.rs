//! More connections than there is room for: those that keep the server waiting make room for those that do not.

use mlxcel_tests::http::{Connection, Response};
use mlxcel_tests::scripted::continuation;
use mlxcel_tests::server::Server;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};

/// Nobody is closed for having waited too long in these tests.
const PATIENT: [&str; 8] = [
    "--temp",
    "0",
    "--metrics",
    "--header-timeout=600",
    "--body-timeout=600",
    "--write-timeout=600",
    "--parallel=2",
    "--lookahead=off",
];

const DISPLACED: &str = "mlxcel_connections_displaced_total";

fn server(script: &Value, flags: &[&str]) -> Server {
    Server::scripted(script, &[&PATIENT, flags].concat())
}

fn is_served(server: &Server) {
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/metrics").status, 200);
    let answer = server.post("/v1/completions", &json!({"prompt": "7"}));
    assert_eq!(answer.success()["choices"][0]["text"], "89!");
}

fn open(server: &Server, said: &str, count: usize) -> Vec<Connection> {
    let open = || {
        let mut connection = Connection::open(server.address());
        connection.write(said.as_bytes());
        connection
    };
    (0..count).map(|_| open()).collect()
}

#[test]
fn silent_connections_in_any_number_keep_nobody_out() {
    let server = server(&json!({}), &[]);
    // More than the 512 that may be open.
    let silent = open(&server, "", 600);
    is_served(&server);
    assert!(server.metric(DISPLACED) >= 88.0);
    assert!(server.metric("mlxcel_connections") <= 512.0);
    drop(silent);
    server.wait_for("they are gone", |server| {
        server.metric("mlxcel_connections") <= 1.0
    });
}

#[test]
fn whoever_does_not_finish_a_request_makes_room() {
    let server = server(&json!({}), &["--max-connections", "8"]);
    let half = "GET /health HTTP/1.1\r\nHost: local";
    let body = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{";
    let chunks = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{";
    // Answered once, and silent since.
    let idle = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    for said in ["", half, body, chunks, idle] {
        let before = server.metric(DISPLACED);
        let many = open(&server, said, 30);
        is_served(&server);
        assert!(server.metric(DISPLACED) >= before + 20.0, "{said}");
        assert!(server.metric("mlxcel_connections") <= 8.0);
        drop(many);
    }
}

#[test]
fn whoever_does_not_read_makes_room() {
    let server = server(&json!({}), &["--max-connections", "6"]);
    let body = json!({"prompt": "a", "max_tokens": 4000, "n": 8, "stream": true}).to_string();
    let mut deaf = Connection::open(server.address());
    deaf.send("POST", "/v1/completions", &[], body.as_bytes());
    let cancelled = "mlxcel_requests_total{model=\"scripted\",outcome=\"cancelled\"}";
    // Others come until the one that takes nothing has gone for them; all of it may fit into the system's buffers.
    server.wait_for("it made room, or is answered", |server| {
        let others = open(server, "", 6);
        is_served(server);
        drop(others);
        server.metric(cancelled) == 1.0 || server.metric("llamacpp:requests_processing") == 0.0
    });
    is_served(&server);
    drop(deaf);
}

#[test]
fn an_answer_in_work_is_not_closed_for_others() {
    let server = server(&json!({"delay_us": 2_000}), &["--max-connections", "4"]);
    let ask = |is_stream: bool| {
        let body = json!({"prompt": "a", "max_tokens": 300, "stream": is_stream}).to_string();
        let mut connection = Connection::open(server.address());
        connection.send("POST", "/v1/completions", &[], body.as_bytes());
        connection
    };
    let mut asked = [ask(false), ask(true)];
    server.wait_for("both run", |server| {
        server.metric("llamacpp:requests_processing") == 2.0
    });
    for _ in 0..5 {
        drop(open(&server, "", 10));
        let silent = open(&server, "", 10);
        is_served(&server);
        drop(silent);
    }
    let [whole, streamed] = asked.each_mut().map(Connection::response);
    assert_eq!(
        whole.success()["choices"][0]["text"],
        continuation("a", 300)
    );
    assert_eq!(text(&streamed), continuation("a", 300));
}

fn text(stream: &Response) -> String {
    let chunk = |event: &String| serde_json::from_str::<Value>(event).unwrap_or_default();
    let chunks = stream.events();
    let texts = chunks.iter().map(chunk);
    texts
        .map(|chunk| {
            let text = chunk["choices"][0]["text"].as_str();
            text.unwrap_or_default().to_owned()
        })
        .collect()
}

#[test]
fn while_all_are_being_answered_the_next_one_waits_for_the_first_to_end() {
    let server = server(&json!({"delay_us": 20_000}), &["--max-connections", "2"]);
    let body = json!({"prompt": "a", "max_tokens": 30, "stream": true}).to_string();
    let mut asked = open(&server, "", 2);
    for connection in &mut asked {
        connection.send("POST", "/v1/completions", &[], body.as_bytes());
        assert_eq!(connection.head().status, 200);
    }
    is_served(&server);
    for mut connection in asked {
        let mut stream = Response::default();
        while let Some(chunk) = connection.chunk() {
            stream.body.extend(chunk);
        }
        assert_eq!(text(&stream), continuation("a", 30));
    }
}

/// A process that may open fewer files than there may be connections.
#[test]
fn where_files_are_short_somebody_makes_room_too() {
    let server = server(&json!({}), &[]);
    is_served(&server);
    let process = Pid::from_raw(server.id() as i32).expect("a process");
    let files = std::fs::read_dir(format!("/proc/{}/fd", server.id())).map(Iterator::count);
    let Ok(files) = files else {
        return;
    };
    let limit = Rlimit {
        current: Some(files as u64 + 10),
        maximum: Some(files as u64 + 10),
    };
    prlimit(Some(process), Resource::Nofile, limit).expect("limited");
    let silent = open(&server, "", 60);
    is_served(&server);
    // Files of the request before may have been among those that were counted, and are free for connections meanwhile.
    assert!(server.metric("mlxcel_connections") <= 15.0);
    drop(silent);
}
