//! What a family tells the host of a model: data from which pages, prefix reuse, trimming and
//! memory are planned. The host knows models through this and nothing else.

use serde::{Deserialize, Serialize};

/// Which cache one layer needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum CacheDesc {
    /// Keys and values of every position. Exact at every boundary.
    Dense {
        /// Key and value heads.
        kv_heads: usize,
        /// Width of a key.
        k_dim: usize,
        /// Width of a value.
        v_dim: usize,
    },
    /// Keys and values of the last `window` positions. Exact while nothing needed was dropped.
    Window {
        /// Key and value heads.
        kv_heads: usize,
        /// Width of a key.
        k_dim: usize,
        /// Width of a value.
        v_dim: usize,
        /// Positions a row sees, itself included.
        window: usize,
    },
    /// No cache.
    None,
}

/// Description of a loaded configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelDesc {
    /// Architecture id.
    pub arch: String,
    /// `text-generation` for models that give next-token logits.
    pub task: String,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context_length: usize,
    /// One entry per layer, in order of `layer` in attention calls.
    pub layers: Vec<CacheDesc>,
    /// Bytes of intermediate values per row of a step and per byte of an activation element: the
    /// widest set of tensors alive at once.
    pub activation_width: usize,
}
