//! Configuration that the architectures share. Defaults are those of the configuration classes of
//! the transformers library (`DeepseekV2Config`, `DeepseekV3Config`, ...), and for `deepseek`, which
//! it lacks, those of the published configuration class.

use mlxcel_sdk::nn::Activation;
use mlxcel_sdk::prelude::*;

/// A decoder without its attention and feed-forward blocks.
#[derive(Debug, Clone)]
pub(crate) struct DecoderConfig {
    pub vocab: usize,
    pub hidden: usize,
    pub heads: usize,
    pub n_layers: usize,
    /// Layers behind the others that predict further tokens, which plain decoding does not run.
    pub n_draft_layers: usize,
    pub context: usize,
    pub eps: f32,
    pub tied: bool,
    pub attention_bias: bool,
    pub activation: Activation,
}

impl DecoderConfig {
    /// Reads the settings; `default_context` is the class's `max_position_embeddings`.
    pub(crate) fn read(config: &Config<'_>, default_context: usize) -> Result<Self> {
        if let Some(own) = config.section("per_layer_config")?
            && own.entries().next().is_some()
        {
            let supported = "layers of this architecture are alike but for their kinds";
            return Err(config.unsupported("per_layer_config", supported));
        }
        let draft = config
            .spelled(&["num_nextn_predict_layers", "num_mtp_layers"])
            .map(|key| config.uint_in(key, 0..=64));
        Ok(Self {
            vocab: config.uint("vocab_size")?,
            hidden: config.uint("hidden_size")?,
            heads: config.uint_in("num_attention_heads", 1..=4096)?,
            n_layers: config.uint_in("num_hidden_layers", 1..=4096)?,
            n_draft_layers: draft.transpose()?.unwrap_or(0),
            context: config.uint_or("max_position_embeddings", default_context)?,
            eps: config.float_or("rms_norm_eps", 1e-6, 0.0..=1.0)? as f32,
            tied: config.bool_or("tie_word_embeddings", false)?,
            attention_bias: config.bool_or("attention_bias", false)?,
            activation: Activation::read(config, "hidden_act", Activation::Silu)?,
        })
    }

    /// What the host needs to know. `attention` and `inner` are the elements per row that live
    /// beside the residual and its normed copy in the one and the other half of a block.
    pub(crate) fn describe(
        &self,
        arch: &str,
        cache: &CacheDesc,
        attention: usize,
        inner: usize,
    ) -> ModelDesc {
        ModelDesc {
            arch: arch.to_owned(),
            task: "text-generation".to_owned(),
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            context_length: self.context,
            layers: vec![cache.clone(); self.n_layers],
            activation_width: 2 * self.hidden + attention.max(3 * inner),
            encoder: None,
        }
    }
}

/// Fits text generation. The same `model_type` is published with other heads, which `architectures`
/// tells apart, and inside multimodal models.
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

/// Checks that a key is absent or has the one value that is implemented.
pub(crate) fn only(config: &Config<'_>, key: &str, value: &str) -> Result<()> {
    match config.opt_str(key)? {
        None => Ok(()),
        Some(found) if found == value => Ok(()),
        Some(_) => Err(config.unsupported(key, format!("this architecture has {value}"))),
    }
}

/// Checks that `layer_types`, where there are any, has `kind` for each layer.
pub(crate) fn only_layers(config: &Config<'_>, n_layers: usize, kind: &str) -> Result<()> {
    const KEY: &str = "layer_types";
    let Some(types) = config.opt_strs(KEY)? else {
        return Ok(());
    };
    if let Some(layer) = types.iter().position(|found| *found != kind) {
        let supported = format!("layers of this architecture are all {kind}");
        return Err(config.unsupported_entry(KEY, layer, supported));
    }
    if types.len() != n_layers {
        let found = types.len();
        let expected = format!("one entry for each of {n_layers} layers, not {found}");
        return Err(config.error(KEY, expected));
    }
    Ok(())
}

/// Checks that two spellings of one number say the same, where both are there.
pub(crate) fn agree(
    config: &Config<'_>,
    (key, value): (&str, Option<usize>),
    (other, beside): (&str, Option<usize>),
) -> Result<()> {
    match (value, beside) {
        (Some(value), Some(beside)) if value != beside => {
            let expected = format!("{beside}, as {other} beside it says, or only one of the two");
            Err(config.error(key, expected))
        }
        _ => Ok(()),
    }
}

/// Checks that pairs of neighbours are rotated: the references of these generations do not read the key.
pub(crate) fn only_interleaved(config: &Config<'_>) -> Result<()> {
    const KEY: &str = "rope_interleave";
    match config.bool_or(KEY, true)? {
        true => Ok(()),
        false => Err(config.unsupported(KEY, "this architecture rotates neighbours (true)")),
    }
}
