//! `deepseek_v32`: the third generation with sparse attention. A small indexer scores every
//! position for every row; the row attends to the best `index_topk` of them.

use mlxcel_sdk::Index;
use mlxcel_sdk::nn::{LayerNorm, Linear, Mixer, Rope};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, only_interleaved, only_layers, probe_text};
use crate::deepseek_v3::read_experts;
use crate::experts::MoeConfig;
use crate::latent::{LatentAttention, LatentConfig};
use crate::model;

struct DeepseekV32;

architecture! {
    DeepseekV32,
    id: "deepseek_v32", display_name: "DeepSeek-V3.2", category: "moe", task: "text-generation",
    model_types: ["deepseek_v32"], gguf: [], aliases: ["DeepSeek-V3.2-Exp", "DeepSeek-V3.2"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

/// Settings of the indexer.
#[derive(Debug, Clone)]
struct IndexerConfig {
    heads: usize,
    width: usize,
    top_k: usize,
    /// Rotated pairs are neighbours; halves are the rule here, unlike in the attention itself.
    interleaved: bool,
}

fn read(config: &Config<'_>) -> Result<(DecoderConfig, LatentConfig, IndexerConfig, MoeConfig)> {
    let decoder = DecoderConfig::read(config, 163_840)?;
    only_layers(config, decoder.n_layers, "indexed_attention")?;
    only_interleaved(config)?;
    let attention = LatentConfig::read(config, &decoder)?;
    if attention.q_rank.is_none() {
        return Err(config.error(
            "q_lora_rank",
            "an integer: the indexer reads compressed queries",
        ));
    }
    let indexer = IndexerConfig {
        heads: config.uint_in("index_n_heads", 1..=4096)?,
        width: config.uint_in("index_head_dim", 1..=65_536)?,
        top_k: config.uint("index_topk")?,
        interleaved: config.bool_or("indexer_rope_interleave", false)?,
    };
    if indexer.width < attention.rotated {
        let expected = format!("at least qk_rope_head_dim ({})", attention.rotated);
        return Err(config.error("index_head_dim", expected));
    }
    let moe = read_experts(config, &decoder)?;
    Ok((decoder, attention, indexer, moe))
}

impl Architecture for DeepseekV32 {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let (decoder, attention, indexer, moe) = read(config)?;
        let cache = CacheDesc::Latent {
            k_dim: attention.k_dim(),
            v_dim: attention.rank,
            index_dim: Some(indexer.width),
        };
        let index_width = (indexer.heads + 1) * (indexer.width + 1) + indexer.top_k;
        let width = attention.activation_width() + index_width;
        Ok(decoder.describe("deepseek_v32", &cache, width, moe.widest()))
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let (decoder, attention, indexer, moe) = read(config)?;
        let mixer = |layer: usize, at: &Weights| {
            let hidden = decoder.hidden;
            let mixer = SparseAttention {
                indexer: Indexer::load(&at.at("indexer"), layer, hidden, &indexer, &attention)?,
                attention: LatentAttention::load(at, layer, hidden, &attention)?,
            };
            Ok(Box::new(mixer) as Box<dyn Mixer>)
        };
        let model = model::load(&decoder, weights, mixer, |layer, at| {
            moe.load_layer(layer, at, &decoder)
        })?;
        Ok(Box::new(model))
    }
}

/// Scores positions: `sum_h w_h relu(q_h . k)` (DeepSeek-V3.2, equation 1).
struct Indexer {
    layer: usize,
    config: IndexerConfig,
    queries: Linear,
    keys: Linear,
    norm: LayerNorm,
    head_weights: Linear,
    rope: Rope,
}

impl Indexer {
    fn load(
        weights: &Weights,
        layer: usize,
        hidden: usize,
        config: &IndexerConfig,
        attention: &LatentConfig,
    ) -> Result<Self> {
        const NORM_EPS: f32 = 1e-6;
        let (heads, width) = (config.heads, config.width);
        let q_rank = attention.q_rank.unwrap_or(0);
        let linear = |name: &str, inputs: usize, outputs: usize| {
            Linear::load(&weights.at(name), inputs, outputs, false)
        };
        Ok(Self {
            layer,
            config: config.clone(),
            queries: linear("wq_b", q_rank, heads * width)?,
            keys: linear("wk", hidden, width)?,
            norm: LayerNorm::load(&weights.at("k_norm"), width, NORM_EPS)?,
            head_weights: linear("weights_proj", hidden, heads)?,
            // The first features of a key are rotated, as many as in the attention.
            rope: Rope::new(weights, &attention.rope, width, config.interleaved)?,
        })
    }

    /// Positions for rows `[T, H]` with compressed queries `[T, q_rank]`: `[T, top_k]`.
    fn select(&self, x: &Tensor, q_compressed: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let (heads, width) = (self.config.heads as i64, self.config.width as i64);
        let rotate = |t: Tensor, n: i64| {
            self.rope
                .forward(&t.reshape(&[-1, n, width])?, &step.positions)
        };
        let q = rotate(self.queries.forward(q_compressed)?, heads)?; // [T, heads, width]
        let k = rotate(self.norm.forward(&self.keys.forward(x)?)?, 1)?; // [T, 1, width]
        let weights = self.head_weights.forward(x)?; // [T, heads]
        let inputs = Index {
            q: &q,
            k: &k.reshape(&[-1, width])?,
            weights: &weights.mul_scalar((heads as f64).sqrt().recip())?,
            top_k: self.config.top_k,
            scale: (width as f32).sqrt().recip(),
        };
        step.index(self.layer, &inputs)
    }
}

/// Latent attention to what the indexer chooses.
struct SparseAttention {
    attention: LatentAttention,
    indexer: Indexer,
}

impl Mixer for SparseAttention {
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        self.attention.forward_selecting(x, step, |q_compressed| {
            self.indexer.select(x, q_compressed, step).map(Some)
        })
    }
}
