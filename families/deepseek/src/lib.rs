//! The deepseek line: decoders with shared and routed experts, from the second generation on with
//! attention over one compressed key per position (multi-head latent attention). One file per
//! architecture; each registers itself.

mod compress;
mod config;
mod deepseek;
mod deepseek_v2;
mod deepseek_v3;
mod deepseek_v32;
mod deepseek_v4;
mod deepseek_v4_config;
mod deepseek_v4_rope;
mod experts;
mod gguf;
mod hyper;
mod latent;
mod model;
mod recent;
mod routing;
mod shared_kv;
#[cfg(test)]
mod tests;

mlxcel_sdk::export_family! { name: "deepseek", vendor: "mlxcel" }
