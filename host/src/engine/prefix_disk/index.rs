//! Which pages are on the disk, and which go when there is no room.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::format::{Digest32, HEADER_LEN, peek};

/// End of a page's name.
pub const SUFFIX: &str = ".kvpage";

/// End of the name of a page that is being written.
pub const TEMPORARY: &str = ".kvtemp";

/// A temporary file that is older was left behind by a process that is gone.
const ABANDONED: Duration = Duration::from_secs(3600);

/// One file.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Its length.
    pub bytes: u64,
    /// When it was last written or read.
    pub used: SystemTime,
    /// Whether it is of this model.
    pub is_own: bool,
}

/// All files by name.
#[derive(Debug, Default)]
pub struct Index {
    files: HashMap<Digest32, Entry>,
    bytes: u64,
}

/// Name of the file of a key.
pub fn file_name(key: &Digest32) -> String {
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    hex + SUFFIX
}

fn key_of(name: &str) -> Option<Digest32> {
    let hex = name.strip_suffix(SUFFIX).filter(|hex| hex.len() == 64)?;
    let mut key = [0; 32];
    for (byte, digits) in key.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
        let digits = std::str::from_utf8(digits).ok()?;
        *byte = u8::from_str_radix(digits, 16).ok()?;
    }
    // One name for one key: capitals are somebody else's.
    (file_name(&key) == name).then_some(key)
}

impl Index {
    /// Reads a folder. Pages of other versions and those that are cut are deleted; files with other names are not ours
    /// and stay. Gives how many were deleted.
    pub fn scan(dir: &Path, fingerprint: &Digest32) -> io::Result<(Self, u64)> {
        let mut index = Self::default();
        let mut damaged = 0;
        for file in fs::read_dir(dir)? {
            let path = file?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let Some(name) = name else { continue };
            if name.ends_with(TEMPORARY) {
                remove_abandoned(&path);
            }
            let Some(key) = key_of(name) else { continue };
            match inspect(&path, fingerprint) {
                Some(entry) => index.insert(key, entry),
                None => {
                    damaged += 1;
                    // What cannot be deleted is found to be damaged again.
                    let _ = fs::remove_file(&path);
                }
            }
        }
        Ok((index, damaged))
    }

    /// Whether a page is there.
    pub fn contains(&self, key: &Digest32) -> bool {
        self.files.contains_key(key)
    }

    /// Adds a page.
    pub fn insert(&mut self, key: Digest32, entry: Entry) {
        self.bytes += entry.bytes;
        if let Some(old) = self.files.insert(key, entry) {
            self.bytes -= old.bytes;
        }
    }

    /// Takes a page out.
    pub fn remove(&mut self, key: &Digest32) {
        if let Some(entry) = self.files.remove(key) {
            self.bytes -= entry.bytes;
        }
    }

    /// Notes that a page was read.
    pub fn touch(&mut self, key: &Digest32) {
        if let Some(entry) = self.files.get_mut(key) {
            entry.used = SystemTime::now();
        }
    }

    /// Files and their bytes.
    pub fn size(&self) -> (u64, u64) {
        (self.files.len() as u64, self.bytes)
    }

    /// Takes out what has to go so that `more` bytes fit under `most`: least recently used first, whosever they are.
    pub fn make_room(&mut self, more: u64, most: u64) -> Vec<Digest32> {
        let mut gone = Vec::new();
        if self.bytes.saturating_add(more) <= most {
            return gone;
        }
        let mut all: Vec<(SystemTime, Digest32)> = self
            .files
            .iter()
            .map(|(key, entry)| (entry.used, *key))
            .collect();
        all.sort_unstable();
        for (_, key) in all {
            if self.bytes.saturating_add(more) <= most {
                break;
            }
            self.remove(&key);
            gone.push(key);
        }
        gone
    }

    /// Takes out all pages of this model.
    pub fn clear_own(&mut self) -> Vec<Digest32> {
        let own = self.files.iter().filter(|(_, entry)| entry.is_own);
        let own: Vec<Digest32> = own.map(|(key, _)| *key).collect();
        own.iter().for_each(|key| self.remove(key));
        own
    }
}

fn inspect(path: &PathBuf, fingerprint: &Digest32) -> Option<Entry> {
    let meta = fs::symlink_metadata(path)
        .ok()
        .filter(|meta| meta.is_file())?;
    let mut header = [0; HEADER_LEN];
    File::open(path).ok()?.read_exact(&mut header).ok()?;
    let found = peek(&header, meta.len())?;
    Some(Entry {
        bytes: meta.len(),
        used: meta.modified().unwrap_or(SystemTime::UNIX_EPOCH),
        is_own: found == *fingerprint,
    })
}

fn remove_abandoned(path: &Path) {
    let modified = fs::symlink_metadata(path).and_then(|meta| meta.modified());
    let age = modified.ok().and_then(|at| at.elapsed().ok());
    if age.is_some_and(|age| age > ABANDONED) {
        // Somebody else may have been faster.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_keys() {
        let key = [0xab; 32];
        assert_eq!(key_of(&file_name(&key)), Some(key));
        for name in [
            "x",
            ".kvpage",
            "notes.kvpage",
            &file_name(&key).to_uppercase(),
        ] {
            assert_eq!(key_of(name), None, "{name}");
        }
    }

    #[test]
    fn the_least_recently_used_go_first_and_the_sum_is_right() {
        let at = |s| SystemTime::UNIX_EPOCH + Duration::from_secs(s);
        let mut index = Index::default();
        for (number, used) in [(1, 30), (2, 10), (3, 20)] {
            let is_own = number != 3;
            index.insert(
                [number; 32],
                Entry {
                    bytes: 10,
                    used: at(used),
                    is_own,
                },
            );
        }
        index.insert(
            [1; 32],
            Entry {
                bytes: 20,
                used: at(30),
                is_own: true,
            },
        );
        assert_eq!(index.size(), (3, 40));
        assert_eq!(index.make_room(10, 50), Vec::<Digest32>::new());
        assert_eq!(index.make_room(10, 45), [[2; 32]]);
        assert_eq!(index.clear_own(), [[1; 32]]);
        assert_eq!(index.size(), (1, 10));
        assert_eq!(index.make_room(100, 50), [[3; 32]]);
        assert_eq!(index.size(), (0, 0));
    }
}
