//! The licence texts of everything that is shipped: our own, the crates linked in, Rust's library, MLX and what that brings.
//!
//! ```text
//! licences/LICENSE                       ours
//!          THIRD-PARTY.md                every part, its licence, where it is from; what has no text is told at its end
//!          crates/<name>-<version>/      as the crate has them, else the text of the licence that it names
//!          rust/  mlx-<backend>/
//! ```

mod bundled;
mod crates;
mod texts;

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::Error;
use crate::plugins::Plan;
use crate::process::Run;
use crate::workspace::Workspace;

/// What is known of the parts so far.
#[derive(Debug, Default)]
struct Index {
    lines: Vec<String>,
    without_text: Vec<String>,
}

/// Licences of what a plan builds, and of further crates of the workspace by name; says what has no text.
pub fn collect(
    workspace: &Workspace,
    plan: &Plan<'_>,
    further: &[&str],
    out: &Path,
) -> Result<(), Error> {
    std::fs::create_dir_all(out).map_err(Error::io("create", out))?;
    copy_into(&workspace.root.join("LICENSE"), out)?;
    let mut index = Index::default();
    let shipped: BTreeSet<&str> = plan.crates().chain(further.iter().copied()).collect();
    crates::collect(workspace, &shipped, out, &mut index)?;
    rust_library(workspace, out, &mut index)?;
    for (backend, tree) in &plan.trees {
        bundled::collect(*backend, tree, out, &mut index)?;
    }
    if !index.without_text.is_empty() {
        eprintln!(
            "licences: no text was found for {}; THIRD-PARTY.md names their licences",
            index.without_text.join(", ")
        );
    }
    let path = out.join("THIRD-PARTY.md");
    std::fs::write(&path, index.text()).map_err(Error::io("write", &path))
}

impl Index {
    fn text(&self) -> String {
        let mut text = String::from("# Third-party software in this package\n\n");
        for line in &self.lines {
            text.push_str("- ");
            text.push_str(line);
            text.push('\n');
        }
        if !self.without_text.is_empty() {
            text.push_str("\nNamed above, and without a text of the licence here: ");
            text.push_str(&self.without_text.join(", "));
            text.push_str(".\n");
        }
        text
    }
}

/// The standard library is in every program and plugin; the toolchain brings what its parts ask for.
fn rust_library(workspace: &Workspace, out: &Path, index: &mut Index) -> Result<(), Error> {
    let run = Run::new("rustc").args(["--print", "sysroot"]);
    let root = run.dir(&workspace.root).stdout()?;
    let file = Path::new(root.trim()).join("share/doc/rust/COPYRIGHT-library.html");
    let name = "Rust's standard library";
    index.lines.push(format!(
        "{name}: Apache-2.0 OR MIT, parts of it as rust/ says; https://github.com/rust-lang/rust"
    ));
    if file.is_file() {
        let dir = out.join("rust");
        std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
        copy_into(&file, &dir)?;
    } else {
        index.without_text.push(name.to_owned());
    }
    Ok(())
}

fn copy_into(file: &Path, dir: &Path) -> Result<(), Error> {
    let to = dir.join(file.file_name().unwrap_or_default());
    std::fs::copy(file, to)
        .map(|_| ())
        .map_err(Error::io("copy", file))
}

fn write_into(dir: &Path, name: &str, text: &str) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    let path = dir.join(name);
    std::fs::write(&path, text).map_err(Error::io("write", &path))
}

#[cfg(test)]
mod tests {
    use super::Index;

    #[test]
    fn the_index_ends_with_what_has_no_text() {
        let index = Index {
            lines: vec!["a 1.0: MIT".into()],
            without_text: vec!["a 1.0".into()],
        };
        let text = index.text();
        assert!(text.contains("\n- a 1.0: MIT\n"), "{text}");
        assert!(text.ends_with("licence here: a 1.0.\n"), "{text}");
        assert!(!Index::default().text().contains("without"));
    }
}
