//! What an installed MLX consists of, and which of it a backend's package carries.

use std::path::{Path, PathBuf};

use crate::error::Error;

/// Headers that MLX's CUDA build compiles its own kernels with, on the machine that it runs on; it looks for them beside its `lib`.
const COMPILED_AT_RUN_TIME: [&str; 3] = ["cccl", "cute", "cutlass"];

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

    /// NVIDIA's packages that the wheel asks for, as the package client takes them.
    pub fn required_packages(&self) -> Result<Vec<String>, Error> {
        let mut found = Vec::new();
        for info in self.infos()? {
            let path = info.join("METADATA");
            let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
            found.extend(nvidia_packages(&text));
        }
        found.sort();
        Ok(found)
    }

    /// The licence texts and the list of bundled components that came with MLX.
    pub fn notices(&self) -> Result<Vec<PathBuf>, Error> {
        let mut found = Vec::new();
        for info in self.infos()? {
            for part in ["licenses", "sboms"] {
                let dir = info.join(part);
                if dir.is_dir() {
                    found.extend(files_in(&dir)?);
                }
            }
        }
        Ok(found)
    }

    /// Folders in which the wheel describes itself; an MLX from elsewhere may have none.
    fn infos(&self) -> Result<Vec<PathBuf>, Error> {
        let mut dirs = dirs_in(&self.wheel_root()?)?;
        dirs.retain(|dir| {
            let name = name_of(dir);
            name.starts_with("mlx") && name.ends_with(".dist-info")
        });
        Ok(dirs)
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

/// Out of a wheel's METADATA. What an extra asks for is not needed by all, and other packages beside MLX ask for what is not NVIDIA's.
fn nvidia_packages(metadata: &str) -> Vec<String> {
    metadata
        .lines()
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("Requires-Dist: "))
        .filter(|name| name.starts_with("nvidia-") && !name.contains(';'))
        .map(str::to_owned)
        .collect()
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

/// Every file under `root`, relative to it, sorted; what links lead to is listed once, under its own name.
pub fn files_under(root: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(dir) = folders.pop() {
        for path in entries(&dir, |path| !path.is_symlink())? {
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push(path.strip_prefix(root).unwrap_or(&path).to_path_buf());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// A local `lib` folder may hold anything; of it, a backend needs MLX's own files alone.
fn is_mlx_runtime(name: &str) -> bool {
    let library = |stem: &str| {
        name.strip_prefix(stem)
            .is_some_and(|rest| rest == ".dylib" || rest == ".so" || rest.starts_with(".so."))
    };
    library("libmlx") || library("libjaccl") || name == "mlx.metallib"
}

pub fn files_in(dir: &Path) -> Result<Vec<PathBuf>, Error> {
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

pub fn name_of(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvidias_packages_are_those_that_all_need() {
        let metadata = "Name: mlx-cuda-13\nRequires-Dist: nvidia-cublas==13.*\nRequires-Dist: numpy\n\
            Requires-Dist: nvidia-extra; extra == \"dev\"\n\nRequires-Dist: nvidia-in-the-text\n";
        assert_eq!(nvidia_packages(metadata), ["nvidia-cublas==13.*"]);
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
        super::super::link_short_names(&tree).expect("links");
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
