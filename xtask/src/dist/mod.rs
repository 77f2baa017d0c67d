//! A folder and an archive that can be given to others: the host, the plugins, their licences.
//!
//! ```text
//! mlxcel-<version>-<platform>/
//!   bin/mlxcel
//!   lib/mlxcel/plugins/<package>/...     the host looks in <its folder>/../lib/mlxcel/plugins
//!   licences/
//! ```

pub mod archive;
mod licences;

use std::path::PathBuf;

use crate::cli::Backend;
use crate::error::Error;
use crate::fetch::install::remove_tree;
use crate::plugins::{self, Request};
use crate::workspace::{Workspace, platform};

const HOST_PACKAGE: &str = "mlxcel";

/// Builds with optimisation, assembles, packs; returns the archive's path.
pub fn run(workspace: &Workspace, backends: &[Backend]) -> Result<PathBuf, Error> {
    let members = workspace.members()?;
    let host = members
        .iter()
        .find(|package| package.name == HOST_PACKAGE)
        .ok_or_else(|| Error::Missing {
            path: workspace.root.join("host"),
            remedy: format!("expected a crate called {HOST_PACKAGE}"),
        })?;
    let name = format!("{HOST_PACKAGE}-{}-{}", host.version, platform());
    let home = workspace.target.join("dist");
    let folder = home.join(&name);
    remove_tree(&folder)?;

    plugins::build_and_assemble(
        workspace,
        &Request {
            release: true,
            out: Some(folder.join("lib/mlxcel/plugins")),
            backends: backends.to_vec(),
            with_host: true,
        },
    )?;
    let bin = folder.join("bin");
    std::fs::create_dir_all(&bin).map_err(Error::io("create", &bin))?;
    for target in &host.targets {
        if target.kind.iter().any(|kind| kind == "bin") {
            let file = format!("{}{}", target.name, std::env::consts::EXE_SUFFIX);
            let from = workspace.profile_dir(true).join(&file);
            std::fs::copy(&from, bin.join(&file)).map_err(Error::io("copy", &from))?;
        }
    }
    licences::collect(workspace, backends, &folder.join("licences"))?;
    archive::pack(&home, &name)
}
