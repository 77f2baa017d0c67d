//! Whether an installed MLX still is what was unpacked: a list of its files with sizes and sha256, made when it is installed.
//!
//! A library that was cut, changed or lost its neighbours compiles and links all the same, and would be shipped.

use std::collections::BTreeSet;
use std::path::Path;

use super::{MlxTree, tree};
use crate::error::Error;
use crate::fetch::digest;

/// How closely to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// What is there, and how large: at once.
    Sizes,
    /// The sha256 too, for what is given to others.
    Contents,
}

const LIST_NAME: &str = ".xtask-files.txt";
/// Written by us after the list was made.
const NOT_LISTED: [&str; 2] = [LIST_NAME, ".xtask-stamp.json"];

/// Writes the list of a tree that was just unpacked: how many files, then `<sha256> <bytes> <path>` for each.
pub fn record(root: &Path) -> Result<(), Error> {
    let mut files = tree::files_under(root)?;
    files.retain(|file| !NOT_LISTED.iter().any(|name| file == Path::new(name)));
    let mut list = format!("{} files\n", files.len());
    for file in files {
        let path = root.join(&file);
        let bytes = path.metadata().map_err(Error::io("read", &path))?.len();
        let sum = digest::sha256_of(&path)?;
        list.push_str(&format!("{sum} {bytes} {}\n", file.display()));
    }
    let path = root.join(LIST_NAME);
    std::fs::write(&path, list).map_err(Error::io("write", &path))
}

/// Whether there is a list to compare with.
pub fn is_recorded(root: &Path) -> bool {
    root.join(LIST_NAME).is_file()
}

/// The first thing that is not as it was installed, in words.
pub fn problem(root: &Path, depth: Depth) -> Option<String> {
    let Ok(list) = std::fs::read_to_string(root.join(LIST_NAME)) else {
        return Some("it has no list of its files, so it cannot be checked".to_owned());
    };
    let mut lines = list.lines();
    let count = lines
        .next()
        .and_then(|line| line.strip_suffix(" files")?.parse::<usize>().ok());
    let entries: Vec<(&str, u64, &str)> = lines.filter_map(entry).collect();
    if count != Some(entries.len()) || entries.is_empty() {
        return Some(format!("its list of files, {LIST_NAME}, is damaged"));
    }
    let of_size = |&(_, bytes, name): &(&str, u64, &str)| match root.join(name).metadata() {
        Ok(found) if found.len() == bytes => None,
        Ok(found) => Some(format!(
            "{name}: expected {bytes} bytes, found {}",
            found.len()
        )),
        Err(error) => Some(format!("{name}: {error}")),
    };
    let of_content = |&(sum, _, name): &(&str, u64, &str)| match digest::sha256_of(&root.join(name))
    {
        Ok(found) if found == sum => None,
        Ok(found) => Some(format!("{name}: expected sha256 {sum}, found {found}")),
        Err(error) => Some(format!("{name}: {error}")),
    };
    entries
        .iter()
        .find_map(of_size)
        .or_else(|| stranger(root, &entries))
        .or_else(|| match depth {
            Depth::Sizes => None,
            Depth::Contents => entries.iter().find_map(of_content),
        })
}

/// A file that was not installed and would go into a package: files are packed where the wheel has them.
fn stranger(root: &Path, entries: &[(&str, u64, &str)]) -> Option<String> {
    let installed: BTreeSet<&Path> = entries.iter().map(|(_, _, name)| Path::new(name)).collect();
    let tree = MlxTree {
        root: root.to_path_buf(),
    };
    let packed = match tree.runtime_files() {
        Ok(packed) => packed,
        Err(error) => return Some(error.to_string()),
    };
    let stranger = packed
        .iter()
        .find(|file| !installed.contains(file.placed.as_path()))?;
    Some(format!(
        "{}: it was not installed, and would be packed",
        stranger.placed.display()
    ))
}

fn entry(line: &str) -> Option<(&str, u64, &str)> {
    let (sum, rest) = line.split_once(' ')?;
    let (bytes, name) = rest.split_once(' ')?;
    Some((sum, bytes.parse().ok()?, name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    const LIBRARY: &str = "mlx/lib/libmlx.so";

    /// A tree as it is installed.
    fn installed(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("xtask-whole-{name}-{}", std::process::id()));
        for (path, text) in [
            (LIBRARY, "library"),
            ("mlx_cpu.libs/libblas.so.3", "blas"),
            ("mlx/include/cccl/a b.h", "header"),
        ] {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().expect("is inside")).expect("creates");
            std::fs::write(path, text).expect("writes");
        }
        crate::mlx::link_short_names(&root).expect("links");
        record(&root).expect("records");
        root
    }

    #[test]
    fn a_tree_is_whole_until_a_file_of_it_changes() {
        let root = installed("change");
        assert!(is_recorded(&root));
        assert_eq!(problem(&root, Depth::Contents), None);

        std::fs::write(root.join(LIBRARY), "Library").expect("flips a byte");
        assert_eq!(problem(&root, Depth::Sizes), None);
        let found = problem(&root, Depth::Contents).expect("is seen");
        assert!(
            found.contains(LIBRARY) && found.contains("sha256"),
            "{found}"
        );

        std::fs::write(root.join(LIBRARY), "").expect("empties");
        let found = problem(&root, Depth::Sizes).expect("is seen");
        assert!(found.contains("expected 7 bytes, found 0"), "{found}");
        std::fs::remove_dir_all(&root).expect("removes");
    }

    #[test]
    fn a_folder_that_is_gone_is_seen() {
        for folder in ["mlx_cpu.libs", "mlx/include/cccl"] {
            let root = installed("gone");
            std::fs::remove_dir_all(root.join(folder)).expect("removes");
            let found = problem(&root, Depth::Sizes).expect("is seen");
            assert!(found.contains(folder), "{found}");
            std::fs::remove_dir_all(&root).expect("removes");
        }
    }

    #[test]
    fn a_file_more_is_seen_where_it_would_be_packed() {
        let root = installed("more");
        std::fs::write(root.join("notes.txt"), "x").expect("writes");
        assert_eq!(problem(&root, Depth::Contents), None);
        for name in [
            "mlx/lib/libmlx.so.1",
            "mlx_cpu.libs/libstranger.so",
            "mlx_other.libs/libstranger.so",
            "mlx/include/cccl/deep/stranger.h",
        ] {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().expect("is inside")).expect("creates");
            std::fs::write(&path, "x").expect("writes");
            let found = problem(&root, Depth::Sizes).expect("is seen");
            assert!(found.contains(name), "{found}");
            std::fs::remove_file(&path).expect("removes");
        }
        assert_eq!(problem(&root, Depth::Contents), None);
        std::fs::remove_dir_all(&root).expect("removes");
    }

    #[test]
    fn a_list_that_was_cut_or_is_not_there_proves_nothing() {
        let root = installed("list");
        let list = root.join(LIST_NAME);
        let text = std::fs::read_to_string(&list).expect("reads");
        for kept in [0, 3, text.len() / 2] {
            std::fs::write(&list, text.get(..kept).unwrap_or_default()).expect("cuts");
            let found = problem(&root, Depth::Sizes).expect("is seen");
            assert!(found.contains("damaged"), "{found}");
        }
        std::fs::remove_file(&list).expect("removes");
        assert!(!is_recorded(&root));
        let found = problem(&root, Depth::Sizes).expect("is seen");
        assert!(found.contains("no list"), "{found}");
        std::fs::remove_dir_all(&root).expect("removes");
    }
}
