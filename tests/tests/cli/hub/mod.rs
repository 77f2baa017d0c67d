//! A hub on the loopback address with the repository `acme/tiny`, which the mock family can run, and `acme/secret`,
//! which nobody may have.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mlxcel_registry::checkpoint::testing::SafetensorsBuilder;
use serde_json::json;

const COMMIT: &str = "c0ffee0000000000000000000000000000000001";
const CONFIG: &[u8] = br#"{"model_type": "mock", "vocab_size": 3, "attend": true}"#;

/// The server; it lives as long as the test's process.
pub struct Hub {
    port: u16,
    requests: Arc<AtomicUsize>,
}

impl Hub {
    /// Starts it on a free port.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let counted = Arc::clone(&counted);
                // A client that goes away is its own affair.
                std::thread::spawn(move || drop(serve(&stream, &counted)));
            }
        });
        Self { port, requests }
    }

    /// What `HF_ENDPOINT` has to be.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Requests so far.
    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

fn serve(stream: &TcpStream, counted: &AtomicUsize) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    counted.fetch_add(1, Ordering::SeqCst);
    let path = first.split(' ').nth(1).unwrap_or_default();
    let path = path.split('?').next().unwrap_or_default();
    let (status, headers, body) = answer(path);
    let mut out = stream;
    write!(
        out,
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n",
        body.len()
    )?;
    out.write_all(&body)
}

fn weights() -> Vec<u8> {
    SafetensorsBuilder::new()
        .f32("table", &[3, 3], &[0.0; 9])
        .build()
}

fn answer(path: &str) -> (&'static str, String, Vec<u8>) {
    let ok = |body: Vec<u8>| ("200 OK", String::new(), body);
    let files = [
        ("config.json", CONFIG.to_vec()),
        ("model.safetensors", weights()),
    ];
    if path == "/api/models/acme/tiny/revision/main"
        || path == format!("/api/models/acme/tiny/revision/{COMMIT}")
    {
        let siblings: Vec<_> = files
            .iter()
            .map(|(name, _)| json!({ "rfilename": name }))
            .collect();
        return ok(json!({ "sha": COMMIT, "siblings": siblings })
            .to_string()
            .into_bytes());
    }
    if path == format!("/api/models/acme/tiny/tree/{COMMIT}") {
        let entries: Vec<_> = files
            .iter()
            .map(|(name, bytes)| json!({ "type": "file", "path": name, "size": bytes.len() }))
            .collect();
        return ok(json!(entries).to_string().into_bytes());
    }
    if let Some(name) = path.strip_prefix(&format!("/acme/tiny/resolve/{COMMIT}/"))
        && let Some((_, bytes)) = files.into_iter().find(|(file, _)| *file == name)
    {
        return ok(bytes);
    }
    let (status, code) = match path {
        path if path.starts_with("/api/models/acme/tiny/revision/") => {
            ("404 Not Found", "RevisionNotFound")
        }
        path if path.contains("acme/secret") => ("401 Unauthorized", "GatedRepo"),
        _ => ("404 Not Found", "RepoNotFound"),
    };
    (status, format!("X-Error-Code: {code}\r\n"), b"{}".to_vec())
}
