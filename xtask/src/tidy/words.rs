//! Words and names that do not belong in the tree.

use super::Finding;
use super::files::TextFile;
use super::rust_source::lines_with_word;

/// Macros that mark unfinished work.
const UNFINISHED: [&str; 3] = ["todo", "dbg", "unimplemented"];

/// Module names that say nothing about their content.
const EMPTY_NAMES: [&str; 6] = ["utils", "util", "common", "helpers", "helper", "manager"];

/// Beginnings of paths that exist on one machine only; joined here so that this file passes its own check.
const MACHINE_PATHS: [&str; 3] = [
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
    concat!("/Us", "ers/"),
];

/// Which index a package client asks is the user's to configure, so the tree names none; joined for the same reason.
const INDEX_HOSTS: [&str; 6] = [
    concat!("py", "pi.org"),
    concat!("python", "hosted.org"),
    concat!("index.", "crates.io"),
    concat!("static.", "crates.io"),
    concat!("registry.", "npmjs.org"),
    concat!("deb.", "debian.org"),
];

pub fn check(file: &TextFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(code) = &file.code {
        for word in UNFINISHED {
            for line in lines_with_word(code, word) {
                let is_macro = code
                    .lines()
                    .nth(line - 1)
                    .is_some_and(|text| text.contains(&format!("{word}!")));
                if is_macro {
                    findings.push(Finding::error(
                        file,
                        line,
                        format!("`{word}!` marks unfinished work"),
                    ));
                }
            }
        }
        findings.extend(empty_name(file));
    }
    for (index, line) in file.text.lines().enumerate() {
        for path in MACHINE_PATHS {
            if begins_a_path(line, path) {
                findings.push(Finding::error(
                    file,
                    index + 1,
                    format!("a path of one machine: `{path}...`"),
                ));
            }
        }
        for host in INDEX_HOSTS {
            if line.contains(host) {
                findings.push(Finding::error(
                    file,
                    index + 1,
                    format!(
                        "names a package index, `{host}`: leave it to the user's configuration"
                    ),
                ));
            }
        }
    }
    findings
}

/// The file itself or its folder is called by a name that says nothing.
fn empty_name(file: &TextFile) -> Option<Finding> {
    let stem = file.path.trim_end_matches(".rs");
    let name = stem.split('/').find(|part| EMPTY_NAMES.contains(part))?;
    Some(Finding::error(
        file,
        0,
        format!("a module called `{name}` says nothing about what it owns"),
    ))
}

/// Whether `path` stands in the line as the start of an absolute path: not after a letter, a digit or another part of a path.
fn begins_a_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line.get(..at).and_then(|text| text.chars().next_back());
        !before.is_some_and(|c| c.is_alphanumeric() || "._-~)}>$*/".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(&TextFile::new(path, text.to_owned()))
            .into_iter()
            .map(|finding| format!("{}: {}", finding.line, finding.message))
            .collect()
    }

    #[test]
    fn unfinished_work_is_found_in_code() {
        assert_eq!(
            messages(
                "a/src/b.rs",
                "// todo!()\nfn f() { todo!() }\nlet todo = 1;\n"
            ),
            ["2: `todo!` marks unfinished work"]
        );
        assert_eq!(messages("docs/a.md", "todo!()").len(), 0);
    }

    #[test]
    fn names_that_say_nothing() {
        assert_eq!(messages("a/src/utils.rs", "").len(), 1);
        assert_eq!(messages("a/src/common/x.rs", "").len(), 1);
        assert_eq!(messages("a/src/commons.rs", "").len(), 0);
    }

    #[test]
    fn machine_paths_are_found_in_any_text() {
        let path = concat!("see /ro", "ot/project/x");
        assert_eq!(messages("docs/a.md", path).len(), 1);
        let relative = concat!("src/ro", "ot/x and $DIR/ro", "ot/y");
        assert_eq!(messages("docs/a.md", relative).len(), 0);
    }
}
