//! A static MLX, built from the source tree that `MLX_SOURCE_DIR` names: the way for devices without official libraries.

use std::path::PathBuf;

use crate::mlx::Mlx;

/// Runs MLX's own CMake build. Options beyond the defaults come from `MLX_SOURCE_DEFINES`, `NAME=VALUE` separated by spaces.
pub fn build() -> Result<Mlx, String> {
    println!("cargo::rerun-if-env-changed=MLX_SOURCE_DIR");
    println!("cargo::rerun-if-env-changed=MLX_SOURCE_DEFINES");
    let source = std::env::var_os("MLX_SOURCE_DIR")
        .filter(|dir| !dir.is_empty())
        .map(PathBuf::from)
        .ok_or("feature mlx-source: set MLX_SOURCE_DIR to a folder with MLX's sources")?;
    if !source.join("CMakeLists.txt").is_file() {
        return Err(format!(
            "expected MLX's CMakeLists.txt in {}",
            source.display()
        ));
    }
    let mut config = cmake::Config::new(&source);
    config.profile("Release");
    for (name, value) in [
        ("BUILD_SHARED_LIBS", "OFF"),
        ("MLX_BUILD_TESTS", "OFF"),
        ("MLX_BUILD_EXAMPLES", "OFF"),
        ("MLX_BUILD_BENCHMARKS", "OFF"),
        ("MLX_BUILD_PYTHON_BINDINGS", "OFF"),
        ("MLX_BUILD_GGUF", "OFF"),
        ("MLX_BUILD_SAFETENSORS", "OFF"),
        // Two backends in one process must not share the library's statics.
        ("CMAKE_CXX_VISIBILITY_PRESET", "hidden"),
    ] {
        config.define(name, value);
    }
    config.cxxflag("-fno-gnu-unique");
    for define in std::env::var("MLX_SOURCE_DEFINES")
        .unwrap_or_default()
        .split_whitespace()
    {
        let (name, value) = define
            .split_once('=')
            .ok_or_else(|| format!("MLX_SOURCE_DEFINES: expected NAME=VALUE, found {define}"))?;
        config.define(name, value);
    }
    let installed = config.build();
    link_dependencies();
    Ok(Mlx {
        include: installed.join("include"),
        lib: installed.join("lib"),
        is_static: true,
    })
}

/// What a static MLX leaves undefined; a shared one brings its own.
fn link_dependencies() {
    match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("macos") => {
            for framework in ["Accelerate", "Foundation", "Metal", "QuartzCore"] {
                println!("cargo::rustc-link-lib=framework={framework}");
            }
        }
        _ => {
            for library in ["lapack", "blas", "dl", "pthread"] {
                println!("cargo::rustc-link-lib={library}");
            }
        }
    }
}
