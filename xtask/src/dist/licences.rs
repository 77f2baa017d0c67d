//! The licence texts of everything that is shipped: our own, the crates linked in, MLX and what its library brings.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::cli::Backend;
use crate::error::Error;
use crate::mlx;
use crate::workspace::{Metadata, Package, Workspace};

pub fn collect(workspace: &Workspace, backends: &[Backend], out: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(out).map_err(Error::io("create", out))?;
    let own = workspace.root.join("LICENSE");
    copy_into(&own, out)?;
    let mut index = String::from("# Third-party software in this package\n\n");
    let metadata = workspace.graph_of_this_system()?;
    for package in shipped_crates(&metadata, &workspace.root) {
        let _ = writeln!(
            index,
            "- {} {}: {} {}",
            package.name,
            package.version,
            package.license.as_deref().unwrap_or("see its licence file"),
            package.repository.as_deref().unwrap_or_default()
        );
        let dir = out.join(format!("crates/{}-{}", package.name, package.version));
        let source = package.manifest_path.parent().unwrap_or(Path::new("."));
        for file in licence_files(source)? {
            std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
            copy_into(&file, &dir)?;
        }
    }
    for backend in backends {
        let dir = out.join(format!("mlx-{}", backend.name()));
        std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
        let _ = writeln!(
            index,
            "- MLX ({}): MIT; libraries that its build brings are listed in {}/",
            backend.name(),
            dir.file_name().unwrap_or_default().to_string_lossy()
        );
        for file in mlx::setup(workspace, *backend)?.notices()? {
            copy_into(&file, &dir)?;
        }
    }
    let path = out.join("THIRD-PARTY.md");
    std::fs::write(&path, index).map_err(Error::io("write", &path))
}

/// Crates that end up in a shipped file: what the host and the plugins need, without tests and build tools of ours.
fn shipped_crates<'a>(metadata: &'a Metadata, root: &Path) -> Vec<&'a Package> {
    let packages = metadata.by_id();
    let is_shipped = |package: &Package| {
        let folder = package.folder(root);
        folder == "host" || folder.starts_with("families/") || folder.starts_with("backends/")
    };
    let ours: BTreeSet<&str> = metadata
        .workspace_members
        .iter()
        .map(String::as_str)
        .collect();
    let mut queue: Vec<&str> = ours
        .iter()
        .copied()
        .filter(|id| packages.get(id).is_some_and(|package| is_shipped(package)))
        .collect();
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    while let Some(id) = queue.pop() {
        if !seen.insert(id) {
            continue;
        }
        let edges = metadata
            .resolve
            .iter()
            .flat_map(|resolve| &resolve.nodes)
            .filter(|node| node.id == id)
            .flat_map(|node| &node.deps)
            .filter(|edge| edge.dep_kinds.iter().any(|kind| kind.kind.is_none()));
        queue.extend(edges.map(|edge| edge.pkg.as_str()));
    }
    let mut crates: Vec<&Package> = seen
        .into_iter()
        .filter(|id| !ours.contains(id))
        .filter_map(|id| packages.get(id).copied())
        .collect();
    crates.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    crates
}

fn licence_files(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let path = entry.map_err(Error::io("list", dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_file() && is_licence_name(&name) {
            found.push(path.clone());
        }
    }
    found.sort();
    Ok(found)
}

fn is_licence_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    [
        "license",
        "licence",
        "copying",
        "notice",
        "copyright",
        "unlicense",
    ]
    .iter()
    .any(|prefix| name.starts_with(prefix))
}

fn copy_into(file: &Path, dir: &Path) -> Result<(), Error> {
    let to = dir.join(file.file_name().unwrap_or_default());
    std::fs::copy(file, to)
        .map(|_| ())
        .map_err(Error::io("copy", file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_files_are_known_by_name() {
        for name in [
            "LICENSE",
            "LICENSE-MIT",
            "license.md",
            "COPYING",
            "NOTICE.txt",
            "UNLICENSE",
        ] {
            assert!(is_licence_name(name), "{name}");
        }
        for name in ["README.md", "Cargo.toml", "lib.rs"] {
            assert!(!is_licence_name(name), "{name}");
        }
    }
}
