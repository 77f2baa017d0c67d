//! Server-sent events: a response body that is polled by the connection and polls the generation.
//!
//! There is no task and no queue between the two. What is ready is written together; a connection that does not take it
//! leaves it where it is.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use http_body::Frame;
use serde_json::Value;

use super::error::{ApiError, Dialect};
use super::generation::{Generation, Output};

/// Bytes that are written together at most.
const BLOCK_BYTES: usize = 32 << 10;

/// Events on their way out.
#[derive(Debug, Default)]
pub struct Events(Vec<u8>);

impl Events {
    /// Adds an event.
    pub fn json(&mut self, value: &Value) {
        self.0.extend_from_slice(b"data: ");
        // A vector takes everything.
        let _ = serde_json::to_writer(&mut self.0, value);
        self.0.extend_from_slice(b"\n\n");
    }

    /// Adds OpenAI's last line.
    pub fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn comment(&mut self) {
        self.0.extend_from_slice(b":\n\n");
    }
}

/// Turns reports of a generation into events of a dialect.
pub trait Encoder: Send + Unpin + 'static {
    /// Before the first report.
    fn begin(&mut self, events: &mut Events);
    /// A report.
    fn output(&mut self, output: Output, generation: &Generation, events: &mut Events);
    /// After the last answer.
    fn end(&mut self, events: &mut Events);
}

struct Stream<E> {
    generation: Generation,
    encoder: E,
    dialect: Dialect,
    /// A report that was read to see whether the generation begins at all.
    first: Option<Output>,
    has_begun: bool,
    is_over: bool,
    ping: Option<Duration>,
    written: Instant,
}

/// A streaming response. `first` was read from the generation already.
pub fn stream<E: Encoder>(
    generation: Generation,
    first: Option<Output>,
    encoder: E,
    dialect: Dialect,
    ping: Option<Duration>,
) -> Response {
    let stream = Stream {
        // Nothing was written since the request came.
        written: generation.arrived(),
        generation,
        encoder,
        dialect,
        first,
        has_begun: false,
        is_over: false,
        ping,
    };
    let mut response = Response::new(Body::new(stream));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    response
}

impl<E: Encoder> Stream<E> {
    /// Whether more may come.
    fn advance(&mut self, output: Option<Result<Output, ApiError>>, events: &mut Events) -> bool {
        match output {
            Some(Ok(Output::Tick)) => {
                if self
                    .ping
                    .is_some_and(|every| self.written.elapsed() >= every)
                {
                    events.comment();
                }
            }
            Some(Ok(output)) => self.encoder.output(output, &self.generation, events),
            Some(Err(error)) => {
                events.json(&error.body(self.dialect));
                return false;
            }
            None => {
                self.encoder.end(events);
                return false;
            }
        }
        true
    }
}

impl<E: Encoder> http_body::Body for Stream<E> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if this.is_over {
            return Poll::Ready(None);
        }
        let mut events = Events::default();
        if !this.has_begun {
            this.has_begun = true;
            this.encoder.begin(&mut events);
            if let Some(first) = this.first.take() {
                this.advance(Some(Ok(first)), &mut events);
            }
        }
        while events.0.len() < BLOCK_BYTES {
            let Poll::Ready(output) = this.generation.poll_next(context) else {
                break;
            };
            if !this.advance(output, &mut events) {
                this.is_over = true;
                break;
            }
        }
        if events.0.is_empty() {
            return match this.is_over {
                true => Poll::Ready(None),
                false => Poll::Pending,
            };
        }
        this.written = Instant::now();
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(events.0)))))
    }
}
