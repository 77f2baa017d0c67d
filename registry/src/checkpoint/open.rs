//! One type for every checkpoint, whatever the files: config, names, headers, and bytes on demand.
//!
//! Opening reads headers only. Owns the union of the formats. Must not know any architecture.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::buffer::{TensorBytes, TensorData};
use super::directory::{Shards, file_names, open_shards};
use super::dtype::{DType, TensorInfo};
use super::error::CheckpointError;
use super::fp4;
use super::fp8::{self, Fp8};
use super::gguf::{Adapter, CentredForm, Converted, GgufFile};
use super::json::{self, CONFIG_LIMITS, JsonError};
use super::map::MappedFile;
use super::quant::{QuantError, QuantSpec, QuantTable};
use super::quant_check;
use super::safetensors::SafetensorsEntry;

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";

#[derive(Debug)]
enum Source {
    Safetensors {
        files: Vec<Arc<MappedFile>>,
        tensors: BTreeMap<String, (usize, SafetensorsEntry)>,
        quant: QuantTable,
        fp8: Fp8,
    },
    Gguf(Box<Converted>),
}

/// An opened checkpoint. Cheap to share: `Send` and `Sync`, and loading takes `&self`.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: Value,
    generation_config: Option<Value>,
    source: Source,
}

impl Checkpoint {
    /// Opens a directory with `config.json` and safetensors files.
    pub fn open_dir(dir: &Path) -> Result<Self, CheckpointError> {
        let config_path = dir.join(CONFIG);
        let config = match json::read_object(&config_path, &CONFIG_LIMITS) {
            Ok(config) => config,
            Err(JsonError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                return Err(no_config(dir));
            }
            Err(source) => {
                return Err(CheckpointError::Json {
                    path: config_path,
                    source,
                });
            }
        };
        let generation_path = dir.join(GENERATION_CONFIG);
        let generation_config = match json::read_object(&generation_path, &CONFIG_LIMITS) {
            Ok(config) => Some(Value::Object(config)),
            Err(JsonError::Io(error)) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => {
                return Err(CheckpointError::Json {
                    path: generation_path,
                    source,
                });
            }
        };
        let Shards { files, mut tensors } = open_shards(dir)?;
        let (quant, fp8) = QuantTable::from_config(&config)
            .and_then(|mut quant| {
                let foreign = quant.foreign.as_ref();
                if let Some(foreign) = foreign.filter(|foreign| foreign.method == fp8::METHOD) {
                    let packed = fp4::rename(foreign, &config, &mut tensors)?;
                    let packed = packed.into_iter().map(|module| (module, Some(fp4::SPEC)));
                    quant.overrides.extend(packed);
                }
                let names = tensors.keys().map(String::as_str);
                let info = |name: &str| tensors.get(name).map(|(_, entry)| &entry.info);
                quant_check::check(&quant, names, info)?;
                let names = tensors.keys().map(String::as_str);
                let fp8 = match &quant.foreign {
                    None => Fp8::none(names, info)?,
                    Some(foreign) if foreign.method == fp8::METHOD => {
                        Fp8::read(foreign, names, info)?
                    }
                    Some(foreign) => {
                        return Err(QuantError::Method {
                            place: foreign.place.clone(),
                            method: foreign.method.clone(),
                        });
                    }
                };
                Ok((quant, fp8))
            })
            .map_err(|source| CheckpointError::Quant {
                dir: dir.to_owned(),
                source: Box::new(source),
            })?;
        // What is handed out is plain: as large as halves, unless singles are asked for.
        for name in fp8.weights.keys() {
            if let Some((_, entry)) = tensors.get_mut(name) {
                entry.info.dtype = DType::BF16;
                entry.info.byte_len *= DType::BF16.size_bytes();
            }
        }
        Ok(Checkpoint {
            path: dir.to_owned(),
            config: Value::Object(config),
            generation_config,
            source: Source::Safetensors {
                files,
                tensors,
                quant,
                fp8,
            },
        })
    }

    /// Opens a GGUF file, or all parts of a split one, up to where a family must say what it means.
    pub fn open_gguf(path: &Path) -> Result<GgufFile, CheckpointError> {
        GgufFile::open(path)
    }

    /// The same checkpoint with the tensors that have one of these centred forms packed in it; none where there are no
    /// such tensors. A centred weight has scales and no biases: `scale * (code - 2^(bits - 1))`.
    pub fn with_centred(&self, forms: &[CentredForm]) -> Result<Option<Self>, CheckpointError> {
        let Source::Gguf(converted) = &self.source else {
            return Ok(None);
        };
        let with = converted.with_centred(forms);
        let with = with.map_err(|source| CheckpointError::Adapter {
            path: self.path.clone(),
            source: Box::new(source),
        })?;
        Ok(with.map(|converted| Checkpoint {
            path: self.path.clone(),
            config: self.config.clone(),
            generation_config: self.generation_config.clone(),
            source: Source::Gguf(Box::new(converted)),
        }))
    }

    /// The directory, or the GGUF file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`, or what the adapter gave; always an object.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `generation_config.json`, if there is one.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// The GGUF file behind the checkpoint, for tokenizer and chat metadata.
    pub fn gguf(&self) -> Option<&GgufFile> {
        match &self.source {
            Source::Gguf(converted) => Some(&converted.file),
            Source::Safetensors { .. } => None,
        }
    }

    /// All tensor names, sorted. Scales of 8-bit floats are not among them.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let (safetensors, gguf) = match &self.source {
            Source::Safetensors { tensors, fp8, .. } => {
                let shown = tensors.keys().filter(|name| !fp8.hidden.contains(*name));
                (Some(shown), None)
            }
            Source::Gguf(converted) => (None, Some(converted.tensors.keys())),
        };
        let safetensors = safetensors.into_iter().flatten();
        safetensors
            .chain(gguf.into_iter().flatten())
            .map(String::as_str)
    }

    /// What the headers say of a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        match &self.source {
            Source::Safetensors { tensors, .. } => tensors.get(name).map(|(_, entry)| &entry.info),
            Source::Gguf(converted) => converted.tensors.get(name).map(|(info, ..)| info),
        }
    }

    /// How the weight of a module (`model.layers.0.mlp.up_proj`, without `.weight`) is quantised.
    pub fn quant_for(&self, path: &str) -> Option<QuantSpec> {
        match &self.source {
            Source::Safetensors { tensors, quant, .. } => {
                // The check at opening made sure that the description and the tensors agree.
                if !tensors.contains_key(&format!("{path}.scales")) {
                    return None;
                }
                quant.overrides.get(path).copied().unwrap_or(quant.global)
            }
            Source::Gguf(converted) => converted.quant.get(path).copied(),
        }
    }

    /// `quant_method` of a `quantization_config` that is not MLX's. Only `fp8` gets this far; its 8-bit
    /// weights are handed out as plain floats, 4-bit ones as `mxfp4`.
    pub fn foreign_quant_method(&self) -> Option<&str> {
        match &self.source {
            Source::Safetensors { quant, .. } => {
                let foreign = quant.foreign.as_ref();
                foreign.map(|foreign| foreign.method.as_str())
            }
            Source::Gguf(_) => None,
        }
    }

    /// Bytes of all tensors once loaded, from headers alone.
    pub fn weights_bytes(&self) -> u64 {
        let sum = |total: u64, info: &TensorInfo| total.saturating_add(info.byte_len as u64);
        match &self.source {
            Source::Safetensors { tensors, .. } => {
                tensors.values().map(|(_, entry)| &entry.info).fold(0, sum)
            }
            Source::Gguf(converted) => converted
                .tensors
                .values()
                .map(|(info, ..)| info)
                .fold(0, sum),
        }
    }

    /// The bytes of a tensor: pages of the file where they are the tensor as it stands, else a buffer
    /// made now. Nothing is cached; loading twice converts twice. 8-bit floats become `BF16`.
    pub fn load(&self, name: &str) -> Result<TensorData, CheckpointError> {
        self.load_float(name, DType::BF16)
    }

    /// As [`Checkpoint::load`], with 8-bit floats made `float`: `F32`, `F16` or `BF16`.
    pub fn load_float(&self, name: &str, float: DType) -> Result<TensorData, CheckpointError> {
        let unknown = || CheckpointError::UnknownTensor {
            name: name.to_owned(),
        };
        match &self.source {
            Source::Safetensors {
                files,
                tensors,
                fp8,
                ..
            } => {
                let stored = |name: &str| -> Option<TensorData> {
                    let (number, entry) = tensors.get(name)?;
                    let dtype = if fp8.weights.contains_key(name) {
                        DType::F8E4M3
                    } else {
                        entry.info.dtype
                    };
                    let (file, range) = (files.get(*number)?, entry.range.clone());
                    Some(TensorData {
                        dtype,
                        shape: entry.info.shape.clone(),
                        bytes: TensorBytes::from_file(file, range, dtype.size_bytes())?,
                    })
                };
                let tensor = stored(name).ok_or_else(unknown)?;
                match fp8.weights.get(name) {
                    None => Ok(tensor),
                    Some(scaled) => {
                        let scales = stored(&scaled.scale).ok_or_else(unknown)?;
                        fp8::dequantize(&tensor, &scales, scaled, float).map_err(|source| {
                            CheckpointError::Quant {
                                dir: self.path.clone(),
                                source: Box::new(source),
                            }
                        })
                    }
                }
            }
            Source::Gguf(converted) => {
                let (_, plan, part) = converted.tensors.get(name).ok_or_else(unknown)?;
                converted.load(*plan, *part)
            }
        }
    }
}

impl GgufFile {
    /// Makes the checkpoint that the adapter describes. Reads headers only.
    pub fn into_checkpoint(self, adapter: Adapter) -> Result<Checkpoint, CheckpointError> {
        let mut converted = Converted::new(self, adapter)?;
        Ok(Checkpoint {
            path: converted.file.path().to_owned(),
            config: Value::Object(std::mem::take(&mut converted.config)),
            generation_config: None,
            source: Source::Gguf(Box::new(converted)),
        })
    }
}

fn no_config(dir: &Path) -> CheckpointError {
    // A directory that does not exist, or is a file, has the better message.
    let names = match file_names(dir) {
        Ok(names) => names,
        Err(error) => return error,
    };
    let hint = match names.iter().find(|name| name.ends_with(".gguf")) {
        Some(name) => format!("; it has {name}: give the path of that file instead"),
        None => {
            ": expected a directory as `mlx_lm.convert` or `save_pretrained` writes it".to_owned()
        }
    };
    CheckpointError::NoConfig {
        dir: dir.to_owned(),
        hint,
    }
}
