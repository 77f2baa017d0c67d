//! The only place that opens plugins and calls their functions.
//!
//! Owns the loading pipeline after the peek (child probe, dynamic linker, layout check, handshake) and
//! the safe wrappers over the ABI's tables. Everything `unsafe` of the host is here; the engine above
//! sees `Result`s and values that clean up after themselves. Must not know what a model computes.
//!
//! Threads: [`Loader`], [`Family`] and [`BackendPlugin`] may be shared. A [`Backend`] and everything made
//! with it ([`DeviceTensor`], [`Model`]) stays on the thread that opened it, which the types enforce.

mod backend;
mod cache_ops;
mod call;
mod child;
mod collectives;
mod detect;
mod device;
mod envelope;
mod error;
mod family;
mod host_api;
mod library;
mod loader;
mod model;
mod ops;
mod probe;
mod probe_cache;
mod providers;
mod sampling;
mod select;
mod step;
mod unlinked;
mod weights;

pub use backend::{BackendPlugin, DeviceReport, OpenOptions, ProbeReport};
pub use cache_ops::Attended;
pub use child::{PROBE_COMMAND, probe_child_main};
pub use collectives::RankGroup;
pub use detect::{CandidateFailure, DetectFailure, Detected};
pub use device::{Backend, DeviceTensor};
pub use error::{CallError, LoadError};
pub use family::{Family, ModelRequest};
pub use host_api::Lent;
pub use loader::{Loader, LoaderOptions};
pub use mlxcel_abi::cache_args::{
    GatedDeltaPoolArgs, ShortConvPoolArgs, SparseIndexArgs, StateRows,
};
pub use mlxcel_abi::ops_args::{
    MemoryInfo, MemoryLimits, PagedAttentionArgs, QuantSpec, QuantizedWeight, RandomArgs,
};
pub use mlxcel_abi::{AbiError, DType, Tensor, TensorInfo};
pub use model::{Model, StepInputs};
pub use ops::SliceSpec;
pub use probe::{ProbeOutcome, ProbeSettings};
pub use sampling::{NO_TOKEN, SampleArgs};
pub use select::{BackendChoice, SelectError, SelectedBackend};
pub use step::{AttendArgs, GatedDeltaArgs, IndexArgs, KvSource, RotateArgs, ShortConvArgs};
pub use weights::WeightSource;
