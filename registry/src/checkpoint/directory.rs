//! Which safetensors files of a directory form the checkpoint, and which tensor is in which file.
//!
//! Owns the rules of shards and index. Must not know what tensors mean.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::error::CheckpointError;
use super::json::{self, INDEX_LIMITS, JsonError};
use super::map::MappedFile;
use super::safetensors::{SafetensorsEntry, parse_header};

const INDEX: &str = "model.safetensors.index.json";
const SUFFIX: &str = ".safetensors";

/// The tensors of all files of a checkpoint.
#[derive(Debug, Default)]
pub(super) struct Shards {
    /// The mapped files.
    pub(super) files: Vec<Arc<MappedFile>>,
    /// By tensor name: index into `files`, and the place there.
    pub(super) tensors: BTreeMap<String, (usize, SafetensorsEntry)>,
}

/// Maps the files that form the checkpoint in `dir` and reads their headers.
///
/// The index decides when there is one, and other files (say, a second copy of the weights under
/// another convention) are left alone. Without an index it is every `model*.safetensors`, else every
/// `*.safetensors`.
pub(super) fn open_shards(dir: &Path) -> Result<Shards, CheckpointError> {
    let index_path = dir.join(INDEX);
    let weight_map = match json::read_object(&index_path, &INDEX_LIMITS) {
        Ok(index) => Some(weight_map(&index_path, index.get("weight_map"))?),
        Err(JsonError::Io(error)) if error.kind() == io::ErrorKind::NotFound => None,
        Err(source) => {
            return Err(CheckpointError::Json {
                path: index_path,
                source,
            });
        }
    };
    let names = match &weight_map {
        Some(map) => map.values().cloned().collect(),
        None => names_without_index(dir)?,
    };
    let mut shards = Shards::default();
    for name in &names {
        let required_by = || match &weight_map {
            Some(map) => {
                let first = map
                    .iter()
                    .find(|(_, shard)| *shard == name)
                    .map(|(tensor, _)| tensor);
                format!("{INDEX} puts tensor `{}` there", first.map_or("", |t| t))
            }
            None => "the numbers in the other file names ask for it".to_owned(),
        };
        open_one(&mut shards, dir, name, required_by)?;
    }
    if let Some(map) = weight_map {
        refuse_wrong_index(dir, &shards, &map)?;
    }
    Ok(shards)
}

fn open_one(
    shards: &mut Shards,
    dir: &Path,
    name: &str,
    required_by: impl Fn() -> String,
) -> Result<(), CheckpointError> {
    let path = dir.join(name);
    let file = match MappedFile::open(&path) {
        Ok(file) => Arc::new(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(CheckpointError::MissingShard {
                shard: path,
                required_by: required_by(),
            });
        }
        Err(source) => return Err(CheckpointError::Io { path, source }),
    };
    let header = parse_header(file.bytes()).map_err(|source| CheckpointError::Safetensors {
        path: path.clone(),
        source: Box::new(source),
    })?;
    let number = shards.files.len();
    shards.files.push(file);
    for (tensor, entry) in header {
        if let Some((earlier, _)) = shards.tensors.get(&tensor) {
            let first = shards
                .files
                .get(*earlier)
                .map(|file| file.path().to_owned());
            let first = first.unwrap_or_default();
            return Err(CheckpointError::DuplicateTensor {
                tensor,
                first,
                second: path,
            });
        }
        shards.tensors.insert(tensor, (number, entry));
    }
    Ok(())
}

fn refuse_wrong_index(
    dir: &Path,
    shards: &Shards,
    map: &BTreeMap<String, String>,
) -> Result<(), CheckpointError> {
    for (tensor, shard) in map {
        let path = dir.join(shard);
        let there = shards
            .tensors
            .get(tensor)
            .and_then(|(number, _)| shards.files.get(*number))
            .is_some_and(|file| file.path() == path);
        if !there {
            return Err(CheckpointError::NotInShard {
                tensor: tensor.clone(),
                shard: path,
            });
        }
    }
    Ok(())
}

fn weight_map(
    path: &Path,
    found: Option<&Value>,
) -> Result<BTreeMap<String, String>, CheckpointError> {
    let wrong = |found: String| CheckpointError::Index {
        path: path.to_owned(),
        found,
    };
    let Some(Value::Object(map)) = found else {
        return Err(wrong(found.map_or("nothing", json::kind).to_owned()));
    };
    if map.is_empty() {
        return Err(wrong("an empty object".to_owned()));
    }
    let mut names = BTreeMap::new();
    for (tensor, shard) in map {
        let Value::String(shard) = shard else {
            return Err(wrong(format!("{} for `{tensor}`", json::kind(shard))));
        };
        // The index is untrusted: a path in it could point anywhere.
        let plain = shard.ends_with(SUFFIX)
            && !shard.starts_with('.')
            && !shard.contains(['/', '\\', ':', '\0']);
        if !plain {
            return Err(CheckpointError::ShardName {
                path: path.to_owned(),
                shard: shard.clone(),
            });
        }
        names.insert(tensor.clone(), shard.clone());
    }
    Ok(names)
}

fn names_without_index(dir: &Path) -> Result<BTreeSet<String>, CheckpointError> {
    let all = file_names(dir)?;
    let weights: BTreeSet<String> = all
        .iter()
        .filter(|name| name.ends_with(SUFFIX) && !name.starts_with('.'))
        .cloned()
        .collect();
    let of_model: BTreeSet<String> = weights
        .iter()
        .filter(|name| name.starts_with("model"))
        .cloned()
        .collect();
    let mut chosen = if of_model.is_empty() {
        weights
    } else {
        of_model
    };
    if chosen.is_empty() {
        return Err(CheckpointError::NoWeights {
            dir: dir.to_owned(),
            hint: no_weights_hint(&all),
        });
    }
    // `model-00002-of-00003.safetensors` tells that there must be three.
    let siblings: Vec<String> = chosen
        .iter()
        .filter_map(|name| shard_siblings(name))
        .flatten()
        .collect();
    chosen.extend(siblings);
    Ok(chosen)
}

/// The names of a directory that are Unicode.
pub(super) fn file_names(dir: &Path) -> Result<BTreeSet<String>, CheckpointError> {
    let io = |source| CheckpointError::Io {
        path: dir.to_owned(),
        source,
    };
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        if let Ok(name) = entry.map_err(io)?.file_name().into_string() {
            names.insert(name);
        }
    }
    Ok(names)
}

fn no_weights_hint(names: &BTreeSet<String>) -> String {
    let ending = |suffix: &str| names.iter().find(|name| name.ends_with(suffix));
    if let Some(name) = ending(".gguf") {
        format!("; it has {name}: give the path of that file instead")
    } else if let Some(name) = ending(".bin")
        .or_else(|| ending(".pth"))
        .or_else(|| ending(".pt"))
    {
        format!("; {name} may be a pickle, which is never read: convert it to safetensors")
    } else if let Some(name) = ending(".npz") {
        format!("; {name} is not read: convert it to safetensors")
    } else {
        String::new()
    }
}

/// All names of the set that `<stem>-<number>-of-<count>.safetensors` belongs to.
fn shard_siblings(name: &str) -> Option<Vec<String>> {
    let stem = name.strip_suffix(SUFFIX)?;
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let width = number.len();
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(number) || !digits(total) || width > 5 || total.len() > 5 {
        return None;
    }
    let count: usize = total.parse().ok()?;
    Some(
        (1..=count)
            .map(|n| format!("{prefix}-{n:0width$}-of-{total}{SUFFIX}"))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::testing::{SafetensorsBuilder, TempCheckpoint};
    use serde_json::json;

    fn one(name: &str) -> Vec<u8> {
        SafetensorsBuilder::new()
            .f32(name, &[2], &[1.0, 2.0])
            .build()
    }

    fn refusal(checkpoint: &TempCheckpoint) -> String {
        let dir = checkpoint.path().display().to_string();
        open_shards(checkpoint.path())
            .unwrap_err()
            .to_string()
            .replace(&dir, "DIR")
    }

    fn opened(checkpoint: &TempCheckpoint) -> Vec<String> {
        open_shards(checkpoint.path())
            .unwrap()
            .tensors
            .into_keys()
            .collect()
    }

    #[test]
    fn the_index_decides_and_other_files_are_left_alone() {
        let checkpoint = TempCheckpoint::new()
            .file("model-1.safetensors", &one("a"))
            .file("model-2.safetensors", &one("b"))
            .file("consolidated.safetensors", &one("a"))
            .file("broken.safetensors", b"no header")
            .json(
                INDEX,
                &json!({"weight_map": {
                    "a": "model-1.safetensors", "b": "model-2.safetensors"
                }}),
            );
        assert_eq!(opened(&checkpoint), ["a", "b"]);
    }

    #[test]
    fn without_an_index_model_files_come_first() {
        let checkpoint = TempCheckpoint::new().file("weights.safetensors", &one("w"));
        assert_eq!(opened(&checkpoint), ["w"]);
        let checkpoint = checkpoint
            .file("model-00001-of-00002.safetensors", &one("a"))
            .file("model-00002-of-00002.safetensors", &one("b"));
        assert_eq!(opened(&checkpoint), ["a", "b"]);
    }

    #[test]
    fn missing_shards_are_named() {
        let by_index = TempCheckpoint::new()
            .file("model-1.safetensors", &one("a"))
            .json(
                INDEX,
                &json!({"weight_map": {
                    "a": "model-1.safetensors", "b": "model-2.safetensors"
                }}),
            );
        assert_eq!(
            refusal(&by_index),
            "shard DIR/model-2.safetensors is missing: model.safetensors.index.json puts tensor `b` there (the download may be incomplete; fetch the model again)"
        );
        let by_number = TempCheckpoint::new().file("model-00002-of-00003.safetensors", &one("a"));
        assert_eq!(
            refusal(&by_number),
            "shard DIR/model-00001-of-00003.safetensors is missing: the numbers in the other file names ask for it (the download may be incomplete; fetch the model again)"
        );
    }

    #[test]
    fn wrong_indexes_are_refused() {
        let with = |index: Value| {
            let checkpoint = TempCheckpoint::new()
                .file("model-1.safetensors", &one("a"))
                .file("model-2.safetensors", &one("b"))
                .json(INDEX, &index);
            refusal(&checkpoint)
        };
        let refusals = [
            with(json!({"weight_map": {"a": "model-2.safetensors"}})),
            with(json!({"weight_map": {"c": "model-2.safetensors"}})),
            with(json!({"weight_map": {"a": "../model-1.safetensors"}})),
            with(json!({"weight_map": {"a": "/etc/model.safetensors"}})),
            with(json!({"weight_map": {"a": ".safetensors"}})),
            with(json!({"weight_map": {"a": "model.bin"}})),
            with(json!({"weight_map": {"a": 1}})),
            with(json!({"weight_map": {}})),
            with(json!({})),
        ];
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        the index says that tensor `a` is in DIR/model-2.safetensors, but it is not there
        the index says that tensor `c` is in DIR/model-2.safetensors, but it is not there
        DIR/model.safetensors.index.json: shard `../model-1.safetensors` is not a plain *.safetensors file name
        DIR/model.safetensors.index.json: shard `/etc/model.safetensors` is not a plain *.safetensors file name
        DIR/model.safetensors.index.json: shard `.safetensors` is not a plain *.safetensors file name
        DIR/model.safetensors.index.json: shard `model.bin` is not a plain *.safetensors file name
        DIR/model.safetensors.index.json: expected `weight_map` to be an object of tensor names to file names, found a number for `a`
        DIR/model.safetensors.index.json: expected `weight_map` to be an object of tensor names to file names, found an empty object
        DIR/model.safetensors.index.json: expected `weight_map` to be an object of tensor names to file names, found nothing
        "#);
    }

    #[test]
    fn one_tensor_in_two_files_is_refused() {
        let checkpoint = TempCheckpoint::new()
            .file("model-a.safetensors", &one("x"))
            .file("model-b.safetensors", &one("x"));
        assert_eq!(
            refusal(&checkpoint),
            "tensor `x` is in DIR/model-a.safetensors and in DIR/model-b.safetensors"
        );
    }

    #[test]
    fn directories_without_weights_say_what_is_there() {
        let with = |name: &str| refusal(&TempCheckpoint::new().file(name, b""));
        assert_eq!(
            with("a.gguf"),
            "DIR has no *.safetensors file; it has a.gguf: give the path of that file instead"
        );
        assert_eq!(
            with("pytorch_model.bin"),
            "DIR has no *.safetensors file; pytorch_model.bin may be a pickle, which is never read: convert it to safetensors"
        );
        assert_eq!(with("README.md"), "DIR has no *.safetensors file");
    }
}
