//! Plugin catalogue, architecture index, model store and checkpoint readers.

pub mod arch;
pub mod checkpoint;
pub mod plugin;
mod quoted;
pub mod store;

pub use quoted::{quoted, shown};
