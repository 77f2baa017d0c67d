//! README.txt of a package: what it is, of which commit, where it goes, and what the machine must have.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::backend::Backend;
use crate::error::Error;
use crate::fetch::pins::MlxPins;
use crate::mlx::{MlxTree, library};
use crate::plugins::Plan;
use crate::plugins::build::Built;
use crate::plugins::select::Kind;
use crate::workspace::{Origin, Workspace};

/// For a package with the host.
pub const PROGRAM: &str = "\
bin/mlxcel             the program; bin/mlxcel-server is its server alone
lib/mlxcel/plugins/    one folder for each plugin; the program finds them there, beside itself
licences/              THIRD-PARTY.md names everything that is in here, with its licence

Keep bin and lib together, wherever that is. `bin/mlxcel doctor` says what runs on this machine and what is missing.
";

/// For the plugin of a backend alone.
pub const PLUGIN: &str = "\
mlxcel-backend-*/      the plugin's folder: the plugin, MLX, and the libraries that MLX brings
licences/              THIRD-PARTY.md names everything that is in here, with its licence

Copy the plugin's folder, whole, to one of the places where mlxcel looks for plugins:
  ~/.local/share/mlxcel/plugins/      for yourself (macOS: ~/Library/Application Support/mlxcel/plugins/)
  lib/mlxcel/plugins/                 of an unpacked mlxcel
  /usr/lib/mlxcel/plugins/            for everybody (macOS: /usr/local/lib/mlxcel/plugins/)
or name the folder that holds it in MLXCEL_PLUGIN_PATH or --plugins-dir. Then `mlxcel doctor` says whether it runs here, and if
not, why.
";

/// What the README is about.
#[derive(Debug)]
pub struct About<'a> {
    pub title: String,
    /// What is in it: one of the texts above, or one of the package's own.
    pub content: &'static str,
    pub origin: &'a Origin,
    /// The folder with the packages of the plugins.
    pub plugins: &'a Path,
    /// The folder that is packed.
    pub within: &'a Path,
}

pub fn write(
    workspace: &Workspace,
    plan: &Plan<'_>,
    built: &[Built],
    about: &About<'_>,
) -> Result<(), Error> {
    let version = MlxPins::read(&workspace.root)?.version;
    let backends: Vec<&str> = plan
        .trees
        .iter()
        .map(|(backend, _)| backend.name())
        .collect();
    let mut text = heading(
        &about.title,
        about.origin,
        &interface(&workspace.root.join("abi/surface.txt"))?,
        &format!("{version} ({})", backends.join(", ")),
    );
    text.push_str(about.content);
    for (backend, tree) in &plan.trees {
        let Some(plugin) = built
            .iter()
            .find(|plugin| plugin.kind == Kind::Backend(*backend))
        else {
            continue;
        };
        let package = about.plugins.join(&plugin.package);
        let place = package.strip_prefix(about.within).unwrap_or(&package);
        let needed = needed(plugin, tree)?;
        let packages = tree.required_packages()?;
        text.push_str(&requirements(*backend, place, &needed, &packages));
    }
    let path = about.within.join("README.txt");
    std::fs::write(&path, text).map_err(Error::io("write", &path))
}

fn heading(title: &str, origin: &Origin, interface: &str, mlx: &str) -> String {
    format!(
        "{title}\n\ncommit                 {}\nplugin interface       {interface}\nMLX                    {mlx}\n\n",
        origin.described()
    )
}

/// "1.4", out of the first line of the interface's text form, which CI compares with the code.
fn interface(surface: &Path) -> Result<String, Error> {
    let text = std::fs::read_to_string(surface).map_err(Error::io("read", surface))?;
    let mut words = text.split_whitespace();
    match (words.next(), words.next()) {
        (Some("abi"), Some(version)) => Ok(version.to_owned()),
        _ => Err(Error::Malformed {
            path: surface.to_path_buf(),
            message: "expected a first line `abi MAJOR.MINOR ...`; run `cargo xtask abi-dump`"
                .to_owned(),
        }),
    }
}

/// As the linker spells it; on Linux alone, where it is asked for by file name.
fn needed(plugin: &Built, tree: &MlxTree) -> Result<Vec<String>, Error> {
    if !cfg!(target_os = "linux") {
        return Ok(Vec::new());
    }
    let files = tree.runtime_files()?;
    let is_library = |path: &&Path| path.to_string_lossy().contains(".so");
    let mut libraries: Vec<&Path> = files
        .iter()
        .map(|file| file.source.as_path())
        .filter(|path| path.parent().is_some_and(|dir| !dir.ends_with("include")))
        .filter(is_library)
        .collect();
    let own: PathBuf = plugin.library.clone();
    libraries.push(&own);
    library::needed_from_the_machine(&libraries)
}

/// The package of the CUDA run time, whose headers MLX compiles kernels with: not every wheel asks for it. It is of NVRTC's version, since
/// NVRTC reads them.
fn headers(packages: &[String]) -> Option<String> {
    let (compiler, run_time) = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime");
    if packages.iter().any(|name| name.starts_with(run_time)) {
        return None;
    }
    let version = packages
        .iter()
        .find_map(|name| name.strip_prefix(compiler))?;
    Some(format!("{run_time}{version}"))
}

fn requirements(backend: Backend, place: &Path, needed: &[String], packages: &[String]) -> String {
    let name = backend.name();
    let mut text = format!("\nWhat the {name} backend must find on the machine\n");
    let (driver, others): (Vec<&String>, Vec<&String>) =
        needed.iter().partition(|name| name.starts_with("libcuda."));
    if needed.is_empty() {
        text.push_str("  nothing but the operating system\n");
        return text;
    }
    let list = |names: &[&String]| {
        let names: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
        names.join(" ")
    };
    if !driver.is_empty() {
        let _ = writeln!(
            text,
            "  from NVIDIA's driver ({name} needs one for CUDA {}): {}",
            name.trim_start_matches("cuda"),
            list(&driver)
        );
    }
    if !others.is_empty() {
        let _ = writeln!(
            text,
            "  {}: {}",
            if backend.is_cuda() {
                "from NVIDIA's packages, with what these need in turn"
            } else {
                "libraries"
            },
            list(&others)
        );
    }
    if backend.is_cuda() && !packages.is_empty() {
        let headers = headers(packages);
        let quoted: Vec<String> = packages
            .iter()
            .chain(&headers)
            .map(|name| format!("'{name}'"))
            .collect();
        let _ = write!(
            text,
            "\n  They are looked for in a folder `nvidia` beside `mlx` in the plugin's folder, then on the loader's path. With pip:\n    \
             python3 -m pip install --target nvidia-libraries {}\n    \
             ln -s \"$PWD/nvidia-libraries/nvidia\" {}/nvidia\n",
            quoted.join(" "),
            place.display()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_cuda_package_says_what_it_needs_and_where_that_goes() {
        let text = requirements(
            Backend::Cuda13,
            Path::new("mlxcel-backend-cuda"),
            &strings(&["libcublasLt.so.13", "libcuda.so.1", "libnccl.so.2"]),
            &strings(&["nvidia-cublas==13.*", "nvidia-nccl-cu13"]),
        );
        for part in [
            "driver (cuda13 needs one for CUDA 13): libcuda.so.1\n",
            "in turn: libcublasLt.so.13 libnccl.so.2\n",
            "'nvidia-cublas==13.*' 'nvidia-nccl-cu13'",
            "/nvidia\" mlxcel-backend-cuda/nvidia\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn headers_of_the_run_time_are_named_where_the_wheel_does_not_ask_for_them() {
        let cuda12 = strings(&[
            "nvidia-cublas-cu12==12.9.*",
            "nvidia-cuda-nvrtc-cu12==12.9.*",
        ]);
        let place = Path::new("mlxcel-backend-cuda");
        let needed = strings(&["libcublasLt.so.12"]);
        let text = requirements(Backend::Cuda12, place, &needed, &cuda12);
        assert!(
            text.contains("'nvidia-cuda-nvrtc-cu12==12.9.*' 'nvidia-cuda-runtime-cu12==12.9.*'\n"),
            "{text}"
        );
        let cuda13 = strings(&["nvidia-cuda-nvrtc==13.*", "nvidia-cuda-runtime==13.*"]);
        assert_eq!(headers(&cuda13), None);
    }

    #[test]
    fn a_cpu_package_needs_nothing() {
        let text = requirements(Backend::Cpu, Path::new("mlxcel-backend-cpu"), &[], &[]);
        assert!(
            text.ends_with("nothing but the operating system\n"),
            "{text}"
        );
    }

    #[test]
    fn the_heading_names_commit_and_interface() {
        let origin = Origin {
            commit: Some("abc123".into()),
            changed: true,
            time: 0,
        };
        let text = heading("mlxcel-0.1.0", &origin, "1.4", "0.32.4 (cpu)");
        for part in ["abc123, with changes", "1.4", "0.32.4 (cpu)"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn the_interface_is_what_the_tree_says() {
        let surface = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../abi/surface.txt"));
        let version = interface(surface).expect("is read");
        let mut parts = version.split('.').map(str::parse::<u32>);
        assert!(matches!(
            (parts.next(), parts.next(), parts.next()),
            (Some(Ok(_)), Some(Ok(_)), None)
        ));
    }
}
