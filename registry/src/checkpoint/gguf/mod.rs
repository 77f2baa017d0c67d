//! GGUF, read directly: header and metadata, then tensors in MLX's form.
//!
//! A family turns [`GgufFile::summary_json`] into an [`Adapter`], which names and arranges the tensors;
//! [`GgufFile::into_checkpoint`](GgufFile::into_checkpoint) makes the checkpoint. Types whose
//! arithmetic is MLX's affine form are repacked without loss, the others become `F16` (see `repack`), or what their
//! reader asks for (see `centred`).
//! Owns the file format and the arithmetic of its types. Must not know any architecture.

mod adapter;
mod centred;
mod convert;
mod cursor;
mod dequant;
mod dequant_k;
mod error;
mod file;
mod ggml_type;
mod header;
mod load;
mod meta;
mod plan;
mod repack;
mod rows;
mod summary;

pub use adapter::{Adapter, AdapterError, AdapterOp, AdapterTensor};
pub use centred::{CentredForm, centred_form};
pub use dequant::dequantize;
pub use error::GgufError;
pub use file::GgufFile;
pub use ggml_type::GgmlType;
pub use header::{GgufHeader, GgufTensor, parse_header};
pub use load::ConvertError;
pub use meta::{MetaArray, MetaType, MetaValue};
pub use repack::{GROUP_SIZE, affine_factors, pack_codes, packed_bits};

pub(super) use convert::Converted;
