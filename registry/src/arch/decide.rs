//! The choice among the families' scores, and the errors when there is none.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::index::{ArchConflict, ArchIndex, Query};
use super::nearest::nearest;
use crate::plugin::{PluginKind, SELECT, State};
use crate::quoted;

/// One entry of a family's answer to a probe, with the plugin it came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeScore {
    /// Name of the plugin.
    pub plugin: String,
    /// Architecture it proposes.
    pub arch: String,
    /// How well it fits; 0 is "recognised, but not implemented".
    pub score: u32,
    /// Why.
    pub why: String,
}

/// What was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Name of the plugin.
    pub plugin: String,
    /// Architecture, as the plugin named it.
    pub arch: String,
    /// Its score.
    pub score: u32,
    /// Why.
    pub why: String,
}

/// No family could be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DetectError {
    /// Nobody knows this kind of model.
    #[error("{}", unknown_text(what, nearest, rejected))]
    Unknown {
        /// What was looked for, with its value.
        what: String,
        /// Known names close to it.
        nearest: Vec<String>,
        /// Plugins that would serve it and cannot be used, or are left out, each with its reason.
        rejected: Vec<String>,
        /// What can be done about these.
        cures: Vec<String>,
    },
    /// There is nobody to know any kind of model.
    #[error("no plugin knows {what}, and no usable plugin of a model family was found")]
    NoFamilies {
        /// What was looked for, with its value.
        what: String,
    },
    /// It is recognised, and this variant of it is not implemented.
    #[error("{what} is recognised but not supported: {}", join(reasons))]
    Unsupported {
        /// What was looked for, with its value.
        what: String,
        /// One reason for each architecture.
        reasons: Vec<String>,
    },
    /// Those who claim this kind of model do not recognise this one.
    #[error(
        "{what} is claimed by {}, which does not recognise this configuration: see `mlxcel inspect`",
        join(plugins)
    )]
    NotRecognised {
        /// What was looked for, with its value.
        what: String,
        /// Names of the plugins that were asked.
        plugins: Vec<String>,
    },
    /// Two candidates fit equally well.
    #[error(
        "{what} fits several architectures equally well ({}): choose the plugin with --family NAME",
        join(candidates)
    )]
    Ambiguous {
        /// What was looked for, with its value.
        what: String,
        /// `plugin/arch (score)` of each.
        candidates: Vec<String>,
    },
    /// Two plugins of the same rank offer the architecture.
    #[error("architecture {} is offered by the plugins {}: choose one with {}", conflict.arch, join(&conflict.plugins), pins(conflict))]
    Conflict {
        /// The plugins and the architecture.
        conflict: ArchConflict,
    },
    /// The pinned plugin is not there.
    #[error("--family {name}: {reason}")]
    Pin {
        /// The name given.
        name: String,
        /// Why it cannot be used.
        reason: String,
    },
}

fn join(parts: &[String]) -> String {
    parts.join(", ")
}

fn pins(conflict: &ArchConflict) -> String {
    let pins: Vec<String> = conflict
        .plugins
        .iter()
        .map(|name| format!("--family {name}"))
        .collect();
    pins.join(" or ")
}

fn unknown_text(what: &str, nearest: &[String], rejected: &[String]) -> String {
    let mut text = format!("no plugin knows {what}");
    if !rejected.is_empty() {
        text.push_str(&format!(
            "; a plugin for it exists but is not used: {}",
            rejected.join("; ")
        ));
    } else if nearest.is_empty() {
        text.push_str(": see `mlxcel arch` for what is known");
    } else {
        text.push_str(&format!(": did you mean {}", nearest.join(" or ")));
    }
    text
}

fn described(query: Query<'_>) -> String {
    match query {
        Query::ModelType(key) => format!("model_type {}", quoted(key)),
        Query::Gguf(key) => format!("GGUF architecture {}", quoted(key)),
        Query::Untyped => "this configuration, which has no model_type".to_owned(),
    }
}

/// Chooses the best of `scores`, which are the answers of all of the index's candidates for `query`.
/// Answers for architectures that a plugin does not own are left out.
pub fn decide(
    index: &ArchIndex<'_>,
    query: Query<'_>,
    scores: &[ProbeScore],
) -> Result<Decision, DetectError> {
    check_pin(index)?;
    let conflict = index.conflicts(query).into_iter().next();
    // Everybody claims an untyped configuration, so a conflict there need not concern it.
    if let (Some(conflict), false) = (&conflict, query == Query::Untyped) {
        let conflict = conflict.clone();
        return Err(DetectError::Conflict { conflict });
    }
    let mut admitted: Vec<&ProbeScore> = scores
        .iter()
        .filter(|score| index.admits(&score.plugin, &score.arch))
        .collect();
    admitted.sort_by_key(|score| std::cmp::Reverse(score.score));
    let Some(best) = admitted.first().filter(|best| best.score > 0) else {
        return Err(match conflict {
            Some(conflict) => DetectError::Conflict { conflict },
            None => nobody(index, query, &admitted),
        });
    };
    let equals: Vec<&&ProbeScore> = admitted
        .iter()
        .filter(|score| score.score == best.score)
        .collect();
    if equals.len() > 1 {
        let candidates = equals
            .iter()
            .map(|score| format!("{}/{} (score {})", score.plugin, score.arch, score.score))
            .collect();
        return Err(DetectError::Ambiguous {
            what: described(query),
            candidates,
        });
    }
    Ok(Decision {
        plugin: best.plugin.clone(),
        arch: best.arch.clone(),
        score: best.score,
        why: best.why.clone(),
    })
}

fn check_pin(index: &ArchIndex<'_>) -> Result<(), DetectError> {
    let Some(name) = index.pin() else {
        return Ok(());
    };
    let reason = match index.catalogue().find(PluginKind::Family, name) {
        Some(plugin) => match plugin.state.reason() {
            None => return Ok(()),
            Some(reason) => format!("{}: {reason}", plugin.path.display()),
        },
        None => {
            let usable = index.catalogue().usable(PluginKind::Family);
            let mut names: Vec<&str> = usable.map(|plugin| plugin.name()).collect();
            names.sort_unstable();
            match names.is_empty() {
                true => "no family plugin was found: see `mlxcel doctor`".to_owned(),
                false => format!(
                    "no family plugin has this name; there are {}",
                    names.join(", ")
                ),
            }
        }
    };
    Err(DetectError::Pin {
        name: name.to_owned(),
        reason,
    })
}

fn nobody(index: &ArchIndex<'_>, query: Query<'_>, zeros: &[&ProbeScore]) -> DetectError {
    let what = described(query);
    if !zeros.is_empty() {
        let reasons = zeros
            .iter()
            .map(|score| format!("{}/{}: {}", score.plugin, score.arch, score.why))
            .collect();
        return DetectError::Unsupported { what, reasons };
    }
    let asked = index.candidates(query);
    if !asked.is_empty() && query != Query::Untyped {
        let plugins = asked
            .iter()
            .map(|candidate| candidate.plugin.name().to_owned())
            .collect();
        return DetectError::NotRecognised { what, plugins };
    }
    let wanted = match query {
        Query::ModelType(key) | Query::Gguf(key) => key,
        Query::Untyped => "",
    };
    let (mut rejected, mut cures) = rejected_for(index, query, wanted);
    if let Some(pin) = index.pin() {
        for name in pinned_out(index, query, pin) {
            rejected.push(format!("{name}: left out by --family {pin}"));
            cures.push(format!("leave out --family {pin}, or give --family {name}"));
        }
    }
    let mut seen = BTreeSet::new();
    cures.retain(|cure| seen.insert(cure.clone()));
    if index.rows().is_empty() && rejected.is_empty() {
        return DetectError::NoFamilies { what };
    }
    DetectError::Unknown {
        what,
        nearest: nearest(wanted, index.known_names(query).into_iter()),
        rejected,
        cures,
    }
}

/// Names of the usable families that claim `query` and are not the pinned one.
fn pinned_out(index: &ArchIndex<'_>, query: Query<'_>, pin: &str) -> Vec<String> {
    if query == Query::Untyped {
        return Vec::new();
    }
    let usable = index.catalogue().usable(PluginKind::Family);
    usable
        .filter(|plugin| plugin.name() != pin)
        .filter(|plugin| plugin.archs().iter().any(|arch| query.is_claimed_by(arch)))
        .map(|plugin| plugin.name().to_owned())
        .collect()
}

/// What undoes a state that keeps a plugin from being used.
fn cure(state: &State) -> Option<String> {
    Some(match state {
        State::Disabled { by } if *by == SELECT => {
            format!("add the plugin to {by}, or name its file with --plugin FILE")
        }
        State::Disabled { by } => {
            format!("take the plugin out of {by}, or name its file with --plugin FILE")
        }
        State::Conflict { .. } => {
            "remove one of the files, or name the one to use with --plugin FILE".to_owned()
        }
        State::Rejected(_) => "`mlxcel plugin verify FILE` examines a rejected plugin".to_owned(),
        State::Available | State::Ready | State::Shadowed { .. } => return None,
    })
}

/// Plugins that would serve `query` if they were usable, and what can be done about it. One whose
/// metadata cannot be read counts when its file is named after the wanted model.
fn rejected_for(
    index: &ArchIndex<'_>,
    query: Query<'_>,
    wanted: &str,
) -> (Vec<String>, Vec<String>) {
    if query == Query::Untyped {
        return (Vec::new(), Vec::new());
    }
    let plugins = index.catalogue().records().iter();
    plugins
        .filter(|plugin| plugin.kind() == Some(PluginKind::Family))
        .filter(|plugin| match &plugin.metadata {
            Some(metadata) => metadata.archs.iter().any(|arch| query.is_claimed_by(arch)),
            None => plugin.name() == wanted,
        })
        .filter_map(|plugin| {
            let (cure, reason) = (cure(&plugin.state)?, plugin.state.reason()?);
            Some((format!("{}: {reason}", plugin.path.display()), cure))
        })
        .unzip()
}
