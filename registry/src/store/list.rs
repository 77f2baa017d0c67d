//! What the store holds: its models, and what is in the way of being one.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;

use super::Store;
use super::error::StoreError;
use super::inspect::{NoContent, inspect};
use super::name::{RepoId, check_segment};
use super::record::Record;
use super::slot::Slot;
use super::timestamp;

/// Folders below a model that are looked into for its size.
const MAX_DEPTH: usize = 8;

/// Order of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ListSort {
    /// By `owner/name`.
    #[default]
    Name,
    /// Largest first.
    Size,
}

/// A complete model of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StoredModel {
    /// `owner/name`.
    pub repo_id: String,
    /// Bytes of all its files.
    pub size_bytes: u64,
    /// Its directory.
    pub path: PathBuf,
    /// When the newest of its files changed; in JSON as RFC 3339 in UTC.
    #[serde(serialize_with = "timestamp::serialize")]
    pub modified: SystemTime,
}

/// Something in the store that is no complete model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListProblem {
    /// Where it is.
    pub path: PathBuf,
    /// How much room it takes.
    pub size_bytes: u64,
    /// What is wrong and what to do.
    pub reason: String,
}

/// The content of the store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Listing {
    /// Complete models.
    pub models: Vec<StoredModel>,
    /// Everything else, by path.
    pub problems: Vec<ListProblem>,
}

impl Store {
    /// Lists the store. One that does not exist yet is empty.
    pub fn list(&self, sort: ListSort) -> Result<Listing, StoreError> {
        let mut listing = Listing::default();
        let root = self.root()?;
        for owner in folders(root)? {
            if let Err(reason) = check_segment(&owner) {
                // Hidden folders are other tools' business.
                if !owner.starts_with('.') {
                    let path = root.join(&owner);
                    let reason = format!("{owner:?} is no owner: it {reason}");
                    listing.problems.push(problem(path, reason));
                }
                continue;
            }
            for name in folders(&root.join(&owner))? {
                self.list_entry(root, [&owner, &name], &mut listing);
            }
        }
        match sort {
            ListSort::Name => listing.models.sort_by(|a, b| a.repo_id.cmp(&b.repo_id)),
            ListSort::Size => listing
                .models
                .sort_by(|a, b| (b.size_bytes, &a.repo_id).cmp(&(a.size_bytes, &b.repo_id))),
        }
        listing.problems.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(listing)
    }

    fn list_entry(&self, root: &Path, [owner, name]: [&str; 2], listing: &mut Listing) {
        let path = root.join(owner).join(name);
        if let Some(model) = Slot::staged_name(name) {
            let reason = format!(
                "unfinished download; continue with `mlxcel download {owner}/{model}` or drop it with `mlxcel rm {owner}/{model}`"
            );
            listing.problems.push(problem(path, reason));
            return;
        }
        if let Some(model) = Slot::trashed_name(name) {
            let reason = format!("half removed; finish with `mlxcel rm {owner}/{model}`");
            listing.problems.push(problem(path, reason));
            return;
        }
        if name.starts_with('.') {
            return;
        }
        let id = match RepoId::parse(&format!("{owner}/{name}")) {
            Ok(id) => id,
            Err(error) => return listing.problems.push(problem(path, error.to_string())),
        };
        if let Err(error) = self.check_inside(&path) {
            return listing.problems.push(problem(path, error.to_string()));
        }
        if let Some(damage) = damage(&path) {
            let reason = format!("damaged: {damage}; repair it with `mlxcel download {id}`");
            return listing.problems.push(problem(path, reason));
        }
        let (size_bytes, modified) = usage(&path);
        listing.models.push(StoredModel {
            repo_id: id.to_string(),
            size_bytes,
            path,
            modified,
        });
    }
}

fn damage(dir: &Path) -> Option<String> {
    match Record::read(dir) {
        Err(damage) => Some(damage.to_string()),
        Ok(Some(record)) => record.damage(dir).map(|d| d.to_string()),
        Ok(None) => match inspect(dir, None) {
            Err(NoContent::Damaged(damage)) => Some(damage.to_string()),
            _ => None,
        },
    }
}

fn problem(path: PathBuf, reason: String) -> ListProblem {
    let (size_bytes, _) = usage(&path);
    ListProblem {
        path,
        size_bytes,
        reason,
    }
}

/// Names of the folders in `dir` (links to folders included).
fn folders(dir: &Path) -> Result<Vec<String>, StoreError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(StoreError::io("read", dir)(error)),
    };
    Ok(entries
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect())
}

/// Bytes of all files below `dir` and when the newest changed. Links are not followed.
pub(super) fn usage(dir: &Path) -> (u64, SystemTime) {
    let mut bytes = 0_u64;
    let mut newest = SystemTime::UNIX_EPOCH;
    let mut open = vec![(dir.to_path_buf(), 0)];
    while let Some((folder, depth)) = open.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else {
                continue;
            };
            if meta.is_dir() {
                if depth < MAX_DEPTH {
                    open.push((entry.path(), depth + 1));
                }
            } else if meta.is_file() {
                bytes = bytes.saturating_add(meta.len());
                newest = newest.max(meta.modified().unwrap_or(SystemTime::UNIX_EPOCH));
            }
        }
    }
    (bytes, newest)
}
