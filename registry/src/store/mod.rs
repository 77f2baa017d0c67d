//! The model store: names, where models lie on this machine, and how they get there.
//!
//! Owns the folder `<root>/<owner>/<name>`, the resolution of a model's name to files (a path, the store, the
//! Hugging Face cache), download from a Hugging Face compatible endpoint, listing and removal. Knows nothing
//! of what is inside a checkpoint, of architectures or of plugins. Prints nothing: progress goes to a
//! [`Progress`], failures are [`StoreError`]s.
//!
//! What it promises:
//!
//! - A model that resolves is complete. Unfinished downloads lie in a folder of their own beside it.
//! - Every file that a hub gives a digest for was checked against it.
//! - The store holds one revision of a model and says which; another is refused, not served in its place.
//! - The Hugging Face cache is read and never written.
//! - Names, listings and redirects are untrusted: none of them leads out of the store, starts code, or takes
//!   a token to another host.
//!
//! The environment is read by [`StoreEnv`] and nowhere else.

mod damage;
mod digest;
mod disk;
mod download;
mod env;
mod error;
mod fetch;
mod gguf;
mod hf_cache;
mod http;
mod hub;
mod inspect;
mod list;
mod lock;
mod name;
mod progress;
mod range;
mod record;
mod remove;
mod repo_path;
mod resolve;
mod retry;
mod select;
mod slot;
mod timestamp;
mod url;

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use damage::{Damage, LookedAt};
pub use download::DownloadRequest;
pub use env::{DEFAULT_ENDPOINT, DEFAULT_ORG, EnvError, StoreEnv, Token};
pub use error::StoreError;
pub use list::{ListProblem, ListSort, Listing, StoredModel};
pub use name::{GgufSelector, HubRef, ModelRef, NameError, RepoId, Revision};
pub use progress::{CancelFlag, NoProgress, Progress, ProgressEvent};
pub use remove::Removed;
pub use repo_path::RepoPath;
pub use resolve::{CheckpointKind, ModelSource, Resolved};

use disk::{Disk, SystemDisk};
use retry::{Clock, SystemClock};

/// What the store uses of the machine beside its file system and network.
#[derive(Clone)]
struct Services {
    disk: Arc<dyn Disk>,
    clock: Arc<dyn Clock>,
}

/// A store of models on this machine. Cheap to clone and to share between threads.
#[derive(Clone)]
pub struct Store {
    env: StoreEnv,
    /// None where the environment names no folder; models at paths need none.
    root: Option<PathBuf>,
    services: Services,
}

impl Store {
    /// The store at the place that the environment gives. Where it gives none, what needs the store fails and says
    /// so; models at paths do not.
    pub fn new(env: StoreEnv) -> Self {
        let root = env.store_root().ok();
        Self::at(env, root)
    }

    /// A store at `root`, as `--models-dir` asks for.
    pub fn with_root(env: StoreEnv, root: PathBuf) -> Self {
        Self::at(env, Some(root))
    }

    fn at(env: StoreEnv, root: Option<PathBuf>) -> Self {
        let services = Services {
            disk: Arc::new(SystemDisk),
            clock: Arc::new(SystemClock),
        };
        Self {
            env,
            root,
            services,
        }
    }

    /// The folder that holds `<owner>/<name>`.
    pub fn root(&self) -> Result<&Path, StoreError> {
        match &self.root {
            Some(root) => Ok(root),
            None => Err(EnvError::NoHome.into()),
        }
    }

    /// The environment that the store obeys.
    pub fn env(&self) -> &StoreEnv {
        &self.env
    }

    /// Reads a model name as a user types it; see [`ModelRef::parse`].
    pub fn parse(&self, text: &str) -> Result<ModelRef, StoreError> {
        Ok(ModelRef::parse(text, &self.env)?)
    }

    fn services(&self) -> &Services {
        &self.services
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("root", &self.root)
            .field("env", &self.env)
            .finish_non_exhaustive()
    }
}
