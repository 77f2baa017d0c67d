//! Checkpoints of every architecture, plain and packed, in which one tensor has another type of as many bytes:
//! refused by its name before anything is computed with what it holds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use mlxcel::engine::{LoadOptions, open_model, start_engine};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use serde_json::{Map, Value, json};

/// Types of as many bytes that mean something else.
const OTHERS: &[(&str, &str)] = &[
    ("F32", "I32"),
    ("F16", "I16"),
    ("BF16", "U16"),
    ("U32", "F32"),
    ("U8", "I8"),
    ("F8_E4M3", "I8"),
    ("F8_E8M0", "BOOL"),
    ("I8", "U8"),
    ("I32", "F32"),
    ("I64", "F64"),
];

struct Checkpoint {
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl Checkpoint {
    fn read(path: &Path) -> Self {
        let file = std::fs::read(path).unwrap();
        let (length, rest) = file.split_at(8);
        let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
        let (header, data) = rest.split_at(length);
        Self {
            header: serde_json::from_slice(header).unwrap(),
            data: data.to_vec(),
        }
    }

    /// Writes the file with one entry of a tensor's header changed.
    fn write(&self, path: &Path, name: &str, key: &str, value: Value) {
        let mut header = self.header.clone();
        header[name][key] = value;
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.extend_from_slice(&self.data);
        std::fs::write(path, file).unwrap();
    }
}

/// The end of a name: the layers of a model are alike.
fn kind(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    parts[parts.len().saturating_sub(2)..].join(".")
}

struct Plugins {
    catalogue: Catalogue,
    loader: Loader,
}

impl Plugins {
    fn load(&self, dir: &Path) -> Result<String, String> {
        let opened = open_model(dir, &self.catalogue, &self.loader, None);
        let opened = opened.map_err(|error| error.to_string())?;
        let arch = opened.decision.arch.clone();
        let choice = BackendChoice::Named("cpu".to_owned());
        let backend = self.loader.select_backend(&self.catalogue, &choice);
        let options = LoadOptions {
            dtype: Some(DType::F32),
            threads: 1,
            ctx_size: 16,
            ..LoadOptions::default()
        };
        let started = start_engine(opened, backend.unwrap(), options, |_, _| {});
        started.map(|_| arch).map_err(|error| error.to_string())
    }
}

/// Folders with a checkpoint, shorter names first.
fn folders(family: &str) -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let entries = std::fs::read_dir(golden.join(family)).unwrap();
    let mut folders: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("model.safetensors").is_file())
        .collect();
    folders.sort_by_key(|folder| (folder.as_os_str().len(), folder.clone()));
    folders
}

fn check(family: &str) {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR")
        .expect("MLXCEL_TEST_PLUGINS_DIR is not set: run the tests with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        ..SearchInputs::default()
    };
    let plugins = Plugins {
        catalogue: Catalogue::build(&inputs, HostProfile::CURRENT).unwrap(),
        loader: Loader::default(),
    };
    // By architecture, the kinds of tensors with their types that were tried.
    let mut seen: BTreeMap<String, BTreeSet<(String, String)>> = BTreeMap::new();
    let (mut tried, mut wrong) = (0, Vec::new());
    for folder in folders(family) {
        let whole = Checkpoint::read(&folder.join("model.safetensors"));
        let arch = plugins.load(&folder).unwrap();
        let changed = tempfile::tempdir().unwrap();
        let config = "config.json";
        std::fs::copy(folder.join(config), changed.path().join(config)).unwrap();
        for (name, tensor) in &whole.header {
            let Some(dtype) = tensor["dtype"].as_str() else {
                continue;
            };
            let own = seen.entry(arch.clone()).or_default();
            if !own.insert((kind(name), dtype.to_owned())) {
                continue;
            }
            let other = OTHERS.iter().find(|(known, _)| *known == dtype);
            let (_, other) = other.unwrap_or_else(|| panic!("{name} is {dtype}"));
            let file = changed.path().join("model.safetensors");
            whole.write(&file, name, "dtype", json!(other));
            tried += 1;
            let module = name
                .rsplit_once('.')
                .map_or(name.as_str(), |(module, _)| module);
            match plugins.load(changed.path()) {
                Ok(_) => {
                    // Nobody reads it, if it may have any shape.
                    let shape = tensor["shape"].as_array().unwrap();
                    let shape: Vec<Value> = [json!(1)].iter().chain(shape).cloned().collect();
                    whole.write(&file, name, "shape", json!(shape));
                    if plugins.load(changed.path()).is_err() {
                        wrong.push(format!("{arch}, {name} as {other}: taken"));
                    }
                }
                Err(message) if message.contains("panic") || !message.contains(module) => {
                    wrong.push(format!("{arch}, {name} as {other}: {message}"));
                }
                Err(_) => {}
            }
        }
    }
    println!("{family}: {tried} kinds of tensors tried");
    assert!(tried > 60, "{tried}");
    assert!(
        wrong.is_empty(),
        "{} of {tried}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn llama() {
    check("llama");
}

#[test]
fn qwen() {
    check("qwen");
}

#[test]
fn gemma() {
    check("gemma");
}

#[test]
fn deepseek() {
    check("deepseek");
}
