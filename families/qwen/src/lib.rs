//! The qwen line: decoders with RMS norm, rotary embedding, grouped-query attention with biases
//! (Qwen2) or head norms (Qwen3), and a gated feed-forward block or a mixture of experts; and hybrids
//! of gated attention with the gated delta rule (Qwen3-Next, Qwen3.5). One file per architecture; each
//! registers itself.

mod config;
mod delta;
mod gated_attention;
mod gguf;
mod hybrid;
mod hybrid_config;
mod hybrid_gguf;
#[cfg(test)]
mod hybrid_tests;
mod model;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod sparse;
#[cfg(test)]
mod tests;
mod windows;

mlxcel_sdk::export_family! { name: "qwen", vendor: "mlxcel" }
