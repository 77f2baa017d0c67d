//! Configuration shared by the architectures of this family. Defaults are those of the
//! configuration classes of the transformers library (`Qwen2Config`, `Qwen3Config`, ...).

use mlxcel_sdk::nn::{Activation, RopeConfig};
use mlxcel_sdk::prelude::*;

use crate::windows::{WindowRule, windows};

/// What differs between the architectures' attention.
pub(crate) struct Line {
    /// Biases on query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub out_bias: bool,
    /// An RMS norm on every query and key head.
    pub head_norms: bool,
    /// Head width of a configuration without `head_dim`; none is hidden size over heads.
    pub default_head_dim: Option<usize>,
    pub windows: WindowRule,
}

/// A decoder of the qwen line, without its feed-forward blocks.
#[derive(Debug, Clone)]
pub(crate) struct DecoderConfig {
    pub vocab: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub context: usize,
    pub eps: f32,
    pub tied: bool,
    pub qkv_bias: bool,
    pub out_bias: bool,
    pub head_norms: bool,
    pub activation: Activation,
    pub rope: RopeConfig,
    /// Most keys a row sees, by layer; none is all.
    pub windows: Vec<Option<usize>>,
}

impl DecoderConfig {
    pub(crate) fn read(config: &Config<'_>, line: &Line) -> Result<Self> {
        let hidden = config.uint("hidden_size")?;
        let heads = config.uint_in("num_attention_heads", 1..=4096)?;
        let kv_heads = config
            .opt_uint("num_key_value_heads", 1..=4096)?
            .unwrap_or(heads);
        config.divides(
            ("num_key_value_heads", kv_heads),
            ("num_attention_heads", heads),
        )?;
        let head_dim = config
            .opt_uint("head_dim", 2..=4096)?
            .or(line.default_head_dim);
        let head_dim = match head_dim {
            Some(width) => width,
            None => {
                config.divides(("num_attention_heads", heads), ("hidden_size", hidden))?;
                hidden / heads
            }
        };
        if !head_dim.is_multiple_of(2) {
            let expected = format!("an even number, to be rotated in pairs (this is {head_dim})");
            return Err(config.error("head_dim", expected));
        }
        let rope = RopeConfig::read_whole(config, head_dim)?;
        let n_layers = config.uint_in("num_hidden_layers", 1..=4096)?;
        Ok(Self {
            vocab: config.uint("vocab_size")?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            context: config.uint_or("max_position_embeddings", 32_768)?,
            eps: config.float_or("rms_norm_eps", 1e-6, 0.0..=1.0)? as f32,
            tied: config.bool_or("tie_word_embeddings", false)?,
            qkv_bias: line.qkv_bias,
            out_bias: line.out_bias,
            head_norms: line.head_norms,
            activation: Activation::read(config, "hidden_act", Activation::Silu)?,
            rope,
            windows: windows(config, n_layers, line.windows)?,
        })
    }

    /// What the host needs to know; `inner` is the width of the widest feed-forward block.
    pub(crate) fn describe(&self, arch: &str, inner: usize) -> ModelDesc {
        let (kv_heads, k_dim, v_dim) = (self.kv_heads, self.head_dim, self.head_dim);
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
        // Residual and normed input, beside either queries, keys, values and the attended values,
        // or the two halves of the gated block with their product.
        let attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim;
        ModelDesc {
            arch: arch.to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            context_length: self.context,
            layers: self.windows.iter().map(cache).collect(),
            activation_width: 2 * self.hidden + attention.max(3 * inner),
            encoder: None,
        }
    }
}

/// Fits text generation. The same `model_type` is published with other heads (embeddings, rewards,
/// classes), which `architectures` tells apart, and inside multimodal models.
pub(crate) fn probe_text(config: &Config<'_>) -> Probe {
    if let Some(key) = config.spelled(&["vision_config", "audio_config"]) {
        return Probe::refused(format!(
            "the config has \"{key}\": this is the text-only architecture"
        ));
    }
    let classes = match config.opt_strs("architectures") {
        Ok(classes) => classes.unwrap_or_default(),
        Err(error) => return Probe::refused(error.to_string()),
    };
    let other = classes.iter().find(|class| !class.ends_with("ForCausalLM"));
    match other {
        Some(class) => Probe::refused(format!(
            "architectures has \"{class}\": only models for text generation (..ForCausalLM) are supported"
        )),
        None => Probe::fits(100, "model_type"),
    }
}
