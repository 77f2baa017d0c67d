//! Sockets: binding, accepting within a bound, and serving one connection.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use super::app::App;
use super::options::Bind;
use super::patience::Patient;

/// After an error of the system, such as too many open files, for connections to end.
const PAUSE: Duration = Duration::from_millis(100);

/// A bound socket.
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// Unix, with its file.
    Unix(UnixListener, SocketFile),
}

/// The file of a Unix socket, removed with this.
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody else may have removed it.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Listener {
    /// Binds.
    pub async fn bind(bind: &Bind) -> io::Result<Self> {
        match bind {
            Bind::Tcp { host, port } => Ok(Self::Tcp(
                TcpListener::bind((host.trim_matches(['[', ']']), *port)).await?,
            )),
            Bind::Unix(path) => {
                remove_stale(path).await?;
                let listener = UnixListener::bind(path)?;
                Ok(Self::Unix(listener, SocketFile(path.clone())))
            }
        }
    }

    /// Where it listens, for people and programs.
    pub fn address(&self, is_tls: bool) -> io::Result<String> {
        let scheme = if is_tls { "https" } else { "http" };
        match self {
            Self::Tcp(listener) => Ok(format!("{scheme}://{}", listener.local_addr()?)),
            Self::Unix(_, file) => Ok(format!("unix:{}", file.0.display())),
        }
    }
}

/// Removes the file of a server that has ended; one that answers is left alone.
async fn remove_stale(path: &Path) -> io::Result<()> {
    match tokio::net::UnixStream::connect(path).await {
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another server listens there",
        )),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        Err(_) => Ok(()),
    }
}

/// Accepts connections until `closing`, then returns when all have ended.
pub async fn accept_all(
    listener: Listener,
    tls: Option<TlsAcceptor>,
    app: Arc<App>,
    router: Router,
    mut closing: watch::Receiver<bool>,
) {
    let room = Arc::new(Semaphore::new(app.options.limits.connections));
    loop {
        let permit = tokio::select! {
            permit = Arc::clone(&room).acquire_owned() => permit,
            () = asked(&mut closing) => break,
        };
        let Ok(permit) = permit else { break };
        let stream: io::Result<Box<dyn Io>> = tokio::select! {
            stream = accept(&listener) => stream,
            () = asked(&mut closing) => break,
        };
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!("a connection could not be accepted: {error}");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let (app, router, tls, closing) = (
            Arc::clone(&app),
            router.clone(),
            tls.clone(),
            closing.clone(),
        );
        tokio::spawn(async move {
            app.connections.fetch_add(1, Ordering::Relaxed);
            connection(stream, tls, &app, router, closing).await;
            app.connections.fetch_sub(1, Ordering::Relaxed);
            drop(permit);
        });
    }
    drop(listener);
    // Every permit is back when every connection has ended.
    let all = u32::try_from(app.options.limits.connections).unwrap_or(u32::MAX);
    let _ = room.acquire_many(all).await;
}

/// Waits until it is true, or until nobody can make it so.
async fn asked(closing: &mut watch::Receiver<bool>) {
    let _ = closing.wait_for(|closing| *closing).await;
}

/// A stream of either kind.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

async fn accept(listener: &Listener) -> io::Result<Box<dyn Io>> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            // Tokens are small and late ones are noticed.
            // One that is gone already says so here on some systems, which is its own connection's business.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!("a connection keeps small packets back: {error}");
            }
            Ok(Box::new(stream))
        }
        Listener::Unix(listener, _) => Ok(Box::new(listener.accept().await?.0)),
    }
}

async fn connection(
    stream: Box<dyn Io>,
    tls: Option<TlsAcceptor>,
    app: &App,
    router: Router,
    closing: watch::Receiver<bool>,
) {
    let limits = &app.options.limits;
    let stream = Patient::new(stream, limits.write);
    match tls {
        None => serve(stream, limits.header, router, closing).await,
        Some(tls) => match tokio::time::timeout(limits.header, tls.accept(stream)).await {
            Ok(Ok(stream)) => serve(stream, limits.header, router, closing).await,
            Ok(Err(error)) => tracing::debug!("a connection could not be encrypted: {error}"),
            Err(_) => tracing::debug!("a connection was too slow to be encrypted"),
        },
    }
}

async fn serve(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    header: Duration,
    router: Router,
    mut closing: watch::Receiver<bool>,
) {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(header);
    let mut connection =
        pin!(builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)));
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = asked(&mut closing) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        // Clients that go away are no news.
        tracing::debug!("a connection ended: {error}");
    }
}
