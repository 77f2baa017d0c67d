//! Which build of MLX a library is, by the libraries that it needs itself; and what a package needs from the machine.

use std::collections::BTreeSet;
use std::path::Path;

use crate::backend::Backend;
use crate::error::Error;
use crate::process::Run;

/// A build of MLX as its library shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Build {
    Cpu,
    /// With its major version where that can be seen.
    Cuda(Option<u32>),
    Rocm,
    /// One library for the CPU and the GPU of a Mac.
    Metal,
}

/// In every Linux system that mlxcel runs on.
const OF_THE_SYSTEM: [&str; 9] = [
    "ld-linux",
    "libc.so",
    "libdl.so",
    "libgcc_s.so",
    "libm.so",
    "libpthread.so",
    "librt.so",
    "libstdc++.so",
    "linux-vdso",
];

/// Refuses an MLX of another build than the backend needs. Of a static library nothing can be seen.
pub fn check(lib: &Path, backend: Backend) -> Result<(), String> {
    let shared = lib.join("libmlx.so");
    let found = if shared.is_file() {
        let needed = needed(&shared).map_err(|error| error.to_string())?;
        build_of(&needed)
    } else if lib.join("libmlx.dylib").is_file() {
        if lib.join("mlx.metallib").is_file() {
            Build::Metal
        } else {
            Build::Cpu
        }
    } else {
        return Ok(());
    };
    if serves(&found, backend) {
        return Ok(());
    }
    Err(format!(
        "expected a build of MLX for backend {backend}, found {} (in {}); name the folder of such a build, or unset MLX_ROOT to have it fetched",
        described(&found),
        lib.display()
    ))
}

fn serves(found: &Build, backend: Backend) -> bool {
    match (backend, found) {
        (Backend::Cpu, Build::Cpu | Build::Metal) | (Backend::Metal, Build::Metal) => true,
        (Backend::Cuda13, Build::Cuda(major)) => major.is_none_or(|major| major == 13),
        (Backend::Cuda12, Build::Cuda(major)) => major.is_none_or(|major| major == 12),
        _ => false,
    }
}

fn described(build: &Build) -> String {
    match build {
        Build::Cpu => "one for the CPU alone: it needs no library of a device".to_owned(),
        Build::Cuda(Some(major)) => {
            format!("one for CUDA {major}: it needs libcuda.so.1 and CUDA {major}'s libraries")
        }
        Build::Cuda(None) => "one for CUDA: it needs libcuda.so.1".to_owned(),
        Build::Rocm => "one for ROCm: it needs libamdhip64".to_owned(),
        Build::Metal => "one for Metal: mlx.metallib is beside it".to_owned(),
    }
}

fn build_of(needed: &[String]) -> Build {
    let major = |stem: &str| {
        needed
            .iter()
            .find_map(|name| name.strip_prefix(stem)?.parse::<u32>().ok())
    };
    let needs = |stem: &str| needed.iter().any(|name| name.starts_with(stem));
    if needs("libamdhip64.") {
        return Build::Rocm;
    }
    // These have the major version of CUDA as their own; cuFFT and cuSOLVER count differently.
    let of_cuda = ["libcublasLt.so.", "libnvrtc.so.", "libcudart.so."];
    if needs("libcuda.") || of_cuda.iter().any(|stem| needs(stem)) {
        return Build::Cuda(of_cuda.iter().find_map(|stem| major(stem)));
    }
    Build::Cpu
}

/// The names that a shared library asks the loader for (ELF only).
pub fn needed(library: &Path) -> Result<Vec<String>, Error> {
    let outcome = Run::new("readelf")
        .arg("-dW")
        .arg(library)
        .env("LC_ALL", "C")
        .hint("; install binutils")
        .capture()?;
    let found = names_in(&outcome.stdout);
    if found.is_empty() {
        return Err(Error::Malformed {
            path: library.to_path_buf(),
            message: format!(
                "expected a shared library, found none that readelf can read (damaged?): {}",
                outcome
                    .stderr
                    .lines()
                    .next()
                    .unwrap_or("it names no library that it needs")
            ),
        });
    }
    Ok(found)
}

fn names_in(report: &str) -> Vec<String> {
    report
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned()))
        .collect()
}

/// What the libraries of a package need that is neither in it nor in every system, sorted.
pub fn needed_from_the_machine(libraries: &[&Path]) -> Result<Vec<String>, Error> {
    let inside: BTreeSet<String> = libraries
        .iter()
        .map(|path| super::tree::name_of(path))
        .collect();
    let mut outside = BTreeSet::new();
    for library in libraries {
        outside.extend(needed(library)?);
    }
    outside.retain(|name| {
        !inside.contains(name) && !OF_THE_SYSTEM.iter().any(|stem| name.starts_with(stem))
    });
    Ok(outside.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_build_is_known_by_what_it_needs() {
        let cpu = build_of(&names(&["libblas-bd8a282c.so.3.10.0", "libc.so.6"]));
        let cuda13 = build_of(&names(&[
            "libcufft.so.12",
            "libcublasLt.so.13",
            "libcuda.so.1",
        ]));
        let cuda12 = build_of(&names(&[
            "libcusolver.so.11",
            "libnvrtc.so.12",
            "libcuda.so.1",
        ]));
        assert_eq!(cpu, Build::Cpu);
        assert_eq!(cuda13, Build::Cuda(Some(13)));
        assert_eq!(cuda12, Build::Cuda(Some(12)));
        assert_eq!(build_of(&names(&["libcuda.so.1"])), Build::Cuda(None));
        assert_eq!(build_of(&names(&["libamdhip64.so.6"])), Build::Rocm);
    }

    #[test]
    fn a_build_serves_its_own_backend() {
        let builds = [
            (Build::Cpu, [true, false, false, false]),
            (Build::Cuda(Some(13)), [false, true, false, false]),
            (Build::Cuda(Some(12)), [false, false, true, false]),
            (Build::Cuda(None), [false, true, true, false]),
            (Build::Rocm, [false; 4]),
            (Build::Metal, [true, false, false, true]),
        ];
        for (build, expected) in builds {
            let found = Backend::ALL.map(|backend| serves(&build, backend));
            assert_eq!(found, expected, "{build:?}");
        }
    }

    #[test]
    fn names_come_from_readelf() {
        let report = "Dynamic section at offset 0x1 contains 2 entries:\n \
            0x0000000000000001 (NEEDED)             Shared library: [libcuda.so.1]\n \
            0x000000000000000e (SONAME)             Library soname: [libmlx.so]\n";
        assert_eq!(names_in(report), ["libcuda.so.1"]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn another_build_and_a_damaged_one_are_refused() {
        let lib = std::env::temp_dir().join(format!("xtask-build-{}", std::process::id()));
        std::fs::create_dir_all(&lib).expect("creates");
        assert_eq!(check(&lib, Backend::Cuda13), Ok(()), "static");
        let library = lib.join("libmlx.so");
        std::fs::write(&library, "").expect("writes");
        let problem = check(&lib, Backend::Cpu).expect_err("is empty");
        assert!(problem.contains("damaged"), "{problem}");
        // This program needs no library of a device, as MLX for the CPU does.
        std::fs::copy(std::env::current_exe().expect("is known"), &library).expect("copies");
        assert_eq!(check(&lib, Backend::Cpu), Ok(()));
        for backend in [Backend::Cuda13, Backend::Cuda12, Backend::Metal] {
            let problem = check(&lib, backend).expect_err("is for the CPU");
            let expected = format!("for backend {backend}, found one for the CPU");
            assert!(problem.contains(&expected), "{problem}");
        }
        std::fs::remove_dir_all(&lib).expect("removes");
    }
}
