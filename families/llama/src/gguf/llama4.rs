//! Files of Llama 4. llama.cpp's loader has the attention chunk, the temperature and the layers without
//! positions as constants, and so does this. Query and key rows are as published: the embedding
//! rotates neighbours there too.

use mlxcel_sdk::prelude::*;

use super::{count, map_frame, read_kv_heads, read_scaling, read_sizes};

const NUMBERS: [(&str, &str); 9] = [
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size_mlp"),
    ("expert_feed_forward_length", "intermediate_size"),
    ("interleave_moe_layer_step", "interleave_moe_layer_step"),
    ("expert_used_count", "num_experts_per_tok"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
];

const TENSORS: [(&str, &str); 16] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "feed_forward.gate_proj"),
    ("ffn_up", "feed_forward.up_proj"),
    ("ffn_down", "feed_forward.down_proj"),
    ("ffn_gate_inp", "feed_forward.router"),
    ("ffn_gate_exps", "feed_forward.experts.gate_proj"),
    ("ffn_up_exps", "feed_forward.experts.up_proj"),
    ("ffn_down_exps", "feed_forward.experts.down_proj"),
    ("ffn_gate_shexp", "feed_forward.shared_expert.gate_proj"),
    ("ffn_up_shexp", "feed_forward.shared_expert.up_proj"),
    ("ffn_down_shexp", "feed_forward.shared_expert.down_proj"),
];

/// Positions in an attention chunk, and rows between two steps of the temperature.
const CHUNK: usize = 8192;
/// Experts of the one model without norms of queries and keys (Maverick).
const EXPERTS_WITHOUT_QK_NORM: usize = 128;

pub(crate) fn adapt(summary: &GgufSummary) -> Result<GgufAdapter> {
    if let Some(window) = summary.opt_number("attention.sliding_window")? {
        return Err(Error::Unsupported {
            what: format!(
                "{} = {window}",
                summary.full_key("attention.sliding_window")?
            ),
            supported: format!("files without the key, whose chunk is {CHUNK}"),
        });
    }
    let mut adapter = GgufAdapter::default();
    adapter.set("model_type", "llama4_text");
    for (from, to) in NUMBERS {
        adapter.take(summary, from, to)?;
    }
    let n_experts = count(summary, "expert_count")?;
    adapter.set("num_local_experts", n_experts);
    adapter.comes_from(summary, "num_local_experts", "expert_count")?;
    adapter.set("use_qk_norm", n_experts != EXPERTS_WITHOUT_QK_NORM);
    adapter.set("attention_chunk_size", CHUNK);
    adapter.set("floor_scale", CHUNK);
    adapter.set("attn_scale", 0.1);
    adapter.set("attn_temperature_tuning", true);
    adapter.set("no_rope_layer_interval", 4);
    read_sizes(summary, &mut adapter)?;
    read_scaling(summary, &mut adapter)?;
    read_kv_heads(
        summary,
        count(summary, "attention.head_count")?,
        &mut adapter,
    )?;
    map_frame(summary, &mut adapter);
    adapter.set("attention_bias", summary.has("blk.0.attn_q.bias"));
    for layer in 0..count(summary, "block_count")? {
        for (from, to) in TENSORS {
            for part in ["weight", "bias"] {
                let from = format!("blk.{layer}.{from}.{part}");
                if summary.has(&from) {
                    adapter.map(from, format!("model.layers.{layer}.{to}.{part}"));
                }
            }
        }
    }
    Ok(adapter)
}
