//! `deepseek_v4`: several residual streams joined by hyper-connections; attention with one shared
//! key and value within a window and compressed keys beyond it; experts by token id in the first
//! layers and by scores in the others.

use mlxcel_sdk::nn::{
    Activation, Embedding, Experts, GatedMlp, LmHead, RmsNorm, Rope, RopeConfig, RopeScaling,
};
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, only, probe_text};
use crate::hyper::{HyperConfig, HyperConnection, HyperHead};
use crate::routing::{Router, RouterConfig, Scoring};
use crate::shared_kv::{Reach, SharedAttention, SharedConfig};

struct DeepseekV4;

architecture! {
    DeepseekV4,
    id: "deepseek_v4", display_name: "DeepSeek-V4", category: "moe", task: "text-generation",
    model_types: ["deepseek_v4"], gguf: [], aliases: ["DeepSeek-V4-Flash", "DeepSeek-V4-Pro"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
}

const WIDTH: core::ops::RangeInclusive<usize> = 1..=65_536;
const COUNT: core::ops::RangeInclusive<usize> = 1..=4096;

struct Settings {
    decoder: DecoderConfig,
    attention: SharedConfig,
    reaches: Vec<Reach>,
    /// Embedding of layers with a window alone, and of the others.
    ropes: [RopeConfig; 2],
    hyper: HyperConfig,
    moe: MoeSettings,
}

struct MoeSettings {
    router: RouterConfig,
    inner: usize,
    limit: f64,
    /// Layers whose experts follow from the token id.
    hashed: Vec<bool>,
}

fn read(config: &Config<'_>) -> Result<Settings> {
    let decoder = DecoderConfig::read(config, 1 << 20)?;
    if decoder.attention_bias {
        return Err(config.unsupported("attention_bias", "this architecture has no biases"));
    }
    if config.opt_uint("num_key_value_heads", COUNT)?.unwrap_or(1) != 1 {
        return Err(config.unsupported("num_key_value_heads", "all heads share 1"));
    }
    let width = config.uint_in("head_dim", WIDTH)?;
    let attention = SharedConfig {
        hidden: decoder.hidden,
        heads: decoder.heads,
        width,
        rotated: rotated(config, width)?,
        q_rank: config.uint_in("q_lora_rank", WIDTH)?,
        window: config.uint("sliding_window")?.min(decoder.context),
        out_groups: config.uint_in("o_groups", COUNT)?,
        out_rank: config.uint_in("o_lora_rank", WIDTH)?,
        index_heads: config.uint_in("index_n_heads", COUNT)?,
        index_width: config.uint_in("index_head_dim", WIDTH)?,
        index_top_k: config.uint("index_topk")?,
        eps: decoder.eps,
    };
    config.divides(
        ("o_groups", attention.out_groups),
        ("num_attention_heads", attention.heads),
    )?;
    if attention.index_width < attention.rotated {
        let expected = format!("at least the {} rotated features", attention.rotated);
        return Err(config.error("index_head_dim", expected));
    }
    let ropes = [
        read_rope(config, "main", &attention)?,
        read_rope(config, "compress", &attention)?,
    ];
    Ok(Settings {
        reaches: read_reaches(config, decoder.n_layers)?,
        hyper: HyperConfig {
            streams: config.opt_uint("hc_mult", 1..=64)?.unwrap_or(4),
            rounds: config
                .opt_uint("hc_sinkhorn_iters", 1..=1000)?
                .unwrap_or(20),
            eps: config.float_or("hc_eps", 1e-6, 0.0..=1.0)?,
            norm_eps: decoder.eps,
        },
        moe: read_moe(config, &decoder)?,
        attention,
        ropes,
        decoder,
    })
}

/// Rotated features of a head: `qk_rope_head_dim` as published, a part of the head as transformers
/// saves it.
fn rotated(config: &Config<'_>, width: usize) -> Result<usize> {
    let key = "qk_rope_head_dim";
    let rotated = match config.opt_uint(key, WIDTH)? {
        Some(rotated) => rotated,
        None => {
            let part = config.float_or("partial_rotary_factor", 0.125, 1e-3..=1.0)?;
            (width as f64 * part) as usize
        }
    };
    if rotated == 0 || rotated > width || !rotated.is_multiple_of(2) {
        let expected = format!("an even number up to head_dim ({width}) (this gives {rotated})");
        return Err(config.error(key, expected));
    }
    Ok(rotated)
}

/// Settings of one of the two embeddings: nested under its name, or flat, where the scaling is that of
/// `compress` alone, without a factor on cosines and sines, and its base stands apart.
fn read_rope(config: &Config<'_>, name: &str, attention: &SharedConfig) -> Result<RopeConfig> {
    let outer = config.section("rope_parameters")?;
    let nested = match &outer {
        Some(outer) => outer.section(name)?,
        None => None,
    };
    let main = name == "main";
    let (key, base) = if main {
        ("rope_theta", 10_000.0)
    } else {
        ("compress_rope_theta", 160_000.0)
    };
    let base = config.float_or(key, base, 1.0..=1e12)?;
    let width = attention.width;
    let mut rope = match (nested, main) {
        (Some(nested), _) => RopeConfig::from_settings(config, Some(&nested), base, width)?,
        (None, true) => RopeConfig::from_settings(config, None, base, width)?,
        (None, false) => {
            let legacy = config.section("rope_scaling")?;
            let flat = outer.or(legacy);
            let mut rope = RopeConfig::from_settings(config, flat.as_ref(), base, width)?;
            rope.base = base;
            let given = flat.is_some_and(|flat| flat.get("attention_factor").is_some());
            if let RopeScaling::Yarn {
                attention_factor, ..
            } = &mut rope.scaling
                && !given
            {
                *attention_factor = 1.0;
            }
            rope
        }
    };
    rope.dims = attention.rotated;
    Ok(rope)
}

/// What every layer sees, from `layer_types`, or from the publisher's `compress_ratios`, or the
/// pattern of the class.
fn read_reaches(config: &Config<'_>, n_layers: usize) -> Result<Vec<Reach>> {
    let rates = config.section("compress_rates")?;
    let rate = |nested: &str, beside: &str, class: usize| -> Result<usize> {
        let inside = match &rates {
            Some(rates) => rates.opt_uint(nested, COUNT)?,
            None => None,
        };
        Ok(config.opt_uint(beside, COUNT)?.or(inside).unwrap_or(class))
    };
    let sparse = Reach::Sparse {
        rate: rate("compressed_sparse_attention", "compress_rate_csa", 4)?,
    };
    let heavy = Reach::Heavy {
        rate: rate("heavily_compressed_attention", "compress_rate_hca", 128)?,
    };
    let too_few = |key: &str| config.error(key, format!("one entry for each of {n_layers} layers"));
    if let Some(types) = config.opt_strs("layer_types")? {
        if types.len() != n_layers {
            return Err(too_few("layer_types"));
        }
        return types
            .iter()
            .map(|&kind| match kind {
                "sliding_attention" => Ok(Reach::Window),
                "compressed_sparse_attention" => Ok(sparse),
                "heavily_compressed_attention" => Ok(heavy),
                _ => Err(config.unsupported(
                    "layer_types",
                    "known types are sliding_attention, compressed_sparse_attention and heavily_compressed_attention",
                )),
            })
            .collect();
    }
    if let Some(ratios) = config.opt_uints("compress_ratios")? {
        // The list also has entries for the layers that predict further tokens.
        if ratios.len() < n_layers {
            return Err(too_few("compress_ratios"));
        }
        return ratios
            .iter()
            .take(n_layers)
            .map(|ratio| match ratio {
                0 => Ok(Reach::Window),
                4 => Ok(sparse),
                128 => Ok(heavy),
                _ => Err(config.unsupported("compress_ratios", "known ratios are 0, 4 and 128")),
            })
            .collect();
    }
    let pattern = |layer: usize| match layer {
        0 | 1 => heavy,
        _ if layer.is_multiple_of(2) => heavy,
        _ => sparse,
    };
    Ok((0..n_layers).map(pattern).collect())
}

fn read_moe(config: &Config<'_>, decoder: &DecoderConfig) -> Result<MoeSettings> {
    only(config, "scoring_func", "sqrtsoftplus")?;
    only(config, "topk_method", "noaux_tc")?;
    if !config.bool_or("norm_topk_prob", true)? {
        let supported = "scores of this architecture are always made to sum to 1";
        return Err(config.unsupported("norm_topk_prob", supported));
    }
    if config.opt_uint("n_shared_experts", 0..=4096)?.unwrap_or(1) != 1 {
        return Err(config.unsupported("n_shared_experts", "this architecture has 1"));
    }
    let n_experts = config.uint_in("n_routed_experts", COUNT)?;
    let top_k = config.uint_in("num_experts_per_tok", COUNT)?;
    if top_k > n_experts {
        let expected = format!("at most the number of experts ({n_experts})");
        return Err(config.error("num_experts_per_tok", expected));
    }
    let n_layers = decoder.n_layers;
    let first = config.opt_uint("num_hash_layers", 0..=4096)?.unwrap_or(3);
    let hashed = match config.opt_strs("mlp_layer_types")? {
        None => (0..n_layers).map(|layer| layer < first).collect(),
        Some(types) if types.len() != n_layers => {
            let expected = format!("one entry for each of {n_layers} layers");
            return Err(config.error("mlp_layer_types", expected));
        }
        Some(types) => types
            .iter()
            .map(|&kind| match kind {
                "hash_moe" => Ok(true),
                "moe" => Ok(false),
                _ => Err(config.unsupported("mlp_layer_types", "known types are hash_moe and moe")),
            })
            .collect::<Result<_>>()?,
    };
    Ok(MoeSettings {
        router: RouterConfig {
            n_experts,
            top_k,
            scoring: Scoring::SqrtSoftplus,
            selection_bias: Some("bias"),
            groups: None,
            renormalise: true,
            scale: config.float_or("routed_scaling_factor", 1.5, 1e-6..=1e6)?,
        },
        inner: config.uint("moe_intermediate_size")?,
        limit: config.float_or("swiglu_limit", 10.0, 1e-6..=1e6)?,
        hashed,
    })
}

impl Architecture for DeepseekV4 {
    fn probe(&self, config: &Config<'_>) -> Probe {
        probe_text(config)
    }

    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc> {
        let settings = read(config)?;
        let (decoder, attention) = (&settings.decoder, &settings.attention);
        let reaches = settings.reaches.iter();
        let inner = (settings.moe.router.top_k + 1) * settings.moe.inner;
        let streams = 3 * settings.hyper.streams * decoder.hidden;
        Ok(ModelDesc {
            arch: "deepseek_v4".to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: decoder.vocab,
            hidden_size: decoder.hidden,
            context_length: decoder.context,
            layers: reaches.flat_map(|&reach| attention.caches(reach)).collect(),
            activation_width: streams + attention.activation_width().max(3 * inner),
            encoder: None,
        })
    }

    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>> {
        Ok(Box::new(StreamDecoder::load(&read(config)?, weights)?))
    }
}

/// Experts, and the one that every row goes through.
struct HashedMoe {
    router: Router,
    /// Experts of every token id, `[V, K]` u32; none where scores choose.
    by_token: Option<Tensor>,
    experts: Experts,
    shared: GatedMlp,
}

impl HashedMoe {
    fn load(
        weights: &Weights,
        hashed: bool,
        vocab: usize,
        hidden: usize,
        moe: &MoeSettings,
    ) -> Result<Self> {
        const NAMES: [&str; 3] = ["w1", "w3", "w2"];
        let (n, inner, activation) = (moe.router.n_experts, moe.inner, Activation::Silu);
        let gate = weights.at("gate");
        let mut router = moe.router.clone();
        let by_token = if hashed {
            router.selection_bias = None;
            Some(load_table(&gate, vocab, &moe.router)?)
        } else {
            None
        };
        let (each, stacked) = (weights.at("experts"), weights.at("switch_mlp"));
        let experts = Experts::load(&each, &stacked, NAMES, n, hidden, inner, activation)?;
        let shared = weights.at("shared_experts");
        let shared = GatedMlp::load_named(&shared, NAMES, hidden, inner, false, activation)?;
        Ok(Self {
            router: Router::load(&gate, hidden, router)?,
            by_token,
            experts: experts.limited(moe.limit),
            shared: shared.limited(moe.limit),
        })
    }

    fn forward(&self, x: &Tensor, tokens: &Tensor) -> Result<Tensor> {
        let routing = match &self.by_token {
            Some(table) => self.router.forward_chosen(x, table.take(tokens, 0)?)?,
            None => self.router.forward(x)?,
        };
        self.experts
            .forward(x, &routing)?
            .add(&self.shared.forward(x)?)
    }
}

/// `tid2eid`: integers. A number beyond the experts must not reach memory that is not theirs.
fn load_table(weights: &Weights, vocab: usize, router: &RouterConfig) -> Result<Tensor> {
    let name = "tid2eid";
    let stored = weights.stored(name, &[vocab as i64, router.top_k as i64])?;
    let dtype = stored.dtype()?;
    if dtype.is_float() || dtype == DType::BOOL {
        return Err(Error::Quantization {
            name: format!("{}.{name}", weights.path()),
            message: format!("stored as {}, integers are needed here", dtype.name()),
        });
    }
    let table = stored
        .cast(DType::I32)?
        .clip(0.0, (router.n_experts - 1) as f64)?
        .cast(DType::U32)?;
    weights.keep(&table);
    Ok(table)
}

/// Attention and experts, each between a sum of the streams and their next mix.
struct Block {
    attention_streams: HyperConnection,
    attention_norm: RmsNorm,
    attention: SharedAttention,
    moe_streams: HyperConnection,
    moe_norm: RmsNorm,
    moe: HashedMoe,
}

impl Block {
    /// `[T, N, H]` to `[T, N, H]`.
    fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let (y, spread) = self.attention_streams.collapse(x)?;
        let y = self
            .attention
            .forward(&self.attention_norm.forward(&y)?, step)?;
        let x = spread.expand(&y)?;
        let (y, spread) = self.moe_streams.collapse(&x)?;
        let y = self
            .moe
            .forward(&self.moe_norm.forward(&y)?, &step.tokens)?;
        spread.expand(&y)
    }
}

/// Embedding, blocks, last sum of the streams, final norm, head.
struct StreamDecoder {
    streams: i64,
    embedding: Embedding,
    blocks: Vec<Block>,
    collapse: HyperHead,
    norm: RmsNorm,
    head: LmHead,
}

impl StreamDecoder {
    fn load(settings: &Settings, weights: &Weights) -> Result<Self> {
        let Settings {
            decoder,
            attention,
            reaches,
            ropes,
            hyper,
            moe,
        } = settings;
        let (vocab, hidden, eps) = (decoder.vocab, decoder.hidden, decoder.eps);
        // Published without a prefix, saved by transformers with one and some other names.
        let inner = weights.at("model");
        let root = if inner.at("layers").exists() {
            inner
        } else {
            weights.clone()
        };
        let embedding = ["embed", "embed_tokens"].map(|name| root.at(name));
        let embedding = embedding.iter().find(|at| at.contains("weight"));
        let embedding = embedding.cloned().unwrap_or_else(|| root.at("embed"));
        let embedding = Embedding::load(&embedding, vocab, hidden)?;
        // Layers that predict further tokens, for drafting.
        for at in [weights, &root] {
            at.at("mtp").ignore_all();
        }
        let [main, compress] = ropes;
        let rope = |config| Rope::new(weights, config, attention.rotated, true);
        let (main, compress) = (rope(main)?, rope(compress)?);
        let (layers, mut cache) = (root.at("layers"), 0);
        let blocks = reaches
            .iter()
            .zip(&moe.hashed)
            .enumerate()
            .map(|(layer, (&reach, &hashed))| {
                let at = layers.at_index(layer);
                let first = cache;
                cache += attention.caches(reach).len();
                let rope = if reach == Reach::Window {
                    &main
                } else {
                    &compress
                };
                let norm = |name: &str| RmsNorm::load(&at.at(name), hidden, eps);
                Ok(Block {
                    attention_streams: HyperConnection::load(&at, "attn", hidden, *hyper)?,
                    attention_norm: norm("attn_norm")?,
                    attention: SharedAttention::load(
                        &at.at("attn"),
                        first,
                        reach,
                        attention,
                        rope,
                    )?,
                    moe_streams: HyperConnection::load(&at, "ffn", hidden, *hyper)?,
                    moe_norm: norm("ffn_norm")?,
                    moe: HashedMoe::load(&at.at("ffn"), hashed, vocab, hidden, moe)?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let head = ["head", "lm_head"].map(|name| weights.at(name));
        let head = head.iter().find(|at| at.contains("weight"));
        let head = head.cloned().unwrap_or_else(|| weights.at("head"));
        Ok(Self {
            streams: hyper.streams as i64,
            collapse: HyperHead::load(&root, hidden, *hyper)?,
            norm: RmsNorm::load(&root.at("norm"), hidden, eps)?,
            head: LmHead::load(&head, &embedding, decoder.tied, vocab, hidden)?,
            embedding,
            blocks,
        })
    }
}

impl Model for StreamDecoder {
    fn forward(&self, step: &Step<'_>) -> Result<Tensor> {
        let x = self.embedding.forward(&step.tokens)?; // [T, H]
        let (rows, hidden) = (x.dim(0)?, x.dim(1)?);
        let mut x = x
            .unsqueeze(1)?
            .broadcast_to(&[rows, self.streams, hidden])?; // [T, N, H]
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block
                .forward(&x, step)
                .map_err(|e| e.at(&format!("layer {layer}")))?;
        }
        let rows = self.collapse.forward(&step.logit_rows(&x)?)?; // [R, H]
        self.head.forward_normed(&rows, &self.norm) // [R, V]
    }
}
