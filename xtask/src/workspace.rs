//! The workspace as `cargo metadata` describes it: where things are, which crates there are, who depends on whom.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::Error;
use crate::process::Run;

/// Paths that every command needs.
#[derive(Debug, Clone)]
pub struct Workspace {
    pub root: PathBuf,
    pub target: PathBuf,
}

impl Workspace {
    pub fn find() -> Result<Self, Error> {
        let root = find_root()?;
        let metadata = Metadata::read(&root, Depth::MembersOnly)?;
        Ok(Workspace {
            target: metadata.target_directory,
            root,
        })
    }

    /// The workspace's own crates.
    pub fn members(&self) -> Result<Vec<Package>, Error> {
        let metadata = Metadata::read(&self.root, Depth::MembersOnly)?;
        Ok(metadata.packages)
    }

    /// Every crate and the resolved edges between them.
    pub fn graph(&self) -> Result<Metadata, Error> {
        Metadata::read(&self.root, Depth::Everything)
    }

    /// As `graph`, without what other systems alone would link.
    pub fn graph_of_this_system(&self) -> Result<Metadata, Error> {
        let description = Run::new("rustc").arg("-vV").dir(&self.root).stdout()?;
        let triple = description
            .lines()
            .find_map(|line| line.strip_prefix("host: "))
            .unwrap_or_default();
        Metadata::read(&self.root, Depth::EverythingOn(triple))
    }

    /// `target/debug` or `target/release`.
    pub fn profile_dir(&self, release: bool) -> PathBuf {
        self.target.join(if release { "release" } else { "debug" })
    }

    /// The host binary of a profile.
    pub fn host_binary(&self, release: bool) -> PathBuf {
        let name = format!("mlxcel{}", std::env::consts::EXE_SUFFIX);
        self.profile_dir(release).join(name)
    }

    /// What a package is made from, for its README and for the time of its files.
    pub fn origin(&self) -> Result<Origin, Error> {
        let asked = time_asked_for(std::env::var_os("SOURCE_DATE_EPOCH"))?;
        let git = |args: &[&str]| {
            let outcome = Run::new("git").args(args).dir(&self.root).capture().ok()?;
            let answer = outcome.stdout.trim().to_owned();
            outcome.status.success().then_some(answer)
        };
        // A source that nobody added is compiled as well as one that was changed.
        let changed = git(&["status", "--porcelain", "--untracked-files=normal"])
            .is_some_and(|list| !list.is_empty());
        let of_commit = || git(&["log", "-1", "--format=%ct"])?.parse().ok();
        Ok(Origin {
            commit: git(&["rev-parse", "HEAD"]),
            changed,
            time: asked.or_else(of_commit).unwrap_or(WITHOUT_A_COMMIT),
        })
    }

    pub fn relative<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(&self.root).unwrap_or(path)
    }
}

/// The state of the source tree.
#[derive(Debug, Clone)]
pub struct Origin {
    /// None where the tree is no clone.
    pub commit: Option<String>,
    /// Whether files differ from it, or are not in it and not ignored.
    pub changed: bool,
    /// Of the commit, or `SOURCE_DATE_EPOCH`; seconds since 1970.
    pub time: u64,
}

impl Origin {
    /// The commit, and whether it is not quite that.
    pub fn described(&self) -> String {
        let commit = self.commit.as_deref().unwrap_or("not known");
        let changed = if self.changed {
            ", with changes that are not committed"
        } else {
            ""
        };
        format!("{commit}{changed}")
    }
}

/// 1980-01-01: archives made of a tree without history agree too.
const WITHOUT_A_COMMIT: u64 = 315_532_800;

/// What `SOURCE_DATE_EPOCH` says; empty counts as not set.
fn time_asked_for(value: Option<OsString>) -> Result<Option<u64>, Error> {
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let seconds = value.to_str().and_then(|text| text.trim().parse().ok());
    seconds.map(Some).ok_or_else(|| {
        Error::Refused(format!(
            "SOURCE_DATE_EPOCH: expected whole seconds since 1970, found `{}`; unset it to have the commit's time",
            value.to_string_lossy()
        ))
    })
}

/// `cargo run` tells where this crate is; without it, the first folder upwards that holds the pins.
fn find_root() -> Result<PathBuf, Error> {
    let start = match std::env::var_os("CARGO_MANIFEST_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => std::env::current_dir().map_err(Error::io("read", Path::new(".")))?,
    };
    start
        .ancestors()
        .find(|dir| dir.join("mlx.toml").is_file())
        .map(Path::to_path_buf)
        .ok_or(Error::NoWorkspace { start })
}

enum Depth<'a> {
    MembersOnly,
    Everything,
    /// For one target triple.
    EverythingOn(&'a str),
}

/// The parts of `cargo metadata`'s answer that we use.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    pub packages: Vec<Package>,
    pub workspace_members: Vec<String>,
    pub target_directory: PathBuf,
    pub resolve: Option<Resolve>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Package {
    pub id: String,
    pub name: String,
    pub version: String,
    pub license: Option<String>,
    #[serde(default)]
    pub authors: Vec<String>,
    pub repository: Option<String>,
    pub manifest_path: PathBuf,
    pub targets: Vec<Target>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Target {
    pub name: String,
    pub kind: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub struct Resolve {
    pub nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
pub struct Node {
    pub id: String,
    pub deps: Vec<Edge>,
}

#[derive(Debug, Deserialize)]
pub struct Edge {
    pub pkg: String,
    pub dep_kinds: Vec<EdgeKind>,
}

#[derive(Debug, Deserialize)]
pub struct EdgeKind {
    /// Null for a normal dependency, else "dev" or "build".
    pub kind: Option<String>,
}

impl Metadata {
    fn read(root: &Path, depth: Depth<'_>) -> Result<Self, Error> {
        let mut run = Run::cargo("metadata")
            .args(["--format-version", "1"])
            .dir(root);
        match depth {
            Depth::MembersOnly => run = run.arg("--no-deps"),
            Depth::Everything => {}
            Depth::EverythingOn(triple) => run = run.args(["--filter-platform", triple]),
        }
        if in_ci() {
            run = run.arg("--locked");
        }
        let text = run.stdout()?;
        serde_json::from_str(&text).map_err(|error| Error::Malformed {
            path: root.join("Cargo.toml"),
            message: format!("cargo metadata's answer was not understood: {error}"),
        })
    }

    pub fn by_id(&self) -> BTreeMap<&str, &Package> {
        self.packages
            .iter()
            .map(|package| (package.id.as_str(), package))
            .collect()
    }
}

impl Package {
    /// The folder of the crate, relative to the workspace, with forward slashes.
    pub fn folder(&self, root: &Path) -> String {
        let dir = self.manifest_path.parent().unwrap_or(&self.manifest_path);
        let relative = dir.strip_prefix(root).unwrap_or(dir);
        relative.to_string_lossy().replace('\\', "/")
    }

    /// The name of its cdylib target, if it has one.
    pub fn cdylib(&self) -> Option<&str> {
        self.targets
            .iter()
            .find(|target| target.kind.iter().any(|kind| kind == "cdylib"))
            .map(|target| target.name.as_str())
    }
}

/// CI must build what the lock file says; a developer may be in the middle of changing it.
pub fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false")
}

/// `linux-x86_64`, `macos-aarch64`: as the tables of pins spell it.
pub fn platform() -> String {
    format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_parts_of_metadata_that_are_used() {
        let text = r#"{
            "packages": [{"id": "a 1", "name": "a", "version": "1.0.0", "license": null, "repository": null,
                "manifest_path": "/w/families/a/Cargo.toml", "unknown": 1,
                "targets": [{"name": "a_lib", "kind": ["cdylib", "rlib"], "extra": []}]}],
            "workspace_members": ["a 1"], "target_directory": "/w/target", "resolve": null}"#;
        let metadata: Metadata = serde_json::from_str(text).expect("parses");
        let package = &metadata.packages[0];
        assert_eq!(package.cdylib(), Some("a_lib"));
        assert_eq!(package.folder(Path::new("/w")), "families/a");
        assert!(metadata.by_id().contains_key("a 1"));
    }

    #[test]
    fn a_time_that_cannot_be_read_is_no_other_time() {
        let asked = |text: &str| time_asked_for(Some(text.into()));
        assert_eq!(time_asked_for(None).expect("not set"), None);
        assert_eq!(asked("").expect("empty"), None);
        assert_eq!(asked("1700000000").expect("is one"), Some(1_700_000_000));
        for text in ["yesterday", "-1", "1.5", "2026-11-30"] {
            let error = asked(text).expect_err("is none").to_string();
            assert!(
                error.contains(text) && error.contains("SOURCE_DATE_EPOCH"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_file_that_is_not_in_the_commit_is_a_change_unless_it_is_ignored() {
        let root = std::env::temp_dir().join(format!("xtask-origin-{}", std::process::id()));
        std::fs::create_dir_all(&root).expect("creates");
        let write = |name: &str| std::fs::write(root.join(name), "target\n").expect("writes");
        let git = |args: &[&str]| {
            let run = Run::new("git").args(["-c", "user.name=a", "-c", "user.email=a@b"]);
            let run = run.args(["-c", "commit.gpgsign=false"]).args(args);
            run.dir(&root)
                .capture()
                .expect("is run")
                .ok()
                .expect("is done");
        };
        let workspace = Workspace {
            root: root.clone(),
            target: root.join("target"),
        };
        let changed = || workspace.origin().expect("is found").changed;
        git(&["init", "-q"]);
        write(".gitignore");
        git(&["add", ".gitignore"]);
        git(&["commit", "-q", "-m", "one"]);
        write("target");
        assert!(!changed());
        write("new.rs");
        assert!(changed());
        std::fs::remove_dir_all(&root).expect("removes");
    }
}
