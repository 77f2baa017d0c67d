//! A folder and an archive that can be given to others: the host, the plugins, their licences.
//!
//! ```text
//! mlxcel-<version>-<platform>[-<backends>]/     backends where they are not the CPU's alone
//!   README.txt                                  what this is, of which commit, what the machine must have
//!   bin/mlxcel  bin/mlxcel-server
//!   lib/mlxcel/plugins/<package>/...            the host looks in <its folder>/../lib/mlxcel/plugins
//!   licences/
//! mlxcel-backend-<device>-<version>-<platform>[-<backend>]/     with --only-backend
//!   README.txt  licences/
//!   mlxcel-backend-<device>/...                 to be copied into a folder of plugins
//! ```

mod archive;
pub mod licences;
pub mod product;
pub mod readme;

use std::path::{Path, PathBuf};

use self::product::Product;
use crate::backend::Backend;
use crate::error::Error;
use crate::mlx::whole::Depth;
use crate::plugins::build::HOST_PACKAGE;
use crate::plugins::{self, Content, Request};
use crate::workspace::{Package, Workspace, platform};

/// Builds with optimisation, assembles, packs; returns the archive's path.
pub fn run(workspace: &Workspace, backends: &[Backend], alone: bool) -> Result<PathBuf, Error> {
    if alone && backends.len() != 1 {
        return Err(Error::Refused(format!(
            "--only-backend packs the plugin of one backend: expected one --backend, found {}",
            backends.len()
        )));
    }
    let host = host(workspace)?;
    let request = Request {
        release: true,
        out: None,
        backends: backends.to_vec(),
        content: if alone {
            Content::Backends
        } else {
            Content::PluginsAndHost
        },
        depth: Depth::Contents,
    };
    let name = name(alone, &host.version, &platform(), backends);
    // What stands in the way of it is found before anything is built or removed.
    let plan = plugins::plan(workspace, &request)?;
    let origin = workspace.origin()?;
    let product = Product::begin(&workspace.target.join("dist"), &name)?;
    let built = plan.build()?;
    let folder = product.folder();
    let plugins = if alone {
        folder.clone()
    } else {
        folder.join("lib/mlxcel/plugins")
    };
    plan.assemble(&built, &plugins)?;
    if !alone {
        copy_binaries(workspace, &host, &folder.join("bin"))?;
    }
    licences::collect(workspace, &plan, &[], &folder.join("licences"))?;
    let about = readme::About {
        title: format!(
            "{name}: {}",
            if alone {
                "a backend plugin of mlxcel"
            } else {
                "mlxcel"
            }
        ),
        content: if alone {
            readme::PLUGIN
        } else {
            readme::PROGRAM
        },
        origin: &origin,
        plugins: &plugins,
        within: &folder,
    };
    readme::write(workspace, &plan, &built, &about)?;
    product.finish(origin.time)
}

fn host(workspace: &Workspace) -> Result<Package, Error> {
    let mut members = workspace.members()?;
    members.retain(|package| package.name == HOST_PACKAGE);
    members.pop().ok_or_else(|| Error::Missing {
        path: workspace.root.join("host"),
        remedy: format!("expected a crate called {HOST_PACKAGE}"),
    })
}

/// The backends are part of the name where they are not the usual one, so that no package takes another's place.
fn name(alone: bool, version: &str, platform: &str, backends: &[Backend]) -> String {
    let mut backends = backends.to_vec();
    backends.sort();
    backends.dedup();
    let what = match backends.first() {
        Some(backend) if alone => format!("{HOST_PACKAGE}-backend-{}", backend.device()),
        _ => HOST_PACKAGE.to_owned(),
    };
    let mut name = format!("{what}-{version}-{platform}");
    if backends != [Backend::Cpu] {
        for backend in backends {
            name.push('-');
            name.push_str(backend.name());
        }
    }
    name
}

fn copy_binaries(workspace: &Workspace, host: &Package, bin: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(bin).map_err(Error::io("create", bin))?;
    for target in &host.targets {
        if target.kind.iter().any(|kind| kind == "bin") {
            let file = format!("{}{}", target.name, std::env::consts::EXE_SUFFIX);
            let from = workspace.profile_dir(true).join(&file);
            let to = bin.join(&file);
            std::fs::copy(&from, &to).map_err(Error::io("copy", &from))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_the_backends_unless_it_is_the_usual_one() {
        let of = |alone, backends: &[Backend]| name(alone, "0.1.0", "linux-x86_64", backends);
        assert_eq!(of(false, &[Backend::Cpu]), "mlxcel-0.1.0-linux-x86_64");
        assert_eq!(
            of(false, &[Backend::Cuda13]),
            "mlxcel-0.1.0-linux-x86_64-cuda13"
        );
        let both = of(false, &[Backend::Cuda12, Backend::Cpu]);
        assert_eq!(both, "mlxcel-0.1.0-linux-x86_64-cpu-cuda12");
        assert_eq!(both, of(false, &[Backend::Cpu, Backend::Cuda12]));
        assert_eq!(
            of(true, &[Backend::Cuda13]),
            "mlxcel-backend-cuda-0.1.0-linux-x86_64-cuda13"
        );
        assert_eq!(
            of(true, &[Backend::Cpu]),
            "mlxcel-backend-cpu-0.1.0-linux-x86_64"
        );
    }
}
