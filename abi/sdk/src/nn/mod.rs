//! Layers that families are built of. Each loads from a [`crate::Weights`] view and runs on
//! `[T, ..]` rows.

mod attention;
mod decoder;
mod embedding;
mod heads;
mod linear;
mod mlp;
mod moe;
mod norm;
mod projection;
mod rope;
mod rope_scaling;
mod rotated;

pub use attention::{Attention, AttentionConfig};
pub use decoder::{Decoder, DecoderLayer, DecoderShape, FeedForward, Mixer};
pub use embedding::{Embedding, LmHead};
pub use heads::{HeadProjections, HeadSizes};
pub use linear::Linear;
pub use mlp::{Activation, GatedMlp};
pub use moe::{Experts, Routing, TopKRouter};
pub use norm::{LayerNorm, RmsNorm};
pub use projection::project;
pub use rope::Rope;
pub use rope_scaling::{RopeConfig, RopeScaling};
pub use rotated::RotatedAttention;
