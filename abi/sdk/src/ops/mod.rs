//! Operations of [`crate::Tensor`], one file per group, thin over the operation table.

mod elementwise;
mod index;
mod layers;
mod product;
mod random;
mod reduce;
mod shape;

pub use layers::{Attention, Conv, RopeSpec};
pub use product::QuantizedTensor;
