//! `cargo xtask`: every command that a developer, a newcomer or CI runs, in one place.
//!
//! Owns what surrounds the code: fetching pinned files, building and laying out plugins, the checks of CI, packaging.
//! It knows the workspace through `cargo metadata` and files on disk alone; it links none of the project's crates, so it is
//! compiled in seconds and works while they are broken. The commands are described in `xtask/README.md`.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing is what these commands are for"
)]

mod abi_surface;
mod backend;
mod bench_cuda;
mod cli;
mod demo;
mod deny;
mod deps;
mod disk;
mod dist;
mod error;
mod families;
mod fetch;
mod mlx;
mod model;
mod peers;
mod plugins;
mod process;
mod sanitize;
mod testing;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command};
use crate::error::Error;
use crate::mlx::whole::Depth;
use crate::workspace::Workspace;

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut cause = std::error::Error::source(&error);
            while let Some(inner) = cause {
                eprintln!("  because: {inner}");
                cause = inner.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), Error> {
    let workspace = Workspace::find()?;
    match cli.command {
        Command::Setup { backend } => {
            let tree = mlx::setup(&workspace, backend, Depth::Contents)?;
            println!("{}", tree.root.display());
        }
        Command::Plugins(args) => {
            let out = plugins::build_and_assemble(&workspace, &args.request())?;
            println!("{}", out.display());
        }
        Command::Model => println!("{}", model::fetch(&workspace)?.display()),
        Command::Demo { prompt } => demo::run(&workspace, &prompt)?,
        Command::Test(args) => testing::run(&workspace, &args)?,
        Command::Tidy => tidy::run(&workspace)?,
        Command::Deps => deps::run(&workspace)?,
        Command::Sanitize => sanitize::run(&workspace)?,
        Command::Deny { advisories } => deny::run(&workspace, advisories)?,
        Command::Dist {
            backend,
            only_backend,
        } => {
            let archive = dist::run(&workspace, &backend, only_backend)?;
            println!("{}", archive.display());
        }
        Command::BenchPeers(args) => peers::bench(&workspace, &args)?,
        Command::BenchServer(args) => peers::bench_server(&workspace, &args)?,
        Command::BenchCuda { backend } => {
            println!("{}", bench_cuda::run(&workspace, backend)?.display());
        }
        Command::Soak(args) => peers::soak(&workspace, &args)?,
        Command::Families { check } => families::run(&workspace, check)?,
        Command::AbiDump { check } => abi_surface::run(&workspace, check)?,
    }
    Ok(())
}
