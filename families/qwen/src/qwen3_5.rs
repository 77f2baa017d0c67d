//! `qwen3_5`: the hybrid with dense blocks, alone or as the text half of the published multimodal model.

use mlxcel_sdk::nn::{FeedForward, GatedMlp};
use mlxcel_sdk::prelude::*;

use crate::hybrid;
use crate::hybrid_config::{HybridConfig, Layout};
use crate::hybrid_gguf;

struct Qwen35;

architecture! {
    Qwen35,
    id: "qwen3_5", display_name: "Qwen3.5", category: "dense", task: "text-generation",
    model_types: ["qwen3_5", "qwen3_5_text"], gguf: ["qwen35"], aliases: ["Qwen3.5"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

/// Runs `read` on the text model's settings, wherever they are; what it is given besides is whether
/// embeddings are tied unless those settings say so. Nested settings call themselves one of `model_types`.
pub(crate) fn of_text<T>(
    config: &Config<'_>,
    model_types: [&str; 2],
    read: impl FnOnce(&Config<'_>, bool) -> Result<T>,
) -> Result<T> {
    let tied = config.bool_or("tie_word_embeddings", false)?;
    match config.text_section("text_config", &model_types)? {
        Some(text) => read(&text, tied),
        None => read(config, tied),
    }
}

/// Fits the text model alone, and the multimodal one of which only the text half is run.
pub(crate) fn probe_text_half(config: &Config<'_>) -> Probe {
    let classes = match config.opt_strs("architectures") {
        Ok(classes) => classes.unwrap_or_default(),
        Err(error) => return Probe::refused(error.to_string()),
    };
    let known = ["ForCausalLM", "ForConditionalGeneration"];
    let other = classes
        .iter()
        .find(|class| !known.iter().any(|suffix| class.ends_with(suffix)));
    match other {
        Some(class) => Probe::refused(format!(
            "architectures has \"{class}\": only models for text generation are supported"
        )),
        None => Probe::fits(100, "model_type"),
    }
}

fn read(config: &Config<'_>) -> Result<(HybridConfig, usize)> {
    of_text(config, ["qwen3_5_text", "qwen3_5"], |text, tied| {
        Ok((
            HybridConfig::read(text, tied, Layout::Apart)?,
            text.uint("intermediate_size")?,
        ))
    })
}

impl Architecture for Qwen35 {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text_half(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let (hybrid, inner) = read(config)?;
        Ok(hybrid.describe("qwen3_5", inner))
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        hybrid_gguf::adapt(summary, hybrid_gguf::Hybrid::Dense35)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let (hybrid, inner) = read(config)?;
        let (hidden, activation) = (hybrid.hidden, hybrid.activation);
        let model = hybrid::load(&hybrid, weights, |_, at| {
            let mlp = GatedMlp::load(&at.at("mlp"), hidden, inner, false, activation)?;
            Ok(Box::new(mlp) as Box<dyn FeedForward>)
        })?;
        Ok(Box::new(model))
    }
}
