//! Full disks, told in words: how much was needed, how much there is, what to do.

use std::path::Path;

use crate::error::Error;
use crate::process::Run;

/// What programs say when a disk is full; English, so they are run with `LC_ALL=C`.
pub fn says_full(said: &str) -> bool {
    [
        "No space left",
        "Errno 28",
        "Disk quota exceeded",
        "Wrote only",
    ]
    .iter()
    .any(|words| said.contains(words))
}

/// The error of a disk that is full, which looks up what is free near `path`.
pub fn full(action: &'static str, path: &Path, needed: Option<u64>) -> Error {
    let expected = needed.map_or_else(String::new, |bytes| {
        format!("expected room for about {} MB, ", megabytes(bytes))
    });
    let found = match free_bytes(path) {
        Some(bytes) => format!("found {} MB free", megabytes(bytes)),
        None => "found none".to_owned(),
    };
    Error::DiskFull {
        action,
        path: path.to_path_buf(),
        room: format!("{expected}{found}"),
    }
}

/// Size of everything under `dir`.
pub fn size_of(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => size_of(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

fn megabytes(bytes: u64) -> u64 {
    bytes.div_ceil(1_000_000)
}

/// As `df` tells it for the nearest folder that exists.
fn free_bytes(path: &Path) -> Option<u64> {
    let there = path.ancestors().find(|place| place.is_dir())?;
    let run = Run::new("df").arg("-Pk").arg(there).env("LC_ALL", "C");
    free_in(&run.capture().ok()?.stdout)
}

/// The fourth column of the second line, in blocks of 1024 bytes.
fn free_in(report: &str) -> Option<u64> {
    let columns: Vec<&str> = report.lines().nth(1)?.split_whitespace().collect();
    let available = columns.iter().position(|column| column.ends_with('%'))?;
    let blocks: u64 = columns.get(available.checked_sub(1)?)?.parse().ok()?;
    Some(blocks * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_programs_say_of_a_full_disk_is_known() {
        for said in [
            "gzip: stdout: No space left on device\n",
            "tar: a.tar.gz: Wrote only 8192 of 10240 bytes\n",
            "OSError: [Errno 28] No space left on device",
        ] {
            assert!(says_full(said), "{said}");
        }
        assert!(!says_full("tar: a: File removed before we read it"));
    }

    #[test]
    fn what_is_free_comes_from_df() {
        let report = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/my disk 100 60 40 60% /a b\n";
        assert_eq!(free_in(report), Some(40 * 1024));
        assert_eq!(free_in(""), None);
        assert_eq!(free_in("Filesystem\n/dev/sda\n"), None);
    }

    #[test]
    fn a_full_disk_says_what_was_needed_and_what_to_do() {
        let text = full("write", &std::env::temp_dir().join("x/y"), Some(5_000_000)).to_string();
        for part in ["the disk is full", "about 5 MB", "free some space"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let text = Error::io("copy", Path::new("/x"))(source).to_string();
        assert!(text.contains("the disk is full"), "{text}");
    }
}
