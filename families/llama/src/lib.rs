//! The llama line: decoders with RMS norm, rotary embedding, grouped-query attention and a gated
//! feed-forward block. One file per architecture; each registers itself.

mod config;
mod gguf;
mod llama;
mod mixtral;
mod model;
mod smollm3;

mlxcel_sdk::export_family! { name: "llama", vendor: "mlxcel" }
