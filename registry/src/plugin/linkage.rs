//! What the dynamic linker would find for a plugin: every library it needs, and what these need in turn.
//!
//! The linker itself stops at the first library that is missing. Here files are read and none is opened by the linker, so all can be
//! told at once, also for a plugin that crashed.

use std::collections::{HashSet, VecDeque};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use super::needed::{FOLDER_CAP, Needed, needed_libraries};
use super::peek::{HostProfile, peek};
use super::reason::ReasonCode;
use super::system_libraries::SystemLibraries;

/// Far more than any plugin has; files that name each other have no end otherwise.
const LIBRARY_CAP: usize = 1000;
/// Most bytes of one list of folders. Lists are inherited from level to level.
const FOLDERS_CAP_BYTES: usize = 64 << 10;
/// A longer path is refused by the system.
const PATH_CAP_BYTES: usize = 4096;
/// Work in all, of which a place that is looked at is one, and a file that is read this many. Some seconds at most.
const EFFORT_CAP: usize = 100_000;
const FILE_EFFORT: usize = 50;

/// Folders, in the linker's order. `None` stands for one that is not known, with anything in it.
type Folders = Rc<[Option<PathBuf>]>;

/// Libraries that a plugin is linked to, directly and through others. What cannot be known is in none of the lists.
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
    inherited: Folders,
}

/// Follows what the plugin at `path` needs.
pub fn linkage(path: &Path, system: &SystemLibraries) -> Linkage {
    let mut search = Search {
        linkage: Linkage::default(),
        effort_left: EFFORT_CAP,
    };
    let mut known: HashSet<String> = HashSet::new();
    let mut waiting = VecDeque::from([Object {
        path: path.to_path_buf(),
        inherited: Rc::new([]),
    }]);
    while let Some(object) = waiting.pop_front() {
        let Some(needed) = needed_libraries(&object.path) else {
            continue;
        };
        let (places, inherited) = places(&object, &needed);
        let mut is_looked_in = false;
        for name in needed.libraries {
            if known.len() >= LIBRARY_CAP || !known.insert(name.clone()) {
                continue;
            }
            let has_place = name.contains('/');
            let found = match has_place {
                true => search.look_at([expanded(&name, &object.path)]),
                false => search.look_at(system.candidates(&name, &places)),
            };
            match found {
                Found::At(path) => {
                    search.linkage.found.push((name, plain(&path)));
                    let inherited = Rc::clone(&inherited);
                    waiting.push_back(Object { path, inherited });
                }
                Found::Nowhere => {
                    search.linkage.missing.push(name);
                    is_looked_in |= !has_place;
                }
                Found::Untold => (),
            }
        }
        if is_looked_in {
            search.note_places(&places);
        }
    }
    search.linkage
}

/// Where the needs of an object are looked for besides the linker's places, and what those below it inherit. Folders for the
/// object alone switch inherited ones off, as the linker has it.
fn places(object: &Object, needed: &Needed) -> (Folders, Folders) {
    let at = |written: &Option<String>| expanded(written.as_deref()?, &object.path);
    if !needed.runpath.is_empty() {
        let own = listed(needed.runpath.iter().map(at));
        return (own, Rc::clone(&object.inherited));
    }
    let own = needed.rpath.iter().map(at);
    let all = listed(own.chain(object.inherited.iter().cloned()));
    (Rc::clone(&all), all)
}

/// A path as the file at `object` has it written, with its folder put in. `None` when it has other words that the linker puts
/// something in for (`$LIB`, `$PLATFORM`), or cannot be read.
fn expanded(written: &str, object: &Path) -> Option<PathBuf> {
    let folder = object.parent().unwrap_or(Path::new("/"));
    let mut path = OsString::new();
    let mut rest = written;
    while let Some((before, word)) = rest.split_once('$') {
        // A longer word is another one.
        let goes_on =
            |rest: &&str| rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
        let plain = word.strip_prefix("ORIGIN").filter(|rest| !goes_on(rest));
        rest = word.strip_prefix("{ORIGIN}").or(plain)?;
        path.push(before);
        path.push(folder);
        if path.len() > PATH_CAP_BYTES {
            return None;
        }
    }
    path.push(rest);
    (!written.contains(char::REPLACEMENT_CHARACTER)).then(|| path.into())
}

/// Each folder once. A list that is too long ends with one that is not known.
fn listed(folders: impl Iterator<Item = Option<PathBuf>>) -> Folders {
    let (mut all, mut known, mut bytes) = (Vec::new(), HashSet::new(), 0);
    for folder in folders {
        if !known.insert(folder.clone()) {
            continue;
        }
        bytes += folder.as_ref().map_or(0, |path| path.as_os_str().len());
        if all.len() >= FOLDER_CAP || bytes > FOLDERS_CAP_BYTES {
            all.push(None);
            break;
        }
        all.push(folder);
    }
    all.into()
}

/// What is found out of a name.
enum Found {
    At(PathBuf),
    Nowhere,
    /// It cannot be used, which is noted, or the linker may find it where this cannot look.
    Untold,
}

struct Search {
    linkage: Linkage,
    effort_left: usize,
}

impl Search {
    /// Looks for a library at places in the linker's order. What cannot be used is noted, unless an unknown place came before.
    fn look_at(&mut self, candidates: impl IntoIterator<Item = Option<PathBuf>>) -> Found {
        let (mut unreadable, mut is_unsure) = (Vec::new(), false);
        for candidate in candidates {
            let Some(left) = self.effort_left.checked_sub(1) else {
                return Found::Untold;
            };
            self.effort_left = left;
            let Some(candidate) = candidate else {
                is_unsure = true;
                continue;
            };
            if candidate.symlink_metadata().is_err() {
                continue;
            }
            self.effort_left = left.saturating_sub(FILE_EFFORT);
            match fault(&candidate) {
                Fault::None => return Found::At(candidate),
                Fault::Passed => (),
                Fault::PassedUnread(text) => unreadable.push((plain(&candidate), text)),
                Fault::Fatal(_) if is_unsure => return Found::Untold,
                Fault::Fatal(text) => {
                    self.linkage.damaged.push((plain(&candidate), text));
                    return Found::Untold;
                }
            }
        }
        match (is_unsure, unreadable.is_empty()) {
            (true, _) => Found::Untold,
            (false, true) => Found::Nowhere,
            (false, false) => {
                self.linkage.damaged.extend(unreadable);
                Found::Untold
            }
        }
    }

    /// Notes the folders where something was looked for in vain.
    fn note_places(&mut self, places: &Folders) {
        let looked_in = &mut self.linkage.looked_in;
        for place in places.iter().flatten().map(|place| plain(place)) {
            if looked_in.len() < FOLDER_CAP && !looked_in.contains(&place) {
                looked_in.push(place);
            }
        }
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
