//! `mlxcel rm`: removes models from the store, and only from there.

use std::io::IsTerminal;

use clap::Args;
use mlxcel_registry::store::{HubRef, RepoId, Store};

use super::args::{LogArgs, StoreArgs};
use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use super::place::open_store;
use super::table::bytes_text;

/// Flags of `rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// `owner/name` or `name`; several may be given
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Do not ask
    #[arg(short, long)]
    yes: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

/// Runs the command.
pub fn run(args: &RmArgs, console: &Console) -> Result<Exit, CliError> {
    let store = open_store(&args.store)?;
    let ids: Vec<RepoId> = args
        .names
        .iter()
        .map(|name| repository(&store, name))
        .collect::<Result<_, _>>()?;
    if !args.yes {
        if !std::io::stdin().is_terminal() {
            return Err(CliError::usage(
                "rm asks before it removes, and stdin is not a terminal: add --yes",
            ));
        }
        let names: Vec<String> = ids.iter().map(ToString::to_string).collect();
        let answer = console.ask(&format!(
            "remove {} from {}? [y/N]",
            names.join(", "),
            store.root()?.display()
        ))?;
        if !matches!(answer.trim(), "y" | "Y" | "yes") {
            console.note("nothing was removed");
            return Ok(Exit::Failure);
        }
    }
    for id in &ids {
        let removed = store.remove(id)?;
        console.note(format_args!(
            "removed {id}: {} freed",
            bytes_text(removed.freed_bytes)
        ));
    }
    Ok(Exit::Success)
}

/// A single file of a repository is not removed on its own.
fn repository(store: &Store, name: &str) -> Result<RepoId, CliError> {
    let reference = HubRef::parse(name, &store.env().default_org)?;
    match reference.gguf {
        None => Ok(reference.id),
        Some(file) => Err(CliError::usage(format!(
            "rm removes a whole repository and not the single file {file}: use `mlxcel rm {}`",
            reference.id
        ))),
    }
}
