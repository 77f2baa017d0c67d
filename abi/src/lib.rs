//! `mlxcel-abi`: the contract between the mlxcel host, model families and device backends.
//!
//! Two layers make it up (see `docs/ABI.md`):
//!
//! * a frozen **envelope** ([`envelope`]): one layout-checked `abi_stable` root module with
//!   `metadata`, `open` and `query`. Nothing is ever added to it within a major version;
//! * growing **tables** ([`ops`], [`family`], [`backend`], [`host`]): size-prefixed, append-only
//!   `#[repr(C)]` structs of functions. A reader copies what the writer has over stubs that answer
//!   [`status::UNIMPLEMENTED`], so either side may be older.
//!
//! What may cross: the types of this crate, UTF-8 JSON bytes on cold paths, 64-bit handles on hot
//! ones. What may not: Rust collections, trait objects, enums, panics, C++ types, exceptions.
//!
//! This crate depends on `abi_stable` alone and knows no tensor library and no host type.

#[doc(hidden)]
pub use abi_stable;

#[macro_use]
mod layout;

pub mod arena;
pub mod backend;
pub mod cache_args;
pub mod collectives;
pub mod envelope;
pub mod error;
pub mod family;
pub mod fused_args;
mod golden;
pub mod guard;
pub mod host;
pub mod kinds;
pub mod metadata;
pub mod ops;
pub mod ops_args;
pub mod status;
pub mod surface;
pub mod types;
pub mod version;

pub use error::{AbiError, ErrorObj, Result};
pub use layout::{FieldLayout, SlotLayout, Table, TypeLayout, table_entries};
pub use status::Status;
pub use types::{Bytes, DType, OwnedBytes, Str, Tensor, TensorInfo};
