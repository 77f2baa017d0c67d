//! GGUF files of gemma3n, as llama.cpp's converter writes them (class `Gemma3NModel`). Norms are
//! stored as they are; the projections between the streams lie in one tensor.

use mlxcel_sdk::gguf::GgufOp;
use mlxcel_sdk::prelude::*;

use crate::gguf::{count, number_by_layer, read_layer_types};
use crate::sparsity;

const NUMBERS: [(&str, &str); 7] = [
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.key_length", "head_dim"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    (
        "embedding_length_per_layer_input",
        "hidden_size_per_layer_input",
    ),
];

const OPTIONAL_NUMBERS: [(&str, &str); 7] = [
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.shared_kv_layers", "num_kv_shared_layers"),
    ("attention.sliding_window", "sliding_window"),
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("altup.active_idx", "altup_active_idx"),
];

const LAYER: [(&str, &str); 24] = [
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("attn_norm.weight", "input_layernorm.weight"),
    (
        "post_attention_norm.weight",
        "post_attention_layernorm.weight",
    ),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    ("inp_gate.weight", "per_layer_input_gate.weight"),
    ("proj.weight", "per_layer_projection.weight"),
    ("post_norm.weight", "post_per_layer_input_norm.weight"),
    ("altup_correct_coef.weight", "altup.correction_coefs.weight"),
    ("altup_correct_scale.weight", "altup.correct_output_scale"),
    ("altup_predict_coef.weight", "altup.prediction_coefs.weight"),
    ("altup_router.weight", "altup.modality_router.weight"),
    ("altup_router_norm.weight", "altup.router_norm.weight"),
    ("laurel_l.weight", "laurel.linear_left.weight"),
    ("laurel_r.weight", "laurel.linear_right.weight"),
    ("laurel_post_norm.weight", "laurel.post_laurel_norm.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
];

/// Tensors that layers with another's cache may lack.
const OWN: [&str; 3] = ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"];

pub(crate) fn adapt(summary: &GgufSummary) -> Result<GgufAdapter> {
    let mut adapter = GgufAdapter::default();
    let n_layers = count(summary, "block_count")?;
    read_config(summary, n_layers, &mut adapter)?;

    for (from, to) in [
        ("token_embd", "embed_tokens"),
        ("output_norm", "norm"),
        ("per_layer_token_embd", "embed_tokens_per_layer"),
        ("per_layer_model_proj", "per_layer_model_projection"),
        ("per_layer_proj_norm", "per_layer_projection_norm"),
    ] {
        adapter.map(format!("{from}.weight"), format!("model.{to}.weight"));
    }
    let tied = !summary.has("output.weight");
    adapter.set("tie_word_embeddings", tied);
    if !tied {
        adapter.map("output.weight", "lm_head.weight");
    }
    let streams = match summary.opt_number("altup.num_inputs")? {
        Some(_) => count(summary, "altup.num_inputs")?,
        None => 4,
    };
    adapter.set("altup_num_inputs", streams);
    adapter.comes_from(summary, "altup_num_inputs", "altup.num_inputs")?;
    let hidden = count(summary, "embedding_length")?;
    for (from, to) in [
        ("altup_proj.weight", "altup_projections"),
        ("altup_unembd_proj.weight", "altup_unembed_projections"),
    ] {
        for n in 0..streams.saturating_sub(1) {
            let one = GgufOp::SliceRows { start: n, len: 1 };
            let shape = vec![hidden, hidden];
            let ops = vec![one, GgufOp::Reshape { shape }];
            adapter.map_with(from, format!("model.{to}.{n}.weight"), ops);
        }
    }
    let shared = adapter.config.get("num_kv_shared_layers");
    let shared = shared.and_then(serde_json::Value::as_u64).unwrap_or(0) as usize;
    for layer in 0..n_layers {
        for (from, to) in LAYER {
            let from_name = format!("blk.{layer}.{from}");
            let may_lack = OWN.contains(&from) && layer + shared >= n_layers;
            if !may_lack || summary.has(&from_name) {
                adapter.map(from_name, format!("model.layers.{layer}.{to}"));
            }
        }
    }
    Ok(adapter)
}

fn read_config(summary: &GgufSummary, n_layers: usize, adapter: &mut GgufAdapter) -> Result<()> {
    adapter.set("model_type", "gemma3n_text");
    adapter.set("dtype", "bfloat16");
    for (from, to) in NUMBERS {
        adapter.take(summary, from, to)?;
    }
    for (from, to) in OPTIONAL_NUMBERS {
        adapter.take_some(summary, from, to)?;
    }
    let width = count(summary, "attention.key_length")?;
    summary.repeats("attention.value_length", width, "as wide as keys")?;
    let widths = number_by_layer(summary, "feed_forward_length", n_layers)?;
    adapter.set("intermediate_size", widths);
    adapter.comes_from(summary, "intermediate_size", "feed_forward_length")?;
    adapter.set("vocab_size", summary.vocab_size()?);
    for (tensor, key) in [
        ("per_layer_token_embd.weight", "vocab_size_per_layer_input"),
        ("blk.0.laurel_l.weight", "laurel_rank"),
    ] {
        let rows = summary.tensors.get(tensor).and_then(|t| t.shape.first());
        let rows = rows.ok_or_else(|| Error::MissingTensor {
            name: tensor.to_owned(),
            expected: "a matrix".to_owned(),
        })?;
        adapter.set(key, *rows);
    }
    let key = "gemma3n.attention.sliding_window_pattern";
    if summary.get(key).is_some_and(|value| !value.is_number()) {
        adapter.set("layer_types", read_layer_types(summary)?);
    } else if let Some(pattern) = summary.get(key)
        && pattern.as_u64() != Some(5)
    {
        return Err(Error::Unsupported {
            what: format!("{key} = {pattern}"),
            supported: "a list, or 5".to_owned(),
        });
    }
    if let Some(pattern) = read_sparsity(summary, n_layers)? {
        adapter.set("activation_sparsity_pattern", pattern);
    }
    Ok(())
}

/// The file has deviations above the mean, minus infinity for a block that drops nothing.
fn read_sparsity(summary: &GgufSummary, n_layers: usize) -> Result<Option<Vec<f64>>> {
    let key = "gemma3n.activation_sparsity_scale";
    let Some(found) = summary.get(key) else {
        return Ok(None);
    };
    let share = |value: &serde_json::Value| match value.as_f64() {
        Some(deviations) if (-7.0..=7.0).contains(&deviations) => Some(sparsity::share(deviations)),
        None if value.as_str() == Some("-Infinity") => Some(0.0),
        _ => None,
    };
    let shares = found.as_array().filter(|list| list.len() == n_layers);
    let shares = shares.and_then(|list| list.iter().map(share).collect::<Option<Vec<f64>>>());
    shares.map(Some).ok_or_else(|| Error::Config {
        key: key.to_owned(),
        found: found.to_string(),
        expected: format!(
            "a number from -7 to 7, or minus infinity, for each of {n_layers} layers"
        ),
    })
}
