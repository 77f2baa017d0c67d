//! Good answers of probes on disk, so that a family is tried in a child only when its file is new.
//!
//! Bad answers are not kept: a missing library may be installed without the file changing.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::probe::{ProbeOutcome, ProbeSettings};

/// Where the answer about one file is kept, and for which state of that file and of the host it holds.
pub(super) struct Entry {
    place: PathBuf,
    key: Key,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    path: PathBuf,
    file: Stamp,
    host: Stamp,
    host_version: String,
}

/// Size, time and place of a file: changes whenever its content does, short of deliberate forgery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    bytes: u64,
    modified_s: i64,
    modified_ns: i64,
    inode: u64,
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let attributes = fs::metadata(path).ok()?;
        Some(Self {
            bytes: attributes.len(),
            modified_s: attributes.mtime(),
            modified_ns: attributes.mtime_nsec(),
            inode: attributes.ino(),
        })
    }
}

#[derive(Serialize, Deserialize)]
struct Kept {
    key: Key,
    outcome: ProbeOutcome,
}

/// The place for the answer about `path`; `None` when nothing is kept.
pub(super) fn entry(settings: &ProbeSettings, path: &Path) -> Option<Entry> {
    let dir = settings.cache_dir.as_ref()?;
    let file_name = path.file_name()?.to_string_lossy().into_owned();
    // The whole path is in the key; the name only has to tell most files apart.
    let folded = path
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
    Some(Entry {
        place: dir.join(format!("{file_name}-{folded:016x}.json")),
        key: Key {
            path: path.to_path_buf(),
            file: Stamp::of(path)?,
            host: Stamp::of(&settings.program)?,
            host_version: env!("CARGO_PKG_VERSION").to_owned(),
        },
    })
}

impl Entry {
    /// The answer, when there is one for exactly this file and host.
    pub fn read(&self) -> Option<ProbeOutcome> {
        let bytes = fs::read(&self.place).ok()?;
        let kept: Kept = serde_json::from_slice(&bytes).ok()?;
        (kept.key == self.key).then_some(kept.outcome)
    }

    /// Keeps an answer. Failing to is no more than a slower start next time.
    pub fn write(self, outcome: &ProbeOutcome) {
        let kept = Kept {
            key: self.key,
            outcome: outcome.clone(),
        };
        let result = serde_json::to_vec(&kept)
            .map_err(std::io::Error::from)
            .and_then(|bytes| {
                let dir = self.place.parent().unwrap_or(Path::new("."));
                fs::create_dir_all(dir)?;
                let draft = self
                    .place
                    .with_extension(format!("{}.tmp", std::process::id()));
                fs::write(&draft, bytes)?;
                fs::rename(&draft, &self.place)
            });
        if let Err(error) = result {
            tracing::debug!(place = %self.place.display(), %error, "probe answer was not kept");
        }
    }
}
