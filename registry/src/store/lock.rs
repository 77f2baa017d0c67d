//! One process at a time changes one model.
//!
//! An advisory lock on a file beside the model. The kernel drops it when its holder dies, so there is no
//! stale lock to clean up.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::error::StoreError;

/// How often the lock file may vanish under our hands before it counts as an error.
const ACQUIRE_ATTEMPTS: u32 = 16;

/// Holds the lock until dropped.
#[derive(Debug)]
pub(super) struct SlotLock {
    file: File,
    path: PathBuf,
}

impl SlotLock {
    /// Takes the lock, or says who has it. Does not wait.
    pub fn acquire(path: &Path) -> Result<Self, StoreError> {
        for _ in 0..ACQUIRE_ATTEMPTS {
            // Both the folder and the file may be removed by their previous user between these lines.
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent).map_err(StoreError::io("create", parent))?;
            }
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path);
            let file = match opened {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(StoreError::io("open lock file", path)(error)),
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(locked(path)),
                Err(TryLockError::Error(source)) => {
                    return Err(StoreError::io("lock", path)(source));
                }
            }
            // The previous holder deletes the file before it lets go, so the lock may be on a file that has
            // no name any more and would exclude nobody.
            if is_still_named(&file, path) {
                let mut lock = Self {
                    file,
                    path: path.to_path_buf(),
                };
                lock.sign();
                return Ok(lock);
            }
        }
        Err(locked(path))
    }

    /// Leaves the process id for whoever finds the lock taken. Only a courtesy, so failure is no error.
    fn sign(&mut self) {
        let id = std::process::id().to_string();
        if self.file.set_len(0).is_ok() {
            let _ = self.file.write_all(id.as_bytes());
        }
    }
}

impl Drop for SlotLock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn locked(path: &Path) -> StoreError {
    let mut text = String::new();
    let holder = File::open(path)
        .and_then(|file| file.take(32).read_to_string(&mut text))
        .ok()
        .and_then(|_| text.trim().parse().ok());
    StoreError::Locked {
        path: path.to_path_buf(),
        holder,
    }
}

#[cfg(unix)]
fn is_still_named(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(held), Ok(named)) => held.dev() == named.dev() && held.ino() == named.ino(),
        _ => false,
    }
}

#[cfg(not(unix))]
fn is_still_named(_file: &File, path: &Path) -> bool {
    path.exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_taker_is_told_who_holds_it_until_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("o").join(".n.lock");
        let first = SlotLock::acquire(&path).unwrap();
        let refused = SlotLock::acquire(&path).unwrap_err();
        assert!(
            matches!(refused, StoreError::Locked { holder: Some(id), .. } if id == std::process::id())
        );
        drop(first);
        assert!(!path.exists());
        SlotLock::acquire(&path).unwrap();
    }

    #[test]
    fn a_file_left_by_a_dead_process_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".n.lock");
        fs::write(&path, "999999999").unwrap();
        SlotLock::acquire(&path).unwrap();
    }
}
