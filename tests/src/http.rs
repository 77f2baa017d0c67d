//! A client over raw sockets: it sends what it is told, reads at its own pace, and leaves when it likes.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

use crate::cli::give_up;

/// A server that is silent for so long is broken.
const PATIENCE: Duration = Duration::from_secs(120);

/// A response, read to its end.
#[derive(Debug, Clone, Default)]
pub struct Response {
    /// Status; 0 when the connection ended before one.
    pub status: u16,
    /// Headers in order, names in small letters.
    pub headers: Vec<(String, String)>,
    /// Body, chunks joined.
    pub body: Vec<u8>,
}

impl Response {
    /// A header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        match serde_json::from_slice(&self.body) {
            Ok(value) => value,
            Err(error) => give_up(&format!(
                "status {}, not JSON ({error}): {}",
                self.status,
                self.text()
            )),
        }
    }

    /// The body as JSON of a success.
    #[track_caller]
    pub fn success(&self) -> Value {
        if self.status != 200 {
            give_up(&format!("status {}: {}", self.status, self.text()));
        }
        self.json()
    }

    /// The `data:` lines of a stream; the last may be `[DONE]`.
    pub fn events(&self) -> Vec<String> {
        self.text()
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .map(str::to_owned)
            .collect()
    }
}

/// One connection.
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects.
    pub fn open(address: SocketAddr) -> Self {
        match Self::try_open(address) {
            Ok(connection) => connection,
            Err(error) => give_up(&format!("{address}: {error}")),
        }
    }

    /// Connects, if somebody listens.
    pub fn try_open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Writes bytes. Whether the server took them.
    pub fn write(&mut self, bytes: &[u8]) -> bool {
        self.stream.get_mut().write_all(bytes).is_ok()
    }

    /// Writes a request with a body; more headers as whole lines.
    pub fn send(&mut self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> bool {
        let mut text = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n",
            body.len()
        );
        for header in headers {
            text.push_str(header);
            text.push_str("\r\n");
        }
        text.push_str("\r\n");
        let mut bytes = text.into_bytes();
        bytes.extend_from_slice(body);
        self.write(&bytes)
    }

    /// Reads the status and the headers of a response.
    pub fn head(&mut self) -> Response {
        let mut response = Response::default();
        let first = self.line();
        response.status = first
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .unwrap_or(0);
        loop {
            let line = self.line();
            let Some((name, value)) = line.split_once(':') else {
                return response;
            };
            response
                .headers
                .push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    /// Reads a whole response, past interim ones.
    pub fn response(&mut self) -> Response {
        let mut response = self.head();
        while response.status == 100 {
            response = self.head();
        }
        let length = response
            .header("content-length")
            .and_then(|text| text.parse::<usize>().ok());
        if response.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                response.body.extend(chunk);
            }
        } else if let Some(length) = length {
            response.body = vec![0; length];
            if self.stream.read_exact(&mut response.body).is_err() {
                response.body.clear();
            }
        } else if !matches!(response.status, 0 | 204 | 304) {
            // What was read before the end is the body.
            let _ = self.stream.read_to_end(&mut response.body);
        }
        response
    }

    /// The next chunk of a streamed body; none at its end.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = usize::from_str_radix(self.line().trim(), 16).ok()?;
        let mut chunk = vec![0; size + 2];
        self.stream.read_exact(&mut chunk).ok()?;
        chunk.truncate(size);
        (size > 0).then_some(chunk)
    }

    /// Whether the server has closed the connection, after all that it wrote.
    pub fn is_at_end(&mut self) -> bool {
        matches!(self.stream.fill_buf(), Ok([]))
    }

    /// Says that nothing more is written, and goes on reading.
    pub fn end_writing(&mut self) {
        // A connection that is gone already has the same effect.
        let _ = self.stream.get_ref().shutdown(Shutdown::Write);
    }

    fn line(&mut self) -> String {
        let mut line = Vec::new();
        // An error is the end, as for everybody who reads.
        let _ = self.stream.read_until(b'\n', &mut line);
        String::from_utf8_lossy(&line).trim_end().to_owned()
    }
}

/// One request on a connection of its own.
pub fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[&str],
    body: &[u8],
) -> Response {
    let mut connection = Connection::open(address);
    connection.send(method, path, headers, body);
    connection.response()
}
