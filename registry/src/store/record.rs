//! The two small files the store writes beside weights: the record of a finished model and the state of an
//! unfinished download.
//!
//! The record is written before the atomic rename, so a directory that carries one was complete when it
//! appeared. Neither file is ever taken from a server.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::damage::Damage;
use super::digest::ContentId;
use super::error::StoreError;
use super::name::Revision;
use super::repo_path::RepoPath;

/// Record of a finished model, in its directory.
pub(super) const RECORD_FILE: &str = ".mlxcel.json";
/// State of an unfinished download, in the staging directory.
pub(super) const STATE_FILE: &str = ".mlxcel-partial.json";
/// Version of both formats.
const FORMAT: u32 = 1;
/// Longest record that is read; 10 000 files of 200 bytes are 2 MB.
const MAX_RECORD_BYTES: u64 = 16 << 20;
/// Longest shard index that is read; the largest in public use have some 15 MB.
pub(super) const MAX_INDEX_BYTES: u64 = 256 << 20;

/// What the store knows about a model it downloaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Version of this format.
    pub format: u32,
    /// `owner/name`.
    pub repo_id: String,
    /// Where it came from.
    pub endpoint: String,
    /// The revision that was asked for.
    pub revision: String,
    /// The commit that it named at that time.
    pub commit: String,
    /// Every file, by name.
    pub files: BTreeMap<String, RecordedFile>,
    /// When the last file was complete.
    pub completed: String,
}

/// One file of a [`Record`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RecordedFile {
    /// Size.
    pub size: u64,
    /// Lower-case hex.
    pub sha256: String,
    /// What the hub said about the content, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hub: Option<ContentId>,
}

impl Record {
    /// An empty record of the current format.
    pub fn new(repo_id: String, endpoint: String, revision: String, commit: String) -> Self {
        Self {
            format: FORMAT,
            repo_id,
            endpoint,
            revision,
            commit,
            files: BTreeMap::new(),
            completed: String::new(),
        }
    }

    /// Reads the record of a model directory; `None` if it has none.
    pub fn read(dir: &Path) -> Result<Option<Self>, Damage> {
        let record: Option<Self> = read_json(dir, RECORD_FILE, MAX_RECORD_BYTES)?;
        match record {
            Some(r) if r.format != FORMAT => Err(Damage::Unreadable {
                file: RECORD_FILE.to_owned(),
                reason: format!("format {} where {FORMAT} was expected", r.format),
            }),
            other => Ok(other),
        }
    }

    /// Writes the record into a model directory.
    pub fn write(&self, dir: &Path) -> Result<(), StoreError> {
        write_json(dir, RECORD_FILE, self)
    }

    /// Whether `asked` names what this record holds, as far as can be told without the network.
    pub fn satisfies(&self, asked: &Revision) -> bool {
        let asked = asked.as_str();
        asked == self.revision || is_short_commit(asked, &self.commit)
    }

    /// The files of the record as checked names.
    pub fn paths(&self) -> Result<Vec<RepoPath>, Damage> {
        self.files
            .keys()
            .map(|name| {
                RepoPath::parse(name).map_err(|error| Damage::Unreadable {
                    file: RECORD_FILE.to_owned(),
                    reason: error.to_string(),
                })
            })
            .collect()
    }

    /// What the record says and the disk does not, if anything.
    pub fn damage(&self, dir: &Path) -> Option<Damage> {
        let paths = match self.paths() {
            Ok(paths) => paths,
            Err(damage) => return Some(damage),
        };
        paths.iter().find_map(|path| {
            let expected_bytes = self.files.get(path.as_str())?.size;
            match fs::metadata(path.below(dir)) {
                Ok(meta) if meta.is_file() && meta.len() == expected_bytes => None,
                Ok(meta) if meta.is_file() => Some(Damage::WrongSize {
                    file: path.to_string(),
                    expected_bytes,
                    found_bytes: meta.len(),
                }),
                _ => Some(Damage::MissingFile {
                    file: path.to_string(),
                }),
            }
        })
    }

    /// `main (commit 0123456)`, for messages.
    pub fn revision_text(&self) -> String {
        let short = self.commit.get(..12).unwrap_or(&self.commit);
        format!("{} (commit {short})", self.revision)
    }
}

/// What is needed to go on with an unfinished download.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartialState {
    /// Version of this format.
    #[serde(default)]
    format: u32,
    /// By file name. A file that is not here is not trusted, whatever lies on the disk.
    #[serde(default)]
    pub files: BTreeMap<String, PartialFile>,
}

/// What was known about a file when its download began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartialFile {
    /// Whole size, if known.
    pub size: Option<u64>,
    /// What the hub says about the content.
    pub content: Option<ContentId>,
    /// Strong entity tag of the server that sent the bytes.
    pub etag: Option<String>,
    /// SHA-256 of the finished file.
    #[serde(default)]
    pub sha256: Option<String>,
}

impl PartialState {
    /// Reads the state. One that cannot be read is as good as none: everything is fetched again.
    pub fn read(staging: &Path) -> Self {
        match read_json::<Self>(staging, STATE_FILE, MAX_RECORD_BYTES) {
            Ok(Some(state)) if state.format == FORMAT => state,
            _ => Self {
                format: FORMAT,
                files: BTreeMap::new(),
            },
        }
    }

    /// Writes the state.
    pub fn write(&self, staging: &Path) -> Result<(), StoreError> {
        write_json(staging, STATE_FILE, self)
    }
}

/// Whether `asked` is `commit` or a beginning of it that is long enough to be meant as one.
pub(super) fn is_short_commit(asked: &str, commit: &str) -> bool {
    const SHORTEST: usize = 7;
    asked.len() >= SHORTEST
        && commit
            .get(..asked.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(asked))
}

/// Makes the entries of a directory durable.
pub(super) fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    File::open(dir)
        .and_then(|handle| handle.sync_all())
        .map_err(StoreError::io("sync", dir))
}

/// Reads `dir/name`, with a cap; `None` if it does not exist.
pub(super) fn read_json<T: DeserializeOwned>(
    dir: &Path,
    name: &str,
    limit_bytes: u64,
) -> Result<Option<T>, Damage> {
    let unreadable = |reason: String| Damage::Unreadable {
        file: name.to_owned(),
        reason,
    };
    let path = dir.join(name);
    match fs::metadata(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error.to_string())),
        Ok(meta) if meta.len() > limit_bytes => {
            return Err(unreadable(format!(
                "it has {} bytes, more than {limit_bytes}",
                meta.len()
            )));
        }
        Ok(_) => {}
    }
    let bytes = fs::read(&path).map_err(|e| unreadable(e.to_string()))?;
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|e| unreadable(e.to_string()))
}

/// Replaces `dir/name` in one step.
fn write_json<T: Serialize>(dir: &Path, name: &str, value: &T) -> Result<(), StoreError> {
    let path = dir.join(name);
    let fresh = dir.join(format!("{name}.new"));
    let bytes = serde_json::to_vec_pretty(value)
        .map_err(std::io::Error::from)
        .map_err(StoreError::io("encode", &path))?;
    let mut file = File::create(&fresh).map_err(StoreError::io("create", &fresh))?;
    file.write_all(&bytes)
        .and_then(|()| file.sync_all())
        .map_err(StoreError::io("write", &fresh))?;
    fs::rename(&fresh, &path).map_err(StoreError::io("replace", &path))?;
    sync_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let commit = "0123456789abcdef0123456789abcdef01234567".to_owned();
        let mut record = Record::new(
            "o/n".to_owned(),
            "https://e".to_owned(),
            "main".to_owned(),
            commit,
        );
        let file = RecordedFile {
            size: 3,
            sha256: "00".to_owned(),
            hub: None,
        };
        record.files.insert("a.json".to_owned(), file);
        record
    }

    #[test]
    fn a_record_survives_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), None);
        record().write(dir.path()).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), Some(record()));
        assert!(!dir.path().join(".mlxcel.json.new").exists());
    }

    #[test]
    fn damage_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let message = |r: &Record| r.damage(dir.path()).map(|d| d.to_string());
        assert_eq!(message(&record()).as_deref(), Some("a.json is missing"));
        fs::write(dir.path().join("a.json"), "ab").unwrap();
        assert_eq!(
            message(&record()).as_deref(),
            Some("a.json has 2 bytes instead of 3")
        );
        fs::write(dir.path().join("a.json"), "abc").unwrap();
        assert_eq!(message(&record()), None);
        let mut hostile = record();
        let file = hostile.files.get("a.json").unwrap().clone();
        hostile.files.insert("../../etc/passwd".to_owned(), file);
        assert!(matches!(
            hostile.damage(dir.path()),
            Some(Damage::Unreadable { .. })
        ));
    }

    #[test]
    fn unreadable_records_are_damage_and_unreadable_states_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        for bad in ["{", "[]", r#"{"format":1}"#] {
            fs::write(dir.path().join(RECORD_FILE), bad).unwrap();
            assert!(
                matches!(Record::read(dir.path()), Err(Damage::Unreadable { .. })),
                "{bad}"
            );
            fs::write(dir.path().join(STATE_FILE), bad).unwrap();
            assert!(PartialState::read(dir.path()).files.is_empty());
        }
        let mut later = record();
        later.format = 2;
        later.write(dir.path()).unwrap();
        assert!(matches!(
            Record::read(dir.path()),
            Err(Damage::Unreadable { .. })
        ));
    }

    #[test]
    fn a_revision_is_satisfied_by_its_name_or_its_commit() {
        let holds = |text: &str| record().satisfies(&Revision::parse(text).unwrap());
        assert!(holds("main"));
        assert!(holds("0123456"));
        assert!(holds("0123456789ABCDEF0123456789abcdef01234567"));
        assert!(!holds("012345"));
        assert!(!holds("0123457"));
        assert!(!holds("v1.0"));
    }
}
