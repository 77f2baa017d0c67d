//! `MLXCEL_PLUGINS_DISABLE` and `MLXCEL_PLUGINS_SELECT`: globs on plugin names.
//!
//! A pattern is matched against the name (`cuda`) and against kind and name (`backend/cuda`). Several
//! are separated by commas.

use globset::{Glob, GlobSet, GlobSetBuilder};

/// Variable that switches plugins off.
pub const DISABLE: &str = "MLXCEL_PLUGINS_DISABLE";
/// Variable that switches all others off.
pub const SELECT: &str = "MLXCEL_PLUGINS_SELECT";

/// A pattern cannot be understood.
#[derive(Debug, thiserror::Error)]
#[error("{variable} has the pattern {pattern:?}: {source}")]
pub struct FilterError {
    /// Name of the variable.
    pub variable: &'static str,
    /// The pattern.
    pub pattern: String,
    /// What is wrong with it.
    pub source: globset::Error,
}

/// Which plugins are switched off.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    disable: Option<GlobSet>,
    select: Option<GlobSet>,
}

impl Filter {
    /// Compiles the two variables' values; an absent or blank one filters nothing.
    pub fn new(disable: Option<&str>, select: Option<&str>) -> Result<Self, FilterError> {
        Ok(Self {
            disable: compile(DISABLE, disable)?,
            select: compile(SELECT, select)?,
        })
    }

    /// The variable that switches a plugin off, if one does.
    pub fn disabled_by(&self, kind: &str, name: &str) -> Option<&'static str> {
        let qualified = format!("{kind}/{name}");
        let hit = |set: &GlobSet| set.is_match(name) || set.is_match(&qualified);
        if self.disable.as_ref().is_some_and(hit) {
            return Some(DISABLE);
        }
        if self.select.as_ref().is_some_and(|set| !hit(set)) {
            return Some(SELECT);
        }
        None
    }
}

fn compile(variable: &'static str, value: Option<&str>) -> Result<Option<GlobSet>, FilterError> {
    let patterns: Vec<&str> = value
        .unwrap_or_default()
        .split(',')
        .map(str::trim)
        .filter(|pattern| !pattern.is_empty())
        .collect();
    if patterns.is_empty() {
        return Ok(None);
    }
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let error = |source| FilterError {
            variable,
            pattern: pattern.to_owned(),
            source,
        };
        set.add(Glob::new(pattern).map_err(error)?);
    }
    let error = |source| FilterError {
        variable,
        pattern: value.unwrap_or_default().to_owned(),
        source,
    };
    set.build().map(Some).map_err(error)
}
