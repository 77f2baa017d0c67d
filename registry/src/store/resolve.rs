//! From a model name to files on this machine, without the network.
//!
//! Order: a path, the store, the Hugging Face cache. A copy that is not whole is never returned: in the
//! store it is an error (it can be repaired), in the foreign cache it is passed over and mentioned.

use std::path::{Path, PathBuf};

use super::Store;
use super::damage::{Damage, LookedAt};
use super::error::StoreError;
use super::hf_cache;
use super::inspect::{Content, NoContent, choose_content, inspect};
use super::name::{HubRef, ModelRef, RepoId, Revision};
use super::record::{RECORD_FILE, Record, STATE_FILE};
use super::repo_path::is_gguf;
use super::slot::Slot;

/// What lies at a resolved path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointKind {
    /// A directory with `config.json` and safetensors.
    Dir,
    /// A GGUF file; of a split one, the first part.
    Gguf,
}

/// Where a model was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelSource {
    /// At the path that was given.
    Path,
    /// In the store.
    Store,
    /// In the Hugging Face cache.
    HfCache,
}

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// The directory or GGUF file.
    pub path: PathBuf,
    /// Which of the two it is.
    pub kind: CheckpointKind,
    /// Where it was found.
    pub source: ModelSource,
    /// Its repository, unless it is only a path.
    pub repo_id: Option<RepoId>,
}

impl Resolved {
    pub(super) fn new(
        dir: PathBuf,
        content: Content,
        source: ModelSource,
        repo_id: Option<RepoId>,
    ) -> Self {
        let (path, kind) = match content {
            Content::Dir => (dir, CheckpointKind::Dir),
            Content::Gguf(file) => (file, CheckpointKind::Gguf),
        };
        Self {
            path,
            kind,
            source,
            repo_id,
        }
    }
}

impl Store {
    /// Finds a model on this machine. `revision` applies to repositories only.
    pub fn resolve(
        &self,
        model: &ModelRef,
        revision: Option<&Revision>,
    ) -> Result<Resolved, StoreError> {
        match (model, revision) {
            (ModelRef::Path(path), None) => resolve_path(path),
            (ModelRef::Path(path), Some(revision)) => Err(StoreError::RevisionOfPath {
                path: path.clone(),
                revision: revision.to_string(),
            }),
            (ModelRef::Hub(hub), revision) => self.resolve_hub(hub, revision),
        }
    }

    /// Finds a repository's model in the store or the Hugging Face cache. Never looks at other paths.
    pub fn resolve_hub(
        &self,
        hub: &HubRef,
        revision: Option<&Revision>,
    ) -> Result<Resolved, StoreError> {
        let mut looked = Vec::new();
        // What lies in the other cache needs no store.
        let stored = match self.root() {
            Ok(_) => self.in_store(hub, revision, &mut looked)?,
            Err(_) => None,
        };
        if let Some(found) = stored {
            return Ok(found);
        }
        if let Some(found) = self.in_hf_cache(hub, revision, &mut looked)? {
            return Ok(found);
        }
        self.root()?;
        let at = revision.map_or_else(String::new, |r| format!(" --revision {r}"));
        Err(StoreError::NotFound {
            model: hub.to_string(),
            looked,
            command: format!("mlxcel download {hub}{at}"),
        })
    }

    pub(super) fn in_store(
        &self,
        hub: &HubRef,
        revision: Option<&Revision>,
        looked: &mut Vec<LookedAt>,
    ) -> Result<Option<Resolved>, StoreError> {
        let dir = Slot::in_store(self.root()?, &hub.id).target;
        if dir.symlink_metadata().is_err() {
            looked.push(looked_at(&dir, ""));
            return Ok(None);
        }
        self.check_inside(&dir)?;
        match stored_content(hub, &dir, revision)? {
            Ok(content) => Ok(Some(Resolved::new(
                dir,
                content,
                ModelSource::Store,
                Some(hub.id.clone()),
            ))),
            Err(other) => {
                looked.push(looked_at(&dir, &other));
                Ok(None)
            }
        }
    }

    fn in_hf_cache(
        &self,
        hub: &HubRef,
        revision: Option<&Revision>,
        looked: &mut Vec<LookedAt>,
    ) -> Result<Option<Resolved>, StoreError> {
        let Some(repo_dir) = self.env().hf_repo_dir(&hub.id) else {
            return Ok(None);
        };
        let Some(dir) = hf_cache::snapshot(&repo_dir, revision) else {
            looked.push(looked_at(&repo_dir, ""));
            return Ok(None);
        };
        let note = match inspect(&dir, hub.gguf.as_ref()) {
            Ok(content) => {
                let id = Some(hub.id.clone());
                return Ok(Some(Resolved::new(dir, content, ModelSource::HfCache, id)));
            }
            Err(NoContent::Ambiguous(choices)) => return Err(ambiguous(hub, choices)),
            Err(NoContent::Damaged(damage)) => format!("incomplete, {damage}"),
            Err(NoContent::Missing(choices)) => holds_only(&choices),
        };
        looked.push(looked_at(&dir, &note));
        Ok(None)
    }

    /// Refuses an entry that a link leads out of the store.
    pub(super) fn check_inside(&self, dir: &Path) -> Result<(), StoreError> {
        let root = self.root()?;
        let root = root.canonicalize().map_err(StoreError::io("open", root))?;
        // A link that leads nowhere cannot be canonicalised and is no model either.
        let target = dir
            .canonicalize()
            .map_err(StoreError::io("follow link", dir))?;
        if target.starts_with(&root) {
            return Ok(());
        }
        Err(StoreError::SymlinkEscape {
            path: dir.to_path_buf(),
            target,
        })
    }
}

/// The checkpoint of a store directory. The inner error says what it holds instead of the GGUF file asked.
fn stored_content(
    hub: &HubRef,
    dir: &Path,
    revision: Option<&Revision>,
) -> Result<Result<Content, String>, StoreError> {
    let damaged = |damage: Damage| StoreError::Damaged {
        model: hub.id.to_string(),
        path: dir.to_path_buf(),
        damage,
    };
    let record = Record::read(dir).map_err(damaged)?;
    if let Some(asked) = revision
        && !record.as_ref().is_some_and(|r| r.satisfies(asked))
    {
        return Err(StoreError::RevisionConflict {
            model: hub.id.to_string(),
            stored: record.map_or_else(|| "unknown".to_owned(), |r| r.revision_text()),
            asked: asked.to_string(),
        });
    }
    let content = match &record {
        None => inspect(dir, hub.gguf.as_ref()),
        Some(record) => {
            if let Some(damage) = record.damage(dir) {
                return Err(damaged(damage));
            }
            let files = record.paths().map_err(damaged)?;
            choose_content(dir, &files, hub.gguf.as_ref())
        }
    };
    match content {
        Ok(content) => Ok(Ok(content)),
        Err(NoContent::Damaged(damage)) => Err(damaged(damage)),
        Err(NoContent::Ambiguous(choices)) => Err(ambiguous(hub, choices)),
        Err(NoContent::Missing(choices)) => Ok(Err(holds_only(&choices))),
    }
}

fn resolve_path(path: &Path) -> Result<Resolved, StoreError> {
    let not_a_model = |reason| StoreError::NotAModel {
        path: path.to_path_buf(),
        reason,
    };
    let meta = path.metadata().map_err(|_| StoreError::PathNotFound {
        path: path.to_path_buf(),
    })?;
    if meta.is_file() {
        if !path.to_str().is_some_and(is_gguf) {
            return Err(not_a_model("a single file has to be a .gguf file"));
        }
        let content = Content::Gguf(path.to_path_buf());
        return Ok(Resolved::new(
            path.to_path_buf(),
            content,
            ModelSource::Path,
            None,
        ));
    }
    if path.join(STATE_FILE).exists() && !path.join(RECORD_FILE).exists() {
        return Err(StoreError::Unfinished {
            path: path.to_path_buf(),
        });
    }
    let content = match inspect(path, None) {
        Ok(content) => content,
        // A directory that a user names is handed over even where it is not whole: the checkpoint reader
        // tells in full what is missing.
        Err(NoContent::Damaged(
            Damage::NoConfig | Damage::MissingFile { .. } | Damage::Unreadable { .. },
        )) => Content::Dir,
        Err(NoContent::Damaged(Damage::NoWeights)) if path.join("config.json").exists() => {
            Content::Dir
        }
        Err(NoContent::Ambiguous(choices)) => {
            return Err(StoreError::AmbiguousGguf {
                model: path.display().to_string(),
                choices,
            });
        }
        Err(_) => {
            return Err(not_a_model(
                "expected a directory with config.json and safetensors, or with one .gguf file",
            ));
        }
    };
    Ok(Resolved::new(
        path.to_path_buf(),
        content,
        ModelSource::Path,
        None,
    ))
}

fn ambiguous(hub: &HubRef, choices: Vec<String>) -> StoreError {
    StoreError::AmbiguousGguf {
        model: hub.id.to_string(),
        choices,
    }
}

fn holds_only(choices: &[String]) -> String {
    if choices.is_empty() {
        "holds no GGUF file".to_owned()
    } else {
        format!("holds only {}", choices.join(", "))
    }
}

fn looked_at(path: &Path, note: &str) -> LookedAt {
    LookedAt {
        path: path.to_path_buf(),
        note: note.to_owned(),
    }
}
