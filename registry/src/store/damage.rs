//! What is wrong with a copy of a model, and where one was looked for in vain: the parts of error messages.

use std::fmt;
use std::path::PathBuf;

/// A place where a model was looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookedAt {
    /// The place.
    pub path: PathBuf,
    /// What was wrong with what lay there; empty if nothing did.
    pub note: String,
}

impl fmt::Display for LookedAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)?;
        if self.note.is_empty() {
            return Ok(());
        }
        write!(f, ": {}", self.note)
    }
}

/// What keeps a directory from being a complete model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// It is a file, or cannot be read.
    #[error("it is not a readable directory")]
    NotADirectory,
    /// It has neither safetensors nor GGUF.
    #[error("it holds no safetensors or GGUF file")]
    NoWeights,
    /// Safetensors without the configuration that says what they are.
    #[error("config.json is missing")]
    NoConfig,
    /// A file that the record or an index names is not there.
    #[error("{file} is missing")]
    MissingFile {
        /// The file.
        file: String,
    },
    /// A file has another size than the record says.
    #[error("{file} has {found_bytes} bytes instead of {expected_bytes}")]
    WrongSize {
        /// The file.
        file: String,
        /// Size in the record.
        expected_bytes: u64,
        /// Size on disk.
        found_bytes: u64,
    },
    /// The record or an index cannot be read.
    #[error("{file} cannot be read: {reason}")]
    Unreadable {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
}

/// Several places in one line.
pub(super) struct Joined<'a>(pub &'a [LookedAt]);

impl fmt::Display for Joined<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, place) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("; ")?;
            }
            place.fmt(f)?;
        }
        Ok(())
    }
}
