//! Where plugins are looked for, collected once into a value.
//!
//! Owns flags, variables and standard folders. Nothing else in the plugin catalogue reads the
//! environment, so tests build a [`SearchInputs`] by hand.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Variable with more plugin folders, separated as in `PATH`.
pub const PLUGIN_PATH: &str = "MLXCEL_PLUGIN_PATH";

/// Rank of a place. A plugin in an earlier tier hides one of the same name in a later tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// `--plugin FILE`.
    File,
    /// `--plugins-dir DIR` and `MLXCEL_PLUGIN_PATH`.
    Directory,
    /// The user's folder.
    User,
    /// The folder that belongs to this installation.
    Bundled,
    /// The folder of the system.
    System,
}

impl Tier {
    /// The tier's name as in JSON output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Directory => "directory",
            Self::User => "user",
            Self::Bundled => "bundled",
            Self::System => "system",
        }
    }

    /// Whether files of this tier were put there by whoever installed mlxcel.
    pub const fn is_installed(self) -> bool {
        matches!(self, Self::Bundled | Self::System)
    }
}

/// Everything discovery depends on.
#[derive(Debug, Clone, Default)]
pub struct SearchInputs {
    /// `--plugin FILE`, in order.
    pub files: Vec<PathBuf>,
    /// `--plugins-dir DIR`, in order.
    pub dirs: Vec<PathBuf>,
    /// `MLXCEL_PLUGIN_PATH`.
    pub plugin_path: Option<OsString>,
    /// The user's plugin folder.
    pub user_dir: Option<PathBuf>,
    /// `<exe>/../lib/mlxcel/plugins`.
    pub bundled_dir: Option<PathBuf>,
    /// The system's plugin folder.
    pub system_dir: Option<PathBuf>,
    /// Whether this process runs with more rights than its caller: the environment and the user's
    /// folder are then ignored.
    pub elevated: bool,
    /// `MLXCEL_PLUGINS_DISABLE`.
    pub disable: Option<String>,
    /// `MLXCEL_PLUGINS_SELECT`.
    pub select: Option<String>,
}

impl SearchInputs {
    /// The inputs of this process, with the values of the two flags.
    pub fn from_process(files: Vec<PathBuf>, dirs: Vec<PathBuf>) -> Self {
        let exe = std::env::current_exe().ok();
        let mut inputs = Self::from_lookup(|name| std::env::var_os(name), exe.as_deref());
        inputs.files = files;
        inputs.dirs = dirs;
        inputs.elevated = is_elevated();
        inputs
    }

    /// Reads variables through `lookup`; one that is set but empty counts as not set. `exe` is the path
    /// of the running program.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>, exe: Option<&Path>) -> Self {
        let os = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let text = |name: &str| os(name).map(|value| value.to_string_lossy().into_owned());
        Self {
            files: Vec::new(),
            dirs: Vec::new(),
            plugin_path: os(PLUGIN_PATH),
            user_dir: user_dir(&os),
            bundled_dir: exe.and_then(bundled_dir),
            system_dir: Some(PathBuf::from(SYSTEM_DIR)),
            elevated: false,
            disable: text(super::filter::DISABLE),
            select: text(super::filter::SELECT),
        }
    }
}

#[cfg(target_os = "macos")]
const SYSTEM_DIR: &str = "/usr/local/lib/mlxcel/plugins";
#[cfg(not(target_os = "macos"))]
const SYSTEM_DIR: &str = "/usr/lib/mlxcel/plugins";

fn user_dir(os: &impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    // Nothing is looked for in the working directory.
    let home = || os("HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let data = if cfg!(target_os = "macos") {
        home()?.join("Library").join("Application Support")
    } else {
        // The XDG base directory specification: a relative value is to be ignored.
        os("XDG_DATA_HOME")
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .or_else(|| Some(home()?.join(".local").join("share")))?
    };
    Some(data.join("mlxcel").join("plugins"))
}

fn bundled_dir(exe: &Path) -> Option<PathBuf> {
    // A link to the program (`/usr/local/bin/mlxcel`) belongs to the installation it points into.
    let exe = exe.canonicalize().unwrap_or_else(|_| exe.to_path_buf());
    let prefix = exe.parent()?.parent()?;
    Some(prefix.join("lib").join("mlxcel").join("plugins"))
}

/// Whether the process has rights its caller has not (set-user-id and file capabilities).
fn is_elevated() -> bool {
    use rustix::process::{getegid, geteuid, getgid, getuid};
    getuid() != geteuid() || getgid() != getegid() || secure_flag()
}

/// `AT_SECURE` of the auxiliary vector, which also covers file capabilities.
#[cfg(target_os = "linux")]
fn secure_flag() -> bool {
    const AT_SECURE: usize = 23;
    const WORD: usize = size_of::<usize>();
    let Ok(vector) = std::fs::read("/proc/self/auxv") else {
        return false;
    };
    let word = |bytes: &[u8]| bytes.try_into().map(usize::from_ne_bytes).unwrap_or(0);
    vector.chunks_exact(2 * WORD).any(|pair| {
        let (key, value) = pair.split_at(WORD);
        word(key) == AT_SECURE && word(value) != 0
    })
}

#[cfg(not(target_os = "linux"))]
fn secure_flag() -> bool {
    false
}
