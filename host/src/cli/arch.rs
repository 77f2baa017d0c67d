//! `mlxcel arch`: the architectures that the plugins found here can run. Peeks at files and runs no code of theirs.

use clap::Args;
use mlxcel_registry::arch::{ArchIndex, DocumentOptions, arch_document};
use mlxcel_registry::plugin::Catalogue;

use super::args::{FamilyArgs, LogArgs, PluginArgs, VERSION};
use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use super::place::catalogue;
use super::table::{Table, counted};

/// Flags of `arch`.
#[derive(Debug, Args)]
pub struct ArchArgs {
    /// Write JSON
    #[arg(long)]
    json: bool,
    /// Write the plugins' paths too
    #[arg(long)]
    paths: bool,
    #[command(flatten)]
    family: FamilyArgs,
    #[command(flatten)]
    plugins: PluginArgs,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

/// Runs the command.
pub fn run(args: &ArchArgs, console: &Console) -> Result<Exit, CliError> {
    let catalogue = catalogue(&args.plugins, console)?;
    let index = ArchIndex::build(&catalogue, args.family.family.as_deref());
    if args.json {
        let options = DocumentOptions {
            mlxcel_version: VERSION,
            with_paths: args.paths,
        };
        console.json(&arch_document(&index, options))?;
    } else {
        console.block(&text(&index, args.paths))?;
    }
    remarks(&catalogue, &index, console);
    Ok(Exit::Success)
}

fn text(index: &ArchIndex<'_>, with_paths: bool) -> String {
    let rows = index.rows();
    if rows.is_empty() {
        return String::new();
    }
    let mut heading = vec!["ID", "CATEGORY", "MODEL TYPES", "GGUF", "PLUGIN"];
    heading.extend(with_paths.then_some("PATH"));
    let mut table = Table::new(&heading);
    for (plugin, arch, contested) in rows {
        let version = plugin
            .info()
            .map(|info| info.version.to_string())
            .unwrap_or_default();
        let conflict = if contested { " (conflict)" } else { "" };
        let mut cells = vec![
            arch.id.clone(),
            arch.category.clone(),
            arch.model_types.join(","),
            arch.gguf.join(","),
            format!("{} {version}{conflict}", plugin.name()),
        ];
        cells.extend(with_paths.then(|| plugin.path.display().to_string()));
        table.row(cells);
    }
    table.render()
}

fn remarks(catalogue: &Catalogue, index: &ArchIndex<'_>, console: &Console) {
    let unusable = catalogue
        .records()
        .iter()
        .filter(|record| !record.state.is_usable())
        .count();
    if unusable > 0 {
        let plugins = counted(unusable, "plugin");
        console.note(format_args!(
            "{plugins} cannot be used: `mlxcel plugin list` says why"
        ));
    }
    if index.rows().is_empty() {
        console.note("no family plugin was found: `mlxcel doctor` says where they are looked for");
    }
}
