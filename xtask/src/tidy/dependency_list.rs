//! `docs/dependencies.md` and `[workspace.dependencies]` name the same third-party crates.

use std::collections::BTreeSet;

use super::files::TextFile;
use super::{Finding, Severity};

const LIST: &str = "docs/dependencies.md";
const MANIFEST: &str = "Cargo.toml";

pub fn check(files: &[TextFile]) -> Vec<Finding> {
    let text = |path: &str| {
        files
            .iter()
            .find(|file| file.path == path)
            .map(|file| file.text.as_str())
    };
    let finding = |file: &str, message: String| Finding {
        file: file.to_owned(),
        line: 0,
        severity: Severity::Error,
        message,
    };
    let Some(manifest) = text(MANIFEST) else {
        return vec![finding(MANIFEST, "is missing".to_owned())];
    };
    let Some(list) = text(LIST) else {
        return vec![finding(
            LIST,
            "is missing: every dependency has its reason there".to_owned(),
        )];
    };
    let used = match workspace_dependencies(manifest) {
        Ok(used) => used,
        Err(message) => return vec![finding(MANIFEST, message)],
    };
    let listed = listed(list);
    let unlisted = used.difference(&listed).map(|name| {
        finding(
            LIST,
            format!("no row for `{name}` of [workspace.dependencies]: say where it is used, why, and what else was considered"),
        )
    });
    let unused = listed.difference(&used).map(|name| {
        finding(
            LIST,
            format!("a row for `{name}`, which is not in [workspace.dependencies]"),
        )
    });
    unlisted.chain(unused).collect()
}

/// Names of dependencies that are not folders of this workspace.
fn workspace_dependencies(manifest: &str) -> Result<BTreeSet<String>, String> {
    let manifest: toml::Table = manifest.parse().map_err(|error| format!("{error}"))?;
    let dependencies = manifest
        .get("workspace")
        .and_then(|workspace| workspace.get("dependencies"))
        .and_then(toml::Value::as_table)
        .ok_or("has no [workspace.dependencies]")?;
    Ok(dependencies
        .iter()
        .filter(|(_, value)| value.get("path").is_none())
        .map(|(name, _)| name.clone())
        .collect())
}

/// Names in the first column of the tables, written as `` | `name` | ``.
fn listed(list: &str) -> BTreeSet<String> {
    list.lines()
        .filter_map(|line| line.trim_start().strip_prefix("| `"))
        .filter_map(|rest| rest.split_once('`'))
        .map(|(name, _)| name.to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_directions_are_compared() {
        let manifest = "[workspace.dependencies]\nours = { path = \"x\" }\nserde = \"1\"\ntoml = { version = \"1\" }\n";
        let list = "| crate | where |\n|---|---|\n| `serde` | all |\n| `gone` | none |\n";
        let files = [
            TextFile::new(MANIFEST, manifest.to_owned()),
            TextFile::new(LIST, list.to_owned()),
        ];
        let messages: Vec<String> = check(&files)
            .into_iter()
            .map(|finding| finding.message)
            .collect();
        assert_eq!(messages.len(), 2, "{messages:?}");
        assert!(messages[0].contains("`toml`") && messages[1].contains("`gone`"));
    }
}
