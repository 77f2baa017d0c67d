//! `mlxcel inspect --check-values`: which tensors hold NaN or infinity. Reads all weights, runs no plugin.

use std::path::Path;

use mlxcel_registry::checkpoint::NotFinite;
use serde_json::{Value, json};

use crate::engine::OpenedModel;

use super::console::Console;
use super::error::CliError;
use super::exit::Exit;
use super::table::counted;

/// Tensors that are named; of a checkpoint that is damaged throughout, more would say no more.
const MOST_NAMED: usize = 20;

/// Looks through the weights and says what was found.
pub fn check(
    opened: &OpenedModel,
    path: &Path,
    is_json: bool,
    console: &Console,
) -> Result<Exit, CliError> {
    let found = opened
        .checkpoint
        .not_finite()
        .map_err(crate::engine::EngineError::from)?;
    match is_json {
        true => console.json(&document(&found))?,
        false => console.block(&text(&found, path))?,
    }
    Ok(match found.is_empty() {
        true => Exit::Success,
        false => Exit::Checkpoint,
    })
}

fn document(found: &[NotFinite]) -> Value {
    let rows: Vec<Value> = found
        .iter()
        .map(|bad| {
            json!({
                "tensor": bad.tensor, "values": bad.n_values, "not_finite": bad.n_bad,
                "first": bad.first, "value": bad.value.to_string(),
            })
        })
        .collect();
    json!({ "not_finite": rows })
}

fn text(found: &[NotFinite], path: &Path) -> String {
    if found.is_empty() {
        return format!("all weights of {} are finite\n", path.display());
    }
    let mut lines: Vec<String> = found
        .iter()
        .take(MOST_NAMED)
        .map(|bad| {
            format!(
                "{}: {} of {} are not finite, the first is {} at {}",
                bad.tensor,
                bad.n_bad,
                counted(bad.n_values, "value"),
                bad.value,
                bad.first,
            )
        })
        .collect();
    if found.len() > MOST_NAMED {
        lines.push(format!("... and {} more tensors", found.len() - MOST_NAMED));
    }
    lines.join("\n") + "\n"
}
