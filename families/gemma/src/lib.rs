//! The gemma line: decoders whose embedding is scaled by the root of its width, with a gelu-gated
//! feed-forward block. One file per architecture; each registers itself. The first three generations
//! share a decoder (`model`) and store their norm weights minus one; gemma3n and gemma4 share their
//! attention and the inputs of single layers.

mod altup;
mod attention;
mod config;
mod experts;
mod gemma;
mod gemma2;
mod gemma3;
mod gemma3n;
mod gemma4;
mod gemma4_layers;
mod gguf;
mod gguf_gemma3n;
mod gguf_gemma4;
mod layers;
mod model;
mod parts;
mod per_layer;
mod proportional;
mod sparsity;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_shared_caches;

mlxcel_sdk::export_family! { name: "gemma", vendor: "mlxcel" }
