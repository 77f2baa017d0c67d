//! `cargo xtask bench-cuda`: one archive that checks and measures the CUDA backend on a machine without network.
//!
//! ```text
//! mlxcel-bench-cuda/
//!   README.txt                            what this is and needs, its commands, how long they take; libraries that the machine must have
//!   VERSION                               the commit that it was built from
//!   bin/mlxcel  lib/mlxcel/plugins/...    as `dist` lays them out, optimised
//!   bin/conformance  conformance.py       the conformance suite on the device, in several processes
//!   checkpoint.py                         writes random checkpoints of real shapes
//!   deterministic.py                      checks that answers with --deterministic depend on their request alone
//!   faults.py                             checks what happens when memory runs out
//!   gguf_checkpoint.py                    the same shapes as GGUF, for llama.cpp
//!   kernels.py  kernels/...               checks and times the kernels of a decode step by themselves
//!   licences/                             of everything that is in here
//!   machine.py                            which devices the bundle's own backend can use, and what is missing
//!   mixture.py                            checks and times those of a mixture of experts
//!   mlx_lm_speed.py                       mlx-lm on one of the checkpoints, within a time
//!   run.sh                                checks, measures, prints the table
//!   split.py                              checks that a model on two devices answers as on one
//!   table.py                              us, both peers, goals and limits, of what run.sh wrote
//! ```
//! The machine brings NVIDIA's driver, a Python with torch and safetensors for the checkpoints, and NVIDIA's libraries from its
//! packages (`site-packages/nvidia`). Where mlx-lm is importable it is measured on the same files in the same run.

use std::path::{Path, PathBuf};

use crate::backend::Backend;
use crate::dist::product::Product;
use crate::dist::{licences, readme};
use crate::error::Error;
use crate::mlx::whole::Depth;
use crate::plugins::{self, Content, Plan, Request};
use crate::process::Run;
use crate::workspace::{Origin, Workspace, in_ci};

const NAME: &str = "mlxcel-bench-cuda";
const HOST: &str = "mlxcel";
/// Runs cases of the conformance suite on a plugin.
const CONFORMANCE: &str = "conformance";
/// The crate of that program.
const TESTS: &str = "mlxcel-tests";
/// Where the kernels' texts are.
const KERNELS: &str = "backends/cuda/src/kernels";
/// The commit, for the head of the table.
const VERSION: &str = "VERSION";
/// What the bundle's README says of it.
const ABOUT: &str = include_str!("README.txt");
/// Scripts of the bundle, by name.
const SCRIPTS: [(&str, &str); 12] = [
    ("checkpoint.py", include_str!("checkpoint.py")),
    ("conformance.py", include_str!("conformance.py")),
    ("deterministic.py", include_str!("deterministic.py")),
    ("faults.py", include_str!("faults.py")),
    ("gguf_checkpoint.py", include_str!("gguf_checkpoint.py")),
    ("kernels.py", include_str!("kernels.py")),
    ("machine.py", include_str!("machine.py")),
    ("mixture.py", include_str!("mixture.py")),
    ("mlx_lm_speed.py", include_str!("mlx_lm_speed.py")),
    ("run.sh", include_str!("run.sh")),
    ("split.py", include_str!("split.py")),
    ("table.py", include_str!("table.py")),
];

/// Builds with optimisation, assembles, packs; returns the archive's path.
pub fn run(workspace: &Workspace, backend: Backend) -> Result<PathBuf, Error> {
    let request = Request {
        release: true,
        out: None,
        backends: vec![backend],
        content: Content::PluginsAndHost,
        depth: Depth::Contents,
    };
    // What stands in the way of it is found before anything is built or removed.
    let plan = plugins::plan(workspace, &request)?;
    let origin = workspace.origin()?;
    let product = Product::begin(&workspace.target.join("bench-cuda"), NAME)?;
    let built = plan.build()?;
    build_conformance(workspace, &plan)?;
    let folder = product.folder();
    let plugins = folder.join("lib/mlxcel/plugins");
    plan.assemble(&built, &plugins)?;
    let bin = folder.join("bin");
    std::fs::create_dir_all(&bin).map_err(Error::io("create", &bin))?;
    for name in [HOST, CONFORMANCE] {
        let built = workspace.profile_dir(true).join(name);
        std::fs::copy(&built, bin.join(name)).map_err(Error::io("copy", &built))?;
    }
    for (name, text) in SCRIPTS {
        write(&folder.join(name), text)?;
    }
    write(&folder.join(VERSION), &version(&origin))?;
    copy_kernels(&workspace.root.join(KERNELS), &folder.join("kernels"))?;
    licences::collect(workspace, &plan, &[TESTS], &folder.join("licences"))?;
    let about = readme::About {
        title: format!("{NAME}: checks and measures mlxcel's CUDA backend"),
        content: ABOUT,
        origin: &origin,
        plugins: &plugins,
        within: &folder,
    };
    readme::write(workspace, &plan, &built, &about)?;
    product.finish(origin.time)
}

/// What the head of the table calls the sources.
fn version(origin: &Origin) -> String {
    let commit = origin.commit.as_deref().unwrap_or("unknown");
    let changed = if origin.changed { "-changed" } else { "" };
    format!("{commit:.12}{changed}\n")
}

/// Apart from the plugins, since it asks for the test kit and they are measured as they are shipped; with their crates named all the
/// same, so that crates of others have the same features in both builds and are compiled once.
fn build_conformance(workspace: &Workspace, plan: &Plan<'_>) -> Result<(), Error> {
    let mut build = Run::cargo("build").args(["--release", "-p", TESTS]);
    for name in plan.crates() {
        build = build.args(["-p", name]);
    }
    build = build.args(["--bin", CONFORMANCE]);
    if in_ci() {
        build = build.arg("--locked");
    }
    build.dir(&workspace.root).run()?;
    Ok(())
}

fn copy_kernels(from: &Path, to: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(to).map_err(Error::io("create", to))?;
    for entry in std::fs::read_dir(from).map_err(Error::io("read", from))? {
        let path = entry.map_err(Error::io("read", from))?.path();
        if let Some(name) = path.file_name() {
            std::fs::copy(&path, to.join(name)).map_err(Error::io("copy", &path))?;
        }
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text).map_err(Error::io("write", path))
}

#[cfg(test)]
mod run_tests;

#[cfg(test)]
mod tests {
    use super::{SCRIPTS, VERSION};

    #[test]
    fn the_bundle_runs_the_scripts_it_holds() {
        let run = SCRIPTS
            .iter()
            .find(|(name, _)| *name == "run.sh")
            .map_or("", |(_, text)| text);
        assert!(run.contains(VERSION));
        for (name, _) in SCRIPTS {
            assert!(name == "run.sh" || run.contains(name), "{name}");
        }
    }
}
