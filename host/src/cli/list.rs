//! `mlxcel list`: what is in the model store.

use clap::{Args, ValueEnum};
use mlxcel_registry::store::ListSort;
use serde_json::json;

use super::args::StoreArgs;
use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use super::place::open_store;
use super::table::{Table, bytes_text};

/// Order of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SortArg {
    /// By name
    Name,
    /// Largest first
    Size,
}

/// Flags of `list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Write JSON
    #[arg(long)]
    json: bool,
    /// Write the names only
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
    /// Write paths too
    #[arg(short, long, conflicts_with_all = ["json", "quiet"])]
    verbose: bool,
    /// Order
    #[arg(long, value_enum, default_value_t = SortArg::Name)]
    sort: SortArg,
    #[command(flatten)]
    store: StoreArgs,
}

/// Runs the command.
pub fn run(args: &ListArgs, console: &Console) -> Result<Exit, CliError> {
    let store = open_store(&args.store)?;
    let sort = match args.sort {
        SortArg::Name => ListSort::Name,
        SortArg::Size => ListSort::Size,
    };
    let listing = store.list(sort)?;
    if args.json {
        console.json(&json!(listing.models))?;
    } else if args.quiet {
        for model in &listing.models {
            console.line(&model.repo_id)?;
        }
    } else if listing.models.is_empty() {
        console.note(format_args!("no models in {}", store.root()?.display()));
    } else {
        let mut heading = vec!["NAME", "SIZE", "MODIFIED"];
        heading.extend(args.verbose.then_some("PATH"));
        let mut table = Table::new(&heading);
        for model in &listing.models {
            let row = json!(model);
            let modified = row
                .get("modified")
                .and_then(|value| value.as_str())
                .unwrap_or_default();
            // The day is enough for people; `--json` has the second.
            let day = modified.split('T').next().unwrap_or_default().to_owned();
            let mut cells = vec![model.repo_id.clone(), bytes_text(model.size_bytes), day];
            cells.extend(args.verbose.then(|| model.path.display().to_string()));
            table.row(cells);
        }
        console.block(&table.render())?;
    }
    for problem in &listing.problems {
        let size = bytes_text(problem.size_bytes);
        console.warning(format_args!(
            "{} ({size}): {}",
            problem.path.display(),
            problem.reason
        ));
    }
    Ok(Exit::Success)
}
