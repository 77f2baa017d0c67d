//! `qwen3`: an RMS norm on every query and key head in place of biases, a head width of its own,
//! and sliding windows as in `qwen2`.

use mlxcel_sdk::nn::{FeedForward, GatedMlp};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Line, probe_text};
use crate::gguf::{self, Kind};
use crate::model;
use crate::windows::WindowRule;

struct Qwen3;

architecture! {
    Qwen3,
    id: "qwen3", display_name: "Qwen3", category: "dense", task: "text-generation",
    model_types: ["qwen3"], gguf: ["qwen3"], aliases: ["Qwen3"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

/// `Qwen3Config`'s own default, whatever the hidden size.
const DEFAULT_HEAD_DIM: usize = 128;

struct Qwen3Config {
    decoder: DecoderConfig,
    inner: usize,
}

fn read(config: &Config<'_>) -> Result<Qwen3Config> {
    let bias = config.bool_or("attention_bias", false)?;
    let line = Line {
        qkv_bias: bias,
        out_bias: bias,
        head_norms: true,
        default_head_dim: Some(DEFAULT_HEAD_DIM),
        windows: WindowRule::FromLayer,
    };
    Ok(Qwen3Config {
        decoder: DecoderConfig::read(config, &line)?,
        inner: config.uint("intermediate_size")?,
    })
}

impl Architecture for Qwen3 {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let Qwen3Config { decoder, inner } = read(config)?;
        Ok(decoder.describe("qwen3", inner))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt(summary, Kind::Qwen3)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let Qwen3Config { decoder, inner } = read(config)?;
        let model = model::load(&decoder, weights, |_, layer| {
            let (at, hidden) = (layer.at("mlp"), decoder.hidden);
            let mlp = GatedMlp::load(&at, hidden, inner, false, decoder.activation)?;
            Ok(Box::new(mlp) as Box<dyn FeedForward>)
        })?;
        Ok(Box::new(model))
    }
}
