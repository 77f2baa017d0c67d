//! What can go wrong between a client and a server.

use std::io;
use std::path::PathBuf;

/// Why a request, or the whole run, has no result.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Not an address that this client can reach.
    #[error(
        "{url:?} is no address of a server: expected http://HOST:PORT, with a path in front of the routes if there is one"
    )]
    Url {
        /// What was given.
        url: String,
    },
    /// The connection.
    #[error("{action}: {source}")]
    Connection {
        /// What was tried.
        action: &'static str,
        /// Why it did not work.
        source: io::Error,
    },
    /// An answer that is not one of HTTP.
    #[error("the server answered {found:?} where {expected} was expected")]
    Protocol {
        /// What should have come.
        expected: &'static str,
        /// What came.
        found: String,
    },
    /// A refusal.
    #[error("status {status}: {body}")]
    Status {
        /// The status.
        status: u16,
        /// The beginning of the body.
        body: String,
    },
    /// A stream that ended before its answer did.
    #[error("the stream ended after {tokens} tokens without a last event")]
    Cut {
        /// Tokens that came.
        tokens: usize,
    },
    /// A stream whose last event is an error.
    #[error("the stream ended with an error: {message}")]
    Failed {
        /// Its text.
        message: String,
    },
    /// A file that the run writes.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The tokenizer gave fewer ids than the text must have.
    #[error("a text of {words} words has {found} tokens, {expected} were expected")]
    ShortPrompt {
        /// Words of the text.
        words: usize,
        /// Tokens.
        found: usize,
        /// Tokens wanted.
        expected: usize,
    },
    /// A thread of the run panicked.
    #[error("a client of this program panicked")]
    Client,
    /// The command line does not make sense as a whole.
    #[error("{message}")]
    Usage {
        /// What is wrong.
        message: String,
    },
}

impl LoadError {
    /// For `map_err` on reads and writes of a connection.
    pub fn connection(action: &'static str) -> impl FnOnce(io::Error) -> LoadError {
        move |source| LoadError::Connection { action, source }
    }
}
