//! llama.cpp and mlx-lm in a scratch folder: `target/peers`, from their published packages.
//!
//! llama.cpp comes as the source package of llama-cpp-python, which holds all of its tools; they are built for this machine's
//! processor, as its own documentation says. Versions are whatever the index gives, and are told in every table.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::process::Run;
use crate::workspace::Workspace;

/// Tools of llama.cpp that are used.
const TARGETS: [&str; 7] = [
    "llama-bench",
    "llama-batched-bench",
    "llama-completion",
    "llama-perplexity",
    "llama-quantize",
    "llama-server",
    "llama-tokenize",
];

const SOURCE_PACKAGE: &str = "llama-cpp-python";

/// The scratch folder.
#[derive(Debug, Clone)]
pub struct Scratch {
    pub dir: PathBuf,
}

impl Scratch {
    pub fn of(workspace: &Workspace) -> Result<Self, Error> {
        let dir = workspace.target.join("peers");
        std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
        Ok(Self { dir })
    }

    fn bin(&self, name: &str) -> PathBuf {
        self.dir.join("env").join("bin").join(name)
    }

    /// The environment's interpreter, which is made if need be.
    pub fn python(&self) -> Result<PathBuf, Error> {
        let python = self.bin("python");
        if !python.is_file() {
            let program = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
            Run::new(program)
                .args(["-m", "venv"])
                .arg(self.dir.join("env"))
                .hint("; install Python 3 with venv and pip, or name an interpreter in PYTHON")
                .run()?;
        }
        Ok(python)
    }

    /// Installs packages by their plain names unless a marker says that they are there.
    fn packages(&self, marker: &str, names: &[&str]) -> Result<(), Error> {
        let marker = self.dir.join(format!(".{marker}-installed"));
        if marker.is_file() {
            return Ok(());
        }
        eprintln!("installing {}", names.join(" "));
        pip(&self.python()?, "install")
            .args(names)
            .capture()?
            .ok()?;
        std::fs::write(&marker, "").map_err(Error::io("write", &marker))
    }

    /// mlx-lm with MLX's CPU library.
    pub fn mlx_lm(&self) -> Result<(), Error> {
        self.packages("mlx-lm", &["mlx-lm", "mlx[cpu]"])
    }

    /// The writer of GGUF files.
    pub fn gguf(&self) -> Result<(), Error> {
        self.packages("gguf", &["gguf"])
    }

    /// Version of an installed package.
    pub fn version(&self, package: &str) -> Result<String, Error> {
        let code = format!("import importlib.metadata as m; print(m.version('{package}'))");
        let outcome = Run::new(self.python()?)
            .args(["-c", &code])
            .capture()?
            .ok()?;
        Ok(outcome.stdout.trim().to_owned())
    }

    /// llama.cpp's tools, which are built if need be.
    pub fn llama(&self) -> Result<Llama, Error> {
        let source = match self.unpacked()? {
            Some(source) => source,
            None => {
                self.fetch_source()?;
                self.unpacked()?.ok_or_else(|| Error::Missing {
                    path: self.dir.join("src"),
                    remedy: format!(
                        "the source package of {SOURCE_PACKAGE} holds no vendor/llama.cpp"
                    ),
                })?
            }
        };
        let build = self.dir.join("build-llama.cpp");
        let llama = Llama {
            version: package_version(&source),
            bin: build.join("bin"),
        };
        if TARGETS.iter().any(|target| !llama.tool(target).is_file()) {
            self.build(&source, &build)?;
        }
        Ok(llama)
    }

    /// `vendor/llama.cpp` of the package that was unpacked last.
    fn unpacked(&self) -> Result<Option<PathBuf>, Error> {
        let dir = self.dir.join("src");
        if !dir.is_dir() {
            return Ok(None);
        }
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&dir).map_err(Error::io("list", &dir))? {
            let path = entry.map_err(Error::io("list", &dir))?.path();
            let source = path.join("vendor/llama.cpp");
            if source.join("CMakeLists.txt").is_file() {
                found.push(source);
            }
        }
        found.sort();
        Ok(found.pop())
    }

    fn fetch_source(&self) -> Result<(), Error> {
        let downloads = self.dir.join("downloads");
        eprintln!("fetching the source package of {SOURCE_PACKAGE} (about 80 MB)");
        let python = self.python()?;
        pip(&python, "download")
            .args(["--no-deps", "--no-binary", SOURCE_PACKAGE, "--dest"])
            .arg(&downloads)
            .arg(SOURCE_PACKAGE)
            .capture()?
            .ok()?;
        let archive = newest_archive(&downloads)?;
        let code =
            "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='data')";
        Run::new(&python)
            .args(["-c", code])
            .arg(&archive)
            .arg(self.dir.join("src"))
            .capture()?
            .ok()?;
        std::fs::remove_dir_all(&downloads).map_err(Error::io("remove", &downloads))
    }

    fn build(&self, source: &Path, build: &Path) -> Result<(), Error> {
        self.packages("cmake", &["cmake", "ninja"])?;
        eprintln!("building llama.cpp; this takes some ten minutes on two cores");
        let ninja = self.bin("ninja");
        Run::new(self.bin("cmake"))
            .arg("-S")
            .arg(source)
            .arg("-B")
            .arg(build)
            .args([
                "-G",
                "Ninja",
                "-DCMAKE_BUILD_TYPE=Release",
                "-DGGML_NATIVE=ON",
            ])
            .arg(format!("-DCMAKE_MAKE_PROGRAM={}", ninja.display()))
            // The page for browsers and TLS are no part of what is measured, and need more than a compiler.
            .args([
                "-DLLAMA_BUILD_UI=OFF",
                "-DLLAMA_USE_PREBUILT_UI=OFF",
                "-DLLAMA_OPENSSL=OFF",
            ])
            .args([
                "-DLLAMA_BUILD_TESTS=OFF",
                "-DLLAMA_BUILD_EXAMPLES=OFF",
                "-DLLAMA_BUILD_APP=OFF",
            ])
            .args([
                "-DBUILD_SHARED_LIBS=OFF",
                "-DLLAMA_BUILD_TOOLS=ON",
                "-DLLAMA_BUILD_SERVER=ON",
            ])
            .capture()?
            .ok()?;
        Run::new(self.bin("cmake"))
            .arg("--build")
            .arg(build)
            .arg("--target")
            .args(TARGETS)
            .capture()?
            .ok()?;
        Ok(())
    }
}

/// llama.cpp's tools.
#[derive(Debug, Clone)]
pub struct Llama {
    /// Of the package that its source came in.
    pub version: String,
    bin: PathBuf,
}

impl Llama {
    pub fn tool(&self, name: &str) -> PathBuf {
        self.bin
            .join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
    }
}

fn pip(python: &Path, subcommand: &str) -> Run {
    Run::new(python)
        .args(["-m", "pip", subcommand, "--quiet"])
        .env("PIP_NO_INPUT", "1")
        .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        .env("PIP_RESUME_RETRIES", "5")
}

/// `llama_cpp_python-0.3.36/vendor/llama.cpp` is of `0.3.36`.
fn package_version(source: &Path) -> String {
    let package = source.ancestors().nth(2).and_then(Path::file_name);
    package
        .and_then(|name| name.to_str()?.rsplit_once('-'))
        .map_or_else(|| "unknown".to_owned(), |(_, version)| version.to_owned())
}

fn newest_archive(dir: &Path) -> Result<PathBuf, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let path = entry.map_err(Error::io("list", dir))?.path();
        if path.to_string_lossy().ends_with(".tar.gz") {
            found.push(path);
        }
    }
    found.sort();
    found.pop().ok_or_else(|| Error::Missing {
        path: dir.join("*.tar.gz"),
        remedy: "pip ended well, but wrote no source package".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_comes_from_the_packages_folder() {
        let path = Path::new("/t/src/llama_cpp_python-0.3.36/vendor/llama.cpp");
        assert_eq!(package_version(path), "0.3.36");
        assert_eq!(package_version(Path::new("x")), "unknown");
    }
}
