//! Kernels of the CPU backend. They know slices and strides, no tensor, no MLX.
//!
//! Each kernel is written once over [`simd::Simd`] and compiled for every instruction set that the
//! trait is implemented for; [`isa`] picks one at run time. All compute is in f32 with f32
//! accumulation ("exact mode"); storage may be narrower.

pub mod attention;
pub mod dense;
pub mod gemm;
pub mod isa;
pub mod pool;
pub mod qmatmul;
pub mod quantized;
pub mod row;
pub mod simd;

pub use isa::Isa;
pub use pool::Pool;
pub use quantized::{QuantizedMatrix, Scales};
