//! Putting a fetched tree in place: built beside its destination, renamed into it, never half there.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Written last into an installed tree: what it was made from. A tree without one, or with another, is made anew.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// sha256 of the file it was made from.
    pub sha256: String,
    /// The layout that this program makes; raised when the layout changes.
    pub layout: u32,
}

const STAMP_NAME: &str = ".xtask-stamp.json";

/// Keeps two commands from installing the same thing at the same time; released when dropped.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held for its lock")] File);

impl Lock {
    pub fn take(dir: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        let path = dir.join(".lock");
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(Error::io("open", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                eprintln!(
                    "waiting for another cargo xtask, which holds {}",
                    path.display()
                );
                file.lock().map_err(Error::io("lock", &path))?;
            }
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
        }
        Ok(Lock(file))
    }
}

/// The folder in which a tree is prepared; on the same file system as its destination, so that a rename is enough.
pub fn staging(destination: &Path) -> PathBuf {
    sibling(destination, ".staging-")
}

fn sibling(destination: &Path, prefix: &str) -> PathBuf {
    let name = destination
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    destination.with_file_name(format!("{prefix}{name}"))
}

/// Makes `dir` if need be and sees that a file can be written there: before minutes of building rather than after them.
pub fn writable(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    let trial = dir.join(format!(".writable-{}", std::process::id()));
    std::fs::write(&trial, b"").map_err(Error::io("write into", dir))?;
    std::fs::remove_file(&trial).map_err(Error::io("remove", &trial))
}

pub fn is_current(tree: &Path, stamp: &Stamp) -> bool {
    std::fs::read_to_string(tree.join(STAMP_NAME))
        .ok()
        .and_then(|text| serde_json::from_str::<Stamp>(&text).ok())
        .is_some_and(|found| found == *stamp)
}

/// Stamps `prepared` and renames it to `destination`, replacing what is there.
pub fn commit(prepared: &Path, destination: &Path, stamp: &Stamp) -> Result<(), Error> {
    let stamp_path = prepared.join(STAMP_NAME);
    let text = serde_json::to_string(stamp).map_err(|error| Error::Malformed {
        path: stamp_path.clone(),
        message: error.to_string(),
    })?;
    std::fs::write(&stamp_path, text).map_err(Error::io("write", &stamp_path))?;
    let old = sibling(destination, ".old-");
    remove_tree(&old)?;
    if destination.exists() {
        std::fs::rename(destination, &old).map_err(Error::io("move away", destination))?;
    }
    std::fs::rename(prepared, destination).map_err(Error::io("move into place", destination))?;
    remove_tree(&old)
}

/// Removes a folder that may not exist.
pub fn remove_tree(path: &Path) -> Result<(), Error> {
    match std::fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io("remove", path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let base = std::env::temp_dir().join(format!("xtask-writable-{}", std::process::id()));
        writable(&base.join("a/b")).expect("is made");
        assert_eq!(
            std::fs::read_dir(base.join("a/b")).expect("lists").count(),
            0
        );
        std::fs::write(base.join("file"), "x").expect("writes");
        let error = writable(&base.join("file/inside")).expect_err("is no folder");
        assert!(error.to_string().contains("file/inside"), "{error}");
        std::fs::remove_dir_all(&base).expect("removes");
    }

    #[test]
    fn a_tree_is_current_only_with_its_own_stamp_and_is_replaced_whole() {
        let base = std::env::temp_dir().join(format!("xtask-install-{}", std::process::id()));
        let destination = base.join("tree-1.0");
        let prepare = |text: &str| {
            let prepared = staging(&destination);
            std::fs::create_dir_all(&prepared).expect("creates");
            std::fs::write(prepared.join(text), text).expect("writes");
            prepared
        };
        let one = Stamp {
            sha256: "one".into(),
            layout: 1,
        };
        let two = Stamp {
            sha256: "two".into(),
            layout: 1,
        };
        assert!(!is_current(&destination, &one));
        commit(&prepare("a"), &destination, &one).expect("installs");
        assert!(is_current(&destination, &one) && !is_current(&destination, &two));
        commit(&prepare("b"), &destination, &two).expect("replaces");
        assert!(is_current(&destination, &two));
        assert!(destination.join("b").exists() && !destination.join("a").exists());
        let left: Vec<_> = std::fs::read_dir(&base).expect("lists").collect();
        assert_eq!(left.len(), 1, "{left:?}");
        std::fs::remove_dir_all(&base).expect("removes");
    }
}
