//! What built plugins import and export: a family speaks to MLX through the operation table alone, and a backend shows the
//! loader its entry and nothing of MLX or of its C++.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::process::Run;

/// Symbols that a plugin may define for others.
const ALLOWED_EXPORTS: [&str; 3] = [
    // abi_stable's root module: the one symbol that the host looks up.
    "_1as_0lib_1header_0root_bmodule_bloader",
    // The ends of linkme's table in its section, made by the linker.
    "__start_linkm",
    "__stop_linkm",
];

/// A broken build exports hundreds of symbols; this many show what kind they are.
const SHOWN: usize = 5;

/// Checks every plugin package in a plugins folder; returns how many there were and what is wrong.
pub fn check_all(plugins: &Path) -> Result<(usize, Vec<String>), Error> {
    let mut count = 0;
    let mut problems = Vec::new();
    for library in plugin_libraries(plugins)? {
        let name = library
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let table = Run::new("nm")
            .arg(if cfg!(target_os = "macos") {
                "-g"
            } else {
                "-D"
            })
            .arg(&library)
            .hint("; install binutils")
            .capture()?
            .ok()?
            .stdout;
        count += 1;
        let found = if name.starts_with("libmlxcel_family_") {
            family_problems(&table)
        } else {
            export_problems(&table)
        };
        let hidden = found.len().saturating_sub(SHOWN);
        let shown = found.into_iter().take(SHOWN);
        problems.extend(shown.map(|problem| format!("{name}: {problem}")));
        if hidden > 0 {
            problems.push(format!("{name}: and {hidden} more like these"));
        }
    }
    Ok((count, problems))
}

fn plugin_libraries(plugins: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for package in std::fs::read_dir(plugins).map_err(Error::io("list", plugins))? {
        let package = package.map_err(Error::io("list", plugins))?.path();
        if !package.is_dir() {
            continue;
        }
        for file in std::fs::read_dir(&package).map_err(Error::io("list", &package))? {
            let file = file.map_err(Error::io("list", &package))?.path();
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            if file.is_file() && name.starts_with("libmlxcel_") {
                found.push(file.clone());
            }
        }
    }
    found.sort();
    Ok(found)
}

#[derive(Debug, PartialEq, Eq)]
struct Symbol<'a> {
    kind: char,
    name: &'a str,
}

impl Symbol<'_> {
    fn is_defined(&self) -> bool {
        // U: needed from elsewhere; w, v: weak and needed.
        !matches!(self.kind, 'U' | 'w' | 'v')
    }
}

/// Lines of nm: `address kind name`, the address left out for what is not defined here.
fn symbols(table: &str) -> Vec<Symbol<'_>> {
    table
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace().rev();
            let name = fields.next()?;
            let kind = fields.next().filter(|kind| kind.len() == 1)?;
            Some(Symbol {
                kind: kind.chars().next()?,
                // Versions as in `memcpy@GLIBC_2.14` are no part of the name.
                name: name.split('@').next().unwrap_or(name),
            })
        })
        .collect()
}

fn names_mlx(name: &str) -> bool {
    name.contains("3mlx4core") || name.starts_with("mlx_")
}

fn family_problems(table: &str) -> Vec<String> {
    let mlx = symbols(table)
        .into_iter()
        .filter(|symbol| names_mlx(symbol.name));
    let mut problems: Vec<String> = mlx
        .map(|symbol| format!("family uses MLX's symbol {}", symbol.name))
        .collect();
    problems.extend(export_problems(table));
    problems
}

fn export_problems(table: &str) -> Vec<String> {
    symbols(table)
        .into_iter()
        .filter(Symbol::is_defined)
        .filter(|symbol| {
            let plain = symbol.name.strip_prefix('_').unwrap_or(symbol.name);
            !ALLOWED_EXPORTS
                .iter()
                .any(|prefix| symbol.name.starts_with(prefix) || plain.starts_with(prefix))
        })
        .map(|symbol| {
            format!(
                "exports {} ({}), which is no entry of a plugin",
                symbol.name, symbol.kind
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "0000000000012340 D _1as_0lib_1header_0root_bmodule_bloader\n\
        \u{20}                U memcpy@GLIBC_2.14\n                 w __cxa_finalize@GLIBC_2.2.5\n";

    #[test]
    fn a_clean_plugin_passes() {
        assert_eq!(family_problems(GOOD), Vec::<String>::new());
        assert_eq!(export_problems(GOOD), Vec::<String>::new());
    }

    #[test]
    fn a_family_that_knows_mlx_is_found() {
        let table = format!("{GOOD}                 U _ZN3mlx4core3addERKNS0_5arrayE\n");
        assert_eq!(
            family_problems(&table),
            ["family uses MLX's symbol _ZN3mlx4core3addERKNS0_5arrayE"]
        );
        assert!(
            export_problems(&table).is_empty(),
            "a backend may import it"
        );
    }

    #[test]
    fn an_unexpected_export_is_found() {
        let table =
            format!("{GOOD}0000000000001000 T _ZN5shimsD1Ev\n0000000000001000 u _ZGVZ5thing\n");
        let problems = export_problems(&table);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("_ZN5shimsD1Ev (T)"));
    }
}
