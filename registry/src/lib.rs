//! Plugin catalogue, architecture index, model store and checkpoint readers.

pub mod arch;
pub mod checkpoint;
pub mod plugin;
pub mod store;
