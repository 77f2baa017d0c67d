//! Who may ask, by which names, and where the server is found.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use mlxcel_tests::cli::Mlxcel;
use mlxcel_tests::http::{Connection, request};
use mlxcel_tests::server::Server;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::json;

#[test]
fn keys_are_asked_for_everywhere_but_at_health() {
    let home = Mlxcel::new().with_mock_plugins();
    let file = home.file("keys", "# two\nfrom-file\n");
    let file = file.to_string_lossy().into_owned();
    let server = Server::scripted_in(
        home,
        &json!({}),
        &[
            "--api-key",
            "one,two",
            "--api-key-file",
            &file,
            "--metrics",
            "-v",
        ],
    );
    let with = |path: &str, header: &str| request(server.address(), "GET", path, &[header], b"");
    assert_eq!(
        (
            server.get("/health").status,
            server.get("/v1/health").status
        ),
        (200, 200)
    );
    for path in [
        "/v1/models",
        "/metrics",
        "/props",
        "/slots",
        "/v1/cache/stats",
        "/nothing",
    ] {
        let answer = server.get(path);
        assert_eq!(
            (answer.status, answer.header("www-authenticate")),
            (401, Some("Bearer")),
            "{path}"
        );
    }
    for header in [
        "Authorization: Bearer two",
        "X-Api-Key: one",
        "Authorization: Bearer from-file",
    ] {
        assert_eq!(with("/v1/models", header).status, 200, "{header}");
    }
    for header in [
        "Authorization: Bearer wrong-secret",
        "Authorization: Basic one",
        "Authorization: Bearer",
        "X-Api-Key: # two",
    ] {
        assert_eq!(with("/v1/models", header).status, 401, "{header}");
    }
    // Tenants do not see each other's cached prefixes.
    let body = json!({"prompt": "y".repeat(100), "n_predict": 1}).to_string();
    let cached = |key: &str| {
        let answer = request(
            server.address(),
            "POST",
            "/completion",
            &[&format!("X-Api-Key: {key}")],
            body.as_bytes(),
        );
        answer.success()["timings"]["cache_n"]
            .as_u64()
            .expect("a number")
    };
    assert_eq!(
        (cached("one"), cached("two"), cached("one"), cached("two")),
        (0, 0, 99, 99)
    );
    let mut server = server;
    terminate(&server);
    let ended = server.wait();
    for secret in ["wrong-secret", "from-file", "yyyy"] {
        assert!(!ended.stderr.contains(secret), "{}", ended.stderr);
    }
}

fn terminate(server: &Server) {
    let process = rustix::process::Pid::from_raw(server.id() as i32).expect("a process");
    rustix::process::kill_process(process, rustix::process::Signal::TERM).expect("signalled");
}

#[test]
fn other_names_and_pages_are_turned_away() {
    let server = Server::scripted(
        &json!({}),
        &[
            "--allowed-hosts",
            "gpu.lan",
            "--cors-origins",
            "https://chat.example",
        ],
    );
    let get = |headers: &[&str]| {
        let mut connection = Connection::open(server.address());
        let lines: String = headers
            .iter()
            .map(|header| format!("{header}\r\n"))
            .collect();
        connection.write(format!("GET /v1/models HTTP/1.1\r\n{lines}\r\n").as_bytes());
        connection.response()
    };
    assert_eq!(get(&["Host: evil.example"]).status, 403);
    assert_eq!(get(&["Host: gpu.lan:8080"]).status, 200);
    let page = get(&["Host: localhost", "Origin: https://chat.example"]);
    assert_eq!(
        (page.status, page.header("access-control-allow-origin")),
        (200, Some("https://chat.example"))
    );
    assert_eq!(
        get(&["Host: localhost", "Origin: http://localhost.evil.example"]).status,
        403
    );
    let preflight = request(
        server.address(),
        "OPTIONS",
        "/v1/chat/completions",
        &[
            "Origin: http://localhost:3000",
            "Access-Control-Request-Method: POST",
        ],
        b"",
    );
    assert_eq!(preflight.status, 204);
    assert_eq!(
        preflight.header("access-control-allow-origin"),
        Some("http://localhost:3000")
    );
    assert!(
        preflight
            .header("access-control-allow-methods")
            .expect("methods")
            .contains("POST")
    );
}

#[test]
fn a_prefix_is_in_front_of_every_route() {
    let server = Server::scripted(&json!({}), &["--api-prefix", "/llm/", "--api-key", "k"]);
    assert!(server.url().ends_with("/llm"), "{}", server.url());
    assert_eq!(server.get("/llm/health").status, 200);
    assert_eq!(server.get("/llm/v1/models").status, 401);
    let inside = request(
        server.address(),
        "GET",
        "/llm/v1/models",
        &["X-Api-Key: k"],
        b"",
    );
    assert_eq!(inside.status, 200);
    assert_eq!(
        request(
            server.address(),
            "GET",
            "/v1/models",
            &["X-Api-Key: k"],
            b""
        )
        .status,
        404
    );
}

fn health_over(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).expect("connected");
    stream
        .write_all(b"GET /health HTTP/1.0\r\n\r\n")
        .expect("written");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    text
}

#[test]
fn a_unix_socket_is_served_and_removed() {
    let home = Mlxcel::new().with_mock_plugins();
    let socket = home.path("server.sock");
    let path = socket.to_string_lossy().into_owned();
    // What a server that was killed leaves behind.
    drop(std::os::unix::net::UnixListener::bind(&socket).expect("bound"));
    let mut server = Server::scripted_in(home, &json!({}), &["--host", &path]);
    assert_eq!(server.url(), format!("unix:{path}"));
    server.wait_for("it is ready", |_| {
        health_over(&socket).starts_with("HTTP/1.0 200")
    });
    terminate(&server);
    assert_eq!(server.wait().code, Some(0));
    assert!(!socket.exists());
}

#[test]
fn only_the_servers_own_socket_is_removed() {
    let home = Mlxcel::new().with_mock_plugins();
    let file = home.file("notes.sock", "not a socket");
    let host = file.to_string_lossy().into_owned();
    let model = home.mock_model("model");
    let model = model.to_string_lossy().into_owned();
    let done = home.run(["serve", model.as_str(), "--force", "--host", host.as_str()]);
    assert_ne!(done.code, Some(0));
    assert!(done.stderr.contains("no socket"), "{}", done.show());
    assert_eq!(std::fs::read(&file).expect("still there"), b"not a socket");
    // One server is told to end after another one has taken its path.
    let path = home.path("server.sock");
    let host = path.to_string_lossy().into_owned();
    let mut first = Server::scripted_in(home, &json!({}), &["--host", &host]);
    first.wait_for("it is ready", |_| {
        health_over(&path).starts_with("HTTP/1.0 200")
    });
    std::fs::remove_file(&path).expect("removed");
    let other = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    terminate(&first);
    assert_eq!(first.wait().code, Some(0));
    assert!(path.exists());
    drop(other);
}

#[test]
fn an_open_address_without_a_key_is_refused() {
    let done = Mlxcel::new().run(["serve", "nothing", "--host", "0.0.0.0"]);
    assert_eq!(done.code, Some(2), "{}", done.show());
    assert!(done.stderr.contains("--allow-keyless"), "{}", done.stderr);
}

#[test]
fn connections_can_be_encrypted() {
    let tls = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../registry/src/store/tests/tls"
    );
    let file = |name: &str| format!("{tls}/{name}");
    let server = Server::scripted(
        &json!({"delay_us": 5_000}),
        &[
            "--metrics",
            "--ssl-cert-file",
            &file("server.pem"),
            "--ssl-key-file",
            &file("server-key.pem"),
        ],
    );
    assert!(server.url().starts_with("https://"), "{}", server.url());
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(file("ca.pem")).expect("a certificate");
    roots.add(authority).expect("added");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let config = Arc::new(config);
    let ask = |request: &str| {
        let session =
            ClientConnection::new(Arc::clone(&config), "localhost".try_into().expect("a name"));
        let stream = TcpStream::connect(server.address()).expect("connected");
        let mut stream = StreamOwned::new(session.expect("a session"), stream);
        stream.write_all(request.as_bytes()).expect("written");
        stream
    };
    let read = |path: &str| {
        let mut text = String::new();
        let mut stream = ask(&format!("GET {path} HTTP/1.0\r\n\r\n"));
        stream.read_to_string(&mut text).expect("read");
        text
    };
    let get = || read("/health");
    server.wait_for("it is ready", |_| get().starts_with("HTTP/1.0 200"));
    // Who goes away is noticed, with and without a word.
    for (said, cancelled) in [(true, 1), (false, 2)] {
        let body = r#"{"prompt": "a", "max_tokens": 4000, "temperature": 0}"#;
        let mut gone = ask(&format!(
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        server.wait_for("it runs", |_| {
            read("/metrics").contains("\nllamacpp:requests_processing 1\n")
        });
        if said {
            gone.conn.send_close_notify();
            gone.flush().expect("written");
        }
        drop(gone);
        let line = format!("outcome=\"cancelled\"}} {cancelled}\n");
        server.wait_for("it has ended", |_| read("/metrics").contains(&line));
    }
    // Plain HTTP gets nothing, and hurts nobody.
    let mut plain = Connection::open(server.address());
    plain.send("GET", "/health", &[], b"");
    assert_eq!(plain.response().status, 0);
    assert!(get().starts_with("HTTP/1.0 200"));
    let done = Mlxcel::new().run(["serve", "nothing", "--ssl-cert-file", &file("server.pem")]);
    assert_eq!(done.code, Some(2), "{}", done.show());
}

/// The second program is the same server, and can try plugins of its own accord.
#[test]
fn the_other_program_serves_too() {
    let mut server = Server::scripted_by("mlxcel-server", &json!({}), &["--temp", "0"]);
    let answer = server
        .post("/v1/completions", &json!({"prompt": "7"}))
        .success();
    assert_eq!(answer["choices"][0]["text"], "89!");
    terminate(&server);
    assert_eq!(server.wait().code, Some(0));
}
