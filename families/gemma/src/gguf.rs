//! GGUF files of the gemma line, as llama.cpp's converter writes them (`Model` classes `GemmaModel`,
//! `Gemma2Model`, `Gemma3Model`): names, metadata, and norm weights that the converter adds one to.
//! What the metadata leaves out are the constants that llama.cpp's loader has for the architecture.

use mlxcel_sdk::gguf::GgufOp;
use mlxcel_sdk::prelude::*;

use crate::layers::{FULL, SLIDING};

/// Which architecture the file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Gemma,
    Gemma2,
    Gemma3,
}

const NUMBERS: [(&str, &str); 7] = [
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.key_length", "head_dim"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
];

const OPTIONAL_NUMBERS: [(&str, &str); 5] = [
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("attention.sliding_window", "sliding_window"),
];

const MATRICES: [(&str, &str); 7] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

const NORMS_1: [(&str, &str); 2] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
];

const NORMS_2: [(&str, &str); 4] = [
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

const HEAD_NORMS: [(&str, &str); 2] = [
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
];

pub(crate) fn adapt(summary: &GgufSummary, kind: Kind) -> Result<GgufAdapter> {
    let mut adapter = GgufAdapter::default();
    let n_layers = count(summary, "block_count")?;
    let heads = count(summary, "attention.head_count")?;
    read_config(summary, kind, n_layers, heads, &mut adapter)?;

    adapter.map("token_embd.weight", "model.embed_tokens.weight");
    let tied = !summary.has("output.weight");
    adapter.set("tie_word_embeddings", tied);
    if !tied {
        adapter.map("output.weight", "lm_head.weight");
    }
    map_norm(&mut adapter, "output_norm", "model.norm");
    for layer in 0..n_layers {
        let (from, to) = (format!("blk.{layer}"), format!("model.layers.{layer}"));
        for (a, b) in MATRICES {
            adapter.map(format!("{from}.{a}.weight"), format!("{to}.{b}.weight"));
        }
        let norms: &[(&str, &str)] = match kind {
            Kind::Gemma => &NORMS_1,
            Kind::Gemma2 | Kind::Gemma3 => &NORMS_2,
        };
        let head_norms: &[(&str, &str)] = match kind {
            Kind::Gemma | Kind::Gemma2 => &[],
            Kind::Gemma3 => &HEAD_NORMS,
        };
        for (a, b) in norms.iter().chain(head_norms) {
            map_norm(&mut adapter, &format!("{from}.{a}"), &format!("{to}.{b}"));
        }
    }
    Ok(adapter)
}

/// The family adds one to the norms of a checkpoint; in the file it is added already.
fn map_norm(adapter: &mut GgufAdapter, from: &str, to: &str) {
    let minus_one = GgufOp::Add { value: -1.0 };
    adapter.map_with(
        format!("{from}.weight"),
        format!("{to}.weight"),
        vec![minus_one],
    );
}

/// A count of the metadata.
pub(crate) fn count(summary: &GgufSummary, key: &str) -> Result<usize> {
    summary.count(key, 65_536)
}

fn read_config(
    summary: &GgufSummary,
    kind: Kind,
    n_layers: usize,
    heads: usize,
    adapter: &mut GgufAdapter,
) -> Result<()> {
    let model_type = match kind {
        Kind::Gemma => "gemma",
        Kind::Gemma2 => "gemma2",
        Kind::Gemma3 => "gemma3_text",
    };
    adapter.set("model_type", model_type);
    // What these models were published in; activations of the larger ones overflow half precision.
    adapter.set("dtype", "bfloat16");
    for (from, to) in NUMBERS {
        adapter.take(summary, from, to)?;
    }
    for (from, to) in OPTIONAL_NUMBERS {
        adapter.take_some(summary, from, to)?;
    }
    let kv_heads = match summary.opt_number("attention.head_count_kv")? {
        Some(number) => number.clone(),
        None => heads.into(),
    };
    adapter.set("num_key_value_heads", kv_heads);
    adapter.comes_from(summary, "num_key_value_heads", "attention.head_count_kv")?;
    adapter.set("vocab_size", summary.vocab_size()?);
    let key_length = count(summary, "attention.key_length")?;
    summary.repeats("attention.value_length", key_length, "as wide as keys")?;
    read_scaling(summary, adapter)?;
    // The two 27B models scale by the width of the stream, all others by that of a head; the file
    // does not say so, and llama.cpp tells them by their number of layers as well.
    let wide_layers = match kind {
        Kind::Gemma => return Ok(()),
        Kind::Gemma2 => 46,
        Kind::Gemma3 => 62,
    };
    let divisor = if n_layers == wide_layers {
        let hidden = summary.number("embedding_length")?.as_u64();
        hidden.and_then(|n| usize::try_from(n).ok()).unwrap_or(0) / heads
    } else {
        key_length
    };
    adapter.set("query_pre_attn_scalar", divisor);
    if kind == Kind::Gemma3 {
        read_pattern(summary, adapter)?;
    }
    Ok(())
}

/// Scaling of the full layers' positions; sliding layers have none.
fn read_scaling(summary: &GgufSummary, adapter: &mut GgufAdapter) -> Result<()> {
    let original = "rope.scaling.original_context_length";
    let numbers = [(original, "original_max_position_embeddings")];
    if let Some(scaling) = summary.rope_scaling(&numbers)? {
        adapter.set_scaling(summary, scaling, &numbers)?;
    }
    Ok(())
}

/// Which layers slide: none without a window, else what the file says, else all but every sixth.
fn read_pattern(summary: &GgufSummary, adapter: &mut GgufAdapter) -> Result<()> {
    let window = summary.opt_number("attention.sliding_window")?;
    if window.is_none_or(|n| n.as_u64() == Some(0)) {
        adapter.config.remove("sliding_window");
        adapter.set("sliding_window_pattern", 1);
        return Ok(());
    }
    let key = format!(
        "{}.attention.sliding_window_pattern",
        summary.architecture()?
    );
    match summary.get(&key) {
        None => adapter.set("sliding_window_pattern", 6),
        Some(number) if number.is_number() => {
            adapter.set("sliding_window_pattern", number.clone());
        }
        Some(_) => adapter.set("layer_types", read_layer_types(summary)?),
    }
    Ok(())
}

/// Kinds of layers from a list of whether each slides.
pub(crate) fn read_layer_types(summary: &GgufSummary) -> Result<Vec<&'static str>> {
    let key = format!(
        "{}.attention.sliding_window_pattern",
        summary.architecture()?
    );
    let found = summary.get(&key);
    let list = found.and_then(serde_json::Value::as_array);
    let kind = |slides| if slides { SLIDING } else { FULL };
    let kinds = list.map(|list| list.iter().map(|v| v.as_bool().map(kind)));
    kinds
        .and_then(Iterator::collect)
        .ok_or_else(|| Error::Config {
            key,
            found: found.map_or_else(|| "missing".to_owned(), ToString::to_string),
            expected: "true or false for each of at most 64 layers".to_owned(),
        })
}

/// One number a layer, under a key that has a list of them or one for all.
pub(crate) fn number_by_layer(
    summary: &GgufSummary,
    key: &str,
    n_layers: usize,
) -> Result<Vec<usize>> {
    let full = format!("{}.{key}", summary.architecture()?);
    let found = summary.get(&full);
    let number = |v: &serde_json::Value| {
        let n = v.as_u64().and_then(|n| usize::try_from(n).ok());
        n.filter(|n| (1..=1 << 24).contains(n))
    };
    let list = match found {
        Some(serde_json::Value::Array(list)) if list.len() == n_layers => {
            list.iter().map(number).collect()
        }
        Some(one) => number(one).map(|n| vec![n; n_layers]),
        None => None,
    };
    list.ok_or_else(|| Error::Config {
        key: full,
        found: found.map_or_else(|| "missing".to_owned(), ToString::to_string),
        expected: format!("an integer above 0, or one for each of {n_layers} layers"),
    })
}
