//! `families/README.md`: the table of architectures, made from what the runs of goldens measured.
//!
//! A golden is a folder `tests/golden/<family>/<variant>` with `golden.json` (what a reference computed)
//! and `result.json` (what a test of ours measured, see `tests/src/golden_results.rs`). A golden without
//! a result has not been run and is a finding. Real checkpoints are in `tests/golden/real.json`, each
//! with the test that runs it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;
use crate::workspace::Workspace;

const GOLDEN: &str = "tests/golden";
const PAGE: &str = "families/README.md";
const BEGIN: &str = "<!-- table: cargo xtask families -->";
const END: &str = "<!-- end of table -->";

/// `result.json`.
#[derive(Debug, Deserialize)]
struct Measured {
    architecture: String,
    format: String,
    max_logit_error: f64,
}

/// An entry of `real.json`.
#[derive(Debug, Deserialize)]
struct Real {
    architecture: String,
    checkpoint: String,
    /// File in `tests/tests` that runs it, without its ending; none for a run by hand.
    test: Option<String>,
    what: String,
}

/// One golden that was run.
#[derive(Debug)]
struct Run {
    family: String,
    reference: String,
    measured: Measured,
}

/// What the table says of one architecture.
#[derive(Debug, Default)]
struct Row {
    family: String,
    goldens: usize,
    /// By reference with its version.
    references: BTreeMap<String, f64>,
    formats: BTreeSet<String>,
    real: Vec<String>,
}

/// Writes the page, or compares.
pub fn run(workspace: &Workspace, check: bool) -> Result<(), Error> {
    let (runs, missing) = read_runs(&workspace.root.join(GOLDEN))?;
    for folder in &missing {
        println!(
            "error: {}: golden.json without a result.json: run its test with MLXCEL_RECORD_GOLDEN=1",
            workspace.relative(folder).display()
        );
    }
    let real = read_real(workspace)?;
    let path = workspace.root.join(PAGE);
    let old = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let Some(fresh) = splice(&old, &table(&runs, &real)) else {
        return Err(Error::Malformed {
            path,
            message: format!("expected the lines `{BEGIN}` and `{END}`"),
        });
    };
    if fresh == old {
        println!("{PAGE} is up to date");
    } else if check {
        return Err(Error::Malformed {
            path,
            message: "differs from the results of the goldens; run `cargo xtask families`"
                .to_owned(),
        });
    } else {
        std::fs::write(&path, fresh).map_err(Error::io("write", &path))?;
        println!("{PAGE} written");
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Findings {
        check: "families",
        count: missing.len(),
    })
}

fn read_json(path: &Path) -> Result<Option<Value>, Error> {
    if !path.is_file() {
        return Ok(None);
    }
    let text = std::fs::read(path).map_err(Error::io("read", path))?;
    let value = serde_json::from_slice(&text).map_err(|e| Error::Malformed {
        path: path.to_owned(),
        message: e.to_string(),
    })?;
    Ok(Some(value))
}

fn folders(parent: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(parent).map_err(Error::io("read", parent))? {
        let path = entry.map_err(Error::io("read", parent))?.path();
        if path.is_dir() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn name_of(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// All goldens that were run, and the folders of those that were not.
fn read_runs(golden: &Path) -> Result<(Vec<Run>, Vec<PathBuf>), Error> {
    let (mut runs, mut missing) = (Vec::new(), Vec::new());
    for family in folders(golden)? {
        for variant in folders(&family)? {
            let Some(facts) = read_json(&variant.join("golden.json"))? else {
                continue;
            };
            // Tokenizers and templates have goldens too, of text.
            if facts.get("prompts").is_none() {
                continue;
            }
            let result = variant.join("result.json");
            let Some(measured) = read_json(&result)? else {
                missing.push(variant);
                continue;
            };
            let measured = serde_json::from_value(measured).map_err(|e| Error::Malformed {
                path: result,
                message: e.to_string(),
            })?;
            runs.push(Run {
                family: name_of(&family),
                reference: reference_of(&facts["reference"]),
                measured,
            });
        }
    }
    Ok((runs, missing))
}

/// `name version` of a golden's reference.
fn reference_of(reference: &Value) -> String {
    let text = |key: &str| reference[key].as_str().unwrap_or_default();
    format!("{} {}", text("name"), text("version"))
        .trim()
        .to_owned()
}

fn read_real(workspace: &Workspace) -> Result<Vec<Real>, Error> {
    let path = workspace.root.join(GOLDEN).join("real.json");
    let value = read_json(&path)?.unwrap_or_else(|| Value::Array(Vec::new()));
    let malformed = |message: String| Error::Malformed {
        path: path.clone(),
        message,
    };
    let list: Vec<Real> = serde_json::from_value(value).map_err(|e| malformed(e.to_string()))?;
    for real in &list {
        let Some(test) = &real.test else { continue };
        let file = workspace.root.join(format!("tests/tests/{test}.rs"));
        if !file.is_file() {
            let expected = format!("{}: there is no test {}", real.checkpoint, file.display());
            return Err(malformed(expected));
        }
    }
    Ok(list)
}

fn table(runs: &[Run], real: &[Real]) -> String {
    let mut rows: BTreeMap<(String, String), Row> = BTreeMap::new();
    for run in runs {
        let key = (run.family.clone(), run.measured.architecture.clone());
        let row = rows.entry(key).or_default();
        row.family.clone_from(&run.family);
        row.goldens += 1;
        // Six bits of a K-quant are expanded to halves, which rounds: not the architecture's doing.
        let reference = match run.measured.format.as_str() {
            "GGUF" => format!("{} on the decoded GGUF", run.reference),
            _ => run.reference.clone(),
        };
        let worst = row.references.entry(reference).or_default();
        *worst = worst.max(run.measured.max_logit_error);
        row.formats.insert(run.measured.format.clone());
    }
    for real in real {
        // A claim about an architecture without goldens does not appear.
        if let Some(row) = rows
            .iter_mut()
            .find_map(|((_, arch), row)| (*arch == real.architecture).then_some(row))
        {
            row.real.push(format!("{}: {}", real.checkpoint, real.what));
        }
    }
    let mut out = String::from(
        "| Architecture | Family | Goldens | Reference, largest error | Formats | Real checkpoints |\n|---|---|---|---|---|---|\n",
    );
    for ((_, arch), row) in &rows {
        let references: Vec<String> = row
            .references
            .iter()
            .map(|(reference, error)| format!("{reference}: {error:.1e}"))
            .collect();
        let formats: Vec<&str> = row.formats.iter().map(String::as_str).collect();
        let _ = writeln!(
            out,
            "| `{arch}` | {} | {} | {} | {} | {} |",
            row.family,
            row.goldens,
            references.join("; "),
            formats.join("; "),
            row.real.join("; ")
        );
    }
    out
}

/// The page with another table.
fn splice(page: &str, table: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(arch: &str, reference: &str, format: &str, error: f64) -> Run {
        Run {
            family: "llama".to_owned(),
            reference: reference.to_owned(),
            measured: Measured {
                architecture: arch.to_owned(),
                format: format.to_owned(),
                max_logit_error: error,
            },
        }
    }

    #[test]
    fn a_row_has_the_worst_of_its_runs_and_claims_without_a_run_do_not_appear() {
        let runs = [
            ran("llama", "transformers 5.24.0", "GGUF", 2e-7),
            ran("llama", "transformers 5.24.0", "safetensors F32", 3e-7),
            ran("llama", "mlx-lm 0.32.2", "MLX 4-bit", 1e-6),
        ];
        let real = |arch: &str| Real {
            architecture: arch.to_owned(),
            checkpoint: "Some-1B".to_owned(),
            test: None,
            what: "greedy tokens".to_owned(),
        };
        let table = table(&runs, &[real("llama"), real("other")]);
        let row = "| `llama` | llama | 3 | mlx-lm 0.32.2: 1.0e-6; transformers 5.24.0: 3.0e-7; transformers 5.24.0 on the decoded GGUF: 2.0e-7 | GGUF; MLX 4-bit; safetensors F32 | Some-1B: greedy tokens |";
        assert_eq!(table.lines().nth(2), Some(row));
        assert_eq!(table.lines().count(), 3);
    }

    #[test]
    fn only_the_table_of_a_page_changes() {
        let page = format!("# Top\n\n{BEGIN}\nold\n{END}\n\nrest\n");
        let fresh = splice(&page, "new\n").expect("both marks are there");
        assert_eq!(fresh, format!("# Top\n\n{BEGIN}\n\nnew\n\n{END}\n\nrest\n"));
        assert_eq!(splice(&fresh, "new\n").as_deref(), Some(fresh.as_str()));
        assert_eq!(splice("no marks", ""), None);
    }
}
