//! What rank 0 and the others say to each other.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::super::pack::PackedStep;

/// Version of these messages: both sides are the same program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// From rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// What to load. The first message.
    Load(Box<Setup>),
    /// A step to run.
    Step(Box<PackedStep>, Capacity),
}

/// Size of the pool that a step needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Pages that exist, page 0 included.
    pub pages: usize,
    /// Most pages there will be.
    pub most_pages: usize,
}

/// To rank 0.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The model is loaded.
    Ready,
    /// It is over, and why.
    Failed(String),
}

/// What a rank loads, and how: all that rank 0 has decided.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// [`VERSION`] of rank 0.
    pub version: String,
    /// Number of the rank that this is for.
    pub rank: usize,
    /// An address for every rank.
    pub addresses: Vec<String>,
    /// Directory or file of the model.
    pub model: PathBuf,
    /// Folders with plugins.
    pub plugins_dir: Vec<PathBuf>,
    /// Plugin files.
    pub plugin: Vec<PathBuf>,
    /// Family plugin and its version.
    pub family: (String, String),
    /// Architecture.
    pub arch: String,
    /// Backend plugin and its version.
    pub backend: (String, String),
    /// Name of the device; empty for the first.
    pub device: String,
    /// Float type of activations.
    pub dtype: String,
    /// Type of keys and values.
    pub kv_type: String,
    /// How products are computed; empty lets the backend decide.
    pub precision: String,
    /// Compute threads; 0 lets the backend decide.
    pub threads: usize,
    /// Longest sequence, in tokens.
    pub context_tokens: usize,
}
