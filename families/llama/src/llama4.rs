//! `llama4` and `llama4_text`: the text decoder of Llama 4. Most layers have a rotary embedding and
//! look at their own chunk of the sequence; the others have no positions, see everything, and sharpen
//! their queries with the position. Feed-forward blocks are dense or a mixture of experts whose input
//! is scaled by the sigmoid of the router's score, beside an expert that every row takes.
//!
//! Of a checkpoint with images the text part is run: its settings are in `text_config`, its weights
//! below `language_model`. The reference is transformers' `modeling_llama4.py`.

use mlxcel_sdk::nn::{
    Activation, Decoder, DecoderLayer, DecoderShape, Experts, FeedForward, GatedMlp, Linear,
    RopeConfig,
};
use mlxcel_sdk::prelude::*;
use serde_json::Value;

use crate::gguf;
use crate::model::{Places, load_rope_of};
use crate::tempered::{Temperature, TemperedAttention, TemperedConfig};

struct Llama4;

architecture! {
    Llama4,
    id: "llama4", display_name: "Llama 4 (text)", category: "moe", task: "text-generation",
    model_types: ["llama4", "llama4_text"], gguf: ["llama4"],
    aliases: ["Llama 4 Scout", "Llama 4 Maverick", "MobileLLM-R1"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

/// Modules of a checkpoint that only images need.
const OTHER_PARTS: [&str; 2] = ["vision_model", "multi_modal_projector"];

const CHUNK: &str = "attention_chunk_size";
/// The chunk of `Llama4TextConfig` in transformers.
const DEFAULT_CHUNK: usize = 8192;

/// What `text_config` may call itself.
const MODEL_TYPES: [&str; 2] = ["llama4_text", "llama4"];

#[derive(Debug, Clone, Copy)]
struct LayerKind {
    rope: bool,
    /// Looks at its own chunk of the sequence only.
    chunked: bool,
    /// A mixture of experts in place of the dense block.
    sparse: bool,
}

#[derive(Debug, Clone)]
struct Llama4Config {
    vocab: usize,
    hidden: usize,
    /// Width of an expert, the shared one included.
    expert_inner: usize,
    /// Width of a dense block.
    dense_inner: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    context: usize,
    eps: f32,
    tied: bool,
    bias: bool,
    qk_norm: bool,
    temperature: Option<Temperature>,
    chunk: Option<usize>,
    n_experts: usize,
    top_k: usize,
    activation: Activation,
    rope: RopeConfig,
    layers: Vec<LayerKind>,
}

impl Llama4Config {
    fn read(config: &Config<'_>) -> Result<Self> {
        match config.text_section("text_config", &MODEL_TYPES)? {
            Some(text) => Self::read_text(&text),
            None if config.opt_str("model_type")? == Some("llama4") => {
                Err(config.error("text_config", "an object with the decoder's settings"))
            }
            None => Self::read_text(config),
        }
    }

    fn read_text(config: &Config<'_>) -> Result<Self> {
        let hidden = config.uint("hidden_size")?;
        let heads = config.uint_in("num_attention_heads", 1..=4096)?;
        let kv_heads = config
            .opt_uint("num_key_value_heads", 1..=4096)?
            .unwrap_or(heads);
        config.divides(
            ("num_key_value_heads", kv_heads),
            ("num_attention_heads", heads),
        )?;
        let head_dim = config.opt_uint("head_dim", 2..=4096)?.unwrap_or(128);
        let rope = RopeConfig::read_whole_or(config, head_dim, 5e5)?;
        let chunk = config.opt_uint(CHUNK, 1..=1 << 30)?;
        // Without the key it is the class's; a null is none.
        let chunk = chunk.or((!config.is_null(CHUNK)).then_some(DEFAULT_CHUNK));
        let n_layers = config.uint_in("num_hidden_layers", 1..=4096)?;
        let layers = layer_kinds(config, n_layers, chunk.is_some())?;
        let sparse = layers.iter().any(|layer| layer.sparse);
        let (n_experts, top_k) = if sparse {
            read_experts(config)?
        } else {
            (0, 0)
        };
        let dense = layers.iter().any(|layer| !layer.sparse);
        Ok(Self {
            vocab: config.uint("vocab_size")?,
            hidden,
            expert_inner: if sparse {
                config.uint("intermediate_size")?
            } else {
                0
            },
            dense_inner: if dense {
                config.uint("intermediate_size_mlp")?
            } else {
                0
            },
            heads,
            kv_heads,
            head_dim,
            context: config.uint_or("max_position_embeddings", 131_072)?,
            eps: config.float_or("rms_norm_eps", 1e-5, 0.0..=1.0)? as f32,
            tied: config.bool_or("tie_word_embeddings", false)?,
            bias: config.bool_or("attention_bias", false)?,
            qk_norm: config.bool_or("use_qk_norm", true)?,
            temperature: read_temperature(config)?,
            chunk,
            n_experts,
            top_k,
            activation: Activation::read(config, "hidden_act", Activation::Silu)?,
            rope,
            layers,
        })
    }
}

/// A switch in newer files; older ones hold the number 4, which the reference takes for "on" too.
fn read_temperature(config: &Config<'_>) -> Result<Option<Temperature>> {
    let key = "attn_temperature_tuning";
    let on = match config.get(key) {
        Some(Value::Number(number)) if number.as_u64().is_some_and(|n| n <= 16) => {
            number.as_u64() != Some(0)
        }
        Some(Value::Number(_)) => {
            return Err(config.error(
                key,
                "true, false, or an integer from 0 to 16, where 0 is off",
            ));
        }
        _ => config.bool_or(key, true)?,
    };
    if !on {
        return Ok(None);
    }
    Ok(Some(Temperature {
        scale: config.float_or("attn_scale", 0.1, 0.0..=1e3)?,
        length: config.float_or("floor_scale", 8192.0, 1.0..=1e9)?,
        offset: 1.0,
    }))
}

fn read_experts(config: &Config<'_>) -> Result<(usize, usize)> {
    let n_experts = match config.spelled(&["num_local_experts", "num_experts"]) {
        Some(key) => config.uint_in(key, 1..=4096)?,
        None => 16,
    };
    let top_k = config
        .opt_uint("num_experts_per_tok", 1..=4096)?
        .unwrap_or(1);
    if top_k > n_experts {
        return Err(config.error(
            "num_experts_per_tok",
            format!("at most the number of experts ({n_experts})"),
        ));
    }
    Ok((n_experts, top_k))
}

fn layer_kinds(config: &Config<'_>, n_layers: usize, has_chunk: bool) -> Result<Vec<LayerKind>> {
    let one_each = || format!("one entry for each of {n_layers} layers");
    let interval = config.uint_or("no_rope_layer_interval", 4)?;
    let rope: Vec<bool> = match config.opt_uints("no_rope_layers")? {
        // 1 means that the layer has the embedding; an empty list is no list.
        Some(list) if !list.is_empty() => {
            if list.len() < n_layers {
                return Err(config.error("no_rope_layers", one_each()));
            }
            list.iter().map(|&flag| flag != 0).collect()
        }
        _ => (1..=n_layers)
            .map(|layer| !layer.is_multiple_of(interval))
            .collect(),
    };
    let chunked: Vec<bool> = match config.opt_strs("layer_types")? {
        None => rope.iter().map(|&rope| rope && has_chunk).collect(),
        Some(types) => {
            if types.len() != n_layers {
                return Err(config.error("layer_types", one_each()));
            }
            types
                .iter()
                .enumerate()
                .map(|(layer, &kind)| match kind {
                    "full_attention" => Ok(false),
                    "chunked_attention" if has_chunk => Ok(true),
                    "chunked_attention" => {
                        Err(config.error(CHUNK, "an integer, as layer_types has chunked_attention"))
                    }
                    _ => {
                        let known = "known types are full_attention and chunked_attention";
                        Err(config.unsupported_entry("layer_types", layer, known))
                    }
                })
                .collect::<Result<_>>()?
        }
    };
    let sparse: Vec<bool> = match config.opt_uints("moe_layers")? {
        Some(list) => {
            if let Some(layer) = list.iter().find(|layer| **layer >= n_layers) {
                let expected = format!("layer numbers below {n_layers}, not {layer}");
                return Err(config.error("moe_layers", expected));
            }
            (0..n_layers).map(|layer| list.contains(&layer)).collect()
        }
        None => {
            let step = config.uint_or("interleave_moe_layer_step", 1)?;
            (1..=n_layers)
                .map(|layer| layer.is_multiple_of(step))
                .collect()
        }
    };
    let kinds = rope.into_iter().zip(chunked).zip(sparse);
    Ok(kinds
        .map(|((rope, chunked), sparse)| LayerKind {
            rope,
            chunked,
            sparse,
        })
        .collect())
}

/// Router, experts, and the expert of every row.
struct SparseMlp {
    router: Linear,
    experts: Experts,
    shared: GatedMlp,
    n_experts: usize,
    top_k: usize,
}

impl SparseMlp {
    fn load(at: &Weights, config: &Llama4Config) -> Result<Self> {
        let (hidden, inner, n_experts) = (config.hidden, config.expert_inner, config.n_experts);
        let experts = at.at("experts");
        let names = ["gate_proj", "up_proj", "down_proj"];
        let activation = config.activation;
        Ok(Self {
            router: Linear::load(&at.at("router"), hidden, n_experts, false)?,
            experts: if experts.contains("gate_up_proj") {
                Experts::load_input_major(&experts, n_experts, hidden, inner, activation)?
            } else {
                Experts::load(
                    &experts, &experts, names, n_experts, hidden, inner, activation,
                )?
            },
            shared: GatedMlp::load(&at.at("shared_expert"), hidden, inner, false, activation)?,
            n_experts,
            top_k: config.top_k,
        })
    }
}

impl FeedForward for SparseMlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let scores = self.router.forward(x)?; // [T, E]
        let (n, k) = (self.n_experts as i64, self.top_k as i64);
        let chosen = if n == k {
            scores.argsort(-1)?
        } else {
            scores.argpartition(n - k, -1)?.narrow(1, n - k, k)? // [T, K]
        };
        let weights = scores.take_along(&chosen, 1)?.cast(DType::F32)?.sigmoid()?;
        let weights = weights.cast(x.dtype()?)?;
        // The weight is on the input: a row per chosen expert, each with an expert of its own.
        let scaled = x.unsqueeze(1)?.mul(&weights.unsqueeze(2)?)?; // [T, K, hidden]
        let hidden = scaled.dim(-1)?;
        let rows = scaled.reshape(&[-1, hidden])?; // [T K, hidden]
        let routed = self.experts.each(&rows, &chosen.reshape(&[-1, 1])?)?; // [T K, 1, hidden]
        let routed = routed.reshape(&[-1, k, hidden])?.sum(&[1], false)?;
        self.shared.forward(x)?.add(&routed)
    }
}

impl Architecture for Llama4 {
    fn probe(&self, _config: &Config<'_>) -> Probe {
        Probe::fits(100, "model_type")
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let config = Llama4Config::read(config)?;
        let (kv_heads, k_dim, v_dim) = (config.kv_heads, config.head_dim, config.head_dim);
        let cache = |kind: &LayerKind| match config.chunk.filter(|_| kind.chunked) {
            // A row never sees more keys than its chunk has positions.
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
        let sparse_inner = (config.top_k + 1) * config.expert_inner;
        Ok(ModelDesc {
            arch: "llama4".to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: config.vocab,
            hidden_size: config.hidden,
            context_length: config.context,
            layers: config.layers.iter().map(cache).collect(),
            activation_width: 2 * config.hidden + 3 * sparse_inner.max(config.dense_inner),
            encoder: None,
        })
    }

    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        gguf::adapt_llama4(summary)
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        let config = Llama4Config::read(config)?;
        let places = Places::nested(weights, &OTHER_PARTS);
        let rope = load_rope_of(&config.rope, config.head_dim, true, &places.model)?;
        let shape = DecoderShape {
            vocab: config.vocab,
            hidden: config.hidden,
            eps: config.eps,
            norms_minus_one: false,
            tied: config.tied,
            n_layers: config.layers.len(),
        };
        let kinds = &config.layers;
        let model = Decoder::load(&shape, &places.model, &places.head, |index, layer| {
            let (rotated, chunked, sparse) = kinds
                .get(index)
                .map_or((true, false, false), |k| (k.rope, k.chunked, k.sparse));
            let attention = TemperedConfig {
                layer: index,
                hidden: config.hidden,
                heads: config.heads,
                kv_heads: config.kv_heads,
                head_dim: config.head_dim,
                bias: config.bias,
                qk_norm_eps: (config.qk_norm && rotated).then_some(config.eps),
                temperature: config.temperature.filter(|_| !rotated),
                chunk: config.chunk.filter(|_| chunked),
            };
            let rope = rotated.then(|| rope.clone());
            let attention = TemperedAttention::load(&layer.at("self_attn"), attention, rope)?;
            let at = layer.at("feed_forward");
            let feed_forward: Box<dyn FeedForward> = if sparse {
                Box::new(SparseMlp::load(&at, &config)?)
            } else {
                let (hidden, inner) = (config.hidden, config.dense_inner);
                Box::new(GatedMlp::load(
                    &at,
                    hidden,
                    inner,
                    false,
                    config.activation,
                )?)
            };
            DecoderLayer::load(layer, &shape, Box::new(attention), feed_forward)
        })?;
        Ok(Box::new(model))
    }
}
