//! One model in three forms gives one answer: the GGUF file, its lossless repack as an MLX-quantised
//! directory, and a directory of f16 weights.
//!
//! The two directories are written here from the file, so that nothing large is checked in. Needs the
//! model and the plugins that `cargo xtask test` prepares.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mlxcel::engine::{EngineHandle, OpenedModel, open_model};
use mlxcel::plugin::{DType, Loader};
use mlxcel_registry::checkpoint::{self, Checkpoint};
use mlxcel_registry::plugin::{Catalogue, HostProfile, SearchInputs};
use serde_json::{Map, Value, json};

fn required(name: &str) -> PathBuf {
    let value = std::env::var_os(name);
    PathBuf::from(
        value.unwrap_or_else(|| panic!("{name} is not set: run the tests with `cargo xtask test`")),
    )
}

fn open(path: &Path) -> OpenedModel {
    let inputs = SearchInputs {
        dirs: vec![required("MLXCEL_TEST_PLUGINS_DIR")],
        ..SearchInputs::default()
    };
    let catalogue = Catalogue::build(&inputs, HostProfile::CURRENT).unwrap();
    let loader = Loader::default();
    open_model(path, &catalogue, &loader, None).unwrap()
}

fn engine(path: &Path) -> EngineHandle {
    mlxcel_tests::golden::engine(path, 0, DType::F32)
}

/// A tensor to be written.
struct Stored {
    dtype: checkpoint::DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl safetensors::View for &Stored {
    fn dtype(&self) -> safetensors::Dtype {
        match self.dtype.name() {
            "F16" => safetensors::Dtype::F16,
            "F32" => safetensors::Dtype::F32,
            "U32" => safetensors::Dtype::U32,
            other => panic!("{other} is not in this model"),
        }
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        self.bytes.as_slice().into()
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn write(dir: &Path, config: &Value, tensors: &BTreeMap<String, Stored>) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    safetensors::serialize_to_file(tensors, None, &dir.join("model.safetensors")).unwrap();
}

fn load(checkpoint: &Checkpoint, name: &str) -> Stored {
    let data = checkpoint.load(name).unwrap();
    Stored {
        dtype: data.dtype,
        shape: data.shape,
        bytes: data.bytes.to_vec(),
    }
}

/// The MLX-quantised directory: the tensors as they are, and a word on each module.
fn write_repack(checkpoint: &Checkpoint, dir: &Path) {
    let mut config = checkpoint.config().clone();
    let mut quantization = Map::new();
    let mut tensors = BTreeMap::new();
    for name in checkpoint.names() {
        tensors.insert(name.to_owned(), load(checkpoint, name));
        if let Some(path) = name.strip_suffix(".scales") {
            let spec = checkpoint.quant_for(path).unwrap();
            quantization.insert(
                path.to_owned(),
                json!({"bits": spec.bits, "group_size": spec.group_size}),
            );
        }
    }
    quantization.insert("bits".to_owned(), json!(4));
    quantization.insert("group_size".to_owned(), json!(32));
    config["quantization"] = Value::Object(quantization);
    write(dir, &config, &tensors);
}

fn f16s(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(2)
        .map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())
        .collect()
}

fn f16_bytes(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values
        .flat_map(|x| half::f16::from_f32(x).to_le_bytes())
        .collect()
}

/// The f16 directory: every weight expanded and rounded once.
fn write_f16(checkpoint: &Checkpoint, dir: &Path) {
    let mut tensors = BTreeMap::new();
    for name in checkpoint
        .names()
        .filter(|name| !name.ends_with(".scales") && !name.ends_with(".biases"))
    {
        let stored = load(checkpoint, name);
        let path = name.strip_suffix(".weight").unwrap_or(name);
        let expanded = match checkpoint.quant_for(path) {
            None => {
                let values = stored
                    .bytes
                    .chunks_exact(4)
                    .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                Stored {
                    dtype: checkpoint::DType::F16,
                    bytes: f16_bytes(values),
                    ..stored
                }
            }
            Some(spec) => {
                let factor = |part: &str| f16s(&load(checkpoint, &format!("{path}.{part}")).bytes);
                let (scales, biases) = (factor("scales"), factor("biases"));
                let per_byte = 8 / spec.bits as usize;
                let mask = ((1u16 << spec.bits) - 1) as u8;
                let codes = stored.bytes.iter().flat_map(|byte| {
                    (0..per_byte).map(move |i| (byte >> (i as u32 * spec.bits)) & mask)
                });
                let values = codes.enumerate().map(|(i, code)| {
                    let group = i / spec.group_size as usize;
                    f32::from(code) * scales[group] + biases[group]
                });
                let columns = stored.shape[1] * 32 / spec.bits as usize;
                Stored {
                    dtype: checkpoint::DType::F16,
                    shape: vec![stored.shape[0], columns],
                    bytes: f16_bytes(values),
                }
            }
        };
        tensors.insert(name.to_owned(), expanded);
    }
    write(dir, checkpoint.config(), &tensors);
}

fn golden_prompts() -> Vec<Vec<u32>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/smollm2.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let prompts = golden["prompts"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|p| p["name"] != "english");
    prompts
        .map(|p| {
            p["ids"]
                .as_array()
                .unwrap()
                .iter()
                .map(|id| id.as_u64().unwrap() as u32)
                .collect()
        })
        .collect()
}

#[test]
fn gguf_repack_and_f16_directory_agree() {
    let file = required("MLXCEL_TEST_MODEL_GGUF");
    let opened = open(&file);
    let (repack, f16) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_repack(&opened.checkpoint, repack.path());
    write_f16(&opened.checkpoint, f16.path());
    let logits = |path: &Path| -> Vec<Vec<f32>> {
        let engine = engine(path);
        golden_prompts()
            .into_iter()
            .map(|prompt| engine.score(prompt).unwrap())
            .collect()
    };
    let (want, packed, rounded) = (logits(&file), logits(repack.path()), logits(f16.path()));
    for (prompt, want) in want.iter().enumerate() {
        // The same bits take the same way.
        assert_eq!(&packed[prompt], want);
        let off = rounded[prompt]
            .iter()
            .zip(want)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        // Over all 49,152 logits; the recorded references differ by 0.012 in their top ten.
        assert!(off < 4e-2, "f16 weights are off by {off}");
    }
}
