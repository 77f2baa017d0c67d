//! Removing a model from the store, and only from there.

use std::fs;
use std::path::{Path, PathBuf};

use super::Store;
use super::error::StoreError;
use super::hf_cache;
use super::list::usage;
use super::lock::SlotLock;
use super::name::RepoId;
use super::slot::Slot;

/// What was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    /// The directory that is gone.
    pub path: PathBuf,
    /// How much room it took, an unfinished download included.
    pub freed_bytes: u64,
}

impl Store {
    /// Removes a model and its unfinished download.
    pub fn remove(&self, id: &RepoId) -> Result<Removed, StoreError> {
        let slot = Slot::in_store(self.root()?, id);
        let exists = |path: &Path| path.symlink_metadata().is_ok();
        let places = [&slot.target, &slot.staging, &slot.trash];
        if !places.iter().any(|path| exists(path)) {
            return Err(self.not_stored(id, self.root()?));
        }
        for path in places {
            if exists(path) {
                self.check_inside(path)?;
                refuse_link(path)?;
            }
        }
        let freed_bytes = places
            .iter()
            .fold(0_u64, |sum, path| sum.saturating_add(usage(path).0));
        let lock = SlotLock::acquire(&slot.lock)?;
        if exists(&slot.trash) {
            delete(&slot.trash)?;
        }
        if exists(&slot.target) {
            // Renamed first, so that nobody resolves a model that is half gone.
            fs::rename(&slot.target, &slot.trash)
                .map_err(StoreError::io("remove", &slot.target))?;
            delete(&slot.trash)?;
        }
        if exists(&slot.staging) {
            delete(&slot.staging)?;
        }
        drop(lock);
        if let Some(owner) = slot.target.parent() {
            // Fails where the owner has other models, as it should.
            let _ = fs::remove_dir(owner);
        }
        Ok(Removed {
            path: slot.target,
            freed_bytes,
        })
    }

    fn not_stored(&self, id: &RepoId, root: &Path) -> StoreError {
        match self.env().hf_repo_dir(id) {
            Some(path) if hf_cache::holds(&path) => StoreError::OnlyInHfCache {
                model: id.to_string(),
                path,
            },
            _ => StoreError::NotStored {
                model: id.to_string(),
                root: root.to_path_buf(),
            },
        }
    }
}

/// A link to another model of the store stays inside it, but deleting through it would surprise.
fn refuse_link(path: &Path) -> Result<(), StoreError> {
    match fs::read_link(path) {
        Err(_) => Ok(()),
        Ok(target) => Err(StoreError::SymlinkEscape {
            path: path.to_path_buf(),
            target,
        }),
    }
}

fn delete(path: &Path) -> Result<(), StoreError> {
    let is_dir = path.symlink_metadata().is_ok_and(|meta| meta.is_dir());
    if is_dir {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
    .map_err(StoreError::io("remove", path))
}
