//! Which plugins claim which architectures, after rank, conflicts and the user's pin.

use std::collections::BTreeMap;

use crate::plugin::{ArchRecord, Catalogue, PluginKind, PluginRecord};

/// What a checkpoint says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Query<'a> {
    /// `model_type` of `config.json`.
    ModelType(&'a str),
    /// `general.architecture` of a GGUF file.
    Gguf(&'a str),
    /// Neither: every family may look at the configuration.
    Untyped,
}

impl Query<'_> {
    /// Whether `arch` claims this.
    pub fn is_claimed_by(self, arch: &ArchRecord) -> bool {
        match self {
            Self::ModelType(key) => arch.model_types.iter().any(|known| known == key),
            Self::Gguf(key) => arch.gguf.iter().any(|known| known == key),
            Self::Untyped => true,
        }
    }
}

/// A plugin to be asked, with the architectures it may answer for.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    /// The plugin.
    pub plugin: &'a PluginRecord,
    /// Those of its architectures that are neither hidden by a better place nor in conflict.
    pub archs: Vec<&'a ArchRecord>,
}

/// Two or more plugins of one rank offer the same architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchConflict {
    /// The architecture.
    pub arch: String,
    /// What it is used for.
    pub task: String,
    /// Names of the plugins.
    pub plugins: Vec<String>,
}

struct Entry<'a> {
    plugin: &'a PluginRecord,
    arch: &'a ArchRecord,
}

/// The index. Borrows the catalogue.
pub struct ArchIndex<'a> {
    catalogue: &'a Catalogue,
    pin: Option<String>,
    /// What may be used.
    entries: Vec<Entry<'a>>,
    /// What may not, because nobody can say which of them is meant.
    contested: Vec<Entry<'a>>,
}

impl<'a> ArchIndex<'a> {
    /// Indexes the usable families. A `pin` (`--family NAME`) leaves only the plugin of that name.
    pub fn build(catalogue: &'a Catalogue, pin: Option<&str>) -> Self {
        let mut groups: BTreeMap<(&str, &str), Vec<Entry<'a>>> = BTreeMap::new();
        for plugin in catalogue.usable(PluginKind::Family) {
            if pin.is_some_and(|pin| pin != plugin.name()) {
                continue;
            }
            for arch in plugin.archs() {
                let key = (arch.id.as_str(), arch.task.as_str());
                groups.entry(key).or_default().push(Entry { plugin, arch });
            }
        }
        let mut index = Self {
            catalogue,
            pin: pin.map(str::to_owned),
            entries: Vec::new(),
            contested: Vec::new(),
        };
        for group in groups.into_values() {
            let best = group.iter().map(|entry| entry.plugin.tier).min();
            let mut best: Vec<Entry<'a>> = group
                .into_iter()
                .filter(|entry| Some(entry.plugin.tier) == best)
                .collect();
            match best.len() {
                1 => index.entries.append(&mut best),
                _ => index.contested.append(&mut best),
            }
        }
        index
    }

    /// The pin the index was built with.
    pub fn pin(&self) -> Option<&str> {
        self.pin.as_deref()
    }

    /// The catalogue behind the index.
    pub fn catalogue(&self) -> &'a Catalogue {
        self.catalogue
    }

    /// Every architecture of every usable plugin with its plugin, in order of id; contested ones are
    /// there once for each plugin, marked `true`.
    pub fn rows(&self) -> Vec<(&'a PluginRecord, &'a ArchRecord, bool)> {
        let free = self.entries.iter().map(|entry| (entry, false));
        let contested = self.contested.iter().map(|entry| (entry, true));
        let mut rows: Vec<_> = free
            .chain(contested)
            .map(|(entry, contested)| (entry.plugin, entry.arch, contested))
            .collect();
        rows.sort_by_key(|(plugin, arch, _)| (&arch.id, &arch.task, plugin.name(), &plugin.path));
        rows
    }

    /// The plugins that claim `query`, best place first.
    pub fn candidates(&self, query: Query<'_>) -> Vec<Candidate<'a>> {
        let mut candidates: Vec<Candidate<'a>> = Vec::new();
        let claims = |entry: &&Entry<'a>| query.is_claimed_by(entry.arch);
        for entry in self.entries.iter().filter(claims) {
            let path = &entry.plugin.path;
            if !candidates
                .iter()
                .any(|candidate| &candidate.plugin.path == path)
            {
                let same = |other: &&Entry<'a>| &other.plugin.path == path;
                let archs = self
                    .entries
                    .iter()
                    .filter(same)
                    .map(|other| other.arch)
                    .collect();
                candidates.push(Candidate {
                    plugin: entry.plugin,
                    archs,
                });
            }
        }
        candidates.sort_by_key(|candidate| (candidate.plugin.tier, candidate.plugin.path.clone()));
        candidates
    }

    /// Conflicts among the architectures that claim `query`.
    pub fn conflicts(&self, query: Query<'_>) -> Vec<ArchConflict> {
        let mut groups: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
        for entry in self
            .contested
            .iter()
            .filter(|entry| query.is_claimed_by(entry.arch))
        {
            let key = (entry.arch.id.as_str(), entry.arch.task.as_str());
            groups
                .entry(key)
                .or_default()
                .push(entry.plugin.name().to_owned());
        }
        groups
            .into_iter()
            .map(|((arch, task), plugins)| ArchConflict {
                arch: arch.to_owned(),
                task: task.to_owned(),
                plugins,
            })
            .collect()
    }

    /// Whether the plugin called `plugin` may answer for the architecture `arch`.
    pub(super) fn admits(&self, plugin: &str, arch: &str) -> bool {
        self.entries
            .iter()
            .any(|entry| entry.plugin.name() == plugin && entry.arch.id == arch)
    }

    /// Names that a checkpoint could have used, for suggestions.
    pub(super) fn known_names(&self, query: Query<'_>) -> Vec<&'a str> {
        let all = self.entries.iter().chain(&self.contested);
        let mut names: Vec<&'a str> = all
            .flat_map(|entry| match query {
                Query::Gguf(_) => entry.arch.gguf.iter(),
                Query::ModelType(_) | Query::Untyped => entry.arch.model_types.iter(),
            })
            .map(String::as_str)
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}
