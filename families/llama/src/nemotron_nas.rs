//! `nemotron-nas` (DeciLM): a llama decoder whose blocks were pruned one by one. `block_configs` says
//! for each half of each block whether it is there, replaced by one linear layer, or left out, and
//! how many key heads and inner features it has. After `nemotron-nas.py` of mlx-lm.

use mlxcel_sdk::nn::{
    Activation, Attention, AttentionConfig, Decoder, DecoderLayer, DecoderShape, FeedForward,
    GatedMlp, Linear, Mixer, RmsNorm, RopeConfig,
};
use mlxcel_sdk::prelude::*;
use serde_json::Value;

use crate::gguf;
use crate::model::{Places, load_rope_of};

struct NemotronNas;

architecture! {
    NemotronNas,
    id: "nemotron-nas", display_name: "Nemotron NAS", category: "dense", task: "text-generation",
    model_types: ["nemotron-nas"], gguf: ["deci"],
    aliases: ["Llama 3.1 Nemotron 51B", "Llama 3.3 Nemotron Super 49B", "Llama 3.1 Nemotron Ultra 253B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
}

/// One half of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Half {
    /// Left out, with its norm.
    Absent,
    /// One linear layer.
    Linear,
    /// As in llama, with so many key heads or inner features.
    Full(usize),
}

struct NasConfig {
    vocab: usize,
    hidden: usize,
    heads: usize,
    head_dim: usize,
    context: usize,
    eps: f32,
    tied: bool,
    attention_bias: bool,
    mlp_bias: bool,
    activation: Activation,
    rope: RopeConfig,
    /// Attention and feed-forward of every block.
    blocks: Vec<(Half, Half)>,
}

impl NasConfig {
    fn read(config: &Config<'_>) -> Result<Self> {
        let hidden = config.uint("hidden_size")?;
        let heads = config.uint_in("num_attention_heads", 1..=4096)?;
        config.divides(("num_attention_heads", heads), ("hidden_size", hidden))?;
        let head_dim = hidden / heads;
        let rope = RopeConfig::read_whole_or(config, head_dim, 5e5)?;
        let n_layers = config.uint_in("num_hidden_layers", 1..=4096)?;
        let blocks = config.sections("block_configs")?.unwrap_or_default();
        if blocks.len() != n_layers {
            let found = blocks.len();
            let expected = format!("one object for each of {n_layers} layers, not {found}");
            return Err(config.error("block_configs", expected));
        }
        let act = config.opt_str("hidden_act")?.unwrap_or("silu");
        let blocks = blocks
            .iter()
            .map(|block| read_block(block, heads, hidden, act))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            vocab: config.uint("vocab_size")?,
            hidden,
            heads,
            head_dim,
            context: config.uint_or("max_position_embeddings", 131_072)?,
            eps: config.float_or("rms_norm_eps", 1e-5, 0.0..=1.0)? as f32,
            tied: config.bool_or("tie_word_embeddings", false)?,
            attention_bias: config.bool_or("attention_bias", false)?,
            mlp_bias: config.bool_or("mlp_bias", false)?,
            activation: Activation::read(config, "hidden_act", Activation::Silu)?,
            rope,
            blocks,
        })
    }

    fn shape(&self) -> DecoderShape {
        DecoderShape {
            vocab: self.vocab,
            hidden: self.hidden,
            eps: self.eps,
            norms_minus_one: false,
            tied: self.tied,
            n_layers: self.blocks.len(),
        }
    }
}

/// Refuses what is neither `known` nor switched off: windows, sinks, experts, parallel branches and
/// whatever else is put into a block changes what it computes.
fn only(object: &Config<'_>, known: &[&str]) -> Result<()> {
    let is_off = |value: &Value| value == &Value::Bool(false);
    match object
        .entries()
        .find(|(key, value)| !known.contains(key) && !is_off(value))
    {
        None => Ok(()),
        Some((key, _)) => {
            let known = known.join(", ");
            let supported = format!("known are {known}; anything else must be null or false");
            Err(object.unsupported(key, supported))
        }
    }
}

/// One half of a block, of which `count` reads the size.
fn read_half(
    half: &Config<'_>,
    known: &[&str],
    count: impl FnOnce(&Config<'_>) -> Result<usize>,
) -> Result<Half> {
    if half.bool_or("no_op", false)? {
        return Ok(Half::Absent);
    }
    if half.bool_or("replace_with_linear", false)? {
        return Ok(Half::Linear);
    }
    only(half, known)?;
    count(half).map(Half::Full)
}

fn read_block(block: &Config<'_>, heads: usize, hidden: usize, act: &str) -> Result<(Half, Half)> {
    only(block, &["attention", "ffn"])?;
    let part = |key: &'static str| {
        block
            .section(key)?
            .ok_or_else(|| block.error(key, "an object"))
    };
    let attention = read_half(&part("attention")?, &["n_heads_in_group"], |half| {
        let key = "n_heads_in_group";
        let expected = format!("an integer that divides num_attention_heads ({heads})");
        match half.opt_uint(key, 0..=mlxcel_sdk::config::MAX_COUNT) {
            Ok(Some(group)) if group > 0 && heads.is_multiple_of(group) => Ok(heads / group),
            _ => Err(half.error(key, expected)),
        }
    })?;
    let known = ["intermediate_size", "ffn_mult", "gated", "hidden_act"];
    let feed_forward = read_half(&part("ffn")?, &known, |half| {
        if !half.bool_or("gated", true)? {
            return Err(half.unsupported("gated", "feed-forward blocks here have a gate"));
        }
        if half.opt_str("hidden_act")?.is_some_and(|own| own != act) {
            let supported = format!("all blocks have the model's hidden_act, {act}");
            return Err(half.unsupported("hidden_act", supported));
        }
        match half.opt_uint("intermediate_size", 1..=mlxcel_sdk::config::MAX_COUNT)? {
            Some(width) => Ok(width),
            None => Ok(inner_width(half.float_in("ffn_mult", 1e-3..=1e3)?, hidden)),
        }
    })?;
    Ok((attention, feed_forward))
}

/// Two thirds of the multiple, in steps of 256 (`_ffn_mult_to_intermediate_size` of the original).
/// The multiple is rounded to six places first, as mlx-lm does.
fn inner_width(multiple: f64, hidden: usize) -> usize {
    let multiple = (multiple * 1e6).round() / 1e6;
    let width = (2.0 * multiple * hidden as f64 / 3.0) as usize;
    width.next_multiple_of(256)
}

/// A linear layer in place of a half.
struct Replacement(Linear);

impl Replacement {
    fn onto(&self, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        self.0.forward_onto(&norm.forward(x)?, x)
    }
}

impl Mixer for Replacement {
    fn forward(&self, x: &Tensor, _step: &Step<'_>) -> Result<Tensor> {
        self.0.forward(x)
    }

    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm, _step: &Step<'_>) -> Result<Tensor> {
        self.onto(x, norm)
    }
}

impl FeedForward for Replacement {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }

    fn forward_onto(&self, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        self.onto(x, norm)
    }
}

impl Architecture for NemotronNas {
    fn probe(&self, _config: &Config<'_>) -> Probe {
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let config = NasConfig::read(config)?;
        let cache = |(attention, _): &(Half, Half)| match attention {
            Half::Full(kv_heads) => CacheDesc::Dense {
                kv_heads: *kv_heads,
                k_dim: config.head_dim,
                v_dim: config.head_dim,
            },
            Half::Absent | Half::Linear => CacheDesc::None,
        };
        let widest = config.blocks.iter().map(|(_, half)| match half {
            Half::Full(inner) => *inner,
            Half::Absent | Half::Linear => 0,
        });
        Ok(ModelDesc {
            arch: "nemotron-nas".to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: config.vocab,
            hidden_size: config.hidden,
            context_length: config.context,
            layers: config.blocks.iter().map(cache).collect(),
            activation_width: 2 * config.hidden + 3 * widest.max().unwrap_or(0),
            encoder: None,
        })
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt_deci(summary)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let config = NasConfig::read(config)?;
        let places = Places::text(weights);
        let rope = load_rope_of(&config.rope, config.head_dim, false, &places.model)?;
        let hidden = config.hidden;
        let shape = config.shape();
        let model = Decoder::load(&shape, &places.model, &places.head, |index, layer| {
            let halves = config.blocks.get(index).copied();
            let (attention, feed_forward) = halves.unwrap_or((Half::Absent, Half::Absent));
            let norm = |name: &str| shape.norm(&layer.at(name));
            // As published first, then as mlx-lm calls them.
            let replacement = |[module, published]: [&str; 2], bias: bool| {
                let at = layer.at(module);
                let published = at.at(published);
                let linear = if published.exists() {
                    published
                } else {
                    at.at("linear")
                };
                Linear::load(&linear, hidden, hidden, bias).map(Replacement)
            };
            let mixer: Option<Box<dyn Mixer>> = match attention {
                Half::Absent => None,
                Half::Linear => Some(Box::new(replacement(
                    ["self_attn", "linear_attn"],
                    config.attention_bias,
                )?)),
                Half::Full(kv_heads) => {
                    let attention = AttentionConfig {
                        layer: index,
                        hidden,
                        heads: config.heads,
                        kv_heads,
                        head_dim: config.head_dim,
                        qkv_bias: config.attention_bias,
                        out_bias: config.attention_bias,
                        qk_norm_eps: None,
                        scale: (config.head_dim as f32).sqrt().recip(),
                        softcap: 0.0,
                    };
                    let at = layer.at("self_attn");
                    Some(Box::new(Attention::load(
                        &at,
                        attention,
                        Some(rope.clone()),
                    )?))
                }
            };
            let feed_forward: Option<Box<dyn FeedForward>> = match feed_forward {
                Half::Absent => None,
                Half::Linear => Some(Box::new(replacement(
                    ["mlp", "linear_mlp"],
                    config.mlp_bias,
                )?)),
                Half::Full(inner) => {
                    let (bias, activation) = (config.mlp_bias, config.activation);
                    let mlp = GatedMlp::load(&layer.at("mlp"), hidden, inner, bias, activation)?;
                    Some(Box::new(mlp))
                }
            };
            Ok(DecoderLayer {
                mixer: match mixer {
                    Some(mixer) => Some((norm("input_layernorm")?, mixer)),
                    None => None,
                },
                feed_forward: match feed_forward {
                    Some(half) => Some((norm("post_attention_layernorm")?, half)),
                    None => None,
                },
            })
        })?;
        Ok(Box::new(model))
    }
}
