//! The hidden command that a probe's child process is.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

/// The file to try.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    file: PathBuf,
}

/// Runs the command. Its answer is a protocol with the parent and not a result for people.
pub fn run(args: &ProbeArgs) -> ExitCode {
    crate::plugin::probe_child_main(&args.file, &mut std::io::stdout())
}
