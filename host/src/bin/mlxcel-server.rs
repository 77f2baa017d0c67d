//! The `mlxcel-server` command: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    mlxcel::cli::server_main()
}
