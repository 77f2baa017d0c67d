//! How the plugin is linked: where it finds MLX's library when it is loaded, and what it shows of itself.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DEP_MLX_STATIC");
    let is_macos = std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("macos");
    // The functions that C++ calls back into are exported by the libraries they are in; a plugin shows its entry alone.
    let hide = if is_macos {
        "-unexported_symbol,_cxxbridge1*"
    } else {
        "--exclude-libs,ALL"
    };
    println!("cargo::rustc-link-arg-cdylib=-Wl,{hide}");
    if std::env::var("DEP_MLX_STATIC").as_deref() == Ok("true") {
        return;
    }
    // A package of the plugin keeps the layout of MLX's own files (`cargo xtask plugins`).
    let origin = if is_macos { "@loader_path" } else { "$ORIGIN" };
    for place in [format!("{origin}/mlx/lib"), origin.to_owned()] {
        println!("cargo::rustc-link-arg-cdylib=-Wl,-rpath,{place}");
    }
}
