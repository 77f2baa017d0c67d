//! `qwen2`: biases on the query, key and value projections, tied or own head, and sliding windows
//! in the layers from `max_window_layers` on. Qwen1.5, Qwen2 and Qwen2.5 have this type.

use mlxcel_sdk::nn::{FeedForward, GatedMlp};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Line, probe_text};
use crate::gguf::{self, Kind};
use crate::model;
use crate::windows::WindowRule;

struct Qwen2;

architecture! {
    Qwen2,
    id: "qwen2", display_name: "Qwen2", category: "dense", task: "text-generation",
    model_types: ["qwen2"], gguf: ["qwen2"],
    aliases: ["Qwen1.5", "Qwen2", "Qwen2.5", "Qwen2.5-Coder", "QwQ", "DeepSeek-R1-Distill-Qwen"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

struct Qwen2Config {
    decoder: DecoderConfig,
    inner: usize,
}

fn read(config: &Config<'_>) -> Result<Qwen2Config> {
    let line = Line {
        qkv_bias: true,
        out_bias: false,
        head_norms: false,
        default_head_dim: None,
        windows: WindowRule::FromLayer,
    };
    Ok(Qwen2Config {
        decoder: DecoderConfig::read(config, &line)?,
        inner: config.uint("intermediate_size")?,
    })
}

impl Architecture for Qwen2 {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let Qwen2Config { decoder, inner } = read(config)?;
        Ok(decoder.describe("qwen2", inner))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt(summary, Kind::Qwen2)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let Qwen2Config { decoder, inner } = read(config)?;
        let model = model::load(&decoder, weights, |_, layer| {
            let (at, hidden) = (layer.at("mlp"), decoder.hidden);
            let mlp = GatedMlp::load(&at, hidden, inner, false, decoder.activation)?;
            Ok(Box::new(mlp) as Box<dyn FeedForward>)
        })?;
        Ok(Box::new(model))
    }
}
