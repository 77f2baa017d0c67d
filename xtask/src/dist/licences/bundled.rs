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

/// MLX's copy of PocketFFT, which begins with its notices.
const POCKETFFT: &str = "include/mlx/3rdparty/pocketfft.h";

/// Compiled into MLX's own library by its build: name, licence, holders, source. As far as its build files and the names in the library
/// tell; nobody gives out a list.
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
        "2010-2022 Max-Planck-Society\nCopyright (c) 2019-2020 Peter Bell\n\nFor the odd-sized DCT-IV transforms:\n\
         Copyright (c) 2003, 2007-14 Matteo Frigo\nCopyright (c) 2003, 2007-14 Massachusetts Institute of Technology\n\n\
         All rights reserved.",
        "https://gitlab.mpcdf.mpg.de/mtr/pocketfft",
    ],
];
const INSIDE_CUDA: [[&str; 4]; 6] = [
    [
        "NVTX",
        "Apache-2.0 WITH LLVM-exception",
        NVIDIA,
        "https://github.com/NVIDIA/NVTX",
    ],
    [
        "Thrust, of CCCL",
        "Apache-2.0",
        NVIDIA,
        "https://github.com/NVIDIA/cccl",
    ],
    [
        "CUB, of CCCL",
        "BSD-3-Clause",
        "2010-2011 Duane Merrill. All rights reserved.\nCopyright (c) NVIDIA CORPORATION. All rights reserved.",
        "https://github.com/NVIDIA/cccl",
    ],
    [
        "CUTLASS",
        "BSD-3-Clause",
        NVIDIA,
        "https://github.com/NVIDIA/cutlass",
    ],
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

/// Of every build for macOS.
const INSIDE_MACOS: [[&str; 4]; 1] = [[
    "metal-cpp",
    "Apache-2.0",
    "2023 Apple Inc.",
    "https://developer.apple.com/metal/cpp",
]];

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
        "MLX ({backend}): MIT; https://github.com/ml-explore/mlx; what is compiled into it follows, as far as known; versions of libraries beside it are in {folder}/"
    ));
    if !has_text {
        index.without_text.push(format!("MLX ({backend})"));
    }
    let of_cuda: &[[&str; 4]] = if backend.is_cuda() { &INSIDE_CUDA } else { &[] };
    let is_macos = backend == Backend::Metal || tree.root.join("lib/libmlx.dylib").is_file();
    let of_macos: &[[&str; 4]] = if is_macos { &INSIDE_MACOS } else { &[] };
    for &[name, licence, holders, source] in INSIDE.iter().chain(of_cuda).chain(of_macos) {
        let said = Said {
            name,
            licence,
            holders,
            source,
        };
        add(&dir, &format!("{name}, in MLX ({backend})"), &said, index)?;
    }
    // Its own words where they are to be had, since they change with MLX.
    if let Some(notice) = first_comment(&tree.root.join(POCKETFFT)) {
        write_into(&dir, "pocketfft-BSD-3-Clause.txt", &notice)?;
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

/// What a C source begins with, if that is a notice.
fn first_comment(source: &Path) -> Option<String> {
    let text = std::fs::read_to_string(source).ok()?;
    let comment = text.trim_start().strip_prefix("/*")?.split_once("*/")?.0;
    let is_notice = comment.contains("Copyright") && comment.contains("Redistribution");
    is_notice.then(|| format!("{}\n", comment.trim()))
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
            .chain(&INSIDE_MACOS)
            .map(|part| (part[0], part[1]));
        let without: Vec<&str> = ours
            .chain(inside)
            .filter(|(_, licence)| texts::of_expression(licence, "x").is_empty())
            .map(|(name, _)| name)
            .collect();
        assert_eq!(without, ["CUDA run-time library, static"]);
    }

    #[test]
    fn notices_are_those_of_the_source_where_it_is_there() {
        let base = std::env::temp_dir().join(format!("xtask-notices-{}", std::process::id()));
        let source = base.join("tree").join(POCKETFFT);
        for dir in [source.parent().expect("is inside"), &base.join("tree/lib")] {
            std::fs::create_dir_all(dir).expect("creates");
        }
        std::fs::write(base.join("tree/lib/libmlx.dylib"), "x").expect("writes");
        let tree = MlxTree {
            root: base.join("tree"),
        };
        let written = |out: &str| {
            let mut index = Index::default();
            collect(Backend::Cpu, &tree, &base.join(out), &mut index).expect("collects");
            let file = base.join(out).join("mlx-cpu/pocketfft-BSD-3-Clause.txt");
            let text = std::fs::read_to_string(file).expect("is there");
            (text, index.text())
        };
        let (text, index) = written("without");
        for holder in [
            "2010-2022 Max-Planck-Society",
            "2019-2020 Peter Bell",
            "2003, 2007-14 Matteo Frigo",
            "2003, 2007-14 Massachusetts Institute of Technology",
        ] {
            assert!(text.contains(holder), "{holder}: {text}");
        }
        // A build for macOS, whatever its backend.
        assert!(
            index.contains("metal-cpp, in MLX (cpu): Apache-2.0"),
            "{index}"
        );
        let notice = "/*\nCopyright (C) 2030 Ada\n\nRedistribution and use\n*/\nint a;\n";
        std::fs::write(&source, notice).expect("writes");
        let (text, _) = written("with");
        assert_eq!(text, "Copyright (C) 2030 Ada\n\nRedistribution and use\n");
        std::fs::remove_dir_all(&base).expect("removes");
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
            "LLVM-exception.txt",
            "cub-of-cccl-BSD-3-Clause.txt",
        ] {
            assert!(dir.join(file).is_file(), "{file}");
        }
        let text = index.text();
        assert!(
            text.contains("libgfortran, beside MLX (cuda13): GPL-3.0"),
            "{text}"
        );
        assert!(
            text.contains("NVTX, in MLX (cuda13): Apache-2.0 WITH LLVM-exception"),
            "{text}"
        );
        assert!(
            !text.contains("LAPACK") && !text.contains("metal-cpp"),
            "{text}"
        );
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
