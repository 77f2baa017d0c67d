//! `mlxcel plugin list`: every plugin in its state. Peeks at files and runs no code of theirs.

use clap::Args;
use mlxcel_registry::plugin::{Catalogue, plugins_document};

use super::super::args::{LogArgs, PluginArgs};
use super::super::console::Console;
use super::super::error::CliError;
use super::super::exit::Exit;
use super::super::place::catalogue;
use super::super::table::Table;
use super::{abi_text, label, version_text};

/// Flags of `plugin list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Write JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    plugins: PluginArgs,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

pub(super) fn run(args: &ListArgs, console: &Console) -> Result<Exit, CliError> {
    let catalogue = catalogue(&args.plugins, console)?;
    match args.json {
        true => console.json(&plugins_document(&catalogue))?,
        false => console.block(&text(&catalogue))?,
    }
    if catalogue.records().is_empty() {
        console.note("no plugin was found: `mlxcel doctor` says where they are looked for");
    }
    Ok(Exit::Success)
}

fn text(catalogue: &Catalogue) -> String {
    if catalogue.records().is_empty() {
        return String::new();
    }
    let mut table = Table::new(&["PLUGIN", "VERSION", "ABI", "STATE", "FILE"]);
    for record in catalogue.records() {
        let file = record.path.display();
        let file = match record.state.reason() {
            None => file.to_string(),
            Some(reason) => format!("{file}: {reason}"),
        };
        let state = record.state.name().to_owned();
        table.row([
            label(record),
            version_text(record),
            abi_text(record),
            state,
            file,
        ]);
    }
    table.render()
}
