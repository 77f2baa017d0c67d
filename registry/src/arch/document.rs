//! The document behind `mlxcel arch --json`: `{mlxcel_version, families}`, a superset of the established
//! format with the plugin, its ABI and its hash added to every family.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::index::ArchIndex;
use crate::plugin::{ArchRecord, PluginRecord};

/// Options of the document.
#[derive(Debug, Clone, Copy)]
pub struct DocumentOptions<'a> {
    /// Version of the product.
    pub mlxcel_version: &'a str,
    /// Whether each plugin's path is given; it makes the document differ from machine to machine.
    pub with_paths: bool,
}

/// Builds the document: families in order of id, keys in a fixed order.
pub fn arch_document(index: &ArchIndex<'_>, options: DocumentOptions<'_>) -> Value {
    let rows = index.rows();
    let mut hashes: HashMap<&Path, Value> = HashMap::new();
    let families: Vec<Value> = rows
        .iter()
        .map(|(plugin, arch, contested)| {
            let hash = hashes
                .entry(&plugin.path)
                .or_insert_with(|| hash_value(plugin))
                .clone();
            let mut family = family_value(arch);
            family.insert("abi".to_owned(), abi_value(plugin));
            family.insert(
                "plugin".to_owned(),
                plugin_value(plugin, hash, options.with_paths),
            );
            if *contested {
                let others: Vec<&str> = rows
                    .iter()
                    .filter(|(other, row, _)| row.id == arch.id && other.path != plugin.path)
                    .map(|(other, _, _)| other.name())
                    .collect();
                family.insert("conflict_with".to_owned(), json!(others));
            }
            for (key, value) in &arch.extra {
                family.entry(key.as_str()).or_insert_with(|| value.clone());
            }
            Value::Object(family)
        })
        .collect();
    json!({ "mlxcel_version": options.mlxcel_version, "families": families })
}

fn family_value(arch: &ArchRecord) -> Map<String, Value> {
    let mut family = Map::new();
    let mut put = |key: &str, value: Value| family.insert(key.to_owned(), value);
    put("id", json!(arch.id));
    put("display_name", json!(arch.display_name));
    put("category", json!(arch.category));
    put("model_types", json!(arch.model_types));
    put("aliases", json!(arch.aliases));
    put("runtimes", json!(arch.runtimes));
    put("modalities_in", json!(arch.modalities_in));
    put("output", json!(arch.output));
    put("backends", json!(arch.backends));
    put("tensor_parallel", json!(arch.tensor_parallel));
    put("pipeline_parallel", json!(arch.pipeline_parallel));
    put("drafters", json!(arch.drafters));
    put("kv_modes", json!(arch.kv_modes));
    put("gguf", json!(arch.gguf));
    put("task", json!(arch.task));
    family
}

fn abi_value(plugin: &PluginRecord) -> Value {
    match plugin.info() {
        Some(info) => json!({ "major": info.abi[0], "minor": info.abi[1] }),
        None => Value::Null,
    }
}

fn hash_value(plugin: &PluginRecord) -> Value {
    match plugin.sha256() {
        Ok(hash) => Value::String(hash),
        Err(error) => {
            tracing::warn!(path = %plugin.path.display(), %error, "plugin file cannot be hashed");
            Value::Null
        }
    }
}

fn plugin_value(plugin: &PluginRecord, sha256: Value, with_path: bool) -> Value {
    let mut value = json!({
        "name": plugin.name(),
        "version": plugin.info().map(|info| info.version.to_string()),
        "sha256": sha256,
    });
    if with_path && let Some(object) = value.as_object_mut() {
        object.insert("path".to_owned(), json!(plugin.path.to_string_lossy()));
    }
    value
}
