//! Crates that are linked into what is shipped.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{Index, texts, write_into};
use crate::error::Error;
use crate::workspace::{Metadata, Package, Workspace};

/// Texts of all crates that the named ones of the workspace need.
pub fn collect(
    workspace: &Workspace,
    shipped: &BTreeSet<&str>,
    out: &Path,
    index: &mut Index,
) -> Result<(), Error> {
    let metadata = workspace.graph_of_this_system()?;
    for package in shipped_crates(&metadata, shipped) {
        let licence = package.license.as_deref();
        index.lines.push(format!(
            "{} {}: {} {}",
            package.name,
            package.version,
            licence.unwrap_or("see its licence file"),
            package.repository.as_deref().unwrap_or_default()
        ));
        let dir = out.join(format!("crates/{}-{}", package.name, package.version));
        if !add_texts(package, &dir)? {
            let name = format!("{} {}", package.name, package.version);
            index.without_text.push(name);
        }
    }
    Ok(())
}

/// The crate's own files, else the text of the licence that its manifest names; false if there is neither.
fn add_texts(package: &Package, dir: &Path) -> Result<bool, Error> {
    let source = package.manifest_path.parent().unwrap_or(Path::new("."));
    let mut files = Vec::new();
    licence_files(source, &mut files)?;
    for file in &files {
        let to = dir.join(file.strip_prefix(source).unwrap_or(file));
        let parent = to.parent().unwrap_or(dir);
        std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        std::fs::copy(file, &to).map_err(Error::io("copy", file))?;
    }
    // A text further down is of a part that the crate brings, not of the crate.
    if files
        .iter()
        .any(|file| file.parent() == Some(source) && is_licence(&name_of(file)))
    {
        return Ok(true);
    }
    let holders = if package.authors.is_empty() {
        format!("the authors of {}", package.name)
    } else {
        package.authors.join(", ")
    };
    let texts = texts::of_expression(package.license.as_deref().unwrap_or_default(), &holders);
    for (licence, text) in &texts {
        let text = format!("{}: {holders}\n\n{text}", package.name);
        write_into(dir, &format!("{licence}.txt"), &text)?;
    }
    Ok(!texts.is_empty())
}

/// Crates that end up in a shipped file, without tests and build tools of ours.
fn shipped_crates<'a>(metadata: &'a Metadata, shipped: &BTreeSet<&str>) -> Vec<&'a Package> {
    let packages = metadata.by_id();
    let ours: BTreeSet<&str> = metadata
        .workspace_members
        .iter()
        .map(String::as_str)
        .collect();
    let is_shipped = |id: &&str| {
        packages
            .get(id)
            .is_some_and(|package| shipped.contains(package.name.as_str()))
    };
    let mut queue: Vec<&str> = ours.iter().copied().filter(is_shipped).collect();
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    while let Some(id) = queue.pop() {
        if !seen.insert(id) {
            continue;
        }
        let edges = metadata
            .resolve
            .iter()
            .flat_map(|resolve| &resolve.nodes)
            .filter(|node| node.id == id)
            .flat_map(|node| &node.deps)
            .filter(|edge| edge.dep_kinds.iter().any(|kind| kind.kind.is_none()));
        queue.extend(edges.map(|edge| edge.pkg.as_str()));
    }
    let mut crates: Vec<&Package> = seen
        .into_iter()
        .filter(|id| !ours.contains(id))
        .filter_map(|id| packages.get(id).copied())
        .collect();
    crates.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    crates
}

/// In every folder: sources of others that a crate brings have their licence beside them.
fn licence_files(dir: &Path, found: &mut Vec<PathBuf>) -> Result<(), Error> {
    for entry in std::fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let entry = entry.map_err(Error::io("list", dir))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(Error::io("read", &path))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if kind.is_dir() {
            licence_files(&path, found)?;
        } else if kind.is_file() && is_licence_name(&name) {
            found.push(path);
        }
    }
    found.sort();
    Ok(())
}

/// Names of files with the text of a licence begin so.
const LICENCES: [&str; 4] = ["license", "licence", "copying", "unlicense"];
/// What goes along with one and is none itself.
const NOTICES: [&str; 2] = ["notice", "copyright"];

fn name_of(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default();
    name.to_string_lossy().to_ascii_lowercase()
}

fn is_licence(name: &str) -> bool {
    LICENCES.iter().any(|prefix| name.starts_with(prefix))
}

fn is_licence_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let is_code = [".rs", ".c", ".h", ".py"]
        .iter()
        .any(|end| name.ends_with(end));
    !is_code && (is_licence(&name) || NOTICES.iter().any(|prefix| name.starts_with(prefix)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_files_are_known_by_name() {
        for name in [
            "LICENSE",
            "LICENSE-MIT",
            "license.md",
            "COPYING",
            "NOTICE.txt",
            "UNLICENSE",
        ] {
            assert!(is_licence_name(name), "{name}");
        }
        for name in [
            "README.md",
            "Cargo.toml",
            "lib.rs",
            "license.rs",
            "copyright.py",
        ] {
            assert!(!is_licence_name(name), "{name}");
        }
    }
    #[test]
    fn a_crate_without_a_text_gets_that_of_its_licence_with_its_authors() {
        let base = std::env::temp_dir().join(format!("xtask-crates-{}", std::process::id()));
        let source = base.join("source");
        std::fs::create_dir_all(source.join("vendored")).expect("creates");
        std::fs::write(source.join("vendored/COPYING"), "theirs").expect("writes");
        let mut package = Package {
            id: "a".into(),
            name: "a".into(),
            version: "1.0.0".into(),
            license: Some("MIT/Apache-2.0".into()),
            authors: vec!["Ada <ada@example.org>".into()],
            repository: None,
            manifest_path: source.join("Cargo.toml"),
            targets: Vec::new(),
        };
        let out = base.join("out");
        assert!(add_texts(&package, &out).expect("writes"));
        let text = |name: &str| std::fs::read_to_string(out.join(name)).expect("is there");
        assert!(text("MIT.txt").contains("Copyright (c) Ada <ada@example.org>"));
        assert!(text("Apache-2.0.txt").starts_with("a: Ada"));
        assert_eq!(text("vendored/COPYING"), "theirs");

        package.license = Some("Of-Their-Own".into());
        assert!(!add_texts(&package, &base.join("none")).expect("looks"));
        for notice in ["NOTICE", "COPYRIGHT"] {
            std::fs::write(source.join(notice), "a notice").expect("writes");
        }
        assert!(!add_texts(&package, &base.join("noticed")).expect("copies"));
        assert!(base.join("noticed/NOTICE").exists());
        std::fs::write(source.join("LICENSE"), "own").expect("writes");
        assert!(add_texts(&package, &base.join("own")).expect("copies"));
        assert!(!base.join("own/MIT.txt").exists());
        std::fs::remove_dir_all(&base).expect("removes");
    }
}
