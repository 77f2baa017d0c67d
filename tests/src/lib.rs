//! Black-box, conformance, regression and fuzz tests of the built binaries and plugins.

pub mod cli;
pub mod golden;
mod golden_results;
pub mod http;
pub mod plugins;
pub mod scripted;
pub mod server;
pub mod tiny;
