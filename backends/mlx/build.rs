//! Compiles the C++ shim against MLX and says how to link it.

#[path = "build/mlx.rs"]
mod mlx;
#[cfg(feature = "mlx-source")]
#[path = "build/source.rs"]
mod source;

use std::path::Path;

const SOURCES: [&str; 19] = [
    "array",
    "attention",
    "blocks",
    "collectives",
    "elementwise",
    "indexing",
    "internal",
    "layer",
    "native",
    "paged",
    "product",
    "quantized",
    "random",
    "recurrent",
    "reduction",
    "runs",
    "selection",
    "shape",
    "stream",
];

fn main() {
    if let Err(message) = run() {
        // Cargo shows a build script's panic; the message is what the reader needs.
        println!("cargo::error={message}");
    }
}

fn run() -> Result<(), String> {
    let mlx = mlx::find()?;
    let mut build = cxx_build::bridges([
        "src/bridge.rs",
        "src/stream.rs",
        "src/collectives.rs",
        "src/blocks.rs",
    ]);
    build
        .std("c++20")
        .opt_level(2)
        .debug(false)
        .warnings(false)
        .include(&mlx.include);
    for flag in [
        "-fvisibility=hidden",
        "-fvisibility-inlines-hidden",
        "-fno-gnu-unique",
    ] {
        build.flag_if_supported(flag);
    }
    if mlx.is_static {
        build.define("MLX_STATIC", None);
    }
    for name in SOURCES.iter().chain(&["runtime"]) {
        let path = format!("cpp/{name}.cpp");
        build.file(&path);
        println!("cargo::rerun-if-changed={path}");
    }
    for header in [
        "blocks.h",
        "collectives.h",
        "error.h",
        "internal.h",
        "memo.h",
        "runs.h",
        "shim.h",
        "stream.h",
    ] {
        println!(
            "cargo::rerun-if-changed={}",
            Path::new("cpp").join(header).display()
        );
    }
    println!("cargo::rerun-if-changed=src/bridge.rs");
    println!("cargo::rerun-if-changed=src/stream.rs");
    println!("cargo::rerun-if-changed=src/collectives.rs");
    println!("cargo::rerun-if-changed=src/blocks.rs");
    println!("cargo::rerun-if-changed=build");
    build.compile("mlxcel_mlx_shim");
    mlx.link()
}
