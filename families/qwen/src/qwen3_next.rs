//! `qwen3_next`: three layers of the gated delta rule for one of gated attention, and a mixture of
//! experts with a shared one.

use mlxcel_sdk::prelude::*;

use crate::config::probe_text;
use crate::hybrid;
use crate::hybrid_config::{HybridConfig, Layout};
use crate::hybrid_gguf;
use crate::sparse::{SparseConfig, SparseDefaults};

struct Qwen3Next;

architecture! {
    Qwen3Next,
    id: "qwen3_next", display_name: "Qwen3-Next", category: "moe", task: "text-generation",
    model_types: ["qwen3_next"], gguf: ["qwen3next"],
    aliases: ["Qwen3-Next-80B-A3B", "Qwen3-Coder-Next"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

fn read(config: &Config<'_>) -> Result<(HybridConfig, SparseConfig)> {
    let hybrid = HybridConfig::read(config, false, Layout::Joined)?;
    // Values of transformers' Qwen3NextConfig.
    let defaults = SparseDefaults {
        n_experts: 512,
        top_k: 10,
        renormalise: true,
    };
    let shared = config.uint_or("shared_expert_intermediate_size", 512)?;
    let n_layers = hybrid.attends.len();
    let sparse = SparseConfig::read(config, n_layers, &defaults, Some(shared))?;
    Ok((hybrid, sparse))
}

impl Architecture for Qwen3Next {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let (hybrid, sparse) = read(config)?;
        Ok(hybrid.describe("qwen3_next", sparse.widest()))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        hybrid_gguf::adapt(summary, hybrid_gguf::Hybrid::Next)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let (hybrid, sparse) = read(config)?;
        let model = hybrid::load(&hybrid, weights, |layer, at| {
            sparse.load_layer(layer, &at.at("mlp"), hybrid.hidden, hybrid.activation)
        })?;
        Ok(Box::new(model))
    }
}
