//! MLX's library on this machine: fetched from its official wheel into `target/mlx`, or taken from `MLX_ROOT`.
//!
//! Owns the layout of that tree. The wheel's own relation between `mlx/lib/libmlx.so` and the folder of bundled libraries
//! (`mlx_cpu.libs`) is kept, because libmlx finds them through `$ORIGIN/../../mlx_cpu.libs`; `include`, `lib` and `share` are links
//! beside them, so that the tree is also what `MLX_ROOT` may name.

pub mod library;
mod tree;
pub mod whole;

use std::path::{Path, PathBuf};

pub use self::tree::MlxTree;
use self::whole::Depth;
use crate::backend::Backend;
use crate::error::Error;
use crate::fetch::install::{self, Lock, Stamp};
use crate::fetch::pins::MlxPins;
use crate::fetch::pip;
use crate::workspace::{Workspace, platform};

const LAYOUT: u32 = 2;
const ALTERNATIVE: pip::Alternative = "alternatively install MLX of the version in mlx.toml some other way, and set MLX_ROOT to the folder that holds its include/ and lib/";

/// Whether there is an MLX for each of the backends, without fetching any: asked before anything is begun.
pub fn check_pinned(workspace: &Workspace, backends: &[Backend]) -> Result<(), Error> {
    let pins = MlxPins::read(&workspace.root)?;
    if named_root().is_none() {
        for backend in backends {
            pins.wheel(*backend, &platform())?;
        }
    }
    Ok(())
}

fn named_root() -> Option<PathBuf> {
    let root = std::env::var_os("MLX_ROOT").filter(|value| !value.is_empty())?;
    Some(PathBuf::from(root))
}

/// The tree of a backend: `MLX_ROOT` if set, else the pinned wheel, fetched if need be.
pub fn setup(workspace: &Workspace, backend: Backend, depth: Depth) -> Result<MlxTree, Error> {
    let pins = MlxPins::read(&workspace.root)?;
    if let Some(root) = named_root() {
        return from_elsewhere(root, &pins.version, backend, depth);
    }
    let pin = pins.wheel(backend, &platform())?;
    let home = workspace.target.join("mlx");
    let destination = home.join(format!("{}-{}", backend.name(), pins.version));
    let fault = |tree: &Path| {
        let is_one_of_the_pinned = pin.files.iter().any(|file| {
            let stamp = stamp(&file.sha256);
            install::is_current(tree, &stamp)
        });
        if !is_one_of_the_pinned {
            return Some(
                "it is another version, or was installed by another version of this command"
                    .to_owned(),
            );
        }
        validated(tree, &pins.version)
            .err()
            .or_else(|| whole::problem(tree, depth))
    };
    if fault(&destination).is_some() {
        let _lock = Lock::take(&home)?;
        if let Some(fault) = fault(&destination) {
            if destination.exists() {
                eprintln!(
                    "{} is not whole and is fetched again: {fault}",
                    destination.display()
                );
            }
            let downloads = home.join(".downloads");
            let (wheel, file) = pip::download(&pin, &downloads, ALTERNATIVE)?;
            let staging = install::staging(&destination);
            install::remove_tree(&staging)?;
            let made = unpacked(&wheel, &staging, &pins.version)
                .and_then(|()| install::commit(&staging, &destination, &stamp(&file.sha256)));
            if made.is_err() {
                install::remove_tree(&staging)?;
            }
            made?;
            std::fs::remove_file(&wheel).map_err(Error::io("remove", &wheel))?;
        }
    }
    Ok(MlxTree { root: destination })
}

fn unpacked(wheel: &Path, staging: &Path, version: &str) -> Result<(), Error> {
    pip::unpack(wheel, staging)?;
    link_short_names(staging)?;
    validated(staging, version).map_err(|problem| Error::Malformed {
        path: wheel.to_path_buf(),
        message: problem,
    })?;
    whole::record(staging)
}

/// What `MLX_ROOT` names is never changed: what is wrong with it is told.
fn from_elsewhere(
    root: PathBuf,
    version: &str,
    backend: Backend,
    depth: Depth,
) -> Result<MlxTree, Error> {
    let tree = validated(&root, version)
        .and_then(|tree| library::check(&tree.root.join("lib"), backend).map(|()| tree))
        .map_err(|problem| Error::MlxRoot {
            root: root.clone(),
            problem,
        })?;
    if whole::is_recorded(&root)
        && let Some(problem) = whole::problem(&root, depth)
    {
        eprintln!(
            "warning: MLX_ROOT={} is not as it was installed: {problem}",
            root.display()
        );
    }
    eprintln!("MLX {version} from MLX_ROOT: {}", root.display());
    Ok(tree)
}

fn stamp(sha256: &str) -> Stamp {
    Stamp {
        sha256: sha256.to_owned(),
        layout: LAYOUT,
    }
}

/// `include`, `lib` and `share` beside the wheel's `mlx` folder.
fn link_short_names(tree: &Path) -> Result<(), Error> {
    for name in ["include", "lib", "share"] {
        let link = tree.join(name);
        #[cfg(unix)]
        std::os::unix::fs::symlink(Path::new("mlx").join(name), &link)
            .map_err(Error::io("link", &link))?;
        #[cfg(not(unix))]
        return Err(Error::Malformed {
            path: link,
            message: "links between folders are made on Linux and macOS only".to_owned(),
        });
    }
    Ok(())
}

/// Checks what a compile and a link need, without running anything.
fn validated(root: &Path, expected_version: &str) -> Result<MlxTree, String> {
    if !root.is_absolute() {
        return Err("expected an absolute path".to_owned());
    }
    let header = root.join("include/mlx/version.h");
    let text = std::fs::read_to_string(&header)
        .map_err(|error| format!("expected MLX's headers, but {}: {error}", header.display()))?;
    let found =
        header_version(&text).ok_or_else(|| format!("{} names no version", header.display()))?;
    if found != expected_version {
        return Err(format!(
            "expected MLX {expected_version} (mlx.toml), found {found}"
        ));
    }
    let lib = root.join("lib");
    let names = ["libmlx.so", "libmlx.dylib", "libmlx.a"];
    if !names.iter().any(|name| lib.join(name).is_file()) {
        return Err(format!(
            "expected one of {} in {}",
            names.join(", "),
            lib.display()
        ));
    }
    Ok(MlxTree {
        root: root.to_path_buf(),
    })
}

/// "0.32.4" out of the three defines of `mlx/version.h`.
fn header_version(text: &str) -> Option<String> {
    let part = |name: &str| {
        text.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            let is_it = words.next() == Some("#define") && words.next() == Some(name);
            is_it.then(|| words.next()).flatten()
        })
    };
    Some(format!(
        "{}.{}.{}",
        part("MLX_VERSION_MAJOR")?,
        part("MLX_VERSION_MINOR")?,
        part("MLX_VERSION_PATCH")?
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "#pragma once\n#define MLX_VERSION_MAJOR 0\n#define MLX_VERSION_MINOR 32\n#define MLX_VERSION_PATCH 4\n\
                          #define MLX_VERSION_NUMERIC \\\n  (100000 * MLX_VERSION_MAJOR)\n";

    #[test]
    fn version_comes_from_the_three_defines() {
        assert_eq!(header_version(HEADER).as_deref(), Some("0.32.4"));
        assert_eq!(header_version("#define MLX_VERSION_MAJOR 0"), None);
        assert_eq!(header_version(""), None);
    }

    #[test]
    fn a_wrong_mlx_root_says_what_was_expected() {
        let root = std::env::temp_dir().join(format!("xtask-mlx-{}", std::process::id()));
        let problem = validated(&root, "0.32.4").expect_err("nothing is there");
        assert!(problem.contains("version.h"), "{problem}");
        std::fs::create_dir_all(root.join("include/mlx")).expect("creates");
        std::fs::write(root.join("include/mlx/version.h"), HEADER).expect("writes");
        let problem = validated(&root, "0.33.0").expect_err("another version");
        assert!(
            problem.contains("0.33.0") && problem.contains("0.32.4"),
            "{problem}"
        );
        let problem = validated(&root, "0.32.4").expect_err("no library");
        assert!(problem.contains("libmlx.so"), "{problem}");
        std::fs::create_dir_all(root.join("lib")).expect("creates");
        std::fs::write(root.join("lib/libmlx.so"), "x").expect("writes");
        validated(&root, "0.32.4").expect("complete");
        assert!(validated(Path::new("relative"), "0.32.4").is_err());
        std::fs::remove_dir_all(&root).expect("removes");
    }
}
