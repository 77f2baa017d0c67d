//! `mlxcel plugin verify`: takes plugins through every stage of loading, from the peek to the handshake.
//!
//! What a third party puts into its CI, where a backend's device may be absent: that it finds none is told and is no failure. Filters and other places play no part: only what is named is examined.

use std::path::PathBuf;

use clap::Args;
use mlxcel_registry::plugin::{
    Catalogue, HostProfile, PluginKind, PluginRecord, Rejection, SearchInputs,
};
use serde_json::{Value, json};

use crate::plugin::{Loader, ProbeOutcome};

use super::super::args::LogArgs;
use super::super::console::Console;
use super::super::error::CliError;
use super::super::exit::Exit;
use super::super::place::loader;
use super::super::table::Table;
use super::{abi_text, identity, label, version_text};

/// Flags of `plugin verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Plugin files, or folders of them
    #[arg(required = true, value_name = "FILE|DIR")]
    paths: Vec<PathBuf>,
    /// Write JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

/// What became of one plugin.
struct Verdict<'a> {
    record: &'a PluginRecord,
    outcome: Result<ProbeOutcome, Failure>,
}

impl Verdict<'_> {
    /// A backend in order that finds nothing to compute on here: as it should be on machines that build and check plugins.
    fn is_idle(&self) -> bool {
        let outcome = self.outcome.as_ref().ok();
        outcome
            .and_then(|outcome| outcome.backend.as_ref())
            .is_some_and(|report| report.score == 0)
    }
}

/// Where it ended, with the loader's code where there is one.
struct Failure {
    stage: &'static str,
    code: &'static str,
    reason: String,
}

impl From<Rejection> for Failure {
    fn from(rejection: Rejection) -> Self {
        Self {
            stage: rejection.stage.name(),
            code: rejection.code.name(),
            reason: rejection.text,
        }
    }
}

pub(super) fn run(args: &VerifyArgs, console: &Console) -> Result<Exit, CliError> {
    let (dirs, files) = args.paths.iter().cloned().partition(|path| path.is_dir());
    let inputs = SearchInputs {
        files,
        dirs,
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT)?;
    if let Some(note) = catalogue.notes().iter().find(|note| note.is_notable()) {
        return Err(CliError::usage(note.text.clone()));
    }
    if catalogue.records().is_empty() {
        return Err(CliError::usage(
            "no plugin files there: expected libmlxcel_{family,backend}_NAME in the folder or one level below",
        ));
    }
    let loader = loader()?;
    let verdicts: Vec<Verdict<'_>> = catalogue
        .records()
        .iter()
        .map(|record| Verdict {
            record,
            outcome: examine(record, &loader),
        })
        .collect();
    match args.json {
        true => console
            .json(&json!({ "plugins": verdicts.iter().map(value).collect::<Vec<Value>>() }))?,
        false => console.block(&text(&verdicts))?,
    }
    let idle: Vec<String> = verdicts
        .iter()
        .filter(|verdict| verdict.is_idle())
        .map(|verdict| label(verdict.record))
        .collect();
    if !idle.is_empty() {
        console.note(format!(
            "this command asks whether a plugin can be loaded, `mlxcel doctor` whether it can compute here, which {} cannot",
            idle.join(", ")
        ));
    }
    let bad = verdicts
        .iter()
        .filter(|verdict| verdict.outcome.is_err())
        .count();
    match bad {
        0 => Ok(Exit::Success),
        bad => Err(CliError::Unverified {
            bad,
            total: verdicts.len(),
        }),
    }
}

/// The stages in order: peek (done by the catalogue), probe in a child, load into this process.
fn examine(record: &PluginRecord, loader: &Loader) -> Result<ProbeOutcome, Failure> {
    if let mlxcel_registry::plugin::State::Rejected(rejection) = &record.state {
        return Err(rejection.clone().into());
    }
    if let Some(reason) = record.state.reason() {
        return Err(Failure {
            stage: "peek",
            code: record.state.name(),
            reason,
        });
    }
    let missing = || Failure {
        stage: "probe",
        code: "probe_failed",
        reason: "no child process was started".to_owned(),
    };
    let outcome = loader.probe(record).ok_or_else(missing)??;
    let loaded = match record.kind() {
        Some(PluginKind::Backend) => loader.load_backend(record).map(drop),
        _ => loader.load_family(record).map(drop),
    };
    match loaded {
        Ok(()) => Ok(outcome),
        Err(error) => Err(match error.rejection() {
            Some(rejection) => rejection.clone().into(),
            None => Failure {
                stage: "link",
                code: "link_error",
                reason: error.to_string(),
            },
        }),
    }
}

fn value(verdict: &Verdict<'_>) -> Value {
    let mut value = identity(verdict.record);
    let Some(object) = value.as_object_mut() else {
        return value;
    };
    let mut put = |key: &str, entry: Value| object.insert(key.to_owned(), entry);
    match &verdict.outcome {
        Ok(outcome) => {
            put("ok", json!(true));
            put("abi_minor", json!(outcome.abi_minor));
            if let Some(report) = &outcome.backend {
                put("probe", json!(report));
            }
        }
        Err(failure) => {
            put("ok", json!(false));
            put("stage", json!(failure.stage));
            put("code", json!(failure.code));
            put("reason", json!(failure.reason));
        }
    }
    value
}

fn text(verdicts: &[Verdict<'_>]) -> String {
    let mut table = Table::new(&["PLUGIN", "VERSION", "ABI", "RESULT", "FILE"]);
    for Verdict { record, outcome } in verdicts {
        let file = record.path.display();
        let (result, file) = match outcome {
            Ok(ProbeOutcome {
                backend: Some(report),
                ..
            }) => (
                match report.score {
                    0 => "ok, but not here".to_owned(),
                    _ => "ok".to_owned(),
                },
                format!("{file}: score {}, {}", report.score, report.reason),
            ),
            Ok(_) => ("ok".to_owned(), file.to_string()),
            Err(failure) => (
                format!("failed at {}", failure.stage),
                format!("{file}: {}", failure.reason),
            ),
        };
        table.row([
            label(record),
            version_text(record),
            abi_text(record),
            result,
            file,
        ]);
    }
    table.render()
}
