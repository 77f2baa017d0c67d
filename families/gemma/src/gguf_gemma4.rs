//! GGUF files of gemma4, as llama.cpp's converter writes them (class `Gemma4Model`). Norms are stored
//! as they are; which part of full layers' heads is rotated is in the tensor `rope_freqs`.

use mlxcel_sdk::prelude::*;
use serde_json::{Map, Value, json};

use crate::gguf::{count, number_by_layer, read_layer_types};
use crate::layers::{FULL, SLIDING};

const NUMBERS: [(&str, &str); 6] = [
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
];

const LAYER: [(&str, &str); 10] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// Of layers with their own cache; others may have them, and nothing reads them.
const OWN: [(&str, &str); 3] = [
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_k_norm", "self_attn.k_norm"),
];

const INPUTS: [(&str, &str); 3] = [
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
];

const EXPERTS: [(&str, &str); 7] = [
    ("ffn_gate_inp.weight", "router.proj.weight"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_down_exps.weight", "experts.down_proj.weight"),
    (
        "pre_ffw_norm_2.weight",
        "pre_feedforward_layernorm_2.weight",
    ),
    (
        "post_ffw_norm_1.weight",
        "post_feedforward_layernorm_1.weight",
    ),
    (
        "post_ffw_norm_2.weight",
        "post_feedforward_layernorm_2.weight",
    ),
];

pub(crate) fn adapt(summary: &GgufSummary) -> Result<GgufAdapter> {
    let mut adapter = GgufAdapter::default();
    let n_layers = count(summary, "block_count")?;
    let kinds = read_layer_types(summary)?;
    let shared = match summary.opt_number("attention.shared_kv_layers")? {
        Some(number) => number.as_u64().unwrap_or(u64::MAX) as usize,
        None => 0,
    };
    adapter.set("num_kv_shared_layers", shared);
    let (from, to) = ("attention.shared_kv_layers", "num_kv_shared_layers");
    adapter.comes_from(summary, to, from)?;
    let n_own = n_layers.saturating_sub(shared);
    read_config(summary, n_layers, n_own, &kinds, &mut adapter)?;

    adapter.map("token_embd.weight", "model.embed_tokens.weight");
    adapter.map("output_norm.weight", "model.norm.weight");
    adapter.map("rope_freqs.weight", "model.rope_factors.weight");
    let tied = !summary.has("output.weight");
    adapter.set("tie_word_embeddings", tied);
    if !tied {
        adapter.map("output.weight", "lm_head.weight");
    }
    let has_inputs = summary.has("per_layer_token_embd.weight");
    if has_inputs {
        for (from, to) in [
            ("per_layer_token_embd", "embed_tokens_per_layer"),
            ("per_layer_model_proj", "per_layer_model_projection"),
            ("per_layer_proj_norm", "per_layer_projection_norm"),
        ] {
            adapter.map(format!("{from}.weight"), format!("model.{to}.weight"));
        }
    }
    let experts = adapter.config.contains_key("num_experts");
    for layer in 0..n_layers {
        map_layer(summary, &mut adapter, layer, layer < n_own, has_inputs);
        if experts {
            map_experts(summary, &mut adapter, layer);
        }
    }
    Ok(adapter)
}

fn map_layer(
    summary: &GgufSummary,
    adapter: &mut GgufAdapter,
    layer: usize,
    owns: bool,
    has_inputs: bool,
) {
    let (from, to) = (format!("blk.{layer}"), format!("model.layers.{layer}"));
    let inputs = INPUTS.iter().filter(|_| has_inputs);
    for (a, b) in LAYER.iter().chain(inputs) {
        adapter.map(format!("{from}.{a}.weight"), format!("{to}.{b}.weight"));
    }
    for (a, b) in OWN {
        let name = format!("{from}.{a}.weight");
        // Without values of its own a full layer takes its keys for them.
        if summary.has(&name) || (owns && a != "attn_v") {
            adapter.map(name, format!("{to}.{b}.weight"));
        }
    }
    let scale = format!("{from}.layer_output_scale.weight");
    if summary.has(&scale) {
        adapter.map(scale, format!("{to}.layer_scalar"));
    }
}

fn map_experts(summary: &GgufSummary, adapter: &mut GgufAdapter, layer: usize) {
    let (from, to) = (format!("blk.{layer}"), format!("model.layers.{layer}"));
    for (a, b) in EXPERTS {
        adapter.map(format!("{from}.{a}"), format!("{to}.{b}"));
    }
    let joined = format!("{from}.ffn_gate_up_exps.weight");
    if summary.has(&joined) {
        adapter.map(joined, format!("{to}.experts.gate_up_proj.weight"));
        return;
    }
    for part in ["gate", "up"] {
        let name = format!("{from}.ffn_{part}_exps.weight");
        adapter.map(name, format!("{to}.experts.{part}_proj.weight"));
    }
}

fn read_config(
    summary: &GgufSummary,
    n_layers: usize,
    n_own: usize,
    kinds: &[&str],
    adapter: &mut GgufAdapter,
) -> Result<()> {
    adapter.set("model_type", "gemma4_text");
    adapter.set("dtype", "bfloat16");
    for (from, to) in NUMBERS {
        adapter.take(summary, from, to)?;
    }
    let cap = "final_logit_softcapping";
    adapter.take_some(summary, cap, cap)?;
    adapter.set("vocab_size", summary.vocab_size()?);
    adapter.set("layer_types", kinds);
    read_inner(summary, n_layers, n_own, adapter)?;
    read_heads(summary, n_layers, kinds, adapter)?;
    let lacks_values = |layer: usize| !summary.has(&format!("blk.{layer}.attn_v.weight"));
    let full = kinds.iter().take(n_own).enumerate();
    let value_is_key = full
        .filter(|(_, kind)| **kind == FULL)
        .any(|(n, _)| lacks_values(n));
    adapter.set("attention_k_eq_v", value_is_key);

    let base = |key: &str, default: f64| -> Result<Value> {
        Ok(summary
            .opt_number(key)?
            .cloned()
            .unwrap_or_else(|| json!(default)))
    };
    adapter.set(
        "rope_parameters",
        json!({
            FULL: {"rope_type": "proportional", "rope_theta": base("rope.freq_base", 1e6)?},
            SLIDING: {"rope_type": "default", "rope_theta": base("rope.freq_base_swa", 1e4)?},
        }),
    );
    for (kind, from) in [(FULL, "rope.freq_base"), (SLIDING, "rope.freq_base_swa")] {
        let to = format!("rope_parameters.{kind}.rope_theta");
        adapter.comes_from(summary, &to, from)?;
    }
    let (from, to) = (
        "embedding_length_per_layer_input",
        "hidden_size_per_layer_input",
    );
    if !adapter.take_some(summary, from, to)? {
        adapter.set(to, 0);
    }
    if let Some(table) = summary.tensors.get("per_layer_token_embd.weight") {
        adapter.set(
            "vocab_size_per_layer_input",
            table.shape.first().copied().unwrap_or(0),
        );
    }
    let n_experts = summary.opt_number("expert_count")?;
    if let Some(n_experts) = n_experts.filter(|n| n.as_u64() != Some(0)) {
        adapter.set("enable_moe_block", true);
        adapter.set("num_experts", n_experts.clone());
        adapter.comes_from(summary, "num_experts", "expert_count")?;
        adapter.take(summary, "expert_used_count", "top_k_experts")?;
        let (from, to) = ("expert_feed_forward_length", "moe_intermediate_size");
        adapter.take(summary, from, to)?;
    }
    Ok(())
}

/// One width, or a list in which layers that share a cache are twice as wide.
fn read_inner(
    summary: &GgufSummary,
    n_layers: usize,
    n_own: usize,
    adapter: &mut GgufAdapter,
) -> Result<()> {
    const KEY: &str = "feed_forward_length";
    let widths = number_by_layer(summary, KEY, n_layers)?;
    let first = widths.first().copied().unwrap_or(0);
    let double = widths.last().is_some_and(|last| *last != first);
    let expected = |layer: usize| {
        if double && layer >= n_own {
            2 * first
        } else {
            first
        }
    };
    if widths
        .iter()
        .enumerate()
        .any(|(layer, width)| *width != expected(layer))
    {
        return Err(Error::Unsupported {
            what: format!("{} = {widths:?}", summary.full_key(KEY)?),
            supported: "one width, doubled or not for the layers that share a cache".to_owned(),
        });
    }
    adapter.set("intermediate_size", first);
    adapter.comes_from(summary, "intermediate_size", KEY)?;
    adapter.set("use_double_wide_mlp", double);
    Ok(())
}

/// Width of a head by kind of layer, key and value heads by layer.
fn read_heads(
    summary: &GgufSummary,
    n_layers: usize,
    kinds: &[&str],
    adapter: &mut GgufAdapter,
) -> Result<()> {
    let full = count(summary, "attention.key_length")?;
    let sliding = count(summary, "attention.key_length_swa")?;
    for (key, expected) in [
        ("attention.value_length", full),
        ("attention.value_length_swa", sliding),
        ("rope.dimension_count", full),
        ("rope.dimension_count_swa", sliding),
    ] {
        if let Some(found) = summary.opt_number(key)?
            && found.as_u64() != Some(expected as u64)
        {
            return Err(Error::Unsupported {
                what: format!("{} = {found}", summary.full_key(key)?),
                supported: format!("the width of the keys ({expected})"),
            });
        }
    }
    let kv_heads = number_by_layer(summary, "attention.head_count_kv", n_layers)?;
    let mut by_layer = Map::new();
    for (layer, (kind, kv_heads)) in kinds.iter().zip(&kv_heads).enumerate() {
        let head_dim = if *kind == FULL { full } else { sliding };
        let own = json!({"head_dim": head_dim, "num_key_value_heads": kv_heads});
        by_layer.insert(layer.to_string(), own);
    }
    let most = kv_heads.iter().copied().max().unwrap_or(0);
    adapter.set("num_key_value_heads", most);
    adapter.set("head_dim", sliding);
    adapter.set("per_layer_config", by_layer);
    for (to, from) in [
        ("head_dim", "attention.key_length_swa"),
        ("num_key_value_heads", "attention.head_count_kv"),
    ] {
        adapter.comes_from(summary, to, from)?;
    }
    for (layer, kind) in kinds.iter().enumerate() {
        let width = match *kind == FULL {
            true => "attention.key_length",
            false => "attention.key_length_swa",
        };
        let at = format!("per_layer_config.{layer}");
        adapter.comes_from(summary, &format!("{at}.head_dim"), width)?;
        let heads = "attention.head_count_kv";
        adapter.comes_from(summary, &format!("{at}.num_key_value_heads"), heads)?;
    }
    Ok(())
}
