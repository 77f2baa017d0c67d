//! What the dynamic linker would find for a plugin: every library it needs, and what these need in turn.
//!
//! The linker itself stops at the first library that is missing. Here files are read and none is opened by the linker, so all can be
//! told at once, also for a plugin that crashed.

use std::collections::{HashSet, VecDeque};
use std::path::{Component, Path, PathBuf};

use super::needed::{Needed, needed_libraries};
use super::peek::{HostProfile, peek};
use super::reason::ReasonCode;
use super::system_libraries::SystemLibraries;

/// Far more than any plugin has; files that name each other have no end otherwise.
const LIBRARY_CAP: usize = 1000;

/// Libraries that a plugin is linked to, directly and through others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Linkage {
    /// Those that are there, with the place.
    pub found: Vec<(String, PathBuf)>,
    /// Names that are in no place.
    pub missing: Vec<String>,
    /// Files that have the name and cannot be used: the place, and what is wrong with it.
    pub damaged: Vec<(PathBuf, String)>,
    /// Folders besides the linker's own where the missing ones were looked for.
    pub looked_in: Vec<PathBuf>,
}

/// One library whose needs are still to be looked for.
struct Object {
    path: PathBuf,
    /// Folders that the files which led here say are for everything below them.
    inherited: Vec<PathBuf>,
}

/// Follows what the plugin at `path` needs.
pub fn linkage(path: &Path, system: &SystemLibraries) -> Linkage {
    let mut linkage = Linkage::default();
    let mut known: HashSet<String> = HashSet::new();
    let mut waiting = VecDeque::from([Object {
        path: path.to_path_buf(),
        inherited: Vec::new(),
    }]);
    while let Some(object) = waiting.pop_front() {
        let Some(needed) = needed_libraries(&object.path) else {
            continue;
        };
        let (places, inherited) = places(&object, &needed);
        for name in needed.libraries {
            if known.len() >= LIBRARY_CAP || !known.insert(name.clone()) {
                continue;
            }
            match linkage.look_for(&name, &places, system) {
                Some(path) => {
                    linkage.found.push((name, plain(&path)));
                    let inherited = inherited.clone();
                    waiting.push_back(Object { path, inherited });
                }
                None if linkage.missing.contains(&name) => {
                    for place in &places {
                        let place = plain(place);
                        if !linkage.looked_in.contains(&place) {
                            linkage.looked_in.push(place);
                        }
                    }
                }
                None => (),
            }
        }
    }
    linkage
}

/// Where the needs of an object are looked for besides the linker's places, and what those below it inherit. Folders for the
/// object alone switch inherited ones off, as the linker has it.
fn places(object: &Object, needed: &Needed) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let folder = object.path.parent().unwrap_or(Path::new("/"));
    let at = |written: &String| {
        let folder = folder.to_string_lossy();
        PathBuf::from(
            written
                .replace("${ORIGIN}", &folder)
                .replace("$ORIGIN", &folder),
        )
    };
    if !needed.runpath.is_empty() {
        let own = needed.runpath.iter().map(at).collect();
        return (own, object.inherited.clone());
    }
    let mut all: Vec<PathBuf> = needed.rpath.iter().map(at).collect();
    all.extend(object.inherited.iter().cloned());
    (all.clone(), all)
}

impl Linkage {
    /// The place of `name`. What is not found is noted as missing or damaged.
    fn look_for(
        &mut self,
        name: &str,
        places: &[PathBuf],
        system: &SystemLibraries,
    ) -> Option<PathBuf> {
        let mut unreadable = Vec::new();
        for candidate in system.candidates(name, places) {
            match fault(&candidate) {
                Fault::None => return Some(candidate),
                Fault::Passed => (),
                Fault::PassedUnread(text) => unreadable.push((candidate, text)),
                Fault::Fatal(text) => {
                    self.damaged.push((plain(&candidate), text));
                    return None;
                }
            }
        }
        match unreadable.is_empty() {
            true => self.missing.push(name.to_owned()),
            false => self.damaged.extend(unreadable),
        }
        None
    }
}

/// What the linker does with a file.
enum Fault {
    None,
    /// Goes on looking, and says nothing of it.
    Passed,
    /// Goes on looking, since it cannot be read.
    PassedUnread(String),
    /// Ends there.
    Fatal(String),
}

fn fault(path: &Path) -> Fault {
    if path.symlink_metadata().is_err() {
        return Fault::Passed;
    }
    let Some(rejection) = peek(path, HostProfile::CURRENT).rejection else {
        return Fault::None;
    };
    match rejection.code {
        // A good library, which is no plugin, or says something of itself that matters to plugins alone.
        ReasonCode::NotAPlugin | ReasonCode::BadMetadata | ReasonCode::AbiMismatch => Fault::None,
        ReasonCode::Unreadable if path.metadata().is_err() => Fault::PassedUnread(
            "is a link to nothing, or in a folder that cannot be read".to_owned(),
        ),
        ReasonCode::Unreadable => Fault::PassedUnread(rejection.text),
        ReasonCode::WrongArch => Fault::Passed,
        ReasonCode::NotAFile => Fault::Fatal("is no file".to_owned()),
        ReasonCode::Empty => Fault::Fatal("is empty".to_owned()),
        ReasonCode::Truncated => Fault::Fatal("is truncated".to_owned()),
        ReasonCode::Malformed => Fault::Fatal("is damaged".to_owned()),
        ReasonCode::NotAnObject | ReasonCode::NotALibrary => {
            Fault::Fatal("is not a library".to_owned())
        }
        ReasonCode::WrongOs => Fault::Fatal("is for another system".to_owned()),
        _ => Fault::None,
    }
}

/// Without `..`, for people. Links on the way are left as they are.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = plain.pop(),
            Component::CurDir => (),
            part => plain.push(part),
        }
    }
    plain
}
