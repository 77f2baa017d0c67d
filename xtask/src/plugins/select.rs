//! Which crates of the workspace are plugins, and which of them a request means.

use std::collections::BTreeSet;
use std::path::Path;

use crate::backend::Backend;
use crate::error::Error;
use crate::workspace::Package;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Family,
    Backend(Backend),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugin {
    pub package: String,
    pub kind: Kind,
}

#[derive(Debug)]
pub struct Selection {
    pub plugins: Vec<Plugin>,
    /// Names of every plugin crate, selected or not.
    pub all_packages: BTreeSet<String>,
}

impl Selection {
    /// The backends asked for, and every family if they are asked for too.
    pub fn of(
        members: &[Package],
        root: &Path,
        backends: &[Backend],
        families: bool,
    ) -> Result<Self, Error> {
        one_build_of_each(backends)?;
        let mut plugins = Vec::new();
        let mut all_packages = BTreeSet::new();
        let mut missing: Vec<Backend> = backends.to_vec();
        for package in members {
            if package.cdylib().is_none() {
                continue;
            }
            let folder = package.folder(root);
            let kind = if folder.starts_with("families/") {
                families.then_some(Kind::Family)
            } else if let Some(device) = folder.strip_prefix("backends/") {
                missing.retain(|backend| backend.device() != device);
                backends
                    .iter()
                    .find(|backend| backend.device() == device)
                    .map(|backend| Kind::Backend(*backend))
            } else {
                continue;
            };
            all_packages.insert(package.name.clone());
            plugins.extend(kind.map(|kind| Plugin {
                package: package.name.clone(),
                kind,
            }));
        }
        if let Some(backend) = missing.first() {
            return Err(Error::Missing {
                path: root.join("backends").join(backend.device()),
                remedy: format!(
                    "backend {} has no plugin crate in this tree",
                    backend.name()
                ),
            });
        }
        plugins.sort_by(|a, b| a.package.cmp(&b.package));
        Ok(Selection {
            plugins,
            all_packages,
        })
    }
}

/// Two builds of MLX for one device would give the same plugin twice, and one of them would be dropped.
fn one_build_of_each(backends: &[Backend]) -> Result<(), Error> {
    for (index, one) in backends.iter().enumerate() {
        let other = backends
            .iter()
            .skip(index)
            .find(|other| other.device() == one.device() && *other != one);
        if let Some(other) = other {
            return Err(Error::Refused(format!(
                "expected one build for each device, found --backend {one} and --backend {other}: both give the plugin mlxcel-backend-{}; name one of them, and run this again for the other",
                one.device()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Target;

    fn package(name: &str, folder: &str, kind: &str) -> Package {
        Package {
            id: name.into(),
            name: name.into(),
            version: "0.1.0".into(),
            license: None,
            authors: Vec::new(),
            repository: None,
            manifest_path: Path::new("/w").join(folder).join("Cargo.toml"),
            targets: vec![Target {
                name: name.replace('-', "_"),
                kind: vec![kind.into(), "rlib".into()],
            }],
        }
    }

    fn tree() -> Vec<Package> {
        vec![
            package("mlxcel-family-qwen", "families/qwen", "cdylib"),
            package("mlxcel-backend-cuda", "backends/cuda", "cdylib"),
            package("mlxcel-backend-mlx", "backends/mlx", "lib"),
            package("mlxcel-cpu-kernels", "backends/cpu-kernels", "lib"),
            package("mlxcel-cuda-kernels", "backends/cuda-kernels", "lib"),
            package("mlxcel-backend-cpu", "backends/cpu", "cdylib"),
            package("mlxcel-family-llama", "families/llama", "cdylib"),
            package("bad-plugin", "tests/plugins/bad", "cdylib"),
        ]
    }

    #[test]
    fn families_always_and_backends_when_asked() {
        let selection =
            Selection::of(&tree(), Path::new("/w"), &[Backend::Cpu], true).expect("cpu is there");
        let names: Vec<&str> = selection
            .plugins
            .iter()
            .map(|plugin| plugin.package.as_str())
            .collect();
        assert_eq!(
            names,
            [
                "mlxcel-backend-cpu",
                "mlxcel-family-llama",
                "mlxcel-family-qwen"
            ]
        );
        assert!(selection.all_packages.contains("mlxcel-backend-cuda"));
        assert!(!selection.all_packages.contains("bad-plugin"));
    }

    #[test]
    fn a_backend_alone_brings_no_family() {
        let selection = Selection::of(&tree(), Path::new("/w"), &[Backend::Cuda13], false)
            .expect("cuda is there");
        let names: Vec<&str> = selection
            .plugins
            .iter()
            .map(|plugin| plugin.package.as_str())
            .collect();
        assert_eq!(names, ["mlxcel-backend-cuda"]);
        assert!(selection.all_packages.contains("mlxcel-family-qwen"));
    }

    #[test]
    fn two_builds_of_one_plugin_are_refused_by_name() {
        let of = |backends: &[Backend]| Selection::of(&tree(), Path::new("/w"), backends, true);
        let error = of(&[Backend::Cuda13, Backend::Cpu, Backend::Cuda12])
            .expect_err("the same plugin twice")
            .to_string();
        for part in ["cuda13", "cuda12", "mlxcel-backend-cuda"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        of(&[Backend::Cuda13, Backend::Cuda13, Backend::Cpu]).expect("one build, named twice");
    }

    #[test]
    fn a_cuda_build_names_the_cuda_crate() {
        let selection = Selection::of(&tree(), Path::new("/w"), &[Backend::Cuda12], true)
            .expect("cuda is there");
        assert!(selection.plugins.contains(&Plugin {
            package: "mlxcel-backend-cuda".into(),
            kind: Kind::Backend(Backend::Cuda12),
        }));
    }

    #[test]
    fn a_backend_without_a_crate_is_an_error() {
        let error = Selection::of(&tree(), Path::new("/w"), &[Backend::Metal], true)
            .expect_err("no metal crate")
            .to_string();
        assert!(error.contains("metal"), "{error}");
    }
}
