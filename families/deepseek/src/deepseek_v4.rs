//! `deepseek_v4`: several residual streams joined by hyper-connections; attention with one shared
//! key and value within a window and compressed keys beyond it; experts by token id in the first
//! layers and by scores in the others.

use mlxcel_sdk::nn::{Activation, Embedding, Experts, GatedMlp, LmHead, RmsNorm, Rope};
use mlxcel_sdk::prelude::*;

use crate::config::probe_text;
use crate::deepseek_v4_config::{MoeSettings, Settings, read};
use crate::hyper::{HyperConnection, HyperHead};
use crate::routing::{Router, RouterConfig};
use crate::shared_kv::{Reach, SharedAttention};

struct DeepseekV4;

architecture! {
    DeepseekV4,
    id: "deepseek_v4", display_name: "DeepSeek-V4", category: "moe", task: "text-generation",
    model_types: ["deepseek_v4"], gguf: [], aliases: ["DeepSeek-V4-Flash", "DeepSeek-V4-Pro"],
    runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
    backends: ["cpu": "supported"], kv_modes: ["fp16"],
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
