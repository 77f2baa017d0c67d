//! Why a checkpoint was refused: every variant names the file, tensor or key at fault.

use std::io;
use std::path::PathBuf;

use super::gguf::{AdapterError, ConvertError, GgufError};
use super::json::JsonError;
use super::quant::QuantError;
use super::safetensors::SafetensorsError;

/// Why a checkpoint could not be opened, or a tensor not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or directory could not be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The directory has no `config.json`.
    #[error("{dir} has no config.json{hint}")]
    NoConfig {
        /// The directory.
        dir: PathBuf,
        /// What is there instead, and what to do.
        hint: String,
    },
    /// A key of `config.json` that says what the checkpoint is has another type.
    #[error("{path}: `{key}` is {found}, expected {expected}")]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// What is there.
        found: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// The directory has no weights that can be read.
    #[error("{dir} has no *.safetensors file{hint}")]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// What is there instead, and what to do.
        hint: String,
    },
    /// A JSON file was refused.
    #[error("{path}: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Why.
        source: JsonError,
    },
    /// The index has no `weight_map` of names to names.
    #[error(
        "{path}: expected `weight_map` to be an object of tensor names to file names, found {found}"
    )]
    Index {
        /// The index.
        path: PathBuf,
        /// What is there.
        found: String,
    },
    /// The index names a file that is no plain name in its own directory.
    #[error("{path}: shard `{shard}` is not a plain *.safetensors file name")]
    ShardName {
        /// The index.
        path: PathBuf,
        /// The name.
        shard: String,
    },
    /// A file of the set is not there.
    #[error(
        "shard {shard} is missing: {required_by} (the download may be incomplete; fetch the model again)"
    )]
    MissingShard {
        /// The file that should exist.
        shard: PathBuf,
        /// What asks for it.
        required_by: String,
    },
    /// The index says that a tensor is in a file that does not hold it.
    #[error("the index says that tensor `{tensor}` is in {shard}, but it is not there")]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The file.
        shard: PathBuf,
    },
    /// Two files hold one tensor.
    #[error("tensor `{tensor}` is in {first} and in {second}")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other file.
        second: PathBuf,
    },
    /// A safetensors file was refused.
    #[error("{path}: {source}")]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<SafetensorsError>,
    },
    /// The quantisation in `config.json` is wrong or contradicts the tensors.
    #[error("{dir}: {source}")]
    Quant {
        /// The checkpoint directory.
        dir: PathBuf,
        /// Why.
        source: Box<QuantError>,
    },
    /// A GGUF file was refused.
    #[error("{path}: {source}")]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<GgufError>,
    },
    /// The family's adapter does not fit the GGUF file.
    #[error("{path}: {source}")]
    Adapter {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<AdapterError>,
    },
    /// The values of a GGUF tensor could not be converted.
    #[error("{path}: {source}")]
    Convert {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<ConvertError>,
    },
    /// No tensor has this name.
    #[error("the checkpoint has no tensor `{name}`")]
    UnknownTensor {
        /// The name.
        name: String,
    },
}
