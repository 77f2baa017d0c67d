//! Configuration shared by the architectures of this family. Defaults are those of the
//! configuration classes of the transformers library (`LlamaConfig`, `MistralConfig`, ...).

use mlxcel_sdk::nn::{Activation, DecoderShape, RopeConfig};
use mlxcel_sdk::prelude::*;

/// Which positions a layer's attention sees and whether it has any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LayerKind {
    /// Most keys a row sees; none is all.
    pub window: Option<usize>,
    /// Rotary embedding; some layers of smollm3 have none.
    pub rope: bool,
}

/// A decoder of the llama line.
#[derive(Debug, Clone)]
pub(crate) struct DecoderConfig {
    pub vocab: usize,
    pub hidden: usize,
    pub inner: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub context: usize,
    pub eps: f32,
    pub tied: bool,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub activation: Activation,
    pub rope: RopeConfig,
    pub layers: Vec<LayerKind>,
}

/// What differs between the architectures' defaults.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Defaults {
    pub tied: bool,
    /// `sliding_window` is a setting of this architecture.
    pub window: bool,
    /// The window of a configuration without the key; one with a null has none.
    pub default_window: Option<usize>,
    /// Where these are none they are those of `LlamaConfig`.
    pub rope_base: Option<f64>,
    pub eps: Option<f64>,
    pub context: Option<usize>,
    /// Width of a head where the configuration gives none; none is hidden size over heads.
    pub head_dim: Option<usize>,
    /// The feed-forward block is the architecture's own, and so is the meaning of `hidden_act`.
    pub own_feed_forward: bool,
}

impl DecoderConfig {
    pub(crate) fn read(config: &Config<'_>, defaults: &Defaults) -> Result<Self> {
        let hidden = config.uint("hidden_size")?;
        let heads = config.uint_in("num_attention_heads", 1..=4096)?;
        let kv_heads = config
            .opt_uint("num_key_value_heads", 1..=4096)?
            .unwrap_or(heads);
        config.divides(
            ("num_key_value_heads", kv_heads),
            ("num_attention_heads", heads),
        )?;
        let head_dim = match config.opt_uint("head_dim", 2..=4096)?.or(defaults.head_dim) {
            Some(width) => width,
            None => {
                config.divides(("num_attention_heads", heads), ("hidden_size", hidden))?;
                hidden / heads
            }
        };
        let n_layers = config.uint_in("num_hidden_layers", 1..=4096)?;
        let base = defaults.rope_base.unwrap_or(10_000.0);
        let rope = RopeConfig::read_whole_or(config, head_dim, base)?;
        let (eps, context) = (
            defaults.eps.unwrap_or(1e-6),
            defaults.context.unwrap_or(2048),
        );
        Ok(Self {
            vocab: config.uint("vocab_size")?,
            hidden,
            inner: config.uint("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            context: config.uint_or("max_position_embeddings", context)?,
            eps: config.float_or("rms_norm_eps", eps, 0.0..=1.0)? as f32,
            tied: config.bool_or("tie_word_embeddings", defaults.tied)?,
            attention_bias: config.bool_or("attention_bias", false)?,
            mlp_bias: config.bool_or("mlp_bias", false)?,
            activation: if defaults.own_feed_forward {
                Activation::Silu
            } else {
                Activation::read(config, "hidden_act", Activation::Silu)?
            },
            rope,
            layers: layer_kinds(config, n_layers, defaults)?,
        })
    }

    /// What surrounds the layers.
    pub(crate) fn shape(&self) -> DecoderShape {
        DecoderShape {
            vocab: self.vocab,
            hidden: self.hidden,
            eps: self.eps,
            norms_minus_one: false,
            tied: self.tied,
            n_layers: self.layers.len(),
        }
    }

    /// What the host needs to know.
    pub(crate) fn describe(&self, arch: &str) -> ModelDesc {
        let (kv_heads, k_dim, v_dim) = (self.kv_heads, self.head_dim, self.head_dim);
        let cache = |kind: &LayerKind| match kind.window {
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
        ModelDesc {
            arch: arch.to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            context_length: self.context,
            layers: self.layers.iter().map(cache).collect(),
            // Residual, normed input, and the two halves of the gated block with their product.
            activation_width: 2 * self.hidden + 3 * self.inner,
            encoder: None,
        }
    }
}

fn layer_kinds(
    config: &Config<'_>,
    n_layers: usize,
    defaults: &Defaults,
) -> Result<Vec<LayerKind>> {
    const WINDOW: &str = "sliding_window";
    let default = defaults.default_window.filter(|_| !config.is_null(WINDOW));
    let given = || Ok(config.opt_uint(WINDOW, 1..=1 << 30)?.or(default));
    let window = if defaults.window { given()? } else { None };
    let plain = LayerKind { window, rope: true };
    let Some(types) = config.opt_strs("layer_types")? else {
        return Ok(vec![plain; n_layers]);
    };
    if types.len() != n_layers {
        return Err(config.error(
            "layer_types",
            format!("one entry for each of {n_layers} layers"),
        ));
    }
    types
        .iter()
        .enumerate()
        .map(|(layer, &kind)| match kind {
            "full_attention" => Ok(LayerKind {
                window: None,
                rope: true,
            }),
            "sliding_attention" => match given()? {
                Some(window) => Ok(LayerKind {
                    window: Some(window),
                    rope: true,
                }),
                None => {
                    Err(config.error(WINDOW, "an integer, as layer_types has sliding_attention"))
                }
            },
            _ => {
                let known = "known types are full_attention and sliding_attention";
                Err(config.unsupported_entry("layer_types", layer, known))
            }
        })
        .collect()
}
