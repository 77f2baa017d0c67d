//! Configuration of the lines that mix attention with the gated delta rule. Defaults are those of the
//! transformers library (`Qwen3NextConfig`, `Qwen3_5TextConfig`).

use mlxcel_sdk::nn::{Activation, RopeConfig};
use mlxcel_sdk::prelude::*;

const LINEAR: &str = "linear_attention";
const FULL: &str = "full_attention";

/// Every so many layers attend, where `layer_types` does not say which.
const DEFAULT_INTERVAL: usize = 4;

/// Set by our GGUF adapter alone.
pub(crate) const TILED: &str = "linear_tiled_value_heads";

/// Share of a head's features that is rotated, where the configuration gives none.
const DEFAULT_ROTATED: f64 = 0.25;

/// How the delta rule's projections are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Two products, interleaved by key head.
    Joined,
    /// A product each.
    Apart,
}

/// Widths of the delta rule.
#[derive(Debug, Clone)]
pub(crate) struct DeltaConfig {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Taps of the convolution.
    pub taps: usize,
    /// Value head h goes with key head `h % key_heads`, as in GGUF files of some; else the heads of a key
    /// head lie side by side.
    pub tiled: bool,
}

impl DeltaConfig {
    /// Width of all queries (or keys) and of all values.
    pub(crate) fn widths(&self) -> (usize, usize) {
        (
            self.key_heads * self.key_dim,
            self.value_heads * self.value_dim,
        )
    }

    /// Channels of the convolution: queries, keys, values.
    pub(crate) fn channels(&self) -> usize {
        let (keys, values) = self.widths();
        2 * keys + values
    }

    fn read(config: &Config<'_>) -> Result<Self> {
        let width = |key: &str, default| {
            Ok::<_, Error>(config.opt_uint(key, 1..=65_536)?.unwrap_or(default))
        };
        let delta = Self {
            key_heads: width("linear_num_key_heads", 16)?,
            value_heads: width("linear_num_value_heads", 32)?,
            key_dim: width("linear_key_head_dim", 128)?,
            value_dim: width("linear_value_head_dim", 128)?,
            taps: config
                .opt_uint("linear_conv_kernel_dim", 2..=64)?
                .unwrap_or(4),
            tiled: config.bool_or(TILED, false)?,
        };
        config.divides(
            ("linear_num_key_heads", delta.key_heads),
            ("linear_num_value_heads", delta.value_heads),
        )?;
        Ok(delta)
    }
}

/// A hybrid decoder, without its feed-forward blocks.
#[derive(Debug, Clone)]
pub(crate) struct HybridConfig {
    pub vocab: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub context: usize,
    pub eps: f32,
    pub tied: bool,
    pub bias: bool,
    pub activation: Activation,
    pub rope: RopeConfig,
    pub delta: DeltaConfig,
    pub layout: Layout,
    /// Whether a layer attends; the others run the delta rule.
    pub attends: Vec<bool>,
}

impl HybridConfig {
    /// Reads the text model's settings; `tied` is what holds where these do not say.
    pub(crate) fn read(config: &Config<'_>, tied: bool, layout: Layout) -> Result<Self> {
        let hidden = config.uint("hidden_size")?;
        let heads = config.uint_in("num_attention_heads", 1..=4096)?;
        let kv_heads = config
            .opt_uint("num_key_value_heads", 1..=4096)?
            .unwrap_or(heads);
        config.divides(
            ("num_key_value_heads", kv_heads),
            ("num_attention_heads", heads),
        )?;
        let head_dim = config.opt_uint("head_dim", 2..=4096)?.unwrap_or(256);
        let rope = RopeConfig::read_share(config, head_dim, DEFAULT_ROTATED)?;
        let n_layers = config.uint_in("num_hidden_layers", 1..=4096)?;
        Ok(Self {
            vocab: config.uint("vocab_size")?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            context: config.uint_or("max_position_embeddings", 32_768)?,
            eps: config.float_or("rms_norm_eps", 1e-6, 0.0..=1.0)? as f32,
            tied: config.bool_or("tie_word_embeddings", tied)?,
            bias: config.bool_or("attention_bias", false)?,
            activation: Activation::read(config, "hidden_act", Activation::Silu)?,
            rope,
            delta: DeltaConfig::read(config)?,
            layout,
            attends: attending_layers(config, n_layers)?,
        })
    }

    /// What the host needs to know; `inner` is the width of the widest feed-forward block.
    pub(crate) fn describe(&self, arch: &str, inner: usize) -> ModelDesc {
        let delta = &self.delta;
        let states = vec![
            StateDesc::f32(&[delta.taps - 1, delta.channels()]),
            StateDesc::f32(&[delta.value_heads, delta.key_dim, delta.value_dim]),
        ];
        let cache = |attends: &bool| match attends {
            true => CacheDesc::Dense {
                kv_heads: self.kv_heads,
                k_dim: self.head_dim,
                v_dim: self.head_dim,
            },
            false => CacheDesc::Recurrent {
                states: states.clone(),
            },
        };
        // Beside residual and normed input: queries with gates, keys, values and the attended values; or
        // queries, keys and values before and after the convolution, gates and results; or the two halves
        // of the gated block with their product.
        let attention = (3 * self.heads + 2 * self.kv_heads) * self.head_dim;
        let linear = 2 * delta.channels() + 2 * delta.widths().1;
        ModelDesc {
            arch: arch.to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            context_length: self.context,
            layers: self.attends.iter().map(cache).collect(),
            activation_width: 2 * self.hidden + attention.max(linear).max(3 * inner),
            encoder: None,
        }
    }
}

/// Which layers attend: `layer_types`, or every `full_attention_interval`-th.
fn attending_layers(config: &Config<'_>, n_layers: usize) -> Result<Vec<bool>> {
    const INTERVAL: &str = "full_attention_interval";
    let interval = config
        .opt_uint(INTERVAL, 1..=4096)?
        .unwrap_or(DEFAULT_INTERVAL);
    let Some(types) = config.opt_strs("layer_types")? else {
        return Ok((1..=n_layers).map(|n| n.is_multiple_of(interval)).collect());
    };
    if types.len() != n_layers {
        let expected = format!(
            "one entry for each of {n_layers} layers, not {}",
            types.len()
        );
        return Err(config.error("layer_types", expected));
    }
    types
        .iter()
        .enumerate()
        .map(|(layer, &kind)| match kind {
            LINEAR => Ok(false),
            FULL => Ok(true),
            _ => {
                let known = format!("known types are {LINEAR} and {FULL}");
                Err(config.unsupported_entry("layer_types", layer, known))
            }
        })
        .collect()
}
