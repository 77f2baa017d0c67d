//! `gemma3n`: several residual streams of which a layer computes one and predicts the others (AltUp),
//! a low-rank path beside attention (LAuReL), an input of its own for every layer, feed-forward blocks
//! that keep the largest activations only, and last layers that read the caches of earlier ones. Model
//! type `gemma3n` nests this text model in `text_config`, beside towers that text does not need.

use core::f64::consts::FRAC_1_SQRT_2;

use mlxcel_sdk::nn::{Activation, Embedding, Linear, LmHead, RmsNorm, Rope, RopeConfig, project};
use mlxcel_sdk::prelude::*;

use crate::altup::{self, AltUp};
use crate::attention::{self, Attention};
use crate::config::{Defaults, Sizes, check_variant, glu_kind, soft_cap, text_section};
use crate::gguf_gemma3n;
use crate::layers::{read_owners, read_ropes, read_windows};
use crate::parts::find_parts;
use crate::per_layer::{self, Gate, PerLayerInputs};
use crate::sparsity;

struct Gemma3n;

architecture! {
    Gemma3n,
    id: "gemma3n", display_name: "Gemma 3n", category: "dense", task: "text-generation",
    model_types: ["gemma3n", "gemma3n_text"], gguf: ["gemma3n"], aliases: ["Gemma 3n E2B", "Gemma 3n E4B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

const DEFAULTS: Defaults = Defaults {
    vocab: 262_400,
    heads: 8,
    kv_heads: 2,
    context: 32_768,
};

/// Streams' least mean square before they are scaled.
const LEAST_POWER: f64 = 1e-5;

struct TextConfig {
    sizes: Sizes,
    tied: bool,
    activation: Activation,
    logit_cap: Option<f64>,
    windows: Vec<Option<usize>>,
    owners: Vec<usize>,
    inner: Vec<usize>,
    /// One a layer: the share of activations that a feed-forward block drops.
    sparsity: Vec<f64>,
    rope: RopeConfig,
    sliding_rope: RopeConfig,
    per_layer_rows: usize,
    per_layer_width: usize,
    laurel_rank: usize,
    altup: altup::Shape,
}

fn read(config: &Config<'_>) -> Result<TextConfig> {
    check_variant(config)?;
    let tied = config.bool_or("tie_word_embeddings", true)?;
    match text_section(config, "gemma3n")? {
        Some(text) => {
            check_variant(&text)?;
            read_text(&text, tied)
        }
        None => read_text(config, tied),
    }
}

fn read_text(config: &Config<'_>, tied: bool) -> Result<TextConfig> {
    let n_layers = config.uint_in("num_hidden_layers", 1..=4096)?;
    let inner = read_inner(config, n_layers)?;
    let sizes = Sizes::read_beside(config, &DEFAULTS, inner.iter().copied().max().unwrap_or(0))?;
    let (rope, sliding_rope) = read_ropes(config, sizes.head_dim)?;
    let windows = read_windows(config, n_layers, 5, 512)?;
    let streams = config.opt_uint("altup_num_inputs", 2..=64)?.unwrap_or(4);
    Ok(TextConfig {
        tied,
        activation: Activation::read(config, "hidden_activation", Activation::GeluTanh)?,
        logit_cap: soft_cap(config, "final_logit_softcapping", Some(30.0))?,
        owners: read_owners(config, &windows, 15)?,
        windows,
        inner,
        sparsity: sparsity::read(config, n_layers)?,
        rope,
        sliding_rope,
        per_layer_rows: config.uint_or("vocab_size_per_layer_input", 262_144)?,
        per_layer_width: config.uint_or("hidden_size_per_layer_input", 256)?,
        laurel_rank: config.uint_or("laurel_rank", 64)?,
        altup: altup::Shape {
            hidden: sizes.hidden,
            streams,
            active: config
                .opt_uint("altup_active_idx", 0..=streams - 1)?
                .unwrap_or(0),
            scales_active: config.bool_or("altup_correct_scale", true)?,
        },
        sizes,
    })
}

/// Feed-forward widths: one for all layers, or a list.
fn read_inner(config: &Config<'_>, n_layers: usize) -> Result<Vec<usize>> {
    const KEY: &str = "intermediate_size";
    if !config.get(KEY).is_some_and(serde_json::Value::is_array) {
        return Ok(vec![config.uint(KEY)?; n_layers]);
    }
    match config.opt_uints(KEY)? {
        Some(list) if list.len() == n_layers && !list.contains(&0) => Ok(list),
        _ => Err(config.error(
            KEY,
            format!("an integer, or one above 0 for each of {n_layers} layers"),
        )),
    }
}

impl TextConfig {
    fn describe(&self) -> ModelDesc {
        let sizes = &self.sizes;
        let (kv_heads, k_dim, v_dim) = (sizes.kv_heads, sizes.head_dim, sizes.head_dim);
        let cache = |(layer, (window, owner)): (usize, (&Option<usize>, &usize))| match *window {
            _ if *owner != layer => CacheDesc::None,
            Some(window) => CacheDesc::Window {
                kv_heads,
                k_dim,
                v_dim,
                window,
            },
            None => CacheDesc::Dense {
                kv_heads,
                k_dim,
                v_dim,
            },
        };
        let layers = self.windows.iter().zip(&self.owners).enumerate();
        // The streams before and after a layer with their predictions, the inputs of all layers, and
        // what the layer itself computes.
        let attention = (3 * sizes.heads + 3 * sizes.kv_heads) * sizes.head_dim;
        let inputs = 2 * sizes.n_layers * self.per_layer_width;
        let streams = 3 * self.altup.streams * sizes.hidden;
        ModelDesc {
            arch: "gemma3n".to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: sizes.vocab,
            hidden_size: sizes.hidden,
            context_length: sizes.context,
            layers: layers.map(cache).collect(),
            activation_width: streams + inputs + 2 * sizes.hidden + attention.max(4 * sizes.inner),
            encoder: None,
        }
    }
}

/// Attention beside a low-rank path, then feed-forward, on the active stream; then the layer's own
/// input, for all streams but the first.
struct Block {
    layer: usize,
    altup: AltUp,
    attention_norm: RmsNorm,
    attention: Attention,
    attention_post_norm: RmsNorm,
    laurel_left: Linear,
    laurel_right: Linear,
    laurel_norm: RmsNorm,
    mlp_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    mlp_post_norm: RmsNorm,
    glu_kind: u32,
    /// Deviations above the mean below which activations are dropped.
    cutoff: Option<f64>,
    input_gate: Gate,
}

impl Block {
    fn load(at: &Weights, config: &TextConfig, layer: usize, rope: &Rope) -> Result<Self> {
        let Sizes {
            hidden,
            eps,
            heads,
            kv_heads,
            head_dim,
            attention_bias,
            ..
        } = config.sizes;
        let of = |list: &[usize]| list.get(layer).copied().unwrap_or(0);
        let (inner, owner) = (of(&config.inner), of(&config.owners));
        let share = config.sparsity.get(layer).copied().unwrap_or(0.0);
        let norm = |name: &str| RmsNorm::load(&at.at(name), hidden, eps);
        let (mlp, laurel) = (at.at("mlp"), at.at("laurel"));
        let kind = glu_kind(config.activation);
        let shape = attention::Shape {
            layer,
            owner,
            hidden,
            heads,
            kv_heads,
            head_dim,
            eps,
            bias: attention_bias,
            value_is_key: false,
        };
        Ok(Self {
            layer,
            altup: AltUp::load(&at.at("altup"), &config.altup, eps)?,
            attention_norm: norm("input_layernorm")?,
            attention: Attention::load(&at.at("self_attn"), shape, rope.clone())?,
            attention_post_norm: norm("post_attention_layernorm")?,
            laurel_left: Linear::load(
                &laurel.at("linear_left"),
                hidden,
                config.laurel_rank,
                false,
            )?,
            laurel_right: Linear::load(
                &laurel.at("linear_right"),
                config.laurel_rank,
                hidden,
                false,
            )?,
            laurel_norm: RmsNorm::load(&laurel.at("post_laurel_norm"), hidden, eps)?,
            mlp_norm: norm("pre_feedforward_layernorm")?,
            gate: Linear::load(&mlp.at("gate_proj"), hidden, inner, false)?,
            up: Linear::load(&mlp.at("up_proj"), hidden, inner, false)?,
            down: Linear::load(&mlp.at("down_proj"), inner, hidden, false)?,
            mlp_post_norm: norm("post_feedforward_layernorm")?,
            glu_kind: kind,
            cutoff: (share > 0.0).then(|| sparsity::quantile(share)),
            input_gate: Gate::load(at, hidden, config.per_layer_width, eps, kind)?,
        })
    }

    /// Streams `[T, N, hidden]` and all layers' inputs to streams.
    fn forward(
        &self,
        streams: &Tensor,
        inputs: &PerLayerInputs,
        own: &Tensor,
        step: &Step<'_>,
    ) -> Result<Tensor> {
        let predictions = self.altup.predict(streams)?;
        let active = self.altup.active_of(&predictions)?;
        let normed = self.attention_norm.forward(&active)?;
        let laurel = self
            .laurel_right
            .forward(&self.laurel_left.forward(&normed)?)?;
        let laurel = normed.add(&self.laurel_norm.forward(&laurel)?)?;
        let attended = self.attention.forward(&normed, None, step)?;
        let attended = active.add(&self.attention_post_norm.forward(&attended)?)?;
        let x = attended.add(&laurel)?.mul_scalar(FRAC_1_SQRT_2)?;
        let y = self.feed_forward(&x)?;
        let computed = x.add(&self.mlp_post_norm.forward(&y)?)?;

        let corrected = self.altup.correct(&predictions, &computed)?;
        let first = self.altup.scaled_active_of(&corrected)?;
        let input = inputs.of_layer(own, self.layer)?;
        let added = self.input_gate.forward(&first, &input)?.unsqueeze(1)?;
        let rest = self.altup.streams() - 1;
        let others = corrected.narrow(1, 1, rest)?.add(&added)?;
        Tensor::concat(
            streams.backend(),
            &[&corrected.narrow(1, 0, 1)?, &others],
            1,
        )
    }

    fn feed_forward(&self, x: &Tensor) -> Result<Tensor> {
        let [mut gate, up] = project(x, Some(&self.mlp_norm), [&self.gate, &self.up])?;
        if let Some(deviations) = self.cutoff {
            let mean = gate.mean(&[-1], true)?;
            let deviation = gate.sub(&mean)?.square()?.mean(&[-1], true)?.sqrt()?;
            let cutoff = mean.add(&deviation.mul_scalar(deviations)?)?;
            gate = gate.sub(&cutoff)?.relu()?;
        }
        let y = gate.glu(self.glu_kind, &up)?;
        self.down.forward(&y)
    }
}

/// The whole: embedding, streams from it, blocks, one stream again, norm, head, soft cap.
struct Decoder {
    embedding: Embedding,
    hidden: usize,
    inputs: PerLayerInputs,
    projections: Vec<Linear>,
    blocks: Vec<Block>,
    unembeddings: Vec<Linear>,
    norm: RmsNorm,
    head: LmHead,
    logit_cap: Option<f64>,
}

impl Decoder {
    fn load(config: &TextConfig, root: &Weights, head: &Weights) -> Result<Self> {
        let sizes = &config.sizes;
        let (hidden, eps) = (sizes.hidden, sizes.eps);
        let rope = Rope::new(root, &config.rope, sizes.head_dim, false)?;
        let sliding_rope = Rope::new(root, &config.sliding_rope, sizes.head_dim, false)?;
        let embedding = Embedding::load(&root.at("embed_tokens"), sizes.vocab, hidden)?;
        let between = |name: &str| -> Result<Vec<Linear>> {
            let load = |n| Linear::load(&root.at(name).at_index(n), hidden, hidden, false);
            (0..config.altup.streams - 1).map(load).collect()
        };
        let blocks = config.windows.iter().enumerate().map(|(layer, window)| {
            let rope = if window.is_some() {
                &sliding_rope
            } else {
                &rope
            };
            Block::load(&root.at("layers").at_index(layer), config, layer, rope)
        });
        let inputs = per_layer::Shape {
            rows: config.per_layer_rows,
            width: config.per_layer_width,
            n_layers: sizes.n_layers,
            hidden,
            eps,
            first_foreign: (config.per_layer_rows < sizes.vocab).then_some(config.per_layer_rows),
        };
        Ok(Self {
            blocks: blocks.collect::<Result<_>>()?,
            inputs: PerLayerInputs::load(root, inputs)?,
            projections: between("altup_projections")?,
            unembeddings: between("altup_unembed_projections")?,
            norm: RmsNorm::load(&root.at("norm"), hidden, eps)?,
            head: LmHead::load(head, &embedding, config.tied, sizes.vocab, hidden)?,
            embedding,
            hidden,
            logit_cap: config.logit_cap,
        })
    }

    /// `y` with the mean square of `like`, row by row.
    fn as_loud(y: &Tensor, like: &Tensor) -> Result<Tensor> {
        let target = like.square()?.mean(&[-1], true)?.sqrt()?;
        let power = y.square()?.mean(&[-1], true)?;
        y.mul(&target)?
            .div(&power.maximum_scalar(LEAST_POWER)?.sqrt()?)
    }
}

impl Model for Decoder {
    fn forward(&self, step: &Step<'_>) -> Result<Tensor> {
        let x = self.embedding.forward(&step.tokens)?;
        let x = x.mul_scalar((self.hidden as f64).sqrt())?; // [T, H]
        let own = self.inputs.forward(&step.tokens, &x)?; // [T, L, P]
        let mut streams = vec![x.clone()];
        for projection in &self.projections {
            streams.push(Self::as_loud(&projection.forward(&x)?, &x)?);
        }
        let mut streams = stack(&streams)?; // [T, N, H]
        for (layer, block) in self.blocks.iter().enumerate() {
            streams = block
                .forward(&streams, &self.inputs, &own, step)
                .map_err(|e| e.at(&format!("layer {layer}")))?;
        }
        let streams = step.logit_rows(&streams)?; // [R, N, H]
        let stream = |n: usize| -> Result<Tensor> {
            streams
                .narrow(1, n as i64, 1)?
                .reshape(&[-1, self.hidden as i64])
        };
        let first = stream(0)?;
        let mut sum = first.clone();
        for (n, unembedding) in self.unembeddings.iter().enumerate() {
            let y = unembedding.forward(&stream(n + 1)?)?;
            sum = sum.add(&Self::as_loud(&y, &first)?)?;
        }
        let mean = sum.mul_scalar((self.unembeddings.len() as f64 + 1.0).recip())?;
        let logits = self.head.forward_normed(&mean, &self.norm)?; // [R, V]
        match self.logit_cap {
            Some(cap) => logits.div_scalar(cap)?.tanh()?.mul_scalar(cap),
            None => Ok(logits),
        }
    }
}

/// `[T, hidden]` each to `[T, N, hidden]`.
fn stack(streams: &[Tensor]) -> Result<Tensor> {
    let parts = streams
        .iter()
        .map(|x| x.unsqueeze(1))
        .collect::<Result<Vec<_>>>()?;
    let first = parts
        .first()
        .ok_or_else(|| Error::Other("no streams".to_owned()))?;
    Tensor::concat(first.backend(), &parts.iter().collect::<Vec<_>>(), 1)
}

impl Architecture for Gemma3n {
    fn probe(&self, config: &Config<'_>) -> Probe {
        if let Err(error) = check_variant(config) {
            return Probe::refused(error.to_string());
        }
        if config.get("vision_config").is_some() || config.get("audio_config").is_some() {
            return Probe::fits(
                50,
                "model_type; the text side only, without vision_config and audio_config",
            );
        }
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        Ok(read(config)?.describe())
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf_gemma3n::adapt(summary)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let nested = text_section(config, "gemma3n")?.is_some();
        let (root, head) = find_parts(weights, nested);
        Ok(Box::new(Decoder::load(&read(config)?, &root, &head)?))
    }
}
