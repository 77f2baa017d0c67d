//! Tests of the plugin catalogue, on library files made here byte by byte.

mod catalogue;
mod discover;
pub(crate) mod files;
mod fuzz;
mod linkage;
mod metadata;
mod peek;
