//! `arcee`: the llama decoder with a feed-forward block of two matrices and a squared ReLU.

use mlxcel_sdk::nn::{FeedForward, Linear, RmsNorm, project};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults};
use crate::model::{Places, load_plain};

struct Arcee;

architecture! {
    Arcee,
    id: "arcee", display_name: "Arcee", category: "dense", task: "text-generation",
    model_types: ["arcee"], gguf: [], aliases: ["AFM 4.5B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

fn read(config: &Config<'_>) -> Result<DecoderConfig> {
    match config.opt_str("hidden_act")? {
        None | Some("relu2") => {}
        Some(_) => {
            return Err(config.unsupported("hidden_act", "this architecture is known with relu2"));
        }
    }
    DecoderConfig::read(
        config,
        &Defaults {
            own_feed_forward: true,
            eps: Some(1e-5),
            context: Some(4096),
            ..Defaults::default()
        },
    )
}

/// `down(relu(up(x))^2)`.
struct SquaredReluMlp {
    up: Linear,
    down: Linear,
}

impl SquaredReluMlp {
    fn load(at: &Weights, config: &DecoderConfig) -> Result<Self> {
        let (hidden, inner, bias) = (config.hidden, config.inner, config.mlp_bias);
        Ok(Self {
            up: Linear::load_outputs(&at.at("up_proj"), hidden, inner, bias)?,
            down: Linear::load_inputs(&at.at("down_proj"), inner, hidden, bias)?,
        })
    }
}

impl FeedForward for SquaredReluMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.up.forward(x)?.relu_squared()?)
    }

    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        let [up] = project(x, Some(norm), [&self.up])?;
        self.down.forward_onto(&up.relu_squared()?, x)
    }
}

impl Architecture for Arcee {
    fn probe(&self, _config: &Config<'_>) -> Probe {
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        Ok(read(config)?.describe("arcee"))
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let config = read(config)?;
        let model = load_plain(&config, &Places::text(weights), |layer| {
            Ok(Box::new(SquaredReluMlp::load(&layer.at("mlp"), &config)?) as Box<dyn FeedForward>)
        })?;
        Ok(Box::new(model))
    }
}
