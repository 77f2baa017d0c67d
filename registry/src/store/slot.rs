//! Where the pieces of one model lie: its final directory, the staging directory beside it, the lock.
//!
//! The staging and lock names start with a dot, which no owner and no model name may, so they can neither
//! be resolved as a model nor collide with one.

use std::path::{Path, PathBuf};

use super::error::StoreError;
use super::name::RepoId;

/// Places that belong to one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slot {
    /// The finished model.
    pub target: PathBuf,
    /// The unfinished download, on the same file system so that a rename is atomic.
    pub staging: PathBuf,
    /// Held while the two above are changed.
    pub lock: PathBuf,
    /// A removed model on its way out.
    pub trash: PathBuf,
}

impl Slot {
    /// The slot of a repository in the store.
    pub fn in_store(root: &Path, id: &RepoId) -> Self {
        Self::beside(&root.join(id.owner()), id.name())
    }

    /// The slot of a download into a folder that the user chose.
    pub fn at(dir: &Path) -> Result<Self, StoreError> {
        let refuse = |reason: &str| StoreError::TargetOccupied {
            path: dir.to_path_buf(),
            reason: reason.to_owned(),
        };
        // A name such as `.` only becomes one that has a sibling when it is made whole.
        let whole = match dir.canonicalize() {
            Ok(path) => path,
            Err(_) => std::path::absolute(dir).map_err(StoreError::io("find", dir))?,
        };
        let name = whole
            .file_name()
            .ok_or_else(|| refuse("has no name of its own"))?
            .to_str()
            .ok_or_else(|| refuse("has a name that is not UTF-8"))?;
        let parent = whole
            .parent()
            .ok_or_else(|| refuse("has no parent folder"))?;
        Ok(Self::beside(parent, name))
    }

    fn beside(parent: &Path, name: &str) -> Self {
        Self {
            target: parent.join(name),
            staging: parent.join(format!(".{name}.partial")),
            lock: parent.join(format!(".{name}.lock")),
            trash: parent.join(format!(".{name}.removed")),
        }
    }

    /// The model name that a staging directory called `file_name` belongs to.
    pub fn staged_name(file_name: &str) -> Option<&str> {
        file_name.strip_prefix('.')?.strip_suffix(".partial")
    }

    /// The model name that a half removed directory called `file_name` belonged to.
    pub fn trashed_name(file_name: &str) -> Option<&str> {
        file_name.strip_prefix('.')?.strip_suffix(".removed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_is_beside_the_target_and_no_valid_name() {
        let id = RepoId::parse("o/n").unwrap();
        let slot = Slot::in_store(Path::new("/s"), &id);
        assert_eq!(slot.target, Path::new("/s/o/n"));
        assert_eq!(slot.staging, Path::new("/s/o/.n.partial"));
        assert_eq!(Slot::staged_name(".n.partial"), Some("n"));
        assert_eq!(Slot::trashed_name(".n.removed"), Some("n"));
        assert!(RepoId::parse("o/.n.partial").is_err());
    }

    #[test]
    fn a_chosen_folder_may_be_relative_but_not_the_root() {
        let slot = Slot::at(Path::new("some-folder-that-is-not-there")).unwrap();
        assert!(slot.target.is_absolute());
        assert!(matches!(
            Slot::at(Path::new("/")),
            Err(StoreError::TargetOccupied { .. })
        ));
    }
}
