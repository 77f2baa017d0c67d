//! The `mlxcel` command: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    mlxcel::cli::main()
}
