//! Where MLX is: `MLX_ROOT`, the tree that `cargo xtask setup` makes, or a build from source.

use std::path::{Path, PathBuf};

/// The version that this crate is written against; `mlx.toml` pins the same.
const VERSION_FILE: &str = "mlx.toml";

/// An MLX to compile and link against.
pub struct Mlx {
    /// Folder of headers.
    pub include: PathBuf,
    /// Folder of the library.
    pub lib: PathBuf,
    /// Linked into the plugin instead of beside it.
    pub is_static: bool,
}

impl Mlx {
    /// Tells cargo, and through `links` metadata the backends that depend on this crate.
    pub fn link(&self) -> Result<(), String> {
        println!(
            "cargo::rustc-link-search=native={}",
            self.reachable()?.display()
        );
        println!(
            "cargo::rustc-link-lib={}=mlx",
            if self.is_static { "static" } else { "dylib" }
        );
        println!("cargo::metadata=static={}", self.is_static);
        Ok(())
    }

    /// The same folder by a name inside this crate's output: cargo puts such folders on the library path of what it runs, so
    /// that tests of every dependent crate find the library. What libmlx finds through `$ORIGIN` is found through the link too.
    fn reachable(&self) -> Result<PathBuf, String> {
        let link = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("mlx-lib");
        let lib = self
            .lib
            .canonicalize()
            .map_err(|error| format!("{}: {error}", self.lib.display()))?;
        if link.canonicalize().is_ok_and(|found| found == lib) {
            return Ok(link);
        }
        let _ = std::fs::remove_file(&link);
        #[cfg(unix)]
        std::os::unix::fs::symlink(&lib, &link)
            .map_err(|error| format!("{}: {error}", link.display()))?;
        Ok(if cfg!(unix) { link } else { lib })
    }
}

/// Finds MLX or says what to do.
pub fn find() -> Result<Mlx, String> {
    println!("cargo::rerun-if-env-changed=MLX_ROOT");
    #[cfg(feature = "mlx-source")]
    return crate::source::build();
    #[cfg(not(feature = "mlx-source"))]
    found_at(&root()?)
}

#[cfg(not(feature = "mlx-source"))]
fn root() -> Result<PathBuf, String> {
    if let Some(root) = std::env::var_os("MLX_ROOT").filter(|root| !root.is_empty()) {
        return Ok(PathBuf::from(root));
    }
    let workspace = workspace()?;
    let version = pinned_version(&workspace)?;
    // OUT_DIR is <target>/<profile>/build/<crate>/out, with the target's name in between when cross compiling.
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let targets = out.ancestors().skip(3).take(4).map(Path::to_path_buf);
    let targets: Vec<PathBuf> = targets.chain([workspace.join("target")]).collect();
    for target in targets {
        for build in builds() {
            let tree = target.join(format!("mlx/{build}-{version}"));
            if tree.join("include/mlx/mlx.h").is_file() {
                return Ok(tree);
            }
        }
    }
    Err(format!(
        "MLX {version} is not there: run `cargo xtask setup` (for the CPU; `--backend cuda`, `cuda12` or `metal` for a device), or set MLX_ROOT to a folder with its include/ and lib/"
    ))
}

#[cfg(not(feature = "mlx-source"))]
fn found_at(root: &Path) -> Result<Mlx, String> {
    let header = root.join("include/mlx/mlx.h");
    println!("cargo::rerun-if-changed={}", header.display());
    if !header.is_file() {
        return Err(format!(
            "expected MLX's headers at {}; set MLX_ROOT to a folder with include/ and lib/, or unset it and run `cargo xtask setup`",
            header.display()
        ));
    }
    let lib = root.join("lib");
    let shared = ["libmlx.so", "libmlx.dylib"]
        .iter()
        .any(|name| lib.join(name).is_file());
    if !shared && !lib.join("libmlx.a").is_file() {
        return Err(format!(
            "expected libmlx in {}; run `cargo xtask setup` again, or set MLX_ROOT",
            lib.display()
        ));
    }
    Ok(Mlx {
        include: root.join("include"),
        lib,
        is_static: !shared,
    })
}

/// The official builds that serve this system. Their headers and exported symbols are the same; which one a plugin runs on is
/// decided by the library in its own folder.
#[cfg(not(feature = "mlx-source"))]
fn builds() -> &'static [&'static str] {
    match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("macos") => &["metal", "cpu"],
        _ => &["cpu", "cuda13", "cuda12"],
    }
}

#[cfg(not(feature = "mlx-source"))]
fn workspace() -> Result<PathBuf, String> {
    let manifest = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    manifest
        .ancestors()
        .find(|dir| dir.join(VERSION_FILE).is_file())
        .map(Path::to_path_buf)
        .ok_or_else(|| format!("expected {VERSION_FILE} above {}", manifest.display()))
}

#[cfg(not(feature = "mlx-source"))]
fn pinned_version(workspace: &Path) -> Result<String, String> {
    let path = workspace.join(VERSION_FILE);
    println!("cargo::rerun-if-changed={}", path.display());
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    text.lines()
        .find_map(|line| line.strip_prefix("version = \"")?.strip_suffix('"'))
        .map(str::to_owned)
        .ok_or_else(|| format!("expected a line version = \"..\" in {}", path.display()))
}
