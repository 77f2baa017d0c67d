//! `ministral3`: the mistral decoder with yarn rotary embedding and queries that grow sharper beyond
//! the original context (`llama_4_scaling_beta`).

use mlxcel_sdk::nn::{Decoder, DecoderLayer};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults};
use crate::gguf;
use crate::model::{Places, gated_mlp, load_rope};
use crate::tempered::{Temperature, TemperedAttention, TemperedConfig};

struct Ministral3;

architecture! {
    Ministral3,
    id: "ministral3", display_name: "Ministral 3", category: "dense", task: "text-generation",
    model_types: ["ministral3"], gguf: ["mistral3"], aliases: ["Ministral 3 3B", "Ministral 3 8B", "Ministral 3 14B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

/// A decoder and the temperature of its queries.
pub(crate) struct Ministral3Config {
    pub decoder: DecoderConfig,
    temperature: Option<Temperature>,
}

impl Ministral3Config {
    pub(crate) fn read(config: &Config<'_>) -> Result<Self> {
        let decoder = DecoderConfig::read(
            config,
            &Defaults {
                window: true,
                eps: Some(1e-5),
                context: Some(262_144),
                head_dim: Some(128),
                ..Defaults::default()
            },
        )?;
        let key = config.spelled(&["rope_parameters", "rope_scaling"]);
        let key = key.unwrap_or("rope_parameters");
        let Some(settings) = config.section(key)? else {
            let expected =
                "an object: without it the rotary embedding of this architecture is unknown";
            return Err(config.error(key, expected));
        };
        let temperature = match settings.opt_float("llama_4_scaling_beta", 0.0..=1e3)? {
            Some(scale) if scale > 0.0 => Some(Temperature {
                scale,
                length: settings.float_in("original_max_position_embeddings", 1.0..=1e9)?,
                offset: 0.0,
            }),
            _ => None,
        };
        Ok(Self {
            decoder,
            temperature,
        })
    }

    pub(crate) fn load(&self, places: &Places) -> Result<Decoder> {
        let decoder = &self.decoder;
        let rope = load_rope(decoder, &places.model)?;
        let shape = decoder.shape();
        Decoder::load(&shape, &places.model, &places.head, |index, layer| {
            let attention = TemperedConfig {
                layer: index,
                hidden: decoder.hidden,
                heads: decoder.heads,
                kv_heads: decoder.kv_heads,
                head_dim: decoder.head_dim,
                bias: decoder.attention_bias,
                qk_norm_eps: None,
                temperature: self.temperature,
                chunk: None,
            };
            let at = layer.at("self_attn");
            let attention = TemperedAttention::load(&at, attention, Some(rope.clone()))?;
            let mlp = gated_mlp(decoder, layer)?;
            DecoderLayer::load(layer, &shape, Box::new(attention), mlp)
        })
    }
}

impl Architecture for Ministral3 {
    fn probe(&self, config: &Config<'_>) -> Probe {
        if config.spelled(&["vision_config"]).is_some() {
            return Probe::refused(
                "the config has \"vision_config\": this is the text-only architecture",
            );
        }
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        Ok(Ministral3Config::read(config)?
            .decoder
            .describe("ministral3"))
    }

    /// llama.cpp calls the text decoder of every `mistral3` checkpoint so, with or without a
    /// temperature.
    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        let model_type = "ministral3";
        let mut adapter = gguf::adapt(summary, gguf::Kind::Dense { model_type })?;
        if !adapter.config.contains_key("rope_scaling") {
            adapter.set("rope_scaling", serde_json::json!({"rope_type": "default"}));
        }
        Ok(adapter)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let model = Ministral3Config::read(config)?.load(&Places::text(weights))?;
        Ok(Box::new(model))
    }
}
