//! `deepseek_v2`: multi-head latent attention; softmax over the experts, taken from all of them or
//! from the best groups, beside experts that every row goes through.

use mlxcel_sdk::nn::Mixer;
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, only, only_interleaved, only_layers, probe_text};
use crate::experts::{MoeConfig, read_groups};
use crate::gguf::{self, Latent};
use crate::latent::{LatentAttention, LatentConfig};
use crate::model;
use crate::routing::{GroupRank, RouterConfig, Scoring};

struct DeepseekV2;

architecture! {
    DeepseekV2,
    id: "deepseek_v2", display_name: "DeepSeek-V2", category: "moe", task: "text-generation",
    model_types: ["deepseek_v2"], gguf: ["deepseek2"],
    aliases: ["DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-V2.5", "DeepSeek-Coder-V2"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

fn read(config: &Config<'_>) -> Result<(DecoderConfig, LatentConfig, MoeConfig)> {
    let decoder = DecoderConfig::read(config, 2048)?;
    only_layers(config, decoder.n_layers, "full_attention")?;
    only_interleaved(config)?;
    let attention = LatentConfig::read(config, &decoder)?;
    let moe = MoeConfig::read(config, &decoder, 0, |n_experts, top_k| {
        only(config, "scoring_func", "softmax")?;
        if config.bool_or("norm_topk_prob", false)? {
            // The publisher's code then drops the scaling factor, transformers ignores the key.
            let supported =
                "references disagree on what it means here, and no published file sets it";
            return Err(config.unsupported("norm_topk_prob", supported));
        }
        let groups = match config.opt_str("topk_method")? {
            None | Some("greedy") => None,
            Some("group_limited_greedy") => {
                // Without the two numbers there is nothing to limit by.
                for key in ["n_group", "topk_group"] {
                    config.uint_in(key, 1..=4096)?;
                }
                read_groups(config, GroupRank::Best, (1, 1), n_experts, top_k)?
            }
            Some(_) => {
                let supported = "known methods here are greedy and group_limited_greedy";
                return Err(config.unsupported("topk_method", supported));
            }
        };
        Ok(RouterConfig {
            n_experts,
            top_k,
            scoring: Scoring::Softmax,
            selection_bias: None,
            groups,
            renormalise: false,
            scale: config.float_or("routed_scaling_factor", 1.0, 1e-6..=1e6)?,
        })
    })?;
    Ok((decoder, attention, moe))
}

impl Architecture for DeepseekV2 {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let (decoder, attention, moe) = read(config)?;
        let cache = CacheDesc::Latent {
            k_dim: attention.k_dim(),
            v_dim: attention.rank,
            index_dim: None,
        };
        let width = attention.activation_width();
        Ok(decoder.describe("deepseek_v2", &cache, width, moe.widest()))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt_latent(summary, Latent::Second)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let (decoder, attention, moe) = read(config)?;
        let mixer = |layer: usize, at: &Weights| {
            let mixer = LatentAttention::load(at, layer, decoder.hidden, &attention)?;
            Ok(Box::new(mixer) as Box<dyn Mixer>)
        };
        let model = model::load(&decoder, weights, mixer, |layer, at| {
            moe.load_layer(layer, at, &decoder)
        })?;
        Ok(Box::new(model))
    }
}
