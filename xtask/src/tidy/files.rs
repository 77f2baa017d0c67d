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
    /// Declared by another file as `#[cfg(test)] mod name;`.
    declared_as_test: bool,
}

impl TextFile {
    pub fn new(path: &str, text: String) -> Self {
        let code = path.ends_with(".rs").then(|| rust_source::code_only(&text));
        TextFile {
            path: path.to_owned(),
            text,
            code,
            declared_as_test: false,
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
        self.declared_as_test || self.is_in_test_folder() || self.path.ends_with("/tests.rs")
    }

    pub fn is_in_test_folder(&self) -> bool {
        let folder = self.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        folder
            .split('/')
            .any(|part| matches!(part, "tests" | "benches"))
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
    mark_declared_tests(&mut files);
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

/// Modules that exist in test builds only, and all below them.
fn mark_declared_tests(files: &mut [TextFile]) {
    let declared: Vec<String> = files
        .iter()
        .filter_map(|file| Some((file, file.code.as_deref()?)))
        .flat_map(|(file, code)| {
            let home = module_folder(&file.path);
            rust_source::test_module_names(code)
                .into_iter()
                .map(move |name| format!("{home}{name}"))
        })
        .collect();
    for file in files {
        file.declared_as_test = declared.iter().any(|module| {
            file.path
                .strip_prefix(module.as_str())
                .is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
        });
    }
}

/// Where the child modules of a file live, with a slash at the end.
fn module_folder(path: &str) -> String {
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    match name {
        "mod.rs" | "lib.rs" | "main.rs" => format!("{folder}/"),
        _ => format!("{}/", path.trim_end_matches(".rs")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_declared_for_tests_are_tests() {
        let mut files = [
            TextFile::new(
                "a/src/text/mod.rs",
                "#[cfg(test)]\nmod fixtures;\nmod real;\n".into(),
            ),
            TextFile::new("a/src/text/fixtures.rs", String::new()),
            TextFile::new("a/src/text/fixtures/more.rs", String::new()),
            TextFile::new(
                "a/src/text/real.rs",
                "#[cfg(test)]\npub(crate) mod cases;\n".into(),
            ),
            TextFile::new("a/src/text/real/cases.rs", String::new()),
        ];
        mark_declared_tests(&mut files);
        let tests: Vec<bool> = files.iter().map(TextFile::is_test).collect();
        assert_eq!(tests, [false, true, true, false, true]);
    }

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
