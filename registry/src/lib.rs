//! Plugin catalogue, architecture index, model store and checkpoint readers.

pub mod arch;
pub mod plugin;
pub mod store;

pub mod checkpoint;
