//! GGUF files of the llama line, as llama.cpp's converter writes them: names, metadata keys, and
//! the interleaved order of query and key rows that has to be undone.

mod deci;
mod llama4;

use mlxcel_sdk::gguf::GgufOp;
use mlxcel_sdk::prelude::*;

pub(crate) use deci::adapt as adapt_deci;
pub(crate) use llama4::adapt as adapt_llama4;

/// Which architecture the file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A dense decoder.
    Dense {
        /// `model_type` of the rebuilt configuration.
        model_type: &'static str,
    },
    /// A mixture of experts.
    Mixtral,
}

const NUMBERS: [(&str, &str); 6] = [
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
];

const SCALING_NUMBERS: [(&str, &str); 4] = [
    (
        "rope.scaling.original_context_length",
        "original_max_position_embeddings",
    ),
    ("rope.scaling.yarn_beta_fast", "beta_fast"),
    ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ("attention.temperature_scale", "llama_4_scaling_beta"),
];

const MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

const LAYER_TENSORS: [(&str, &str); 7] = [
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
];

pub(crate) fn adapt(summary: &GgufSummary, kind: Kind) -> Result<GgufAdapter> {
    let experts = summary
        .opt_number("expert_count")?
        .and_then(|v| v.as_u64())
        .unwrap_or(0);
    if (experts > 0) != (kind == Kind::Mixtral) {
        return Err(Error::Unsupported {
            what: format!("a GGUF file with {experts} experts"),
            supported: "dense files are llama's, files with experts are mixtral's".to_owned(),
        });
    }
    let mut adapter = GgufAdapter::default();
    read_config(summary, kind, &mut adapter)?;
    let heads = count(summary, "attention.head_count")?;
    let kv_heads = read_kv_heads(summary, heads, &mut adapter)?;
    map_frame(summary, &mut adapter);
    let biased = summary.has("blk.0.attn_q.bias");
    adapter.set("attention_bias", biased);
    adapter.set("mlp_bias", summary.has("blk.0.ffn_gate.bias"));
    for layer in 0..count(summary, "block_count")? {
        map_layer(summary, &mut adapter, layer, heads, kv_heads);
        if kind == Kind::Mixtral {
            map_experts(&mut adapter, layer);
        }
    }
    Ok(adapter)
}

/// A small count of the metadata.
fn count(summary: &GgufSummary, key: &str) -> Result<usize> {
    summary.count(key, 4096)
}

fn read_kv_heads(summary: &GgufSummary, heads: usize, adapter: &mut GgufAdapter) -> Result<usize> {
    let kv_heads = if summary.opt_number("attention.head_count_kv")?.is_some() {
        count(summary, "attention.head_count_kv")?
    } else {
        heads
    };
    adapter.set("num_key_value_heads", kv_heads);
    let (from, to) = ("attention.head_count_kv", "num_key_value_heads");
    adapter.comes_from(summary, to, from)?;
    Ok(kv_heads)
}

/// Embedding, last norm, head, and factors of rotary frequencies.
fn map_frame(summary: &GgufSummary, adapter: &mut GgufAdapter) {
    adapter.map("token_embd.weight", "model.embed_tokens.weight");
    adapter.map("output_norm.weight", "model.norm.weight");
    let tied = !summary.has("output.weight");
    adapter.set("tie_word_embeddings", tied);
    if !tied {
        adapter.map("output.weight", "lm_head.weight");
    }
    if summary.has("rope_freqs.weight") {
        adapter.map("rope_freqs.weight", "model.rope_factors.weight");
    }
}

/// Sizes that the metadata lacks or has under more than one key.
fn read_sizes(summary: &GgufSummary, adapter: &mut GgufAdapter) -> Result<()> {
    adapter.set("vocab_size", summary.vocab_size()?);
    if adapter.take_some(summary, "attention.key_length", "head_dim")? {
        let width = count(summary, "attention.key_length")?;
        let whole = "as attention.key_length says and all features of a head are rotated";
        summary.repeats("rope.dimension_count", width, whole)?;
        summary.repeats("attention.value_length", width, "as wide as keys")?;
    } else {
        adapter.take_some(summary, "rope.dimension_count", "head_dim")?;
    }
    // llama.cpp has one default for all architectures, configuration classes have theirs.
    if !adapter.take_some(summary, "rope.freq_base", "rope_theta")? {
        adapter.set("rope_theta", 10_000.0);
    }
    Ok(())
}

fn read_config(summary: &GgufSummary, kind: Kind, adapter: &mut GgufAdapter) -> Result<()> {
    let model_type = match kind {
        Kind::Dense { model_type } => model_type,
        Kind::Mixtral => "mixtral",
    };
    adapter.set("model_type", model_type);
    for (from, to) in NUMBERS {
        adapter.take(summary, from, to)?;
    }
    read_sizes(summary, adapter)?;
    for (from, to) in [
        ("expert_count", "num_local_experts"),
        ("expert_used_count", "num_experts_per_tok"),
    ] {
        adapter.take_some(summary, from, to)?;
    }
    read_scaling(summary, adapter)
}

fn read_scaling(summary: &GgufSummary, adapter: &mut GgufAdapter) -> Result<()> {
    let Some(mut scaling) = summary.rope_scaling(&SCALING_NUMBERS)? else {
        return Ok(());
    };
    // With the multiplier the temperature of the softmax is on the scores and cancels out of the
    // embedding: the two `mscale` keys of the original are equal.
    if let Some(multiplier) = summary.opt_number(MULTIPLIER)? {
        scaling.insert("mscale".to_owned(), multiplier.clone());
        scaling.insert("mscale_all_dim".to_owned(), multiplier.clone());
        for key in ["mscale", "mscale_all_dim"] {
            let key = format!("rope_scaling.{key}");
            adapter.comes_from(summary, &key, MULTIPLIER)?;
        }
    }
    adapter.set_scaling(summary, scaling, &SCALING_NUMBERS)
}

fn map_layer(
    summary: &GgufSummary,
    adapter: &mut GgufAdapter,
    layer: usize,
    heads: usize,
    kv_heads: usize,
) {
    for part in ["weight", "bias"] {
        for (from, to, heads) in [("attn_q", "q_proj", heads), ("attn_k", "k_proj", kv_heads)] {
            let from = format!("blk.{layer}.{from}.{part}");
            if summary.has(&from) {
                let to = format!("model.layers.{layer}.self_attn.{to}.{part}");
                adapter.map_with(from, to, vec![GgufOp::UnpermuteRope { heads }]);
            }
        }
        for (from, to) in LAYER_TENSORS {
            let from = format!("blk.{layer}.{from}.{part}");
            if summary.has(&from) {
                adapter.map(from, format!("model.layers.{layer}.{to}.{part}"));
            }
        }
    }
}

fn map_experts(adapter: &mut GgufAdapter, layer: usize) {
    let to = format!("model.layers.{layer}.block_sparse_moe");
    adapter.map(
        format!("blk.{layer}.ffn_gate_inp.weight"),
        format!("{to}.gate.weight"),
    );
    for (from, name) in [
        ("gate", "gate_proj"),
        ("up", "up_proj"),
        ("down", "down_proj"),
    ] {
        adapter.map(
            format!("blk.{layer}.ffn_{from}_exps.weight"),
            format!("{to}.switch_mlp.{name}.weight"),
        );
    }
}
