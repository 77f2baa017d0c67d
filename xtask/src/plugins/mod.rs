//! Building the plugins and laying them out as the host finds them: one folder per package, its libraries inside.
//!
//! ```text
//! plugins/mlxcel-family-llama/libmlxcel_family_llama.so
//! plugins/mlxcel-backend-cpu/libmlxcel_backend_cpu.so      finds libmlx through $ORIGIN/mlx/lib
//!                            mlx/lib/libmlx.so             finds the rest through $ORIGIN/../../mlx_cpu.libs
//!                            mlx_cpu.libs/...
//! ```
//! The relation inside a backend's package is the one of MLX's wheel, so no library has to be rewritten, and the folder works
//! wherever it is copied. Which packages there are is read from the workspace: a new folder under `families/` is enough.

pub mod build;
pub mod linkage;
pub mod place;
pub mod select;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::backend::Backend;
use crate::error::Error;
use crate::fetch::install;
use crate::mlx::whole::Depth;
use crate::mlx::{self, MlxTree};
use crate::plugins::build::Built;
use crate::plugins::place::Placement;
use crate::plugins::select::{Kind, Selection};
use crate::workspace::Workspace;

/// NVIDIA's libraries, which users put or link into a package for want of another place: gigabytes, and not ours to remove.
const OF_THE_USER: [&str; 1] = ["nvidia"];

/// What to build and where to.
#[derive(Debug)]
pub struct Request {
    pub release: bool,
    /// `target/<profile>/plugins` if not given.
    pub out: Option<PathBuf>,
    pub backends: Vec<Backend>,
    pub content: Content,
    /// How closely MLX is looked at before it is copied.
    pub depth: Depth,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// The named backends alone.
    Backends,
    /// Every family too.
    Plugins,
    /// And the host's binaries, built in the same go.
    PluginsAndHost,
}

/// Where `cargo xtask plugins` puts the packages of a profile when nothing else is asked.
pub fn default_dir(workspace: &Workspace, release: bool) -> PathBuf {
    workspace.profile_dir(release).join("plugins")
}

/// A request that can be met: everything that could be refused was looked at, and nothing was built or removed yet.
#[derive(Debug)]
pub struct Plan<'a> {
    workspace: &'a Workspace,
    request: &'a Request,
    selection: Selection,
    pub trees: Vec<(Backend, MlxTree)>,
}

pub fn plan<'a>(workspace: &'a Workspace, request: &'a Request) -> Result<Plan<'a>, Error> {
    let members = workspace.members()?;
    let selection = Selection::of(
        &members,
        &workspace.root,
        &request.backends,
        request.content != Content::Backends,
    )?;
    mlx::check_pinned(workspace, &request.backends)?;
    let mut trees: Vec<(Backend, MlxTree)> = Vec::new();
    for backend in &request.backends {
        if trees.iter().all(|(there, _)| there != backend) {
            trees.push((*backend, mlx::setup(workspace, *backend, request.depth)?));
        }
    }
    if let Some(dir) = &request.out {
        install::writable(dir)?;
    }
    Ok(Plan {
        workspace,
        request,
        selection,
        trees,
    })
}

impl Plan<'_> {
    /// Names of the crates that are built.
    pub fn crates(&self) -> impl Iterator<Item = &str> {
        let host = (self.request.content == Content::PluginsAndHost).then_some(build::HOST_PACKAGE);
        let plugins = self.selection.plugins.iter();
        host.into_iter()
            .chain(plugins.map(|plugin| plugin.package.as_str()))
    }

    pub fn build(&self) -> Result<Vec<Built>, Error> {
        build::run(self.workspace, &self.selection, self.request)
    }

    /// Copies what changed to `out`, and checks that every library is found.
    pub fn assemble(&self, built: &[Built], out: &Path) -> Result<(), Error> {
        for plugin in built {
            let tree = self
                .trees
                .iter()
                .find(|(backend, _)| plugin.kind == Kind::Backend(*backend))
                .map(|(_, tree)| tree);
            assemble(plugin, tree, out)?;
        }
        Ok(())
    }
}

/// Builds and lays out; returns the plugins folder.
pub fn build_and_assemble(workspace: &Workspace, request: &Request) -> Result<PathBuf, Error> {
    let plan = plan(workspace, request)?;
    let built = plan.build()?;
    let out = match &request.out {
        Some(dir) => std::path::absolute(dir).map_err(Error::io("resolve", dir))?,
        None => default_dir(workspace, request.release),
    };
    plan.assemble(&built, &out)?;
    if request.out.is_none() {
        remove_packages_of_removed_crates(&out, &plan.selection.all_packages)?;
    }
    Ok(out)
}

/// `mlx` for a backend only.
fn assemble(plugin: &Built, mlx: Option<&MlxTree>, out: &Path) -> Result<(), Error> {
    let package = out.join(&plugin.package);
    let mut placements = vec![Placement {
        from: plugin.library.clone(),
        to: package.join(name_of(&plugin.library)),
    }];
    if let Some(tree) = mlx {
        for file in tree.runtime_files()? {
            placements.push(Placement {
                to: package.join(&file.placed),
                from: file.source,
            });
        }
    }
    place::all(&package, &placements, &OF_THE_USER)?;
    linkage::check(&package.join(name_of(&plugin.library)), &package)
}

/// A crate that was removed or renamed would stay visible to the host; packages of others are left alone.
fn remove_packages_of_removed_crates(out: &Path, existing: &BTreeSet<String>) -> Result<(), Error> {
    for entry in std::fs::read_dir(out).map_err(Error::io("list", out))? {
        let path = entry.map_err(Error::io("list", out))?.path();
        let name = name_of(&path).to_string_lossy().into_owned();
        let ours = name.starts_with("mlxcel-family-") || name.starts_with("mlxcel-backend-");
        if ours && !existing.contains(&name) {
            install::remove_tree(&path)?;
        }
    }
    Ok(())
}

fn name_of(path: &Path) -> &std::ffi::OsStr {
    path.file_name().unwrap_or_default()
}
