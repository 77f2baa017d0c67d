//! Names of files inside a repository, which become paths on this machine.

use std::fmt;
use std::path::{Path, PathBuf};

use super::name::NameError;

/// Longest file name with its folders.
const MAX_PATH_BYTES: usize = 1024;
/// Longest single file or folder name, the limit of common file systems.
const MAX_SEGMENT_BYTES: usize = 255;

/// A file inside a repository: relative, with forward slashes, and unable to leave the folder it is put in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RepoPath(String);

impl RepoPath {
    /// Validates a file name, for instance one that a server listed.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let reason = if text.is_empty() {
            Some("is empty")
        } else if text.len() > MAX_PATH_BYTES {
            Some("is longer than 1024 bytes")
        } else if text.chars().any(char::is_control) {
            Some("holds a control character")
        } else if text.contains(['\\', ':']) {
            Some("holds a backslash or a colon")
        } else if text.split('/').any(str::is_empty) {
            Some("is absolute or has an empty part")
        } else if text.split('/').any(|s| matches!(s, "." | "..")) {
            Some("has a part that is . or ..")
        } else if text.split('/').any(|s| s.len() > MAX_SEGMENT_BYTES) {
            Some("has a part longer than 255 bytes")
        } else {
            None
        };
        match reason {
            None => Ok(Self(text.to_owned())),
            Some(reason) => Err(NameError::BadPath {
                path: text.chars().take(200).collect(),
                reason,
            }),
        }
    }

    /// The text, with forward slashes.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The last part.
    pub(super) fn file_name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }

    /// Whether the file lies directly in the repository's top folder.
    pub(super) fn is_top_level(&self) -> bool {
        !self.0.contains('/')
    }

    /// Where this file lies below `dir`.
    pub(super) fn below(&self, dir: &Path) -> PathBuf {
        let mut path = dir.to_path_buf();
        path.extend(self.0.split('/'));
        path
    }
}

impl fmt::Display for RepoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a name ends in `.gguf`, in any case.
pub(super) fn is_gguf(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() > 5
        && bytes
            .get(bytes.len() - 5..)
            .is_some_and(|end| end.eq_ignore_ascii_case(b".gguf"))
}
