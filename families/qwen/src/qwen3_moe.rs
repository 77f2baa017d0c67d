//! `qwen3_moe`: the qwen3 decoder with a mixture of experts and no shared expert. Some layers may
//! be dense; a sliding window, where there is one, holds for every layer.

use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Line, probe_text};
use crate::gguf::{self, Kind};
use crate::model;
use crate::sparse::{SparseConfig, SparseDefaults};
use crate::windows::WindowRule;

struct Qwen3Moe;

architecture! {
    Qwen3Moe,
    id: "qwen3_moe", display_name: "Qwen3 MoE", category: "moe", task: "text-generation",
    model_types: ["qwen3_moe"], gguf: ["qwen3moe"],
    aliases: ["Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

fn read(config: &Config<'_>) -> Result<(DecoderConfig, SparseConfig)> {
    let bias = config.bool_or("attention_bias", false)?;
    let line = Line {
        qkv_bias: bias,
        out_bias: bias,
        head_norms: true,
        // Unlike Qwen3Config, Qwen3MoeConfig has no default: hidden size over heads.
        default_head_dim: None,
        windows: WindowRule::Everywhere,
    };
    let decoder = DecoderConfig::read(config, &line)?;
    // Counts of transformers' Qwen3MoeConfig.
    let defaults = SparseDefaults {
        n_experts: 128,
        top_k: 8,
        renormalise: false,
    };
    let sparse = SparseConfig::read(config, decoder.windows.len(), &defaults, None)?;
    Ok((decoder, sparse))
}

impl Architecture for Qwen3Moe {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let (decoder, sparse) = read(config)?;
        Ok(decoder.describe("qwen3_moe", sparse.widest()))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt(summary, Kind::Qwen3Moe)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let (decoder, sparse) = read(config)?;
        let model = model::load(&decoder, weights, |layer, at| {
            sparse.load_layer(layer, &at.at("mlp"), decoder.hidden, decoder.activation)
        })?;
        Ok(Box::new(model))
    }
}
