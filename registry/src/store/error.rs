//! The one error type of the store. Variants carry what was expected and found; messages say what to do.

use std::io;
use std::path::{Path, PathBuf};

use super::damage::{Damage, Joined, LookedAt};
use super::env::EnvError;
use super::name::NameError;

/// Why a model could not be resolved, downloaded, listed or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The name is refused.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The environment is refused.
    #[error(transparent)]
    Env(#[from] EnvError),

    /// The model is nowhere on this machine.
    #[error("model {model} is not on this machine (looked in {}); get it with `{command}`", Joined(.looked))]
    NotFound {
        /// The model as asked.
        model: String,
        /// Where it was looked for and what was there.
        looked: Vec<LookedAt>,
        /// The command that downloads it.
        command: String,
    },
    /// A path was given and nothing is there.
    #[error("no model at {path}: expected a directory with config.json or a .gguf file", path = .path.display())]
    PathNotFound {
        /// The path as given.
        path: PathBuf,
    },
    /// A path was given and what is there is no model.
    #[error("{path} is not a model: {reason}", path = .path.display())]
    NotAModel {
        /// The path as given.
        path: PathBuf,
        /// What was expected.
        reason: &'static str,
    },
    /// The directory of an unfinished download.
    #[error("{path} is an unfinished download and cannot be loaded; run `mlxcel download` again to finish it", path = .path.display())]
    Unfinished {
        /// The directory.
        path: PathBuf,
    },
    /// A revision was asked of something that has none.
    #[error("revision {revision} was asked for, but {path} is a local path and has no revisions; leave --revision out", path = .path.display())]
    RevisionOfPath {
        /// The path.
        path: PathBuf,
        /// The revision asked.
        revision: String,
    },
    /// The store holds another revision of the model than the one asked.
    #[error(
        "the store holds revision {stored} of {model}, but revision {asked} was asked for; remove it with `mlxcel rm {model}`, or download the other one elsewhere with --local-dir"
    )]
    RevisionConflict {
        /// The repository.
        model: String,
        /// What the store holds.
        stored: String,
        /// What was asked.
        asked: String,
    },
    /// Several GGUF files would do.
    #[error("{model} holds several GGUF files; choose one as `{model}:LABEL` out of {}", .choices.join(", "))]
    AmbiguousGguf {
        /// The repository or directory.
        model: String,
        /// The labels, or the file names where labels do not tell them apart.
        choices: Vec<String>,
    },
    /// The GGUF file asked for is not offered.
    #[error("{model} holds no GGUF file {selector}; it holds {}", or_none(.choices))]
    NoSuchGguf {
        /// The repository or directory.
        model: String,
        /// The label or file asked.
        selector: String,
        /// What it holds.
        choices: Vec<String>,
    },
    /// The repository has no weights that can be used.
    #[error("{model} holds no safetensors or GGUF weights{}", mention_pickles(.pickles))]
    NoWeights {
        /// The repository.
        model: String,
        /// Names of pickle weights that it has instead.
        pickles: Vec<String>,
    },
    /// What lies in the store (or cache) is not a complete model.
    #[error("the copy of {model} at {path} is damaged: {damage}; repair it with `mlxcel download {model}` or remove it with `mlxcel rm {model}`", path = .path.display())]
    Damaged {
        /// The repository.
        model: String,
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        damage: Damage,
    },
    /// A link inside the store leads out of it.
    #[error("{path} is a link to {target}, outside the store; use that path directly instead", path = .path.display(), target = .target.display())]
    SymlinkEscape {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// Removal was asked of a model that only the Hugging Face cache holds.
    #[error("{model} is only in the Hugging Face cache at {path}, which is never changed; remove it with that cache's own tools", path = .path.display())]
    OnlyInHfCache {
        /// The repository.
        model: String,
        /// Its folder in that cache.
        path: PathBuf,
    },
    /// Removal was asked of a model that is not there.
    #[error("{model} is not in the store at {root}; `mlxcel list` shows what is", root = .root.display())]
    NotStored {
        /// The repository.
        model: String,
        /// The store's root.
        root: PathBuf,
    },
    /// The place to download to holds something else.
    #[error("cannot download to {path}: it {reason}; remove it or choose another folder", path = .path.display())]
    TargetOccupied {
        /// The place.
        path: PathBuf,
        /// What is there.
        reason: String,
    },
    /// Another process works on the same model.
    #[error("{path} is held by {}; wait until it is done", holder_text(*.holder), path = .path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// Process that holds it, if it said so.
        holder: Option<u32>,
    },

    /// The network is forbidden.
    #[error(
        "{model} is not on this machine and {variable} forbids the network; unset it to download"
    )]
    Offline {
        /// The repository.
        model: String,
        /// The variable that forbids it.
        variable: &'static str,
    },
    /// The endpoint is not a usable URL.
    #[error("HF_ENDPOINT {url:?} is not usable: {reason}")]
    BadEndpoint {
        /// The endpoint as given.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// Plain http to a host that is not this machine.
    #[error(
        "{url} is not encrypted: use https, or set MLXCEL_ALLOW_INSECURE_ENDPOINT=1 to accept the risk"
    )]
    Insecure {
        /// The endpoint or the place a server redirected to.
        url: String,
    },
    /// The extra certificates cannot be used.
    #[error("MLXCEL_EXTRA_CA_CERTS {path}: {reason}", path = .path.display())]
    BadCaBundle {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The token cannot be sent.
    #[error("the Hugging Face token from {origin} is not usable: {reason}")]
    BadToken {
        /// Where it came from.
        origin: String,
        /// What is wrong; never the token.
        reason: &'static str,
    },
    /// 401, or a gated repository.
    #[error("the endpoint refused access to {model} ({detail}): it may be private, gated or misspelt; {}", credentials(*.with_token))]
    Unauthorized {
        /// The repository.
        model: String,
        /// The server's words.
        detail: String,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// 403.
    #[error(
        "the endpoint forbids access to {model} ({detail}): accept the model's terms on its page, or use a token that has access"
    )]
    Forbidden {
        /// The repository.
        model: String,
        /// The server's words.
        detail: String,
    },
    /// The repository does not exist.
    #[error(
        "{endpoint} has no repository {model}: check the spelling, and HF_TOKEN if it is private"
    )]
    RepoNotFound {
        /// The repository.
        model: String,
        /// The endpoint.
        endpoint: String,
    },
    /// The revision does not exist.
    #[error("{model} has no revision {revision}")]
    RevisionNotFound {
        /// The repository.
        model: String,
        /// The revision asked.
        revision: String,
    },
    /// A listed file does not exist.
    #[error("{model} lists {file}, but the endpoint does not have it")]
    FileNotFound {
        /// The repository.
        model: String,
        /// The file.
        file: String,
    },
    /// 429.
    #[error("{host} limits the rate of requests{}; try again later, or set HF_TOKEN for a higher limit", after(*.retry_after_s))]
    RateLimited {
        /// The host that said so.
        host: String,
        /// Its `Retry-After`, in seconds.
        retry_after_s: Option<u64>,
    },
    /// 5xx.
    #[error("{url} answered {status}: the server has a problem, try again later")]
    Server {
        /// What was asked, without its query.
        url: String,
        /// The status.
        status: u16,
    },
    /// A status that has no meaning here.
    #[error("{url} answered {status}{}, which was not expected", in_brackets(.detail))]
    UnexpectedStatus {
        /// What was asked, without its query.
        url: String,
        /// The status.
        status: u16,
        /// The server's words.
        detail: String,
    },
    /// The connection could not be made, or broke.
    #[error("connection to {url} failed: {reason}")]
    Network {
        /// What was asked, without its query.
        url: String,
        /// What happened.
        reason: String,
    },
    /// The server's certificate is not trusted.
    #[error(
        "no secure connection to {url}: {reason}; behind a company proxy, name its certificate in MLXCEL_EXTRA_CA_CERTS"
    )]
    Tls {
        /// What was asked, without its query.
        url: String,
        /// What happened.
        reason: String,
    },
    /// Redirects without an end.
    #[error("{url} redirected more than {limit} times")]
    TooManyRedirects {
        /// What was asked first.
        url: String,
        /// The limit.
        limit: usize,
    },
    /// The answer is not what the protocol says.
    #[error("{url} gave an answer that is not understood: {reason}")]
    MalformedReply {
        /// What was asked, without its query.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// A listing that would write outside of its folder, or contradicts itself.
    #[error("the listing of {model} is refused: {reason}")]
    HostileListing {
        /// The repository.
        model: String,
        /// What is wrong.
        reason: String,
    },
    /// Something larger than its cap.
    #[error("{what} is larger than {limit}")]
    TooLarge {
        /// What it is.
        what: String,
        /// The cap, with its unit.
        limit: String,
    },

    /// The content of a downloaded file is not what the hub says.
    #[error(
        "{file} arrived damaged: expected {expected}, found {found}; it was deleted, try again"
    )]
    HashMismatch {
        /// The file.
        file: String,
        /// Digest that the hub gives.
        expected: String,
        /// Digest of what arrived.
        found: String,
    },
    /// The size of a file is not what the hub says.
    #[error(
        "{file} has a wrong size: expected {expected_bytes} bytes, the server sends {found_bytes}"
    )]
    SizeMismatch {
        /// The file.
        file: String,
        /// Size that the hub gives.
        expected_bytes: u64,
        /// Size that is sent.
        found_bytes: u64,
    },
    /// The connection ended before the file did.
    #[error("{file} ended early: {found_bytes} of {expected_bytes} bytes arrived")]
    Truncated {
        /// The file.
        file: String,
        /// Whole size.
        expected_bytes: u64,
        /// What arrived.
        found_bytes: u64,
    },
    /// There was not enough space to start.
    #[error("not enough space in {path}: {need_bytes} bytes are needed and {free_bytes} are free", path = .path.display())]
    NotEnoughSpace {
        /// The folder to download to.
        path: PathBuf,
        /// What is still to come, with a margin.
        need_bytes: u64,
        /// What the file system offers.
        free_bytes: u64,
    },
    /// The disk became full on the way. What arrived is kept.
    #[error("the disk is full at {path}; {kept_bytes} bytes are kept: make space and run the same command again to continue", path = .path.display())]
    DiskFull {
        /// The file that was written.
        path: PathBuf,
        /// What is kept of it.
        kept_bytes: u64,
    },
    /// An index names files that the repository does not have.
    #[error("{model} is incomplete: {index} names {missing}, which the repository does not have")]
    IncompleteRepository {
        /// The repository.
        model: String,
        /// The index.
        index: String,
        /// The first missing file.
        missing: String,
    },
    /// Every attempt failed. What arrived is kept.
    #[error(
        "gave up after {attempts} attempts: {last}; what arrived is kept, run the same command again to continue"
    )]
    GaveUp {
        /// How often it was tried.
        attempts: u32,
        /// The last failure.
        last: Box<StoreError>,
    },
    /// The caller asked to stop. What arrived is kept.
    #[error("stopped; what arrived is kept, run the same command again to continue")]
    Cancelled,
    /// The file system refused something.
    #[error("cannot {action} {path}: {source}", path = .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl StoreError {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }

    /// Whether the same request may succeed a moment later.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Network { .. }
                | Self::Server { .. }
                | Self::RateLimited { .. }
                | Self::Truncated { .. }
        )
    }
}

fn or_none(choices: &[String]) -> String {
    if choices.is_empty() {
        "none".to_owned()
    } else {
        choices.join(", ")
    }
}

fn mention_pickles(names: &[String]) -> String {
    match names.first() {
        None => String::new(),
        Some(first) => format!(
            "; it has pickle files such as {first}, which can run code when read and are never used"
        ),
    }
}

fn holder_text(process: Option<u32>) -> String {
    match process {
        Some(id) => format!("process {id}"),
        None => "another process".to_owned(),
    }
}

fn credentials(with_token: bool) -> &'static str {
    if with_token {
        "the token that was sent does not give access"
    } else {
        "set HF_TOKEN if you have access"
    }
}

fn after(seconds: Option<u64>) -> String {
    seconds.map_or_else(String::new, |s| format!(" (retry after {s} s)"))
}

fn in_brackets(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        format!(" ({text})")
    }
}
