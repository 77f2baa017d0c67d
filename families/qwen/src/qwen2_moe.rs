//! `qwen2_moe`: the qwen2 decoder with a mixture of experts beside a shared expert behind a
//! sigmoid gate. Some layers may be dense.

use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Line, probe_text};
use crate::gguf::{self, Kind};
use crate::model;
use crate::sparse::{SparseConfig, SparseDefaults};
use crate::windows::WindowRule;

struct Qwen2Moe;

architecture! {
    Qwen2Moe,
    id: "qwen2_moe", display_name: "Qwen2 MoE", category: "moe", task: "text-generation",
    model_types: ["qwen2_moe"], gguf: ["qwen2moe"], aliases: ["Qwen1.5-MoE-A2.7B", "Qwen2-57B-A14B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

fn read(config: &Config<'_>) -> Result<(DecoderConfig, SparseConfig)> {
    let line = Line {
        qkv_bias: config.bool_or("qkv_bias", true)?,
        out_bias: false,
        head_norms: false,
        default_head_dim: None,
        windows: WindowRule::EveryOther,
    };
    let decoder = DecoderConfig::read(config, &line)?;
    // Counts of transformers' Qwen2MoeConfig.
    let defaults = SparseDefaults {
        n_experts: 60,
        top_k: 4,
        renormalise: false,
    };
    let shared = config.uint("shared_expert_intermediate_size")?;
    let sparse = SparseConfig::read(config, decoder.windows.len(), &defaults, Some(shared))?;
    Ok((decoder, sparse))
}

impl Architecture for Qwen2Moe {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let (decoder, sparse) = read(config)?;
        Ok(decoder.describe("qwen2_moe", sparse.widest()))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt(summary, Kind::Qwen2Moe)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let (decoder, sparse) = read(config)?;
        let model = model::load(&decoder, weights, |layer, at| {
            sparse.load_layer(layer, &at.at("mlp"), decoder.hidden, decoder.activation)
        })?;
        Ok(Box::new(model))
    }
}
