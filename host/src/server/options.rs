//! How the server is reached and what it allows.

use std::path::PathBuf;
use std::time::Duration;

use super::auth::ApiKeys;
use super::origin::{HostRule, OriginRule};

/// Where the server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bind {
    /// An address, or a name of one, and a port; port 0 lets the system choose.
    Tcp {
        /// Address or name.
        host: String,
        /// Port.
        port: u16,
    },
    /// A Unix domain socket.
    Unix(PathBuf),
}

/// Certificate and key, in PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, with those between it and its root.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Bounds on what clients can make the server do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Answers in steps at a time.
    pub parallel: usize,
    /// Answers that may wait beside them.
    pub queue_depth: usize,
    /// Answers of one key that may run or wait at a time; 0 is all.
    pub per_key: usize,
    /// Open connections.
    pub connections: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// From the start of a connection, or the end of its last request, to the end of the next request's headers.
    pub header: Duration,
    /// From the headers to the end of the body.
    pub body: Duration,
    /// Without progress in either direction on a connection that is being written.
    pub write: Duration,
    /// From the request to the end of its answer.
    pub answer: Duration,
    /// One step of the engine: longer means that it is stuck.
    pub step: Duration,
    /// Of silence before a stream gets a comment line; none never sends one.
    pub ping: Option<Duration>,
    /// From the signal to the end, for answers that are not finished.
    pub drain: Duration,
}

/// Routes that are there only if they are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exposed {
    /// `/metrics`.
    pub metrics: bool,
    /// `/slots`.
    pub slots: bool,
}

/// Everything that is decided before the model is there.
#[derive(Debug)]
pub struct ServerOptions {
    /// Where it listens.
    pub bind: Bind,
    /// In front of every path: empty, or `/prefix` without a slash at its end.
    pub prefix: String,
    /// Who may ask; empty is everybody.
    pub keys: ApiKeys,
    /// Under which names it may be addressed.
    pub hosts: HostRule,
    /// Which web pages may ask.
    pub origins: OriginRule,
    /// Encryption.
    pub tls: Option<TlsFiles>,
    /// Bounds.
    pub limits: Limits,
    /// Optional routes.
    pub exposed: Exposed,
    /// Threads for HTTP; the engine has its own.
    pub threads: usize,
}
