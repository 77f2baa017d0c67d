//! The document behind `mlxcel plugin list --json`.

use serde_json::{Map, Value, json};

use super::catalogue::{Catalogue, PluginRecord, State};
use super::metadata::PluginKind;

/// Every plugin with its state, and every place that gave nothing.
pub fn plugins_document(catalogue: &Catalogue) -> Value {
    let plugins: Vec<Value> = catalogue.records().iter().map(plugin_value).collect();
    let places: Vec<Value> = catalogue
        .notes()
        .iter()
        .map(|note| {
            json!({
                "path": note.path.to_string_lossy(),
                "tier": note.tier.name(),
                "problem": note.problem,
                "text": note.text,
            })
        })
        .collect();
    json!({ "plugins": plugins, "places": places })
}

fn plugin_value(record: &PluginRecord) -> Value {
    let mut value = Map::new();
    let mut put = |key: &str, entry: Value| value.insert(key.to_owned(), entry);
    put("name", json!(record.name()));
    put("kind", json!(record.kind().map(PluginKind::name)));
    put("state", json!(record.state.name()));
    if let State::Rejected(rejection) = &record.state {
        put("stage", json!(rejection.stage.name()));
        put("code", json!(rejection.code.name()));
    }
    if let Some(reason) = record.state.reason() {
        put("reason", json!(reason));
    }
    put("path", json!(record.path.to_string_lossy()));
    put("tier", json!(record.tier.name()));
    if let Some(info) = record.info() {
        put("version", json!(info.version));
        put("vendor", json!(info.vendor));
        put(
            "abi",
            json!({ "major": info.abi[0], "minor": info.abi[1], "needs_minor": info.needs_minor }),
        );
        let archs: Vec<&str> = record.archs().iter().map(|arch| arch.id.as_str()).collect();
        put("archs", json!(archs));
    }
    Value::Object(value)
}
