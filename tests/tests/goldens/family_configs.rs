//! Configurations that no model has, through the real family plugins: every architecture whose golden is
//! checked in, with keys that are missing, null, of another type, zero or absurd. Each must be refused
//! by name: the message holds the key, the value, and what is allowed.
//!
//! An architecture is found here by its golden alone (`tests/golden/<family>/<variant>/config.json`);
//! nothing has to be added for a new one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mlxcel::engine::open_model;
use mlxcel::plugin::Loader;
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use serde_json::{Map, Value, json};

/// A change of one key, and words of which the message must have one.
struct Change {
    key: &'static str,
    /// None takes the key away.
    value: Option<Value>,
    /// Architectures without the key take no harm from it.
    only_if_present: bool,
    allowed: &'static [&'static str],
}

/// Keys that an architecture does not read, or has a default for that published files rely on: nothing
/// in them can be wrong, or their absence is none. `*` stands for any end of a name.
const NO_HARM: &[(&str, &str, &str)] = &[
    ("deepseek*", "head_dim", "heads have widths of their own"),
    (
        "nemotron-nas",
        "intermediate_size",
        "block_configs has the widths",
    ),
    (
        "qwen2_moe",
        "intermediate_size",
        "no dense layer in this golden",
    ),
    (
        "qwen3_moe",
        "intermediate_size",
        "no dense layer in this golden",
    ),
    (
        "qwen3_next",
        "intermediate_size",
        "no dense layer in this golden",
    ),
    (
        "qwen3_5_moe",
        "intermediate_size",
        "no dense layer in this golden",
    ),
];
const HAS_DEFAULT: &[(&str, &str, &str)] = &[
    (
        "gemma*",
        "num_attention_heads",
        "published files leave it out",
    ),
    ("gemma*", "vocab_size", "published files leave it out"),
];

fn listed(list: &[(&str, &str, &str)], arch: &str, key: &str) -> bool {
    list.iter().any(|(name, listed, _)| {
        let fits = match name.strip_suffix('*') {
            Some(start) => arch.starts_with(start),
            None => arch == *name,
        };
        fits && *listed == key
    })
}

const NUMBERS: &[&str] = &["an integer from", "a number from", "a multiple of"];
const NAMES: &[&str] = &["known", "are", "expected"];

fn changes() -> Vec<Change> {
    let mut out = Vec::new();
    for key in [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ] {
        let bad = [
            None,
            Some(Value::Null),
            Some(json!("8")),
            Some(json!(0)),
            Some(json!(-4)),
            Some(json!(2.5)),
            Some(json!(1_000_000_000_000_u64)),
            Some(json!([8])),
            Some(json!(true)),
        ];
        out.extend(bad.into_iter().map(|value| Change {
            key,
            value,
            only_if_present: false,
            allowed: NUMBERS,
        }));
    }
    let optional = [
        ("intermediate_size", json!(0)),
        ("intermediate_size", json!("many")),
        ("num_key_value_heads", json!(0)),
        ("num_key_value_heads", json!("2")),
        ("head_dim", json!(0)),
        ("head_dim", json!("16")),
        ("head_dim", json!(-1)),
        ("max_position_embeddings", json!(0)),
        ("max_position_embeddings", json!("long")),
        ("rms_norm_eps", json!("1e-6")),
        ("rms_norm_eps", json!(-1.0)),
        ("num_experts_per_tok", json!(0)),
        ("num_experts_per_tok", json!("2")),
        ("num_local_experts", json!(0)),
        ("num_local_experts", json!("8")),
        ("num_experts", json!(0)),
        ("n_routed_experts", json!("8")),
        ("moe_intermediate_size", json!("16")),
        ("kv_lora_rank", json!(0)),
        ("qk_rope_head_dim", json!("8")),
        ("v_head_dim", json!(0)),
        ("attention_chunk_size", json!("8")),
        ("loop_window_size", json!(0)),
    ];
    out.extend(optional.into_iter().map(|(key, value)| Change {
        key,
        value: Some(value),
        only_if_present: true,
        allowed: NUMBERS,
    }));
    for (key, value) in [
        ("num_experts_per_tok", json!(4000)),
        ("tie_word_embeddings", json!("yes")),
        ("layer_types", json!(["wavy"])),
        ("layer_types", json!("full_attention")),
        ("rope_parameters", json!("yarn")),
        ("block_configs", json!([])),
        ("no_rope_layers", json!("all")),
        ("text_config", json!(7)),
    ] {
        out.push(Change {
            key,
            value: Some(value),
            only_if_present: true,
            allowed: &["expected", "known", "are all"],
        });
    }
    for key in ["hidden_act", "hidden_activation"] {
        out.push(Change {
            key,
            value: Some(json!("wavy")),
            only_if_present: true,
            allowed: NAMES,
        });
    }
    out
}

fn plugins() -> (Catalogue, Loader) {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR")
        .expect("MLXCEL_TEST_PLUGINS_DIR is not set: run the tests with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    (catalogue, Loader::default())
}

/// The part of a configuration that describes the decoder.
fn decoder(config: &mut Value) -> &mut Map<String, Value> {
    let nested = config.get("text_config").is_some_and(Value::is_object);
    let part = if nested {
        config.get_mut("text_config").unwrap()
    } else {
        config
    };
    part.as_object_mut().unwrap()
}

/// One golden of every architecture: its folder, by architecture and then the shortest name.
fn subjects(catalogue: &Catalogue, loader: &Loader) -> BTreeMap<String, (PathBuf, Value)> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let mut folders = Vec::new();
    for family in std::fs::read_dir(golden).unwrap() {
        let family = family.unwrap().path();
        if family.is_dir() {
            folders.extend(
                std::fs::read_dir(family)
                    .unwrap()
                    .map(|e| e.unwrap().path()),
            );
        }
    }
    folders.sort_by_key(|folder| (folder.as_os_str().len(), folder.clone()));
    let mut found = BTreeMap::new();
    for folder in folders {
        let (config, weights) = (folder.join("config.json"), folder.join("model.safetensors"));
        if !config.is_file() || !weights.is_file() {
            continue;
        }
        let config: Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
        if let Ok(opened) = open_model(&folder, catalogue, loader, None) {
            let entry = found.entry(opened.decision.arch.clone());
            entry.or_insert((folder, config));
        }
    }
    found
}

fn refusal(
    (catalogue, loader): (&Catalogue, &Loader),
    folder: &Path,
    config: &Value,
) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let weights = "model.safetensors";
    std::os::unix::fs::symlink(folder.join(weights), dir.path().join(weights)).unwrap();
    let opened = open_model(dir.path(), catalogue, loader, None);
    opened.err().map(|error| error.to_string())
}

#[test]
fn bad_configurations_are_refused_by_key_and_value() {
    let (catalogue, loader) = plugins();
    let subjects = subjects(&catalogue, &loader);
    for arch in [
        "llama",
        "mixtral",
        "llama4",
        "nemotron-nas",
        "qwen3_moe",
        "gemma3",
    ] {
        assert!(
            subjects.contains_key(arch),
            "no golden of {arch}: {:?}",
            subjects.keys()
        );
    }
    let mut wrong = Vec::new();
    let mut tried = 0;
    for (arch, (folder, config)) in &subjects {
        for change in changes() {
            let mut config = config.clone();
            let outer = change.key == "text_config";
            let part = if outer {
                config.as_object_mut().unwrap()
            } else {
                decoder(&mut config)
            };
            let absent = matches!(change.value, None | Some(Value::Null));
            if change.only_if_present && part.get(change.key).is_none_or(Value::is_null)
                || listed(NO_HARM, arch, change.key)
                || absent && listed(HAS_DEFAULT, arch, change.key)
            {
                continue;
            }
            match &change.value {
                Some(value) => part.insert(change.key.to_owned(), value.clone()),
                None => part.remove(change.key),
            };
            tried += 1;
            let what = format!("{arch}: {} = {:?}", change.key, change.value);
            let Some(message) = refusal((&catalogue, &loader), folder, &config) else {
                wrong.push(format!("{what} is accepted"));
                continue;
            };
            let shown = match &change.value {
                // A list or an object may be shown by its size.
                None | Some(Value::Null | Value::Array(_) | Value::Object(_)) => None,
                Some(value) => Some(value.to_string()),
            };
            let named = message.contains(change.key)
                && shown.is_none_or(|shown| message.contains(&shown))
                && change.allowed.iter().any(|words| message.contains(words));
            if !named {
                wrong.push(format!("{what}: {message}"));
            }
        }
    }
    assert!(tried > 300, "{tried}");
    assert!(
        wrong.is_empty(),
        "{} of {tried}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn unknown_types_of_rotary_embedding_are_refused_by_name() {
    let (catalogue, loader) = plugins();
    let mut wrong = Vec::new();
    for (arch, (folder, mut config)) in subjects(&catalogue, &loader) {
        let part = decoder(&mut config);
        if part.contains_key("rope_parameters") {
            let settings = part.get_mut("rope_parameters").unwrap();
            let nested = settings.as_object_mut().unwrap().values_mut();
            let mut nested: Vec<&mut Value> = nested.filter(|value| value.is_object()).collect();
            if nested.is_empty() {
                settings["rope_type"] = json!("wavy");
            } else {
                for settings in &mut nested {
                    settings["rope_type"] = json!("wavy");
                }
            }
        } else {
            part.insert(
                "rope_scaling".to_owned(),
                json!({"rope_type": "wavy", "factor": 2.0}),
            );
        }
        match refusal((&catalogue, &loader), &folder, &config) {
            Some(message)
                if message.contains("rope_type = \"wavy\"") && message.contains("known") => {}
            other => wrong.push(format!("{arch}: {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Heads that do not divide, in whatever way an architecture counts them.
#[test]
fn heads_that_do_not_divide_are_refused_by_name() {
    let (catalogue, loader) = plugins();
    let mut wrong = Vec::new();
    for (arch, (folder, mut config)) in subjects(&catalogue, &loader) {
        let part = decoder(&mut config);
        let Some(heads) = part.get("num_attention_heads").and_then(Value::as_u64) else {
            continue;
        };
        if part.get("num_key_value_heads").is_none() {
            continue;
        }
        part.insert("num_key_value_heads".to_owned(), json!(heads + 1));
        match refusal((&catalogue, &loader), &folder, &config) {
            Some(message) if message.contains("num_key_value_heads") => {}
            other => wrong.push(format!("{arch}: {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
