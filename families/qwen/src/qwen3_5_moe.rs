//! `qwen3_5_moe`: as `qwen3_5`, with a mixture of experts and a shared one in every layer.

use mlxcel_sdk::prelude::*;

use crate::hybrid;
use crate::hybrid_config::{HybridConfig, Layout};
use crate::hybrid_gguf;
use crate::qwen3_5::{of_text, probe_text_half};
use crate::sparse::{SparseConfig, SparseDefaults};

struct Qwen35Moe;

architecture! {
    Qwen35Moe,
    id: "qwen3_5_moe", display_name: "Qwen3.5 MoE", category: "moe", task: "text-generation",
    model_types: ["qwen3_5_moe", "qwen3_5_moe_text"], gguf: ["qwen35moe"],
    aliases: ["Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

fn read(config: &Config<'_>) -> Result<(HybridConfig, SparseConfig)> {
    of_text(config, ["qwen3_5_moe_text", "qwen3_5_moe"], |text, tied| {
        let hybrid = HybridConfig::read(text, tied, Layout::Apart)?;
        // Values of transformers' Qwen3_5MoeTextConfig, whose router always makes the chosen scores sum
        // to 1.
        let defaults = SparseDefaults {
            n_experts: 256,
            top_k: 8,
            renormalise: true,
        };
        if !text.bool_or("norm_topk_prob", true)? {
            return Err(text.unsupported("norm_topk_prob", "this line of models always sums to 1"));
        }
        let shared = text.uint_or("shared_expert_intermediate_size", 512)?;
        let n_layers = hybrid.attends.len();
        let sparse = SparseConfig::read(text, n_layers, &defaults, Some(shared))?;
        Ok((hybrid, sparse))
    })
}

impl Architecture for Qwen35Moe {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text_half(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let (hybrid, sparse) = read(config)?;
        Ok(hybrid.describe("qwen3_5_moe", sparse.widest()))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        hybrid_gguf::adapt(summary, hybrid_gguf::Hybrid::Moe35)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let (hybrid, sparse) = read(config)?;
        let model = hybrid::load(&hybrid, weights, |layer, at| {
            sparse.load_layer(layer, &at.at("mlp"), hybrid.hidden, hybrid.activation)
        })?;
        Ok(Box::new(model))
    }
}
