//! What kind of checkpoint a directory is, and whether it is all there, told from names and sizes alone.
//!
//! Opens no weights. The checkpoint readers judge the content; this only keeps half a model from being
//! handed to them.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::damage::Damage;
use super::gguf::{self, NoChoice};
use super::name::GgufSelector;
use super::record::{MAX_INDEX_BYTES, read_json};
use super::repo_path::RepoPath;

/// How deep below a model's folder files are looked for.
const MAX_DEPTH: usize = 4;
/// How many files of one model are looked at.
const MAX_FILES: usize = 20_000;
/// End of the name of an index over safetensors shards.
pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// The checkpoint that a directory holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Content {
    /// The directory itself, with safetensors.
    Dir,
    /// A GGUF file in it (the first part if it is split).
    Gguf(PathBuf),
}

/// Why a directory does not give the checkpoint that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoContent {
    /// It would, but it is not whole.
    Damaged(Damage),
    /// Several GGUF files would do.
    Ambiguous(Vec<String>),
    /// It holds something else than the selector names.
    Missing(Vec<String>),
}

impl From<NoChoice> for NoContent {
    fn from(none: NoChoice) -> Self {
        match none {
            NoChoice::Ambiguous(choices) => Self::Ambiguous(choices),
            NoChoice::Missing(choices) => Self::Missing(choices),
        }
    }
}

/// Chooses among `files`, which lie below `dir`.
pub(super) fn choose_content(
    dir: &Path,
    files: &[RepoPath],
    selector: Option<&GgufSelector>,
) -> Result<Content, NoContent> {
    let has_safetensors = files.iter().any(is_safetensors);
    if selector.is_none() && has_safetensors {
        return Ok(Content::Dir);
    }
    if selector.is_none() && !gguf::any_model(files) {
        return Err(NoContent::Damaged(Damage::NoWeights));
    }
    let choice = gguf::choose(files, selector)?;
    let first = choice
        .parts
        .first()
        .ok_or(NoContent::Damaged(Damage::NoWeights))?;
    Ok(Content::Gguf(first.below(dir)))
}

/// As [`choose_content`] for a directory that has no record, after checking what can be checked.
pub(super) fn inspect(dir: &Path, selector: Option<&GgufSelector>) -> Result<Content, NoContent> {
    let files = list_files(dir).map_err(NoContent::Damaged)?;
    let content = choose_content(dir, &files, selector)?;
    if content == Content::Dir {
        if !dir.join("config.json").is_file() {
            return Err(NoContent::Damaged(Damage::NoConfig));
        }
        if let Some((_, missing)) = missing_shard(dir, &files).map_err(NoContent::Damaged)? {
            let file = missing.to_string();
            return Err(NoContent::Damaged(Damage::MissingFile { file }));
        }
    }
    Ok(content)
}

/// The first file that an index in the top folder names and `files` does not have, with the index.
pub(super) fn missing_shard(
    dir: &Path,
    files: &[RepoPath],
) -> Result<Option<(RepoPath, RepoPath)>, Damage> {
    let present: BTreeSet<&str> = files.iter().map(RepoPath::as_str).collect();
    let indexes = files
        .iter()
        .filter(|f| f.is_top_level() && f.as_str().ends_with(INDEX_SUFFIX));
    for index in indexes {
        for shard in shards(dir, index)? {
            if !present.contains(shard.as_str()) {
                return Ok(Some((index.clone(), shard)));
            }
        }
    }
    Ok(None)
}

fn shards(dir: &Path, index: &RepoPath) -> Result<BTreeSet<RepoPath>, Damage> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let unreadable = |reason: String| Damage::Unreadable {
        file: index.to_string(),
        reason,
    };
    let parsed: Option<Index> = read_json(dir, index.as_str(), MAX_INDEX_BYTES)?;
    let names: BTreeSet<String> = parsed
        .map(|index| index.weight_map.into_values().collect())
        .unwrap_or_default();
    names
        .iter()
        .map(|name| RepoPath::parse(name).map_err(|e| unreadable(e.to_string())))
        .collect()
}

/// Files below `dir` by name, hidden ones left out. Links are followed for files (a Hugging Face snapshot
/// is all links; one that leads nowhere is no file) and not for folders.
pub(super) fn list_files(dir: &Path) -> Result<Vec<RepoPath>, Damage> {
    let mut files = Vec::new();
    let mut open = vec![(dir.to_path_buf(), String::new(), 0)];
    while let Some((folder, prefix, depth)) = open.pop() {
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(_) if depth > 0 => continue,
            Err(_) => return Err(Damage::NotADirectory),
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|n| !n.starts_with('.')) else {
                continue;
            };
            let path = format!("{prefix}{name}");
            let is_dir = entry.file_type().is_ok_and(|t| t.is_dir());
            if is_dir && depth < MAX_DEPTH {
                open.push((entry.path(), format!("{path}/"), depth + 1));
            } else if !is_dir
                && files.len() < MAX_FILES
                && entry.path().is_file()
                && let Ok(path) = RepoPath::parse(&path)
            {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

pub(super) fn is_safetensors(file: &RepoPath) -> bool {
    file.as_str().ends_with(".safetensors")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    fn damage(files: &[(&str, &str)]) -> String {
        match inspect(dir(files).path(), None).unwrap_err() {
            NoContent::Damaged(damage) => damage.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn safetensors_need_a_config_and_every_shard() {
        let whole = dir(&[("config.json", "{}"), ("model.safetensors", "")]);
        assert_eq!(inspect(whole.path(), None), Ok(Content::Dir));
        assert_eq!(
            damage(&[("model.safetensors", "")]),
            "config.json is missing"
        );
        assert_eq!(
            damage(&[("config.json", "{}")]),
            "it holds no safetensors or GGUF file"
        );
        let index = r#"{"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}"#;
        let files = [
            ("config.json", "{}"),
            ("m-1.safetensors", ""),
            ("model.safetensors.index.json", index),
        ];
        assert_eq!(damage(&files), "m-2.safetensors is missing");
    }

    #[test]
    fn hostile_indexes_are_refused() {
        for index in [
            "{",
            "[]",
            "{}",
            r#"{"weight_map":{"a":"../../x.safetensors"}}"#,
        ] {
            let text = damage(&[
                ("config.json", "{}"),
                ("m.safetensors", ""),
                ("m.safetensors.index.json", index),
            ]);
            assert!(
                text.starts_with("m.safetensors.index.json cannot be read"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_folder_of_gguf_files_gives_the_file() {
        let one = dir(&[("x-Q8_0.gguf", ""), ("config.json", "{}")]);
        let file = one.path().join("x-Q8_0.gguf");
        assert_eq!(inspect(one.path(), None), Ok(Content::Gguf(file)));
        let two = dir(&[("x-Q8_0.gguf", ""), ("x-Q4_0.gguf", "")]);
        assert!(matches!(inspect(two.path(), None), Err(NoContent::Ambiguous(c)) if c.len() == 2));
    }

    #[cfg(unix)]
    #[test]
    fn links_that_lead_nowhere_are_no_files() {
        let dir = dir(&[("config.json", "{}")]);
        std::os::unix::fs::symlink("/nowhere/blob", dir.path().join("model.safetensors")).unwrap();
        assert_eq!(
            inspect(dir.path(), None),
            Err(NoContent::Damaged(Damage::NoWeights))
        );
    }
}
