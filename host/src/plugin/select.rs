//! The choice of the backend: `--backend auto|NAME`.
//!
//! A named backend that cannot run is an error with its reason, never a silent change of device.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use mlxcel_registry::plugin::{Catalogue, PluginKind, PluginRecord};

use super::backend::{BackendPlugin, ProbeReport};
use super::error::LoadError;
use super::loader::Loader;

/// What `--backend` says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// The best one that runs here.
    #[default]
    Auto,
    /// This one.
    Named(String),
}

impl FromStr for BackendChoice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "auto" => Self::Auto,
            name => Self::Named(name.to_owned()),
        })
    }
}

impl fmt::Display for BackendChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Named(name) => f.write_str(name),
        }
    }
}

/// A backend that was chosen and is loaded.
#[derive(Debug, Clone)]
pub struct SelectedBackend {
    /// The plugin.
    pub plugin: BackendPlugin,
    /// What it found on this machine.
    pub report: ProbeReport,
    /// One line: what was taken, and why not the others.
    pub summary: String,
}

/// No backend could be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SelectError {
    /// There is none of this name.
    #[error("{}: no backend plugin has this name{}", asked(name), known(available))]
    NotFound {
        /// The name given.
        name: String,
        /// Names there are.
        available: Vec<String>,
    },
    /// The named one cannot run here.
    #[error("--backend {name}: {reason}")]
    Unusable {
        /// The name given.
        name: String,
        /// Why.
        reason: String,
    },
    /// None can run here.
    #[error("no backend can run here: {}", reasons(rejected))]
    NoneRuns {
        /// `name: reason` of each.
        rejected: Vec<String>,
    },
}

/// The flag as it was given; an empty name would not be seen.
fn asked(name: &str) -> String {
    match name.trim().is_empty() {
        true => format!("--backend {name:?}"),
        false => format!("--backend {name}"),
    }
}

fn known(available: &[String]) -> String {
    match available.is_empty() {
        true => ", and no other was found: see `mlxcel doctor`".to_owned(),
        false => format!("; there are {}", available.join(", ")),
    }
}

fn reasons(rejected: &[String]) -> String {
    match rejected.is_empty() {
        true => "no backend plugin was found, see `mlxcel doctor`".to_owned(),
        false => rejected.join("; "),
    }
}

/// A backend with its probe's answer.
struct Contender<'a> {
    record: &'a PluginRecord,
    answer: Result<ProbeReport, String>,
}

impl Loader {
    /// Probes the backends and loads the chosen one.
    pub fn select_backend(
        &self,
        catalogue: &Catalogue,
        choice: &BackendChoice,
    ) -> Result<SelectedBackend, SelectError> {
        match choice {
            BackendChoice::Named(name) => self.named_backend(catalogue, name),
            BackendChoice::Auto => self.best_backend(catalogue),
        }
    }

    fn named_backend(
        &self,
        catalogue: &Catalogue,
        name: &str,
    ) -> Result<SelectedBackend, SelectError> {
        let Some(record) = catalogue.find(PluginKind::Backend, name) else {
            let mut available: Vec<String> = catalogue
                .usable(PluginKind::Backend)
                .map(|record| record.name().to_owned())
                .collect();
            available.sort();
            return Err(SelectError::NotFound {
                name: name.to_owned(),
                available,
            });
        };
        let unusable = |reason: String| SelectError::Unusable {
            name: name.to_owned(),
            reason,
        };
        let report = self.report(record).and_then(able).map_err(unusable)?;
        let plugin = self
            .load_backend(record)
            .map_err(|error| unusable(reason_of(&error)))?;
        let summary = format!("backend {name} ({})", report.reason);
        Ok(SelectedBackend {
            plugin,
            report,
            summary,
        })
    }

    fn best_backend(&self, catalogue: &Catalogue) -> Result<SelectedBackend, SelectError> {
        let mut contenders: Vec<Contender<'_>> = catalogue
            .usable(PluginKind::Backend)
            .map(|record| Contender {
                record,
                answer: self.report(record),
            })
            .collect();
        rank(&mut contenders);
        let mut rejected = unusable_backends(catalogue);
        let mut chosen: Option<SelectedBackend> = None;
        for contender in contenders {
            let name = contender.record.name();
            let report = match contender.answer.and_then(able) {
                Ok(report) => report,
                Err(reason) => {
                    rejected.push(format!("{name}: {reason}"));
                    continue;
                }
            };
            if let Some(chosen) = &chosen {
                rejected.push(format!(
                    "{name}: score {} is below {}",
                    report.score, chosen.report.score
                ));
                continue;
            }
            match self.load_backend(contender.record) {
                Ok(plugin) => {
                    let summary = String::new();
                    chosen = Some(SelectedBackend {
                        plugin,
                        report,
                        summary,
                    });
                }
                Err(error) => rejected.push(format!("{name}: {}", reason_of(&error))),
            }
        }
        match chosen {
            Some(mut chosen) => {
                chosen.summary = summary(&chosen, &rejected);
                Ok(chosen)
            }
            None => Err(SelectError::NoneRuns { rejected }),
        }
    }

    /// A backend's own answer, from a child process when this loader uses one.
    fn report(&self, record: &PluginRecord) -> Result<ProbeReport, String> {
        if let Some(reason) = record.state.reason() {
            return Err(reason);
        }
        match self.probe(record) {
            Some(Ok(outcome)) => outcome
                .backend
                .ok_or_else(|| "its probe gave no answer".to_owned()),
            Some(Err(rejection)) => Err(rejection.text),
            None => {
                let plugin = self
                    .load_backend(record)
                    .map_err(|error| reason_of(&error))?;
                plugin.probe().map_err(|error| error.to_string())
            }
        }
    }
}

/// Highest score first; among equals the better place, which is the catalogue's order.
fn rank(contenders: &mut [Contender<'_>]) {
    contenders.sort_by_key(|contender| {
        let score = contender.answer.as_ref().map_or(0, |report| report.score);
        std::cmp::Reverse(score)
    });
}

fn able(report: ProbeReport) -> Result<ProbeReport, String> {
    match report.score {
        0 => Err(report.reason),
        _ => Ok(report),
    }
}

fn reason_of(error: &LoadError) -> String {
    match error {
        LoadError::Rejected { rejection, .. } => rejection.text.clone(),
        LoadError::NotUsable { reason, .. } => reason.clone(),
        LoadError::WrongKind { .. } => error.to_string(),
    }
}

/// Backends that the catalogue rules out, unless one of the same name is used instead.
fn unusable_backends(catalogue: &Catalogue) -> Vec<String> {
    catalogue
        .records()
        .iter()
        .filter(|record| record.kind() == Some(PluginKind::Backend))
        .filter(|record| {
            catalogue
                .find(PluginKind::Backend, record.name())
                .is_some_and(|used| !used.state.is_usable())
        })
        .filter_map(|record| Some(format!("{}: {}", record.name(), record.state.reason()?)))
        .collect()
}

fn summary(chosen: &SelectedBackend, rejected: &[String]) -> String {
    let name = chosen.plugin.name();
    let mut text = format!("backend {name} ({})", chosen.report.reason);
    if !rejected.is_empty() {
        text.push_str(&format!("; not taken: {}", rejected.join("; ")));
    }
    text
}
