//! Every plugin found, each in exactly one state.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use semver::Version;

use super::digest::sha256_of_file;
use super::discover::{FileId, FoundFile, PlaceNote, discover, name_in_file};
use super::filter::{Filter, FilterError};
use super::metadata::{ArchRecord, Metadata, PluginInfo, PluginKind};
use super::peek::{HostProfile, peek};
use super::reason::Rejection;
use super::search::{SearchInputs, Tier};

/// Where a plugin stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Good as far as its file tells; not loaded.
    Available,
    /// Loaded into this process.
    Ready,
    /// Switched off by the named variable.
    Disabled {
        /// The variable.
        by: &'static str,
    },
    /// Hidden by a plugin of the same name in a better place.
    Shadowed {
        /// That plugin's file.
        by: PathBuf,
        /// Its version, when it is older than the hidden one's.
        older: Option<Version>,
    },
    /// Another plugin of the same name lies in a place of the same rank; neither is used.
    Conflict {
        /// The other files.
        with: Vec<PathBuf>,
    },
    /// It cannot be used.
    Rejected(Rejection),
}

impl State {
    /// The state's name as in JSON output.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Available => "available",
            Self::Ready => "ready",
            Self::Disabled { .. } => "disabled",
            Self::Shadowed { .. } => "shadowed",
            Self::Conflict { .. } => "conflict",
            Self::Rejected(_) => "rejected",
        }
    }

    /// Whether the plugin may be loaded, or is.
    pub const fn is_usable(&self) -> bool {
        matches!(self, Self::Available | Self::Ready)
    }

    /// One line on why it is not usable; `None` when it is.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Available | Self::Ready => None,
            Self::Disabled { by } => Some(format!("disabled by {by}")),
            Self::Shadowed { by, older: None } => Some(format!("shadowed by {}", by.display())),
            Self::Shadowed {
                by,
                older: Some(version),
            } => Some(format!(
                "shadowed by {}, which is older (version {version}): remove it if that is not meant",
                by.display()
            )),
            Self::Conflict { with } => {
                let others: Vec<String> = with.iter().map(|p| p.display().to_string()).collect();
                Some(format!(
                    "same name and rank as {}: remove one, or name the one to use with --plugin FILE",
                    others.join(", ")
                ))
            }
            Self::Rejected(rejection) => Some(rejection.text.clone()),
        }
    }
}

/// One plugin file.
#[derive(Debug, Clone)]
pub struct PluginRecord {
    /// Canonical path.
    pub path: PathBuf,
    /// Where it was found.
    pub tier: Tier,
    /// Identity of the file; none when it could not be examined.
    pub id: Option<FileId>,
    /// What the file says; also there for many rejected files.
    pub metadata: Option<Metadata>,
    /// Where it stands.
    pub state: State,
}

impl PluginRecord {
    /// Looks into one file.
    pub fn examine(found: FoundFile, host: HostProfile) -> Self {
        let peek = peek(&found.path, host);
        Self {
            path: found.path,
            tier: found.tier,
            id: found.id,
            metadata: peek.metadata,
            state: peek.rejection.map_or(State::Available, State::Rejected),
        }
    }

    /// The plugin's own record.
    pub fn info(&self) -> Option<&PluginInfo> {
        self.metadata.as_ref().map(|metadata| &metadata.plugin)
    }

    /// Its architectures.
    pub fn archs(&self) -> &[ArchRecord] {
        self.metadata
            .as_ref()
            .map_or(&[], |metadata| &metadata.archs)
    }

    /// Name from the metadata, or else from the file's name.
    pub fn name(&self) -> &str {
        match self.info() {
            Some(info) => &info.name,
            None => name_in_file(&self.path).map_or("", |(_, name)| name),
        }
    }

    /// Kind from the metadata, or else from the file's name.
    pub fn kind(&self) -> Option<PluginKind> {
        match self.info() {
            Some(info) => info.known_kind(),
            None => name_in_file(&self.path).map(|(kind, _)| kind),
        }
    }

    /// Hash of the file.
    pub fn sha256(&self) -> io::Result<String> {
        sha256_of_file(&self.path)
    }

    fn key(&self) -> Option<(PluginKind, String)> {
        Some((self.kind()?, self.name().to_owned()))
    }
}

/// Why a catalogue cannot be used for what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogueError {
    /// A filter variable is malformed.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// A folder named by a flag gave nothing.
    #[error("--plugins-dir: {0}")]
    Place(String),
    /// A file named by a flag is not usable.
    #[error("--plugin {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// All plugins found, best place first.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    records: Vec<PluginRecord>,
    notes: Vec<PlaceNote>,
}

impl Catalogue {
    /// Searches, peeks and decides the states.
    pub fn build(inputs: &SearchInputs, host: HostProfile) -> Result<Self, CatalogueError> {
        let filter = Filter::new(inputs.disable.as_deref(), inputs.select.as_deref())?;
        let discovery = discover(inputs);
        let records = discovery
            .files
            .into_iter()
            .map(|found| PluginRecord::examine(found, host))
            .collect();
        let mut catalogue = Self {
            records,
            notes: discovery.notes,
        };
        catalogue.apply_filter(&filter);
        catalogue.resolve_names();
        Ok(catalogue)
    }

    /// A file that the user named outranks the filters.
    fn apply_filter(&mut self, filter: &Filter) {
        for record in &mut self.records {
            if record.tier == Tier::File || !record.state.is_usable() {
                continue;
            }
            let kind = record.kind().map_or("", PluginKind::name);
            if let Some(by) = filter.disabled_by(kind, record.name()) {
                record.state = State::Disabled { by };
            }
        }
    }

    fn resolve_names(&mut self) {
        let mut groups: HashMap<(PluginKind, String), Vec<usize>> = HashMap::new();
        for (index, record) in self.records.iter().enumerate() {
            if let (true, Some(key)) = (record.state.is_usable(), record.key()) {
                groups.entry(key).or_default().push(index);
            }
        }
        let mut changes = Vec::new();
        for group in groups.values() {
            let members: Vec<(usize, &PluginRecord)> = group
                .iter()
                .filter_map(|&index| Some((index, self.records.get(index)?)))
                .collect();
            // Records are in order of rank, so the first has the best tier.
            let Some((_, best)) = members.first() else {
                continue;
            };
            let winners: Vec<&PathBuf> = members
                .iter()
                .filter(|(_, record)| record.tier == best.tier)
                .map(|(_, record)| &record.path)
                .collect();
            for (index, record) in &members {
                if record.tier != best.tier {
                    let version =
                        |record: &PluginRecord| record.info().map(|info| info.version.clone());
                    let older = version(best).filter(|best| version(record).as_ref() > Some(best));
                    let by = best.path.clone();
                    changes.push((*index, State::Shadowed { by, older }));
                } else if winners.len() > 1 {
                    let with = winners.iter().filter(|p| **p != &record.path);
                    let with = with.map(|p| (*p).clone()).collect();
                    changes.push((*index, State::Conflict { with }));
                }
            }
        }
        for (index, state) in changes {
            if let Some(record) = self.records.get_mut(index) {
                record.state = state;
            }
        }
    }

    /// Every plugin, best place first.
    pub fn records(&self) -> &[PluginRecord] {
        &self.records
    }

    /// Places that gave nothing.
    pub fn notes(&self) -> &[PlaceNote] {
        &self.notes
    }

    /// The usable plugins of one kind.
    pub fn usable(&self, kind: PluginKind) -> impl Iterator<Item = &PluginRecord> {
        self.records
            .iter()
            .filter(move |record| record.state.is_usable() && record.kind() == Some(kind))
    }

    /// The plugin called `name` that would be used, or else the first one of that name with the reason
    /// why it is not.
    pub fn find(&self, kind: PluginKind, name: &str) -> Option<&PluginRecord> {
        let mut named = self
            .records
            .iter()
            .filter(|record| record.kind() == Some(kind) && record.name() == name);
        let first = named.clone().next();
        named.find(|record| record.state.is_usable()).or(first)
    }

    /// The plugin at `path`.
    pub fn at(&self, path: &Path) -> Option<&PluginRecord> {
        self.records.iter().find(|record| record.path == path)
    }

    /// Notes what became of a plugin when it was loaded.
    pub fn set_state(&mut self, path: &Path, state: State) {
        if let Some(record) = self.records.iter_mut().find(|record| record.path == path) {
            record.state = state;
        }
    }

    /// An error if a folder that a flag names cannot be read: whatever a command does with the plugins,
    /// leaving these out is not what was asked.
    pub fn require_places(&self) -> Result<(), CatalogueError> {
        match self.notes.iter().find(|note| note.explicit) {
            Some(note) => Err(CatalogueError::Place(note.text.clone())),
            None => Ok(()),
        }
    }

    /// Refuses to go on without what a flag named. Commands that list plugins do not call this.
    pub fn require_explicit(&self) -> Result<(), CatalogueError> {
        self.require_places()?;
        for record in self
            .records
            .iter()
            .filter(|record| record.tier == Tier::File)
        {
            if let Some(reason) = record.state.reason() {
                return Err(CatalogueError::File {
                    path: record.path.clone(),
                    reason,
                });
            }
        }
        Ok(())
    }
}
