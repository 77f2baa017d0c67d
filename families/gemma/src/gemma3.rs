//! `gemma3`: as gemma2 without the cap on scores, with norms of query and key heads, mostly sliding
//! layers, and a rotary base for each kind of layer. Model type `gemma3` nests this text model in
//! `text_config`, beside a vision tower, which text alone does not need.

use mlxcel_sdk::nn::Activation;
use mlxcel_sdk::prelude::*;

use crate::config::{
    DecoderConfig, Defaults, Sizes, check_variant, score_divisor, soft_cap, text_section,
};
use crate::gguf;
use crate::layers::{read_ropes, read_windows};
use crate::model::Decoder;
use crate::parts::find_parts;

struct Gemma3;

architecture! {
    Gemma3,
    id: "gemma3", display_name: "Gemma 3", category: "dense", task: "text-generation",
    model_types: ["gemma3", "gemma3_text"], gguf: ["gemma3"],
    aliases: ["Gemma 3 270M", "Gemma 3 1B", "Gemma 3 4B", "Gemma 3 12B", "Gemma 3 27B", "MedGemma"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

const DEFAULTS: Defaults = Defaults {
    vocab: 262_208,
    heads: 8,
    kv_heads: 4,
    context: 131_072,
};

fn read(config: &Config<'_>) -> Result<DecoderConfig> {
    check_variant(config)?;
    let tied = config.bool_or("tie_word_embeddings", true)?;
    match text_section(config, "gemma3")? {
        Some(text) => {
            check_variant(&text)?;
            read_text(&text, tied)
        }
        None => read_text(config, tied),
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
        windows: read_windows(config, sizes.n_layers, pattern.unwrap_or(6), 4096)?,
        rope,
        sliding_rope,
        post_norms: true,
        head_norms: true,
        sizes,
    })
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
        let nested = text_section(config, "gemma3")?.is_some();
        let (root, head) = find_parts(weights, nested);
        Ok(Box::new(Decoder::load(&read(config)?, &root, &head)?))
    }
}
