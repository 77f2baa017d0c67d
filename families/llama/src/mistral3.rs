//! `mistral3`: the text part of checkpoints with a vision encoder (Mistral Small 3.1 and later,
//! Ministral 3). Its settings are in `text_config`, its weights below `language_model`; the encoder
//! and its projector are not loaded, and images are not taken.

use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults};
use crate::llama::{MISTRAL_CONTEXT, MISTRAL_WINDOW};
use crate::ministral3::Ministral3Config;
use crate::model::{Places, gated_mlp, load_plain};

struct Mistral3;

architecture! {
    Mistral3,
    id: "mistral3", display_name: "Mistral Small 3.1 (text)", category: "dense", task: "text-generation",
    model_types: ["mistral3"], gguf: [], aliases: ["Mistral Small 3.1", "Mistral Small 3.2", "Ministral 3 Instruct"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

/// Modules of a checkpoint that only images need.
const OTHER_PARTS: [&str; 2] = ["vision_tower", "multi_modal_projector"];

/// The decoder that `text_config` describes.
enum Text {
    Mistral(DecoderConfig),
    Ministral3(Ministral3Config),
}

impl Text {
    fn read(config: &Config<'_>) -> Result<Self> {
        let Some(text) = config.section("text_config")? else {
            return Err(config.error("text_config", "an object with the decoder's settings"));
        };
        let mut text_part = match text.opt_str("model_type")?.unwrap_or("mistral") {
            "mistral" => Self::Mistral(DecoderConfig::read(
                &text,
                &Defaults {
                    window: true,
                    default_window: Some(MISTRAL_WINDOW),
                    context: Some(MISTRAL_CONTEXT),
                    head_dim: Some(128),
                    ..Defaults::default()
                },
            )?),
            "ministral3" => Self::Ministral3(Ministral3Config::read(&text)?),
            _ => {
                let supported = "text decoders of mistral3 are mistral and ministral3";
                return Err(text.unsupported("model_type", supported));
            }
        };
        // The flag inside is the decoder's own; the one outside is the whole model's.
        if text.get("tie_word_embeddings").is_none() {
            text_part.decoder_mut().tied = config.bool_or("tie_word_embeddings", false)?;
        }
        Ok(text_part)
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        match self {
            Self::Mistral(decoder) => decoder,
            Self::Ministral3(config) => &mut config.decoder,
        }
    }

    fn decoder(&self) -> &DecoderConfig {
        match self {
            Self::Mistral(decoder) => decoder,
            Self::Ministral3(config) => &config.decoder,
        }
    }
}

impl Architecture for Mistral3 {
    fn probe(&self, config: &Config<'_>) -> Probe {
        match config.section("text_config") {
            Ok(Some(text)) => match text.get("model_type").map(|kind| (kind.as_str(), kind)) {
                None | Some((Some("mistral" | "ministral3"), _)) => Probe::fits(100, "model_type"),
                Some((_, kind)) => Probe::refused(format!(
                    "text_config.model_type is {kind}, the decoders known here are mistral and ministral3"
                )),
            },
            _ => Probe::fits(50, "model_type, without a text_config"),
        }
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        Ok(Text::read(config)?.decoder().describe("mistral3"))
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let places = Places::nested(weights, &OTHER_PARTS);
        let model = match Text::read(config)? {
            Text::Mistral(decoder) => {
                load_plain(&decoder, &places, |layer| gated_mlp(&decoder, layer))?
            }
            Text::Ministral3(config) => config.load(&places)?,
        };
        Ok(Box::new(model))
    }
}
