//! A client of HTTP/1.1 over one connection a request: it can read a body event by event, slowly, or not at all.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

use crate::error::LoadError;

/// A server that says nothing for so long is broken.
const PATIENCE: Duration = Duration::from_secs(600);

/// Longest part of a refusal that is kept.
const REFUSAL_CHARS: usize = 200;

/// Where the server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Host and port.
    pub authority: String,
    /// Path in front of every route, without a slash at its end.
    pub prefix: String,
}

impl Target {
    /// Reads `http://host:port/prefix`.
    pub fn parse(url: &str) -> Result<Self, LoadError> {
        let wrong = || LoadError::Url {
            url: url.to_owned(),
        };
        let rest = url.strip_prefix("http://").ok_or_else(wrong)?;
        let (authority, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if !authority.contains(':') {
            return Err(wrong());
        }
        let prefix = match prefix.trim_end_matches('/') {
            "" => String::new(),
            path => format!("/{path}"),
        };
        Ok(Self {
            authority: authority.to_owned(),
            prefix,
        })
    }

    /// Sends a request; the answer's head is read, its body not yet.
    pub fn send(&self, method: &str, path: &str, body: &[u8]) -> Result<Exchange, LoadError> {
        let mut stream = self.connect()?;
        let head = format!(
            "{method} {}{path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.prefix,
            self.authority,
            body.len()
        );
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        stream
            .write_all(&bytes)
            .map_err(LoadError::connection("sending a request"))?;
        Exchange::read_head(stream)
    }

    /// Sends a request and goes away before anything is answered.
    pub fn send_and_leave(&self, path: &str, body: &[u8]) -> Result<(), LoadError> {
        let mut stream = self.connect()?;
        let head = format!(
            "POST {}{path} HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n",
            self.prefix,
            self.authority,
            body.len()
        );
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        stream
            .write_all(&bytes)
            .map_err(LoadError::connection("sending a request"))
    }

    fn connect(&self) -> Result<TcpStream, LoadError> {
        let stream =
            TcpStream::connect(&self.authority).map_err(LoadError::connection("connecting"))?;
        let ready = stream
            .set_read_timeout(Some(PATIENCE))
            .and_then(|()| stream.set_write_timeout(Some(PATIENCE)))
            .and_then(|()| stream.set_nodelay(true));
        ready.map_err(LoadError::connection("preparing a connection"))?;
        Ok(stream)
    }

    /// A request with a JSON body whose answer must be a success in JSON.
    pub fn post(&self, path: &str, body: &Value) -> Result<Value, LoadError> {
        let text = self
            .send("POST", path, body.to_string().as_bytes())?
            .success()?
            .text()?;
        serde_json::from_str(&text).map_err(|_| LoadError::Protocol {
            expected: "JSON",
            found: beginning(&text),
        })
    }

    /// The text behind a path.
    pub fn get(&self, path: &str) -> Result<String, LoadError> {
        self.send("GET", path, b"")?.success()?.text()
    }
}

/// How the end of a body is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    /// Bytes that are left of the current chunk; none before the first and between two.
    Chunked(Option<usize>),
    /// Bytes that are left.
    Length(usize),
    /// By the end of the connection.
    Close,
    /// It has been reached.
    End,
}

/// Reads a body and nothing behind it.
#[derive(Debug)]
pub struct Body<R> {
    stream: R,
    framing: Framing,
}

impl<R: BufRead> Body<R> {
    /// The size line of the next chunk; the line end of the last one is before it.
    fn next_chunk(&mut self, is_first: bool) -> io::Result<usize> {
        let mut line = String::new();
        if !is_first {
            self.stream.read_line(&mut line)?;
            line.clear();
        }
        self.stream.read_line(&mut line)?;
        let size = line.trim().split(';').next().unwrap_or_default();
        usize::from_str_radix(size, 16)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "no size of a chunk"))
    }

    fn read_at_most(&mut self, buffer: &mut [u8], left: usize) -> io::Result<usize> {
        let most = buffer.len().min(left);
        let read = self
            .stream
            .read(buffer.get_mut(..most).unwrap_or_default())?;
        if read == 0 && most > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(read)
    }
}

impl<R: BufRead> Read for Body<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Framing::Chunked(state) = self.framing
            && state.is_none_or(|left| left == 0)
        {
            self.framing = match self.next_chunk(state.is_none())? {
                0 => Framing::End,
                size => Framing::Chunked(Some(size)),
            };
        }
        match self.framing {
            Framing::Chunked(left) => {
                let left = left.unwrap_or_default();
                let read = self.read_at_most(buffer, left)?;
                self.framing = Framing::Chunked(Some(left - read));
                Ok(read)
            }
            Framing::Length(0) | Framing::End => Ok(0),
            Framing::Length(left) => {
                let read = self.read_at_most(buffer, left)?;
                self.framing = Framing::Length(left - read);
                Ok(read)
            }
            Framing::Close => self.stream.read(buffer),
        }
    }
}

/// An answer whose head has come.
#[derive(Debug)]
pub struct Exchange {
    /// Status.
    pub status: u16,
    body: BufReader<Body<BufReader<TcpStream>>>,
}

impl Exchange {
    fn read_head(stream: TcpStream) -> Result<Self, LoadError> {
        let mut stream = BufReader::new(stream);
        let mut read_line = || -> Result<String, LoadError> {
            let mut line = String::new();
            stream
                .read_line(&mut line)
                .map_err(LoadError::connection("reading the head of an answer"))?;
            Ok(line.trim_end().to_owned())
        };
        let first = read_line()?;
        let status = first
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .ok_or(LoadError::Protocol {
                expected: "a status line",
                found: first,
            })?;
        let mut framing = Framing::Close;
        loop {
            let line = read_line()?;
            let Some((name, value)) = line.split_once(':') else {
                break;
            };
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "transfer-encoding" if value.eq_ignore_ascii_case("chunked") => {
                    framing = Framing::Chunked(None);
                }
                "content-length" => {
                    if let Ok(length) = value.parse() {
                        framing = Framing::Length(length);
                    }
                }
                _ => {}
            }
        }
        Ok(Self {
            status,
            body: BufReader::new(Body { stream, framing }),
        })
    }

    /// Itself if the status is 200, else the refusal.
    pub fn success(self) -> Result<Self, LoadError> {
        if self.status == 200 {
            return Ok(self);
        }
        Err(LoadError::Status {
            status: self.status,
            body: beginning(&self.text()?),
        })
    }

    /// The whole body.
    pub fn text(mut self) -> Result<String, LoadError> {
        let mut bytes = Vec::new();
        self.body
            .read_to_end(&mut bytes)
            .map_err(LoadError::connection("reading an answer"))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// What the next `data:` line of an event stream says; none at its end.
    pub fn event(&mut self) -> Result<Option<String>, LoadError> {
        loop {
            let mut line = String::new();
            let read = self
                .body
                .read_line(&mut line)
                .map_err(LoadError::connection("reading a stream"))?;
            if read == 0 {
                return Ok(None);
            }
            if let Some(data) = line.strip_prefix("data:") {
                return Ok(Some(data.trim().to_owned()));
            }
        }
    }
}

/// Enough of a text to know it by.
pub fn beginning(text: &str) -> String {
    text.trim().chars().take(REFUSAL_CHARS).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failure in a test is a failed test")]
mod tests {
    use super::*;

    fn read(framing: Framing, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut body = Body {
            stream: BufReader::with_capacity(3, bytes),
            framing,
        };
        let mut read = Vec::new();
        body.read_to_end(&mut read)?;
        Ok(read)
    }

    #[test]
    fn addresses() {
        let target = Target::parse("http://127.0.0.1:80/").unwrap();
        assert_eq!(
            (target.authority.as_str(), target.prefix.as_str()),
            ("127.0.0.1:80", "")
        );
        let target = Target::parse("http://[::1]:80/a/b/").unwrap();
        assert_eq!(
            (target.authority.as_str(), target.prefix.as_str()),
            ("[::1]:80", "/a/b")
        );
        for url in ["https://127.0.0.1:80", "127.0.0.1:80", "http://localhost"] {
            assert!(Target::parse(url).is_err(), "{url}");
        }
    }

    #[test]
    fn chunks_are_joined_and_nothing_behind_them_is_read() {
        let bytes = b"4\r\nWiki\r\n6;x=1\r\npedia \r\n0\r\n\r\nrest";
        assert_eq!(read(Framing::Chunked(None), bytes).unwrap(), b"Wikipedia ");
    }

    #[test]
    fn a_body_that_is_cut_is_an_error() {
        assert!(read(Framing::Chunked(None), b"4\r\nWi").is_err());
        assert!(read(Framing::Chunked(None), b"4\r\nWiki\r\n").is_err());
        assert!(read(Framing::Chunked(None), b"x\r\n").is_err());
        assert!(read(Framing::Length(5), b"Wiki").is_err());
        assert_eq!(read(Framing::Length(4), b"Wikipedia").unwrap(), b"Wiki");
        assert_eq!(read(Framing::Close, b"all").unwrap(), b"all");
    }
}
