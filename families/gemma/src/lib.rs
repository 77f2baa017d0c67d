//! The gemma line: decoders whose norm weights are stored minus one, whose embedding is scaled by the
//! root of its width, with a gelu-gated feed-forward block. One file per architecture; each registers
//! itself.

mod config;
mod gemma;
mod gemma2;
mod gemma3;
mod gguf;
mod layers;
mod model;
#[cfg(test)]
mod tests;

mlxcel_sdk::export_family! { name: "gemma", vendor: "mlxcel" }
