//! Checks of the source tree that no compiler makes. Each has its own file and returns findings; this one runs and prints them.

mod dependency_list;
mod files;
mod headers;
mod links;
mod rust_source;
mod sizes;
mod unsafe_places;
mod words;

use std::fmt;

use crate::error::Error;
use crate::workspace::Workspace;
use files::TextFile;

/// Something to put right.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    pub file: String,
    /// 1 for the first; 0 where a finding is about the whole file.
    pub line: usize,
    pub severity: Severity,
    pub message: String,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub enum Severity {
    Warning,
    Error,
}

impl Finding {
    fn error(file: &TextFile, line: usize, message: impl Into<String>) -> Self {
        Finding {
            file: file.path.clone(),
            line,
            severity: Severity::Error,
            message: message.into(),
        }
    }

    fn warning(file: &TextFile, line: usize, message: impl Into<String>) -> Self {
        Finding {
            severity: Severity::Warning,
            ..Finding::error(file, line, message)
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        match self.line {
            0 => write!(f, "{severity}: {}: {}", self.file, self.message),
            line => write!(f, "{severity}: {}:{line}: {}", self.file, self.message),
        }
    }
}

pub fn run(workspace: &Workspace) -> Result<(), Error> {
    let files = files::read(&workspace.root)?;
    let mut findings = Vec::new();
    for file in &files {
        findings.extend(sizes::check(file));
        findings.extend(headers::check(file));
        findings.extend(words::check(file));
        findings.extend(unsafe_places::check(file));
        findings.extend(links::check(file, &workspace.root));
    }
    findings.extend(dependency_list::check(&files));
    for finding in &findings {
        println!("{finding}");
    }
    let errors = findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error)
        .count();
    println!(
        "tidy: {} files, {errors} error(s), {} warning(s)",
        files.len(),
        findings.len() - errors
    );
    if errors > 0 {
        return Err(Error::Findings {
            check: "tidy",
            count: errors,
        });
    }
    Ok(())
}
