//! `mlxcel doctor`: what is installed, what of it works, and what to do about the rest.
//!
//! Works with no plugin at all, with broken ones, and without a home directory: what cannot be found out is a line of the
//! report and never the end of it.

mod findings;
mod report;

use clap::Args;

use super::args::{LogArgs, PluginArgs, StoreArgs};
use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use findings::Findings;

/// Flags of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Write JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    plugins: PluginArgs,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

/// Runs the command. The code is 0 when at least one backend and one family can be used.
pub fn run(args: &DoctorArgs, console: &Console) -> Result<Exit, CliError> {
    let findings = Findings::collect(args)?;
    match args.json {
        true => console.json(&report::document(&findings))?,
        false => console.block(&report::text(&findings))?,
    }
    match findings.is_ready() {
        true => Ok(Exit::Success),
        false => Ok(Exit::Failure),
    }
}
