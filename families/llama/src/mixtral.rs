//! `mixtral`: the llama decoder with a mixture of experts in place of the feed-forward block.

use mlxcel_sdk::nn::{Activation, Experts, FeedForward, RmsNorm, TopKRouter};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults};
use crate::gguf;
use crate::model::{Places, load_plain};

struct Mixtral;

architecture! {
    Mixtral,
    id: "mixtral", display_name: "Mixtral", category: "moe", task: "text-generation",
    model_types: ["mixtral"], gguf: ["llama"], aliases: ["Mixtral 8x7B", "Mixtral 8x22B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

struct MixtralConfig {
    decoder: DecoderConfig,
    n_experts: usize,
    top_k: usize,
}

fn read(config: &Config<'_>) -> Result<MixtralConfig> {
    let decoder = DecoderConfig::read(
        config,
        &Defaults {
            window: true,
            rope_base: Some(1e6),
            eps: Some(1e-5),
            context: Some(131_072),
            ..Defaults::default()
        },
    )?;
    let n_experts = match config.spelled(&["num_local_experts", "num_experts"]) {
        Some(key) => config.uint_in(key, 1..=4096)?,
        None => 8,
    };
    let top_k = config
        .opt_uint("num_experts_per_tok", 1..=4096)?
        .unwrap_or(2);
    if top_k > n_experts {
        return Err(config.error(
            "num_experts_per_tok",
            format!("at most the number of experts ({n_experts})"),
        ));
    }
    Ok(MixtralConfig {
        decoder,
        n_experts,
        top_k,
    })
}

/// Router and experts. The chosen scores are renormalised to sum to 1.
struct SparseMlp {
    router: TopKRouter,
    experts: Experts,
}

impl SparseMlp {
    fn load(layer: &Weights, config: &MixtralConfig) -> Result<Self> {
        // Published checkpoints say block_sparse_moe; newer exports call the same module mlp.
        let block = ["block_sparse_moe", "mlp"].map(|name| layer.at(name));
        let at = if block[0].exists() {
            &block[0]
        } else {
            &block[1]
        };
        let (hidden, inner) = (config.decoder.hidden, config.decoder.inner);
        let activation: Activation = config.decoder.activation;
        Ok(Self {
            router: TopKRouter::load(&at.at("gate"), hidden, config.n_experts, config.top_k, true)?,
            experts: Experts::load(
                &at.at("experts"),
                &at.at("switch_mlp"),
                ["w1", "w3", "w2"],
                config.n_experts,
                hidden,
                inner,
                activation,
            )?,
        })
    }
}

impl FeedForward for SparseMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.experts.forward(x, &self.router.forward(x)?)
    }

    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        let normed = norm.forward(x)?;
        let routing = self.router.forward(&normed)?;
        self.experts.forward_onto(&normed, &routing, x)
    }
}

impl Architecture for Mixtral {
    fn probe(&self, _config: &Config<'_>) -> Probe {
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let config = read(config)?;
        let mut desc = config.decoder.describe("mixtral");
        desc.activation_width = 2 * config.decoder.hidden + 3 * config.top_k * config.decoder.inner;
        Ok(desc)
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt(summary, gguf::Kind::Mixtral)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let config = read(config)?;
        let model = load_plain(&config.decoder, &Places::text(weights), |layer| {
            Ok(Box::new(SparseMlp::load(layer, &config)?) as Box<dyn FeedForward>)
        })?;
        Ok(Box::new(model))
    }
}
