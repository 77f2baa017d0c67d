//! Layers that families are built of. Each loads from a [`crate::Weights`] view and runs on
//! `[T, ..]` rows.

mod attention;
mod embedding;
mod linear;
mod mlp;
mod moe;
mod norm;
mod rope;
mod rope_scaling;

pub use attention::{Attention, AttentionConfig};
pub use embedding::{Embedding, LmHead};
pub use linear::Linear;
pub use mlp::{Activation, GatedMlp};
pub use moe::{Experts, Routing, TopKRouter};
pub use norm::{LayerNorm, RmsNorm};
pub use rope::Rope;
pub use rope_scaling::{RopeConfig, RopeScaling};
