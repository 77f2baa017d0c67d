//! Measuring us beside llama.cpp and mlx-lm: their installation, the runs in turn, and the table with ratios.
//!
//! A ratio counts only within one run on one machine. So everybody runs one after another, several times, in an order that
//! turns around, and a machine that is busy harms all alike. Others are built or installed into `target/peers` from their
//! published packages; nothing of them enters the product.

pub mod args;
mod bench;
mod install;
mod llama;
mod machine;
mod mlx_lm;
mod models;
mod ours;
mod server;
mod soak;
mod table;
mod timed;

pub use bench::run as bench;
pub use server::run as bench_server;
pub use soak::run as soak;
