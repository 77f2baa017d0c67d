//! `gemma3`: as gemma2 without the cap on scores, with norms of query and key heads, mostly sliding
//! layers, and a rotary base for each kind of layer. Model type `gemma3` nests this text model in
//! `text_config`, beside a vision tower, which text alone does not need.

use mlxcel_sdk::nn::Activation;
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults, Sizes, check_variant, score_divisor, soft_cap};
use crate::gguf;
use crate::layers::{read_ropes, read_windows};
use crate::model::Decoder;

struct Gemma3;

architecture! {
    Gemma3,
    id: "gemma3", display_name: "Gemma 3", category: "dense", task: "text-generation",
    model_types: ["gemma3", "gemma3_text"], gguf: ["gemma3"],
    aliases: ["Gemma 3 270M", "Gemma 3 1B", "Gemma 3 4B", "Gemma 3 12B", "Gemma 3 27B", "MedGemma"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

const DEFAULTS: Defaults = Defaults {
    vocab: 262_208,
    heads: 8,
    kv_heads: 4,
    context: 131_072,
};

fn is_nested(config: &Config<'_>) -> Result<bool> {
    Ok(config.opt_str("model_type")? == Some("gemma3"))
}

fn read(config: &Config<'_>) -> Result<DecoderConfig> {
    check_variant(config)?;
    let tied = config.bool_or("tie_word_embeddings", true)?;
    if !is_nested(config)? {
        return read_text(config, tied);
    }
    match config.section("text_config")? {
        Some(text) => {
            check_variant(&text)?;
            read_text(&text, tied)
        }
        None => Err(config.error("text_config", "an object, as model_type is gemma3")),
    }
}

fn read_text(config: &Config<'_>, tied: bool) -> Result<DecoderConfig> {
    if config.get("attn_logit_softcapping").is_some() {
        // The reference has the setting and does not apply it, so nothing says what is meant.
        let supported = "attention scores have no soft cap in this generation";
        return Err(config.unsupported("attn_logit_softcapping", supported));
    }
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let (rope, sliding_rope) = read_ropes(config, sizes.head_dim)?;
    let pattern = config.opt_uint("sliding_window_pattern", 1..=4096)?;
    Ok(DecoderConfig {
        tied,
        activation: Activation::read(config, "hidden_activation", Activation::GeluTanh)?,
        score_divisor: score_divisor(config)?,
        score_cap: None,
        logit_cap: soft_cap(config, "final_logit_softcapping", None)?,
        windows: read_windows(config, sizes.n_layers, pattern.unwrap_or(6))?,
        rope,
        sliding_rope,
        post_norms: true,
        head_norms: true,
        sizes,
    })
}

/// Where the text model and its head are: alone, as published beside a vision tower, or under the
/// names that newer versions of transformers use in memory.
fn find_parts(weights: &Weights) -> (Weights, Weights) {
    let outer = weights.at("language_model");
    if outer.exists() {
        return (outer.at("model"), outer.at("lm_head"));
    }
    let root = weights.at("model");
    let inner = root.at("language_model");
    let root = if inner.exists() { inner } else { root };
    (root, weights.at("lm_head"))
}

impl Architecture for Gemma3 {
    fn probe(&self, config: &Config<'_>) -> Probe {
        if let Err(error) = check_variant(config) {
            return Probe::refused(error.to_string());
        }
        if config.get("vision_config").is_some() {
            // An architecture with images, where one is installed, fits better.
            return Probe::fits(50, "model_type; the text side only, without vision_config");
        }
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        Ok(read(config)?.describe("gemma3"))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt(summary, gguf::Kind::Gemma3)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        if is_nested(config)? {
            // Without an image these take no part: text attends causally, as in the text model alone.
            for root in [weights.clone(), weights.at("model")] {
                root.at("vision_tower").ignore_all();
                root.at("multi_modal_projector").ignore_all();
            }
        }
        let (root, head) = find_parts(weights);
        Ok(Box::new(Decoder::load(&read(config)?, &root, &head)?))
    }
}
