//! Traffic for a server over raw HTTP, and what came of it: throughput, latencies, leaks.
//!
//! Knows the routes that our server and llama.cpp's have in common, and nothing of how either works. It depends on no other
//! crate of the project, so that it is built in seconds and measures a server as a stranger would.

pub mod chat;
pub mod error;
pub mod http;
pub mod load;
pub mod prompts;
pub mod random;
pub mod soak;
pub mod stats;

pub use error::LoadError;
