//! Sockets: binding, and accepting within a bound.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpSocket, UnixListener, lookup_host};
use tokio::sync::mpsc;

use super::connection::{Way, asked, serve};
use super::crowd::{Crowd, Member};
use super::options::Bind;
use super::socket::Socket;

/// For a connection to end after an error of the system, such as too many open files.
const PAUSE: Duration = Duration::from_millis(20);

/// For those that have just come to say something, where there are too many.
const MOMENT: Duration = Duration::from_millis(5);

/// Connections that wait for being accepted. Where there is no room for one its client tries again after a second, then
/// two, then four; the system may allow fewer.
const BACKLOG: u32 = 4096;

/// Files that are not connections: plugins, weights while they are loaded, the prefix cache on its disk.
const OTHER_FILES: u64 = 64;

/// A bound socket.
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// Unix, with its file.
    Unix(UnixListener, SocketFile),
}

/// The file of a Unix socket, removed with this.
pub struct SocketFile {
    path: PathBuf,
    /// Which file it is; none where that could not be found out.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            identity: identity(path),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have removed it, and another server may have its own there.
        if self.identity.is_some() && identity(&self.path) == self.identity {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let file = std::fs::symlink_metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

impl Listener {
    /// Binds.
    pub async fn bind(bind: &Bind) -> io::Result<Self> {
        match bind {
            Bind::Tcp { host, port } => {
                let host = host.trim_matches(['[', ']']);
                Ok(Self::Tcp(bind_tcp(host, *port).await?))
            }
            Bind::Unix(path) => {
                remove_stale(path).await?;
                let listener = UnixListener::bind(path)?;
                Ok(Self::Unix(listener, SocketFile::new(path)))
            }
        }
    }

    /// Where it listens, for people and programs.
    pub fn address(&self, is_tls: bool) -> io::Result<String> {
        let scheme = if is_tls { "https" } else { "http" };
        match self {
            Self::Tcp(listener) => Ok(format!("{scheme}://{}", listener.local_addr()?)),
            Self::Unix(_, file) => Ok(format!("unix:{}", file.path.display())),
        }
    }
}

/// Binds the first address of a name that can be had.
async fn bind_tcp(host: &str, port: u16) -> io::Result<TcpListener> {
    let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
    for address in lookup_host((host, port)).await? {
        outcome = listen_on(address);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // A server that ended a moment ago is no reason not to start.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Removes the file of a server that has ended; one that answers is left alone, and so is what is no socket.
async fn remove_stale(path: &Path) -> io::Result<()> {
    // Links are not followed, neither here nor where it is removed.
    if std::fs::symlink_metadata(path).is_ok_and(|file| !file.file_type().is_socket()) {
        let kind = io::ErrorKind::AlreadyExists;
        return Err(io::Error::new(kind, "what is there is no socket"));
    }
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

/// Most connections of so many that were asked for: each is a file, of which the system allows a number only.
pub fn within_open_files(wanted: usize) -> usize {
    let Some(files) = getrlimit(Resource::Nofile).current else {
        return wanted;
    };
    let most = files.saturating_sub(OTHER_FILES).max(files / 2).max(1);
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    if most < wanted {
        tracing::warn!(
            "at most {most} connections are open at a time and not {wanted}: the process may have {files} open files"
        );
    }
    most.min(wanted)
}

/// Accepts connections until the server closes, then returns when all have ended. Whoever connects is heard: a
/// connection that keeps the server waiting makes room for it.
pub async fn accept_all(listener: Listener, way: Way, crowd: Arc<Crowd>) {
    let mut closing = way.closing.clone();
    let way = Arc::new(way);
    let (open, mut all_ended) = mpsc::channel::<()>(1);
    loop {
        let socket = tokio::select! {
            socket = accept(&listener) => socket,
            () = asked(&mut closing) => break,
        };
        let socket = match socket {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!("a connection could not be accepted: {error}");
                // Where files are short, the next one needs that of another.
                crowd.displace_one();
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let member = tokio::select! {
            member = enter(&crowd) => member,
            () = asked(&mut closing) => break,
        };
        let (way, open) = (Arc::clone(&way), open.clone());
        tokio::spawn(async move {
            let presence = Arc::clone(&member.presence);
            tokio::select! {
                () = serve(socket, &way, &presence) => {}
                () = presence.displaced() => tracing::debug!("a silent connection made room for another"),
            }
            drop((member, open));
        });
    }
    drop((listener, open));
    // Nothing is ever sent: it ends with the last sender.
    let _ = all_ended.recv().await;
}

/// A place for a connection. It is waited for only while every other one is being answered.
async fn enter(crowd: &Arc<Crowd>) -> Member {
    loop {
        if let Some(member) = crowd.enter() {
            return member;
        }
        tokio::time::sleep(MOMENT).await;
    }
}

async fn accept(listener: &Listener) -> io::Result<Socket> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            // Tokens are small and late ones are noticed.
            // One that is gone already says so here on some systems, which is its own connection's business.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!("a connection keeps small packets back: {error}");
            }
            Ok(stream.into())
        }
        Listener::Unix(listener, _) => Ok(listener.accept().await?.0.into()),
    }
}
