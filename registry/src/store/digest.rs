//! Digests of files while they stream by.
//!
//! A hub gives SHA-256 for files in large-file storage and the git blob id (SHA-1 over a header and the
//! content) for the rest. SHA-256 of everything is computed as well, for the record in the store.

use std::fmt::Write as _;

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// What the hub says about the content of a file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ContentId {
    /// Lower-case hex of the SHA-256.
    Sha256(String),
    /// Lower-case hex of the git blob id.
    GitBlob(String),
}

impl ContentId {
    /// A SHA-256 in hex.
    pub fn sha256(text: &str) -> Option<Self> {
        hex_digits(text, 64).map(Self::Sha256)
    }

    /// A git blob id in hex.
    pub fn git_blob(text: &str) -> Option<Self> {
        hex_digits(text, 40).map(Self::GitBlob)
    }
}

/// Digests of a whole file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Digests {
    /// Lower-case hex.
    pub sha256: String,
    git_blob: Option<String>,
}

impl Digests {
    /// The digest to compare with `expected`: what was expected and what was found, if they differ.
    pub fn mismatch(&self, expected: &ContentId) -> Option<(String, String)> {
        let (kind, expected, found) = match expected {
            ContentId::Sha256(hex) => ("sha256", hex, self.sha256.as_str()),
            ContentId::GitBlob(hex) => (
                "git blob",
                hex,
                self.git_blob.as_deref().unwrap_or("not computed"),
            ),
        };
        (expected != found).then(|| (format!("{kind} {expected}"), format!("{kind} {found}")))
    }
}

/// Hashes one file of a size that is known from the start.
pub(super) struct FileHasher {
    sha256: Sha256,
    git_blob: Option<Sha1>,
}

impl FileHasher {
    /// Starts a file of `size_bytes` that is to be compared with `expected`.
    pub fn new(size_bytes: u64, expected: Option<&ContentId>) -> Self {
        let git_blob = match expected {
            Some(ContentId::GitBlob(_)) => {
                let mut hasher = Sha1::new();
                hasher.update(format!("blob {size_bytes}\0").as_bytes());
                Some(hasher)
            }
            _ => None,
        };
        Self {
            sha256: Sha256::new(),
            git_blob,
        }
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        if let Some(git_blob) = &mut self.git_blob {
            git_blob.update(bytes);
        }
    }

    /// The digests of everything added.
    pub fn finish(self) -> Digests {
        Digests {
            sha256: hex(&self.sha256.finalize()),
            git_blob: self.git_blob.map(|hasher| hex(&hasher.finalize())),
        }
    }
}

/// Lower-cases `text` if it is exactly `count` hex digits.
pub(super) fn hex_digits(text: &str, count: usize) -> Option<String> {
    let good = text.len() == count && text.bytes().all(|b| b.is_ascii_hexdigit());
    good.then(|| text.to_ascii_lowercase())
}

fn hex(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(out, "{byte:02x}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_git_and_of_the_standard() {
        // `printf 'hello\n' | git hash-object --stdin` and `| sha256sum`.
        let blob = ContentId::git_blob("ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        let mut hasher = FileHasher::new(6, Some(&blob));
        hasher.update(b"hel");
        hasher.update(b"lo\n");
        let digests = hasher.finish();
        assert_eq!(digests.mismatch(&blob), None);
        assert_eq!(
            digests.sha256,
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
        );
        let other = ContentId::sha256(&"0".repeat(64)).unwrap();
        assert!(digests.mismatch(&other).is_some());
    }

    #[test]
    fn only_hex_of_the_right_length_is_a_digest() {
        assert_eq!(ContentId::sha256("abc"), None);
        assert_eq!(ContentId::git_blob(&"g".repeat(40)), None);
        assert_eq!(hex_digits("AB", 2).as_deref(), Some("ab"));
    }
}
