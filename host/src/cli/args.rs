//! The command line as types: the commands and the groups of flags that several of them share.
//!
//! A flag exists when it works. What is not there is refused by name, by the parser.

use std::path::PathBuf;
use std::sync::OnceLock;

use clap::{Args, Parser, Subcommand};

use super::{
    arch, bench, doctor, download, generate, inspect, list, plugin, probe, rm, run, serve,
};

/// Version of the product. The plugin interface has one of its own.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What `mlxcel --version` prints after the name.
fn long_version() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    let (major, minor) = (
        mlxcel_abi::version::ABI_MAJOR,
        mlxcel_abi::version::ABI_MINOR,
    );
    TEXT.get_or_init(|| format!("{VERSION} (plugin ABI {major}.{minor})"))
}

/// Runs language models through plugins.
#[derive(Debug, Parser)]
#[command(
    name = "mlxcel",
    version = long_version(),
    disable_help_subcommand = true,
    propagate_version = false,
    after_help = "Exit codes: 0 done, 1 failure, 2 usage, 3 model not found, 4 plugin or backend, 5 model files, 6 download, \
                  7 memory, 130 Ctrl-C.\nResults go to stdout, everything else to stderr."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Chat with a model, or answer one prompt
    Run(Box<run::RunArgs>),
    /// Answer one prompt and end
    #[command(visible_alias = "gen")]
    Generate(Box<generate::GenerateArgs>),
    /// Serve a model over HTTP
    Serve(Box<serve::ServeArgs>),
    /// List the models in the store
    List(list::ListArgs),
    /// Remove a model from the store
    Rm(rm::RmArgs),
    /// Download a model
    Download(download::DownloadArgs),
    /// Say whether a model fits into memory, without loading it
    Inspect(inspect::InspectArgs),
    /// List the architectures that the plugins found here can run
    Arch(arch::ArchArgs),
    /// List, show and verify plugins
    #[command(subcommand)]
    Plugin(plugin::PluginCommand),
    /// Measure the speed of a model on this machine
    Bench(bench::BenchArgs),
    /// Examine the installation and say what to do
    Doctor(doctor::DoctorArgs),
    /// Try a plugin file in this process, for a parent that waits
    #[command(name = crate::plugin::PROBE_COMMAND, hide = true)]
    Probe(probe::ProbeArgs),
    /// Compute a part of a model, for a parent that orders it
    #[command(name = crate::engine::RANK_COMMAND, hide = true)]
    Rank,
}

/// How much is written to stderr.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct LogArgs {
    /// Write log lines to stderr; MLXCEL_LOG chooses them in detail
    #[arg(short, long, conflicts_with = "quiet")]
    pub verbose: bool,
    /// Write only warnings and errors to stderr
    #[arg(short, long)]
    pub quiet: bool,
}

/// Where plugins are looked for, beside the standard places.
#[derive(Debug, Clone, Default, Args)]
pub struct PluginArgs {
    /// Look for plugins in this folder first; may be repeated
    #[arg(long, value_name = "DIR", help_heading = "Plugins")]
    pub plugins_dir: Vec<PathBuf>,
    /// Use this plugin file; may be repeated
    #[arg(long, value_name = "FILE", help_heading = "Plugins")]
    pub plugin: Vec<PathBuf>,
}

/// Where models are.
#[derive(Debug, Clone, Default, Args)]
pub struct StoreArgs {
    /// Folder of the model store, in place of MLXCEL_MODELS_DIR or the cache's `models`
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    pub models_dir: Option<PathBuf>,
}

/// Which family is taken.
#[derive(Debug, Clone, Default, Args)]
pub struct FamilyArgs {
    /// Family plugin to use, where several would do
    #[arg(long, value_name = "NAME", help_heading = "Plugins")]
    pub family: Option<String>,
}

impl Command {
    /// How much this command writes to stderr.
    pub fn log(&self) -> LogArgs {
        match self {
            Self::Run(args) => args.generation.log,
            Self::Generate(args) => args.generation.log,
            Self::Serve(args) => args.log,
            Self::List(_) | Self::Probe(_) | Self::Rank => LogArgs::default(),
            Self::Rm(args) => args.log,
            Self::Download(args) => args.log,
            Self::Inspect(args) => args.log,
            Self::Arch(args) => args.log,
            Self::Plugin(command) => command.log(),
            Self::Bench(args) => args.log,
            Self::Doctor(args) => args.log,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declaration_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
