//! The qwen line: decoders with RMS norm, rotary embedding, grouped-query attention with biases
//! (Qwen2) or head norms (Qwen3), and a gated feed-forward block or a mixture of experts. One file
//! per architecture; each registers itself.

mod config;
mod gguf;
mod model;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod sparse;
#[cfg(test)]
mod tests;
mod windows;

mlxcel_sdk::export_family! { name: "qwen", vendor: "mlxcel" }
