//! Relative links in Markdown files lead somewhere.

use std::path::Path;

use super::Finding;
use super::files::TextFile;

pub fn check(file: &TextFile, root: &Path) -> Vec<Finding> {
    if file.extension() != "md" {
        return Vec::new();
    }
    let dir = root.join(&file.path);
    let dir = dir.parent().unwrap_or(root);
    links(&file.text)
        .into_iter()
        .filter(|(_, target)| !dir.join(target).exists())
        .map(|(line, target)| {
            Finding::error(file, line, format!("the link `{target}` leads nowhere"))
        })
        .collect()
}

/// (line, path) of every link to a file, less its `#section`.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut fence: Option<&str> = None;
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let marker = ["```", "~~~"]
            .into_iter()
            .find(|mark| trimmed.starts_with(mark));
        match (fence, marker) {
            (None, Some(mark)) => {
                fence = Some(mark);
                continue;
            }
            (Some(open), Some(mark)) if open == mark => {
                fence = None;
                continue;
            }
            (Some(_), _) => continue,
            (None, None) => {}
        }
        let line = without_inline_code(line);
        for target in targets(&line) {
            let path = target.split('#').next().unwrap_or_default();
            let external = path.is_empty() || path.contains("://") || path.starts_with("mailto:");
            if !external {
                found.push((index + 1, path.to_owned()));
            }
        }
    }
    found
}

/// What stands in `](...)` and after `[name]: ` at the start of a line.
fn targets(line: &str) -> Vec<&str> {
    let inline = line.split("](").skip(1).filter_map(|rest| {
        let inside = rest.split(')').next()?;
        inside.split_whitespace().next()
    });
    let reference = line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("]: "))
        .and_then(|(_, target)| target.split_whitespace().next());
    inline.chain(reference).collect()
}

fn without_inline_code(line: &str) -> String {
    line.split('`')
        .enumerate()
        .filter(|(index, _)| index % 2 == 0)
        .map(|(_, part)| part)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_links_to_files_and_nothing_else() {
        let text = "# T\n\nSee [a](docs/a.md#part), [b](../b.md \"title\") and `[c](no.md)`.\n\
                    [out](https://example.org/x) [same](#section)\n```\n[d](no.md)\n```\n[ref]: e.md\n![pic](p.png)\n";
        assert_eq!(
            links(text),
            [
                (3, "docs/a.md".to_owned()),
                (3, "../b.md".to_owned()),
                (8, "e.md".to_owned()),
                (9, "p.png".to_owned()),
            ]
        );
    }

    #[test]
    fn a_broken_link_is_told_with_its_line() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = TextFile::new("README.md", "[ok](Cargo.toml)\n[bad](gone.md)\n".to_owned());
        let findings = check(&file, root);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].line, 2);
    }
}
