//! The child process of a probe, as a program of its own: what `mlxcel __probe FILE` does, and nothing else.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(file) = std::env::args_os().next_back().map(PathBuf::from) else {
        return ExitCode::FAILURE;
    };
    mlxcel::plugin::probe_child_main(&file, &mut std::io::stdout())
}
