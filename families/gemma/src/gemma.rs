//! `gemma`: the first generation. One norm before each half of a block, full attention.

use mlxcel_sdk::nn::{Activation, RopeConfig};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults, Sizes, check_variant};
use crate::gguf;
use crate::layers::{FULL, read_windows};
use crate::model::Decoder;

struct Gemma;

architecture! {
    Gemma,
    id: "gemma", display_name: "Gemma", category: "dense", task: "text-generation",
    model_types: ["gemma"], gguf: ["gemma"], aliases: ["Gemma 2B", "Gemma 7B", "CodeGemma"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

const DEFAULTS: Defaults = Defaults {
    vocab: 256_000,
    heads: 16,
    kv_heads: 16,
    context: 8192,
};

/// Published files say `gelu` and mean its tanh approximation, which the models were trained with.
fn read_activation(config: &Config<'_>) -> Result<Activation> {
    let read = |key: &str| -> Result<Activation> {
        Ok(match Activation::read(config, key, Activation::GeluTanh)? {
            Activation::Gelu => Activation::GeluTanh,
            other => other,
        })
    };
    let activation = read("hidden_act")?;
    // A later spelling, which files have beside the first: nothing says which counts if they differ.
    if config.get("hidden_activation").is_some() && read("hidden_activation")? != activation {
        return Err(config.error("hidden_activation", "the same activation as hidden_act"));
    }
    Ok(activation)
}

fn read(config: &Config<'_>) -> Result<DecoderConfig> {
    check_variant(config)?;
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let rope = RopeConfig::read_whole(config, sizes.head_dim)?;
    Ok(DecoderConfig {
        tied: config.bool_or("tie_word_embeddings", true)?,
        activation: read_activation(config)?,
        score_divisor: sizes.head_dim as f64,
        score_cap: None,
        logit_cap: None,
        windows: read_layers(config, sizes.n_layers)?,
        sliding_rope: rope.clone(),
        rope,
        post_norms: false,
        head_norms: false,
        sizes,
    })
}

/// No layer slides, whether the file says so or not.
fn read_layers(config: &Config<'_>, n_layers: usize) -> Result<Vec<Option<usize>>> {
    let windows = read_windows(config, n_layers, 1, 4096)?;
    match windows.iter().position(Option::is_some) {
        None => Ok(windows),
        Some(layer) => {
            let supported = format!("layers of this architecture are all {FULL}");
            Err(config.unsupported_entry("layer_types", layer, supported))
        }
    }
}

impl Architecture for Gemma {
    fn probe(&self, config: &Config<'_>) -> Probe {
        match check_variant(config) {
            Ok(()) => Probe::fits(100, "model_type"),
            Err(error) => Probe::refused(error.to_string()),
        }
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        Ok(read(config)?.describe("gemma"))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt(summary, gguf::Kind::Gemma)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let model = Decoder::load(&read(config)?, &weights.at("model"), &weights.at("lm_head"))?;
        Ok(Box::new(model))
    }
}
