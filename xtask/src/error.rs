//! The one error type of the commands: each variant carries what was expected, what was found, and what to do.

use std::io;
use std::path::{Path, PathBuf};

use crate::disk;
use crate::process::Failure;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    #[error(
        "cannot {action} {}: the disk is full: {room}; free some space, or name a target folder on another disk in CARGO_TARGET_DIR, and run this again", path.display()
    )]
    DiskFull {
        action: &'static str,
        path: PathBuf,
        /// What was expected and what was found.
        room: String,
    },

    #[error("{path}: {message}", path = path.display())]
    Malformed { path: PathBuf, message: String },

    #[error(
        "no workspace found: expected mlx.toml in {} or a folder above it; run this inside a clone of the project", start.display()
    )]
    NoWorkspace { start: PathBuf },

    #[error(transparent)]
    Command(#[from] Failure),

    #[error("{path}: expected sha256 {expected}, found {found}; delete the file and try again", path = path.display())]
    Digest {
        path: PathBuf,
        expected: String,
        found: String,
    },

    #[error(
        "no pinned MLX {version} for backend {backend} on {platform}: mlx.toml has {known}; build or install MLX {version} yourself and set MLX_ROOT to the folder that holds its include/ and lib/"
    )]
    NoMlxPin {
        version: String,
        backend: &'static str,
        platform: String,
        known: String,
    },

    #[error("MLX_ROOT={}: {problem}", root.display())]
    MlxRoot { root: PathBuf, problem: String },

    #[error("cannot fetch {what}: {}\n{alternative}", problem.trim_end())]
    Fetch {
        what: String,
        problem: String,
        alternative: &'static str,
    },

    /// A request that cannot be met; nothing was changed.
    #[error("{0}")]
    Refused(String),

    #[error("plugin {}: {problem}", plugin.display())]
    Plugin { plugin: PathBuf, problem: String },

    #[error("{check}: {count} problem(s), listed above")]
    Findings { check: &'static str, count: usize },

    #[error("step `{step}` failed after {seconds:.1} s; to repeat it: {repeat}")]
    Step {
        step: &'static str,
        seconds: f64,
        repeat: String,
        source: Box<Error>,
    },

    #[error("no step is called `{name}`: the steps are {known}")]
    NoSuchStep { name: String, known: String },

    #[error("{what}: {problem}")]
    Measurement { what: String, problem: String },

    #[error("{} is missing; {remedy}", path.display())]
    Missing { path: PathBuf, remedy: String },

    #[error("{} differs from the interface in the code; if the change is meant, raise the minor version and run `cargo xtask abi-dump`", path.display())]
    SurfaceDiffers { path: PathBuf },

    #[error("the advisory database could not be fetched, so advisories were NOT checked: {detail}")]
    AdvisoriesUnreachable { detail: String },
}

impl Error {
    /// A program that is measured, or one that measures, did not give what was expected.
    pub fn measurement(what: impl std::fmt::Display, problem: impl std::fmt::Display) -> Error {
        Error::Measurement {
            what: what.to_string(),
            problem: problem.to_string(),
        }
    }

    /// For `map_err` on file operations.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                disk::full(action, &path, None)
            }
            _ => Error::Io {
                action,
                path,
                source,
            },
        }
    }
}
