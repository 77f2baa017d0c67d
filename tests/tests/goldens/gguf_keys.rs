//! GGUF files with one number of their metadata changed, of every architecture that has a golden: what is
//! refused is named as the file names it, and nothing else happens.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mlxcel::engine::{LoadOptions, open_model, start_engine};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};

/// Keys whose value is free within a range: any number up to the second is one that a model could have.
const FREE: &[(&str, f64)] = &[
    ("context_length", 1e6),
    // llama.cpp counts the tokenizer's tokens.
    ("vocab_size", 1e6),
    ("attention.sliding_window", 1e6),
    // Of experts that there are.
    ("expert_used_count", 8.0),
    ("expert_group_used_count", 4.0),
    ("altup.active_idx", 3.0),
    ("rope.scaling.original_context_length", 1e6),
    // How much of a head is rotated, where that may be a part.
    ("qwen3next.rope.dimension_count", 16.0),
    ("qwen35.rope.dimension_count", 16.0),
    ("qwen35moe.rope.dimension_count", 16.0),
];
/// Keys that nothing reads, as no tensor has them for a length: all layers have experts.
const UNREAD: &[&str] = &[
    "qwen2moe.feed_forward_length",
    "qwen3moe.feed_forward_length",
    "qwen3next.feed_forward_length",
];
/// Numbers that mean "none".
const NONE: &[&str] = &[
    "gemma3.attention.sliding_window",
    "deepseek2.expert_group_count",
];

fn is_free(arch: &str, key: &str, value: f64) -> bool {
    let bare = key
        .strip_prefix(arch)
        .unwrap_or(key)
        .trim_start_matches('.');
    let is_none = value == 0.0 && NONE.contains(&key);
    let most = FREE.iter().find(|(free, _)| *free == key || *free == bare);
    let is_free = most.is_some_and(|(_, most)| value <= *most && value >= 0.0);
    is_none || is_free || UNREAD.contains(&key)
}

/// A number in the metadata.
struct Number {
    key: String,
    /// Where its four bytes are.
    at: usize,
    float: bool,
}

/// Numbers of the architecture, found by their keys: the length of the key, the key, the type, the value.
fn numbers(file: &[u8], arch: &str) -> Vec<Number> {
    const TYPES: [(u32, bool); 2] = [(4, false), (6, true)];
    let start = format!("{arch}.");
    let mut found = Vec::new();
    let places = file.windows(start.len()).enumerate();
    for (at, _) in places.filter(|(_, window)| *window == start.as_bytes()) {
        let Some(from) = at.checked_sub(8) else {
            continue;
        };
        let length = u64::from_le_bytes(file[from..at].try_into().unwrap()) as usize;
        let Some(key) = file
            .get(at..at.saturating_add(length))
            .filter(|_| length < 128)
        else {
            continue;
        };
        let value = at + length + 4;
        let kind = u32::from_le_bytes(file[value - 4..value].try_into().unwrap());
        if let Some((_, float)) = TYPES.iter().find(|(own, _)| *own == kind) {
            found.push(Number {
                key: String::from_utf8(key.to_vec()).unwrap(),
                at: value,
                float: *float,
            });
        }
    }
    found
}

/// A golden of every architecture that files name: the shortest folder.
fn files() -> BTreeMap<String, PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let mut found: BTreeMap<String, PathBuf> = BTreeMap::new();
    for family in ["llama", "qwen", "gemma", "deepseek"] {
        for folder in std::fs::read_dir(golden.join(family)).unwrap() {
            let path = folder.unwrap().path().join("model.gguf");
            let Ok(file) = std::fs::read(&path) else {
                continue;
            };
            // Right behind the counts: the length of the key, the key, the type of a string, its length.
            let key = b"general.architecture";
            let at = file.windows(key.len()).position(|window| window == key);
            let at = at.unwrap() + key.len() + 4;
            let length = u64::from_le_bytes(file[at..at + 8].try_into().unwrap()) as usize;
            let arch = String::from_utf8(file[at + 8..at + 8 + length].to_vec()).unwrap();
            let shorter = |old: &PathBuf| old.as_os_str().len() > path.as_os_str().len();
            if found.get(&arch).is_none_or(shorter) {
                found.insert(arch, path);
            }
        }
    }
    found
}

fn load(catalogue: &Catalogue, loader: &Loader, path: &Path) -> Result<(), String> {
    let opened = open_model(path, catalogue, loader, None).map_err(|error| error.to_string())?;
    let choice = BackendChoice::Named("cpu".to_owned());
    let backend = loader.select_backend(catalogue, &choice).unwrap();
    let options = LoadOptions {
        dtype: Some(DType::F32),
        threads: 1,
        ctx_size: 64,
        ..LoadOptions::default()
    };
    let started = start_engine(opened, backend, options, |_, _| {});
    started.map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn numbers_that_are_refused_have_the_names_of_the_file() {
    let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR")
        .expect("MLXCEL_TEST_PLUGINS_DIR is not set: run the tests with `cargo xtask test`");
    let inputs = SearchInputs {
        dirs: vec![dir.into()],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    let loader = Loader::default();
    let files = files();
    assert!(files.len() > 15, "{files:?}");
    let folder = tempfile::tempdir().unwrap();
    let changed = folder.path().join("model.gguf");
    let (mut tried, mut refused, mut wrong) = (0, 0, Vec::new());
    for (arch, path) in files {
        let file = std::fs::read(&path).unwrap();
        let numbers = numbers(&file, &arch);
        assert!(numbers.len() > 6, "{arch}: {} numbers", numbers.len());
        for Number { key, at, float } in &numbers {
            let now: [u8; 4] = file[*at..at + 4].try_into().unwrap();
            let values: &[[u8; 4]] = if *float {
                &[f32::NAN, f32::INFINITY, -1.0, 1e30].map(f32::to_le_bytes)
            } else {
                let now = u32::from_le_bytes(now);
                &[0, u32::MAX, now + 1, now * 3].map(u32::to_le_bytes)
            };
            for value in values {
                tried += 1;
                let mut other = file.clone();
                other[*at..at + 4].copy_from_slice(value);
                std::fs::write(&changed, other).unwrap();
                let shown = if *float {
                    f32::from_le_bytes(*value).to_string()
                } else {
                    u32::from_le_bytes(*value).to_string()
                };
                let Err(message) = load(&catalogue, &loader, &changed) else {
                    println!("{key} = {shown} is taken");
                    if !is_free(&arch, key, shown.parse().unwrap()) {
                        wrong.push(format!("{key} = {shown} is taken"));
                    }
                    continue;
                };
                refused += 1;
                // Words that only our own names have, beside which the file's may stand.
                let ours = [
                    "model.layers.",
                    "model.embed",
                    "num_attention",
                    "num_key",
                    "num_hidden",
                    "num_exp",
                    "num_local",
                    "layer_types",
                    "hidden_size",
                    "rope_scaling.",
                ];
                let is_ours = ours.iter().any(|name| message.contains(name));
                let theirs = [
                    &*format!("{arch}."),
                    "blk.",
                    "_embd",
                    "output",
                    "altup_",
                    "rope_freqs",
                ];
                let is_theirs = theirs.iter().any(|name| message.contains(name));
                let is_both = message.contains("which should become");
                if is_ours && !is_both || !is_theirs || message.contains("panic") {
                    wrong.push(format!("{key} = {shown}: {message}"));
                }
            }
        }
    }
    println!("{refused} of {tried} refused");
    assert!(tried > 500 && refused > 200, "{refused} of {tried}");
    assert!(
        wrong.is_empty(),
        "{} of {tried}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
