//! Finds the family for a checkpoint: asks every candidate, and lets the registry choose.

use mlxcel_registry::arch::{ArchIndex, Decision, DetectError, Query, decide};

use super::error::{CallError, LoadError};
use super::family::Family;
use super::loader::Loader;

/// A family, loaded, and the architecture it is to build.
#[derive(Debug, Clone)]
pub struct Detected {
    /// The family.
    pub family: Family,
    /// The choice.
    pub decision: Decision,
}

/// No family could be found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DetectFailure {
    /// Nothing fits, or too much does.
    #[error("{error}{}", failures_text(failures))]
    Undecided {
        /// Why.
        error: DetectError,
        /// Candidates that could not be asked.
        failures: Vec<CandidateFailure>,
    },
    /// Those who claim the model could not be asked.
    #[error("no plugin for this model could be loaded: {}", joined(failures))]
    NoneLoaded {
        /// Each with its reason.
        failures: Vec<CandidateFailure>,
    },
}

/// A candidate that could not be asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CandidateFailure {
    /// It did not load.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// It did not answer.
    #[error(transparent)]
    Call(#[from] CallError),
}

fn joined(failures: &[CandidateFailure]) -> String {
    let texts: Vec<String> = failures.iter().map(ToString::to_string).collect();
    texts.join("; ")
}

fn failures_text(failures: &[CandidateFailure]) -> String {
    match failures.is_empty() {
        true => String::new(),
        false => format!("; could not be asked: {}", joined(failures)),
    }
}

impl Loader {
    /// Loads the plugins that claim `query`, probes each with `config` (a JSON object) and takes the best.
    pub fn detect(
        &self,
        index: &ArchIndex<'_>,
        query: Query<'_>,
        config: &str,
    ) -> Result<Detected, DetectFailure> {
        let mut families: Vec<Family> = Vec::new();
        let mut scores = Vec::new();
        let mut failures = Vec::new();
        for candidate in index.candidates(query) {
            let answer = self
                .load_family(candidate.plugin)
                .map_err(CandidateFailure::from)
                .and_then(|family| Ok((family.probe(config)?, family)));
            match answer {
                Ok((answer, family)) => {
                    scores.extend(answer);
                    families.push(family);
                }
                Err(failure) => {
                    tracing::warn!("{failure}");
                    failures.push(failure);
                }
            }
        }
        if families.is_empty() && !failures.is_empty() {
            return Err(DetectFailure::NoneLoaded { failures });
        }
        let decision = match decide(index, query, &scores) {
            Ok(decision) => decision,
            Err(error) => return Err(DetectFailure::Undecided { error, failures }),
        };
        match families
            .into_iter()
            .find(|family| family.name() == decision.plugin)
        {
            Some(family) => Ok(Detected { family, decision }),
            // `decide` chooses among the scores, and each came from one of these families.
            None => Err(DetectFailure::NoneLoaded { failures }),
        }
    }
}
