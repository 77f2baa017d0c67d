//! The mlxcel host: engine, text pipeline, plugin loader and command line.

pub mod chat;
pub mod cli;
pub mod engine;
pub mod plugin;
pub mod sampling;
pub mod server;
pub mod template;
pub mod text;
