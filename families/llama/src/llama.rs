//! `llama` and `mistral`, and everything published under these two model types: tied or own head,
//! biases, explicit head width, scaled rotary embeddings, sliding windows.

use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults};
use crate::gguf;
use crate::model::{Places, gated_mlp, load_plain};

struct Llama;

architecture! {
    Llama,
    id: "llama", display_name: "Llama", category: "dense", task: "text-generation",
    model_types: ["llama", "mistral"], gguf: ["llama"],
    aliases: ["Llama 2", "Llama 3", "Llama 3.1", "Llama 3.2", "Mistral 7B", "SmolLM", "SmolLM2", "TinyLlama", "Yi"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

/// What `MistralConfig` of transformers has where a configuration does not say.
pub(crate) const MISTRAL_WINDOW: usize = 4096;
pub(crate) const MISTRAL_CONTEXT: usize = 131_072;

fn read(config: &Config<'_>) -> Result<DecoderConfig> {
    let window = config.opt_str("model_type")? == Some("mistral");
    DecoderConfig::read(
        config,
        &Defaults {
            window,
            default_window: window.then_some(MISTRAL_WINDOW),
            context: window.then_some(MISTRAL_CONTEXT),
            ..Defaults::default()
        },
    )
}

impl Architecture for Llama {
    fn probe(&self, config: &Config<'_>) -> Probe {
        if let Some(key) = config.spelled(&["vision_config", "audio_config"]) {
            return Probe::refused(format!(
                "the config has \"{key}\": this is the text-only architecture"
            ));
        }
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        Ok(read(config)?.describe("llama"))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt(
            summary,
            gguf::Kind::Dense {
                model_type: "llama",
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
