//! `deepseek_v3`: multi-head latent attention; sigmoid scores of the experts, chosen from the best
//! groups with a bias that balances their load, beside experts that every row goes through.

use mlxcel_sdk::nn::Mixer;
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, only, only_layers, probe_text};
use crate::experts::{MoeConfig, read_groups};
use crate::gguf::{self, Latent};
use crate::latent::{LatentAttention, LatentConfig};
use crate::model;
use crate::routing::{GroupRank, RouterConfig, Scoring};

struct DeepseekV3;

architecture! {
    DeepseekV3,
    id: "deepseek_v3", display_name: "DeepSeek-V3", category: "moe", task: "text-generation",
    model_types: ["deepseek_v3"], gguf: ["deepseek2"],
    aliases: ["DeepSeek-V3", "DeepSeek-V3.1", "DeepSeek-R1", "Moonlight-16B-A3B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

fn read(config: &Config<'_>) -> Result<(DecoderConfig, LatentConfig, MoeConfig)> {
    let decoder = DecoderConfig::read(config, 4096)?;
    only_layers(config, decoder.n_layers, "full_attention")?;
    let attention = LatentConfig {
        interleaved: config.bool_not_null("rope_interleave", true)?,
        ..LatentConfig::read(config, &decoder)?
    };
    let moe = read_experts(config, &decoder)?;
    Ok((decoder, attention, moe))
}

/// Experts of this generation and the next.
pub(crate) fn read_experts(config: &Config<'_>, decoder: &DecoderConfig) -> Result<MoeConfig> {
    MoeConfig::read(config, decoder, 3, |n_experts, top_k| {
        only(config, "scoring_func", "sigmoid")?;
        only(config, "topk_method", "noaux_tc")?;
        Ok(RouterConfig {
            n_experts,
            top_k,
            scoring: Scoring::Sigmoid,
            selection_bias: Some("e_score_correction_bias"),
            groups: read_groups(config, GroupRank::BestTwo, (8, 4), n_experts, top_k)?,
            renormalise: config.bool_not_null("norm_topk_prob", true)?,
            scale: config.float_or("routed_scaling_factor", 2.5, 1e-6..=1e6)?,
        })
    })
}

impl Architecture for DeepseekV3 {
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
        Ok(decoder.describe("deepseek_v3", &cache, width, moe.widest()))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt_latent(summary, Latent::Third)
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
