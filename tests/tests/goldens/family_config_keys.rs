//! Every key that a family reads from a configuration, with values that it must not take.
//!
//! Nobody lists the keys: a word of the family's sources (or of the SDK's layers) is a key that is read
//! where a value of a type that nothing has is refused by that name. What the refusal then says is
//! allowed decides which values are tried: beside a range, of another type, and as text. A key is read in
//! the object where a configuration has it, so that every object of the golden configurations is tried, in
//! the spellings of transformers 5 (`config.json`) and 4 (`config.legacy.json`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use mlxcel::engine::{LoadOptions, open_model, start_engine};
use mlxcel::plugin::{BackendChoice, DType, Loader};
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use serde_json::{Value, json};

/// Text settings that are taken whatever they say: nothing is computed by them.
const FREE_TEXT: &[&str] = &["model_type"];
/// Switches for which published files have a small integer.
const NUMBERS_AS_SWITCHES: &[&str] = &["attn_temperature_tuning"];
/// Objects that describe other parts than the decoder, or the form of weights.
const OTHER_PARTS: &[&str] = &[
    "vision_config",
    "audio_config",
    "quantization",
    "quantization_config",
];

struct Plugins {
    catalogue: Catalogue,
    loader: Loader,
}

impl Plugins {
    fn find() -> Self {
        let dir = std::env::var_os("MLXCEL_TEST_PLUGINS_DIR")
            .expect("MLXCEL_TEST_PLUGINS_DIR is not set: run the tests with `cargo xtask test`");
        let inputs = SearchInputs {
            dirs: vec![dir.into()],
            ..SearchInputs::default()
        };
        Self {
            catalogue: Catalogue::build(&inputs, HostProfile::CURRENT).unwrap(),
            loader: Loader::default(),
        }
    }
}

/// A golden whose configuration is changed.
struct Subject {
    arch: String,
    config: Value,
    /// Holds a link to the weights and the configuration at hand.
    dir: tempfile::TempDir,
}

impl Subject {
    fn of(weights: &Path, config: Value, arch: String) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(weights, dir.path().join("model.safetensors")).unwrap();
        Self { arch, config, dir }
    }

    /// What the family says of a changed configuration, before weights are read.
    fn refusal(&self, plugins: &Plugins, config: &Value) -> Option<String> {
        std::fs::write(self.dir.path().join("config.json"), config.to_string()).unwrap();
        let opened = open_model(self.dir.path(), &plugins.catalogue, &plugins.loader, None);
        opened.err().map(|error| error.to_string())
    }

    /// What loading says of a changed configuration.
    fn load(&self, plugins: &Plugins, config: &Value) -> Result<(), String> {
        std::fs::write(self.dir.path().join("config.json"), config.to_string()).unwrap();
        let opened = open_model(self.dir.path(), &plugins.catalogue, &plugins.loader, None);
        let opened = opened.map_err(|error| error.to_string())?;
        let choice = BackendChoice::Named("cpu".to_owned());
        let backend = plugins.loader.select_backend(&plugins.catalogue, &choice);
        let options = LoadOptions {
            dtype: Some(DType::F32),
            threads: 1,
            ctx_size: 64,
            ..LoadOptions::default()
        };
        let started = start_engine(opened, backend.unwrap(), options, |_, _| {});
        started.map(|_| ()).map_err(|error| error.to_string())
    }

    fn with(&self, place: &str, key: &str, value: Option<Value>) -> Value {
        let mut config = self.config.clone();
        let object = config.pointer_mut(place).unwrap().as_object_mut().unwrap();
        match value {
            Some(value) => object.insert(key.to_owned(), value),
            None => object.remove(key),
        };
        config
    }
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Goldens of every architecture of a family, one for each kind of rotary embedding: the shortest name with
/// `config.json`, and with the older spelling.
fn subjects(plugins: &Plugins, family: &str) -> Vec<Subject> {
    let folder = root().join("tests/golden").join(family);
    let mut folders: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("model.safetensors").is_file())
        .collect();
    folders.sort_by_key(|folder| (folder.as_os_str().len(), folder.clone()));
    let mut found = BTreeMap::new();
    for folder in folders {
        for name in ["config.json", "config.legacy.json"] {
            let path = folder.join(name);
            if !path.is_file() {
                continue;
            }
            let weights = folder.join("model.safetensors");
            let mut subject = Subject::of(&weights, json_of(&path), String::new());
            let config = subject.config.clone();
            assert_eq!(
                subject.refusal(plugins, &config),
                None,
                "{}",
                path.display()
            );
            let opened = open_model(
                subject.dir.path(),
                &plugins.catalogue,
                &plugins.loader,
                None,
            );
            let arch = opened.unwrap().decision.arch;
            subject.arch = format!("{arch} ({name})");
            found.entry((arch, name)).or_insert(subject);
        }
    }
    found.into_values().collect()
}

/// Words between quotes that could be keys.
fn words(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            words(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let is_key = |word: &&str| {
                (3..40).contains(&word.len())
                    && word.starts_with(|c: char| c.is_ascii_lowercase())
                    && word
                        .chars()
                        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            };
            found.extend(text.split('"').filter(is_key).map(str::to_owned));
        }
    }
}

/// Objects of a configuration, as JSON pointers.
fn objects(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            found.push(at.to_owned());
            for (key, value) in map {
                if !OTHER_PARTS.contains(&key.as_str()) {
                    objects(value, &format!("{at}/{key}"), found);
                }
            }
        }
        Value::Array(list) => {
            for (n, value) in list.iter().enumerate().take(2) {
                objects(value, &format!("{at}/{n}"), found);
            }
        }
        _ => {}
    }
}

/// Numbers in words like "an integer from 1 to 65536".
fn range_of(message: &str, what: &str) -> Option<(f64, f64)> {
    let (_, rest) = message.split_once(what)?;
    let (low, rest) = rest.split_once(" to ")?;
    let end = rest
        .find(|c: char| !(c.is_ascii_digit() || "+-.e".contains(c)))
        .unwrap_or(rest.len());
    let high = rest.get(..end)?.trim_end_matches('.');
    Some((low.trim().parse().ok()?, high.parse().ok()?))
}

/// The path of keys that a refusal names.
fn named_path(message: &str) -> &str {
    match message.split_once("config key \"") {
        Some((_, rest)) => rest.split('"').next().unwrap_or_default(),
        None => {
            let start = message.split(" = ").next().unwrap_or_default();
            start.rsplit([' ', ':']).next().unwrap_or_default()
        }
    }
}

/// Which of `keys` are read in an object, each with what its refusal says: all are set at once to a value of
/// a type that nothing has, and the one that is refused is put right until nothing is refused.
fn read_keys(
    plugins: &Plugins,
    subject: &Subject,
    place: &str,
    keys: BTreeSet<&str>,
) -> BTreeMap<String, String> {
    let mut read = BTreeMap::new();
    // An object is refused by whatever reads anything else, a list of lists by what reads an object.
    for probe in [json!({"wavy": [[7]]}), json!([[[7]]])] {
        let mut left: BTreeSet<&str> = keys.clone();
        left.retain(|key| !read.contains_key(*key) && !OTHER_PARTS.contains(key));
        loop {
            let mut config = subject.config.clone();
            let object = config.pointer_mut(place).unwrap().as_object_mut().unwrap();
            object.extend(left.iter().map(|key| ((*key).to_owned(), probe.clone())));
            let Some(message) = subject.refusal(plugins, &config) else {
                break;
            };
            let mut parts = named_path(&message).rsplit(['.', '[']);
            let is_named = |key: &&&str| message.contains(&format!("{key} is"));
            let named = parts.find(|key| left.contains(key));
            let Some(key) = named.or_else(|| left.iter().find(is_named).copied()) else {
                panic!("{}, {place}: {message}", subject.arch);
            };
            let key = key.to_owned();
            left.remove(key.as_str());
            // What stands in for a key that is there is not read as long as that is.
            let alone = subject.with(place, &key, Some(probe.clone()));
            if let Some(message) = subject.refusal(plugins, &alone) {
                read.insert(key, message);
            }
        }
    }
    read
}

/// Values that a key must not take, from what a refusal says is allowed.
fn bad_values(message: &str) -> Vec<Value> {
    if let Some((low, high)) = range_of(message, "an integer from") {
        let (low, high) = (low as i64, high as i64);
        return vec![
            json!(low - 1),
            json!(-7),
            json!(high + 1),
            json!(1e300),
            json!(low as f64 + 0.5),
            json!(low.to_string()),
            json!(true),
            json!([low]),
        ];
    }
    if let Some((low, high)) = range_of(message, "a number from") {
        return vec![
            json!(low - low.abs().max(1.0)),
            json!(high * 2.0 + 1.0),
            json!(1e300),
            json!(low.to_string()),
            json!(true),
            json!([low]),
        ];
    }
    let mut bad = vec![json!(-1e300)];
    if message.contains("true or false") {
        bad.extend([json!("true"), json!(1), json!([true])]);
    } else if message.contains("a string") {
        bad.extend([json!(7), json!(["wavy"])]);
    } else if message.contains("a list of") {
        bad.extend([json!("wavy"), json!(7), json!({"a": 1})]);
    } else if message.contains("an object") {
        bad.extend([json!("wavy"), json!(7), json!(["wavy"])]);
    }
    bad
}

const ALLOWED: &[&str] = &[
    "expected",
    "known",
    "are",
    "is",
    "has",
    "supported",
    "a multiple of",
];

/// What is missing in a refusal: the key, the value, or what is allowed.
fn lacking(key: &str, value: &Value, message: &str) -> Option<&'static str> {
    let shown = value.to_string();
    if message.contains("panic") {
        return Some("a panic");
    }
    if !message.contains(key) {
        return Some("no key");
    }
    // A long list or number is cut, and the kind of an activation is one word.
    let start: String = shown.chars().take(12).collect();
    let number = value.as_f64().map(|n| format!("{n:?}"));
    if !message.contains(&start) && !number.is_some_and(|number| message.contains(&number)) {
        return Some("no value");
    }
    let says = ALLOWED.iter().any(|words| message.contains(words));
    (!says).then_some("nothing of what is allowed")
}

fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// What was tried and what was wrong.
#[derive(Default)]
struct Tally {
    read: usize,
    tried: usize,
    wrong: Vec<String>,
}

impl Tally {
    /// Values that the refusal of a key does not allow.
    fn refused(&mut self, plugins: &Plugins, subject: &Subject, at: (&str, &str), refusal: &str) {
        let (place, key) = at;
        let mut bad = bad_values(refusal);
        if refusal.contains("a string") && !FREE_TEXT.contains(&key) {
            bad.push(json!("wavy"));
        }
        if NUMBERS_AS_SWITCHES.contains(&key) {
            bad.retain(|value| *value != json!(1));
        }
        for value in bad {
            self.tried += 1;
            let config = subject.with(place, key, Some(value.clone()));
            let message = subject.refusal(plugins, &config);
            let lacks = match &message {
                None => Some("accepted"),
                Some(message) => lacking(key, &value, message),
            };
            if let Some(what) = lacks {
                let arch = &subject.arch;
                let message = message.as_deref().unwrap_or(refusal);
                self.wrong.push(format!(
                    "{arch}, {place}/{key} = {value}: {what}: {message}"
                ));
            }
        }
    }

    /// Absent and null: taken, or an error that names a key. Which key may be another, which the absence
    /// makes wrong.
    fn absent(&mut self, plugins: &Plugins, subject: &Subject, (place, key): (&str, &str)) {
        for value in [Some(Value::Null), None] {
            self.tried += 1;
            let config = subject.with(place, key, value.clone());
            let Some(message) = subject.refusal(plugins, &config) else {
                continue;
            };
            let named = message.contains("config key \"") || message.contains(" = ");
            if !named || message.contains("panic") {
                let arch = &subject.arch;
                self.wrong
                    .push(format!("{arch}, {place}/{key} = {value:?}: {message}"));
            }
        }
    }

    /// Values inside the range may contradict others or the weights; that is an error, too.
    fn inside(&mut self, plugins: &Plugins, subject: &Subject, at: (&str, &str), refusal: &str) {
        let (place, key) = at;
        let Some((low, high)) = range_of(refusal, "an integer from") else {
            return;
        };
        let now = subject.config.pointer(place).unwrap()[key].as_i64();
        let values = [Some(low as i64), Some(high as i64), now.map(|n| n + 1)];
        for value in values.into_iter().flatten() {
            self.tried += 1;
            let config = subject.with(place, key, Some(json!(value)));
            if let Err(message) = subject.load(plugins, &config)
                && message.contains("panic")
            {
                let arch = &subject.arch;
                self.wrong
                    .push(format!("{arch}, {place}/{key} = {value}: {message}"));
            }
        }
    }
}

fn check(family: &str) {
    let plugins = Plugins::find();
    let (mut own, mut nested) = (BTreeSet::new(), BTreeSet::new());
    words(&root().join("families").join(family).join("src"), &mut own);
    words(&root().join("abi/sdk/src/nn"), &mut nested);
    own.extend(nested.iter().cloned());
    let mut tally = Tally::default();
    for subject in subjects(&plugins, family) {
        let mut places = Vec::new();
        objects(&subject.config, "", &mut places);
        for place in &places {
            let object = subject.config.pointer(place).unwrap().as_object().unwrap();
            let mut keys: BTreeSet<&str> = object.keys().map(String::as_str).collect();
            let is_decoder = place.is_empty() || place == "/text_config";
            let more = if is_decoder { &own } else { &nested };
            keys.extend(more.iter().map(String::as_str));
            if place.is_empty() {
                // Says which architecture reads the others.
                keys.remove("model_type");
            }
            for (key, refusal) in read_keys(&plugins, &subject, place, keys) {
                let at = (place.as_str(), key.as_str());
                tally.read += 1;
                tally.refused(&plugins, &subject, at, &refusal);
                tally.absent(&plugins, &subject, at);
                tally.inside(&plugins, &subject, at, &refusal);
            }
        }
    }
    let Tally { read, tried, wrong } = tally;
    println!("{family}: {read} keys read, {tried} values tried");
    assert!(read > 60 && tried > 300, "{read} keys, {tried} values");
    assert!(
        wrong.is_empty(),
        "{} of {tried}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    let peak = peak_bytes();
    assert!(peak < 2 << 30, "{peak} bytes at most");
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
