//! What the doctor looks at: places, plugins, memory, cache and endpoint.

use std::path::{Path, PathBuf};

use mlxcel_registry::plugin::{
    Catalogue, PlaceNote, PlaceProblem, PluginKind, PluginRecord, SearchInputs, State, Tier,
};
use mlxcel_registry::store::StoreEnv;
use rustix::fs::{Access, access};

use crate::plugin::{Loader, ProbeOutcome, ProbeReport};

use super::super::error::CliError;
use super::super::memory::{Budget, MachineMemory, host_budget};
use super::super::place::{cache_root, found, loader, open_store, search_inputs};
use super::DoctorArgs;

/// A place where plugins are looked for.
pub(super) struct Place {
    pub(super) tier: Tier,
    pub(super) path: PathBuf,
    /// Plugin files found there.
    pub(super) plugins: usize,
    /// Why there are none, if that is the place's fault.
    pub(super) problem: Option<String>,
    /// Folders in it that could not be looked into.
    pub(super) unread: Vec<String>,
}

/// A plugin that is tried, and what came of it.
pub(super) struct Tried {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) path: PathBuf,
    pub(super) archs: usize,
    /// What a backend found, or why the plugin cannot be used.
    pub(super) outcome: Result<Option<ProbeReport>, String>,
    /// Left out by a rule and not for a fault: another of its name comes first, or a variable switches it off.
    pub(super) is_left_out: bool,
}

impl Tried {
    /// Whether a model could run with it.
    pub(super) fn is_usable(&self) -> bool {
        match &self.outcome {
            Ok(Some(report)) => report.score > 0,
            Ok(None) => true,
            Err(_) => false,
        }
    }
}

/// A folder that mlxcel writes to.
pub(super) struct Folder {
    pub(super) path: Option<PathBuf>,
    /// Why it cannot be written to.
    pub(super) problem: Option<String>,
}

/// Everything.
pub(super) struct Findings {
    pub(super) places: Vec<Place>,
    pub(super) families: Vec<Tried>,
    pub(super) backends: Vec<Tried>,
    /// Files that are neither, with the reason.
    pub(super) others: Vec<(PathBuf, String)>,
    pub(super) memory: MachineMemory,
    pub(super) budget: Budget,
    pub(super) cache: Folder,
    pub(super) store: Folder,
    pub(super) endpoint: String,
    pub(super) offline: Option<&'static str>,
    pub(super) has_token: bool,
}

impl Findings {
    pub(super) fn collect(args: &DoctorArgs) -> Result<Self, CliError> {
        let env = StoreEnv::from_process()?;
        let inputs = search_inputs(&args.plugins);
        let catalogue = found(&args.plugins)?;
        let loader = loader()?;
        let (families, backends, others) = plugins(&catalogue, &loader);
        let store = open_store(&args.store)?;
        let store = match store.root() {
            Ok(root) => folder(Some(root.to_path_buf()), ""),
            Err(error) => folder(None, &error.to_string()),
        };
        Ok(Self {
            places: places(&inputs, &catalogue),
            families,
            backends,
            others,
            memory: MachineMemory::read(),
            budget: host_budget()?,
            cache: folder(cache_root(&env), "HOME is not set, so set MLXCEL_CACHE_DIR"),
            store,
            offline: env.offline,
            has_token: env.token.is_some() || env.token_file().is_some_and(|file| file.exists()),
            endpoint: env.endpoint,
        })
    }

    pub(super) fn has_backend(&self) -> bool {
        self.backends.iter().any(Tried::is_usable)
    }

    pub(super) fn has_family(&self) -> bool {
        self.families.iter().any(Tried::is_usable)
    }

    /// Whether a model could be run.
    pub(super) fn is_ready(&self) -> bool {
        self.has_backend() && self.has_family()
    }

    /// The backend that `--backend auto` would try first.
    pub(super) fn best_backend(&self) -> Option<&str> {
        let score = |tried: &Tried| match &tried.outcome {
            Ok(Some(report)) => report.score,
            _ => 0,
        };
        // Of equals the first, which is in the better place.
        let usable = self.backends.iter().filter(|tried| tried.is_usable());
        usable
            .rev()
            .max_by_key(|tried| score(tried))
            .map(|tried| tried.name.as_str())
    }
}

fn places(inputs: &SearchInputs, catalogue: &Catalogue) -> Vec<Place> {
    let mut searched: Vec<(Tier, PathBuf)> = Vec::new();
    searched.extend(inputs.files.iter().map(|path| (Tier::File, path.clone())));
    searched.extend(
        inputs
            .dirs
            .iter()
            .map(|path| (Tier::Directory, path.clone())),
    );
    let env_dirs = inputs.plugin_path.iter().flat_map(std::env::split_paths);
    searched.extend(
        env_dirs
            .filter(|path| !path.as_os_str().is_empty())
            .map(|path| (Tier::Directory, path)),
    );
    let standard = [
        (Tier::User, &inputs.user_dir),
        (Tier::Bundled, &inputs.bundled_dir),
        (Tier::System, &inputs.system_dir),
    ];
    searched.extend(
        standard
            .into_iter()
            .filter_map(|(tier, path)| Some((tier, path.clone()?))),
    );
    let note = |path: &Path| {
        catalogue
            .notes()
            .iter()
            .find(|note: &&PlaceNote| note.path == path)
    };
    searched
        .into_iter()
        .map(|(tier, path)| {
            let real = path.canonicalize().unwrap_or_else(|_| path.clone());
            let inside =
                |record: &&PluginRecord| record.tier == tier && record.path.starts_with(&real);
            let unread = catalogue.notes().iter().filter(|note| {
                note.tier == tier && note.path != path && note.path.starts_with(&path)
            });
            Place {
                unread: unread.map(|note| note.text.clone()).collect(),
                tier,
                plugins: catalogue.records().iter().filter(inside).count(),
                problem: note(&path).map(place_problem),
                path,
            }
        })
        .collect()
}

/// The note's text repeats the path, which the report has already.
fn place_problem(note: &PlaceNote) -> String {
    match note.problem {
        PlaceProblem::Absent => "does not exist".to_owned(),
        _ => note.text.clone(),
    }
}

fn plugins(
    catalogue: &Catalogue,
    loader: &Loader,
) -> (Vec<Tried>, Vec<Tried>, Vec<(PathBuf, String)>) {
    let (mut families, mut backends, mut others) = (Vec::new(), Vec::new(), Vec::new());
    for record in catalogue.records() {
        match record.kind() {
            Some(PluginKind::Family) => families.push(tried(record, loader)),
            Some(PluginKind::Backend) => backends.push(tried(record, loader)),
            None => others.push((
                record.path.clone(),
                record.state.reason().unwrap_or_default(),
            )),
        }
    }
    (families, backends, others)
}

fn tried(record: &PluginRecord, loader: &Loader) -> Tried {
    let outcome = match record.state.reason() {
        Some(reason) => Err(reason),
        None => match loader.probe(record) {
            Some(Ok(ProbeOutcome { backend, .. })) => Ok(backend),
            Some(Err(rejection)) => Err(rejection.text),
            None => Err("no child process was started".to_owned()),
        },
    };
    Tried {
        name: record.name().to_owned(),
        version: record
            .info()
            .map(|info| info.version.to_string())
            .unwrap_or_default(),
        path: record.path.clone(),
        archs: record.archs().len(),
        is_left_out: matches!(
            record.state,
            State::Shadowed { .. } | State::Disabled { .. }
        ),
        outcome,
    }
}

/// Whether a folder, or what it would be created in, can be written to. Creates nothing.
fn folder(path: Option<PathBuf>, absent: &str) -> Folder {
    let Some(path) = path else {
        return Folder {
            path: None,
            problem: Some(absent.to_owned()),
        };
    };
    let nearest = path.ancestors().find(|ancestor| ancestor.exists());
    let problem = match nearest {
        None => Some("no part of the path exists".to_owned()),
        Some(nearest) if !nearest.is_dir() => {
            Some(format!("{} is not a folder", nearest.display()))
        }
        Some(nearest) => match access(nearest, Access::WRITE_OK | Access::EXEC_OK) {
            Ok(()) => None,
            Err(error) => Some(format!(
                "{} cannot be written to: {}",
                nearest.display(),
                std::io::Error::from(error)
            )),
        },
    };
    Folder {
        path: Some(path),
        problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_made_is_told() {
        let dir = tempfile::tempdir().expect("folder");
        let deep = dir.path().join("a/b");
        assert_eq!(folder(Some(deep.clone()), "").problem, None);
        assert!(!deep.exists());
        let file = dir.path().join("file");
        std::fs::write(&file, "").expect("written");
        let problem = folder(Some(file.join("models")), "")
            .problem
            .expect("problem");
        assert!(problem.ends_with("is not a folder"), "{problem}");
        assert_eq!(folder(None, "no home").problem.as_deref(), Some("no home"));
    }
}
