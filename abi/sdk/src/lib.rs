//! `mlxcel-sdk`: what the author of a family plugin links.
//!
//! A family is a crate with one file per architecture. Each file implements [`Architecture`] and
//! [`Model`] and announces itself with [`architecture!`]; `lib.rs` holds [`export_family!`] and
//! nothing that lists them. See `docs/ADDING_A_FAMILY.md`.
//!
//! The SDK knows the ABI and no host, backend or tensor library. Its calls return `Result` and
//! never panic; every entry that it exports is guarded all the same.

#[doc(hidden)]
pub use linkme;
#[doc(hidden)]
pub use mlxcel_abi as abi;

#[macro_use]
mod call;

pub mod arch;
pub mod backend;
pub mod compose;
pub mod config;
pub mod describe;
pub mod encode;
pub mod error;
pub mod gguf;
mod gguf_names;
pub mod nn;
mod ops;
pub mod plugin;
pub mod quant;
pub mod ranks;
pub mod step;
pub mod tensor;
#[cfg(feature = "testkit")]
pub mod testkit;
pub mod weights;

pub use arch::{Architecture, ArchitectureEntry, Model, Probe};
pub use backend::Backend;
pub use compose::{GatedDelta, Index, ShortConv};
pub use config::Config;
pub use describe::{CacheDesc, EncoderDesc, ModelDesc, StateDesc};
pub use encode::Encode;
pub use error::{Error, Result};
pub use gguf::{GgufAdapter, GgufSummary};
pub use mlxcel_abi::DType;
pub use ops::{Attention as DenseAttention, Conv, QuantizedTensor, RopeSpec};
pub use ranks::Ranks;
pub use step::{AttendOptions, Step};
pub use tensor::Tensor;
pub use weights::Weights;

/// What most architecture files need.
pub mod prelude {
    pub use crate::nn;
    pub use crate::{
        Architecture, AttendOptions, Backend, CacheDesc, Config, DType, Encode, EncoderDesc, Error,
        GgufAdapter, GgufSummary, Model, ModelDesc, Probe, Result, StateDesc, Step, Tensor,
        Weights, architecture,
    };
}
