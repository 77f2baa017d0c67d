//! The kernels' own tests under AddressSanitizer: reads and writes outside of a slice that no result would show.
//!
//! The sanitizer is an unstable option of a compiler whose runtime libraries every release ships, so the pinned compiler is asked to
//! accept it; nothing that is shipped is built this way. Arithmetic overflow is checked by the ordinary tests, which are
//! built with debug assertions.

use crate::error::Error;
use crate::process::Run;
use crate::workspace::Workspace;

/// Crates that are mostly `unsafe` and have no foreign code in them. The ABI is not among them: it lets a panic's
/// payload leak on purpose, which the sanitizer reports.
const CRATES: [&str; 1] = ["mlxcel-cpu-kernels"];

pub fn run(workspace: &Workspace) -> Result<(), Error> {
    let description = Run::new("rustc").arg("-vV").dir(&workspace.root).stdout()?;
    let triple = description
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .unwrap_or_default();
    let packages = CRATES.iter().flat_map(|name| ["-p", name]);
    Run::cargo("test")
        .args(packages)
        .args(["--lib", "--target", triple])
        // A folder of its own: other flags would have everything in the usual one built again.
        .env("CARGO_TARGET_DIR", workspace.target.join("sanitize"))
        .env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only")
        // Full optimisation of instrumented kernels takes the compiler longer than the tests save.
        .env(
            "CARGO_PROFILE_DEV_PACKAGE_MLXCEL_CPU_KERNELS_OPT_LEVEL",
            "1",
        )
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", "-Zsanitizer=address")
        .dir(&workspace.root)
        .run()?;
    Ok(())
}
