//! Kernels of the CPU backend. They know slices and strides, no tensor, no MLX.
//!
//! Each kernel is written once over [`simd::Simd`] and compiled for every instruction set that the
//! trait is implemented for; [`isa`] picks one at run time. Sums are in f32. Activations are f32 in
//! exact mode; before products with quantised weights they are rounded to 16 bits in high and to 8 bits
//! in fast mode. Storage may be narrower.

mod aligned;
pub mod attention;
pub mod conv;
pub mod dense;
mod factor;
pub mod gemm;
pub mod gemm_integers;
pub mod halves;
pub mod isa;
pub mod normalise;
pub mod pool;
pub mod qmatmul;
pub mod quantized;
pub mod recurrent;
pub mod row;
pub mod simd;
pub mod sparse;

pub use isa::Isa;
pub use pool::Pool;
pub use quantized::{QuantizedMatrix, Scales};
