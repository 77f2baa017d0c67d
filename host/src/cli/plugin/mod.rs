//! `mlxcel plugin list|show|verify`.

mod list;
mod show;
mod verify;

use clap::Subcommand;
use mlxcel_registry::plugin::PluginRecord;
use serde_json::{Value, json};

use super::args::LogArgs;
use super::console::Console;
use super::error::CliError;
use super::exit::Exit;

/// Commands about plugins.
#[derive(Debug, Subcommand)]
pub enum PluginCommand {
    /// List every plugin found, with its state and the reason where it cannot be used
    List(list::ListArgs),
    /// Show all that a plugin's file says
    Show(show::ShowArgs),
    /// Load a plugin file, or all of a folder, and say whether this host can use it
    Verify(verify::VerifyArgs),
}

impl PluginCommand {
    pub(super) fn log(&self) -> LogArgs {
        match self {
            Self::List(args) => args.log,
            Self::Show(args) => args.log,
            Self::Verify(args) => args.log,
        }
    }
}

/// Runs the command.
pub fn run(command: &PluginCommand, console: &Console) -> Result<Exit, CliError> {
    match command {
        PluginCommand::List(args) => list::run(args, console),
        PluginCommand::Show(args) => show::run(args, console),
        PluginCommand::Verify(args) => verify::run(args, console),
    }
}

/// `kind/name`, as far as known.
fn label(record: &PluginRecord) -> String {
    match record.kind() {
        Some(kind) => format!("{kind}/{}", record.name()),
        None if record.name().is_empty() => "?".to_owned(),
        None => record.name().to_owned(),
    }
}

/// The ABI that a plugin was built at.
fn abi_text(record: &PluginRecord) -> String {
    record.info().map_or_else(
        || "-".to_owned(),
        |info| format!("{}.{}", info.abi[0], info.abi[1]),
    )
}

fn version_text(record: &PluginRecord) -> String {
    record
        .info()
        .map_or_else(|| "-".to_owned(), |info| info.version.to_string())
}

/// What all commands say of a plugin's identity.
fn identity(record: &PluginRecord) -> Value {
    json!({
        "name": record.name(),
        "kind": record.kind().map(|kind| kind.name()),
        "path": record.path.to_string_lossy(),
        "version": record.info().map(|info| info.version.to_string()),
    })
}
