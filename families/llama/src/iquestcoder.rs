//! `iquestcoder`: llama under another name, with heads of 128 features unless told. Options that the
//! original code has and no released checkpoint uses are refused by name.

use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults};
use crate::model::{Places, gated_mlp, load_plain};

struct IQuestCoder;

architecture! {
    IQuestCoder,
    id: "iquestcoder", display_name: "IQuest-Coder", category: "dense", task: "text-generation",
    model_types: ["iquestcoder"], gguf: [], aliases: ["IQuest-Coder-V1 7B", "IQuest-Coder-V1 40B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

fn read(config: &Config<'_>) -> Result<DecoderConfig> {
    if config.get("clip_qkv").is_some() {
        return Err(config.unsupported("clip_qkv", "queries, keys and values are not clipped here"));
    }
    if config.bool_or("use_sliding_window", false)? {
        return Err(config.unsupported("use_sliding_window", "every layer sees the whole context"));
    }
    DecoderConfig::read(
        config,
        &Defaults {
            head_dim: Some(128),
            ..Defaults::default()
        },
    )
}

impl Architecture for IQuestCoder {
    fn probe(&self, _config: &Config<'_>) -> Probe {
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        Ok(read(config)?.describe("iquestcoder"))
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let config = read(config)?;
        let model = load_plain(&config, &Places::text(weights), |layer| {
            gated_mlp(&config, layer)
        })?;
        Ok(Box::new(model))
    }
}
