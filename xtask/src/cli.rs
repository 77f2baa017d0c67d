//! The command line: what can be asked, nothing of how it is done.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::backend::Backend;
use crate::mlx::whole::Depth;
use crate::peers::args::{PeersArgs, ServerArgs, SoakArgs};
use crate::plugins::{Content, Request};

/// Development commands of mlxcel.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Fetch MLX's official library into target/mlx, or check the one that MLX_ROOT names
    Setup {
        /// Which build of MLX: cpu, cuda (= cuda13), cuda13, cuda12 or metal
        #[arg(long, value_parser = Backend::parse, default_value_t = Backend::Cpu)]
        backend: Backend,
    },
    /// Build the plugins and lay them out as the host finds them
    Plugins(PluginArgs),
    /// Fetch the small real model of the demo and the tests into target/models
    Model,
    /// From a fresh clone to an answer: setup, model, build, run
    Demo {
        /// What to ask the model
        #[arg(
            short,
            long,
            default_value = "What is the capital of France? Answer in one sentence."
        )]
        prompt: String,
    },
    /// Everything that CI checks, in its order
    Test(TestArgs),
    /// Sizes, headers, words, unsafe code, links and the dependency list of the source tree
    Tidy,
    /// Which crate may depend on which, and what built plugins export
    Deps,
    /// The kernels' tests under AddressSanitizer
    Sanitize,
    /// Licences, bans and sources of third-party crates (cargo-deny)
    Deny {
        /// Check for known vulnerabilities too; this fetches a database from the network
        #[arg(long)]
        advisories: bool,
    },
    /// Assemble a folder and an archive that can be given to others
    Dist {
        /// Backends to include (repeatable): cpu, cuda (= cuda13), cuda13, cuda12 or metal
        #[arg(long, value_parser = Backend::parse, default_values_t = [Backend::Cpu])]
        backend: Vec<Backend>,
        /// Pack the plugin of the one backend alone, for those who have mlxcel already
        #[arg(long)]
        only_backend: bool,
    },
    /// Measure us beside llama.cpp and mlx-lm in one run, and print a table with ratios
    BenchPeers(PeersArgs),
    /// Measure our server beside llama.cpp's in one run, and print a table with ratios
    BenchServer(ServerArgs),
    /// Make a bundle that checks and measures the CUDA backend on a machine without network
    BenchCuda {
        /// Which build of MLX: cuda (= cuda13), cuda13 or cuda12
        #[arg(long, value_parser = Backend::parse_cuda, default_value_t = Backend::Cuda13)]
        backend: Backend,
    },
    /// Mixed traffic for our server for a long time; fails if it holds more afterwards
    Soak(SoakArgs),
    /// Make the table of architectures in families/README.md from what the goldens' tests measured
    Families {
        /// Compare instead of writing; a difference is an error
        #[arg(long)]
        check: bool,
    },
    /// Write abi/surface.txt, the text form of the plugin interface
    AbiDump {
        /// Compare instead of writing; a difference is an error
        #[arg(long)]
        check: bool,
    },
}

#[derive(Debug, Args)]
pub struct PluginArgs {
    /// Optimised build
    #[arg(long)]
    pub release: bool,
    /// Where to lay the packages out, instead of `plugins` in the folder of the profile under target
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Backends to build (repeatable): cpu, cuda (= cuda13), cuda13, cuda12 or metal
    #[arg(long, value_parser = Backend::parse, default_values_t = [Backend::Cpu])]
    pub backend: Vec<Backend>,
}

impl PluginArgs {
    pub fn request(&self) -> Request {
        Request {
            release: self.release,
            out: self.out.clone(),
            backends: self.backend.clone(),
            content: Content::Plugins,
            depth: Depth::Sizes,
        }
    }
}

#[derive(Debug, Args)]
pub struct TestArgs {
    /// Run these steps alone (repeatable)
    #[arg(long, value_name = "STEP")]
    pub only: Vec<String>,
    /// Name the steps and stop
    #[arg(long)]
    pub list: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{CUDA_NAMES, NAMES};
    use clap::CommandFactory;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_tells_every_backend_and_the_short_name_of_cuda() {
        let mut command = Cli::command();
        for name in ["setup", "plugins", "dist", "bench-cuda"] {
            let help = command
                .find_subcommand_mut(name)
                .expect("is a command")
                .render_long_help()
                .to_string();
            let names = if name == "bench-cuda" {
                CUDA_NAMES
            } else {
                NAMES
            };
            assert!(help.contains(names), "{name}: {help}");
        }
    }
}
