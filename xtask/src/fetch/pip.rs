//! Downloading one pinned wheel with `python3 -m pip`, and unpacking it with Python's own zip reader.
//!
//! Names no index: pip reads that from the user's configuration. The digest is checked twice, by pip
//! (`--require-hashes`) and by us, so that neither a changed pip nor a changed file goes unseen.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use super::digest;
use super::install::remove_tree;
use super::pins::{FilePin, WheelPin};
use crate::disk;
use crate::error::Error;
use crate::process::{Captured, Run};

/// Wheels are chosen for this version whatever interpreter runs pip: none of the pinned ones holds compiled Python.
const PYTHON_VERSION: &str = "3.12";

/// What else a person can do when a fetch is impossible; a sentence that follows the problem.
pub type Alternative = &'static str;

/// Downloads into `dir` unless a good copy is there already; tells which of the pinned files it was.
pub fn download<'pin>(
    pin: &'pin WheelPin,
    dir: &Path,
    alternative: Alternative,
) -> Result<(PathBuf, &'pin FilePin), Error> {
    if let Some(found) = already_there(pin, dir) {
        return Ok(found);
    }
    std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    let requirements = dir.join("requirements.txt");
    std::fs::write(&requirements, pin.requirement()).map_err(Error::io("write", &requirements))?;

    let interactive = std::io::stderr().is_terminal();
    let megabytes = pin.files.iter().map(|file| file.bytes).max().unwrap_or(0) / 1_000_000;
    eprintln!(
        "fetching {} {} (about {megabytes} MB)",
        pin.package, pin.version
    );
    let mut run = pip("download")
        .args(["--no-deps", "--only-binary=:all:", "--require-hashes"])
        .args(["--python-version", PYTHON_VERSION])
        .arg("--requirement")
        .arg(&requirements)
        .arg("--dest")
        .arg(dir);
    if !interactive {
        run = run.arg("--quiet");
    }
    // pip draws its progress on standard output, which is ours to keep clean: a terminal gets it, a pipe does not.
    let outcome = if interactive && std::io::stdout().is_terminal() {
        run.capture_stderr()
    } else {
        run.capture()
    };
    let what = format!("{} {}", pin.package, pin.version);
    let outcome = outcome.map_err(|failure| Error::Fetch {
        what: what.clone(),
        problem: failure.to_string(),
        alternative,
    })?;
    if !outcome.status.success() {
        return Err(Error::Fetch {
            what,
            problem: explain(&outcome),
            alternative,
        });
    }
    already_there(pin, dir).ok_or_else(|| Error::Fetch {
        what,
        problem: format!(
            "pip ended well, but none of the pinned files is in {}: expected {}",
            dir.display(),
            pin.files
                .iter()
                .map(|file| file.file.as_str())
                .collect::<Vec<_>>()
                .join(" or ")
        ),
        alternative,
    })
}

/// Unpacks a wheel whose digest was verified; nothing is left of one that could not be unpacked whole.
pub fn unpack(wheel: &Path, into: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(into).map_err(Error::io("create", into))?;
    let outcome = python()
        .args(["-m", "zipfile", "-e"])
        .arg(wheel)
        .arg(into)
        .env("LC_ALL", "C")
        .capture()?;
    if outcome.status.success() {
        return Ok(());
    }
    let is_full = disk::says_full(&outcome.stderr);
    // Asked while what was unpacked still takes its room.
    let error = is_full.then(|| disk::full("unpack into", into, unpacked_size(wheel)));
    remove_tree(into)?;
    match error {
        Some(error) => Err(error),
        None => Ok(outcome.ok().map(|_| ())?),
    }
}

/// What the files of a wheel take when they are unpacked.
fn unpacked_size(wheel: &Path) -> Option<u64> {
    let sum = "import sys, zipfile; print(sum(entry.file_size for entry in zipfile.ZipFile(sys.argv[1]).infolist()))";
    let outcome = python().args(["-c", sum]).arg(wheel).capture().ok()?;
    outcome.stdout.trim().parse().ok()
}

/// Installs pinned packages, with all that they need named, into a folder that only `PYTHONPATH` leads to.
pub fn install(requirements: &Path, into: &Path, alternative: Alternative) -> Result<(), Error> {
    eprintln!("installing {}", requirements.display());
    let what = format!("the packages of {}", requirements.display());
    let outcome = pip("install")
        .args(["--no-deps", "--only-binary=:all:", "--quiet"])
        .arg("--requirement")
        .arg(requirements)
        .arg("--target")
        .arg(into)
        .capture()
        .map_err(|failure| Error::Fetch {
            what: what.clone(),
            problem: failure.to_string(),
            alternative,
        })?;
    if !outcome.status.success() {
        return Err(Error::Fetch {
            what,
            problem: explain(&outcome),
            alternative,
        });
    }
    Ok(())
}

/// Version of the interpreter that runs pip, as it tells it.
pub fn version() -> Result<String, Error> {
    let outcome = python().arg("--version").capture()?.ok()?;
    Ok(outcome.stdout.trim().to_owned())
}

fn already_there<'pin>(pin: &'pin WheelPin, dir: &Path) -> Option<(PathBuf, &'pin FilePin)> {
    pin.files.iter().find_map(|file| {
        let path = dir.join(&file.file);
        let right_size = path
            .metadata()
            .is_ok_and(|metadata| metadata.len() == file.bytes);
        if !right_size {
            return None;
        }
        digest::verify(&path, &file.sha256).ok()?;
        Some((path, file))
    })
}

fn python() -> Run {
    let program = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    Run::new(program).hint("; install Python 3 with pip, or name an interpreter in PYTHON")
}

fn pip(subcommand: &str) -> Run {
    python()
        .args(["-m", "pip", subcommand])
        // pip takes options from the environment and ignores those it is too old to know.
        .env("PIP_NO_INPUT", "1")
        .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        .env("PIP_RESUME_RETRIES", "5")
}

/// The one thing that most likely went wrong, before pip's own words.
fn explain(outcome: &Captured) -> String {
    let said = format!("{}\n{}", outcome.stdout, outcome.stderr);
    let diagnosis = diagnose(&said);
    let mut lines: Vec<&str> = said
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty() && !line.starts_with("Looking in"))
        .collect();
    let skipped = lines.len().saturating_sub(8);
    lines.drain(..skipped);
    format!("{diagnosis}; pip said:\n  {}", lines.join("\n  "))
}

fn diagnose(said: &str) -> &'static str {
    if said.contains("No module named pip") {
        "Python has no pip (Debian: apt-get install python3-pip)"
    } else if said.contains("DO NOT MATCH") {
        "the index offers a file with another sha256 than the pinned one: do not use it"
    } else if said.contains("No matching distribution") || said.contains("Could not find a version")
    {
        "no index that pip is configured for offers a file for this system (offline? a C library older than the file needs? pip older than 20.3?)"
    } else if disk::says_full(said) {
        "the disk is full"
    } else {
        "pip failed"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn diagnoses_what_people_meet() {
        let cases = [
            ("/usr/bin/python3: No module named pip", "has no pip"),
            (
                "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE",
                "do not use it",
            ),
            ("ERROR: No matching distribution found for x", "offline?"),
            (
                "OSError: [Errno 28] No space left on device",
                "disk is full",
            ),
            ("something else", "pip failed"),
        ];
        for (said, expected) in cases {
            assert!(diagnose(said).contains(expected), "{said}");
        }
    }

    #[test]
    fn nothing_is_left_of_a_wheel_that_is_none() {
        let dir = std::env::temp_dir().join(format!("xtask-unpack-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("creates");
        let wheel = dir.join("p-1.whl");
        std::fs::write(&wheel, b"no archive").expect("writes");
        unpack(&wheel, &dir.join("tree")).expect_err("cannot be unpacked");
        assert!(!dir.join("tree").exists());
        assert_eq!(unpacked_size(&wheel), None);
        std::fs::remove_dir_all(&dir).expect("removes");
    }

    #[test]
    fn a_file_of_the_right_name_and_wrong_content_is_not_taken() {
        let dir = std::env::temp_dir().join(format!("xtask-pip-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("creates");
        let pin = WheelPin {
            package: "p".into(),
            version: "1".into(),
            files: vec![FilePin {
                file: "p-1.whl".into(),
                bytes: 3,
                sha256: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".into(),
            }],
        };
        assert!(already_there(&pin, &dir).is_none());
        std::fs::write(dir.join("p-1.whl"), b"abd").expect("writes");
        assert!(already_there(&pin, &dir).is_none());
        std::fs::write(dir.join("p-1.whl"), b"abc").expect("writes");
        assert!(already_there(&pin, &dir).is_some());
        std::fs::remove_dir_all(&dir).expect("removes");
    }
}
