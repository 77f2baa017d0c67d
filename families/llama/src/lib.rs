//! The llama line: decoders with RMS norm, rotary embedding, grouped-query attention and a gated
//! feed-forward block. One file per architecture; each registers itself.

mod arcee;
mod config;
mod gguf;
mod iquestcoder;
mod iquestloopcoder;
mod llama;
mod llama4;
mod ministral3;
mod mistral3;
mod mixtral;
mod model;
mod nemotron_nas;
mod smollm3;
mod tempered;
#[cfg(test)]
mod tests;

mlxcel_sdk::export_family! { name: "llama", vendor: "mlxcel" }
