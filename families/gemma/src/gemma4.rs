//! `gemma4`: sliding layers, and full ones with wider heads that rotate a part of each and may take
//! their keys for values; norms around both halves of a block and a scale behind it. The small models
//! have an input of their own for every layer, and last layers that read the caches of earlier ones;
//! others have experts beside the feed-forward block. Model type `gemma4` nests this text model in
//! `text_config`, beside towers that text does not need.

use mlxcel_sdk::nn::{Activation, Embedding, GatedMlp, LmHead, RmsNorm};
use mlxcel_sdk::prelude::*;

use crate::attention::{self, Attention};
use crate::config::{Defaults, Sizes, check_head, glu_kind, soft_cap, text_section};
use crate::experts::{self, Experts, Router};
use crate::gemma4_layers::{LayerConfig, read_layers};
use crate::gguf_gemma4;
use crate::parts::find_parts;
use crate::per_layer::{self, Gate, PerLayerInputs};
use crate::proportional::{Rotations, SettingsByKind};

struct Gemma4;

architecture! {
    Gemma4,
    id: "gemma4", display_name: "Gemma 4", category: "dense", task: "text-generation",
    model_types: ["gemma4", "gemma4_text"], gguf: ["gemma4"],
    aliases: ["Gemma 4 E2B", "Gemma 4 E4B", "Gemma 4 26B A4B", "Gemma 4 31B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

const DEFAULTS: Defaults = Defaults {
    vocab: 262_144,
    heads: 8,
    kv_heads: 4,
    context: 131_072,
};

struct TextConfig {
    sizes: Sizes,
    tied: bool,
    activation: Activation,
    logit_cap: Option<f64>,
    layers: Vec<LayerConfig>,
    /// Full layers take their keys for values.
    value_is_key: bool,
    rotations: SettingsByKind,
    per_layer_rows: usize,
    /// 0 where layers have no inputs of their own.
    per_layer_width: usize,
    experts: Option<experts::Shape>,
}

/// Refuses what shares a `model_type` with the causal decoder and is something else.
fn check_variant(config: &Config<'_>) -> Result<()> {
    // With "vision" only the tokens of an image see each other's future; there are none here.
    let attention = "use_bidirectional_attention";
    if config
        .get(attention)
        .is_some_and(|v| v.as_bool() != Some(false))
        && config.opt_str(attention)? != Some("vision")
    {
        return Err(config.unsupported(
            attention,
            "text attends causally: null or \"vision\"; embedding models are not implemented here",
        ));
    }
    check_head(config)
}

fn read(config: &Config<'_>) -> Result<TextConfig> {
    check_variant(config)?;
    let tied = config.bool_or("tie_word_embeddings", true)?;
    match text_section(config, "gemma4")? {
        Some(text) => {
            check_variant(&text)?;
            read_text(&text, tied)
        }
        None => read_text(config, tied),
    }
}

fn read_text(config: &Config<'_>, tied: bool) -> Result<TextConfig> {
    let sizes = Sizes::read(config, &DEFAULTS)?;
    let activation = Activation::read(config, "hidden_activation", Activation::GeluTanh)?;
    let value_is_key = config.bool_or("attention_k_eq_v", false)?;
    let layers = read_layers(config, &sizes, value_is_key)?;
    // Layers of a kind have heads of one width.
    let width = |slides: bool| {
        let mut layers = layers.iter();
        let layer = layers.find(|l| l.window.is_some() == slides);
        layer.map_or(sizes.head_dim, |l| l.head_dim)
    };
    let (sliding_dim, full_dim) = (width(true), width(false));
    let per_layer_width = if config.is_null("hidden_size_per_layer_input") {
        0
    } else {
        let width = config.opt_uint("hidden_size_per_layer_input", 0..=1 << 20)?;
        width.unwrap_or(256)
    };
    let rows = config.uint_or("vocab_size_per_layer_input", 262_144)?;
    if per_layer_width > 0 && rows < sizes.vocab {
        return Err(config.error(
            "vocab_size_per_layer_input",
            format!(
                "at least vocab_size ({}), as every token has inputs of the layers",
                sizes.vocab
            ),
        ));
    }
    Ok(TextConfig {
        tied,
        logit_cap: soft_cap(config, "final_logit_softcapping", None)?,
        value_is_key,
        rotations: SettingsByKind::read(config, sliding_dim, full_dim)?,
        layers,
        per_layer_rows: rows,
        per_layer_width,
        experts: read_experts(config, &sizes, activation)?,
        activation,
        sizes,
    })
}

fn read_experts(
    config: &Config<'_>,
    sizes: &Sizes,
    activation: Activation,
) -> Result<Option<experts::Shape>> {
    if !config.bool_or("enable_moe_block", false)? {
        return Ok(None);
    }
    let n_experts = config.uint_in("num_experts", 1..=4096)?;
    Ok(Some(experts::Shape {
        n_experts,
        top_k: config.uint_in("top_k_experts", 1..=n_experts)?,
        hidden: sizes.hidden,
        inner: config.uint("moe_intermediate_size")?,
        eps: sizes.eps,
        activation,
    }))
}

impl TextConfig {
    fn describe(&self) -> ModelDesc {
        let sizes = &self.sizes;
        let cache = |(layer, own): (usize, &LayerConfig)| {
            let (kv_heads, k_dim, v_dim) = (own.kv_heads, own.head_dim, own.head_dim);
            match own.window {
                _ if own.owner != layer => CacheDesc::None,
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
            }
        };
        let widest = |of: fn(&LayerConfig, &Sizes) -> usize| {
            self.layers.iter().map(|l| of(l, sizes)).max().unwrap_or(0)
        };
        let attention = widest(|l, s| (3 * s.heads + 3 * l.kv_heads) * l.head_dim);
        let inner = widest(|l, _| l.inner);
        let chosen = self
            .experts
            .map_or(0, |e| e.top_k * (3 * e.inner + e.hidden));
        let inputs = 2 * sizes.n_layers * self.per_layer_width;
        ModelDesc {
            arch: "gemma4".to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: sizes.vocab,
            hidden_size: sizes.hidden,
            context_length: sizes.context,
            layers: self.layers.iter().enumerate().map(cache).collect(),
            activation_width: 3 * sizes.hidden + inputs + attention.max(3 * inner).max(chosen),
            encoder: None,
        }
    }
}

/// Experts beside the feed-forward block, each between norms of its own.
struct ExpertBlock {
    router: Router,
    experts: Experts,
    dense_post_norm: RmsNorm,
    norm: RmsNorm,
    post_norm: RmsNorm,
}

/// Attention, feed-forward and the layer's own input, each added to the residual stream.
struct Block {
    layer: usize,
    attention_norm: RmsNorm,
    attention: Attention,
    attention_post_norm: RmsNorm,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
    mlp_post_norm: RmsNorm,
    experts: Option<ExpertBlock>,
    input_gate: Option<Gate>,
    scale: Option<Tensor>,
}

impl Block {
    fn load(
        at: &Weights,
        config: &TextConfig,
        layer: usize,
        own: LayerConfig,
        rotations: &Rotations,
    ) -> Result<Self> {
        let Sizes {
            hidden,
            eps,
            heads,
            attention_bias,
            ..
        } = config.sizes;
        let norm = |name: &str| RmsNorm::load(&at.at(name), hidden, eps);
        let slides = own.window.is_some();
        let shape = attention::Shape {
            layer,
            owner: own.owner,
            hidden,
            heads,
            kv_heads: own.kv_heads,
            head_dim: own.head_dim,
            eps,
            bias: attention_bias,
            value_is_key: config.value_is_key && !slides,
        };
        let experts = match config.experts {
            Some(shape) => Some(ExpertBlock {
                router: Router::load(&at.at("router"), shape)?,
                experts: Experts::load(&at.at("experts"), shape)?,
                dense_post_norm: norm("post_feedforward_layernorm_1")?,
                norm: norm("pre_feedforward_layernorm_2")?,
                post_norm: norm("post_feedforward_layernorm_2")?,
            }),
            None => None,
        };
        let width = config.per_layer_width;
        let gate = |()| Gate::load(at, hidden, width, eps, glu_kind(config.activation));
        Ok(Self {
            layer,
            attention_norm: norm("input_layernorm")?,
            attention: Attention::load(&at.at("self_attn"), shape, rotations.of(slides))?,
            attention_post_norm: norm("post_attention_layernorm")?,
            mlp_norm: norm("pre_feedforward_layernorm")?,
            mlp: GatedMlp::load(&at.at("mlp"), hidden, own.inner, false, config.activation)?,
            mlp_post_norm: norm("post_feedforward_layernorm")?,
            experts,
            input_gate: (width > 0).then_some(()).map(gate).transpose()?,
            scale: at.optional("layer_scalar", &[1])?,
        })
    }

    fn forward(&self, x: &Tensor, input: Option<&Tensor>, step: &Step<'_>) -> Result<Tensor> {
        let y = (self.attention).forward(x, Some(&self.attention_norm), step)?;
        let x = x.add(&self.attention_post_norm.forward(&y)?)?;
        let mut y = self.mlp.forward_normed(&x, &self.mlp_norm)?;
        if let Some(block) = &self.experts {
            // The router sees the stream itself.
            let routing = block.router.forward(&x)?;
            let chosen = block.experts.forward(&block.norm.forward(&x)?, &routing)?;
            y = block
                .dense_post_norm
                .forward(&y)?
                .add(&block.post_norm.forward(&chosen)?)?;
        }
        let mut x = x.add(&self.mlp_post_norm.forward(&y)?)?;
        if let (Some(gate), Some(input)) = (&self.input_gate, input) {
            x = x.add(&gate.forward(&x, input)?)?;
        }
        match &self.scale {
            Some(scale) => x.mul(scale),
            None => Ok(x),
        }
    }
}

/// Scaled embedding, blocks, final norm, head, soft cap.
struct Decoder {
    embedding: Embedding,
    embedding_scale: f64,
    inputs: Option<PerLayerInputs>,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: LmHead,
    logit_cap: Option<f64>,
}

impl Decoder {
    fn load(config: &TextConfig, root: &Weights, head: &Weights) -> Result<Self> {
        // Bounds of activations that quantised training leaves, which no layer here applies.
        for bound in ["input_min", "input_max", "output_min", "output_max"] {
            root.ignore_suffix(bound);
        }
        let sizes = &config.sizes;
        let (hidden, eps) = (sizes.hidden, sizes.eps);
        let embedding = Embedding::load(&root.at("embed_tokens"), sizes.vocab, hidden)?;
        let inputs = per_layer::Shape {
            rows: config.per_layer_rows,
            width: config.per_layer_width,
            n_layers: sizes.n_layers,
            hidden,
            eps,
            first_foreign: None,
        };
        let has_inputs = config.per_layer_width > 0;
        let inputs = has_inputs.then(|| PerLayerInputs::load(root, inputs));
        let inputs = inputs.transpose()?;
        let rotations = Rotations::load(root, &config.rotations)?;
        let blocks = config.layers.iter().enumerate().map(|(layer, own)| {
            let at = root.at("layers").at_index(layer);
            Block::load(&at, config, layer, *own, &rotations)
        });
        Ok(Self {
            blocks: blocks.collect::<Result<_>>()?,
            inputs,
            norm: RmsNorm::load(&root.at("norm"), hidden, eps)?,
            head: LmHead::load(head, &embedding, config.tied, sizes.vocab, hidden)?,
            embedding,
            embedding_scale: (hidden as f64).sqrt(),
            logit_cap: config.logit_cap,
        })
    }
}

impl Model for Decoder {
    fn forward(&self, step: &Step<'_>) -> Result<Tensor> {
        let x = self.embedding.forward(&step.tokens)?;
        let mut x = x.mul_scalar(self.embedding_scale)?; // [T, H]
        let all = match &self.inputs {
            Some(inputs) => Some((inputs, inputs.forward(&step.tokens, &x)?)), // [T, L, P]
            None => None,
        };
        for block in &self.blocks {
            let own = match &all {
                Some((inputs, all)) => Some(inputs.of_layer(all, block.layer)?),
                None => None,
            };
            x = block
                .forward(&x, own.as_ref(), step)
                .map_err(|e| e.at(&format!("layer {}", block.layer)))?;
        }
        let rows = step.logit_rows(&x)?; // [R, H]
        let logits = self.head.forward_normed(&rows, &self.norm)?; // [R, V]
        match self.logit_cap {
            Some(cap) => logits.div_scalar(cap)?.tanh()?.mul_scalar(cap),
            None => Ok(logits),
        }
    }
}

impl Architecture for Gemma4 {
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
        gguf_gemma4::adapt(summary)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let nested = text_section(config, "gemma4")?.is_some();
        let (root, head) = find_parts(weights, nested);
        Ok(Box::new(Decoder::load(&read(config)?, &root, &head)?))
    }
}
