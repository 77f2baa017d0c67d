//! `mlxcel plugin show`: all that a plugin's file says of itself. Runs no code of it.

use clap::Args;
use mlxcel_registry::plugin::{Catalogue, Linkage, PluginRecord, SystemLibraries, linkage};
use serde_json::{Value, json};

use super::super::args::{LogArgs, PluginArgs};
use super::super::console::Console;
use super::super::error::CliError;
use super::super::exit::Exit;
use super::super::place::catalogue;
use super::{identity, label};

/// Key of a plugin's record that says who brings libraries it needs.
const PROVIDERS: &str = "providers";

/// Flags of `plugin show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// `name` or `kind/name`
    name: String,
    /// Write JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    plugins: PluginArgs,
    #[command(flatten)]
    pub(super) log: LogArgs,
}

pub(super) fn run(args: &ShowArgs, console: &Console) -> Result<Exit, CliError> {
    let catalogue = catalogue(&args.plugins, console)?;
    let found: Vec<&PluginRecord> = catalogue
        .records()
        .iter()
        .filter(|record| is_called(record, &args.name))
        .collect();
    if found.is_empty() {
        return Err(CliError::NoSuchPlugin {
            name: args.name.clone(),
            known: names(&catalogue),
        });
    }
    if args.json {
        let plugins: Vec<Value> = found.iter().map(|record| value(record)).collect();
        console.json(&json!({ "plugins": plugins }))?;
        return Ok(Exit::Success);
    }
    for (number, record) in found.into_iter().enumerate() {
        if number > 0 {
            console.line("")?;
        }
        console.block(&text(record))?;
    }
    Ok(Exit::Success)
}

fn is_called(record: &PluginRecord, name: &str) -> bool {
    record.name() == name || label(record) == name
}

fn names(catalogue: &Catalogue) -> Vec<String> {
    let mut names: Vec<String> = catalogue.records().iter().map(label).collect();
    names.sort();
    names.dedup();
    names
}

fn value(record: &PluginRecord) -> Value {
    let mut value = identity(record);
    let Some(object) = value.as_object_mut() else {
        return value;
    };
    object.insert("tier".to_owned(), json!(record.tier.name()));
    object.insert("state".to_owned(), json!(record.state.name()));
    object.insert("reason".to_owned(), json!(record.state.reason()));
    object.insert("sha256".to_owned(), json!(record.sha256().ok()));
    object.insert("metadata".to_owned(), json!(record.info()));
    object.insert("archs".to_owned(), json!(record.archs()));
    let linkage = linkage(&record.path, &SystemLibraries::of_process());
    object.insert("missing_libraries".to_owned(), json!(linkage.missing));
    object.insert("damaged_libraries".to_owned(), damaged(&linkage));
    value
}

/// Libraries that are there and cannot be used.
fn damaged(linkage: &Linkage) -> Value {
    let damaged = linkage.damaged.iter();
    damaged
        .map(|(path, fault)| json!({ "path": path.to_string_lossy(), "fault": fault }))
        .collect()
}

fn text(record: &PluginRecord) -> String {
    let mut lines = vec![
        ("plugin", label(record)),
        ("file", record.path.display().to_string()),
        ("place", record.tier.name().to_owned()),
        ("state", record.state.name().to_owned()),
    ];
    lines.extend(record.state.reason().map(|reason| ("reason", reason)));
    lines.push((
        "sha256",
        record
            .sha256()
            .unwrap_or_else(|error| format!("cannot be read: {error}")),
    ));
    if let Some(info) = record.info() {
        lines.push(("version", info.version.to_string()));
        lines.push(("vendor", info.vendor.clone()));
        lines.push((
            "abi",
            format!(
                "{}.{}, needs a host of {0}.{} or newer",
                info.abi[0], info.abi[1], info.needs_minor
            ),
        ));
        lines.push(("built for", format!("{} {}", info.os, info.arch)));
        if !info.requires_ops.is_empty() {
            lines.push(("needs ops", info.requires_ops.join(", ")));
        }
        for (key, value) in &info.extra {
            match value.as_array().filter(|_| key == PROVIDERS) {
                Some(providers) => {
                    lines.extend(providers.iter().map(|one| ("from others", origin(one))))
                }
                None => lines.push((key.as_str(), plain(value))),
            }
        }
        let linkage = linkage(&record.path, &SystemLibraries::of_process());
        if !linkage.missing.is_empty() {
            lines.push(("missing", linkage.missing.join(", ")));
        }
        let damaged = linkage.damaged.iter();
        lines.extend(
            damaged.map(|(path, fault)| ("damaged", format!("{} {fault}", path.display()))),
        );
    }
    let mut text: String = lines
        .iter()
        .map(|(key, value)| format!("{key:<12} {value}\n"))
        .collect();
    for arch in record.archs() {
        let kv = arch.kv_modes.join(",");
        text.push_str(&format!(
            "{:<12} {} ({}): {}; model types {}; kv {kv}\n",
            "arch",
            arch.id,
            arch.display_name,
            arch.category,
            arch.model_types.join(",")
        ));
    }
    text
}

/// One who brings libraries, with these.
fn origin(provider: &Value) -> String {
    let libraries = provider["libraries"].as_array().into_iter().flatten();
    let libraries: Vec<&str> = libraries.filter_map(Value::as_str).collect();
    let name = provider["name"].as_str().unwrap_or("?");
    format!("{name}: {}", libraries.join(", "))
}

fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_library_is_in_the_json_with_its_fault() {
        let linkage = Linkage {
            damaged: vec![("/v/liba.so".into(), "is empty".to_owned())],
            ..Linkage::default()
        };
        assert_eq!(
            damaged(&linkage),
            json!([{ "path": "/v/liba.so", "fault": "is empty" }])
        );
    }
}
