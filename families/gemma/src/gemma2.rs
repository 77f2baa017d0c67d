//! `gemma2`: norms before and behind each half of a block, every other layer slides, attention scores
//! and logits have a soft cap.

use mlxcel_sdk::nn::{Activation, RopeConfig};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults, Sizes, check_variant, score_divisor, soft_cap};
use crate::gguf;
use crate::layers::read_windows;
use crate::model::Decoder;

struct Gemma2;

architecture! {
    Gemma2,
    id: "gemma2", display_name: "Gemma 2", category: "dense", task: "text-generation",
    model_types: ["gemma2"], gguf: ["gemma2"], aliases: ["Gemma 2 2B", "Gemma 2 9B", "Gemma 2 27B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

const DEFAULTS: Defaults = Defaults {
    vocab: 256_000,
    heads: 8,
    kv_heads: 4,
    context: 8192,
};

fn read(config: &Config<'_>) -> Result<DecoderConfig> {
    check_variant(config)?;
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let rope = RopeConfig::read_whole(config, sizes.head_dim)?;
    Ok(DecoderConfig {
        tied: config.bool_or("tie_word_embeddings", true)?,
        activation: Activation::read(config, "hidden_activation", Activation::GeluTanh)?,
        score_divisor: score_divisor(config)?,
        score_cap: soft_cap(config, "attn_logit_softcapping", Some(50.0))?,
        logit_cap: soft_cap(config, "final_logit_softcapping", Some(30.0))?,
        windows: read_windows(config, sizes.n_layers, 2, 4096)?,
        sliding_rope: rope.clone(),
        rope,
        post_norms: true,
        head_norms: false,
        sizes,
    })
}

impl Architecture for Gemma2 {
    fn probe(&self, config: &Config<'_>) -> Probe {
        match check_variant(config) {
            Ok(()) => Probe::fits(100, "model_type"),
            Err(error) => Probe::refused(error.to_string()),
        }
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        Ok(read(config)?.describe("gemma2"))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt(summary, gguf::Kind::Gemma2)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let model = Decoder::load(&read(config)?, &weights.at("model"), &weights.at("lm_head"))?;
        Ok(Box::new(model))
    }
}
