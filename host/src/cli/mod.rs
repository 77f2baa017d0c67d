//! The command line: arguments, commands, terminal, exit codes.
//!
//! Each command is a file that turns flags into calls of the registry and the engine and their answers into text.
//! Results go to stdout, everything else to stderr (`console`); what a failure means for the exit code is in `error` and
//! `exit`. Must not know any architecture or device.

mod arch;
mod args;
mod bench;
mod console;
mod doctor;
mod download;
mod error;
mod exit;
mod generate;
mod generation;
mod inspect;
mod inspect_values;
mod interrupt;
mod kv_type;
mod list;
mod logging;
mod memory;
mod place;
mod plugin;
mod probe;
mod progress;
mod rank;
mod repl;
mod rm;
mod run;
mod sampling;
mod serve;
mod session;
mod table;

use std::process::ExitCode;

use clap::Parser;
use clap::error::{ContextKind, ContextValue};

use crate::engine::RANK_COMMAND;
use crate::plugin::PROBE_COMMAND;

use args::{Cli, Command};
use console::Console;
use error::CliError;
use exit::Exit;

pub use serve::server_main;

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(error),
    };
    if let Command::Probe(args) = &cli.command {
        return probe::run(args);
    }
    if matches!(cli.command, Command::Rank) {
        return rank::run();
    }
    let log = cli.command.log();
    let console = Console::new(log.quiet);
    let outcome = logging::start(log.verbose).and_then(|()| run(&cli.command, &console));
    report(outcome, &console)
}

/// Help, or what is wrong with the arguments.
fn usage(mut error: clap::Error) -> ExitCode {
    // The commands for this program's own children are no suggestion for people.
    if let Some(ContextValue::Strings(mut names)) = error.remove(ContextKind::SuggestedSubcommand) {
        names.retain(|name| name != PROBE_COMMAND && name != RANK_COMMAND);
        if !names.is_empty() {
            error.insert(
                ContextKind::SuggestedSubcommand,
                ContextValue::Strings(names),
            );
        }
    }
    let exit = if error.use_stderr() {
        Exit::Usage
    } else {
        Exit::Success
    };
    // Help that nobody reads to its end is no failure.
    let _ = error.print();
    exit.into()
}

/// Tells how it went.
fn report(outcome: Result<Exit, CliError>, console: &Console) -> ExitCode {
    match outcome {
        Ok(exit) => exit.into(),
        Err(error) => {
            if !error.is_silent() {
                console.error(&error);
            }
            error.exit().into()
        }
    }
}

fn run(command: &Command, console: &Console) -> Result<Exit, CliError> {
    match command {
        Command::Run(args) => run::run(args, console),
        Command::Generate(args) => generate::run(args, console),
        Command::Serve(args) => serve::run(args, console),
        Command::List(args) => list::run(args, console),
        Command::Rm(args) => rm::run(args, console),
        Command::Download(args) => download::run(args, console),
        Command::Inspect(args) => inspect::run(args, console),
        Command::Arch(args) => arch::run(args, console),
        Command::Plugin(command) => plugin::run(command, console),
        Command::Bench(args) => bench::run(args, console),
        Command::Doctor(args) => doctor::run(args, console),
        // Answered before anything else was set up.
        Command::Probe(_) | Command::Rank => Ok(Exit::Success),
    }
}
