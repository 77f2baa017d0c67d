//! Configuration shared by the architectures of this family. Defaults are those of the configuration
//! classes of the transformers library (`GemmaConfig`, `Gemma2Config`, `Gemma3TextConfig`), because
//! published files leave many keys out.

use mlxcel_sdk::abi::kinds::glu;
use mlxcel_sdk::nn::{Activation, RopeConfig};
use mlxcel_sdk::prelude::*;

/// Sizes that every architecture reads alike.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    pub vocab: usize,
    pub hidden: usize,
    pub inner: usize,
    pub n_layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub context: usize,
    pub eps: f32,
    pub attention_bias: bool,
}

/// Defaults that differ between the configuration classes.
pub(crate) struct Defaults {
    pub vocab: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub context: usize,
}

/// A decoder of the gemma line.
#[derive(Debug, Clone)]
pub(crate) struct DecoderConfig {
    pub sizes: Sizes,
    pub tied: bool,
    pub activation: Activation,
    /// Attention scores are divided by the root of this.
    pub score_divisor: f64,
    /// Soft cap of the attention scores.
    pub score_cap: Option<f64>,
    /// Soft cap of the logits.
    pub logit_cap: Option<f64>,
    /// One entry a layer: the window of a sliding layer, none for a layer that sees everything.
    pub windows: Vec<Option<usize>>,
    /// Rotary embedding of layers that see everything.
    pub rope: RopeConfig,
    /// Rotary embedding of sliding layers.
    pub sliding_rope: RopeConfig,
    /// Norms behind attention and feed-forward, beside those before them.
    pub post_norms: bool,
    /// Norms of every query and key head.
    pub head_norms: bool,
}

impl Sizes {
    pub(crate) fn read(config: &Config<'_>, defaults: &Defaults) -> Result<Self> {
        Self::read_beside(config, defaults, config.uint("intermediate_size")?)
    }

    /// As `read`, for configurations with another spelling of the feed-forward width.
    pub(crate) fn read_beside(
        config: &Config<'_>,
        defaults: &Defaults,
        inner: usize,
    ) -> Result<Self> {
        let count = |key: &str, default: usize| -> Result<usize> {
            Ok(config.opt_uint(key, 1..=4096)?.unwrap_or(default))
        };
        let heads = count("num_attention_heads", defaults.heads)?;
        let kv_heads = count("num_key_value_heads", defaults.kv_heads)?;
        config.divides(
            ("num_key_value_heads", kv_heads),
            ("num_attention_heads", heads),
        )?;
        let head_dim = config.opt_uint("head_dim", 2..=4096)?.unwrap_or(256);
        if !head_dim.is_multiple_of(2) {
            return Err(config.error(
                "head_dim",
                "an even number, as halves of a head are rotated",
            ));
        }
        Ok(Self {
            vocab: config.uint_or("vocab_size", defaults.vocab)?,
            hidden: config.uint("hidden_size")?,
            inner,
            n_layers: config.uint_in("num_hidden_layers", 1..=4096)?,
            heads,
            kv_heads,
            head_dim,
            context: config.uint_or("max_position_embeddings", defaults.context)?,
            eps: config.float_or("rms_norm_eps", 1e-6, 0.0..=1.0)? as f32,
            attention_bias: config.bool_or("attention_bias", false)?,
        })
    }
}

impl DecoderConfig {
    /// What the host needs to know.
    pub(crate) fn describe(&self, arch: &str) -> ModelDesc {
        let sizes = &self.sizes;
        let (kv_heads, k_dim, v_dim) = (sizes.kv_heads, sizes.head_dim, sizes.head_dim);
        let cache = |window: &Option<usize>| match *window {
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
        // Either the gated block's two halves with their product, or queries before and after the
        // rotation, keys, values and the attended rows.
        let attention = (3 * sizes.heads + 3 * sizes.kv_heads) * sizes.head_dim;
        ModelDesc {
            arch: arch.to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: sizes.vocab,
            hidden_size: sizes.hidden,
            context_length: sizes.context,
            layers: self.windows.iter().map(cache).collect(),
            activation_width: 2 * sizes.hidden + attention.max(3 * sizes.inner),
            encoder: None,
        }
    }
}

/// A soft cap: absent is the default, null is none.
pub(crate) fn soft_cap(
    config: &Config<'_>,
    key: &str,
    default: Option<f64>,
) -> Result<Option<f64>> {
    if config.is_null(key) {
        return Ok(None);
    }
    Ok(config.opt_float(key, 1e-3..=1e6)?.or(default))
}

/// Code of the gated product with this activation.
pub(crate) fn glu_kind(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => glu::SILU,
        Activation::Gelu => glu::GELU,
        Activation::GeluTanh => glu::GELU_TANH,
        Activation::Relu => glu::RELU,
    }
}

/// The text model's configuration: the whole, or its `text_config` where `model_type` is `nested`.
pub(crate) fn text_section<'c>(config: &'c Config<'c>, nested: &str) -> Result<Option<Config<'c>>> {
    if config.opt_str("model_type")? != Some(nested) {
        return Ok(None);
    }
    let model_types = [&*format!("{nested}_text"), nested];
    let text = config.text_section("text_config", &model_types)?;
    text.map(Some).ok_or_else(|| {
        config.error(
            "text_config",
            format!("an object, as model_type is {nested}"),
        )
    })
}

/// Attention scores are divided by the root of `query_pre_attn_scalar`.
pub(crate) fn score_divisor(config: &Config<'_>) -> Result<f64> {
    config.float_or("query_pre_attn_scalar", 256.0, 1e-3..=1e6)
}

/// Refuses models that share a `model_type` with the causal decoder and are something else.
pub(crate) fn check_variant(config: &Config<'_>) -> Result<()> {
    if config.bool_or("use_bidirectional_attention", false)? {
        return Err(config.unsupported(
            "use_bidirectional_attention",
            "attention of this architecture is causal; embedding models are not implemented here",
        ));
    }
    if let Some(own) = config.section("per_layer_config")?
        && own.entries().next().is_some()
    {
        let supported = "heads of this architecture are alike in all layers";
        return Err(config.unsupported("per_layer_config", supported));
    }
    check_head(config)
}

/// Refuses models without a language head.
pub(crate) fn check_head(config: &Config<'_>) -> Result<()> {
    let with_head =
        |name: &&str| name.ends_with("ForCausalLM") || name.ends_with("ForConditionalGeneration");
    match config.opt_strs("architectures")? {
        Some(names) if !names.is_empty() && !names.iter().any(with_head) => Err(config.unsupported(
            "architectures",
            "implemented is the decoder with a language head (..ForCausalLM, ..ForConditionalGeneration)",
        )),
        _ => Ok(()),
    }
}
