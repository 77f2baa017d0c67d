//! `smollm3`: llama with no rotary embedding in every n-th layer (NoPE).

use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults};
use crate::gguf;
use crate::model::{Places, gated_mlp, load_plain};

struct SmolLm3;

architecture! {
    SmolLm3,
    id: "smollm3", display_name: "SmolLM3", category: "dense", task: "text-generation",
    model_types: ["smollm3"], gguf: ["smollm3"], aliases: ["SmolLM3 3B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

fn read(config: &Config<'_>) -> Result<DecoderConfig> {
    let window = config.bool_or("use_sliding_window", false)?;
    let defaults = Defaults {
        tied: true,
        window,
        rope_base: Some(2e6),
        context: Some(32_768),
        ..Defaults::default()
    };
    let mut decoder = DecoderConfig::read(config, &defaults)?;
    let n_layers = decoder.layers.len();
    // transformers' SmolLM3Config: 1 means that the layer has the embedding, and without a list
    // every `no_rope_layer_interval`-th layer has none.
    let rope: Vec<bool> = match config.opt_uints("no_rope_layers")? {
        Some(list) if list.len() == n_layers => list.iter().map(|&flag| flag != 0).collect(),
        Some(_) => {
            return Err(config.error(
                "no_rope_layers",
                format!("one entry for each of {n_layers} layers"),
            ));
        }
        None => {
            let interval = config.uint_or("no_rope_layer_interval", 4)?;
            (1..=n_layers)
                .map(|layer| !layer.is_multiple_of(interval))
                .collect()
        }
    };
    for (layer, rope) in decoder.layers.iter_mut().zip(rope) {
        layer.rope = rope;
    }
    Ok(decoder)
}

impl Architecture for SmolLm3 {
    fn probe(&self, _config: &Config<'_>) -> Probe {
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        Ok(read(config)?.describe("smollm3"))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt(
            summary,
            gguf::Kind::Dense {
                model_type: "smollm3",
            },
        )
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let config = read(config)?;
        let model = load_plain(&config, &Places::text(weights), |layer| {
            gated_mlp(&config, layer)
        })?;
        Ok(Box::new(model))
    }
}
