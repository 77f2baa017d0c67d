//! The files of the source tree, read once.

use std::path::Path;

use super::rust_source;
use crate::error::Error;

/// A text file of the project.
#[derive(Debug)]
pub struct TextFile {
    /// Relative to the workspace, with forward slashes.
    pub path: String,
    pub text: String,
    /// For Rust: the text with comments and literals blanked, line by line the same.
    pub code: Option<String>,
}

impl TextFile {
    pub fn new(path: &str, text: String) -> Self {
        let code = path.ends_with(".rs").then(|| rust_source::code_only(&text));
        TextFile {
            path: path.to_owned(),
            text,
            code,
        }
    }

    pub fn is_rust(&self) -> bool {
        self.code.is_some()
    }

    pub fn extension(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or(&self.path);
        name.rsplit_once('.').map_or("", |(_, extension)| extension)
    }

    /// Tests may be long, unwrap, and hold what is forbidden elsewhere as test data.
    pub fn is_test(&self) -> bool {
        let parts: Vec<&str> = self.path.split('/').collect();
        let dirs = parts.get(..parts.len().saturating_sub(1)).unwrap_or(&[]);
        dirs.iter().any(|dir| matches!(*dir, "tests" | "benches"))
            || matches!(parts.last(), Some(&"tests.rs"))
    }
}

/// Folders that hold no source of ours.
fn is_skipped(name: &str) -> bool {
    match name {
        ".ci" | ".cargo" | ".config" | ".github" => false,
        "target" | "node_modules" | "__pycache__" | "snapshots" => true,
        other => other.starts_with('.'),
    }
}

fn is_text(name: &str) -> bool {
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    matches!(
        extension,
        "rs" | "md"
            | "toml"
            | "sh"
            | "yml"
            | "yaml"
            | "h"
            | "hpp"
            | "cpp"
            | "cc"
            | "cu"
            | "cuh"
            | "metal"
            | "py"
            | "json"
            | "txt"
    ) || name == "run"
}

pub fn read(root: &Path) -> Result<Vec<TextFile>, Error> {
    let mut files = Vec::new();
    walk(root, root, &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn walk(root: &Path, dir: &Path, files: &mut Vec<TextFile>) -> Result<(), Error> {
    for entry in std::fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let entry = entry.map_err(Error::io("list", dir))?;
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type().map_err(Error::io("read", &path))?;
        if kind.is_dir() {
            if !is_skipped(&name) {
                walk(root, &path, files)?;
            }
        } else if kind.is_file() && is_text(&name) {
            // Binary test data under a text name is no concern of these checks.
            if let Ok(text) = std::fs::read_to_string(&path) {
                let relative = path.strip_prefix(root).unwrap_or(&path);
                let relative = relative.to_string_lossy().replace('\\', "/");
                files.push(TextFile::new(&relative, text));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_tests_from_code() {
        let is_test = |path: &str| TextFile::new(path, String::new()).is_test();
        assert!(is_test("tests/src/expect.rs"));
        assert!(is_test("registry/tests/hostile.rs"));
        assert!(is_test("host/src/kv/tests.rs"));
        assert!(!is_test("host/src/kv/pool.rs"));
        assert!(!is_test("tests.toml"));
    }

    #[test]
    fn build_output_is_not_read() {
        assert!(is_skipped("target") && is_skipped(".git") && is_skipped(".venv"));
        assert!(!is_skipped(".ci") && !is_skipped("src"));
    }
}
