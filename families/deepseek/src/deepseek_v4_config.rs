//! Configuration of `deepseek_v4`, in the publisher's spelling and in transformers'. Files have both beside
//! each other: what the two say must be the same, as each reader would otherwise follow another.

use mlxcel_sdk::nn::RopeConfig;
use mlxcel_sdk::prelude::*;

use crate::config::{DecoderConfig, agree, only};
use crate::deepseek_v4_rope::{read_rope, rotated};
use crate::hyper::HyperConfig;
use crate::routing::{RouterConfig, Scoring};
use crate::shared_kv::{Reach, SharedConfig};

const WIDTH: core::ops::RangeInclusive<usize> = 1..=65_536;
const COUNT: core::ops::RangeInclusive<usize> = 1..=4096;
const SLIDING: &str = "sliding_attention";
const SPARSE: &str = "compressed_sparse_attention";
const HEAVY: &str = "heavily_compressed_attention";

pub(crate) struct Settings {
    pub decoder: DecoderConfig,
    pub attention: SharedConfig,
    pub reaches: Vec<Reach>,
    /// Embedding of layers with a window alone, and of the others.
    pub ropes: [RopeConfig; 2],
    pub hyper: HyperConfig,
    pub moe: MoeSettings,
}

pub(crate) struct MoeSettings {
    pub router: RouterConfig,
    pub inner: usize,
    pub limit: f64,
    /// Layers whose experts follow from the token id.
    pub hashed: Vec<bool>,
}

pub(crate) fn read(config: &Config<'_>) -> Result<Settings> {
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

/// What every layer sees, from `layer_types`, or from the publisher's `compress_ratios`, or the
/// pattern of the class.
fn read_reaches(config: &Config<'_>, n_layers: usize) -> Result<Vec<Reach>> {
    let rates = config.section("compress_rates")?;
    let rate = |nested: &str, beside: &str, class: usize| -> Result<usize> {
        let published = config.opt_uint(beside, COUNT)?;
        let inside = match &rates {
            Some(rates) => rates.opt_uint(nested, COUNT)?,
            None => None,
        };
        agree(config, (beside, published), ("compress_rates", inside))?;
        Ok(published.or(inside).unwrap_or(class))
    };
    let sparse = Reach::Sparse {
        rate: rate(SPARSE, "compress_rate_csa", 4)?,
    };
    let heavy = Reach::Heavy {
        rate: rate(HEAVY, "compress_rate_hca", 128)?,
    };
    let typed = typed_reaches(config, n_layers, sparse, heavy)?;
    let published = published_reaches(config, n_layers, sparse, heavy)?;
    if let (Some(typed), Some(published)) = (&typed, &published)
        && let Some(layer) = typed.iter().zip(published).position(|(a, b)| a != b)
    {
        let ratio = match typed.get(layer) {
            Some(Reach::Sparse { .. }) => 4,
            Some(Reach::Heavy { .. }) => 128,
            _ => 0,
        };
        let expected = format!(
            "{ratio} for layer {layer}, as layer_types beside it says, or only one of the two"
        );
        return Err(config.error("compress_ratios", expected));
    }
    let pattern = |layer: usize| match layer {
        0 | 1 => heavy,
        _ if layer.is_multiple_of(2) => heavy,
        _ => sparse,
    };
    let class = || (0..n_layers).map(pattern).collect();
    Ok(typed.or(published).unwrap_or_else(class))
}

fn typed_reaches(
    config: &Config<'_>,
    n_layers: usize,
    sparse: Reach,
    heavy: Reach,
) -> Result<Option<Vec<Reach>>> {
    const KEY: &str = "layer_types";
    let Some(types) = config.opt_strs(KEY)? else {
        return Ok(None);
    };
    if types.len() != n_layers {
        let found = types.len();
        let expected = format!("one entry for each of {n_layers} layers, not {found}");
        return Err(config.error(KEY, expected));
    }
    let reach = |(layer, &kind): (usize, &&str)| match kind {
        SLIDING => Ok(Reach::Window),
        SPARSE => Ok(sparse),
        HEAVY => Ok(heavy),
        _ => {
            let known = format!("known types are {SLIDING}, {SPARSE} and {HEAVY}");
            Err(config.unsupported_entry(KEY, layer, known))
        }
    };
    types
        .iter()
        .enumerate()
        .map(reach)
        .collect::<Result<_>>()
        .map(Some)
}

fn published_reaches(
    config: &Config<'_>,
    n_layers: usize,
    sparse: Reach,
    heavy: Reach,
) -> Result<Option<Vec<Reach>>> {
    const KEY: &str = "compress_ratios";
    let Some(ratios) = config.opt_uints(KEY)? else {
        return Ok(None);
    };
    // The list also has entries for the layers that predict further tokens.
    if ratios.len() < n_layers {
        let found = ratios.len();
        let expected = format!("one entry for each of {n_layers} layers, not {found}");
        return Err(config.error(KEY, expected));
    }
    let reach = |(layer, ratio): (usize, &usize)| match ratio {
        0 => Ok(Reach::Window),
        4 => Ok(sparse),
        128 => Ok(heavy),
        _ => Err(config.unsupported_entry(KEY, layer, "known ratios are 0, 4 and 128")),
    };
    let layers = ratios.iter().take(n_layers).enumerate();
    layers.map(reach).collect::<Result<_>>().map(Some)
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
    let inner = config.uint("moe_intermediate_size")?;
    // Other names that transformers knows the two by.
    for (other, key, value) in [
        ("num_local_experts", "n_routed_experts", n_experts),
        ("intermediate_size", "moe_intermediate_size", inner),
    ] {
        let beside = config.opt_uint(other, 1..=1 << 24)?;
        agree(config, (other, beside), (key, Some(value)))?;
    }
    let top_k = config.uint_in("num_experts_per_tok", COUNT)?;
    if top_k > n_experts {
        let expected = format!("at most the number of experts ({n_experts})");
        return Err(config.error("num_experts_per_tok", expected));
    }
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
        inner,
        limit: config.float_or("swiglu_limit", 10.0, 1e-6..=1e6)?,
        hashed: read_hashed(config, decoder.n_layers)?,
    })
}

/// Layers whose experts follow from the token id: those that `mlp_layer_types` calls so, or the first
/// `num_hash_layers`, as published.
fn read_hashed(config: &Config<'_>, n_layers: usize) -> Result<Vec<bool>> {
    const TYPES: &str = "mlp_layer_types";
    const FIRST: &str = "num_hash_layers";
    let first = config.opt_uint(FIRST, 0..=4096)?;
    let Some(types) = config.opt_strs(TYPES)? else {
        let first = first.unwrap_or(3);
        return Ok((0..n_layers).map(|layer| layer < first).collect());
    };
    if types.len() != n_layers {
        let found = types.len();
        let expected = format!("one entry for each of {n_layers} layers, not {found}");
        return Err(config.error(TYPES, expected));
    }
    let is_hashed = |(layer, &kind): (usize, &&str)| match kind {
        "hash_moe" => Ok(true),
        "moe" => Ok(false),
        _ => Err(config.unsupported_entry(TYPES, layer, "known types are hash_moe and moe")),
    };
    let hashed: Vec<bool> = types
        .iter()
        .enumerate()
        .map(is_hashed)
        .collect::<Result<_>>()?;
    let differs = |first: usize| (0..n_layers).position(|n| hashed.get(n) != Some(&(n < first)));
    if let Some(layer) = first.and_then(differs) {
        let kind = types.get(layer).copied().unwrap_or_default();
        let expected = format!(
            "a number of first layers with which layer {layer} is {kind}, as {TYPES} beside it says, or only one of the two"
        );
        return Err(config.error(FIRST, expected));
    }
    Ok(hashed)
}
