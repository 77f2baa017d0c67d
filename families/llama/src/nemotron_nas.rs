//! `nemotron-nas` (DeciLM): a llama decoder whose blocks were pruned one by one. `block_configs` says
//! for each half of each block whether it is there, replaced by one linear layer, or left out, and
//! how many key heads and inner features it has. After `nemotron-nas.py` of mlx-lm.

use mlxcel_sdk::nn::{
    Activation, Attention, AttentionConfig, Decoder, DecoderLayer, DecoderShape, FeedForward,
    GatedMlp, Linear, Mixer, RmsNorm, RopeConfig,
};
use mlxcel_sdk::prelude::*;
use serde_json::{Map, Value};

use crate::gguf;
use crate::model::{Places, load_rope_of};

struct NemotronNas;

architecture! {
    NemotronNas,
    id: "nemotron-nas", display_name: "Nemotron NAS", category: "dense", task: "text-generation",
    model_types: ["nemotron-nas"], gguf: ["deci"],
    aliases: ["Llama 3.1 Nemotron 51B", "Llama 3.3 Nemotron Super 49B", "Llama 3.1 Nemotron Ultra 253B"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
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

/// Options of a half that sparsify it at run time; they change what is computed.
const OTHER_OPTIONS: [&str; 5] = [
    "sparsify",
    "window_length",
    "num_sink_tokens",
    "use_prefill_window_in_sink_attention",
    "unshifted_sink",
];

impl NasConfig {
    fn read(config: &Config<'_>) -> Result<Self> {
        let hidden = config.uint("hidden_size")?;
        let heads = config.uint_in("num_attention_heads", 1..=4096)?;
        config.divides(("num_attention_heads", heads), ("hidden_size", hidden))?;
        let head_dim = hidden / heads;
        let rope = RopeConfig::read(config, head_dim, None)?;
        if rope.dims != head_dim {
            let supported = "this line of models rotates all features of a head";
            return Err(config.unsupported("partial_rotary_factor", supported));
        }
        let n_layers = config.uint_in("num_hidden_layers", 1..=4096)?;
        let blocks = match config.get("block_configs") {
            Some(Value::Array(list)) if list.len() == n_layers => list,
            _ => {
                let expected = format!("a list with one object for each of {n_layers} layers");
                return Err(short_error(config, "block_configs", expected));
            }
        };
        let blocks = blocks
            .iter()
            .enumerate()
            .map(|(index, block)| read_block(index, block, heads, hidden))
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

/// An error about a list, which says its length and not its content.
fn short_error(config: &Config<'_>, key: &str, expected: String) -> Error {
    match config.get(key) {
        Some(Value::Array(list)) => Error::Config {
            key: key.to_owned(),
            found: format!("a list of {}", list.len()),
            expected,
        },
        _ => config.error(key, expected),
    }
}

/// A value inside `block_configs`, with its place.
struct Part<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl Part<'_> {
    fn error(&self, key: &str, expected: impl Into<String>) -> Error {
        Error::Config {
            key: format!("{}.{key}", self.path),
            found: self
                .map
                .get(key)
                .map_or_else(|| "missing".to_owned(), Value::to_string),
            expected: expected.into(),
        }
    }

    fn flag(&self, key: &str) -> Result<bool> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.error(key, "true or false")),
        }
    }

    /// The half, of which `count` reads the size.
    fn half(&self, count: impl FnOnce(&Self) -> Result<usize>) -> Result<Half> {
        if self.flag("no_op")? {
            return Ok(Half::Absent);
        }
        if self.flag("replace_with_linear")? {
            return Ok(Half::Linear);
        }
        for key in OTHER_OPTIONS {
            match self.map.get(key) {
                None | Some(Value::Null | Value::Bool(false)) => {}
                Some(value) => {
                    return Err(Error::Unsupported {
                        what: format!("{}.{key} = {value}", self.path),
                        supported: "halves of a block see the whole context and all features"
                            .to_owned(),
                    });
                }
            }
        }
        count(self).map(Half::Full)
    }
}

fn read_block(index: usize, block: &Value, heads: usize, hidden: usize) -> Result<(Half, Half)> {
    let part = |key: &str| -> Result<Part<'_>> {
        let path = format!("block_configs[{index}].{key}");
        match block.get(key) {
            Some(Value::Object(map)) => Ok(Part { map, path }),
            found => Err(Error::Config {
                key: path,
                found: found.map_or_else(|| "missing".to_owned(), Value::to_string),
                expected: "an object".to_owned(),
            }),
        }
    };
    let attention = part("attention")?.half(|part| {
        let group = part.map.get("n_heads_in_group").and_then(Value::as_u64);
        let group = group.and_then(|group| usize::try_from(group).ok());
        match group {
            Some(group) if group > 0 && heads.is_multiple_of(group) => Ok(heads / group),
            _ => Err(part.error(
                "n_heads_in_group",
                format!("an integer that divides num_attention_heads ({heads})"),
            )),
        }
    })?;
    let feed_forward = part("ffn")?.half(|part| {
        if part
            .map
            .get("intermediate_size")
            .is_some_and(|v| !v.is_null())
        {
            let width = part.map.get("intermediate_size").and_then(Value::as_u64);
            let width = width.and_then(|width| usize::try_from(width).ok());
            return width
                .filter(|width| (1..=mlxcel_sdk::config::MAX_COUNT).contains(width))
                .ok_or_else(|| part.error("intermediate_size", "an integer from 1 to 16777216"));
        }
        let multiple = part.map.get("ffn_mult").and_then(Value::as_f64);
        match multiple {
            Some(multiple) if (1e-3..=1e3).contains(&multiple) => Ok(inner_width(multiple, hidden)),
            _ => Err(part.error("ffn_mult", "a number from 0.001 to 1000")),
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
