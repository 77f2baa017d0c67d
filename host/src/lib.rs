//! The mlxcel host: engine, text pipeline, plugin loader and command line.

pub mod plugin;
