//! Black-box, conformance, regression and fuzz tests of the built binaries and plugins.

pub mod plugins;
