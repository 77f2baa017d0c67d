//! `deepseek`: the first generation (DeepSeekMoE). Attention as in llama, then a softmax over all
//! experts, beside experts that every row goes through; the first layers are dense.

use mlxcel_sdk::nn::{Attention, AttentionConfig, Mixer, Rope, RopeConfig};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, only, only_layers, probe_text};
use crate::experts::MoeConfig;
use crate::gguf;
use crate::model;
use crate::routing::{RouterConfig, Scoring};

struct Deepseek;

architecture! {
    Deepseek,
    id: "deepseek", display_name: "DeepSeekMoE", category: "moe", task: "text-generation",
    model_types: ["deepseek"], gguf: ["deepseek"], aliases: ["deepseek-moe-16b"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

struct Settings {
    decoder: DecoderConfig,
    moe: MoeConfig,
    kv_heads: usize,
    head_dim: usize,
    rope: RopeConfig,
}

fn read(config: &Config<'_>) -> Result<Settings> {
    let decoder = DecoderConfig::read(config, 2048)?;
    only_layers(config, decoder.n_layers, "full_attention")?;
    let (hidden, heads) = (decoder.hidden, decoder.heads);
    config.divides(("num_attention_heads", heads), ("hidden_size", hidden))?;
    let kv_heads = config.opt_uint("num_key_value_heads", 1..=4096)?;
    let kv_heads = kv_heads.unwrap_or(heads);
    config.divides(
        ("num_key_value_heads", kv_heads),
        ("num_attention_heads", heads),
    )?;
    let head_dim = hidden / heads;
    if !head_dim.is_multiple_of(2) {
        let expected = format!(
            "a number that leaves an even width of a head, to be rotated in pairs (this leaves {head_dim})"
        );
        return Err(config.error("num_attention_heads", expected));
    }
    let rope = RopeConfig::read_whole(config, head_dim)?;
    let moe = MoeConfig::read(config, &decoder, 0, |n_experts, top_k| {
        only(config, "scoring_func", "softmax")?;
        Ok(RouterConfig {
            n_experts,
            top_k,
            scoring: Scoring::Softmax,
            selection_bias: None,
            groups: None,
            renormalise: config.bool_or("norm_topk_prob", false)?,
            scale: 1.0,
        })
    })?;
    Ok(Settings {
        decoder,
        moe,
        kv_heads,
        head_dim,
        rope,
    })
}

impl Architecture for Deepseek {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let settings = read(config)?;
        let cache = CacheDesc::Dense {
            kv_heads: settings.kv_heads,
            k_dim: settings.head_dim,
            v_dim: settings.head_dim,
        };
        let attention = 2 * (settings.decoder.heads + settings.kv_heads) * settings.head_dim;
        let inner = settings.moe.widest();
        Ok(settings
            .decoder
            .describe("deepseek", &cache, attention, inner))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt_first(summary)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let Settings {
            decoder,
            moe,
            kv_heads,
            head_dim,
            rope,
        } = read(config)?;
        let rope = Rope::new(weights, &rope, head_dim, false)?;
        let mixer = |layer: usize, at: &Weights| {
            let attention = AttentionConfig {
                layer,
                hidden: decoder.hidden,
                heads: decoder.heads,
                kv_heads,
                head_dim,
                qkv_bias: decoder.attention_bias,
                out_bias: decoder.attention_bias,
                qk_norm_eps: None,
                scale: (head_dim as f32).sqrt().recip(),
                softcap: 0.0,
            };
            let attention = Attention::load(at, attention, Some(rope.clone()))?;
            Ok(Box::new(attention) as Box<dyn Mixer>)
        };
        let model = model::load(&decoder, weights, mixer, |layer, at| {
            moe.load_layer(layer, at, &decoder)
        })?;
        Ok(Box::new(model))
    }
}
