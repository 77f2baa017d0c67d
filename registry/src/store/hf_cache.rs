//! Reading the cache that the Hugging Face libraries keep. Nothing here writes.
//!
//! Layout: `models--owner--name/refs/<revision>` holds a commit, `snapshots/<commit>` holds links to blobs.
//! An interrupted download of those libraries leaves a snapshot with files missing, so callers still have to
//! check that what lies there is whole.

use std::fs;
use std::path::{Path, PathBuf};

use super::name::Revision;
use super::record::is_short_commit;

/// A commit in a reference file is 40 or 64 hex digits; anything longer is not read.
const MAX_REF_BYTES: u64 = 128;

/// The snapshot of `revision` in a repository folder of the cache, if it has one.
pub(super) fn snapshot(repo_dir: &Path, revision: Option<&Revision>) -> Option<PathBuf> {
    let main = Revision::main();
    let revision = revision.unwrap_or(&main);
    let snapshots = repo_dir.join("snapshots");
    if let Some(commit) = read_ref(&repo_dir.join("refs").join(revision.as_str())) {
        let dir = snapshots.join(commit);
        return dir.is_dir().then_some(dir);
    }
    by_commit(&snapshots, revision.as_str())
}

/// Whether the cache holds anything of the repository.
pub(super) fn holds(repo_dir: &Path) -> bool {
    fs::read_dir(repo_dir.join("snapshots")).is_ok_and(|mut entries| entries.next().is_some())
}

fn read_ref(path: &Path) -> Option<String> {
    if fs::metadata(path).ok()?.len() > MAX_REF_BYTES {
        return None;
    }
    let text = fs::read_to_string(path).ok()?;
    let commit = text.trim();
    is_commit(commit).then(|| commit.to_owned())
}

fn by_commit(snapshots: &Path, revision: &str) -> Option<PathBuf> {
    let mut fitting = fs::read_dir(snapshots).ok()?.flatten().filter(|entry| {
        entry
            .file_name()
            .to_str()
            .is_some_and(|name| is_commit(name) && is_short_commit(revision, name))
    });
    let first = fitting.next()?;
    // A beginning that fits two commits names neither.
    (fitting.next().is_none() && first.path().is_dir()).then(|| first.path())
}

fn is_commit(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_found_by_reference_or_commit() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = ("a".repeat(40), format!("{}b", "a".repeat(39)));
        for commit in [&a, &b] {
            fs::create_dir_all(dir.path().join("snapshots").join(commit)).unwrap();
        }
        fs::create_dir_all(dir.path().join("refs/refs/pr")).unwrap();
        fs::write(dir.path().join("refs/main"), format!("{a}\n")).unwrap();
        fs::write(dir.path().join("refs/refs/pr/1"), &b).unwrap();
        fs::write(dir.path().join("refs/evil"), "../../../../etc").unwrap();
        let find = |text: Option<&str>| {
            let revision = text.map(|t| Revision::parse(t).unwrap());
            snapshot(dir.path(), revision.as_ref())
                .map(|p| p.file_name().unwrap().to_str().unwrap().to_owned())
        };
        assert_eq!(find(None), Some(a.clone()));
        assert_eq!(find(Some("refs/pr/1")), Some(b.clone()));
        assert_eq!(find(Some(&b)), Some(b.clone()));
        assert_eq!(find(Some("aaaaaaaa")), None);
        assert_eq!(find(Some("evil")), None);
        assert_eq!(find(Some("v2")), None);
        assert!(holds(dir.path()));
        assert!(!holds(&dir.path().join("refs")));
    }
}
