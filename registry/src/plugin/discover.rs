//! Walks the places where plugins may be and lists the files found, in order of rank.
//!
//! Owns file names, folder depth and duplicates. Does not look into the files.

use std::collections::HashSet;
use std::fs::{self, Metadata as FileMetadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::metadata::PluginKind;
use super::search::{SearchInputs, Tier};

/// Most entries of one folder that are looked at.
const ENTRY_CAP: usize = 4096;

/// Identity of a file, whatever path leads to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device.
    pub device: u64,
    /// Inode.
    pub inode: u64,
}

impl FileId {
    /// The identity in a file's attributes.
    pub fn of(attributes: &FileMetadata) -> Self {
        Self {
            device: attributes.dev(),
            inode: attributes.ino(),
        }
    }
}

/// A file that may be a plugin.
#[derive(Debug, Clone)]
pub struct FoundFile {
    /// Canonical path, or the path as given when it cannot be resolved.
    pub path: PathBuf,
    /// Where it was found.
    pub tier: Tier,
    /// Identity; none when the file could not be examined.
    pub id: Option<FileId>,
}

/// What is wrong with a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PlaceProblem {
    /// It does not exist.
    Absent,
    /// It exists and cannot be listed.
    Unreadable,
    /// It is not a folder.
    NotADirectory,
    /// A relative path in a variable, which would depend on the working directory.
    Relative,
    /// It holds more entries than are looked at.
    TooManyEntries,
    /// Ignored because the process runs with raised rights.
    Elevated,
}

/// A place that gave nothing, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlaceNote {
    /// The place.
    pub path: PathBuf,
    /// Its rank.
    pub tier: Tier,
    /// Whether a flag named it, so that going on without it would ignore what was asked for.
    pub explicit: bool,
    /// What is wrong.
    pub problem: PlaceProblem,
    /// One line for people.
    pub text: String,
}

impl PlaceNote {
    /// Whether the note is worth a line: that a standard folder does not exist is not.
    pub fn is_notable(&self) -> bool {
        self.explicit || self.tier == Tier::Directory || self.problem != PlaceProblem::Absent
    }
}

/// Result of a walk.
#[derive(Debug, Clone, Default)]
pub struct Discovery {
    /// Files in order of rank, then of name; every file once.
    pub files: Vec<FoundFile>,
    /// Places that gave nothing.
    pub notes: Vec<PlaceNote>,
}

/// Splits `libmlxcel_family_llama.so` into kind and name; `None` for any other file name.
pub fn name_in_file(path: &Path) -> Option<(PluginKind, &str)> {
    let file = path.file_name()?.to_str()?;
    let stem = file
        .strip_suffix(".so")
        .or_else(|| file.strip_suffix(".dylib"))?
        .strip_prefix("libmlxcel_")?;
    let (kind, name) = stem.split_once('_')?;
    let kind = PluginKind::from_name(kind)?;
    (!name.is_empty()).then_some((kind, name))
}

/// Lists every candidate file.
pub fn discover(inputs: &SearchInputs) -> Discovery {
    let mut walk = Walk::default();
    for file in &inputs.files {
        walk.add_file(file, Tier::File);
    }
    for dir in &inputs.dirs {
        walk.add_dir(dir, Tier::Directory, true);
    }
    let env_dirs: Vec<PathBuf> = inputs
        .plugin_path
        .iter()
        .flat_map(std::env::split_paths)
        .filter(|dir| !dir.as_os_str().is_empty())
        .collect();
    for dir in &env_dirs {
        if inputs.elevated {
            walk.note(dir, Tier::Directory, false, PlaceProblem::Elevated, None);
        } else if dir.is_relative() {
            walk.note(dir, Tier::Directory, false, PlaceProblem::Relative, None);
        } else {
            walk.add_dir(dir, Tier::Directory, false);
        }
    }
    for (dir, tier) in [
        (&inputs.user_dir, Tier::User),
        (&inputs.bundled_dir, Tier::Bundled),
        (&inputs.system_dir, Tier::System),
    ] {
        let Some(dir) = dir else { continue };
        if tier == Tier::User && inputs.elevated {
            walk.note(dir, tier, false, PlaceProblem::Elevated, None);
        } else {
            walk.add_dir(dir, tier, false);
        }
    }
    walk.found
}

#[derive(Default)]
struct Walk {
    found: Discovery,
    seen: HashSet<FileId>,
}

impl Walk {
    fn add_file(&mut self, path: &Path, tier: Tier) {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let id = fs::metadata(&path).ok().map(|a| FileId::of(&a));
        if let Some(id) = id
            && !self.seen.insert(id)
        {
            tracing::debug!(path = %path.display(), "plugin file is already listed under another path");
            return;
        }
        self.found.files.push(FoundFile { path, tier, id });
    }

    fn add_dir(&mut self, dir: &Path, tier: Tier, explicit: bool) {
        let entries = match sorted_entries(dir) {
            Ok(entries) => entries,
            Err(error) => {
                let problem = match error.kind() {
                    io::ErrorKind::NotFound => PlaceProblem::Absent,
                    io::ErrorKind::NotADirectory => PlaceProblem::NotADirectory,
                    _ => PlaceProblem::Unreadable,
                };
                return self.note(dir, tier, explicit, problem, Some(&error));
            }
        };
        if entries.len() > ENTRY_CAP {
            self.note(dir, tier, explicit, PlaceProblem::TooManyEntries, None);
        }
        for entry in entries.iter().take(ENTRY_CAP) {
            if name_in_file(entry).is_some() {
                self.add_file(entry, tier);
            } else if entry.is_dir() {
                self.add_package(entry, tier);
            }
        }
    }

    /// A folder one level down: a backend lives there together with its own libraries.
    fn add_package(&mut self, dir: &Path, tier: Tier) {
        match sorted_entries(dir) {
            Ok(entries) => {
                for entry in entries.iter().take(ENTRY_CAP) {
                    if name_in_file(entry).is_some() {
                        self.add_file(entry, tier);
                    }
                }
            }
            Err(error) => self.note(dir, tier, false, PlaceProblem::Unreadable, Some(&error)),
        }
    }

    fn note(
        &mut self,
        path: &Path,
        tier: Tier,
        explicit: bool,
        problem: PlaceProblem,
        error: Option<&io::Error>,
    ) {
        let shown = path.display();
        let text = match (problem, error) {
            (PlaceProblem::Absent, _) => format!("plugin folder {shown} does not exist"),
            (PlaceProblem::NotADirectory, _) => {
                format!("plugin folder {shown} is not a folder: for one file use --plugin {shown}")
            }
            (PlaceProblem::Relative, _) => format!(
                "plugin folder {shown} in {} is relative and was ignored: give an absolute path",
                super::search::PLUGIN_PATH
            ),
            (PlaceProblem::TooManyEntries, _) => {
                format!(
                    "plugin folder {shown} has more than {ENTRY_CAP} entries: only the first were looked at"
                )
            }
            (PlaceProblem::Elevated, _) => {
                format!(
                    "plugin folder {shown} was ignored because the process runs with raised rights"
                )
            }
            (PlaceProblem::Unreadable, Some(error)) => {
                format!("plugin folder {shown} cannot be read: {error}")
            }
            (PlaceProblem::Unreadable, None) => format!("plugin folder {shown} cannot be read"),
        };
        self.found.notes.push(PlaceNote {
            path: path.to_path_buf(),
            tier,
            explicit,
            problem,
            text,
        });
    }
}

/// Entries sorted by name: the order of `readdir` is random.
fn sorted_entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(dir)? {
        entries.push(entry?.path());
        if entries.len() > 4 * ENTRY_CAP {
            break;
        }
    }
    entries.sort();
    Ok(entries)
}
