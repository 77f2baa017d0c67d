//! `iquestloopcoder`: a llama decoder whose layers run twice. In the second round a query attends
//! twice, over the first round's keys of the whole context and over its own round's keys of a short
//! window, and a gate per head mixes the two. After `iquestloopcoder.py` of mlx-lm.

use mlxcel_sdk::nn::{Embedding, GatedMlp, Linear, LmHead, RmsNorm, Rope, project};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, Defaults};
use crate::model::load_rope;

struct IQuestLoopCoder;

architecture! {
    IQuestLoopCoder,
    id: "iquestloopcoder", display_name: "IQuest-Coder Loop", category: "dense", task: "text-generation",
    model_types: ["iquestloopcoder"], gguf: [], aliases: ["IQuest-Coder-V1 40B Loop"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

struct LoopConfig {
    decoder: DecoderConfig,
    /// Keys of its own round that a row of the second round sees, itself included.
    window: usize,
}

fn read(config: &Config<'_>) -> Result<LoopConfig> {
    if config.uint_or("loop_num", 2)? != 2 {
        return Err(config.unsupported("loop_num", "layers run exactly twice"));
    }
    Ok(LoopConfig {
        decoder: DecoderConfig::read(
            config,
            &Defaults {
                rope_base: Some(5e5),
                ..Defaults::default()
            },
        )?,
        window: config.uint_or("loop_window_size", 64)?,
    })
}

/// Weight `[H, D]` and bias `[H]` of the gate of a layer: `sigmoid(q . w + b)` per row and head.
struct Gate {
    weight: Tensor,
    bias: Tensor,
}

impl Gate {
    fn load(at: &Weights, heads: usize, head_dim: usize) -> Result<Self> {
        Ok(Self {
            weight: at.tensor("weight", &[heads as i64, head_dim as i64])?,
            bias: at.tensor("bias", &[heads as i64])?,
        })
    }

    /// `[T, H, D]` to `[T, H, 1]`.
    fn forward(&self, q: &Tensor) -> Result<Tensor> {
        let logits = q.mul(&self.weight)?.sum(&[-1], false)?;
        logits.add(&self.bias)?.sigmoid()?.unsqueeze(2)
    }
}

struct Layer {
    input_norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    post_norm: RmsNorm,
    mlp: GatedMlp,
    gate: Gate,
}

/// Rotated queries and keys, and values, of one layer in one round.
struct Qkv {
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

struct LoopDecoder {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    embedding: Embedding,
    rope: Rope,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: LmHead,
}

impl LoopDecoder {
    fn load(config: &DecoderConfig, weights: &Weights) -> Result<Self> {
        let DecoderConfig {
            hidden,
            heads,
            kv_heads,
            head_dim,
            eps,
            attention_bias: bias,
            ..
        } = *config;
        let model = weights.at("model");
        model.ignore_suffix("rotary_emb.inv_freq");
        let embedding = Embedding::load(&model.at("embed_tokens"), config.vocab, hidden)?;
        let layers = (0..config.layers.len()).map(|index| {
            let at = model.at("layers").at_index(index);
            let attention = at.at("self_attn");
            let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
            Ok(Layer {
                input_norm: RmsNorm::load(&at.at("input_layernorm"), hidden, eps)?,
                q: Linear::load(&attention.at("q_proj"), hidden, q_width, bias)?,
                k: Linear::load(&attention.at("k_proj"), hidden, kv_width, bias)?,
                v: Linear::load(&attention.at("v_proj"), hidden, kv_width, bias)?,
                o: Linear::load(&attention.at("o_proj"), q_width, hidden, bias)?,
                post_norm: RmsNorm::load(&at.at("post_attention_layernorm"), hidden, eps)?,
                mlp: GatedMlp::load(
                    &at.at("mlp"),
                    hidden,
                    config.inner,
                    config.mlp_bias,
                    config.activation,
                )?,
                gate: Gate::load(
                    &model.at("gate_projections").at_index(index),
                    heads,
                    head_dim,
                )?,
            })
        });
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
            rope: load_rope(config, &model)?,
            layers: layers.collect::<Result<Vec<_>>>()?,
            norm: RmsNorm::load(&model.at("norm"), hidden, eps)?,
            head: LmHead::load(
                &weights.at("lm_head"),
                &embedding,
                config.tied,
                config.vocab,
                hidden,
            )?,
            embedding,
        })
    }

    fn qkv(&self, layer: &Layer, x: &Tensor, step: &Step<'_>) -> Result<Qkv> {
        let norm = Some(&layer.input_norm);
        let [q, k, v] = project(x, norm, [&layer.q, &layer.k, &layer.v])?;
        let split = |t: Tensor, n: usize| t.reshape(&[-1, n as i64, self.head_dim as i64]);
        Ok(Qkv {
            q: self.rope.forward(&split(q, self.heads)?, &step.positions)?,
            k: (self.rope).forward(&split(k, self.kv_heads)?, &step.positions)?,
            v: split(v, self.kv_heads)?,
        })
    }

    /// Adds what was attended and the feed-forward block to the residual stream.
    fn finish(&self, layer: &Layer, x: &Tensor, attended: &Tensor) -> Result<Tensor> {
        let width = (self.heads * self.head_dim) as i64;
        let x = layer.o.forward_onto(&attended.reshape(&[-1, width])?, x)?;
        layer.mlp.forward_onto(&x, &layer.post_norm)
    }
}

impl Model for LoopDecoder {
    fn forward(&self, step: &Step<'_>) -> Result<Tensor> {
        let options = AttendOptions {
            scale: (self.head_dim as f32).sqrt().recip(),
            ..AttendOptions::default()
        };
        let mut x = self.embedding.forward(&step.tokens)?; // [T, hidden]
        for (index, layer) in self.layers.iter().enumerate() {
            let Qkv { q, k, v } = self.qkv(layer, &x, step)?;
            let attended = step.attend(index, &q, &k, &v, &options)?; // [T, H, D]
            x = self.finish(layer, &x, &attended)?;
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let Qkv { q, k, v } = self.qkv(layer, &x, step)?;
            let gate = layer.gate.forward(&q)?; // [T, H, 1]
            let global = step.attend_shared(index, &q, &options)?;
            let local = step.attend(self.layers.len() + index, &q, &k, &v, &options)?;
            let mixed = local.add(&global.sub(&local)?.mul(&gate)?)?;
            x = self.finish(layer, &x, &mixed)?;
        }
        let rows = step.logit_rows(&x)?; // [R, hidden]
        self.head.forward_normed(&rows, &self.norm) // [R, V]
    }
}

impl Architecture for IQuestLoopCoder {
    fn probe(&self, _config: &Config<'_>) -> Probe {
        Probe::fits(100, "model_type")
    }

    /// A cache for each layer of the first round, then one for each of the second.
    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let config = read(config)?;
        let mut desc = config.decoder.describe("iquestloopcoder");
        let second = CacheDesc::Window {
            kv_heads: config.decoder.kv_heads,
            k_dim: config.decoder.head_dim,
            v_dim: config.decoder.head_dim,
            window: config.window,
        };
        desc.layers
            .extend(vec![second; config.decoder.layers.len()]);
        Ok(desc)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let config = read(config)?;
        Ok(Box::new(LoopDecoder::load(&config.decoder, weights)?))
    }
}
