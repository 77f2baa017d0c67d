//! A small HTTP/1.1 server on loopback: one request per connection, answers from a closure, a log of what
//! was asked and sent.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use percent_encoding::percent_decode_str;

/// What a client asked.
#[derive(Debug, Clone)]
pub struct Request {
    /// Decoded path.
    pub path: String,
    /// Raw query.
    pub query: String,
    headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut all = self.headers.iter();
        all.find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

/// What a server says.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Closes the connection after so many bytes of the body.
    pub cut_after: Option<usize>,
}

impl Answer {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.into(),
            cut_after: None,
        }
    }

    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", self.status);
        let has_length = self
            .headers
            .iter()
            .any(|(n, _)| n == "content-length" || n == "transfer-encoding");
        if !has_length {
            head.push_str(&format!("content-length: {}\r\n", self.body.len()));
        }
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        let count = self
            .cut_after
            .unwrap_or(self.body.len())
            .min(self.body.len());
        out.write_all(head.as_bytes())?;
        out.write_all(&self.body[..count])?;
        out.flush()
    }
}

/// A request and how much of a body it was answered with.
#[derive(Debug, Clone)]
pub struct Exchange {
    pub request: Request,
    pub sent_bytes: usize,
}

type Handler = dyn Fn(&Request) -> Answer + Send + Sync;

/// Runs until dropped.
pub struct Server {
    address: SocketAddr,
    scheme: &'static str,
    log: Arc<Mutex<Vec<Exchange>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(handler: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::launch(Arc::new(handler), None)
    }

    /// As `start`, over TLS with the certificate in `tls/`.
    pub fn start_tls(handler: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::launch(Arc::new(handler), Some(tls_config()))
    }

    fn launch(handler: Arc<Handler>, tls: Option<Arc<rustls::ServerConfig>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let scheme = if tls.is_some() { "https" } else { "http" };
        let thread = std::thread::spawn({
            let (log, stop) = (log.clone(), stop.clone());
            move || {
                for stream in listener.incoming().flatten() {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let (handler, log, tls) = (handler.clone(), log.clone(), tls.clone());
                    std::thread::spawn(move || connection(stream, tls, &*handler, &log));
                }
            }
        });
        Self {
            address,
            scheme,
            log,
            stop,
            thread: Some(thread),
        }
    }

    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// What was asked so far.
    pub fn log(&self) -> Vec<Exchange> {
        self.log.lock().unwrap().clone()
    }

    /// Exchanges about one file of a repository, since the last call of `forget`.
    pub fn about(&self, file: &str) -> Vec<Exchange> {
        let end = format!("/{file}");
        let mut log = self.log();
        log.retain(|e| e.request.path.ends_with(&end));
        log
    }

    pub fn forget(&self) {
        self.log.lock().unwrap().clear();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn connection(
    stream: TcpStream,
    tls: Option<Arc<rustls::ServerConfig>>,
    handler: &Handler,
    log: &Mutex<Vec<Exchange>>,
) {
    match tls {
        None => serve(stream, handler, log),
        Some(config) => {
            let session = rustls::ServerConnection::new(config).unwrap();
            serve(rustls::StreamOwned::new(session, stream), handler, log);
        }
    }
}

fn serve(mut stream: impl Read + Write, handler: &Handler, log: &Mutex<Vec<Exchange>>) {
    let Some(request) = read_request(&mut BufReader::new(&mut stream)) else {
        return;
    };
    let answer = handler(&request);
    // Logged before it is sent, so that a client that has an answer finds it in the log.
    log.lock().unwrap().push(Exchange {
        request,
        sent_bytes: answer
            .cut_after
            .unwrap_or(answer.body.len())
            .min(answer.body.len()),
    });
    let _ = answer.write(&mut stream);
}

fn read_request(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let target = line.split(' ').nth(1)?.to_owned();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':')?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    Some(Request {
        path: percent_decode_str(path).decode_utf8_lossy().into_owned(),
        query: query.to_owned(),
        headers,
    })
}

fn tls_config() -> Arc<rustls::ServerConfig> {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let certificate = CertificateDer::from_pem_slice(include_bytes!("tls/server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_slice(include_bytes!("tls/server-key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    Arc::new(config)
}
