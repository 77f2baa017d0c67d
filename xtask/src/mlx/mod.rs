//! MLX's library on this machine: fetched from its official wheel into `target/mlx`, or taken from `MLX_ROOT`.
//!
//! Owns the layout of that tree. The wheel's own relation between `mlx/lib/libmlx.so` and the folder of bundled libraries
//! (`mlx_cpu.libs`) is kept, because libmlx finds them through `$ORIGIN/../../mlx_cpu.libs`; `include`, `lib` and `share` are links
//! beside them, so that the tree is also what `MLX_ROOT` may name.

use std::path::{Path, PathBuf};

use crate::cli::Backend;
use crate::error::Error;
use crate::fetch::install::{self, Lock, Stamp};
use crate::fetch::pins::MlxPins;
use crate::fetch::pip;
use crate::workspace::{Workspace, platform};

const LAYOUT: u32 = 1;
/// Headers that MLX's CUDA build compiles its own kernels with, on the machine that it runs on; it looks for them beside its `lib`.
const COMPILED_AT_RUN_TIME: [&str; 3] = ["cccl", "cute", "cutlass"];
const ALTERNATIVE: pip::Alternative = "alternatively install MLX of the version in mlx.toml some other way, and set MLX_ROOT to the folder that holds its include/ and lib/";

/// An MLX that can be compiled and linked against.
#[derive(Debug)]
pub struct MlxTree {
    /// Holds `include/` and `lib/`.
    pub root: PathBuf,
}

/// A file that a backend plugin needs at run time, and where it belongs in the plugin's package.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuntimeFile {
    pub source: PathBuf,
    pub placed: PathBuf,
}

/// The tree of a backend: `MLX_ROOT` if set, else the pinned wheel, fetched if need be.
pub fn setup(workspace: &Workspace, backend: Backend) -> Result<MlxTree, Error> {
    let pins = MlxPins::read(&workspace.root)?;
    if let Some(root) = std::env::var_os("MLX_ROOT").filter(|value| !value.is_empty()) {
        let root = PathBuf::from(root);
        let tree =
            validated(&root, &pins.version).map_err(|problem| Error::MlxRoot { root, problem })?;
        eprintln!(
            "MLX {} from MLX_ROOT: {}",
            pins.version,
            tree.root.display()
        );
        return Ok(tree);
    }
    let pin = pins.wheel(backend, &platform())?;
    let home = workspace.target.join("mlx");
    let destination = home.join(format!("{}-{}", backend.name(), pins.version));
    let acceptable = |tree: &Path| {
        let is_one_of_the_pinned = pin.files.iter().any(|file| {
            let stamp = stamp(&file.sha256);
            install::is_current(tree, &stamp)
        });
        is_one_of_the_pinned && validated(tree, &pins.version).is_ok()
    };
    if !acceptable(&destination) {
        let _lock = Lock::take(&home)?;
        if !acceptable(&destination) {
            let downloads = home.join(".downloads");
            let (wheel, file) = pip::download(&pin, &downloads, ALTERNATIVE)?;
            let staging = install::staging(&destination);
            install::remove_tree(&staging)?;
            pip::unpack(&wheel, &staging)?;
            link_short_names(&staging)?;
            validated(&staging, &pins.version).map_err(|problem| Error::Malformed {
                path: wheel.clone(),
                message: problem,
            })?;
            install::commit(&staging, &destination, &stamp(&file.sha256))?;
            std::fs::remove_file(&wheel).map_err(Error::io("remove", &wheel))?;
        }
    }
    Ok(MlxTree { root: destination })
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

impl MlxTree {
    /// What a backend's package carries so that it runs on a machine without this tree. Empty for a static MLX.
    pub fn runtime_files(&self) -> Result<Vec<RuntimeFile>, Error> {
        let lib = self.root.join("lib");
        let mut files = Vec::new();
        for path in files_in(&lib)? {
            let name = name_of(&path);
            if is_mlx_runtime(&name) {
                files.push(RuntimeFile {
                    placed: Path::new("mlx/lib").join(&name),
                    source: path,
                });
            }
        }
        for name in COMPILED_AT_RUN_TIME {
            let dir = self.root.join("include").join(name);
            if dir.is_dir() {
                all_files(&dir, &Path::new("mlx/include").join(name), &mut files)?;
            }
        }
        for dir in self.bundled_dirs()? {
            for path in files_in(&dir)? {
                files.push(RuntimeFile {
                    placed: Path::new(&name_of(&dir)).join(name_of(&path)),
                    source: path,
                });
            }
        }
        files.sort();
        Ok(files)
    }

    /// The licence texts and the list of bundled components that came with MLX.
    pub fn notices(&self) -> Result<Vec<PathBuf>, Error> {
        let mut found = Vec::new();
        for info in dirs_in(&self.wheel_root()?)? {
            let name = name_of(&info);
            if name.starts_with("mlx") && name.ends_with(".dist-info") {
                for part in ["licenses", "sboms"] {
                    let dir = info.join(part);
                    if dir.is_dir() {
                        found.extend(files_in(&dir)?);
                    }
                }
            }
        }
        Ok(found)
    }

    fn bundled_dirs(&self) -> Result<Vec<PathBuf>, Error> {
        let mut dirs = dirs_in(&self.wheel_root()?)?;
        dirs.retain(|dir| {
            let name = name_of(dir);
            name.starts_with("mlx") && name.ends_with(".libs")
        });
        Ok(dirs)
    }

    /// What libmlx calls `$ORIGIN/../..`.
    fn wheel_root(&self) -> Result<PathBuf, Error> {
        let lib = self.root.join("lib");
        let real = lib.canonicalize().map_err(Error::io("resolve", &lib))?;
        Ok(real
            .ancestors()
            .nth(2)
            .unwrap_or(Path::new("/"))
            .to_path_buf())
    }
}

/// Every file under `dir`, placed under `placed`.
fn all_files(dir: &Path, placed: &Path, files: &mut Vec<RuntimeFile>) -> Result<(), Error> {
    for path in files_in(dir)? {
        files.push(RuntimeFile {
            placed: placed.join(name_of(&path)),
            source: path,
        });
    }
    for inner in dirs_in(dir)? {
        let placed = placed.join(name_of(&inner));
        all_files(&inner, &placed, files)?;
    }
    Ok(())
}

/// A local `lib` folder may hold anything; of it, a backend needs MLX's own files alone.
fn is_mlx_runtime(name: &str) -> bool {
    let library = |stem: &str| {
        name.strip_prefix(stem)
            .is_some_and(|rest| rest == ".dylib" || rest == ".so" || rest.starts_with(".so."))
    };
    library("libmlx") || library("libjaccl") || name == "mlx.metallib"
}

fn files_in(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    entries(dir, Path::is_file)
}

fn dirs_in(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    entries(dir, Path::is_dir)
}

fn entries(dir: &Path, keep: impl Fn(&Path) -> bool) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let path = entry.map_err(Error::io("list", dir))?.path();
        if keep(&path) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
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
    fn only_mlx_itself_is_taken_from_a_lib_folder() {
        for name in [
            "libmlx.so",
            "libmlx.so.0",
            "libmlx.dylib",
            "libjaccl.dylib",
            "mlx.metallib",
        ] {
            assert!(is_mlx_runtime(name), "{name}");
        }
        for name in [
            "libmlx.a",
            "libmlxcel.so",
            "libmlx_other.so",
            "libc.so.6",
            "cmake",
        ] {
            assert!(!is_mlx_runtime(name), "{name}");
        }
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

    #[cfg(unix)]
    #[test]
    fn bundled_libraries_keep_their_relation_to_libmlx() {
        let tree = std::env::temp_dir().join(format!("xtask-tree-{}", std::process::id()));
        for dir in [
            "mlx/lib",
            "mlx/include",
            "mlx/share",
            "mlx_cpu.libs",
            "other.libs",
        ] {
            std::fs::create_dir_all(tree.join(dir)).expect("creates");
        }
        for file in [
            "mlx/lib/libmlx.so",
            "mlx_cpu.libs/libblas.so.3",
            "other.libs/libx.so",
        ] {
            std::fs::write(tree.join(file), "x").expect("writes");
        }
        link_short_names(&tree).expect("links");
        let files = MlxTree { root: tree.clone() }
            .runtime_files()
            .expect("lists");
        let placed: Vec<_> = files.iter().map(|file| file.placed.clone()).collect();
        assert_eq!(
            placed,
            [
                PathBuf::from("mlx/lib/libmlx.so"),
                PathBuf::from("mlx_cpu.libs/libblas.so.3")
            ]
        );
        std::fs::remove_dir_all(&tree).expect("removes");
    }
}
