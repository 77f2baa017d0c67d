//! Plugin files for tests: the healthy ones that cargo built, and copies of them with something broken.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mlxcel::plugin::{Loader, LoaderOptions, ProbeSettings};
use mlxcel_registry::plugin::{Catalogue, CatalogueError, HostProfile, PluginRecord, SearchInputs};

/// Files built beside the running test.
fn built(file: &str) -> io::Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let path = exe.parent().unwrap_or(Path::new(".")).join(file);
    match path.is_file() {
        true => Ok(path),
        false => Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!(
                "{} is missing: run the tests with cargo test -p mlxcel-tests",
                path.display()
            ),
        )),
    }
}

/// A healthy plugin of the folder `tests/plugins`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Healthy {
    /// `mock_family`.
    Family,
    /// `mock_backend`.
    Backend,
    /// `encoder_family`.
    Encoder,
    /// `faulty`, which is healthy until a fault is written into it.
    Faulty,
}

impl Healthy {
    /// Name of its file, without the folder.
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Family => "libmlxcel_family_mock.so",
            Self::Backend => "libmlxcel_backend_mock.so",
            Self::Encoder => "libmlxcel_family_encoder.so",
            Self::Faulty => "libmlxcel_family_faulty.so",
        }
    }

    /// Its bytes.
    pub fn bytes(self) -> io::Result<Vec<u8>> {
        fs::read(built(self.file_name())?)
    }

    /// A copy in `dir` under its own name.
    pub fn copy_to(self, dir: &Path) -> io::Result<PathBuf> {
        let path = dir.join(self.file_name());
        fs::write(&path, self.bytes()?)?;
        Ok(path)
    }

    /// A copy in `dir` with a fault.
    pub fn with_fault(self, dir: &Path, fault: &str) -> io::Result<PathBuf> {
        let path = dir.join(self.file_name());
        fs::write(&path, faulty(self.bytes()?, fault))?;
        Ok(path)
    }
}

/// Space for a fault's name, and the mark before it; see `tests/plugins/faulty/src/fault.rs`.
const FAULT_MARK: &[u8] = b"mlxcel-test-fault:none";
const FAULT_SPACE: usize = 46;

/// Writes the name of a fault into a library.
pub fn faulty(bytes: Vec<u8>, fault: &str) -> Vec<u8> {
    let name = format!("{fault:_<FAULT_SPACE$}");
    let mut replacement = b"mlxcel-test-fault:".to_vec();
    replacement.extend_from_slice(name.as_bytes());
    let mut original = FAULT_MARK.to_vec();
    original.resize(replacement.len(), b'_');
    replaced(bytes, &original, &replacement)
}

/// Replaces every occurrence of `from` by `to`, which has the same length.
///
/// # Panics
/// When the lengths differ or `from` is nowhere: the test would test nothing.
pub fn replaced(mut bytes: Vec<u8>, from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len(), "a patch must not move bytes");
    let places: Vec<usize> = places(&bytes, from);
    assert!(
        !places.is_empty(),
        "{:?} is not in the file",
        String::from_utf8_lossy(from)
    );
    for place in places {
        if let Some(target) = bytes.get_mut(place..place + to.len()) {
            target.copy_from_slice(to);
        }
    }
    bytes
}

/// Where `needle` starts in `bytes`.
pub fn places(bytes: &[u8], needle: &[u8]) -> Vec<usize> {
    let Some(&first) = needle.first() else {
        return Vec::new();
    };
    let starts = bytes
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == first)
        .map(|(at, _)| at);
    starts
        .filter(|&at| bytes.get(at..at + needle.len()) == Some(needle))
        .collect()
}

/// The catalogue of one folder, named as by `--plugins-dir`.
pub fn catalogue_of(dir: &Path) -> Result<Catalogue, CatalogueError> {
    let inputs = SearchInputs {
        dirs: vec![dir.to_path_buf()],
        ..SearchInputs::default()
    };
    Catalogue::build(&inputs, HostProfile::CURRENT)
}

/// The record of one file, named as by `--plugin`.
pub fn record_of(file: &Path) -> Result<PluginRecord, CatalogueError> {
    let inputs = SearchInputs {
        files: vec![file.to_path_buf()],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT)?;
    let record = catalogue.records().first().cloned();
    record.ok_or_else(|| CatalogueError::Place(format!("{} was not listed", file.display())))
}

/// A loader that tries files in `child` first, a program like `plugin_probe_child`.
pub fn loader_with(child: &str, timeout_ms: u64, cache_dir: Option<PathBuf>) -> Loader {
    let settings = ProbeSettings {
        program: PathBuf::from(child),
        args: Vec::new(),
        timeout_ms,
        cache_dir,
    };
    Loader::new(LoaderOptions {
        probe: Some(settings),
    })
}

/// `text` with places like `lib.rs:63:30` as `lib.rs:LINE`, so that expected texts outlive edits of the test plugins.
pub fn without_lines(text: &str) -> String {
    let mut parts = text.split(".rs:");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push_str(".rs:LINE");
        out.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit() || c == ':'));
    }
    out
}
