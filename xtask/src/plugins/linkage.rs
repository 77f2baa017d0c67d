//! Whether a plugin package is whole: every library found, and MLX found inside the package, not elsewhere by luck.

use std::path::Path;

use crate::error::Error;
use crate::process::Run;

/// Libraries that a backend's package must bring itself.
const OWN_LIBRARIES: [&str; 4] = ["libmlx.", "libjaccl.", "libblas-", "liblapack-"];

/// Asks the system's loader (`ldd`, Linux) where it would find what `library` needs.
pub fn check(library: &Path, package: &Path) -> Result<(), Error> {
    if !cfg!(target_os = "linux") {
        // macOS has no counterpart that resolves names as the loader does; the host's own `plugin verify` loads it there.
        return Ok(());
    }
    let report = Run::new("ldd")
        .arg(library)
        .hint("; it comes with the C library")
        .without_cargo_library_path()
        .capture()?;
    if !report.status.success() {
        return Err(Error::Plugin {
            plugin: library.to_path_buf(),
            problem: format!(
                "the loader cannot read it or a library beside it, which is damaged then ({}): {}; remove the package, run `cargo xtask setup --backend B` for its backend, and build it again",
                report.status,
                [report.stderr.trim(), report.stdout.trim()]
                    .join(" ")
                    .trim()
            ),
        });
    }
    let report = report.stdout;
    let package = package
        .canonicalize()
        .map_err(Error::io("resolve", package))?;
    let problems = problems(&report, |path| {
        path.canonicalize()
            .is_ok_and(|found| found.starts_with(&package))
    });
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::Plugin {
        plugin: library.to_path_buf(),
        problem: format!(
            "{}; a backend must be linked with the run path $ORIGIN/mlx/lib and nothing before it",
            problems.join(", ")
        ),
    })
}

/// NVIDIA's libraries are expected on the machine, `libcuda` with its driver and the others with its packages; the machine that builds
/// needs none of them. The host reports what is missing when the backend is probed.
fn is_nvidias(name: &str) -> bool {
    let stems = [
        "libcuda.",
        "libnccl.",
        "libcublas",
        "libcufft",
        "libcusolver",
        "libcusparse",
        "libnvJitLink",
        "libnvrtc",
        "libcudnn",
        "libcudart",
    ];
    stems.iter().any(|prefix| name.starts_with(prefix))
}

fn problems(report: &str, is_inside: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for line in report.lines() {
        let Some((name, place)) = line.trim().split_once(" => ") else {
            continue;
        };
        if place.starts_with("not found") {
            if !is_nvidias(name) {
                found.push(format!("{name} is not found"));
            }
            continue;
        }
        let path = place.split(" (").next().unwrap_or(place);
        let own = OWN_LIBRARIES.iter().any(|prefix| name.starts_with(prefix));
        if own && !is_inside(Path::new(path)) {
            found.push(format!("{name} is taken from {path}, outside the package"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\tlinux-vdso.so.1 (0x00007f)\n\
        \tlibmlx.so => /p/mlx/lib/libmlx.so (0x00007f)\n\
        \tlibc.so.6 => /lib/libc.so.6 (0x00007f)\n\
        \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";

    #[test]
    fn a_whole_package_has_no_problem() {
        assert!(problems(REPORT, |path| path.starts_with("/p")).is_empty());
    }

    #[test]
    fn mlx_from_elsewhere_is_a_problem() {
        let found = problems(REPORT, |_| false);
        assert_eq!(
            found,
            ["libmlx.so is taken from /p/mlx/lib/libmlx.so, outside the package"]
        );
    }

    #[test]
    fn missing_libraries_are_named_except_nvidias() {
        let report = "\tlibblas-1.so.3 => not found\n\tlibcuda.so.1 => not found\n\tlibcusparse.so.12 => not found\n";
        assert_eq!(problems(report, |_| true), ["libblas-1.so.3 is not found"]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_damaged_library_is_told_as_one() {
        let package = std::env::temp_dir().join(format!("xtask-linkage-{}", std::process::id()));
        std::fs::create_dir_all(&package).expect("creates");
        let library = package.join("libmlxcel_backend_cpu.so");
        std::fs::write(&library, "").expect("writes");
        let error = check(&library, &package).expect_err("is empty").to_string();
        assert!(error.contains("damaged"), "{error}");
        std::fs::remove_dir_all(&package).expect("removes");
    }
}
