//! One connection: encryption, requests one after another, and whether the client is still there.
//!
//! A client that closes its writing side may be gone or may wait for its answer: over TCP both look the same until
//! something is written to it. So it is written to: an interim response (RFC 9110, 15.2) before the response, a comment
//! in a stream of events. One that is gone refuses that, and its answer ends.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Request, Response, Version, header};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::error::Elapsed;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::crowd::{Presence, Probe};
use super::options::Limits;
use super::patience::Patient;
use super::socket::Socket;

/// Known to every client: one that did not ask for it passes over it.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// From the end of what a client writes to the first probe: most answers are there by then.
const FIRST_PROBE: Duration = Duration::from_millis(20);

/// By how much longer each further probe is waited for.
const LATER_PROBES: u32 = 4;

/// What all connections share.
pub struct Way {
    /// Encryption.
    pub tls: Option<TlsAcceptor>,
    /// Routes.
    pub router: Router,
    /// Bounds.
    pub limits: Limits,
    /// Whether the server ends.
    pub closing: watch::Receiver<bool>,
}

/// Serves a connection to its end.
pub async fn serve(socket: Socket, way: &Way, presence: &Arc<Presence>) {
    let stream = Patient::new(socket.clone(), way.limits.write, Arc::clone(presence));
    match &way.tls {
        None => exchange(socket, stream, way, presence, Half::MayWait).await,
        Some(tls) => match encrypt(tls, stream, way).await {
            Ok(Ok(stream)) => exchange(socket, stream, way, presence, Half::IsGone).await,
            Ok(Err(error)) => tracing::debug!("a connection could not be encrypted: {error}"),
            Err(_) => tracing::debug!("a connection was too slow to be encrypted"),
        },
    }
}

async fn encrypt<S: AsyncRead + AsyncWrite + Unpin>(
    tls: &TlsAcceptor,
    stream: S,
    way: &Way,
) -> Result<std::io::Result<TlsStream<S>>, Elapsed> {
    let mut closing = way.closing.clone();
    tokio::select! {
        outcome = tokio::time::timeout(way.limits.header, tls.accept(stream)) => outcome,
        () = asked(&mut closing) => Ok(Err(std::io::ErrorKind::ConnectionAborted.into())),
    }
}

/// What the end of a client's writing means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Half {
    /// It may still read.
    MayWait,
    /// It is gone: nothing can be written to it past the encryption.
    IsGone,
}

async fn exchange(
    socket: Socket,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    way: &Way,
    presence: &Arc<Presence>,
    half: Half,
) {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(way.limits.header)
        // The end of the client's writing is looked after below.
        .half_close(true);
    let service = Watched {
        routes: TowerToHyperService::new(way.router.clone()),
        presence: Arc::clone(presence),
    };
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut leaving = pin!(leaving(&socket, presence, half));
    let mut closing = way.closing.clone();
    let mut is_closing = false;
    let outcome = loop {
        tokio::select! {
            biased;
            outcome = connection.as_mut() => break outcome,
            () = leaving.as_mut() => {
                tracing::debug!("a client went away");
                return;
            }
            () = asked(&mut closing), if !is_closing => {
                is_closing = true;
                connection.as_mut().graceful_shutdown();
            }
            // Those who are answered have their answer first; the others have nothing to wait for.
            () = ready(()), if is_closing && presence.is_silent() => return,
        }
    };
    if let Err(error) = outcome {
        // Clients that go away are no news.
        tracing::debug!("a connection ended: {error}");
    }
}

/// Waits until it is true, or until nobody can make it so.
pub async fn asked(closing: &mut watch::Receiver<bool>) {
    let _ = closing.wait_for(|closing| *closing).await;
}

/// Waits until the client is gone while its answer is in work. In its own turn that is noticed by who reads.
async fn leaving(socket: &Socket, presence: &Presence, half: Half) {
    socket.read_ended().await;
    let mut pause = FIRST_PROBE;
    loop {
        tokio::select! {
            () = socket.broken() => return,
            () = tokio::time::sleep(pause) => {}
        }
        match presence.probe() {
            // A request may still be read.
            Probe::Nothing => continue,
            Probe::Impossible => return,
            Probe::Interim | Probe::Comment if half == Half::IsGone => return,
            // Its stream writes it.
            Probe::Comment => {}
            Probe::Interim => match socket.write_now(INTERIM) {
                Ok(bytes) if bytes == INTERIM.len() => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                _ => return,
            },
        }
        pause *= LATER_PROBES;
    }
}

/// The routes, which tell whose turn it is.
struct Watched {
    routes: TowerToHyperService<Router>,
    presence: Arc<Presence>,
}

impl Service<Request<Incoming>> for Watched {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let presence = Arc::clone(&self.presence);
        presence.request(request.version() >= Version::HTTP_11);
        let answering = self
            .routes
            .call(request.map(|body| Received::new(body, Arc::clone(&presence))));
        Box::pin(async move {
            let response = answering.await?;
            presence.respond();
            let is_stream = response
                .headers()
                .get(header::CONTENT_TYPE)
                .is_some_and(|kind| kind == "text/event-stream");
            Ok(response.map(|body| {
                Body::new(Sent {
                    body,
                    presence,
                    is_stream,
                })
            }))
        })
    }
}

/// The body of a request: with its end it is the server's turn.
struct Received {
    body: Incoming,
    presence: Arc<Presence>,
}

impl Received {
    fn new(body: Incoming, presence: Arc<Presence>) -> Self {
        if http_body::Body::is_end_stream(&body) {
            presence.received();
        }
        Self { body, presence }
    }
}

impl http_body::Body for Received {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None)) {
            self.presence.received();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        // What nobody reads is not waited for.
        self.presence.received();
    }
}

/// The body of a response: with its end it is the client's turn.
struct Sent {
    body: Body,
    presence: Arc<Presence>,
    is_stream: bool,
}

impl http_body::Body for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            // Frames of streams are whole events, so a comment may come between any two.
            Poll::Pending if self.is_stream && self.presence.take_wants_comment() => {
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b":\n\n")))))
            }
            outcome => outcome,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.presence.responded();
    }
}
