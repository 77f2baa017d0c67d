//! `cargo xtask bench-cuda`: one archive that checks and measures the CUDA backend on a machine without network.
//!
//! ```text
//! mlxcel-bench-cuda/
//!   bin/mlxcel  lib/mlxcel/plugins/...    as `dist` lays them out, optimised
//!   bin/conformance  conformance.py       the conformance suite on the device, in several processes
//!   checkpoint.py                         writes random checkpoints of real shapes
//!   deterministic.py                      checks that answers with --deterministic depend on their request alone
//!   faults.py                             checks what happens when memory runs out
//!   gguf_checkpoint.py                    the same shapes as GGUF, for llama.cpp
//!   kernels.py  kernels/...               checks and times the kernels of a decode step by themselves
//!   mixture.py                            the same for those of a mixture of experts
//!   mlx_lm_speed.py                       mlx-lm on one of the checkpoints, within a time
//!   run.sh                                checks, measures, prints the table
//!   split.py                              checks that a model on two devices answers as on one
//!   table.py                              us, both peers, goals and limits, of what run.sh wrote
//! ```
//! The machine brings NVIDIA's driver, a Python with torch and safetensors for the checkpoints, and NVIDIA's libraries from its
//! packages (`site-packages/nvidia`). Where mlx-lm is importable it is measured on the same files in the same run.

use std::path::{Path, PathBuf};

use crate::cli::Backend;
use crate::dist::archive;
use crate::error::Error;
use crate::fetch::install::remove_tree;
use crate::plugins::{self, Request};
use crate::process::Run;
use crate::workspace::Workspace;

const NAME: &str = "mlxcel-bench-cuda";
const HOST: &str = "mlxcel";
/// Runs cases of the conformance suite on a plugin.
const CONFORMANCE: &str = "conformance";
/// Where the kernels' texts are.
const KERNELS: &str = "backends/cuda/src/kernels";
/// Scripts of the bundle, by name.
const SCRIPTS: [(&str, &str); 11] = [
    ("checkpoint.py", include_str!("checkpoint.py")),
    ("conformance.py", include_str!("conformance.py")),
    ("deterministic.py", include_str!("deterministic.py")),
    ("faults.py", include_str!("faults.py")),
    ("gguf_checkpoint.py", include_str!("gguf_checkpoint.py")),
    ("kernels.py", include_str!("kernels.py")),
    ("mixture.py", include_str!("mixture.py")),
    ("mlx_lm_speed.py", include_str!("mlx_lm_speed.py")),
    ("run.sh", include_str!("run.sh")),
    ("split.py", include_str!("split.py")),
    ("table.py", include_str!("table.py")),
];

/// Builds with optimisation, assembles, packs; returns the archive's path.
pub fn run(workspace: &Workspace, backend: Backend) -> Result<PathBuf, Error> {
    let home = workspace.target.join("bench-cuda");
    let folder = home.join(NAME);
    remove_tree(&folder)?;
    plugins::build_and_assemble(
        workspace,
        &Request {
            release: true,
            out: Some(folder.join("lib/mlxcel/plugins")),
            backends: vec![backend],
            with_host: true,
        },
    )?;
    build_conformance(workspace)?;
    let bin = folder.join("bin");
    std::fs::create_dir_all(&bin).map_err(Error::io("create", &bin))?;
    for name in [HOST, CONFORMANCE] {
        let built = workspace.profile_dir(true).join(name);
        std::fs::copy(&built, bin.join(name)).map_err(Error::io("copy", &built))?;
    }
    for (name, text) in SCRIPTS {
        write(&folder.join(name), text)?;
    }
    copy_kernels(&workspace.root.join(KERNELS), &folder.join("kernels"))?;
    archive::pack(&home, NAME)
}

fn build_conformance(workspace: &Workspace) -> Result<(), Error> {
    let build = Run::cargo("build").args(["--release", "-p", "mlxcel-tests", "--bin", CONFORMANCE]);
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
mod tests {
    use super::SCRIPTS;

    #[test]
    fn the_bundle_runs_the_scripts_it_holds() {
        let run = SCRIPTS
            .iter()
            .find(|(name, _)| *name == "run.sh")
            .map_or("", |(_, text)| text);
        for (name, _) in SCRIPTS {
            assert!(name == "run.sh" || run.contains(name), "{name}");
        }
    }
}
