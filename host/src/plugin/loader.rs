//! Takes a plugin from the catalogue to a loaded family or backend. Nothing is ever unloaded.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mlxcel_abi::backend::BackendTable;
use mlxcel_abi::family::FamilyTable;
use mlxcel_registry::plugin::{PluginInfo, PluginKind, PluginRecord, Rejection, State};

use super::backend::{BackendPlugin, BackendShared};
use super::envelope::{Opened, bad_table, import_table, shake_hands};
use super::error::LoadError;
use super::family::{Family, FamilyShared};
use super::library;
use super::probe::{ProbeOutcome, ProbeSettings, probe_in_child};

/// How plugins are loaded.
#[derive(Debug, Clone, Default)]
pub struct LoaderOptions {
    /// How files are tried in a child process first; `None` tries none.
    pub probe: Option<ProbeSettings>,
}

/// Loads plugins and remembers what became of each file.
#[derive(Default)]
pub struct Loader {
    options: LoaderOptions,
    loaded: Mutex<HashMap<PathBuf, Result<Loaded, Rejection>>>,
    /// Files that a child process of this loader has opened without harm.
    proven: Mutex<HashSet<PathBuf>>,
}

#[derive(Clone)]
enum Loaded {
    Family(Family),
    Backend(BackendPlugin),
}

impl Loader {
    /// A loader.
    pub fn new(options: LoaderOptions) -> Self {
        Self {
            options,
            loaded: Mutex::default(),
            proven: Mutex::default(),
        }
    }

    /// Loads a family, or gives the one already loaded from this file.
    pub fn load_family(&self, record: &PluginRecord) -> Result<Family, LoadError> {
        match self.load(record, PluginKind::Family)? {
            Loaded::Family(family) => Ok(family),
            Loaded::Backend(_) => Err(wrong_kind(record, PluginKind::Family, PluginKind::Backend)),
        }
    }

    /// Loads a backend, or gives the one already loaded from this file.
    pub fn load_backend(&self, record: &PluginRecord) -> Result<BackendPlugin, LoadError> {
        match self.load(record, PluginKind::Backend)? {
            Loaded::Backend(backend) => Ok(backend),
            Loaded::Family(_) => Err(wrong_kind(record, PluginKind::Backend, PluginKind::Family)),
        }
    }

    /// Tries a plugin in a child process: dynamic linker, layout check, handshake, and a backend's own probe.
    /// The result for a family is remembered on disk. `None` when this loader uses no child.
    pub fn probe(&self, record: &PluginRecord) -> Option<Result<ProbeOutcome, Rejection>> {
        let settings = self.options.probe.as_ref()?;
        let answer = probe_in_child(settings, &record.path, record.kind());
        if answer.is_ok() {
            locked(&self.proven).insert(record.path.clone());
        }
        Some(answer)
    }

    /// Whether the file has to prove itself in a child process before it is opened here.
    fn is_tried_first(&self, record: &PluginRecord) -> bool {
        let foreign = record.kind() == Some(PluginKind::Backend) || !record.tier.is_installed();
        foreign && !locked(&self.proven).contains(&record.path)
    }

    fn load(&self, record: &PluginRecord, expected: PluginKind) -> Result<Loaded, LoadError> {
        let info = usable_info(record)?;
        if let Some(found) = record.kind().filter(|&found| found != expected) {
            return Err(wrong_kind(record, expected, found));
        }
        if let Some(known) = self.remembered(&record.path) {
            return known.map_err(|rejection| rejected(record, rejection));
        }
        let tried = match self.is_tried_first(record) {
            true => self.probe(record).transpose(),
            false => Ok(None),
        };
        let result = tried.and_then(|_| load_here(&record.path, info));
        locked(&self.loaded).insert(record.path.clone(), result.clone());
        result.map_err(|rejection| rejected(record, rejection))
    }

    fn remembered(&self, path: &Path) -> Option<Result<Loaded, Rejection>> {
        locked(&self.loaded).get(path).cloned()
    }
}

/// The collections behind the locks are only ever changed by one complete insert.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn usable_info(record: &PluginRecord) -> Result<&PluginInfo, LoadError> {
    match (&record.state, record.info()) {
        (State::Available | State::Ready, Some(info)) => Ok(info),
        (State::Rejected(rejection), _) => Err(rejected(record, rejection.clone())),
        (state, _) => Err(LoadError::NotUsable {
            path: record.path.clone(),
            reason: state
                .reason()
                .unwrap_or_else(|| "has no metadata".to_owned()),
        }),
    }
}

fn rejected(record: &PluginRecord, rejection: Rejection) -> LoadError {
    LoadError::Rejected {
        path: record.path.clone(),
        rejection,
    }
}

fn wrong_kind(record: &PluginRecord, expected: PluginKind, found: PluginKind) -> LoadError {
    LoadError::WrongKind {
        path: record.path.clone(),
        expected,
        found,
    }
}

/// Opens the file in this process and shakes hands.
pub(super) fn open_here(path: &Path, info: &PluginInfo) -> Result<Opened, Rejection> {
    let library = library::open(path, info)?;
    shake_hands(&library, info)
}

fn load_here(path: &Path, info: &PluginInfo) -> Result<Loaded, Rejection> {
    let opened = open_here(path, info)?;
    tracing::debug!(path = %path.display(), abi_minor = opened.abi_minor, "plugin loaded");
    Ok(match opened.kind {
        PluginKind::Family => Loaded::Family(Family::new(family_shared(path, opened)?)),
        PluginKind::Backend => Loaded::Backend(backend_plugin(path, opened)?),
    })
}

fn family_shared(path: &Path, opened: Opened) -> Result<FamilyShared, Rejection> {
    let table = opened.table.cast::<FamilyTable>();
    // SAFETY: the handshake said that this is a family, whose table is a `FamilyTable` that lives as long as the
    // process (contract of `PluginHello`).
    let table = unsafe { import_table(table) }.map_err(bad_table)?;
    Ok(FamilyShared {
        name: opened.info.name,
        version: opened.info.version.to_string(),
        path: path.to_path_buf(),
        table,
    })
}

/// Makes a backend of an opened plugin.
pub(super) fn backend_plugin(path: &Path, opened: Opened) -> Result<BackendPlugin, Rejection> {
    let table = opened.table.cast::<BackendTable>();
    // SAFETY: the handshake said that this is a backend, whose table is a `BackendTable` that lives as long as the
    // process (contract of `PluginHello`).
    let table = unsafe { import_table(table) }.map_err(bad_table)?;
    Ok(BackendPlugin::new(BackendShared {
        name: opened.info.name,
        version: opened.info.version.to_string(),
        path: path.to_path_buf(),
        table,
        query: opened.query,
    }))
}

impl std::fmt::Debug for Loader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

const _: () = {
    const fn shareable<T: Send + Sync>() {}
    shareable::<Loader>();
    shareable::<Family>();
    shareable::<BackendPlugin>();
    shareable::<Arc<Loader>>();
};
