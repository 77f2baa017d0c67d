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
    /// One compressed key per position, whose first elements are its value (multi-head latent
    /// attention). Exact at every boundary. Needs a host of ABI minor 1.
    Latent {
        /// Width of a key.
        k_dim: usize,
        /// Elements of it that are the value.
        v_dim: usize,
        /// Width of the index keys by which rows choose what they attend to, if they do.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        index_dim: Option<usize>,
    },
    /// States of fixed size that move on with every row. Exact only where the host kept a copy.
    /// Needs a host of ABI minor 1.
    Recurrent {
        /// The layer's states, in order of `state` in calls.
        states: Vec<StateDesc>,
    },
    /// Keys and values of an encoder's output, the same for every position of the sequence. Set by
    /// [`crate::Model::encode`]; steps read them. Needs a host of ABI minor 3.
    Cross {
        /// Key and value heads.
        kv_heads: usize,
        /// Width of a key.
        k_dim: usize,
        /// Width of a value.
        v_dim: usize,
    },
    /// No cache. Also a layer that attends over another's: it names the other in its calls.
    None,
}

/// One recurrent state of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateDesc {
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Element type; `f32` is the one there is.
    pub dtype: String,
}

impl StateDesc {
    /// An f32 state.
    pub fn f32(shape: &[usize]) -> Self {
        Self {
            shape: shape.to_vec(),
            dtype: "f32".to_owned(),
        }
    }
}

/// What the encoder of a model with cross-attention takes and gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncoderDesc {
    /// Width of a row of features.
    pub width: usize,
    /// Most rows of one request.
    pub max_rows: usize,
    /// Rows that become one position of the cross-attention layers: L rows give `ceil(L / stride)`.
    pub stride: usize,
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
    /// One entry per layer, in order of `layer` in calls to the caches. A block with two caches takes
    /// two entries.
    pub layers: Vec<CacheDesc>,
    /// Bytes of intermediate values per row of a step and per byte of an activation element: the
    /// widest set of tensors alive at once.
    pub activation_width: usize,
    /// The encoder, where there are layers of cross-attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoder: Option<EncoderDesc>,
}
