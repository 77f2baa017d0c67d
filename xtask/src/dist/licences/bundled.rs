//! MLX's library, what is compiled into it, and what is beside it in a backend's package.

use std::path::Path;

use super::{Index, copy_into, texts, write_into};
use crate::backend::Backend;
use crate::error::Error;
use crate::mlx::MlxTree;

/// A part of a backend's package, known by the files that it is.
struct Part {
    name: &'static str,
    licence: &'static str,
    holders: &'static str,
    source: &'static str,
    is_it: fn(&str) -> bool,
}

/// What is said of a part, wherever it is.
struct Said<'a> {
    name: &'a str,
    licence: &'a str,
    holders: &'a str,
    source: &'a str,
}

const NVIDIA: &str = "NVIDIA CORPORATION & AFFILIATES. All rights reserved.";

/// Files of a package by their place in it. Versions are in the list of components (sboms) that MLX brings.
const PARTS: [Part; 7] = [
    Part {
        name: "libgfortran",
        licence: "GPL-3.0-or-later WITH GCC-exception-3.1",
        holders: "Free Software Foundation, Inc.",
        source: "https://gcc.gnu.org",
        is_it: |file| file.contains(".libs/libgfortran"),
    },
    Part {
        name: "libquadmath",
        licence: "LGPL-2.0-or-later",
        holders: "Free Software Foundation, Inc.",
        source: "https://gcc.gnu.org",
        is_it: |file| file.contains(".libs/libquadmath"),
    },
    Part {
        name: "BLAS (reference)",
        licence: "BSD-3-Clause-Open-MPI",
        holders: "The University of Tennessee",
        source: "https://www.netlib.org/blas",
        is_it: |file| file.contains(".libs/libblas"),
    },
    Part {
        name: "LAPACK (reference)",
        licence: "BSD-3-Clause-Open-MPI",
        holders: "The University of Tennessee",
        source: "https://www.netlib.org/lapack",
        is_it: |file| file.contains(".libs/liblapack"),
    },
    Part {
        name: "CCCL: headers of libcu++",
        licence: "Apache-2.0 WITH LLVM-exception",
        holders: NVIDIA,
        source: "https://github.com/NVIDIA/cccl",
        is_it: |file| file.starts_with("mlx/include/cccl/"),
    },
    Part {
        name: "CUTLASS: headers",
        licence: "BSD-3-Clause",
        holders: NVIDIA,
        source: "https://github.com/NVIDIA/cutlass",
        is_it: |file| file.starts_with("mlx/include/cutlass/"),
    },
    Part {
        name: "CuTe: headers, of CUTLASS",
        licence: "BSD-3-Clause",
        holders: NVIDIA,
        source: "https://github.com/NVIDIA/cutlass",
        is_it: |file| file.starts_with("mlx/include/cute/"),
    },
];

/// Compiled into MLX's own library by its build: name, licence, holders, source.
const INSIDE: [[&str; 4]; 4] = [
    [
        "fmt",
        "MIT",
        "2012 - present, Victor Zverovich and fmt contributors",
        "https://github.com/fmtlib/fmt",
    ],
    [
        "JSON for Modern C++",
        "MIT",
        "2013 - 2025 Niels Lohmann",
        "https://github.com/nlohmann/json",
    ],
    [
        "gguf-tools",
        "MIT",
        "2024 Salvatore Sanfilippo",
        "https://github.com/antirez/gguf-tools",
    ],
    [
        "PocketFFT",
        "BSD-3-Clause",
        "2010 - 2018 Max-Planck-Society",
        "https://gitlab.mpcdf.mpg.de/mtr/pocketfft",
    ],
];
const INSIDE_CUDA: [[&str; 4]; 2] = [
    [
        "cuDNN frontend",
        "MIT",
        "NVIDIA CORPORATION & AFFILIATES",
        "https://github.com/NVIDIA/cudnn-frontend",
    ],
    [
        "CUDA run-time library, static",
        "NVIDIA's licence for the CUDA toolkit (https://docs.nvidia.com/cuda/eula)",
        "NVIDIA CORPORATION & AFFILIATES",
        "https://developer.nvidia.com/cuda-toolkit",
    ],
];

pub fn collect(
    backend: Backend,
    tree: &MlxTree,
    out: &Path,
    index: &mut Index,
) -> Result<(), Error> {
    let folder = format!("mlx-{backend}");
    let dir = out.join(&folder);
    std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
    let mut has_text = false;
    for file in tree.notices()? {
        has_text |= file.parent().is_some_and(|dir| dir.ends_with("licenses"));
        copy_into(&file, &dir)?;
    }
    index.lines.push(format!(
        "MLX ({backend}): MIT; https://github.com/ml-explore/mlx; versions of libraries beside it are in {folder}/"
    ));
    if !has_text {
        index.without_text.push(format!("MLX ({backend})"));
    }
    let of_cuda: &[[&str; 4]] = if backend.is_cuda() { &INSIDE_CUDA } else { &[] };
    for &[name, licence, holders, source] in INSIDE.iter().chain(of_cuda) {
        let said = Said {
            name,
            licence,
            holders,
            source,
        };
        add(&dir, &format!("{name}, in MLX ({backend})"), &said, index)?;
    }
    for part in beside(tree, backend, index)? {
        let said = Said {
            name: part.name,
            licence: part.licence,
            holders: part.holders,
            source: part.source,
        };
        let label = format!("{}, beside MLX ({backend})", part.name);
        add(&dir, &label, &said, index)?;
    }
    Ok(())
}

/// The parts that a package has; a file that is none of them is told, since nobody looked at its licence.
fn beside(
    tree: &MlxTree,
    backend: Backend,
    index: &mut Index,
) -> Result<Vec<&'static Part>, Error> {
    let mut found = [false; PARTS.len()];
    for file in tree.runtime_files()? {
        let place = file.placed.to_string_lossy();
        let known = PARTS.iter().position(|part| (part.is_it)(&place));
        match known.and_then(|number| found.get_mut(number)) {
            Some(seen) => *seen = true,
            None if place.starts_with("mlx/lib/") => {}
            None => index
                .without_text
                .push(format!("{place}, beside MLX ({backend})")),
        }
    }
    Ok(PARTS
        .iter()
        .zip(found)
        .filter(|(_, seen)| *seen)
        .map(|(part, _)| part)
        .collect())
}

fn add(dir: &Path, label: &str, said: &Said<'_>, index: &mut Index) -> Result<(), Error> {
    let line = format!("{label}: {}; {}", said.licence, said.source);
    index.lines.push(line);
    let texts = texts::of_expression(said.licence, said.holders);
    if texts.is_empty() {
        index.without_text.push(label.to_owned());
    }
    for (licence, text) in texts {
        // One that names no holders is the same for all parts that have it.
        let file = if texts::names_holders(licence) {
            format!("{}-{licence}.txt", slug(said.name))
        } else {
            format!("{licence}.txt")
        };
        write_into(dir, &file, &text)?;
    }
    Ok(())
}

fn slug(name: &str) -> String {
    let words: Vec<String> = name
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_ascii_lowercase)
        .collect();
    words.join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_licence_named_here_has_a_text_except_nvidias_own() {
        let ours = PARTS.iter().map(|part| (part.name, part.licence));
        let inside = INSIDE
            .iter()
            .chain(&INSIDE_CUDA)
            .map(|part| (part[0], part[1]));
        let without: Vec<&str> = ours
            .chain(inside)
            .filter(|(_, licence)| texts::of_expression(licence, "x").is_empty())
            .map(|(name, _)| name)
            .collect();
        assert_eq!(without, ["CUDA run-time library, static"]);
    }

    #[cfg(unix)]
    #[test]
    fn what_a_package_holds_is_named_with_its_text() {
        let base = std::env::temp_dir().join(format!("xtask-bundled-{}", std::process::id()));
        let root = base.join("tree");
        for file in [
            "mlx/lib/libmlx.so",
            "mlx/include/cutlass/a.h",
            "mlx_cuda_13.libs/libgfortran-f7.so.5",
            "mlx_cuda_13.libs/libstranger.so.1",
            "mlx_cuda_13.dist-info/licenses/LICENSE",
        ] {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().expect("is inside")).expect("creates");
            std::fs::write(path, "x").expect("writes");
        }
        for name in ["lib", "include"] {
            std::os::unix::fs::symlink(Path::new("mlx").join(name), root.join(name))
                .expect("links");
        }
        let tree = MlxTree { root };
        let mut index = Index::default();
        let out = base.join("licences");
        collect(Backend::Cuda13, &tree, &out, &mut index).expect("collects");
        let dir = out.join("mlx-cuda13");
        for file in [
            "LICENSE",
            "GPL-3.0-or-later.txt",
            "GCC-exception-3.1.txt",
            "cutlass-headers-BSD-3-Clause.txt",
            "fmt-MIT.txt",
        ] {
            assert!(dir.join(file).is_file(), "{file}");
        }
        let text = index.text();
        assert!(
            text.contains("libgfortran, beside MLX (cuda13): GPL-3.0"),
            "{text}"
        );
        assert!(!text.contains("LAPACK"), "{text}");
        assert_eq!(
            index.without_text,
            [
                "CUDA run-time library, static, in MLX (cuda13)",
                "mlx_cuda_13.libs/libstranger.so.1, beside MLX (cuda13)"
            ]
        );
        std::fs::remove_dir_all(&base).expect("removes");
    }
}
