//! Checkpoints: untrusted files that become named tensors.
//!
//! [`Checkpoint::open_dir`] reads a directory of safetensors, [`Checkpoint::open_gguf`] a GGUF file.
//! Both read headers only, bound everything a header can claim, and name what is wrong;
//! [`Checkpoint::load`] then hands out bytes, mapped where possible.
//! Owns file formats, limits and the lossless way from GGUF to MLX's form. Must not know any
//! architecture (a family says what tensors are called), nor any device.

#[cfg(target_endian = "big")]
compile_error!("checkpoint files are little-endian, and their pages are handed out as they are");

pub mod gguf;
pub mod json;
pub mod quant;
pub mod safetensors;
#[doc(hidden)]
pub mod testing;

mod buffer;
mod directory;
mod dtype;
mod error;
mod finite;
mod fp4;
mod fp8;
mod fp8_settings;
mod map;
mod open;
mod quant_check;
mod quant_source;
mod region;

pub use buffer::{AlignedBuffer, TensorBytes, TensorData};
pub use dtype::{DType, TensorInfo, UnknownDType};
pub use error::CheckpointError;
pub use finite::NotFinite;
pub use gguf::{Adapter, AdapterOp, AdapterTensor, CentredForm, GgufFile};
pub use map::MappedFile;
pub use open::Checkpoint;
pub use quant::{QuantMode, QuantSpec};
