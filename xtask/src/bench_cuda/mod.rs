//! `cargo xtask bench-cuda`: one archive that checks and measures the CUDA backend on a machine without network.
//!
//! ```text
//! mlxcel-bench-cuda/
//!   bin/mlxcel  lib/mlxcel/plugins/...    as `dist` lays them out, optimised
//!   checkpoint.py                         writes random checkpoints of real shapes
//!   faults.py                             checks what happens when memory runs out
//!   gguf_checkpoint.py                    the same shapes as GGUF, for other programs; run by hand
//!   kernels.py  kernels/...               checks and times the kernels of a decode step by themselves
//!   run.sh                                checks, measures, prints tables
//! ```
//! The machine brings NVIDIA's driver, a Python with torch and safetensors for the checkpoints, and NVIDIA's libraries from its
//! packages (`site-packages/nvidia`). Where mlx-lm is importable it is measured on the same files in the same run.

use std::path::{Path, PathBuf};

use crate::cli::Backend;
use crate::dist::archive;
use crate::error::Error;
use crate::fetch::install::remove_tree;
use crate::plugins::{self, Request};
use crate::workspace::Workspace;

const NAME: &str = "mlxcel-bench-cuda";
const HOST: &str = "mlxcel";
/// Where the kernels' texts are.
const KERNELS: &str = "backends/cuda/src/kernels";
/// Scripts of the bundle, by name.
const SCRIPTS: [(&str, &str); 5] = [
    ("checkpoint.py", include_str!("checkpoint.py")),
    ("faults.py", include_str!("faults.py")),
    ("gguf_checkpoint.py", include_str!("gguf_checkpoint.py")),
    ("kernels.py", include_str!("kernels.py")),
    ("run.sh", include_str!("run.sh")),
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
    let bin = folder.join("bin");
    std::fs::create_dir_all(&bin).map_err(Error::io("create", &bin))?;
    let host = workspace.profile_dir(true).join(HOST);
    std::fs::copy(&host, bin.join(HOST)).map_err(Error::io("copy", &host))?;
    for (name, text) in SCRIPTS {
        write(&folder.join(name), text)?;
    }
    copy_kernels(&workspace.root.join(KERNELS), &folder.join("kernels"))?;
    archive::pack(&home, NAME)
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
