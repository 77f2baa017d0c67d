//! GGUF files of the hybrids, as llama.cpp's converter writes `qwen3next`, `qwen35` and `qwen35moe`: norms as
//! they are used, decays as `-exp(A_log)`, kernels without their axis of length 1; in the two latter the value
//! heads of a key head do not lie side by side.

use mlxcel_sdk::gguf::GgufOp;
use mlxcel_sdk::prelude::*;

use crate::gguf::{
    EXPERT_TENSORS, count, map_shared_gate, map_tensors, read_expert_widths, read_scaling,
    refuse_pooling,
};
use crate::hybrid_config::TILED;

/// Which architecture the file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hybrid {
    Next,
    Dense35,
    Moe35,
}

const NUMBERS: [(&str, &str); 9] = [
    ("embedding_length", "hidden_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("ssm.conv_kernel", "linear_conv_kernel_dim"),
    ("ssm.state_size", "linear_key_head_dim"),
    ("ssm.group_count", "linear_num_key_heads"),
    ("ssm.time_step_rank", "linear_num_value_heads"),
];

const LAYER_TENSORS: [(&str, &str); 18] = [
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

pub(crate) fn adapt(summary: &GgufSummary, kind: Hybrid) -> Result<GgufAdapter> {
    refuse_pooling(summary)?;
    let mut adapter = GgufAdapter::default();
    read_config(summary, kind, &mut adapter)?;
    read_scaling(summary, &mut adapter)?;
    adapter.map("token_embd.weight", "model.embed_tokens.weight");
    adapter.map("output_norm.weight", "model.norm.weight");
    let tied = !summary.has("output.weight");
    adapter.set("tie_word_embeddings", tied);
    if !tied {
        adapter.map("output.weight", "lm_head.weight");
    }
    let hidden = count(summary, "embedding_length")?;
    for layer in 0..layers(summary)? {
        map_tensors(summary, &mut adapter, layer, &LAYER_TENSORS);
        if kind != Hybrid::Dense35 {
            map_tensors(summary, &mut adapter, layer, &EXPERT_TENSORS);
            map_shared_gate(summary, &mut adapter, layer, hidden);
        }
        map_states(summary, &mut adapter, layer);
    }
    for layer in layers(summary)?..count(summary, "block_count")? {
        let prefix = format!("blk.{layer}.");
        let drafts = summary
            .tensors
            .keys()
            .filter(|name| name.starts_with(&prefix));
        adapter.ignore.extend(drafts.cloned());
    }
    Ok(adapter)
}

/// Layers without the heads for drafts that a file may have behind them.
fn layers(summary: &GgufSummary) -> Result<usize> {
    const KEY: &str = "nextn_predict_layers";
    let all = count(summary, "block_count")?;
    let full = summary.full_key(KEY)?;
    let Some(drafts) = summary.opt_number(KEY)? else {
        return Ok(all);
    };
    let left = drafts
        .as_u64()
        .and_then(|drafts| all.checked_sub(usize::try_from(drafts).ok()?))
        .filter(|left| *left > 0);
    left.ok_or_else(|| Error::Config {
        key: full.clone(),
        found: drafts.to_string(),
        expected: format!("an integer below block_count ({all})"),
    })
}

fn read_config(summary: &GgufSummary, kind: Hybrid, adapter: &mut GgufAdapter) -> Result<()> {
    adapter.set(
        "model_type",
        match kind {
            Hybrid::Next => "qwen3_next",
            Hybrid::Dense35 => "qwen3_5_text",
            Hybrid::Moe35 => "qwen3_5_moe_text",
        },
    );
    for (from, to) in NUMBERS {
        adapter.take(summary, from, to)?;
    }
    adapter.set("vocab_size", summary.vocab_size()?);
    adapter.take_some(summary, "rope.freq_base", "rope_theta")?;
    let (heads, inner) = (
        count(summary, "ssm.time_step_rank")?,
        count(summary, "ssm.inner_size")?,
    );
    if !inner.is_multiple_of(heads) {
        return Err(Error::Config {
            key: summary.full_key("ssm.inner_size")?,
            found: inner.to_string(),
            expected: format!(
                "a multiple of {} ({heads})",
                summary.full_key("ssm.time_step_rank")?
            ),
        });
    }
    adapter.set("linear_value_head_dim", inner / heads);
    adapter.comes_from(summary, "linear_value_head_dim", "ssm.inner_size")?;
    adapter.set(TILED, kind != Hybrid::Next);
    let head_dim = count(summary, "attention.key_length")?;
    summary.repeats("attention.value_length", head_dim, "as wide as keys")?;
    adapter.set("head_dim", head_dim);
    adapter.comes_from(summary, "head_dim", "attention.key_length")?;
    let rotated = count(summary, "rope.dimension_count")?;
    adapter.set("partial_rotary_factor", rotated as f64 / head_dim as f64);
    adapter.comes_from(summary, "partial_rotary_factor", "rope.dimension_count")?;
    let n_layers = layers(summary)?;
    adapter.set("num_hidden_layers", n_layers);
    adapter.comes_from(summary, "num_hidden_layers", "block_count")?;
    let attends = |layer: usize| summary.has(&format!("blk.{layer}.attn_q.weight"));
    let types: Vec<&str> = (0..n_layers)
        .map(|layer| {
            if attends(layer) {
                "full_attention"
            } else {
                "linear_attention"
            }
        })
        .collect();
    let biased = (0..n_layers).any(|layer| summary.has(&format!("blk.{layer}.attn_q.bias")));
    check_interval(summary, &types)?;
    adapter.set("layer_types", types);
    adapter.set("attention_bias", biased);
    if kind == Hybrid::Dense35 {
        return adapter.take(summary, "feed_forward_length", "intermediate_size");
    }
    adapter.take(summary, "expert_count", "num_experts")?;
    adapter.take(summary, "expert_used_count", "num_experts_per_tok")?;
    read_expert_widths(summary, adapter, true)
}

/// The tensors tell which layers attend; every so many do, where the file says how many.
fn check_interval(summary: &GgufSummary, types: &[&str]) -> Result<()> {
    const KEY: &str = "full_attention_interval";
    let Some(number) = summary.opt_number(KEY)? else {
        return Ok(());
    };
    let interval = number.as_u64().and_then(|n| usize::try_from(n).ok());
    let attends = |layer: usize| interval.is_some_and(|n| n > 0 && (layer + 1).is_multiple_of(n));
    let differs = |(layer, kind): (usize, &&str)| attends(layer) != (*kind == "full_attention");
    match types.iter().enumerate().position(differs) {
        Some(layer) => Err(Error::Config {
            key: summary.full_key(KEY)?,
            found: number.to_string(),
            expected: format!(
                "an interval that makes layer {layer} one of {}, as its tensors say, or no such key",
                types.get(layer).copied().unwrap_or_default()
            ),
        }),
        None => Ok(()),
    }
}

/// Kernel, decay and its bias.
fn map_states(summary: &GgufSummary, adapter: &mut GgufAdapter, layer: usize) {
    let to = |name: &str| format!("model.layers.{layer}.linear_attn.{name}");
    let kernel = format!("blk.{layer}.ssm_conv1d.weight");
    if let Some(tensor) = summary.tensors.get(&kernel) {
        // As MLX keeps it, by which norms that need nothing added are told.
        let mut shape = tensor.shape.clone();
        shape.push(1);
        adapter.map_with(kernel, to("conv1d.weight"), vec![GgufOp::Reshape { shape }]);
    }
    for (from, name) in [("ssm_a", "A"), ("ssm_dt.bias", "dt_bias")] {
        let from = format!("blk.{layer}.{from}");
        if summary.has(&from) {
            adapter.map(from, to(name));
        }
    }
}
