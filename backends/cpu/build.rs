//! How the plugin finds MLX's library when it is loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DEP_MLX_STATIC");
    if std::env::var("DEP_MLX_STATIC").as_deref() == Ok("true") {
        return;
    }
    // A package of the plugin keeps the layout of MLX's own files (`cargo xtask plugins`).
    let origin = match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("macos") => "@loader_path",
        _ => "$ORIGIN",
    };
    for place in [format!("{origin}/mlx/lib"), origin.to_owned()] {
        println!("cargo::rustc-link-arg-cdylib=-Wl,-rpath,{place}");
    }
}
