//! The child's side of a probe: `mlxcel __probe FILE`.
//!
//! Everything that may go wrong when a library is opened goes wrong here, in a process that may die of it.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use mlxcel_registry::plugin::{HostProfile, PluginKind, ReasonCode, Rejection, Stage, peek};

use super::loader::{backend_plugin, open_here};
use super::probe::{ANSWER_MARK, Answer, ProbeOutcome};

/// First argument by which the program knows that it is the child of a probe.
pub const PROBE_COMMAND: &str = "__probe";

/// Opens the plugin at `file`, asks a backend what it finds, and writes the answer to `out` as one marked line of
/// JSON. The exit code is 0 for a good plugin and 1 for a refused one.
pub fn probe_child_main(file: &Path, out: &mut dyn Write) -> ExitCode {
    no_core_dumps();
    let answer = match examine(file) {
        Ok(outcome) => Answer::Good(outcome),
        Err(rejection) => Answer::Refused(rejection),
    };
    let written = serde_json::to_string(&answer)
        .map_err(std::io::Error::from)
        // The line starts afresh because the plugin may have left one unfinished on the same stream.
        .and_then(|json| writeln!(out, "\n{ANSWER_MARK}{json}").and_then(|()| out.flush()));
    match (answer, written) {
        (Answer::Good(_), Ok(())) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

fn examine(file: &Path) -> Result<ProbeOutcome, Rejection> {
    let peeked = peek(file, HostProfile::CURRENT);
    if let Some(rejection) = peeked.rejection {
        return Err(rejection);
    }
    let info = peeked
        .metadata
        .map(|metadata| metadata.plugin)
        .ok_or_else(|| Rejection::peek(ReasonCode::NotAPlugin, "has no plugin metadata"))?;
    let opened = open_here(file, &info)?;
    let (kind, abi_minor) = (opened.kind, opened.abi_minor);
    let backend = match kind {
        PluginKind::Family => None,
        PluginKind::Backend => {
            let report = backend_plugin(file, opened)?.probe().map_err(|error| {
                let code = match error.is_panic() {
                    true => ReasonCode::Panicked,
                    false => ReasonCode::ProbeFailed,
                };
                let text = format!("its probe failed: {}", error.error);
                Rejection::new(Stage::Probe, code, text)
            })?;
            Some(report)
        }
    };
    Ok(ProbeOutcome {
        name: info.name,
        version: info.version.to_string(),
        abi_minor,
        backend,
    })
}

/// A plugin that crashes is an answer, not something to keep gigabytes of.
fn no_core_dumps() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    if let Err(error) = setrlimit(Resource::Core, none) {
        tracing::debug!(%error, "core dumps could not be switched off");
    }
}
